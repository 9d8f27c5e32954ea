/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_PLAN_H
#define ARL_CORE_PLAN_H

#include "core/arl_view.h"

/*
 * A copy plan: what a pull will write, decided and checked in full before the first byte moves.
 * It is plain data, so the same plan drives memcpy on the host, the segment kernel on a GPU and
 * the fakes in the tests.
 */

/*
 * One strided copy. `run_bytes` contiguous bytes, repeated over `ndim` outer dimensions
 * (outermost first). A dense tensor is one run (ndim 0); a column slice has one outer dimension;
 * a transposed tensor has runs of one element. Dimensions that are dense on both sides are
 * merged, sizes of 1 dropped, so equal layouts give equal copies.
 */
typedef struct arl_copy {
    uint32_t alloc;     /* index of the source allocation in the offer */
    uint32_t tensor;    /* index of the tensor in the offer, for messages */
    uint32_t binding;   /* index of the receiver's binding, for messages and checksums */
    int64_t src_offset; /* bytes from the start of that allocation to the first element */
    char *dst;          /* first element of the destination */
    int64_t run_bytes;
    int ndim;
    int64_t count[ARL_VIEW_DIMS_MAX];
    int64_t src_stride[ARL_VIEW_DIMS_MAX]; /* bytes */
    int64_t dst_stride[ARL_VIEW_DIMS_MAX]; /* bytes */
} arl_copy_t;

typedef struct arl_plan {
    arl_copy_t *copies;
    int64_t count;
    int64_t total_bytes; /* bytes written, all runs of all copies */
    uint64_t serial;     /* differs from that of every other plan that arl_plan_build made */
} arl_plan_t;

/*
 * Fills the run, counts and strides of `copy_p` for copying an array of `shape` and `itemsize`
 * between the two layouts. Returns false when an array of that shape has no elements (nothing
 * to copy). Destination strides of 0 over a size > 1 must have been refused before.
 */
bool arl_copy_shape(arl_copy_t *copy_p, size_t itemsize, int ndim, const int64_t *shape,
                    const int64_t *src_strides, const int64_t *dst_strides);

/* Bytes that one copy writes. */
int64_t arl_copy_bytes(const arl_copy_t *copy);

/* Runs one copy on the host, reading from `src_base + src_offset`. */
void arl_copy_run_host(const arl_copy_t *copy, const char *src_base);

/* Runs all of them, over several threads; bases[copy->alloc] is where an allocation is mapped
 * here. Fails, before the first byte, only for want of memory. Call it without the GIL. */
arl_status_t arl_plan_run_host(const arl_plan_t *plan, const char *const *bases, arl_error_t *err);

/* Frees the copies and empties the plan; safe on an empty one. `copies` is from malloc. */
void arl_plan_free(arl_plan_t *plan);

#endif
