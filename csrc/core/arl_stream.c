/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_stream.h"

#include <stdlib.h>
#include <string.h>

static const char OPERATION[] = "cut weights into chunks";

/* ---- layout --------------------------------------------------------------------------------- */

static int64_t
tensor_bytes(const arl_offer_tensor_t *tensor)
{
    int64_t bytes = (int64_t)arl_dtype_size(tensor->dtype);

    for (int i = 0; i < tensor->ndim; i++) {
        bytes *= tensor->shape[i]; /* fits: the offer has been checked */
    }
    return bytes;
}

static void
dense_steps(const arl_offer_tensor_t *tensor, int64_t *steps)
{
    int64_t step = (int64_t)arl_dtype_size(tensor->dtype);

    for (int i = tensor->ndim - 1; i >= 0; i--) {
        steps[i] = step;
        step *= tensor->shape[i];
    }
}

void
arl_stream_place(arl_offer_t *offer)
{
    for (uint32_t i = 0; i < offer->tensor_count; i++) {
        offer->tensors[i].alloc = ARL_OFFER_STREAMED;
        offer->tensors[i].offset = 0;
        dense_steps(&offer->tensors[i], offer->tensors[i].strides);
    }
}

/* All that is cut and copied later relies on it. */
static arl_status_t
check_placed(const arl_offer_t *offer, arl_error_t *err)
{
    for (uint32_t i = 0; i < offer->tensor_count; i++) {
        const arl_offer_tensor_t *tensor = &offer->tensors[i];
        int64_t steps[ARL_VIEW_DIMS_MAX];

        dense_steps(tensor, steps);
        if (tensor->alloc != ARL_OFFER_STREAMED || tensor->offset != 0 ||
            memcmp(steps, tensor->strides, (size_t)tensor->ndim * sizeof(steps[0])) != 0) {
            return arl_error_set(err, ARL_ERR_SYNC, OPERATION,
                                 "offer is not valid: tensor %u (%.*s) is not placed in the stream",
                                 i, (int)tensor->name_length, tensor->name);
        }
    }
    return ARL_OK;
}

static bool
tensor_streamed(const arl_offer_t *offer, uint32_t index)
{
    return offer->tensors[index].alias_of == index && tensor_bytes(&offer->tensors[index]) > 0;
}

static int64_t
align_up(int64_t bytes)
{
    return (bytes + ARL_STREAM_ALIGN - 1) / ARL_STREAM_ALIGN * ARL_STREAM_ALIGN;
}

/*
 * Walks the stream. With `stream->pieces` NULL it only counts: chunks into chunk_count, and the
 * pieces, which it returns. The second walk takes the same steps and writes them down.
 */
static int64_t
stream_walk(const arl_offer_t *offer, arl_stream_t *stream)
{
    int64_t pieces = 0, chunk = -1, used = stream->chunk_bytes;

    stream->total_bytes = 0;
    for (uint32_t i = 0; i < offer->tensor_count; i++) {
        const int64_t bytes = tensor_streamed(offer, i) ? tensor_bytes(&offer->tensors[i]) : 0;

        stream->total_bytes += bytes;
        for (int64_t begin = 0; begin < bytes; pieces++) {
            int64_t take;

            used = align_up(used);
            if (used >= stream->chunk_bytes) {
                chunk++;
                used = 0;
                if (stream->pieces != NULL) {
                    stream->first_piece[chunk] = pieces;
                }
            }
            take = bytes - begin < stream->chunk_bytes - used ? bytes - begin
                                                              : stream->chunk_bytes - used;
            if (stream->pieces != NULL) {
                stream->pieces[pieces] = (arl_stream_piece_t){i, begin, begin + take, used};
                stream->fill[chunk] = used + take;
            }
            used += take;
            begin += take;
        }
    }
    stream->chunk_count = chunk + 1;
    return pieces;
}

/* Backwards, so that each chain runs in the order of the offer. */
static void
chain_aliases(const arl_offer_t *offer, uint32_t *next_alias)
{
    for (uint32_t i = 0; i < offer->tensor_count; i++) {
        next_alias[i] = UINT32_MAX;
    }
    for (uint32_t i = offer->tensor_count; i-- > 0;) {
        const uint32_t target = offer->tensors[i].alias_of;

        if (target != i) {
            next_alias[i] = next_alias[target];
            next_alias[target] = i;
        }
    }
}

