/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/arl_sender.h"
#include "transport/cuda_mapping.h"
#include "transport/ring.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static const char PULL[] = "pull";

enum { NO_TENSOR = UINT32_MAX };

/* Of views(): tensor after tensor is put together in a buffer as large as the largest. */
typedef struct ring_views {
    arl_stream_t stream;
    arl_cu_ptr_t buffer;
    int64_t bytes;
    int64_t piece;   /* of the stream, the next */
    uint32_t tensor; /* that is in the buffer */
} ring_views_t;

typedef struct ring_import {
    arl_import_t base;
    arl_cuda_engine_t *engine;
    arl_export_t *local; /* same process: the sender's own address, no mapping */
    arl_cuda_mapping_t mapping;
    const char *address; /* base.bases points here */
    arl_cuda_queue_t queue;
    arl_chunk_geometry_t geometry;
    arl_chunk_unpacker_t unpacker;
    ring_views_t views;
} ring_import_t;

/* ---- opening and closing -------------------------------------------------------------------- */

static void
drop_local(ring_import_t *import)
{
    if (import->local != NULL) {
        arl_export_drop(import->local);
        import->local = NULL;
    }
}

static void
free_buffer(ring_import_t *import)
{
    const arl_cuda_device_t *device = &import->engine->device;

    if (import->views.buffer != 0) {
        const bool entered = arl_cuda_device_enter(device);

        (void)device->api->cuMemFree_v2(import->views.buffer);
        arl_cuda_device_leave(device, entered);
        import->views.buffer = 0;
    }
}

/* Closes all. What still runs must end first; after a second it is given up rather than waited
 * for. */
static void
import_free(ring_import_t *import)
{
    const arl_cuda_api_t *api;

    /* In a child after fork nothing of the driver's may be touched. */
    if (import->engine != NULL && arl_cuda_load(&api, NULL) == ARL_OK) {
        if (arl_cuda_idle(&import->engine->device, import->engine->stream, ARL_CUDA_IDLE_SECONDS)) {
            arl_chunk_unpacker_free(&import->unpacker, false);
            arl_cuda_mapping_close(&import->engine->device, &import->mapping);
            free_buffer(import);
        }
        arl_cuda_queue_close(&import->queue);
        arl_cuda_engine_release(import->engine);
    }
    drop_local(import);
    arl_chunk_unpacker_free(&import->unpacker, true);
    arl_stream_free(&import->views.stream);
    free(import);
}

void
arl_ring_close(arl_import_t **import_io, bool keep)
{
    ring_import_t *import = (ring_import_t *)*import_io;

    if (import == NULL) {
        return;
    }
    if (keep) {
        drop_local(import);
        return;
    }
    import_free(import);
    *import_io = NULL;
}

static arl_status_t
read_geometry(const arl_offer_t *offer, arl_chunk_geometry_t *geometry_p, arl_error_t *err)
{
    arl_chunk_geometry_t geometry = {0};

    if (offer->blob_size == sizeof(geometry)) {
        memcpy(&geometry, offer->blob, sizeof(geometry));
    }
    if (offer->alloc_count != 1 || !arl_chunk_geometry_valid(&geometry) ||
        offer->allocs[0].size < geometry.slots * geometry.slot_bytes) {
        return arl_error_set(err, ARL_ERR_SYNC, PULL,
                             "offer is not valid: it describes no ring of slots");
    }
    *geometry_p = geometry;
    return ARL_OK;
}

/* The sender's slots, readable here. */
static arl_status_t
reach(ring_import_t *import, const arl_pull_t *pull, arl_error_t *err)
{
    const arl_offer_alloc_t *alloc = &pull->offer->allocs[0];
    const arl_cuda_device_t *device = &import->engine->device;
    arl_status_t status;

    if (pull->local != NULL) {
        arl_cuda_mapping_close(device, &import->mapping);
        import->local = arl_export_hold(pull->local);
        import->address = pull->local->bases[0];
    }
    else {
        if (!arl_cuda_mapping_of(&import->mapping, alloc)) {
            arl_cuda_mapping_close(device, &import->mapping);
            status = arl_cuda_device_push(device, err);
            if (status != ARL_OK) {
                return status;
            }
            status = arl_cuda_mapping_open(pull, device, 0, &import->mapping, err);
            arl_cuda_device_pop(device);
            if (status != ARL_OK) {
                return status;
            }
        }
        import->address = import->mapping.address;
    }
    import->base.bases = &import->address;
    import->base.mappings = import->mapping.address != NULL;
    return ARL_OK;
}

