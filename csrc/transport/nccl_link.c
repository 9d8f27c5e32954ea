/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nccl.h"

#include <stdio.h>
#include <string.h>

/* A transfer is launched within microseconds, except for the first one, which connects. */
static const int64_t LAUNCH_SPIN_NS = 500 * 1000;

/* How long a communicator may take to be put down before it is dropped. */
static const double FINISH_SECONDS = 0.25;

/* ---- opening and closing -------------------------------------------------------------------- */

static arl_status_t
open_wire(arl_nccl_link_t *link, arl_error_t *err)
{
    const arl_cuda_device_t *device = &link->engine->device;
    arl_cu_result_t result;
    arl_status_t status = arl_cuda_device_push(device, err);

    if (status != ARL_OK) {
        return status;
    }
    result = device->api->cuStreamCreate(&link->wire, ARL_CUDA_STREAM_NON_BLOCKING);
    if (result != ARL_CUDA_SUCCESS) {
        link->wire = NULL;
        status = arl_cuda_error_set(device->api, err, ARL_ERR_SYNC, result, "cuStreamCreate",
                                    "for NCCL on device %d", device->ordinal);
    }
    arl_cuda_device_pop(device);
    return status;
}

arl_status_t
arl_nccl_link_open(int ordinal, arl_nccl_link_t *link, arl_error_t *err)
{
    arl_status_t status;

    memset(link, 0, sizeof(*link));
    ARL_CHECK_GOTO(status, arl_nccl_load(&link->api, err), close_link);
    ARL_CHECK_GOTO(status, arl_cuda_engine_acquire(ordinal, &link->engine, err), close_link);
    ARL_CHECK_GOTO(status, open_wire(link, err), close_link);
    ARL_CHECK_GOTO(status,
                   arl_cuda_queue_open(&link->wired, &link->engine->device, link->wire,
                                       ARL_CUDA_QUEUE_MAX, err),
                   close_link);
    ARL_CHECK_GOTO(status,
                   arl_cuda_queue_open(&link->moved, &link->engine->device, link->engine->stream,
                                       ARL_CUDA_QUEUE_MAX, err),
                   close_link);
    return ARL_OK;
close_link:
    arl_nccl_link_close(link, false);
    return status;
}

bool
arl_nccl_link_idle(arl_nccl_link_t *link)
{
    const arl_cuda_device_t *device = &link->engine->device;
    const double seconds = link->stuck ? 0.0 : ARL_CUDA_IDLE_SECONDS;

    link->stuck = !arl_cuda_idle(device, link->wire, seconds) ||
                  !arl_cuda_idle(device, link->engine->stream, seconds);
    return !link->stuck;
}

void
arl_nccl_link_close(arl_nccl_link_t *link, bool forked)
{
    if (link->engine == NULL) {
        return;
    }
    if (!forked) {
        arl_nccl_link_finish(link);
        arl_cuda_queue_close(&link->wired);
        arl_cuda_queue_close(&link->moved);
        if (link->wire != NULL && arl_nccl_link_deallocate(link)) {
            const bool entered = arl_cuda_device_enter(&link->engine->device);

            (void)link->engine->device.api->cuStreamDestroy_v2(link->wire);
            arl_cuda_device_leave(&link->engine->device, entered);
        }
        arl_cuda_engine_release(link->engine);
    }
    memset(link, 0, sizeof(*link));
}

/* ---- buckets -------------------------------------------------------------------------------- */

