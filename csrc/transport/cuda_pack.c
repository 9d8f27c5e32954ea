/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/cuda_chunks.h"

#include <stdlib.h>
#include <string.h>

static const char OFFER[] = "offer";
static const char SERVE[] = "serve";

/* ---- tables --------------------------------------------------------------------------------- */

static void
drop_plans(arl_chunk_packer_t *packer, bool forked)
{
    for (int64_t i = 0; i < packer->plan_count && !forked; i++) {
        arl_cuda_plan_free(packer->plans[i]);
    }
    free(packer->plans);
    free(packer->views);
    packer->plans = NULL;
    packer->views = NULL;
    packer->plan_count = 0;
    packer->count = 0;
}

void
arl_chunk_packer_free(arl_chunk_packer_t *packer, bool forked)
{
    drop_plans(packer, forked);
    arl_stream_free(&packer->stream);
    packer->layout_id = 0;
}

arl_status_t
arl_chunk_survey(const arl_export_request_t *request, int *ordinal_p, bool *complete_p,
                 arl_error_t *err)
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

static int64_t
chunk_step(const arl_chunk_packer_t *packer)
{
    return packer->shares > 0 ? packer->shares : 1;
}

void
arl_chunk_packer_share(arl_chunk_packer_t *packer, uint32_t share, uint32_t shares)
{
    if (packer->share != share || chunk_step(packer) != shares) {
        arl_chunk_packer_free(packer, false);
        packer->share = share;
        packer->shares = shares;
    }
}

static uintptr_t
slot_address(const arl_chunk_packer_t *packer, int64_t chunk)
{
    return (uintptr_t)packer->memory + (uintptr_t)((uint64_t)chunk % packer->geometry.slots) *
                                           (uintptr_t)packer->geometry.slot_bytes;
}

/* The tables of one chunk. Sources are named by their address: base 0. */
static arl_status_t
plan_chunk(arl_chunk_packer_t *packer, int64_t chunk, arl_deadline_t *deadline, arl_error_t *err)
{
    char *base = (char *)slot_address(packer, chunk);
    arl_copy_list_t list = {0};
    arl_status_t status = ARL_OK;

    for (int64_t i = packer->stream.first_piece[chunk];
         i < packer->stream.first_piece[chunk + 1] && status == ARL_OK; i++) {
        const arl_stream_piece_t *piece = &packer->stream.pieces[i];
        const arl_view_t *view = &packer->views[piece->tensor];
        const int64_t before = list.count;

        status = arl_stream_pack(piece, view, 0, base, &list, err);
        for (int64_t j = before; j < list.count; j++) {
            list.items[j].src_offset += (int64_t)(intptr_t)view->data;
        }
    }
    if (status == ARL_OK) {
        status = arl_cuda_plan_create(packer->engine, list.items, list.count, 1, deadline,
                                      &packer->plans[chunk], err);
    }
    arl_copy_list_free(&list);
    return status;
}

static bool
same_views(const arl_chunk_packer_t *packer, const arl_export_request_t *request)
{
    if (packer->count != request->count) {
        return false;
    }
    for (uint32_t i = 0; i < packer->count; i++) {
        const arl_view_t *a = &packer->views[i], *b = &request->sources[i].view;
        const size_t size = (size_t)a->ndim * sizeof(a->shape[0]);

        if (a->data != b->data || a->dtype != b->dtype || a->ndim != b->ndim ||
            memcmp(a->shape, b->shape, size) != 0 || memcmp(a->strides, b->strides, size) != 0) {
            return false;
        }
    }
    return true;
}

static arl_status_t
make_plans(arl_chunk_packer_t *packer, const arl_export_request_t *request, arl_error_t *err)
{
    arl_status_t status = ARL_OK;

    drop_plans(packer, false);
    packer->plans = calloc((size_t)packer->stream.chunk_count + 1, sizeof(packer->plans[0]));
    packer->views = calloc((size_t)request->count + 1, sizeof(packer->views[0]));
    if (packer->plans == NULL || packer->views == NULL) {
        drop_plans(packer, false);
        return arl_error_set(err, ARL_ERR_NOMEM, OFFER, "out of memory for %lld chunks",
                             (long long)packer->stream.chunk_count);
    }
    for (uint32_t i = 0; i < request->count; i++) {
        packer->views[i] = request->sources[i].view;
    }
    for (int64_t k = packer->share; k < packer->stream.chunk_count && status == ARL_OK;
         k += chunk_step(packer)) {
        status = plan_chunk(packer, k, request->deadline, err);
        packer->plan_count = k + 1;
    }
    if (status != ARL_OK) {
        drop_plans(packer, false);
        return status;
    }
    packer->count = request->count;
    return ARL_OK;
}

