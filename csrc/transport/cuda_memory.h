/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_TRANSPORT_CUDA_MEMORY_H
#define ARL_TRANSPORT_CUDA_MEMORY_H

#include "core/arl_offer.h"
#include "core/arl_view.h"
#include "transport/cuda_api.h"

/*
 * Which allocations a set of tensors lies in. The driver is asked once for each allocation and
 * not once for each tensor: a model has hundreds of these in tens of those.
 */
typedef struct arl_cuda_ranges {
    const arl_cuda_api_t *api;
    arl_cuda_pointer_t *items; /* by base */
    size_t count, room;
} arl_cuda_ranges_t;

/*
 * The allocation that all elements of `view` lie in, which has some. Memory that is mapped in
 * pieces (VMM: expandable segments, pools that sleep) is asked about at both ends of each
 * tensor, every time, and is not entered in the table. ARL_ERR_VALUE names the tensor whose
 * memory is not there.
 */
arl_status_t arl_cuda_ranges_find(arl_cuda_ranges_t *ranges, const arl_view_t *view,
                                  const char *name, uint32_t name_length,
                                  arl_cuda_pointer_t *info_p, arl_error_t *err);

/* The number of the allocation with this base in the table, when all have been found. */
uint32_t arl_cuda_ranges_index(const arl_cuda_ranges_t *ranges, uintptr_t base);

void arl_cuda_ranges_free(arl_cuda_ranges_t *ranges);

/*
 * The IPC handle of an allocation of `device`, asked for once in its life: the driver never
 * gives a buffer id to a second allocation. ARL_ERR_UNAVAILABLE when the driver refuses.
 */
arl_status_t arl_cuda_memory_handle(const arl_cuda_device_t *device,
                                    const arl_cuda_pointer_t *allocation,
                                    uint8_t handle[ARL_OFFER_HANDLE_BYTES], arl_error_t *err);

/* How an offer names the device. */
arl_unit_t arl_cuda_unit(const arl_cuda_device_t *device);

#endif
