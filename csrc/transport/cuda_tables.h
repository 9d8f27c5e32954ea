/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_TRANSPORT_CUDA_TABLES_H
#define ARL_TRANSPORT_CUDA_TABLES_H

#include "core/arl_plan.h"
#include "transport/cuda_api.h"
#include "transport/cuda_kernels.h"

/*
 * A list of copies in the form that the device wants: tables for the kernels, or a graph. All of
 * it is host-side arithmetic; cuda_copy.c moves the result.
 */

typedef struct arl_cuda_tables {
    arl_k_segment_t *segments;
    size_t segment_count, segment_room;
    arl_k_strided_t *strided;
    size_t strided_count, strided_room;
    arl_k_item_t *items;
    size_t item_count, item_room;
} arl_cuda_tables_t;

/*
 * Runs that are long enough become segments, however they are spread; shorter ones strided
 * entries. On failure the tables hold what was made so far, to be freed all the same.
 */
arl_status_t arl_cuda_tables_build(arl_cuda_tables_t *tables, const arl_copy_t *copies,
                                   int64_t count, arl_error_t *err);
void arl_cuda_tables_free(arl_cuda_tables_t *tables);

/* Makes room for one more entry of a growing array; false when out of memory. */
bool arl_cuda_table_reserve(void **array, size_t *room, size_t count, size_t entry_size);

/*
 * An executable graph of memcpy nodes, without order among them. With the device's context
 * current. ARL_ERR_UNAVAILABLE when the copies are so scattered that it would take millions.
 */
arl_status_t arl_cuda_graph_build(const arl_cuda_device_t *device, const arl_copy_t *copies,
                                  int64_t count, const uintptr_t *bases,
                                  arl_cu_graph_exec_t *graph_p, arl_error_t *err);

/* The kernels' PTX text. */
const char *arl_kernels_ptx(void);

#endif
