/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/ring.h"

#include <string.h>

static arl_status_t
ring_probe(arl_error_t *err)
{
    const arl_cuda_api_t *api;

    return arl_cuda_load(&api, err);
}

arl_status_t
arl_ring_queue_open(arl_ring_queue_t *queue, const arl_cuda_engine_t *engine, uint32_t slots,
                    arl_error_t *err)
{
    const arl_cuda_api_t *api = engine->device.api;
    arl_status_t status = arl_cuda_device_push(&engine->device, err);

    memset(queue, 0, sizeof(*queue));
    queue->engine = engine;
    for (uint32_t i = 0; i < slots && status == ARL_OK; i++) {
        arl_cu_result_t result =
            api->cuEventCreate(&queue->events[i], ARL_CUDA_EVENT_DISABLE_TIMING);

        if (result != ARL_CUDA_SUCCESS) {
            queue->events[i] = NULL;
            status = arl_cuda_error_set(api, err, ARL_ERR_SYNC, result, "cuEventCreate",
                                        "event %u of %u for the ring on device %d", i, slots,
                                        engine->device.ordinal);
            arl_cuda_device_pop(&engine->device);
            arl_ring_queue_close(queue);
            return status;
        }
    }
    queue->slots = slots;
    if (status == ARL_OK) {
        arl_cuda_device_pop(&engine->device);
    }
    return status;
}

void
arl_ring_queue_close(arl_ring_queue_t *queue)
{
    bool entered;

    if (queue->engine == NULL) {
        return;
    }
    entered = arl_cuda_device_enter(&queue->engine->device);
    for (uint32_t i = 0; i < ARL_RING_SLOTS_MAX; i++) {
        if (queue->events[i] != NULL) {
            (void)queue->engine->device.api->cuEventDestroy_v2(queue->events[i]);
            queue->events[i] = NULL;
        }
    }
    arl_cuda_device_leave(&queue->engine->device, entered);
    queue->engine = NULL;
}

void
arl_ring_queue_reset(arl_ring_queue_t *queue)
{
    queue->launched = 0;
    queue->ended = 0;
}

arl_status_t
arl_ring_queue_mark(arl_ring_queue_t *queue, arl_error_t *err)
{
    const arl_cuda_engine_t *engine = queue->engine;
    arl_cu_event_t event = queue->events[queue->launched % queue->slots];
    arl_cu_result_t result = engine->device.api->cuEventRecord(event, engine->stream);

    if (result != ARL_CUDA_SUCCESS) {
        return arl_cuda_error_set(engine->device.api, err, ARL_ERR_SYNC, result, "cuEventRecord",
                                  "chunk %lld of the ring on device %d", (long long)queue->launched,
                                  engine->device.ordinal);
    }
    queue->launched++;
    return ARL_OK;
}

arl_status_t
arl_ring_queue_poll(arl_ring_queue_t *queue, arl_error_t *err)
{
    const arl_cuda_api_t *api = queue->engine->device.api;

    while (queue->ended < queue->launched) {
        arl_cu_result_t result = api->cuEventQuery(queue->events[queue->ended % queue->slots]);

        if (result == ARL_CUDA_ERROR_NOT_READY) {
            break;
        }
        if (result != ARL_CUDA_SUCCESS) {
            return arl_cuda_error_set(api, err, ARL_ERR_SYNC, result, "cuEventQuery",
                                      "chunk %lld of the ring on device %d",
                                      (long long)queue->ended, queue->engine->device.ordinal);
        }
        queue->ended++;
    }
    return ARL_OK;
}

bool
arl_ring_idle(const arl_cuda_engine_t *engine)
{
    arl_deadline_t deadline;

    arl_deadline_start(&deadline, 1.0);
    return arl_cuda_stream_wait(&engine->device, engine->stream, &deadline, NULL, NULL, "close",
                                NULL) != ARL_ERR_TIMEOUT;
}

const arl_transport_t arl_transport_ring = {
    .id = ARL_TRANSPORT_RING,
    .name = "ring",
    .needs_gpu = true,
    .same_host = true,
    .streams = true,
    .probe = ring_probe,
    .offer = arl_ring_offer,
    .serve = arl_ring_serve,
    .destroy = arl_ring_destroy,
    .discard = arl_ring_discard,
    .open = arl_ring_open,
    .copy = arl_ring_copy,
    .checksum = arl_ring_checksum,
    .close = arl_ring_close,
};
