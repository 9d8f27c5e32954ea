/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_WIRE_CHUNK_H
#define ARL_CORE_WIRE_CHUNK_H

#include "core/arl_sha256.h"
#include "core/arl_wire.h"

/*
 * Byte chunks: an encoded frame cut into pieces that travel alone, each of them a frame that
 * holds {"payload": uint8[k]} and says in its metadata which part of what it is. They may
 * arrive in any order.
 */

typedef enum arl_wire_chunk_kind {
    ARL_WIRE_CHUNK_NONE = 0, /* a frame without chunk metadata */
    ARL_WIRE_CHUNK_REQUEST,
    ARL_WIRE_CHUNK_RESULT,
} arl_wire_chunk_kind_t;

typedef struct arl_wire_chunk {
    arl_wire_chunk_kind_t kind;
    int64_t index;
    int64_t total;
    int64_t frame_size;          /* of the whole frame, in bytes */
    char sha256[ARL_SHA256_HEX]; /* of the whole frame */
    const char *group;           /* requests only; UTF-8, NULL when missing */
    size_t group_size;
    const char *operation; /* UTF-8, NULL when missing */
    size_t operation_size;
    const char *payload; /* in the chunk's frame */
    size_t payload_size;
    char *strings; /* what group and operation point into, when parsed */
} arl_wire_chunk_t;

/* "request", "result"; NONE for others. */
arl_wire_chunk_kind_t arl_wire_chunk_kind(const char *name, size_t size);

/* ---- writing ------------------------------------------------------------------------------- */

/*
 * How to cut a frame of chunk->frame_size bytes so that no chunk is larger than `max_bytes`:
 * starts at max(1, max_bytes - 8192) bytes of payload and halves until every chunk fits. Fills
 * chunk->total; ARL_ERR_WIRE when even single bytes do not fit.
 */
arl_status_t arl_wire_chunk_plan(arl_wire_chunk_t *chunk, int64_t max_bytes,
                                 int64_t *payload_size_p, arl_error_t *err);

/* What precedes the payload of one chunk, `payload_size` bytes long, in its frame. */
arl_status_t arl_wire_chunk_write_header(arl_text_t *out, const arl_wire_chunk_t *chunk,
                                         int64_t payload_size, arl_error_t *err);

/* ---- reading ------------------------------------------------------------------------------- */

/* Reads one frame; kind is NONE when it is a valid frame without chunk metadata. */
arl_status_t arl_wire_chunk_parse(const void *frame, size_t size, arl_wire_chunk_t *chunk_p,
                                  arl_error_t *err);
void arl_wire_chunk_free(arl_wire_chunk_t *chunk);

/*
 * Checks that the chunks belong together and are complete, and sorts them by index. Messages
 * count chunks in the order they were given. After success chunks[0].frame_size is the sum of
 * the payload sizes.
 */
arl_status_t arl_wire_chunks_check(arl_wire_chunk_t *chunks, int64_t count, arl_error_t *err);

#endif