static arl_status_t
import_new(int ordinal, uint32_t slots, ring_import_t **import_p, arl_error_t *err)
{
    ring_import_t *import = calloc(1, sizeof(*import));
    arl_status_t status;

    if (import == NULL) {
        return arl_error_set(err, ARL_ERR_NOMEM, PULL, "out of memory");
    }
    import->base.transport = &arl_transport_ring;
    import->base.device_type = ARL_DEVICE_CUDA;
    import->base.device_index = ordinal;
    status = arl_cuda_engine_acquire(ordinal, &import->engine, err);
    if (status == ARL_OK) {
        import->unpacker.engine = import->engine;
        status = arl_cuda_queue_open(&import->queue, &import->engine->device,
                                     import->engine->stream, slots, err);
    }
    if (status != ARL_OK) {
        import_free(import);
        return status;
    }
    *import_p = import;
    return ARL_OK;
}

/* Made before anything is torn: a device without room for the buffer refuses the views. */
static arl_status_t
views_prepare(ring_import_t *import, const arl_pull_t *pull, arl_error_t *err)
{
    const arl_cuda_device_t *device = &import->engine->device;
    ring_views_t *views = &import->views;
    arl_status_t status;
    arl_cu_result_t result;

    status =
        arl_stream_init(pull->offer, (int64_t)import->geometry.slot_bytes, &views->stream, err);
    if (status != ARL_OK) {
        return status;
    }
    for (int64_t i = 0; i < views->stream.first_piece[views->stream.chunk_count]; i++) {
        if (views->bytes < views->stream.pieces[i].end) {
            views->bytes = views->stream.pieces[i].end;
        }
    }
    views->tensor = NO_TENSOR;
    arl_cuda_queue_reset(&import->queue);
    import->base.extra_bytes = views->bytes;
    if (views->bytes == 0 || (status = arl_cuda_device_push(device, err)) != ARL_OK) {
        return status;
    }
    result = device->api->cuMemAlloc_v2(&views->buffer, (size_t)views->bytes);
    if (result != ARL_CUDA_SUCCESS) {
        views->buffer = 0;
        status = arl_cuda_error_set(device->api, err, ARL_ERR_SYNC, result, "cuMemAlloc",
                                    "%lld bytes on device %d, where views() puts the largest "
                                    "tensor together; pull() needs no such buffer",
                                    (long long)views->bytes, device->ordinal);
    }
    arl_cuda_device_pop(device);
    return status;
}

arl_status_t
arl_ring_open(const arl_pull_t *pull, arl_import_t **import_io, arl_error_t *err)
{
    ring_import_t *import = (ring_import_t *)*import_io;
    arl_chunk_geometry_t geometry;
    int ordinal = -1;
    arl_status_t status;

    status = read_geometry(pull->offer, &geometry, err);
    if (status != ARL_OK || (status = arl_cuda_find_destination(pull, &ordinal, err)) != ARL_OK) {
        return status;
    }
    if (ordinal < 0) {
        ordinal = pull->offer->unit.index; /* nothing is written: any device will do */
    }
    if (import != NULL &&
        (import->base.device_index != ordinal || import->queue.depth != geometry.slots)) {
        import_free(import);
        import = NULL;
        *import_io = NULL;
    }
    if (import == NULL) {
        status = import_new(ordinal, geometry.slots, &import, err);
        if (status != ARL_OK) {
            return status;
        }
        *import_io = &import->base;
    }
    /* The caller closes what is in *import_io when one of these fails. */
    status = arl_cuda_check_units(pull, &import->engine->device, err);
    if (status == ARL_OK) {
        status = reach(import, pull, err);
    }
    import->geometry = geometry;
    if (status == ARL_OK && pull->views) {
        return views_prepare(import, pull, err);
    }
    if (status == ARL_OK) {
        status = arl_chunk_unpacker_prepare(&import->unpacker, pull, &geometry, err);
        import->base.extra_bytes = arl_chunk_unpacker_table_bytes(&import->unpacker);
        import->base.fallback = import->engine->fallback_reason;
    }
    return status;
}

/* ---- taking the chunks ---------------------------------------------------------------------- */

