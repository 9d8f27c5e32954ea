/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_hash.h"
#include "transport/cuda_copy.h"
#include "transport/cuda_tables.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Whole warps, as the kernel's sum over a warp needs. */
enum { THREADS = 256, BLOCKS_PER_SM = 8 };

typedef struct sums {
    arl_k_array_t *arrays;
    arl_k_item_t *items;
    size_t item_count, item_room;
    arl_cu_ptr_t memory; /* arrays, items, sums */
    arl_cu_ptr_t device_items, device_sums;
    bool busy; /* the device did not finish in time */
} sums_t;

static arl_status_t
sums_add_items(sums_t *sums, uint32_t entry, uint64_t nbytes, arl_error_t *err)
{
    const uint64_t words = nbytes / 8 + (nbytes % 8 != 0);

    for (uint64_t first = 0; first < words; first += ARL_K_ITEM_WORDS) {
        const uint64_t left = words - first;

        if (sums->item_count >= UINT32_MAX ||
            !arl_cuda_table_reserve((void **)&sums->items, &sums->item_room, sums->item_count,
                                    sizeof(*sums->items))) {
            return arl_error_set_errno(err, "checksum", ENOMEM, "a table of %zu items",
                                       sums->item_count);
        }
        sums->items[sums->item_count++] = (arl_k_item_t){
            .entry = entry,
            .count = (arl_k_u32)(left < ARL_K_ITEM_WORDS ? left : ARL_K_ITEM_WORDS),
            .first = first,
        };
    }
    return ARL_OK;
}

static arl_status_t
sums_prepare(sums_t *sums, const arl_view_t *views, int64_t count, arl_error_t *err)
{
    sums->arrays = calloc((size_t)count, sizeof(*sums->arrays));
    if (sums->arrays == NULL) {
        return arl_error_set_errno(err, "checksum", errno, "%lld arrays", (long long)count);
    }
    for (int64_t i = 0; i < count; i++) {
        arl_k_array_t *array = &sums->arrays[i];
        arl_status_t status;

        array->data = (uintptr_t)views[i].data;
        array->nbytes = (arl_k_u64)arl_view_nbytes(&views[i]);
        array->itemsize = (arl_k_u32)views[i].itemsize;
        array->dense = arl_view_contiguous(&views[i]);
        array->ndim = (arl_k_u32)views[i].ndim;
        for (int d = 0; d < views[i].ndim; d++) {
            array->count[d] = (arl_k_u64)views[i].shape[d];
            array->stride[d] = views[i].strides[d];
        }
        status = sums_add_items(sums, (uint32_t)i, array->nbytes, err);
        if (status != ARL_OK) {
            return status;
        }
    }
    return ARL_OK;
}

/* Uploads the tables and zeros for the sums, and launches. Returns the call that failed. */
static const char *
sums_enqueue(sums_t *sums, const arl_cuda_engine_t *engine, int64_t count, const uint64_t *zeros,
             arl_cu_result_t *result)
{
    const arl_cuda_api_t *api = engine->device.api;
    const size_t array_bytes = (size_t)count * sizeof(*sums->arrays);
    const size_t item_bytes = sums->item_count * sizeof(*sums->items);
    const size_t sum_bytes = (size_t)count * sizeof(*zeros);
    const unsigned int most = (unsigned int)engine->device.sm_count * BLOCKS_PER_SM;
    uint32_t item_count = (uint32_t)sums->item_count;
    void *params[] = {&sums->memory, &sums->device_items, &sums->device_sums, &item_count};

    *result = api->cuMemAlloc_v2(&sums->memory, array_bytes + item_bytes + sum_bytes);
    if (*result != ARL_CUDA_SUCCESS) {
        sums->memory = 0;
        return "cuMemAlloc";
    }
    sums->device_items = sums->memory + array_bytes;
    sums->device_sums = sums->device_items + item_bytes;
    *result =
        api->cuMemcpyAsync(sums->memory, (arl_cu_ptr_t)sums->arrays, array_bytes, engine->stream);
    if (*result == ARL_CUDA_SUCCESS) {
        *result = api->cuMemcpyAsync(sums->device_items, (arl_cu_ptr_t)sums->items, item_bytes,
                                     engine->stream);
    }
    if (*result == ARL_CUDA_SUCCESS) {
        *result =
            api->cuMemcpyAsync(sums->device_sums, (arl_cu_ptr_t)zeros, sum_bytes, engine->stream);
    }
    if (*result != ARL_CUDA_SUCCESS) {
        return "cuMemcpyAsync";
    }
    *result = api->cuLaunchKernel(engine->checksum, item_count < most ? item_count : most, 1, 1,
                                  THREADS, 1, 1, 0, engine->stream, params, NULL);
    return "cuLaunchKernel";
}

static arl_status_t
sums_error(const arl_cuda_device_t *device, arl_cu_result_t result, const char *step, int64_t count,
           arl_error_t *err)
{
    return arl_cuda_error_set(device->api, err, ARL_ERR_SYNC, result, step,
                              "checksums of %lld tensors on device %d (%s)", (long long)count,
                              device->ordinal, device->name);
}

/* The results are fetched only when they are there: a copy into pageable memory keeps its caller
 * until it is done, whatever the deadline. */