arl_status_t
arl_nccl_link_allocate(arl_nccl_link_t *link, const arl_chunk_geometry_t *geometry,
                       arl_error_t *err)
{
    const arl_cuda_device_t *device = &link->engine->device;
    const size_t bytes = arl_chunk_geometry_bytes(geometry);
    arl_cu_result_t result;
    arl_status_t status;

    if (link->buckets != 0 && memcmp(&link->geometry, geometry, sizeof(*geometry)) == 0) {
        return ARL_OK;
    }
    if (!arl_nccl_link_deallocate(link)) {
        return arl_error_set(err, ARL_ERR_SYNC, "nccl",
                             "work of an earlier sync on device %d does not end", device->ordinal);
    }
    status = arl_cuda_device_push(device, err);
    if (status != ARL_OK) {
        return status;
    }
    result = device->api->cuMemAlloc_v2(&link->buckets, bytes);
    arl_cuda_device_pop(device);
    if (result != ARL_CUDA_SUCCESS) {
        link->buckets = 0;
        return arl_cuda_error_set(device->api, err, ARL_ERR_SYNC, result, "cuMemAlloc",
                                  "%zu bytes for the buckets of nccl on device %d; ring_bytes= of "
                                  "the sender makes them smaller",
                                  bytes, device->ordinal);
    }
    link->geometry = *geometry;
    return ARL_OK;
}

bool
arl_nccl_link_deallocate(arl_nccl_link_t *link)
{
    const arl_cuda_device_t *device = &link->engine->device;
    bool entered;

    if (!arl_nccl_link_idle(link)) {
        return false;
    }
    if (link->buckets != 0) {
        entered = arl_cuda_device_enter(device);
        (void)device->api->cuMemFree_v2(link->buckets);
        arl_cuda_device_leave(device, entered);
        link->buckets = 0;
    }
    return true;
}

/* ---- waiting -------------------------------------------------------------------------------- */

typedef struct waiting {
    const arl_nccl_link_t *link;
    const arl_nccl_watch_t *watch;
    arl_cuda_queue_t *queue; /* NULL: what NCCL does by itself is waited for */
    int64_t goal;
    arl_status_t status;
    arl_error_t *err;
} waiting_t;

/* Of a failed call or communicator. A peer that died or gave up is the better explanation. */
static arl_status_t
nccl_failed(const arl_nccl_link_t *link, const arl_nccl_watch_t *watch, arl_nccl_result_t result,
            const char *operation, const char *doing, arl_error_t *err)
{
    const arl_status_t status = watch->check(watch->control, err);

    if (status != ARL_OK) {
        return status;
    }
    return arl_nccl_error_set(
        link->api, err, result == ARL_NCCL_REMOTE_ERROR ? ARL_ERR_PEER_LOST : ARL_ERR_SYNC, result,
        link->comm, operation, "%s on device %d; NCCL_DEBUG=WARN tells more", doing,
        link->engine->device.ordinal);
}

static bool
nccl_refused(arl_nccl_result_t result)
{
    return result != ARL_NCCL_SUCCESS && result != ARL_NCCL_IN_PROGRESS;
}

/* Whether NCCL is still busy in the background. */
static bool
nccl_busy(waiting_t *waiting)
{
    const arl_nccl_link_t *link = waiting->link;
    arl_nccl_result_t state = ARL_NCCL_SUCCESS;
    arl_nccl_result_t result = link->api->ncclCommGetAsyncError(link->comm, &state);

    if (result == ARL_NCCL_SUCCESS) {
        result = state;
    }
    if (result == ARL_NCCL_SUCCESS || result == ARL_NCCL_IN_PROGRESS) {
        return result == ARL_NCCL_IN_PROGRESS;
    }
    waiting->status = nccl_failed(link, waiting->watch, result, "ncclCommGetAsyncError",
                                  "the communicator has failed", waiting->err);
    return false;
}

static bool
wait_over(void *context)
{
    waiting_t *waiting = context;
    const bool busy = nccl_busy(waiting);

    if (waiting->queue == NULL || waiting->status != ARL_OK) {
        return !busy;
    }
    waiting->status = arl_cuda_queue_poll(waiting->queue, waiting->err);
    return waiting->status != ARL_OK || waiting->queue->ended >= waiting->goal;
}

static bool
peers_well(void *context)
{
    const arl_nccl_watch_t *watch = ((waiting_t *)context)->watch;

    return watch->check(watch->control, NULL) == ARL_OK;
}