typedef struct ring_taker {
    ring_import_t *import;
    const arl_pull_t *pull;
    arl_control_page_t *page;
    arl_control_slot_t *slot;
    int64_t chunks;      /* of the stream */
    arl_status_t status; /* of what happened inside of a wait */
    arl_error_t *err;
} ring_taker_t;

/* Tells the sender which chunks are out of their slots. */
static void
acknowledge(ring_taker_t *taker)
{
    arl_cuda_queue_t *queue = &taker->import->queue;
    const int64_t before = queue->ended;

    taker->status = arl_cuda_queue_poll(queue, taker->err);
    if (queue->ended > before) {
        atomic_store_explicit(&taker->slot->sequence, (uint64_t)queue->ended, memory_order_release);
    }
}

static bool
chunk_ready(void *context)
{
    ring_taker_t *taker = context;
    const arl_cuda_queue_t *queue = &taker->import->queue;

    acknowledge(taker);
    return taker->status != ARL_OK ||
           (queue->launched - queue->ended < queue->depth &&
            (int64_t)atomic_load_explicit(&taker->page->sequence, memory_order_acquire) >
                queue->launched);
}

static bool
all_taken(void *context)
{
    ring_taker_t *taker = context;

    acknowledge(taker);
    return taker->status != ARL_OK || taker->import->queue.ended == taker->import->queue.launched;
}

static bool
sender_well(void *context)
{
    const ring_taker_t *taker = context;

    return arl_control_check_sender(taker->pull->control, NULL) == ARL_OK;
}

static arl_status_t
taker_wait(ring_taker_t *taker, bool (*ready)(void *context))
{
    const arl_pull_t *pull = taker->pull;
    arl_status_t status =
        arl_deadline_wait_spinning(pull->deadline, ARL_RING_SPIN_NS, ready, sender_well, taker);

    if (status == ARL_OK) {
        return taker->status;
    }
    if (status == ARL_ERR_PEER_LOST) {
        status = arl_control_check_sender(pull->control, taker->err);
        return status != ARL_OK ? status : ARL_ERR_PEER_LOST;
    }
    if (status == ARL_ERR_INTERRUPTED) {
        return arl_error_set(taker->err, status, PULL, "interrupted at chunk %lld of %lld",
                             (long long)taker->import->queue.launched, (long long)taker->chunks);
    }
    return arl_error_set(taker->err, status, PULL,
                         "after %.1f s, chunk %lld of %lld has not come from the sender (pid "
                         "%lld); is it in serve(), which must run at the same time as pull(), and "
                         "is timeout= long enough?",
                         arl_deadline_elapsed_s(pull->deadline),
                         (long long)taker->import->queue.launched, (long long)taker->chunks,
                         (long long)pull->offer->sender.pid);
}

static arl_status_t
take_all(ring_taker_t *taker)
{
    ring_import_t *import = taker->import;
    arl_status_t status = ARL_OK;

    for (int64_t k = 0; k < taker->chunks && status == ARL_OK; k++) {
        status = taker_wait(taker, chunk_ready);
        if (status == ARL_OK) {
            status = arl_chunk_unpacker_run(&import->unpacker, k, (uintptr_t)import->address,
                                            taker->err);
        }
        if (status == ARL_OK) {
            status = arl_cuda_queue_mark(&import->queue, taker->err);
        }
    }
    return status == ARL_OK ? taker_wait(taker, all_taken) : status;
}

static ring_taker_t
taker_make(ring_import_t *import, const arl_pull_t *pull, const arl_stream_t *stream,
           arl_error_t *err)
{
    arl_control_page_t *page = arl_control_page(pull->control);

    return (ring_taker_t){.import = import,
                          .pull = pull,
                          .page = page,
                          .slot = &page->slots[arl_control_slot(pull->control)],
                          .chunks = stream->chunk_count,
                          .err = err};
}

arl_status_t
arl_ring_copy(const arl_pull_t *pull, arl_import_t *base, arl_error_t *err)
{
    ring_import_t *import = (ring_import_t *)base;
    ring_taker_t taker = taker_make(import, pull, &import->unpacker.stream, err);
    arl_status_t status;

    /* What the caller's stream still reads of the old weights comes first. */
    status = arl_cuda_engine_follow(import->engine, pull->stream, err);
    if (status != ARL_OK ||
        (status = arl_cuda_device_push(&import->engine->device, err)) != ARL_OK) {
        return status;
    }
    arl_cuda_queue_reset(&import->queue);
    status = take_all(&taker);
    arl_cuda_device_pop(&import->engine->device);
    if (status != ARL_OK) {
        /* Before the sender is told that its slots are free. */
        (void)arl_cuda_idle(&import->engine->device, import->engine->stream, ARL_CUDA_IDLE_SECONDS);
    }
    return status;
}

