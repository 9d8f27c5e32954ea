/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/cuda_memory.h"
#include "transport/cuda_offer.h"
#include "transport/ring.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static const char OFFER[] = "offer";
static const char SERVE[] = "serve";

/*
 * The slots, and the tables that fill them from tensors whose place is known. It outlives an
 * offer when it is kept for the next one. Counted, since a receiver of this process may still
 * hold the export.
 */
typedef struct ring {
    atomic_int references;
    arl_cuda_engine_t *engine;
    arl_chunk_packer_t packer;
    uint64_t buffer_id;
    uint8_t handle[ARL_OFFER_HANDLE_BYTES];
} ring_t;

typedef struct ring_export {
    arl_export_t base;
    ring_t *ring;
    arl_chunk_geometry_t blob;
    const char *address; /* base.bases points here */
} ring_export_t;

/* ---- the ring ------------------------------------------------------------------------------- */

static void
ring_free(ring_t *ring, bool forked)
{
    if (atomic_fetch_sub(&ring->references, 1) != 1) {
        return;
    }
    if (!forked) { /* in a child nothing of the driver's may be touched */
        if (arl_cuda_idle(&ring->engine->device, ring->engine->stream, ARL_CUDA_IDLE_SECONDS)) {
            const bool entered = arl_cuda_device_enter(&ring->engine->device);

            arl_chunk_packer_free(&ring->packer, false);
            if (ring->packer.memory != 0) {
                (void)ring->engine->device.api->cuMemFree_v2(ring->packer.memory);
            }
            arl_cuda_device_leave(&ring->engine->device, entered);
        }
        arl_cuda_engine_release(ring->engine);
    }
    arl_chunk_packer_free(&ring->packer, true);
    free(ring);
}

void
arl_ring_discard(void **kept, bool forked)
{
    if (*kept != NULL) {
        ring_free(*kept, forked);
        *kept = NULL;
    }
}

void
arl_ring_destroy(arl_export_t *base, bool forked)
{
    ring_export_t *export = (ring_export_t *)base;

    ring_free(export->ring, forked);
    free(export);
}

static arl_status_t
ring_allocate(ring_t *ring, arl_error_t *err)
{
    const arl_cuda_device_t *device = &ring->engine->device;
    const size_t bytes = arl_chunk_geometry_bytes(&ring->packer.geometry);
    arl_status_t status = arl_cuda_device_push(device, err);
    arl_cuda_pointer_t info;
    arl_cu_result_t result;

    if (status != ARL_OK) {
        return status;
    }
    result = device->api->cuMemAlloc_v2(&ring->packer.memory, bytes);
    if (result != ARL_CUDA_SUCCESS) {
        ring->packer.memory = 0;
        status = arl_cuda_error_set(device->api, err, ARL_ERR_SYNC, result, "cuMemAlloc",
                                    "%zu bytes for the ring on device %d; ring_bytes= makes it "
                                    "smaller",
                                    bytes, device->ordinal);
    }
    arl_cuda_device_pop(device);
    if (status == ARL_OK) {
        status = arl_cuda_pointer_query(device->api, (const void *)ring->packer.memory, "the ring",
                                        &info, err);
    }
    if (status == ARL_OK) {
        ring->buffer_id = info.buffer_id;
        status = arl_cuda_memory_handle(device, &info, ring->handle, err);
    }
    return status;
}

/* The kept ring when it has the same slots on the same device, or a new one. */
static arl_status_t
take_ring(const arl_export_request_t *request, int ordinal, ring_t **ring_p, arl_error_t *err)
{
    ring_t *ring = *request->kept;
    arl_chunk_geometry_t geometry;
    arl_status_t status = arl_chunk_geometry_make(request->ring_bytes, ARL_RING_BYTES,
                                                  ARL_CHUNK_SLOTS, &geometry, err);

    if (status != ARL_OK) {
        return status;
    }
    if (ring != NULL && ring->engine->device.ordinal == ordinal &&
        atomic_load(&ring->references) == 1 &&
        memcmp(&ring->packer.geometry, &geometry, sizeof(geometry)) == 0) {
        atomic_fetch_add(&ring->references, 1);
        *ring_p = ring;
        return ARL_OK;
    }
    arl_ring_discard(request->kept, false); /* first: there may not be room for both */
    ring = calloc(1, sizeof(*ring));
    if (ring == NULL) {
        return arl_error_set(err, ARL_ERR_NOMEM, OFFER, "out of memory");
    }
    ring->packer.geometry = geometry;
    ring->references = 1;
    status = arl_cuda_engine_acquire(ordinal, &ring->engine, err);
    if (status != ARL_OK) {
        free(ring);
        return status;
    }
    ring->packer.engine = ring->engine;
    status = ring_allocate(ring, err);
    if (status != ARL_OK) {
        ring_free(ring, false);
        return status;
    }
    if (request->keep) {
        ring->references = 2;
        *request->kept = ring;
    }
    *ring_p = ring;
    return ARL_OK;
}