static arl_status_t
link_wait(waiting_t *waiting, int64_t spin_ns, const char *what)
{
    const arl_nccl_watch_t *watch = waiting->watch;
    arl_status_t status =
        arl_deadline_wait_spinning(watch->deadline, spin_ns, wait_over, peers_well, waiting);

    if (status == ARL_OK) {
        return waiting->status;
    }
    if (status == ARL_ERR_PEER_LOST) {
        status = watch->check(watch->control, waiting->err);
        return status != ARL_OK ? status : ARL_ERR_PEER_LOST;
    }
    if (status == ARL_ERR_INTERRUPTED) {
        return arl_error_set(waiting->err, status, watch->operation, "interrupted during %s", what);
    }
    return arl_error_set(waiting->err, status, watch->operation,
                         "after %.1f s, %s has not ended (NCCL with %d ranks, this one on device "
                         "%d); the communicator was aborted. Is timeout= long enough? "
                         "NCCL_DEBUG=INFO shows what NCCL waits for",
                         arl_deadline_elapsed_s(watch->deadline), what, waiting->link->place.world,
                         waiting->link->engine->device.ordinal);
}

/* ---- the communicator ----------------------------------------------------------------------- */

arl_status_t
arl_nccl_link_connect(arl_nccl_link_t *link, const arl_nccl_id_t *id, const arl_nccl_place_t *place,
                      const arl_nccl_watch_t *watch, arl_error_t *err)
{
    arl_nccl_config_t config = ARL_NCCL_CONFIG_INIT;
    waiting_t waiting = {.link = link, .watch = watch, .err = err};
    arl_nccl_result_t result;
    arl_status_t status = arl_cuda_device_push(&link->engine->device, err);

    if (status != ARL_OK) {
        return status;
    }
    link->place = *place;
    result =
        link->api->ncclCommInitRankConfig(&link->comm, place->world, *id, place->rank, &config);
    if (nccl_refused(result)) {
        link->comm = NULL;
        status = nccl_failed(link, watch, result, "ncclCommInitRankConfig",
                             "joining the communicator", err);
    }
    else {
        status = link_wait(&waiting, 0, "joining the communicator");
    }
    arl_cuda_device_pop(&link->engine->device);
    if (status != ARL_OK) {
        arl_nccl_link_abort(link);
    }
    return status;
}

static bool
finish_over(void *context)
{
    const arl_nccl_link_t *link = context;
    arl_nccl_result_t state = ARL_NCCL_INTERNAL_ERROR;

    return link->api->ncclCommGetAsyncError(link->comm, &state) != ARL_NCCL_SUCCESS ||
           state != ARL_NCCL_IN_PROGRESS;
}

/* Flushes what is under way, for a moment. */
static void
finalize(arl_nccl_link_t *link)
{
    const arl_nccl_result_t result = link->api->ncclCommFinalize(link->comm);
    arl_deadline_t deadline;

    if (result == ARL_NCCL_IN_PROGRESS) {
        arl_deadline_start(&deadline, FINISH_SECONDS);
        (void)arl_deadline_wait(&deadline, finish_over, NULL, link);
    }
}

/*
 * Ended by an abort, also when all is well: ncclCommDestroy waits for the other ranks to destroy
 * theirs, without an end (seen on two H200 for as long as we cared to wait), and ours may keep
 * theirs for the next sync, or be gone. After a finalize there is nothing left to lose by it.
 */
void
arl_nccl_link_finish(arl_nccl_link_t *link)
{
    bool entered;

    if (link->comm == NULL) {
        return;
    }
    entered = arl_cuda_device_enter(&link->engine->device);
    finalize(link);
    arl_cuda_device_leave(&link->engine->device, entered);
    arl_nccl_link_abort(link);
}

void
arl_nccl_link_abort(arl_nccl_link_t *link)
{
    bool entered;

    link->place.generation = 0;
    if (link->comm == NULL) {
        return;
    }
    entered = arl_cuda_device_enter(&link->engine->device);
    (void)link->api->ncclCommAbort(link->comm);
    arl_cuda_device_leave(&link->engine->device, entered);
    link->comm = NULL;
    (void)arl_nccl_link_idle(
        link); /* what was under way ends now; the caller may free what it used */
}