static arl_status_t
sums_run(sums_t *sums, const arl_cuda_engine_t *engine, int64_t count, arl_deadline_t *deadline,
         uint64_t *results, arl_error_t *err)
{
    const arl_cuda_device_t *device = &engine->device;
    arl_cu_result_t result;
    const char *step;
    arl_status_t status = arl_cuda_device_push(device, err), waited;

    if (status != ARL_OK) {
        return status;
    }
    memset(results, 0, (size_t)count * sizeof(*results));
    step = sums_enqueue(sums, engine, count, results, &result);
    if (result != ARL_CUDA_SUCCESS) {
        status = sums_error(device, result, step, count, err);
    }
    /* Also after a failure: what was enqueued before it uses the tables. */
    waited = arl_cuda_stream_wait(device, engine->stream, deadline, NULL, NULL, "checksums", err);
    sums->busy = waited == ARL_ERR_TIMEOUT;
    status = status == ARL_OK ? waited : status;
    if (status == ARL_OK) {
        result = device->api->cuMemcpyAsync((arl_cu_ptr_t)results, sums->device_sums,
                                            (size_t)count * sizeof(*results), engine->stream);
        if (result == ARL_CUDA_SUCCESS) {
            status = arl_cuda_stream_wait(device, engine->stream, deadline, NULL, NULL,
                                          "checksums to the host", err);
        }
        else {
            status = sums_error(device, result, "cuMemcpyAsync", count, err);
        }
    }
    arl_cuda_device_pop(device);
    return status;
}

static void
sums_free(sums_t *sums, const arl_cuda_device_t *device)
{
    /* Freeing waits for the device; one that hangs keeps its memory. */
    if (sums->memory != 0 && !sums->busy) {
        const bool entered = arl_cuda_device_enter(device);

        (void)device->api->cuMemFree_v2(sums->memory);
        arl_cuda_device_leave(device, entered);
    }
    free(sums->arrays);
    free(sums->items);
}

/* ---- without kernels ------------------------------------------------------------------------ */

static arl_status_t
checksum_on_host(const arl_cuda_engine_t *engine, const arl_view_t *view, arl_deadline_t *deadline,
                 uint64_t *sum_p, arl_error_t *err)
{
    const arl_cuda_device_t *device = &engine->device;
    arl_view_t copy = *view;
    int64_t low, high;
    arl_cu_result_t result;
    arl_status_t status;
    char *bytes;

    arl_view_extent(view, &low, &high);
    bytes = malloc((size_t)(high - low) + 1);
    if (bytes == NULL) {
        return arl_error_set_errno(err, "checksum", errno, "%lld bytes", (long long)(high - low));
    }
    /* First under the deadline: the copy itself keeps its caller until it is done. */
    ARL_CHECK_GOTO(
        status, arl_cuda_stream_wait(device, engine->stream, deadline, NULL, NULL, "checksum", err),
        free_bytes);
    ARL_CHECK_GOTO(status, arl_cuda_device_push(device, err), free_bytes);
    result = device->api->cuMemcpyAsync((arl_cu_ptr_t)bytes, (arl_cu_ptr_t)view->data + (size_t)low,
                                        (size_t)(high - low), engine->stream);
    arl_cuda_device_pop(device);
    if (result != ARL_CUDA_SUCCESS) {
        status = arl_cuda_error_set(device->api, err, ARL_ERR_SYNC, result, "cuMemcpyAsync",
                                    "a tensor of %lld bytes to the host", (long long)(high - low));
        goto free_bytes;
    }
    status = arl_cuda_stream_wait(device, engine->stream, deadline, NULL, NULL, "checksum", err);
    if (status == ARL_ERR_TIMEOUT) {
        return status; /* the device may still write to `bytes`: better lost than freed */
    }
    if (status != ARL_OK) {
        goto free_bytes;
    }
    copy.data = bytes - low;
    copy.device_type = ARL_DEVICE_CPU;
    *sum_p = arl_checksum_view(&copy);

free_bytes:
    free(bytes);
    return status;
}

/* ---- public --------------------------------------------------------------------------------- */

arl_status_t
arl_cuda_checksum(const arl_cuda_engine_t *engine, const arl_view_t *views, int64_t count,
                  arl_deadline_t *deadline, uint64_t *results, arl_error_t *err)
{
    sums_t sums = {0};
    arl_status_t status = ARL_OK;

    if (engine->module == NULL) {
        for (int64_t i = 0; i < count && status == ARL_OK; i++) {
            status = checksum_on_host(engine, &views[i], deadline, &results[i], err);
        }
        return status;
    }
    if (count == 0) {
        return ARL_OK;
    }
    status = sums_prepare(&sums, views, count, err);
    if (status == ARL_OK && sums.item_count > 0) {
        status = sums_run(&sums, engine, count, deadline, results, err);
    }
    else if (status == ARL_OK) { /* nothing but empty arrays */
        memset(results, 0, (size_t)count * sizeof(*results));
    }
    for (int64_t i = 0; i < count && status == ARL_OK; i++) {
        results[i] = arl_checksum_finish(results[i], (uint64_t)arl_view_nbytes(&views[i]));
    }
    sums_free(&sums, &engine->device);
    return status;
}
