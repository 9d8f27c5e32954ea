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
    arl_ring_geometry_t geometry;
    arl_cu_ptr_t memory;
    uint64_t buffer_id;
    uint8_t handle[ARL_OFFER_HANDLE_BYTES];
    arl_stream_t stream;
    uint64_t layout_id; /* that `stream` was made for */
    uint32_t count;     /* of `views`; 0: no tables */
    arl_view_t *views;
    arl_cuda_plan_t **plans; /* one for each chunk */
    int64_t plan_count;
} ring_t;

typedef struct ring_export {
    arl_export_t base;
    ring_t *ring;
    bool complete; /* all tensors were there at the offer; otherwise serve() must be fed */
    arl_ring_geometry_t blob;
    const char *address; /* base.bases points here */
} ring_export_t;

/* ---- the ring ------------------------------------------------------------------------------- */

static void
drop_plans(ring_t *ring)
{
    for (int64_t i = 0; i < ring->plan_count; i++) {
        arl_cuda_plan_free(ring->plans[i]);
    }
    free(ring->plans);
    free(ring->views);
    ring->plans = NULL;
    ring->views = NULL;
    ring->plan_count = 0;
    ring->count = 0;
}

static void
ring_free(ring_t *ring, bool forked)
{
    if (atomic_fetch_sub(&ring->references, 1) != 1) {
        return;
    }
    if (!forked) { /* in a child nothing of the driver's may be touched */
        if (arl_ring_idle(ring->engine)) {
            const bool entered = arl_cuda_device_enter(&ring->engine->device);

            drop_plans(ring);
            if (ring->memory != 0) {
                (void)ring->engine->device.api->cuMemFree_v2(ring->memory);
            }
            arl_cuda_device_leave(&ring->engine->device, entered);
        }
        arl_cuda_engine_release(ring->engine);
    }
    arl_stream_free(&ring->stream);
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
read_geometry(int64_t ring_bytes, arl_ring_geometry_t *geometry_p, arl_error_t *err)
{
    const int64_t wanted = ring_bytes > 0 ? ring_bytes : ARL_RING_BYTES;
    const int64_t slot = wanted / ARL_RING_SLOTS / ARL_RING_SLOT_ALIGN * ARL_RING_SLOT_ALIGN;

    if (slot == 0) {
        return arl_error_set(err, ARL_ERR_VALUE, OFFER,
                             "ring_bytes=%lld is too small: at least %d slots of %d bytes",
                             (long long)ring_bytes, (int)ARL_RING_SLOTS, (int)ARL_RING_SLOT_ALIGN);
    }
    *geometry_p = (arl_ring_geometry_t){.slots = ARL_RING_SLOTS, .slot_bytes = (uint64_t)slot};
    return ARL_OK;
}

static arl_status_t
ring_allocate(ring_t *ring, arl_error_t *err)
{
    const arl_cuda_device_t *device = &ring->engine->device;
    const size_t bytes = (size_t)ring->geometry.slots * ring->geometry.slot_bytes;
    arl_status_t status = arl_cuda_device_push(device, err);
    arl_cuda_pointer_t info;
    arl_cu_result_t result;

    if (status != ARL_OK) {
        return status;
    }
    result = device->api->cuMemAlloc_v2(&ring->memory, bytes);
    if (result != ARL_CUDA_SUCCESS) {
        ring->memory = 0;
        status = arl_cuda_error_set(device->api, err, ARL_ERR_SYNC, result, "cuMemAlloc",
                                    "%zu bytes for the ring on device %d; ring_bytes= makes it "
                                    "smaller",
                                    bytes, device->ordinal);
    }
    arl_cuda_device_pop(device);
    if (status == ARL_OK) {
        status =
            arl_cuda_pointer_query(device->api, (const void *)ring->memory, "the ring", &info, err);
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
    arl_ring_geometry_t geometry;
    arl_status_t status = read_geometry(request->ring_bytes, &geometry, err);

    if (status != ARL_OK) {
        return status;
    }
    if (ring != NULL && ring->engine->device.ordinal == ordinal &&
        atomic_load(&ring->references) == 1 &&
        memcmp(&ring->geometry, &geometry, sizeof(geometry)) == 0) {
        atomic_fetch_add(&ring->references, 1);
        *ring_p = ring;
        return ARL_OK;
    }
    arl_ring_discard(request->kept, false); /* first: there may not be room for both */
    ring = calloc(1, sizeof(*ring));
    if (ring == NULL) {
        return arl_error_set(err, ARL_ERR_NOMEM, OFFER, "out of memory");
    }
    ring->geometry = geometry;
    ring->references = 1;
    status = arl_cuda_engine_acquire(ordinal, &ring->engine, err);
    if (status != ARL_OK) {
        free(ring);
        return status;
    }
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

/* Whether all tensors are there, and on which device; specifications say where they will be. */
static arl_status_t
survey(const arl_export_request_t *request, int *ordinal_p, bool *complete_p, arl_error_t *err)
{
    const arl_source_t *first = &request->sources[0];

    *complete_p = true;
    for (uint32_t i = 0; i < request->count; i++) {
        const arl_source_t *source = &request->sources[i];

        if (source->view.device_index != first->view.device_index) {
            return arl_error_set(err, ARL_ERR_VALUE, OFFER,
                                 "%.*s is on device %d and %.*s on device %d; use one sender for "
                                 "each device",
                                 (int)first->name_length, first->name, first->view.device_index,
                                 (int)source->name_length, source->name, source->view.device_index);
        }
        if (source->view.data == NULL && arl_view_nbytes(&source->view) > 0) {
            *complete_p = false;
        }
    }
    if (!*complete_p && request->verify != ARL_VERIFY_NONE) {
        return arl_error_set(err, ARL_ERR_VALUE, OFFER,
                             "verify= needs all tensors at offer(): checksums travel in the offer, "
                             "and here some tensors come only during serve()");
    }
    *ordinal_p = first->view.device_index;
    return ARL_OK;
}

/* The tables of one chunk. Sources are named by their address: base 0. */
static arl_status_t
plan_chunk(ring_t *ring, int64_t chunk, const arl_view_t *views, arl_deadline_t *deadline,
           arl_cuda_plan_t **plan_p, arl_error_t *err)
{
    char *base = (char *)(uintptr_t)(ring->memory + (uint64_t)(chunk % ring->geometry.slots) *
                                                        ring->geometry.slot_bytes);
    arl_copy_list_t list = {0};
    arl_status_t status = ARL_OK;

    for (int64_t i = ring->stream.first_piece[chunk];
         i < ring->stream.first_piece[chunk + 1] && status == ARL_OK; i++) {
        const arl_stream_piece_t *piece = &ring->stream.pieces[i];
        const arl_view_t *view = &views[piece->tensor];
        const int64_t before = list.count;

        status = arl_stream_pack(piece, view, 0, base, &list, err);
        for (int64_t j = before; j < list.count; j++) {
            list.items[j].src_offset += (int64_t)(intptr_t)view->data;
        }
    }
    if (status == ARL_OK) {
        status =
            arl_cuda_plan_create(ring->engine, list.items, list.count, 1, deadline, plan_p, err);
    }
    arl_copy_list_free(&list);
    return status;
}

static bool
same_views(const ring_t *ring, const arl_export_request_t *request)
{
    if (ring->count != request->count) {
        return false;
    }
    for (uint32_t i = 0; i < ring->count; i++) {
        const arl_view_t *a = &ring->views[i], *b = &request->sources[i].view;
        const size_t size = (size_t)a->ndim * sizeof(a->shape[0]);

        if (a->data != b->data || a->dtype != b->dtype || a->ndim != b->ndim ||
            memcmp(a->shape, b->shape, size) != 0 || memcmp(a->strides, b->strides, size) != 0) {
            return false;
        }
    }
    return true;
}

static arl_status_t
make_plans(ring_t *ring, const arl_export_request_t *request, arl_error_t *err)
{
    arl_status_t status = ARL_OK;

    drop_plans(ring);
    ring->plans = calloc((size_t)ring->stream.chunk_count + 1, sizeof(ring->plans[0]));
    ring->views = calloc((size_t)request->count + 1, sizeof(ring->views[0]));
    if (ring->plans == NULL || ring->views == NULL) {
        drop_plans(ring);
        return arl_error_set(err, ARL_ERR_NOMEM, OFFER, "out of memory for %lld chunks",
                             (long long)ring->stream.chunk_count);
    }
    for (uint32_t i = 0; i < request->count; i++) {
        ring->views[i] = request->sources[i].view;
    }
    for (int64_t k = 0; k < ring->stream.chunk_count && status == ARL_OK; k++) {
        status = plan_chunk(ring, k, ring->views, request->deadline, &ring->plans[k], err);
        ring->plan_count = k + 1;
    }
    if (status != ARL_OK) {
        drop_plans(ring);
        return status;
    }
    ring->count = request->count;
    return ARL_OK;
}

/* Brings stream and tables to what this offer has. Most of the time they are that already. */
static arl_status_t
prepare(ring_t *ring, const arl_export_request_t *request, const arl_offer_t *offer, bool complete,
        arl_error_t *err)
{
    const uint64_t layout_id = arl_offer_layout_id(offer);
    arl_status_t status;

    /* The layout id leaves aliases out; the views tell them apart. */
    if (complete && ring->layout_id == layout_id && same_views(ring, request)) {
        return ARL_OK;
    }
    drop_plans(ring);
    arl_stream_free(&ring->stream);
    ring->layout_id = 0;
    status = arl_stream_init(offer, (int64_t)ring->geometry.slot_bytes, &ring->stream, err);
    if (status != ARL_OK) {
        return status;
    }
    ring->layout_id = layout_id;
    return complete ? make_plans(ring, request, err) : ARL_OK;
}

static int64_t
table_bytes(const ring_t *ring)
{
    int64_t bytes = 0;

    for (int64_t i = 0; i < ring->plan_count; i++) {
        bytes += (int64_t)arl_cuda_plan_table_bytes(ring->plans[i]);
    }
    return bytes;
}

static void
describe(const ring_t *ring, ring_export_t *export, arl_offer_t *offer)
{
    arl_offer_alloc_t *alloc = &offer->allocs[0];

    offer->unit = arl_cuda_unit(&ring->engine->device);
    offer->alloc_count = 1;
    alloc->kind = ARL_ALLOC_CUDA_IPC;
    alloc->size = ring->geometry.slots * ring->geometry.slot_bytes;
    alloc->base_id = ring->buffer_id;
    alloc->unit = offer->unit;
    memcpy(alloc->handle, ring->handle, sizeof(alloc->handle));
    export->blob = ring->geometry;
    offer->blob = (const uint8_t *)&export->blob;
    offer->blob_size = sizeof(export->blob);
    export->address = (const char *)ring->memory;
    export->base.bases = &export->address;
    export->base.bytes = ring->stream.total_bytes;
    export->base.extra_bytes = (int64_t)alloc->size + table_bytes(ring);
    export->base.in_place = true; /* the slots may not go while a receiver has them mapped */
}

arl_status_t
arl_ring_offer(const arl_export_request_t *request, arl_offer_t *offer, arl_export_t **export_p,
               arl_error_t *err)
{
    ring_export_t *export = calloc(1, sizeof(*export));
    int ordinal = 0;
    arl_status_t status;

    offer->allocs = calloc(1, sizeof(*offer->allocs));
    if (export == NULL || offer->allocs == NULL) {
        status = arl_error_set(err, ARL_ERR_NOMEM, OFFER, "out of memory");
        goto free_export;
    }
    ARL_CHECK_GOTO(status, survey(request, &ordinal, &export->complete, err), free_export);
    arl_stream_place(offer);
    ARL_CHECK_GOTO(status, take_ring(request, ordinal, &export->ring, err), free_export);
    ARL_CHECK_GOTO(status, prepare(export->ring, request, offer, export->complete, err), free_ring);
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
    ring_export_t *export;
    const arl_offer_t *offer;
    const arl_feed_t *feed;
    arl_control_page_t *page;
    arl_ring_queue_t queue;
    int64_t next; /* chunk whose slot is waited for */
    arl_deadline_t *deadline;
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
    const int64_t slots = server->export->ring->geometry.slots;

    return server->next < slots || least_taken(server) > server->next - slots;
}

/* Publishes the chunks that have become whole. */
static void
publish(ring_server_t *server)
{
    const int64_t before = server->queue.ended;

    server->status = arl_ring_queue_poll(&server->queue, server->err);
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
    arl_status_t status = arl_deadline_wait(server->deadline, ready, receivers_well, server);

    if (status == ARL_OK) {
        return server->status;
    }
    if (status == ARL_ERR_PEER_LOST) {
        status = arl_control_check_receivers(server->export->base.control, server->err);
        return status != ARL_OK ? status : ARL_ERR_PEER_LOST;
    }
    if (status == ARL_ERR_INTERRUPTED) {
        return arl_error_set(server->err, status, SERVE, "interrupted at chunk %lld of %lld",
                             (long long)server->next,
                             (long long)server->export->ring->stream.chunk_count);
    }
    return arl_error_set(server->err, status, SERVE,
                         "after %.1f s, chunk %lld of %lld still waits for its slot: the slowest "
                         "of %u receivers has taken %lld; did all of them call pull(), and is "
                         "timeout= long enough?",
                         arl_deadline_elapsed_s(server->deadline), (long long)server->next,
                         (long long)server->export->ring->stream.chunk_count,
                         server->page->receivers, (long long)least_taken(server));
}

/* Every tensor is where it was at offer(): one launch a chunk. */
static arl_status_t
serve_planned(ring_server_t *server)
{
    ring_t *ring = server->export->ring;
    const uintptr_t base = 0;

    for (server->next = 0; server->next < ring->stream.chunk_count; server->next++) {
        arl_status_t status = server_wait(server, slot_ready);

        if (status == ARL_OK) {
            status = arl_cuda_plan_run(ring->plans[server->next], &base, ring->engine->stream,
                                       server->err);
        }
        if (status == ARL_OK) {
            status = arl_ring_queue_mark(&server->queue, server->err);
        }
        if (status != ARL_OK) {
            return status;
        }
    }
    return ARL_OK;
}

/* What came is what was announced, and on the ring's device. */
static arl_status_t
check_fed(const ring_server_t *server, uint32_t index, const arl_view_t *view)
{
    const arl_offer_tensor_t *tensor = &server->offer->tensors[index];
    arl_view_t announced = {.dtype = tensor->dtype, .ndim = tensor->ndim};
    char found[96], wanted[96];
    const int ordinal = server->export->ring->engine->device.ordinal;

    memcpy(announced.shape, tensor->shape, sizeof(announced.shape));
    if (view->dtype != tensor->dtype || view->ndim != tensor->ndim ||
        memcmp(view->shape, tensor->shape, (size_t)view->ndim * sizeof(view->shape[0])) != 0) {
        arl_view_describe(view, found, sizeof(found));
        arl_view_describe(&announced, wanted, sizeof(wanted));
        return arl_error_set(server->err, ARL_ERR_MISMATCH, SERVE,
                             "tensor %u, %.*s, came as %s; the offer announced %s", index,
                             (int)tensor->name_length, tensor->name, found, wanted);
    }
    if (arl_view_nbytes(view) > 0 &&
        (view->device_type != ARL_DEVICE_CUDA || view->device_index != ordinal)) {
        return arl_error_set(server->err, ARL_ERR_VALUE, SERVE,
                             "tensor %u, %.*s, is not in the memory of device %d, where the ring "
                             "is",
                             index, (int)tensor->name_length, tensor->name, ordinal);
    }
    return ARL_OK;
}

/* Puts the copies of one piece on the stream. Dense ones need no tables. */
static arl_status_t
copy_piece(ring_server_t *server, const arl_stream_piece_t *piece, const arl_view_t *view)
{
    ring_t *ring = server->export->ring;
    const arl_cuda_device_t *device = &ring->engine->device;
    const uint64_t slot = (uint64_t)(server->next % ring->geometry.slots);
    char *base = (char *)(uintptr_t)(ring->memory + slot * ring->geometry.slot_bytes);
    const uintptr_t source = (uintptr_t)view->data;
    arl_copy_list_t list = {0};
    arl_cuda_plan_t *plan = NULL;
    arl_status_t status = arl_stream_pack(piece, view, 0, base, &list, server->err);

    if (status == ARL_OK && list.count == 1 && list.items[0].ndim == 0) {
        const arl_copy_t *copy = &list.items[0];
        arl_cu_result_t result = device->api->cuMemcpyAsync(
            (arl_cu_ptr_t)copy->dst, (arl_cu_ptr_t)(source + (uintptr_t)copy->src_offset),
            (size_t)copy->run_bytes, ring->engine->stream);

        if (result != ARL_CUDA_SUCCESS) {
            status = arl_cuda_error_set(device->api, server->err, ARL_ERR_SYNC, result,
                                        "cuMemcpyAsync", "tensor %u into the ring", piece->tensor);
        }
    }
    else if (status == ARL_OK) {
        for (int64_t i = 0; i < list.count; i++) {
            list.items[i].src_offset += (int64_t)source;
        }
        status = arl_cuda_plan_create(ring->engine, list.items, list.count, 1, server->deadline,
                                      &plan, server->err);
        if (status == ARL_OK) {
            const uintptr_t zero = 0;

            status = arl_cuda_plan_run(plan, &zero, ring->engine->stream, server->err);
        }
        if (status == ARL_OK) { /* before its tables are freed */
            status = arl_cuda_stream_wait(device, ring->engine->stream, server->deadline, NULL,
                                          NULL, "a copy into the ring", server->err);
        }
        arl_cuda_plan_free(plan);
    }
    arl_copy_list_free(&list);
    return status;
}

/* All pieces of one tensor; `chunk_io` is the chunk that is being filled. */
static arl_status_t
send_tensor(ring_server_t *server, uint32_t index, const arl_view_t *view, int64_t *piece_io)
{
    const arl_stream_t *stream = &server->export->ring->stream;
    arl_status_t status = ARL_OK;

    while (status == ARL_OK && *piece_io < stream->first_piece[stream->chunk_count] &&
           stream->pieces[*piece_io].tensor == index) {
        if (*piece_io == stream->first_piece[server->next]) {
            status = server_wait(server, slot_ready);
        }
        if (status == ARL_OK) {
            status = copy_piece(server, &stream->pieces[*piece_io], view);
        }
        (*piece_io)++;
        if (status == ARL_OK && *piece_io == stream->first_piece[server->next + 1]) {
            status = arl_ring_queue_mark(&server->queue, server->err);
            server->next++;
        }
    }
    return status;
}

/* The tensors come one after another, and each may be gone when the next is asked for. */
static arl_status_t
serve_fed(ring_server_t *server)
{
    const arl_cuda_engine_t *engine = server->export->ring->engine;
    int64_t piece = 0;
    arl_status_t status = ARL_OK;

    for (uint32_t i = 0; i < server->offer->tensor_count && status == ARL_OK; i++) {
        arl_view_t view = {0};

        if (server->offer->tensors[i].alias_of != i) {
            continue;
        }
        ARL_CHECK_GOTO(status, server->feed->next(server->feed->context, i, &view, server->err),
                       done);
        ARL_CHECK_GOTO(status, check_fed(server, i, &view), done);
        ARL_CHECK_GOTO(status, arl_cuda_engine_follow(engine, server->feed->stream, server->err),
                       done);
        ARL_CHECK_GOTO(status, send_tensor(server, i, &view, &piece), done);
        ARL_CHECK_GOTO(status,
                       arl_cuda_stream_wait(&engine->device, engine->stream, server->deadline, NULL,
                                            NULL, "a copy into the ring", server->err),
                       done);
        publish(server);
        status = server->status;
    }
done:
    return status;
}

arl_status_t
arl_ring_serve(arl_export_t *base, const arl_offer_t *offer, const arl_feed_t *feed,
               arl_deadline_t *deadline, arl_error_t *err)
{
    ring_export_t *export = (ring_export_t *)base;
    const arl_cuda_engine_t *engine = export->ring->engine;
    ring_server_t server = {.export = export,
                            .offer = offer,
                            .feed = feed,
                            .page = arl_control_page(base->control),
                            .deadline = deadline,
                            .err = err};
    arl_status_t status;

    if (feed == NULL && !export->complete) {
        return arl_error_set(err, ARL_ERR_VALUE, SERVE,
                             "some tensors were announced as (dtype, shape) only; pass them to "
                             "serve() as an iterable of (name, tensor)");
    }
    status = arl_ring_queue_open(&server.queue, engine, export->ring->geometry.slots, err);
    if (status != ARL_OK) {
        return status;
    }
    ARL_CHECK_GOTO(status, arl_cuda_device_push(&engine->device, err), close_queue);
    status = feed != NULL ? serve_fed(&server) : serve_planned(&server);
    if (status == ARL_OK) {
        status = server_wait(&server, all_published);
    }
    arl_cuda_device_pop(&engine->device);
    if (status != ARL_OK) {
        (void)arl_ring_idle(engine); /* the caller's tensors may go as soon as this returns */
    }
close_queue:
    arl_ring_queue_close(&server.queue);
    return status;
}