arl_status_t
arl_stream_init(const arl_offer_t *offer, int64_t chunk_bytes, arl_stream_t *stream_p,
                arl_error_t *err)
{
    arl_stream_t stream = {.chunk_bytes = chunk_bytes};
    int64_t pieces;

    if (chunk_bytes <= 0 || chunk_bytes % ARL_STREAM_ALIGN != 0) {
        return arl_error_set(err, ARL_ERR_VALUE, OPERATION,
                             "chunks of %lld bytes; a positive multiple of %d is needed",
                             (long long)chunk_bytes, (int)ARL_STREAM_ALIGN);
    }
    if (check_placed(offer, err) != ARL_OK) {
        return ARL_ERR_SYNC;
    }
    pieces = stream_walk(offer, &stream);
    stream.first_piece = calloc((size_t)stream.chunk_count + 1, sizeof(*stream.first_piece));
    stream.fill = calloc((size_t)stream.chunk_count + 1, sizeof(*stream.fill));
    stream.pieces = calloc((size_t)pieces + 1, sizeof(*stream.pieces));
    stream.next_alias = calloc((size_t)offer->tensor_count + 1, sizeof(*stream.next_alias));
    if (stream.first_piece == NULL || stream.fill == NULL || stream.pieces == NULL ||
        stream.next_alias == NULL) {
        arl_stream_free(&stream);
        return arl_error_set(err, ARL_ERR_NOMEM, OPERATION,
                             "out of memory for the table of %lld pieces", (long long)pieces);
    }
    (void)stream_walk(offer, &stream);
    stream.first_piece[stream.chunk_count] = pieces;
    chain_aliases(offer, stream.next_alias);
    *stream_p = stream;
    return ARL_OK;
}

void
arl_stream_free(arl_stream_t *stream)
{
    free(stream->pieces);
    free(stream->first_piece);
    free(stream->fill);
    free(stream->next_alias);
    stream->pieces = NULL;
    stream->first_piece = NULL;
    stream->fill = NULL;
    stream->next_alias = NULL;
    stream->chunk_count = 0;
}

/* ---- cutting copies ------------------------------------------------------------------------- */

void
arl_copy_list_free(arl_copy_list_t *list)
{
    free(list->items);
    list->items = NULL;
    list->count = 0;
    list->room = 0;
}

static arl_status_t
list_append(arl_copy_list_t *list, const arl_copy_t *copy, arl_error_t *err)
{
    if (list->count == list->room) {
        const int64_t room = list->room > 0 ? 2 * list->room : 64;
        arl_copy_t *items = realloc(list->items, (size_t)room * sizeof(*items));

        if (items == NULL) {
            return arl_error_set(err, ARL_ERR_NOMEM, OPERATION, "out of memory for %lld copies",
                                 (long long)room);
        }
        list->items = items;
        list->room = room;
    }
    list->items[list->count++] = *copy;
    return ARL_OK;
}

/*
 * One side of each copy here is a box of a dense row-major array: the stream's. So along that
 * side the steps of the dimensions nest, every index of the widest one owns an interval of its
 * own, and a range of bytes cuts through at most two of them.
 */
typedef enum side { SIDE_SRC, SIDE_DST } side_t;

static const int64_t *
dense_strides(const arl_copy_t *copy, side_t side)
{
    return side == SIDE_SRC ? copy->src_stride : copy->dst_stride;
}

/* Bytes from the first to one past the last that the copy touches on its dense side. */
static int64_t
dense_extent(const arl_copy_t *copy, side_t side)
{
    int64_t extent = copy->run_bytes;

    for (int i = 0; i < copy->ndim; i++) {
        extent += (copy->count[i] - 1) * dense_strides(copy, side)[i];
    }
    return extent;
}

static int
widest_dim(const arl_copy_t *copy, side_t side)
{
    int widest = 0;

    for (int i = 1; i < copy->ndim; i++) {
        if (dense_strides(copy, side)[i] > dense_strides(copy, side)[widest]) {
            widest = i;
        }
    }
    return widest;
}

/* Indexes [first, first + count) of dimension `dim`; a count of 1 drops the dimension. */
static arl_copy_t
copy_narrow(const arl_copy_t *copy, int dim, int64_t first, int64_t count)
{
    arl_copy_t part = *copy;

    part.src_offset += first * copy->src_stride[dim];
    part.dst += first * copy->dst_stride[dim];
    part.count[dim] = count;
    if (count == 1) {
        part.ndim--;
        for (int i = dim; i < part.ndim; i++) {
            part.count[i] = part.count[i + 1];
            part.src_stride[i] = part.src_stride[i + 1];
            part.dst_stride[i] = part.dst_stride[i + 1];
        }
    }
    return part;
}

static int64_t
clamp(int64_t value, int64_t low, int64_t high)
{
    return value < low ? low : value > high ? high : value;
}