arl_status_t
arl_chunk_packer_prepare(arl_chunk_packer_t *packer, const arl_export_request_t *request,
                         const arl_offer_t *offer, bool complete, arl_error_t *err)
{
    arl_status_t status;

    /* The layout id leaves aliases out; the views tell them apart. */
    if (complete && packer->layout_id == offer->layout_id && same_views(packer, request)) {
        return ARL_OK;
    }
    arl_chunk_packer_free(packer, false);
    status = arl_stream_init(offer, (int64_t)packer->geometry.slot_bytes, &packer->stream, err);
    if (status != ARL_OK) {
        return status;
    }
    packer->layout_id = offer->layout_id;
    return complete ? make_plans(packer, request, err) : ARL_OK;
}

int64_t
arl_chunk_packer_table_bytes(const arl_chunk_packer_t *packer)
{
    int64_t bytes = 0;

    for (int64_t i = packer->share; i < packer->plan_count; i += chunk_step(packer)) {
        bytes += (int64_t)arl_cuda_plan_table_bytes(packer->plans[i]);
    }
    return bytes;
}

/* ---- serving -------------------------------------------------------------------------------- */

/* Every tensor is where it was at offer(): one launch a chunk. */
static arl_status_t
serve_planned(arl_chunk_server_t *server, arl_error_t *err)
{
    arl_chunk_packer_t *packer = server->packer;
    const uintptr_t base = 0;
    arl_status_t status = ARL_OK;

    for (server->next = packer->share; server->next < packer->stream.chunk_count;
         server->next += chunk_step(packer)) {
        if (server->next >= server->packed) {
            ARL_CHECK_GOTO(status, server->begin(server, err), done);
            ARL_CHECK_GOTO(
                status,
                arl_cuda_plan_run(packer->plans[server->next], &base, packer->engine->stream, err),
                done);
        }
        ARL_CHECK_GOTO(status, server->end(server, err), done);
    }
done:
    return status;
}

/* What came is what was announced, and on the device of the slots. */
static arl_status_t
check_fed(const arl_chunk_server_t *server, uint32_t index, const arl_view_t *view,
          arl_error_t *err)
{
    const arl_offer_tensor_t *tensor = &server->offer->tensors[index];
    arl_view_t announced = {.dtype = tensor->dtype, .ndim = tensor->ndim};
    char found[96], wanted[96];
    const int ordinal = server->packer->engine->device.ordinal;

    memcpy(announced.shape, tensor->shape, sizeof(announced.shape));
    if (view->dtype != tensor->dtype || view->ndim != tensor->ndim ||
        memcmp(view->shape, tensor->shape, (size_t)view->ndim * sizeof(view->shape[0])) != 0) {
        arl_view_describe(view, found, sizeof(found));
        arl_view_describe(&announced, wanted, sizeof(wanted));
        return arl_error_set(err, ARL_ERR_MISMATCH, SERVE,
                             "tensor %u, %.*s, came as %s; the offer announced %s", index,
                             (int)tensor->name_length, tensor->name, found, wanted);
    }
    if (arl_view_nbytes(view) > 0 &&
        (view->device_type != ARL_DEVICE_CUDA || view->device_index != ordinal)) {
        return arl_error_set(err, ARL_ERR_VALUE, SERVE,
                             "tensor %u, %.*s, is not in the memory of device %d, where the ring "
                             "is",
                             index, (int)tensor->name_length, tensor->name, ordinal);
    }
    return ARL_OK;
}

static arl_status_t
settle(const arl_chunk_server_t *server, arl_error_t *err)
{
    const arl_cuda_engine_t *engine = server->packer->engine;

    return arl_cuda_stream_wait(&engine->device, engine->stream, server->deadline, NULL, NULL,
                                "a copy into the ring", err);
}

