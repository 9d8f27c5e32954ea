/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_overlap.h"

#include "core/arl_plan.h"

#include <string.h>

enum { BUDGET = 100000 }; /* steps; a fraction of a millisecond */

/* A view as runs of bytes from its lowest address on, strides positive and falling. */
typedef struct region {
    uintptr_t base;
    int64_t run;
    int ndim;
    int64_t count[ARL_VIEW_DIMS_MAX];
    int64_t stride[ARL_VIEW_DIMS_MAX];
} region_t;

/* False when the view is empty. */
static bool
region_from_view(const arl_view_t *view, region_t *region_p)
{
    int64_t strides[ARL_VIEW_DIMS_MAX], low, high;
    arl_copy_t copy;

    for (int i = 0; i < view->ndim; i++) {
        strides[i] = view->strides[i] < 0 ? -view->strides[i] : view->strides[i];
    }
    if (!arl_copy_shape(&copy, view->itemsize, view->ndim, view->shape, strides, strides)) {
        return false;
    }
    arl_view_extent(view, &low, &high);
    region_p->base = (uintptr_t)view->data + (uintptr_t)low;
    region_p->run = copy.run_bytes;
    region_p->ndim = copy.ndim;
    memcpy(region_p->count, copy.count, sizeof(copy.count));
    memcpy(region_p->stride, copy.dst_stride, sizeof(copy.dst_stride));
    return true;
}

/* Bytes from the first to the last one of dimensions `level` and inward. */
static int64_t
region_extent(const region_t *region, int level)
{
    int64_t extent = region->run;

    for (int i = level; i < region->ndim; i++) {
        extent += (region->count[i] - 1) * region->stride[i];
    }
    return extent;
}

bool
arl_overlap_self(const arl_view_t *view)
{
    region_t region;

    if (!region_from_view(view, &region)) {
        return false;
    }
    for (int i = 0; i < region.ndim; i++) {
        if (region.stride[i] < region_extent(&region, i + 1)) {
            return true;
        }
    }
    return false;
}

static int64_t
floor_div(int64_t a, int64_t b) /* b > 0 */
{
    return a / b - (a % b < 0);
}

/* `delta`: where dimensions b.. of `b` begin, seen from where dimensions a.. of `a` begin. */
static bool
regions_meet(const region_t *a, int la, const region_t *b, int lb, int64_t delta, int *budget)
{
    const int64_t extent_a = region_extent(a, la), extent_b = region_extent(b, lb);

    if (delta >= extent_a || -delta >= extent_b) {
        return false;
    }
    if (--*budget <= 0 || (la == a->ndim && lb == b->ndim)) {
        return true;
    }
    if (la < a->ndim && lb < b->ndim && a->stride[la] == b->stride[lb]) {
        /* Rows at the same distance: only the difference of their numbers matters, and only
         * the few differences for which the rows themselves come close. */
        const int64_t stride = a->stride[la];
        int64_t first = floor_div(-region_extent(b, lb + 1) - delta, stride) + 1;
        int64_t last = floor_div(region_extent(a, la + 1) - 1 - delta, stride);

        first = first < -(a->count[la] - 1) ? -(a->count[la] - 1) : first;
        last = last > b->count[lb] - 1 ? b->count[lb] - 1 : last;
        for (int64_t d = first; d <= last; d++) {
            if (regions_meet(a, la + 1, b, lb + 1, delta + d * stride, budget)) {
                return true;
            }
        }
        return false;
    }
    if (lb == b->ndim || (la < a->ndim && a->stride[la] > b->stride[lb])) {
        for (int64_t i = 0; i < a->count[la]; i++) {
            if (regions_meet(a, la + 1, b, lb, delta - i * a->stride[la], budget)) {
                return true;
            }
        }
        return false;
    }
    return regions_meet(b, lb, a, la, -delta, budget);
}

bool
arl_overlap_views(const arl_view_t *a, const arl_view_t *b)
{
    region_t ra, rb;
    int budget = BUDGET;
    int64_t delta;

    if (!region_from_view(a, &ra) || !region_from_view(b, &rb)) {
        return false;
    }
    /* Addresses are below 2^63 on every system this runs on. */
    delta = (int64_t)(rb.base - ra.base);
    return regions_meet(&ra, 0, &rb, 0, delta, &budget);
}

bool
arl_overlap_same(const arl_view_t *a, const arl_view_t *b)
{
    const size_t size = (size_t)a->ndim * sizeof(a->shape[0]);

    return a->data == b->data && a->dtype == b->dtype && a->ndim == b->ndim &&
           memcmp(a->shape, b->shape, size) == 0 && memcmp(a->strides, b->strides, size) == 0;
}
