/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/cuda_engine.h"

#include "transport/cuda_kernels.h"
#include "transport/cuda_tables.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

/*
 * 512 threads with eight 16-byte loads under way each, one block on each multiprocessor: what came
 * out best on an H200, level with one copy of the same bytes (benchmarks/gpu_copy_probe.py tries
 * the others).
 */
enum { THREADS = 512, BLOCKS_PER_SM = 1 };

/* ---- engine --------------------------------------------------------------------------------- */

static void
engine_load_kernels(arl_cuda_engine_t *engine)
{
    const arl_cuda_api_t *api = engine->device.api;
    const char *step = "cuModuleLoadDataEx", *name = NULL;
    arl_cu_result_t result;

    result = api->cuModuleLoadDataEx(&engine->module, arl_kernels_ptx(), 0, NULL, NULL);
    if (result == ARL_CUDA_SUCCESS) {
        step = "cuModuleGetFunction";
        result =
            api->cuModuleGetFunction(&engine->copy_segments, engine->module, ARL_K_COPY_SEGMENTS);
    }
    else {
        engine->module = NULL;
    }
    if (result == ARL_CUDA_SUCCESS) {
        result =
            api->cuModuleGetFunction(&engine->copy_strided, engine->module, ARL_K_COPY_STRIDED);
    }
    if (result == ARL_CUDA_SUCCESS) {
        result = api->cuModuleGetFunction(&engine->checksum, engine->module, ARL_K_CHECKSUM);
    }
    if (result == ARL_CUDA_SUCCESS) {
        return;
    }
    if (engine->module != NULL) {
        (void)api->cuModuleUnload(engine->module); /* the first failure is the one to report */
        engine->module = NULL;
    }
    (void)api->cuGetErrorName(result, &name);
    (void)snprintf(engine->fallback_reason, sizeof(engine->fallback_reason),
                   "the copy kernels do not load (%s: %s); a graph of memcpy nodes is used", step,
                   name == NULL ? "unknown error" : name);
}

arl_status_t
arl_cuda_engine_open(int ordinal, arl_cuda_engine_t *engine_p, arl_error_t *err)
{
    arl_cuda_engine_t engine = {.threads = THREADS, .blocks_per_sm = BLOCKS_PER_SM};
    arl_cu_result_t result;
    arl_status_t status;

    status = arl_cuda_device_open(ordinal, &engine.device, err);
    if (status != ARL_OK) {
        return status;
    }
    ARL_CHECK_GOTO(status, arl_cuda_device_push(&engine.device, err), close_device);
    result = engine.device.api->cuStreamCreate(&engine.stream, ARL_CUDA_STREAM_NON_BLOCKING);
    if (result == ARL_CUDA_SUCCESS) {
        engine_load_kernels(&engine);
    }
    else {
        status = arl_cuda_error_set(engine.device.api, err, ARL_ERR_SYNC, result, "cuStreamCreate",
                                    "on device %d (%s)", ordinal, engine.device.name);
    }
    arl_cuda_device_pop(&engine.device);
    if (status != ARL_OK) {
        goto close_device;
    }
    *engine_p = engine;
    return ARL_OK;

close_device:
    arl_cuda_device_close(&engine.device);
    return status;
}

void
arl_cuda_engine_close(arl_cuda_engine_t *engine)
{
    const arl_cuda_api_t *api = engine->device.api;
    bool entered;

    if (engine->device.context == NULL) {
        return;
    }
    /* Errors on the way out have nobody to go to; what can be released is. */
    entered = arl_cuda_device_enter(&engine->device);
    if (engine->module != NULL) {
        (void)api->cuModuleUnload(engine->module);
    }
    if (engine->stream != NULL) {
        (void)api->cuStreamDestroy_v2(engine->stream);
    }
    arl_cuda_device_leave(&engine->device, entered);
    engine->module = NULL;
    engine->stream = NULL;
    arl_cuda_device_close(&engine->device);
}

/* ---- waiting -------------------------------------------------------------------------------- */

typedef struct stream_wait {
    const arl_cuda_api_t *api;
    arl_cu_stream_t stream;
    arl_cu_result_t result;
    bool (*alive)(void *context);
    void *context;
} stream_wait_t;

static bool
stream_ready(void *context)
{
    stream_wait_t *wait = context;

    wait->result = wait->api->cuStreamQuery(wait->stream);
    return wait->result != ARL_CUDA_ERROR_NOT_READY;
}

static bool
stream_peer_alive(void *context)
{
    const stream_wait_t *wait = context;

    return wait->alive(wait->context);
}

