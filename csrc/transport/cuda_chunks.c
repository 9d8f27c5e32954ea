/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/cuda_chunks.h"

#include <string.h>

/* ---- geometry ------------------------------------------------------------------------------- */

arl_status_t
arl_chunk_geometry_make(int64_t ring_bytes, int64_t default_bytes, uint32_t slots,
                        arl_chunk_geometry_t *geometry_p, arl_error_t *err)
{
    const int64_t wanted = ring_bytes > 0 ? ring_bytes : default_bytes;
    const int64_t slot = wanted / slots / ARL_CHUNK_SLOT_ALIGN * ARL_CHUNK_SLOT_ALIGN;

    if (slot == 0) {
        return arl_error_set(err, ARL_ERR_VALUE, "offer",
                             "ring_bytes=%lld is too small: at least %u slots of %d bytes",
                             (long long)ring_bytes, slots, (int)ARL_CHUNK_SLOT_ALIGN);
    }
    *geometry_p = (arl_chunk_geometry_t){.slots = slots, .slot_bytes = (uint64_t)slot};
    return ARL_OK;
}

bool
arl_chunk_geometry_valid(const arl_chunk_geometry_t *geometry)
{
    return geometry->slots > 0 && geometry->slots <= ARL_CHUNK_SLOTS_MAX &&
           geometry->slot_bytes > 0 && geometry->slot_bytes % ARL_STREAM_ALIGN == 0 &&
           geometry->slot_bytes <= INT64_MAX / ARL_CHUNK_SLOTS_MAX;
}

/* ---- work in order -------------------------------------------------------------------------- */

arl_status_t
arl_cuda_queue_open(arl_cuda_queue_t *queue, const arl_cuda_device_t *device,
                    arl_cu_stream_t stream, uint32_t depth, arl_error_t *err)
{
    arl_status_t status = arl_cuda_device_push(device, err);

    memset(queue, 0, sizeof(*queue));
    if (status != ARL_OK) {
        return status;
    }
    queue->device = device;
    queue->stream = stream;
    queue->depth = depth;
    for (uint32_t i = 0; i < depth && status == ARL_OK; i++) {
        arl_cu_result_t result =
            device->api->cuEventCreate(&queue->events[i], ARL_CUDA_EVENT_DISABLE_TIMING);

        if (result != ARL_CUDA_SUCCESS) {
            queue->events[i] = NULL;
            status = arl_cuda_error_set(device->api, err, ARL_ERR_SYNC, result, "cuEventCreate",
                                        "event %u of %u for chunks on device %d", i, depth,
                                        device->ordinal);
        }
    }
    arl_cuda_device_pop(device);
    if (status != ARL_OK) {
        arl_cuda_queue_close(queue);
    }
    return status;
}

void
arl_cuda_queue_close(arl_cuda_queue_t *queue)
{
    bool entered;

    if (queue->device == NULL) {
        return;
    }
    entered = arl_cuda_device_enter(queue->device);
    for (uint32_t i = 0; i < queue->depth; i++) {
        if (queue->events[i] != NULL) {
            (void)queue->device->api->cuEventDestroy_v2(queue->events[i]);
            queue->events[i] = NULL;
        }
    }
    arl_cuda_device_leave(queue->device, entered);
    queue->device = NULL;
}

void
arl_cuda_queue_reset(arl_cuda_queue_t *queue)
{
    queue->launched = 0;
    queue->ended = 0;
}

static arl_status_t
queue_error(const arl_cuda_queue_t *queue, arl_error_t *err, arl_cu_result_t result,
            const char *operation, int64_t item)
{
    return arl_cuda_error_set(queue->device->api, err, ARL_ERR_SYNC, result, operation,
                              "chunk %lld on device %d", (long long)item, queue->device->ordinal);
}

arl_status_t
arl_cuda_queue_mark(arl_cuda_queue_t *queue, arl_error_t *err)
{
    arl_cu_event_t event = queue->events[queue->launched % queue->depth];
    arl_cu_result_t result = queue->device->api->cuEventRecord(event, queue->stream);

    if (result != ARL_CUDA_SUCCESS) {
        return queue_error(queue, err, result, "cuEventRecord", queue->launched);
    }
    queue->launched++;
    return ARL_OK;
}

arl_status_t
arl_cuda_queue_poll(arl_cuda_queue_t *queue, arl_error_t *err)
{
    while (queue->ended < queue->launched) {
        arl_cu_result_t result =
            queue->device->api->cuEventQuery(queue->events[queue->ended % queue->depth]);

        if (result == ARL_CUDA_ERROR_NOT_READY) {
            break;
        }
        if (result != ARL_CUDA_SUCCESS) {
            return queue_error(queue, err, result, "cuEventQuery", queue->ended);
        }
        queue->ended++;
    }
    return ARL_OK;
}

arl_status_t
arl_cuda_queue_follow(const arl_cuda_queue_t *queue, int64_t item, arl_cu_stream_t stream,
                      arl_error_t *err)
{
    arl_cu_result_t result;

    if (item < queue->ended) { /* also a negative one */
        return ARL_OK;
    }
    result = queue->device->api->cuStreamWaitEvent(stream, queue->events[item % queue->depth], 0);
    return result == ARL_CUDA_SUCCESS ? ARL_OK
                                      : queue_error(queue, err, result, "cuStreamWaitEvent", item);
}

bool
arl_cuda_idle(const arl_cuda_device_t *device, arl_cu_stream_t stream, double seconds)
{
    arl_deadline_t deadline;

    arl_deadline_start(&deadline, seconds);
    return arl_cuda_stream_wait(device, stream, &deadline, NULL, NULL, "close", NULL) !=
           ARL_ERR_TIMEOUT;
}
