/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/cuda_mapping.h"

#include "transport/cuda_memory.h"

#include <string.h>

static const char PULL[] = "pull";

static arl_status_t
map_error(const arl_pull_t *pull, const arl_cuda_device_t *device, uint32_t index,
          arl_cu_result_t result, arl_error_t *err)
{
    const arl_offer_alloc_t *alloc = &pull->offer->allocs[index];

    if (pull->control != NULL) { /* the usual reason: the sender is gone, or has ended the offer */
        arl_status_t status = arl_control_check_sender(pull->control, err);

        if (status != ARL_OK) {
            return status;
        }
    }
    return arl_cuda_error_set(device->api, err, ARL_ERR_SYNC, result, "cuIpcOpenMemHandle",
                              "allocation %u of %u, %llu bytes, of process %lld on %s cannot be "
                              "mapped on device %d (%s); did the sender free it, or is this "
                              "process not allowed to (container with another IPC namespace, too "
                              "many mappings)?",
                              index, pull->offer->alloc_count, (unsigned long long)alloc->size,
                              (long long)pull->offer->sender.pid, pull->offer->host,
                              device->ordinal, device->name);
}

arl_status_t
arl_cuda_mapping_open(const arl_pull_t *pull, const arl_cuda_device_t *device, uint32_t index,
                      arl_cuda_mapping_t *mapping, arl_error_t *err)
{
    const arl_offer_alloc_t *alloc = &pull->offer->allocs[index];
    arl_cuda_pointer_t info;
    arl_cu_ipc_handle_t handle;
    arl_cu_ptr_t address = 0;
    arl_cu_result_t result;
    arl_status_t status;

    memcpy(handle.reserved, alloc->handle, sizeof(handle.reserved));
    result =
        device->api->cuIpcOpenMemHandle_v2(&address, handle, ARL_CUDA_IPC_LAZY_ENABLE_PEER_ACCESS);
    if (result != ARL_CUDA_SUCCESS) {
        return map_error(pull, device, index, result, err);
    }
    mapping->address = (const char *)address;
    memcpy(mapping->handle, alloc->handle, sizeof(mapping->handle));
    mapping->base_id = alloc->base_id;
    mapping->size = alloc->size;
    status =
        arl_cuda_pointer_query(device->api, mapping->address, "the mapped allocation", &info, err);
    if (status == ARL_OK && (info.base > (uintptr_t)address ||
                             info.size - ((uintptr_t)address - info.base) < alloc->size)) {
        status = arl_error_set(err, ARL_ERR_SYNC, PULL,
                               "allocation %u is %zu bytes long, the offer says %llu", index,
                               info.size, (unsigned long long)alloc->size);
    }
    return status;
}

void
arl_cuda_mapping_close(const arl_cuda_device_t *device, arl_cuda_mapping_t *mapping)
{
    if (mapping->address != NULL) {
        const bool entered = arl_cuda_device_enter(device);

        /* It fails when the context is broken, and then nothing is mapped any more. */
        (void)device->api->cuIpcCloseMemHandle((arl_cu_ptr_t)mapping->address);
        arl_cuda_device_leave(device, entered);
        mapping->address = NULL;
    }
}

bool
arl_cuda_mapping_of(const arl_cuda_mapping_t *mapping, const arl_offer_alloc_t *alloc)
{
    return mapping->address != NULL && mapping->base_id == alloc->base_id &&
           mapping->size == alloc->size &&
           memcmp(mapping->handle, alloc->handle, sizeof(mapping->handle)) == 0;
}

arl_status_t
arl_cuda_find_destination(const arl_pull_t *pull, int *ordinal_p, arl_error_t *err)
{
    arl_cuda_ranges_t ranges = {0};
    int ordinal = -1;
    arl_status_t status = arl_cuda_load(&ranges.api, err);

    for (int64_t i = 0; i < pull->plan->count && status == ARL_OK; i++) {
        const arl_copy_t *copy = &pull->plan->copies[i];
        const arl_offer_tensor_t *tensor = &pull->offer->tensors[copy->tensor];
        arl_cuda_pointer_t info;
        arl_view_t box = {
            .data = copy->dst, .itemsize = (size_t)copy->run_bytes, .ndim = copy->ndim};

        memcpy(box.shape, copy->count, sizeof(box.shape));
        memcpy(box.strides, copy->dst_stride, sizeof(box.strides));
        status = arl_cuda_ranges_find(&ranges, &box, tensor->name, tensor->name_length, &info, err);
        if (status == ARL_OK && ordinal >= 0 && info.ordinal != ordinal) {
            status = arl_error_set(err, ARL_ERR_VALUE, PULL,
                                   "the parameters are on devices %d and %d (%.*s); use one "
                                   "receiver for each device",
                                   ordinal, info.ordinal, (int)tensor->name_length, tensor->name);
        }
        if (status == ARL_OK) {
            ordinal = info.ordinal;
        }
    }
    arl_cuda_ranges_free(&ranges);
    *ordinal_p = ordinal;
    return status;
}

arl_status_t
arl_cuda_check_units(const arl_pull_t *pull, const arl_cuda_device_t *device, arl_error_t *err)
{
    char theirs[ARL_CUDA_UUID_TEXT], ours[ARL_CUDA_UUID_TEXT];
    const arl_unit_t *unit = &pull->offer->unit;
    arl_cuda_device_t peer = {0};
    int can = 0;

    for (uint32_t i = 0; i < pull->offer->alloc_count; i++) {
        const arl_offer_alloc_t *alloc = &pull->offer->allocs[i];

        if (alloc->kind != ARL_ALLOC_CUDA_IPC ||
            memcmp(alloc->unit.uuid, unit->uuid, sizeof(unit->uuid)) != 0) {
            return arl_error_set(err, ARL_ERR_SYNC, PULL,
                                 "offer is not valid: allocation %u is not GPU memory of the "
                                 "sender's device",
                                 i);
        }
    }
    if (memcmp(unit->uuid, device->uuid, sizeof(unit->uuid)) == 0) {
        return ARL_OK;
    }
    if (arl_cuda_device_find(unit->uuid, &peer, NULL) == ARL_OK &&
        device->api->cuDeviceCanAccessPeer(&can, device->device, peer.device) == ARL_CUDA_SUCCESS &&
        can) {
        return ARL_OK;
    }
    arl_cuda_uuid_text(unit->uuid, theirs);
    arl_cuda_uuid_text(device->uuid, ours);
    return arl_error_set(err, ARL_ERR_UNAVAILABLE, PULL,
                         "the offer is of memory on %s (device %d of %s), the parameters here are "
                         "on %s (device %d), which cannot read it: the other device is not visible "
                         "in this process (CUDA_VISIBLE_DEVICES), or there is no peer access "
                         "between them; put both on one GPU, or use nccl",
                         theirs, unit->index, pull->offer->host, ours, device->ordinal);
}
