/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_TRANSPORT_CUDA_MAPPING_H
#define ARL_TRANSPORT_CUDA_MAPPING_H

#include "transport/arl_transport.h"
#include "transport/cuda_api.h"

/* What the receivers of cuda_ipc and ring share: the sender's memory, mapped here. */

/* An allocation of the sender. Zero-initialised it is closed. */
typedef struct arl_cuda_mapping {
    uint8_t handle[ARL_OFFER_HANDLE_BYTES];
    uint64_t base_id;
    uint64_t size;
    const char *address; /* NULL: closed, or taken over by another record */
} arl_cuda_mapping_t;

/* Maps allocation `index` of the pull's offer and checks that it is as large as the offer says.
 * The device must be current. On failure the record may be open: close it. */
arl_status_t arl_cuda_mapping_open(const arl_pull_t *pull, const arl_cuda_device_t *device,
                                   uint32_t index, arl_cuda_mapping_t *mapping, arl_error_t *err);
void arl_cuda_mapping_close(const arl_cuda_device_t *device, arl_cuda_mapping_t *mapping);

/* Whether an open mapping is of this very allocation, told by the handle itself: memory that was
 * freed and allocated again has another one. */
bool arl_cuda_mapping_of(const arl_cuda_mapping_t *mapping, const arl_offer_alloc_t *alloc);

/* The device of everything that the plan writes to; -1 when it writes nothing. */
arl_status_t arl_cuda_find_destination(const arl_pull_t *pull, int *ordinal_p, arl_error_t *err);

/* Whether `device` may read the allocations of the offer: it is the sender's, or a peer of it. */
arl_status_t arl_cuda_check_units(const arl_pull_t *pull, const arl_cuda_device_t *device,
                                  arl_error_t *err);

#endif