/* ---- tensor after tensor -------------------------------------------------------------------- */

/* The next piece of the stream, into the buffer if it is of `index`. */
static arl_status_t
take_piece(ring_taker_t *taker, uint32_t index)
{
    ring_import_t *import = taker->import;
    ring_views_t *views = &import->views;
    const int64_t chunk = import->queue.launched;
    const arl_stream_piece_t *piece = &views->stream.pieces[views->piece];
    const arl_cuda_device_t *device = &import->engine->device;
    arl_status_t status = taker_wait(taker, chunk_ready);

    if (status != ARL_OK) {
        return status;
    }
    if (piece->tensor == index) {
        const uint64_t slot = (uint64_t)chunk % import->geometry.slots;
        const uintptr_t from = (uintptr_t)import->address + slot * import->geometry.slot_bytes +
                               (uintptr_t)piece->offset;
        const arl_cu_result_t result = device->api->cuMemcpyAsync(
            views->buffer + (arl_cu_ptr_t)piece->begin, (arl_cu_ptr_t)from,
            (size_t)(piece->end - piece->begin), import->engine->stream);

        if (result != ARL_CUDA_SUCCESS) {
            return arl_cuda_error_set(device->api, taker->err, ARL_ERR_SYNC, result,
                                      "cuMemcpyAsync", "chunk %lld of %lld on device %d",
                                      (long long)chunk, (long long)taker->chunks, device->ordinal);
        }
    }
    views->piece++;
    return views->piece == views->stream.first_piece[chunk + 1]
               ? arl_cuda_queue_mark(&import->queue, taker->err)
               : ARL_OK;
}

/* All up to the end of `index`, and until it is there. */
static arl_status_t
take_tensor(ring_taker_t *taker, uint32_t index)
{
    ring_import_t *import = taker->import;
    ring_views_t *views = &import->views;
    const int64_t pieces = views->stream.first_piece[taker->chunks];
    arl_status_t status = ARL_OK;

    while (views->piece < pieces && views->stream.pieces[views->piece].tensor <= index &&
           status == ARL_OK) {
        status = take_piece(taker, index);
    }
    if (status == ARL_OK) {
        status = arl_cuda_stream_wait(&import->engine->device, import->engine->stream,
                                      taker->pull->deadline, sender_well, taker,
                                      "a tensor out of the ring", taker->err);
    }
    if (status == ARL_OK) {
        acknowledge(taker);
        status = taker->status;
    }
    return status;
}

arl_status_t
arl_ring_view(const arl_pull_t *pull, arl_import_t *base, uint32_t index, const char **address_p,
              arl_error_t *err)
{
    ring_import_t *import = (ring_import_t *)base;
    const arl_cuda_device_t *device = &import->engine->device;
    ring_taker_t taker = taker_make(import, pull, &import->views.stream, err);
    arl_status_t status;

    if (index != import->views.tensor) {
        import->views.tensor = NO_TENSOR;
        /* What reads the tensor before must have done so. */
        status = arl_cuda_engine_follow(import->engine, pull->stream, err);
        if (status != ARL_OK || (status = arl_cuda_device_push(device, err)) != ARL_OK) {
            return status;
        }
        status = take_tensor(&taker, index);
        arl_cuda_device_pop(device);
        if (status != ARL_OK) {
            (void)arl_cuda_idle(device, import->engine->stream, ARL_CUDA_IDLE_SECONDS);
            return status;
        }
        import->views.tensor = index;
    }
    *address_p = (const char *)import->views.buffer;
    return ARL_OK;
}

arl_status_t
arl_ring_checksums(const arl_pull_t *pull, arl_import_t *base, const arl_view_t *views,
                   int64_t count, uint64_t *sums, arl_error_t *err)
{
    const ring_import_t *import = (const ring_import_t *)base;

    return arl_cuda_checksum(import->engine, views, count, pull->deadline, sums, err);
}
