/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_view.h"

#include <stdio.h>

int64_t
arl_view_count(const arl_view_t *view)
{
    int64_t count = 1;

    for (int i = 0; i < view->ndim; i++) {
        if (view->shape[i] < 0) {
            return -1;
        }
        if (view->shape[i] == 0) {
            return 0; /* whatever the other sizes are */
        }
    }
    for (int i = 0; i < view->ndim; i++) {
        if (__builtin_mul_overflow(count, view->shape[i], &count)) {
            return -1;
        }
    }
    return count;
}

int64_t
arl_view_nbytes(const arl_view_t *view)
{
    int64_t nbytes = arl_view_count(view);

    if (nbytes < 0 || __builtin_mul_overflow(nbytes, (int64_t)view->itemsize, &nbytes)) {
        return -1;
    }
    return nbytes;
}

bool
arl_view_contiguous(const arl_view_t *view)
{
    int64_t expected = (int64_t)view->itemsize;

    if (arl_view_count(view) == 0) {
        return true;
    }
    for (int i = view->ndim - 1; i >= 0; i--) {
        if (view->shape[i] != 1 && view->strides[i] != expected) {
            return false;
        }
        expected *= view->shape[i];
    }
    return true;
}

void
arl_view_extent(const arl_view_t *view, int64_t *low_p, int64_t *high_p)
{
    int64_t low = 0, high = 0;

    if (arl_view_count(view) != 0) {
        high = (int64_t)view->itemsize;
        for (int i = 0; i < view->ndim; i++) {
            int64_t reach = (view->shape[i] - 1) * view->strides[i];

            if (reach < 0) {
                low += reach;
            }
            else {
                high += reach;
            }
        }
    }
    *low_p = low;
    *high_p = high;
}

void
arl_view_describe(const arl_view_t *view, char *text, size_t size)
{
    size_t used = 0;
    int n = snprintf(text, size, "%s[", arl_dtype_name(view->dtype));

    for (int i = 0; i < view->ndim && n >= 0; i++) {
        used += (size_t)n;
        if (used >= size) {
            return;
        }
        n = snprintf(text + used, size - used, "%s%lld", i == 0 ? "" : ", ",
                     (long long)view->shape[i]);
    }
    if (n >= 0) {
        used += (size_t)n;
        if (used < size) {
            (void)snprintf(text + used, size - used, "]");
        }
    }
}