/* Appends what lies in [begin, end) of the dense side, counted from the copy's first byte. */
static arl_status_t
copy_cut(const arl_copy_t *copy, side_t side, int64_t begin, int64_t end, arl_copy_list_t *list,
         arl_error_t *err)
{
    const int64_t extent = dense_extent(copy, side);
    arl_copy_t part = *copy;
    arl_status_t status = ARL_OK;
    int64_t stride, inner, whole, whole_end;
    int dim;

    if (begin >= extent || end <= 0 || begin >= end) {
        return ARL_OK;
    }
    if (begin <= 0 && end >= extent) {
        return list_append(list, copy, err);
    }
    if (copy->ndim == 0) {
        begin = clamp(begin, 0, extent);
        end = clamp(end, 0, extent);
        part.src_offset += begin;
        part.dst += begin;
        part.run_bytes = end - begin;
        return list_append(list, &part, err);
    }
    dim = widest_dim(copy, side);
    stride = dense_strides(copy, side)[dim];
    inner = extent - (copy->count[dim] - 1) * stride; /* extent of one index */
    /* Indexes that lie in the range as a whole, then what is cut before and after them. */
    whole = begin <= 0 ? 0 : clamp((begin + stride - 1) / stride, 0, copy->count[dim]);
    whole_end = end < inner ? 0 : clamp((end - inner) / stride + 1, 0, copy->count[dim]);
    if (whole > 0 && begin < (whole - 1) * stride + inner) {
        part = copy_narrow(copy, dim, whole - 1, 1);
        status = copy_cut(&part, side, begin - (whole - 1) * stride, end - (whole - 1) * stride,
                          list, err);
    }
    if (status == ARL_OK && whole < whole_end) {
        part = copy_narrow(copy, dim, whole, whole_end - whole);
        status = list_append(list, &part, err);
    }
    if (whole_end < whole) { /* the range begins and ends within one index: done above */
        return status;
    }
    if (status == ARL_OK && whole_end < copy->count[dim] && whole_end * stride < end) {
        part = copy_narrow(copy, dim, whole_end, 1);
        status =
            copy_cut(&part, side, begin - whole_end * stride, end - whole_end * stride, list, err);
    }
    return status;
}

/* ---- receiver ------------------------------------------------------------------------------- */

/* The first copy of the plan that is of `tensor` or of a later one. */
static int64_t
plan_lower_bound(const arl_plan_t *plan, uint32_t tensor)
{
    int64_t low = 0, high = plan->count;

    while (low < high) {
        const int64_t middle = low + (high - low) / 2;

        if (plan->copies[middle].tensor < tensor) {
            low = middle + 1;
        }
        else {
            high = middle;
        }
    }
    return low;
}

static arl_status_t
unpack_tensor(const arl_stream_piece_t *piece, const arl_plan_t *plan, uint32_t tensor,
              arl_copy_list_t *list, arl_error_t *err)
{
    for (int64_t i = plan_lower_bound(plan, tensor);
         i < plan->count && plan->copies[i].tensor == tensor; i++) {
        const arl_copy_t *copy = &plan->copies[i];
        const int64_t before = list->count;
        arl_status_t status = copy_cut(copy, SIDE_SRC, piece->begin - copy->src_offset,
                                       piece->end - copy->src_offset, list, err);

        if (status != ARL_OK) {
            return status;
        }
        for (int64_t j = before; j < list->count; j++) {
            list->items[j].alloc = 0;
            list->items[j].src_offset += piece->offset - piece->begin;
        }
    }
    return ARL_OK;
}

arl_status_t
arl_stream_unpack(const arl_stream_t *stream, const arl_plan_t *plan, int64_t chunk,
                  arl_copy_list_t *list, arl_error_t *err)
{
    for (int64_t i = stream->first_piece[chunk]; i < stream->first_piece[chunk + 1]; i++) {
        const arl_stream_piece_t *piece = &stream->pieces[i];
        uint32_t tensor = piece->tensor;

        /* An alias is bound like any other name; its bytes come with what it stands for. */
        do {
            arl_status_t status = unpack_tensor(piece, plan, tensor, list, err);

            if (status != ARL_OK) {
                return status;
            }
            tensor = stream->next_alias[tensor];
        } while (tensor != UINT32_MAX);
    }
    return ARL_OK;
}

/* ---- sender --------------------------------------------------------------------------------- */

arl_status_t
arl_stream_pack(const arl_stream_piece_t *piece, const arl_view_t *view, uint32_t alloc,
                char *chunk_base, arl_copy_list_t *list, arl_error_t *err)
{
    arl_copy_t copy = {.alloc = alloc, .tensor = piece->tensor};
    int64_t dense[ARL_VIEW_DIMS_MAX];
    int64_t step = (int64_t)view->itemsize;

    for (int i = view->ndim - 1; i >= 0; i--) {
        dense[i] = step;
        step *= view->shape[i];
    }
    if (!arl_copy_shape(&copy, view->itemsize, view->ndim, view->shape, view->strides, dense)) {
        return ARL_OK;
    }
    /* The piece's first byte goes to its place in the chunk; what comes before is cut off. */
    copy.dst = (char *)((uintptr_t)chunk_base + (uintptr_t)piece->offset - (uintptr_t)piece->begin);
    return copy_cut(&copy, SIDE_DST, piece->begin, piece->end, list, err);
}