arl_status_t
arl_cuda_stream_wait(const arl_cuda_device_t *device, arl_cu_stream_t stream,
                     arl_deadline_t *deadline, bool (*alive)(void *context), void *context,
                     const char *what, arl_error_t *err)
{
    stream_wait_t wait = {.api = device->api, .stream = stream, .alive = alive, .context = context};
    arl_status_t status = arl_cuda_device_push(device, err);

    if (status != ARL_OK) {
        return status;
    }
    status = arl_deadline_wait_spinning(deadline, ARL_CUDA_SPIN_NS, stream_ready,
                                        alive == NULL ? NULL : stream_peer_alive, &wait);
    arl_cuda_device_pop(device);
    switch (status) {
    case ARL_OK:
        break;
    case ARL_ERR_TIMEOUT:
        return arl_error_set(err, status, "wait for device",
                             "%s: not done on device %d (%s) after %.3g s; is other work in front "
                             "of it, or the device hung?",
                             what, device->ordinal, device->name, arl_deadline_elapsed_s(deadline));
    case ARL_ERR_PEER_LOST:
        return arl_error_set(err, status, "wait for device",
                             "%s: the other side went away after %.3g s", what,
                             arl_deadline_elapsed_s(deadline));
    default:
        return arl_error_set(err, status, "wait for device", "%s: interrupted after %.3g s", what,
                             arl_deadline_elapsed_s(deadline));
    }
    if (wait.result != ARL_CUDA_SUCCESS) {
        return arl_cuda_error_set(device->api, err, ARL_ERR_SYNC, wait.result, "cuStreamQuery",
                                  "%s on device %d (%s)", what, device->ordinal, device->name);
    }
    return ARL_OK;
}

arl_status_t
arl_cuda_engine_follow(const arl_cuda_engine_t *engine, arl_cu_stream_t stream, arl_error_t *err)
{
    const arl_cuda_api_t *api = engine->device.api;
    const char *step = "cuEventCreate";
    arl_cu_event_t event = NULL;
    arl_cu_result_t result;
    arl_status_t status = arl_cuda_device_push(&engine->device, err);

    if (status != ARL_OK) {
        return status;
    }
    result = api->cuEventCreate(&event, ARL_CUDA_EVENT_DISABLE_TIMING);
    if (result == ARL_CUDA_SUCCESS) {
        step = "cuEventRecord";
        result = api->cuEventRecord(event, stream);
        if (result == ARL_CUDA_SUCCESS) {
            step = "cuStreamWaitEvent";
            result = api->cuStreamWaitEvent(engine->stream, event, 0);
        }
        (void)api->cuEventDestroy_v2(event); /* the driver keeps it until it is reached */
    }
    if (result != ARL_CUDA_SUCCESS) {
        status = arl_cuda_error_set(api, err, ARL_ERR_SYNC, result, step,
                                    "ordering after the caller's stream on device %d (%s); does "
                                    "the stream belong to this device?",
                                    engine->device.ordinal, engine->device.name);
    }
    arl_cuda_device_pop(&engine->device);
    return status;
}

/* ---- pool ----------------------------------------------------------------------------------- */

/* Never touched in a child after fork: arl_cuda_load fails there first. */
static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
static arl_cuda_engine_t *pool;

arl_status_t
arl_cuda_engine_acquire(int ordinal, arl_cuda_engine_t **engine_p, arl_error_t *err)
{
    const arl_cuda_api_t *api;
    arl_cuda_engine_t **link, *engine = NULL;
    arl_status_t status = arl_cuda_load(&api, err);

    if (status != ARL_OK) {
        return status;
    }
    (void)pthread_mutex_lock(&pool_lock);
    for (link = &pool; *link != NULL; link = &(*link)->next) {
        if ((*link)->device.ordinal == ordinal) {
            engine = *link;
            *link = engine->next;
            break;
        }
    }
    (void)pthread_mutex_unlock(&pool_lock);
    if (engine == NULL) {
        engine = calloc(1, sizeof(*engine));
        if (engine == NULL) {
            return arl_error_set_errno(err, "open CUDA engine", errno, "device %d", ordinal);
        }
        status = arl_cuda_engine_open(ordinal, engine, err);
        if (status != ARL_OK) {
            free(engine);
            return status;
        }
    }
    engine->next = NULL;
    *engine_p = engine;
    return ARL_OK;
}

void
arl_cuda_engine_release(arl_cuda_engine_t *engine)
{
    const arl_cuda_api_t *api;
    bool entered;
    arl_cu_result_t result;

    if (engine == NULL || arl_cuda_load(&api, NULL) != ARL_OK) {
        return; /* of a parent process: nothing of it may be touched here */
    }
    engine->share = 1;
    entered = arl_cuda_device_enter(&engine->device);
    result = api->cuStreamQuery(engine->stream);
    arl_cuda_device_leave(&engine->device, entered);
    if (result != ARL_CUDA_SUCCESS) {
        return; /* work that does not end, or a broken context: nobody is to wait for it */
    }
    (void)pthread_mutex_lock(&pool_lock);
    engine->next = pool;
    pool = engine;
    (void)pthread_mutex_unlock(&pool_lock);
}

void
arl_cuda_engine_trim(void)
{
    arl_cuda_engine_t *engines;

    (void)pthread_mutex_lock(&pool_lock);
    engines = pool;
    pool = NULL;
    (void)pthread_mutex_unlock(&pool_lock);
    while (engines != NULL) {
        arl_cuda_engine_t *next = engines->next;

        arl_cuda_engine_close(engines);
        free(engines);
        engines = next;
    }
}
