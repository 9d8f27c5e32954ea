/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_VIEW_H
#define ARL_CORE_VIEW_H

#include "core/arl_dtype.h"
#include "core/arl_status.h"

enum { ARL_VIEW_DIMS_MAX = 8 };

typedef enum arl_device_type {
    ARL_DEVICE_CPU = 0,
    ARL_DEVICE_CUDA = 1,
    ARL_DEVICE_OTHER = 2, /* meta, xpu, …: recognised so that it can be refused by name */
} arl_device_type_t;

/*
 * A tensor as plain C sees it: no owner, no Python. `data` points at the first element (any
 * byte offset is already added in). Strides are in bytes, may be zero (expanded) or negative.
 */
typedef struct arl_view {
    void *data;
    arl_dtype_t dtype;
    size_t itemsize;
    int ndim;
    int64_t shape[ARL_VIEW_DIMS_MAX];
    int64_t strides[ARL_VIEW_DIMS_MAX];
    arl_device_type_t device_type;
    int device_index; /* 0 on the CPU */
    bool readonly;
} arl_view_t;

/* Number of elements, or -1 when the product of the sizes does not fit. */
int64_t arl_view_count(const arl_view_t *view);

/* Bytes of all elements when stored densely, or -1 when that does not fit in int64_t. */
int64_t arl_view_nbytes(const arl_view_t *view);

/* True when the elements lie densely in row-major order. Sizes of 0 and 1 need no stride. */
bool arl_view_contiguous(const arl_view_t *view);

/* Lowest and one-past-highest byte offset from `data` that the view touches; both 0 if empty. */
void arl_view_extent(const arl_view_t *view, int64_t *low_p, int64_t *high_p);

/* "bfloat16[1024, 64]", cut off with "…" when `size` is small; always terminated. */
void arl_view_describe(const arl_view_t *view, char *text, size_t size);

#endif
