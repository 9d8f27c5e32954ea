/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/cuda_memory.h"

#include "core/arl_hash.h"
#include "transport/cuda_tables.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- ranges --------------------------------------------------------------------------------- */

/* How many of the known allocations begin at or before `address`. */
static size_t
ranges_before(const arl_cuda_ranges_t *ranges, uintptr_t address)
{
    size_t low = 0, high = ranges->count;

    while (low < high) {
        const size_t middle = low + (high - low) / 2;

        if (ranges->items[middle].base <= address) {
            low = middle + 1;
        }
        else {
            high = middle;
        }
    }
    return low;
}

static bool
range_holds(const arl_cuda_pointer_t *range, uintptr_t address, uint64_t size)
{
    return address >= range->base && address - range->base <= range->size &&
           size <= range->size - (address - range->base);
}

static arl_status_t
ranges_add(arl_cuda_ranges_t *ranges, const arl_cuda_pointer_t *info, arl_error_t *err)
{
    const size_t at = ranges_before(ranges, info->base);

    if (at > 0 && ranges->items[at - 1].base == info->base) {
        return ARL_OK; /* there already: the tensor leaves it, which is reported next */
    }
    if (!arl_cuda_table_reserve((void **)&ranges->items, &ranges->room, ranges->count,
                                sizeof(*ranges->items))) {
        return arl_error_set_errno(err, "query memory", ENOMEM, "a table of %zu allocations",
                                   ranges->count);
    }
    memmove(&ranges->items[at + 1], &ranges->items[at],
            (ranges->count - at) * sizeof(*ranges->items));
    ranges->items[at] = *info;
    ranges->count++;
    return ARL_OK;
}

arl_status_t
arl_cuda_ranges_find(arl_cuda_ranges_t *ranges, const arl_view_t *view, const char *name,
                     uint32_t name_length, arl_cuda_pointer_t *info_p, arl_error_t *err)
{
    arl_cuda_pointer_t info, end;
    char what[128];
    int64_t low, high;
    uintptr_t first;
    size_t before;
    arl_status_t status;

    arl_view_extent(view, &low, &high);
    first = (uintptr_t)view->data + (uintptr_t)low;
    before = ranges_before(ranges, first);
    if (before > 0 && range_holds(&ranges->items[before - 1], first, (uint64_t)(high - low))) {
        *info_p = ranges->items[before - 1];
        return ARL_OK;
    }
    (void)snprintf(what, sizeof(what), "%.*s", (int)(name_length < 120 ? name_length : 120), name);
    status = arl_cuda_pointer_query(ranges->api, (const void *)first, what, &info, err);
    if (status == ARL_OK && info.legacy_ipc) {
        status = ranges_add(ranges, &info, err);
    }
    else if (status == ARL_OK) { /* mapped in pieces: that the ends are there is all to be had */
        status = arl_cuda_pointer_query(
            ranges->api, (const void *)(first + (uintptr_t)(high - low) - 1), what, &end, err);
    }
    if (status == ARL_OK && info.legacy_ipc && !range_holds(&info, first, (uint64_t)(high - low))) {
        status = arl_error_set(err, ARL_ERR_VALUE, "query memory",
                               "%s: its %lld bytes leave the allocation of %zu bytes that they "
                               "begin in",
                               what, (long long)(high - low), info.size);
    }
    if (status == ARL_OK) {
        *info_p = info;
    }
    return status;
}

uint32_t
arl_cuda_ranges_index(const arl_cuda_ranges_t *ranges, uintptr_t base)
{
    return (uint32_t)(ranges_before(ranges, base) - 1);
}

void
arl_cuda_ranges_free(arl_cuda_ranges_t *ranges)
{
    free(ranges->items);
    ranges->items = NULL;
    ranges->count = ranges->room = 0;
}

/* ---- handles -------------------------------------------------------------------------------- */

enum { HANDLES = 1024 };

/* Every allocation has one place in it, and a newer one may take it: then the driver is asked
 * again. An entry whose allocation is gone is never asked for, as its id is not used again. */
static struct {
    uint64_t buffer_id;
    uintptr_t base;
    uint8_t handle[ARL_OFFER_HANDLE_BYTES];
} handles[HANDLES];
static pthread_mutex_t handles_lock = PTHREAD_MUTEX_INITIALIZER;

static bool
handle_recall(const arl_cuda_pointer_t *allocation, size_t place, uint8_t *handle)
{
    bool known;

    (void)pthread_mutex_lock(&handles_lock);
    known = handles[place].buffer_id == allocation->buffer_id &&
            handles[place].base == allocation->base;
    if (known) {
        memcpy(handle, handles[place].handle, ARL_OFFER_HANDLE_BYTES);
    }
    (void)pthread_mutex_unlock(&handles_lock);
    return known;
}

static void
handle_remember(const arl_cuda_pointer_t *allocation, size_t place, const uint8_t *handle)
{
    (void)pthread_mutex_lock(&handles_lock);
    handles[place].buffer_id = allocation->buffer_id;
    handles[place].base = allocation->base;
    memcpy(handles[place].handle, handle, ARL_OFFER_HANDLE_BYTES);
    (void)pthread_mutex_unlock(&handles_lock);
}

arl_status_t
arl_cuda_memory_handle(const arl_cuda_device_t *device, const arl_cuda_pointer_t *allocation,
                       uint8_t handle[ARL_OFFER_HANDLE_BYTES], arl_error_t *err)
{
    const size_t place = (size_t)(arl_hash_mix(allocation->buffer_id) % HANDLES);
    arl_cu_ipc_handle_t made;
    arl_cu_result_t result;
    arl_status_t status;

    if (handle_recall(allocation, place, handle)) {
        return ARL_OK;
    }
    status = arl_cuda_device_push(device, err);
    if (status != ARL_OK) {
        return status;
    }
    result = device->api->cuIpcGetMemHandle(&made, (arl_cu_ptr_t)allocation->base);
    arl_cuda_device_pop(device);
    if (result != ARL_CUDA_SUCCESS) {
        return arl_cuda_error_set(
            device->api, err, ARL_ERR_UNAVAILABLE, result, "cuIpcGetMemHandle",
            "device %d (%s) makes no handle of %zu bytes at 0x%llx; CUDA IPC "
            "does not work on this platform (WSL2, Tegra, some MIG slices) "
            "or for this memory: use host_shm (CPU copies) or nccl",
            device->ordinal, device->name, allocation->size, (unsigned long long)allocation->base);
    }
    memcpy(handle, made.reserved, ARL_OFFER_HANDLE_BYTES);
    handle_remember(allocation, place, handle);
    return ARL_OK;
}

_Static_assert(sizeof(arl_cu_ipc_handle_t) == ARL_OFFER_HANDLE_BYTES, "a handle fits an offer");

arl_unit_t
arl_cuda_unit(const arl_cuda_device_t *device)
{
    arl_unit_t unit = {
        /* The driver has no other sign of it, short of NVML. */
        .kind = strstr(device->name, " MIG ") != NULL ? ARL_UNIT_MIG : ARL_UNIT_GPU,
        .index = device->ordinal,
    };

    memcpy(unit.uuid, device->uuid, sizeof(unit.uuid));
    return unit;
}
