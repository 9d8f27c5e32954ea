/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_TRANSPORT_CUDA_KERNELS_H
#define ARL_TRANSPORT_CUDA_KERNELS_H

/*
 * What the host and the kernels (kernels/arl_kernels.cu) share: the layout of their tables.
 * Plain fixed-width types only, since nvcc reads this file too.
 */

typedef unsigned int arl_k_u32;
typedef unsigned long long arl_k_u64;
typedef long long arl_k_i64;

enum {
    ARL_K_DIMS = 8,              /* as ARL_VIEW_DIMS_MAX */
    ARL_K_SEGMENT_BYTES = 65536, /* most bytes of one segment */
    ARL_K_ITEM_UNITS = 8192,     /* most units of one item of the strided kernel */
    ARL_K_ITEM_WORDS = 8192,     /* most 8-byte words of one item of the checksum kernel */
};

/* A run of bytes to copy: from bases[base] + src_offset to dst. */
typedef struct arl_k_segment {
    arl_k_u64 src_offset;
    arl_k_u64 dst;
    arl_k_u32 nbytes;
    arl_k_u32 base;
} arl_k_segment_t;

/*
 * A strided copy in units of 1, 2, 4, 8 or 16 bytes: `row_units` of them side by side, repeated
 * over `ndim` outer dimensions, outermost first. All addresses and strides are multiples of the
 * unit, and there are fewer than 2^32 units.
 */
typedef struct arl_k_strided {
    arl_k_u64 src_offset;
    arl_k_u64 dst;
    arl_k_u32 base;
    arl_k_u32 unit;
    arl_k_u32 row_units;
    arl_k_u32 ndim;
    arl_k_u32 count[ARL_K_DIMS];
    arl_k_i64 src_stride[ARL_K_DIMS];
    arl_k_i64 dst_stride[ARL_K_DIMS];
} arl_k_strided_t;

/* Units [first, first + count) of one strided copy (or words of one array to be summed). */
typedef struct arl_k_item {
    arl_k_u32 entry;
    arl_k_u32 count;
    arl_k_u64 first;
} arl_k_item_t;

/* An array to be summed, in row-major order of its own; `dense` arrays use data and nbytes. */
typedef struct arl_k_array {
    arl_k_u64 data;
    arl_k_u64 nbytes;
    arl_k_u32 itemsize;
    arl_k_u32 dense;
    arl_k_u32 ndim;
    arl_k_u32 reserved;
    arl_k_u64 count[ARL_K_DIMS];
    arl_k_i64 stride[ARL_K_DIMS];
} arl_k_array_t;

/* Entry points. */
#define ARL_K_COPY_SEGMENTS "arl_copy_segments"
#define ARL_K_COPY_STRIDED "arl_copy_strided"
#define ARL_K_CHECKSUM "arl_checksum"

#endif