/* Puts the copies of one piece on the stream. Dense ones need no tables. */
static arl_status_t
copy_piece(arl_chunk_server_t *server, const arl_stream_piece_t *piece, const arl_view_t *view,
           arl_error_t *err)
{
    const arl_cuda_engine_t *engine = server->packer->engine;
    const uintptr_t source = (uintptr_t)view->data, zero = 0;
    arl_copy_list_t list = {0};
    arl_cuda_plan_t *plan = NULL;
    arl_status_t status = arl_stream_pack(
        piece, view, 0, (char *)slot_address(server->packer, server->next), &list, err);

    if (status == ARL_OK && list.count == 1 && list.items[0].ndim == 0) {
        const arl_copy_t *copy = &list.items[0];
        arl_cu_result_t result = engine->device.api->cuMemcpyAsync(
            (arl_cu_ptr_t)copy->dst, (arl_cu_ptr_t)(source + (uintptr_t)copy->src_offset),
            (size_t)copy->run_bytes, engine->stream);

        if (result != ARL_CUDA_SUCCESS) {
            status = arl_cuda_error_set(engine->device.api, err, ARL_ERR_SYNC, result,
                                        "cuMemcpyAsync", "tensor %u into the ring", piece->tensor);
        }
    }
    else if (status == ARL_OK) {
        for (int64_t i = 0; i < list.count; i++) {
            list.items[i].src_offset += (int64_t)source;
        }
        status = server->quiet != NULL ? server->quiet(server, err) : ARL_OK;
        if (status == ARL_OK) {
            status = arl_cuda_plan_create(engine, list.items, list.count, 1, server->deadline,
                                          &plan, err);
        }
        if (status == ARL_OK) {
            status = arl_cuda_plan_run(plan, &zero, engine->stream, err);
        }
        if (status == ARL_OK) { /* before its tables are freed */
            status = settle(server, err);
        }
        arl_cuda_plan_free(plan);
    }
    arl_copy_list_free(&list);
    return status;
}

/* All pieces of one tensor. */
static arl_status_t
send_tensor(arl_chunk_server_t *server, uint32_t index, const arl_view_t *view, int64_t *piece_io,
            arl_error_t *err)
{
    const arl_stream_t *stream = &server->packer->stream;
    arl_status_t status = ARL_OK;

    while (status == ARL_OK && *piece_io < stream->first_piece[stream->chunk_count] &&
           stream->pieces[*piece_io].tensor == index) {
        if (*piece_io == stream->first_piece[server->next]) {
            status = server->begin(server, err);
        }
        if (status == ARL_OK) {
            status = copy_piece(server, &stream->pieces[*piece_io], view, err);
        }
        (*piece_io)++;
        if (status == ARL_OK && *piece_io == stream->first_piece[server->next + 1]) {
            status = server->end(server, err);
            server->next++;
        }
    }
    return status;
}

/* The tensors come one after another, and each may be gone when the next is asked for. */
static arl_status_t
serve_fed(arl_chunk_server_t *server, arl_error_t *err)
{
    const arl_feed_t *feed = server->feed;
    int64_t piece = 0;
    arl_status_t status = ARL_OK;

    for (uint32_t i = 0; i < server->offer->tensor_count; i++) {
        arl_view_t view = {0};

        if (server->offer->tensors[i].alias_of != i) {
            continue;
        }
        ARL_CHECK_GOTO(status, feed->next(feed->context, i, &view, err), done);
        ARL_CHECK_GOTO(status, check_fed(server, i, &view, err), done);
        ARL_CHECK_GOTO(status, arl_cuda_engine_follow(server->packer->engine, feed->stream, err),
                       done);
        ARL_CHECK_GOTO(status, send_tensor(server, i, &view, &piece, err), done);
        ARL_CHECK_GOTO(status, settle(server, err), done);
        if (server->fed != NULL) {
            ARL_CHECK_GOTO(status, server->fed(server, err), done);
        }
    }
done:
    return status;
}

arl_status_t
arl_chunk_serve_check(const arl_chunk_server_t *server, arl_error_t *err)
{
    if (server->feed == NULL && server->packer->count == 0) {
        return arl_error_set(err, ARL_ERR_VALUE, SERVE,
                             "some tensors were announced as (dtype, shape) only; pass them to "
                             "serve() as an iterable of (name, tensor)");
    }
    return ARL_OK;
}

arl_status_t
arl_chunk_serve(arl_chunk_server_t *server, arl_error_t *err)
{
    return server->feed != NULL ? serve_fed(server, err) : serve_planned(server, err);
}
