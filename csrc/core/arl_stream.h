/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_STREAM_H
#define ARL_CORE_STREAM_H

#include "core/arl_offer.h"
#include "core/arl_plan.h"

/*
 * The weights as one stream of bytes, for the transports that have no allocation to point at
 * (ring, nccl): the tensors of an offer, densely, in the order of the offer, aliases left out,
 * each begun at a multiple of ARL_STREAM_ALIGN and cut into chunks of at most `chunk_bytes`.
 * The same on both sides by construction: it depends on the offer's layout and one number.
 */
enum {
    /* So that a boundary splits no element, and copies keep their 16-byte path. */
    ARL_STREAM_ALIGN = 256,
};

/* Bytes [begin, end) of one tensor, at `offset` of their chunk. */
typedef struct arl_stream_piece {
    uint32_t tensor;
    int64_t begin;
    int64_t end;
    int64_t offset;
} arl_stream_piece_t;

typedef struct arl_stream {
    int64_t chunk_bytes;
    int64_t chunk_count;
    int64_t total_bytes; /* of the tensors, without what alignment leaves empty */
    arl_stream_piece_t *pieces;
    int64_t *first_piece; /* of each chunk; chunk_count + 1 entries */
    int64_t *fill;        /* of each chunk, the bytes that are used: what has to be sent */
    uint32_t *next_alias; /* of each tensor, the next one with its bytes, or UINT32_MAX */
} arl_stream_t;

/* Sender: says of every tensor of an offer that is being made that it comes in the stream. */
void arl_stream_place(arl_offer_t *offer);

/* The offer's tensors must be placed so: that of an offer from elsewhere is checked, and
 * ARL_ERR_SYNC otherwise. `chunk_bytes` is a positive multiple of ARL_STREAM_ALIGN.
 * Zero-initialised a stream is empty, and free is safe, also twice. */
arl_status_t arl_stream_init(const arl_offer_t *offer, int64_t chunk_bytes, arl_stream_t *stream_p,
                             arl_error_t *err);
void arl_stream_free(arl_stream_t *stream);

/* The copies that one chunk needs. They are appended, so that one array serves all chunks. */
typedef struct arl_copy_list {
    arl_copy_t *items;
    int64_t count;
    int64_t room;
} arl_copy_list_t;

void arl_copy_list_free(arl_copy_list_t *list);

/*
 * Receiver: appends the part of `plan` that reads from chunk `chunk`, with `src_offset` counted
 * from the chunk's first byte and `alloc` 0. The plan is one for an offer of this stream: its
 * copies are in the order of the offer's tensors and their `src_offset` counts from the first
 * byte of the dense tensor.
 */
arl_status_t arl_stream_unpack(const arl_stream_t *stream, const arl_plan_t *plan, int64_t chunk,
                               arl_copy_list_t *list, arl_error_t *err);

/*
 * Sender: appends the copies that put piece `piece` of the tensor seen by `view` into the chunk
 * that begins at `chunk_base`. They read allocation `alloc`, with `src_offset` counted from
 * view->data.
 */
arl_status_t arl_stream_pack(const arl_stream_piece_t *piece, const arl_view_t *view,
                             uint32_t alloc, char *chunk_base, arl_copy_list_t *list,
                             arl_error_t *err);

#endif
