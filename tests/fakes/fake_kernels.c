/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs the kernels' own source on the CPU, one thread of the grid after the other. That proves
 * their arithmetic; what only a GPU can show (coalescing, the warp's sum) is for the GPU tests.
 */
#include "fake_cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct dim {
    unsigned int x;
} dim_t;

static dim_t threadIdx, blockIdx, blockDim, gridDim; /* the fake's lock is held while they run */

static void
check_aligned(const void *pointer, size_t size)
{
    if ((uintptr_t)pointer % size != 0) {
        fake_misuse("kernel accesses %zu bytes at %p", size, pointer);
        abort();
    }
}

typedef struct v16 {
    unsigned long long low, high;
} arl_k_v16_t;

#define ARL_K_ENTRY static void
#define ARL_K_INLINE static inline
#define ARL_K_UNROLL
#define ARL_K_ROLLED
/* Wide accesses must be aligned, which this CPU may forgive and a GPU does not. */
#define ARL_K_LOAD(pointer) (check_aligned(pointer, sizeof(*(pointer))), *(pointer))
#define ARL_K_STORE(pointer, value)                                                                \
    (check_aligned(pointer, sizeof(*(pointer))), *(pointer) = (value))
#define ARL_K_ADD(pointer, value) (*(pointer) += (value))
#define ARL_K_IS_FIRST_LANE 1 /* every lane adds its own */
#define arl_k_warp_sum(value) (value)

#include "transport/kernels/arl_kernels.cu"

typedef struct launch {
    int kernel;
    unsigned grid, block;
    unsigned long long params[4];
} launch_t;

enum { COPY_SEGMENTS, COPY_STRIDED, CHECKSUM, KERNEL_COUNT };

static const struct {
    const char *name;
    int params;
} kernels[KERNEL_COUNT] = {
    [COPY_SEGMENTS] = {ARL_K_COPY_SEGMENTS, 3},
    [COPY_STRIDED] = {ARL_K_COPY_STRIDED, 4},
    [CHECKSUM] = {ARL_K_CHECKSUM, 4},
};

int
fake_kernel_find(const char *image, const char *name)
{
    char entry[64];

    (void)snprintf(entry, sizeof(entry), ".entry %s", name);
    if (strstr(image, entry) == NULL) {
        return -1;
    }
    for (int i = 0; i < KERNEL_COUNT; i++) {
        if (strcmp(kernels[i].name, name) == 0) {
            return i;
        }
    }
    return -1;
}

/* All parameters but the last, a 32-bit count, are pointers. */
void *
fake_kernel_prepare(int kernel, unsigned grid, unsigned block, void **params)
{
    launch_t *launch = calloc(1, sizeof(*launch));
    unsigned int count;

    if (launch == NULL) {
        return NULL;
    }
    launch->kernel = kernel;
    launch->grid = grid;
    launch->block = block;
    for (int i = 0; i < kernels[kernel].params - 1; i++) {
        memcpy(&launch->params[i], params[i], sizeof(launch->params[i]));
    }
    memcpy(&count, params[kernels[kernel].params - 1], sizeof(count));
    launch->params[kernels[kernel].params - 1] = count;
    return launch;
}

static void
run_thread(const launch_t *launch)
{
    const unsigned long long *p = launch->params;

    switch (launch->kernel) {
    case COPY_SEGMENTS:
        arl_copy_segments((const arl_k_segment_t *)p[0], (const arl_k_u64 *)p[1], (arl_k_u32)p[2]);
        break;
    case COPY_STRIDED:
        arl_copy_strided((const arl_k_strided_t *)p[0], (const arl_k_item_t *)p[1],
                         (const arl_k_u64 *)p[2], (arl_k_u32)p[3]);
        break;
    default:
        arl_checksum((const arl_k_array_t *)p[0], (const arl_k_item_t *)p[1], (arl_k_u64 *)p[2],
                     (arl_k_u32)p[3]);
        break;
    }
}

bool
fake_kernel_run(void *context)
{
    const launch_t *launch = context;

    gridDim.x = launch->grid;
    blockDim.x = launch->block;
    for (blockIdx.x = 0; blockIdx.x < launch->grid; blockIdx.x++) {
        for (threadIdx.x = 0; threadIdx.x < launch->block; threadIdx.x++) {
            run_thread(launch);
        }
    }
    return true;
}