/* ---- transfers ------------------------------------------------------------------------------ */

void
arl_nccl_link_reset(arl_nccl_link_t *link)
{
    arl_cuda_queue_reset(&link->wired);
    arl_cuda_queue_reset(&link->moved);
}

/* This rank's part in moving one chunk of sender `owner`; none where it is between two others. */
static arl_nccl_result_t
move_chunk(const arl_nccl_link_t *link, int owner, int64_t chunk, size_t size,
           const char **operation_p)
{
    const arl_nccl_api_t *api = link->api;
    const arl_nccl_place_t *place = &link->place;
    const int last = place->world - 1;
    void *data = (void *)arl_nccl_link_bucket(link, chunk); /* NOLINT: an address of the device */

    if (place->senders < last) { /* several receivers */
        *operation_p = "ncclBroadcast";
        return api->ncclBroadcast(data, data, size, ARL_NCCL_UINT8, owner, link->comm, link->wire);
    }
    if (place->rank == owner) {
        *operation_p = "ncclSend";
        return api->ncclSend(data, size, ARL_NCCL_UINT8, last, link->comm, link->wire);
    }
    if (place->rank == last) {
        *operation_p = "ncclRecv";
        return api->ncclRecv(data, size, ARL_NCCL_UINT8, owner, link->comm, link->wire);
    }
    return ARL_NCCL_SUCCESS;
}

/* The chunks of a round in one group, so that they go side by side. */
static arl_nccl_result_t
move_round(const arl_nccl_link_t *link, const arl_stream_t *stream, int64_t round,
           const char **operation_p)
{
    const int64_t first = round * link->place.senders;
    const bool grouped = link->place.senders > 1;
    arl_nccl_result_t result = ARL_NCCL_SUCCESS, end;

    *operation_p = "ncclGroupStart";
    if (grouped && nccl_refused(result = link->api->ncclGroupStart())) {
        return result;
    }
    for (int64_t k = first;
         k < first + link->place.senders && k < stream->chunk_count && !nccl_refused(result); k++) {
        result = move_chunk(link, (int)(k - first), k, (size_t)stream->fill[k], operation_p);
    }
    if (grouped) { /* also after a failure: the group is this thread's, and would stay open */
        end = link->api->ncclGroupEnd();
        if (!nccl_refused(result)) {
            *operation_p = "ncclGroupEnd";
            result = end;
        }
    }
    return result;
}

arl_status_t
arl_nccl_link_post(arl_nccl_link_t *link, const arl_stream_t *stream, int64_t round,
                   const arl_nccl_watch_t *watch, arl_error_t *err)
{
    waiting_t waiting = {.link = link, .watch = watch, .err = err};
    const char *operation;
    arl_nccl_result_t result = move_round(link, stream, round, &operation);
    arl_status_t status;

    if (nccl_refused(result)) {
        return nccl_failed(link, watch, result, operation, "a transfer", err);
    }
    /* In progress, it may not be on the stream yet; an event put there now would come first. */
    status = link_wait(&waiting, LAUNCH_SPIN_NS, "launching a transfer");
    return status != ARL_OK ? status : arl_cuda_queue_mark(&link->wired, err);
}

arl_status_t
arl_nccl_link_reach(arl_nccl_link_t *link, arl_cuda_queue_t *queue, int64_t goal,
                    const arl_nccl_watch_t *watch, arl_error_t *err)
{
    waiting_t waiting = {.link = link, .watch = watch, .queue = queue, .goal = goal, .err = err};
    char what[64];

    (void)snprintf(what, sizeof(what), "%s %lld of the transfer",
                   link->place.senders > 1 ? "round" : "chunk", (long long)goal - 1);
    return queue->ended >= goal ? ARL_OK : link_wait(&waiting, ARL_CUDA_SPIN_NS, what);
}