/* ---- making an offer ------------------------------------------------------------------------ */

static void
describe(const ring_t *ring, ring_export_t *export, arl_offer_t *offer)
{
    arl_offer_alloc_t *alloc = &offer->allocs[0];

    offer->unit = arl_cuda_unit(&ring->engine->device);
    offer->alloc_count = 1;
    alloc->kind = ARL_ALLOC_CUDA_IPC;
    alloc->size = arl_chunk_geometry_bytes(&ring->packer.geometry);
    alloc->base_id = ring->buffer_id;
    alloc->unit = offer->unit;
    memcpy(alloc->handle, ring->handle, sizeof(alloc->handle));
    export->blob = ring->packer.geometry;
    offer->blob = (const uint8_t *)&export->blob;
    offer->blob_size = sizeof(export->blob);
    export->address = (const char *)ring->packer.memory;
    export->base.bases = &export->address;
    export->base.bytes = ring->packer.stream.total_bytes;
    export->base.extra_bytes = (int64_t)alloc->size + arl_chunk_packer_table_bytes(&ring->packer);
    export->base.in_place = true; /* the slots may not go while a receiver has them mapped */
}

arl_status_t
arl_ring_offer(const arl_export_request_t *request, arl_offer_t *offer, arl_export_t **export_p,
               arl_error_t *err)
{
    ring_export_t *export = calloc(1, sizeof(*export));
    bool complete = false;
    int ordinal = 0;
    arl_status_t status;

    offer->allocs = calloc(1, sizeof(*offer->allocs));
    if (export == NULL || offer->allocs == NULL) {
        status = arl_error_set(err, ARL_ERR_NOMEM, OFFER, "out of memory");
        goto free_export;
    }
    ARL_CHECK_GOTO(status, arl_chunk_survey(request, &ordinal, &complete, err), free_export);
    arl_stream_place(offer);
    ARL_CHECK_GOTO(status, take_ring(request, ordinal, &export->ring, err), free_export);
    ARL_CHECK_GOTO(status,
                   arl_chunk_packer_prepare(&export->ring->packer, request, offer, complete, err),
                   free_ring);
    ARL_CHECK_GOTO(status, arl_cuda_offer_settle(request, export->ring->engine, err), free_ring);
    describe(export->ring, export, offer);
    ARL_CHECK_GOTO(status, arl_cuda_offer_checksums(request, export->ring->engine, offer, err),
                   free_ring);
    *export_p = &export->base;
    return ARL_OK;
free_ring:
    ring_free(export->ring, false);
free_export:
    free(export);
    return status;
}

/* ---- serving -------------------------------------------------------------------------------- */

/* One serve() under way. */
typedef struct ring_server {
    arl_chunk_server_t base;
    ring_export_t *export;
    arl_control_page_t *page;
    arl_cuda_queue_t queue;
    arl_status_t status; /* of what happened inside of a wait */
    arl_error_t *err;
} ring_server_t;

static int64_t
least_taken(const ring_server_t *server)
{
    int64_t least = INT64_MAX;

    for (uint32_t i = 0; i < server->page->receivers; i++) {
        const int64_t taken =
            (int64_t)atomic_load_explicit(&server->page->slots[i].sequence, memory_order_acquire);

        least = taken < least ? taken : least;
    }
    return least;
}

static bool
slot_free(const ring_server_t *server)
{
    const int64_t slots = server->base.packer->geometry.slots;

    return server->base.next < slots || least_taken(server) > server->base.next - slots;
}

/* Publishes the chunks that have become whole. */
static void
publish(ring_server_t *server)
{
    const int64_t before = server->queue.ended;

    server->status = arl_cuda_queue_poll(&server->queue, server->err);
    if (server->queue.ended > before) {
        atomic_store_explicit(&server->page->sequence, (uint64_t)server->queue.ended,
                              memory_order_release);
    }
}

static bool
slot_ready(void *context)
{
    ring_server_t *server = context;

    publish(server);
    return server->status != ARL_OK || slot_free(server);
}

static bool
all_published(void *context)
{
    ring_server_t *server = context;

    publish(server);
    return server->status != ARL_OK || server->queue.ended == server->queue.launched;
}

static bool
receivers_well(void *context)
{
    ring_server_t *server = context;

    return arl_control_check_receivers(server->export->base.control, NULL) == ARL_OK;
}

/* Waits, publishing meanwhile, and says what was waited for when it does not come. */
static arl_status_t
server_wait(ring_server_t *server, bool (*ready)(void *context))
{
    arl_status_t status = arl_deadline_wait_spinning(server->base.deadline, ARL_RING_SPIN_NS, ready,
                                                     receivers_well, server);

    if (status == ARL_OK) {
        return server->status;
    }
    if (status == ARL_ERR_PEER_LOST) {
        status = arl_control_check_receivers(server->export->base.control, server->err);
        return status != ARL_OK ? status : ARL_ERR_PEER_LOST;
    }
    if (status == ARL_ERR_INTERRUPTED) {
        return arl_error_set(server->err, status, SERVE, "interrupted at chunk %lld of %lld",
                             (long long)server->base.next,
                             (long long)server->base.packer->stream.chunk_count);
    }
    return arl_error_set(server->err, status, SERVE,
                         "after %.1f s, chunk %lld of %lld still waits for its slot: the slowest "
                         "of %u receivers has taken %lld; did all of them call pull(), and is "
                         "timeout= long enough?",
                         arl_deadline_elapsed_s(server->base.deadline),
                         (long long)server->base.next,
                         (long long)server->base.packer->stream.chunk_count,
                         server->page->receivers, (long long)least_taken(server));
}

static arl_status_t
chunk_begin(arl_chunk_server_t *base, arl_error_t *err)
{
    (void)err; /* the same one */
    return server_wait((ring_server_t *)base, slot_ready);
}

static arl_status_t
chunk_end(arl_chunk_server_t *base, arl_error_t *err)
{
    return arl_cuda_queue_mark(&((ring_server_t *)base)->queue, err);
}

static arl_status_t
tensor_fed(arl_chunk_server_t *base, arl_error_t *err)
{
    ring_server_t *server = (ring_server_t *)base;

    (void)err;
    publish(server);
    return server->status;
}

arl_status_t
arl_ring_serve(arl_export_t *base, const arl_offer_t *offer, const arl_feed_t *feed,
               arl_deadline_t *deadline, arl_error_t *err)
{
    ring_export_t *export = (ring_export_t *)base;
    const arl_cuda_engine_t *engine = export->ring->engine;
    ring_server_t server = {.base = {.packer = &export->ring->packer,
                                     .offer = offer,
                                     .feed = feed,
                                     .deadline = deadline,
                                     .begin = chunk_begin,
                                     .end = chunk_end,
                                     .fed = tensor_fed},
                            .export = export,
                            .page = arl_control_page(base->control),
                            .err = err};
    arl_status_t status = arl_chunk_serve_check(&server.base, err);

    if (status == ARL_OK) {
        status = arl_cuda_queue_open(&server.queue, &engine->device, engine->stream,
                                     export->ring->packer.geometry.slots, err);
    }
    if (status != ARL_OK) {
        return status;
    }
    ARL_CHECK_GOTO(status, arl_cuda_device_push(&engine->device, err), close_queue);
    status = arl_chunk_serve(&server.base, err);
    if (status == ARL_OK) {
        status = server_wait(&server, all_published);
    }
    arl_cuda_device_pop(&engine->device);
    if (status != ARL_OK) { /* the caller's tensors may go as soon as this returns */
        (void)arl_cuda_idle(&engine->device, engine->stream, ARL_CUDA_IDLE_SECONDS);
    }
close_queue:
    arl_cuda_queue_close(&server.queue);
    return status;
}
