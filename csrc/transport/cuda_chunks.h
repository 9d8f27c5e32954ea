/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_TRANSPORT_CUDA_CHUNKS_H
#define ARL_TRANSPORT_CUDA_CHUNKS_H

#include "core/arl_stream.h"

#include "transport/arl_transport.h"
#include "transport/cuda_copy.h"
#include "transport/cuda_engine.h"

/*
 * What ring and nccl share: the weights as a stream of chunks (core/arl_stream.h) that pass
 * through a few slots of GPU memory, chunk k through slot k % slots.
 *
 * None of this may be called with the GIL held.
 */

/* Travels in the blobs of offers. */
typedef struct arl_chunk_geometry {
    uint32_t slots;
    uint32_t reserved;
    uint64_t slot_bytes;
} arl_chunk_geometry_t;

_Static_assert(sizeof(arl_chunk_geometry_t) == 16, "layout of the blobs of ring and nccl");

enum {
    ARL_CHUNK_SLOTS_MAX = 16,
    ARL_CHUNK_SLOTS = 2,
    ARL_CHUNK_SLOT_ALIGN = 1 << 16,
};

/* `slots` slots that ring_bytes= asks for (0: `default_bytes`), all together. */
arl_status_t arl_chunk_geometry_make(int64_t ring_bytes, int64_t default_bytes, uint32_t slots,
                                     arl_chunk_geometry_t *geometry_p, arl_error_t *err);

/* Whether a geometry that came from elsewhere is one. */
bool arl_chunk_geometry_valid(const arl_chunk_geometry_t *geometry);

static inline size_t
arl_chunk_geometry_bytes(const arl_chunk_geometry_t *geometry)
{
    return (size_t)geometry->slots * (size_t)geometry->slot_bytes;
}

/* ---- work in order -------------------------------------------------------------------------- */

enum { ARL_CUDA_QUEUE_MAX = 16 };

/* Work that is put on one stream in order and ends in order: at most `depth` items are under way.
 */
typedef struct arl_cuda_queue {
    const arl_cuda_device_t *device; /* NULL: closed */
    arl_cu_stream_t stream;
    uint32_t depth;
    int64_t launched;
    int64_t ended;
    arl_cu_event_t events[ARL_CUDA_QUEUE_MAX];
} arl_cuda_queue_t;

arl_status_t arl_cuda_queue_open(arl_cuda_queue_t *queue, const arl_cuda_device_t *device,
                                 arl_cu_stream_t stream, uint32_t depth, arl_error_t *err);
void arl_cuda_queue_close(arl_cuda_queue_t *queue); /* also twice, and when never opened */

/* For the next sync; nothing may be under way. */
void arl_cuda_queue_reset(arl_cuda_queue_t *queue);

/* Marks the end of item `launched` on the stream. The device must be current. */
arl_status_t arl_cuda_queue_mark(arl_cuda_queue_t *queue, arl_error_t *err);

/* Counts the items that have ended. The device must be current. */
arl_status_t arl_cuda_queue_poll(arl_cuda_queue_t *queue, arl_error_t *err);

/* Lets `stream` wait for the end of item `item`, without the host; it is one of the last `depth`
 * that were launched, or negative for nothing. The device must be current. */
arl_status_t arl_cuda_queue_follow(const arl_cuda_queue_t *queue, int64_t item,
                                   arl_cu_stream_t stream, arl_error_t *err);

/* Waits until the stream is idle: what is about to be freed may be in use. Once, and not for long:
 * the deadline may have passed already. */
bool arl_cuda_idle(const arl_cuda_device_t *device, arl_cu_stream_t stream, double seconds);

#define ARL_CUDA_IDLE_SECONDS 1.0

/* ---- the sender's side ---------------------------------------------------------------------- */

/* The stream of an offer and the tables that fill the slots from tensors whose place is known. */
typedef struct arl_chunk_packer {
    const arl_cuda_engine_t *engine;
    arl_chunk_geometry_t geometry;
    arl_cu_ptr_t memory; /* of the slots */
    arl_stream_t stream;
    uint64_t layout_id; /* that `stream` was made for; 0: none */
    uint32_t count;     /* of `views`; 0: no tables */
    arl_view_t *views;
    arl_cuda_plan_t **plans; /* one for each chunk; NULL where it is another sender's */
    int64_t plan_count;
    /* Of `shares` senders, this one has the chunks k with k % shares == share. 0 is 1. */
    uint32_t share, shares;
} arl_chunk_packer_t;

/* Whether all tensors of an offer are there, and on which device. Specifications say where they
 * will be. */
arl_status_t arl_chunk_survey(const arl_export_request_t *request, int *ordinal_p, bool *complete_p,
                              arl_error_t *err);

/* Which chunks are this sender's; the tables of others go. */
void arl_chunk_packer_share(arl_chunk_packer_t *packer, uint32_t share, uint32_t shares);

/* Brings stream and tables to what this offer has. Most of the time they are that already. */
arl_status_t arl_chunk_packer_prepare(arl_chunk_packer_t *packer,
                                      const arl_export_request_t *request, const arl_offer_t *offer,
                                      bool complete, arl_error_t *err);

int64_t arl_chunk_packer_table_bytes(const arl_chunk_packer_t *packer);

/* Frees the tables, whose runs are done; not the slots. `forked`: only what is the host's. */
void arl_chunk_packer_free(arl_chunk_packer_t *packer, bool forked);

/* What a transport does around the chunks of one serve(). */
typedef struct arl_chunk_server {
    arl_chunk_packer_t *packer;
    const arl_offer_t *offer;
    const arl_feed_t *feed; /* NULL: the tensors are where they were at the offer */
    arl_deadline_t *deadline;
    int64_t next;   /* the chunk that is being filled, or waits for its slot */
    int64_t packed; /* chunks whose copies were put on the engine's stream before; not when fed */
    /* Waits until the slot of chunk `next` may be written to. */
    arl_status_t (*begin)(struct arl_chunk_server *server, arl_error_t *err);
    /* All copies into chunk `next` are on the engine's stream. */
    arl_status_t (*end)(struct arl_chunk_server *server, arl_error_t *err);
    /* The copies of a fed tensor are done. May be NULL. */
    arl_status_t (*fed)(struct arl_chunk_server *server, arl_error_t *err);
    /* Waits until the transport has nothing under way on the GPU: called before what may make the
     * driver wait for all of the device, where no deadline reaches. May be NULL. */
    arl_status_t (*quiet)(struct arl_chunk_server *server, arl_error_t *err);
    void *context;
} arl_chunk_server_t;

/* Whether all that must be fed is. */
arl_status_t arl_chunk_serve_check(const arl_chunk_server_t *server, arl_error_t *err);

/* Fills chunk after chunk. The engine's device must be current. */
arl_status_t arl_chunk_serve(arl_chunk_server_t *server, arl_error_t *err);

/* ---- the receiver's side -------------------------------------------------------------------- */

/* What the copies of one chunk read of it; empty when they read nothing. */
typedef struct arl_chunk_span {
    int64_t begin, end;
} arl_chunk_span_t;

/* The tables that empty the slots. */
typedef struct arl_chunk_unpacker {
    const arl_cuda_engine_t *engine;
    arl_chunk_geometry_t geometry;
    arl_stream_t stream;
    uint64_t plan_serial; /* that `plans` were made for; 0: none */
    arl_cuda_plan_t **plans;
    arl_chunk_span_t *spans;
    int64_t plan_count;
} arl_chunk_unpacker_t;

/* The tables of all chunks, unless they are those of this plan already. Made before anything is
 * written, so that a device without memory for them tears nothing. */
arl_status_t arl_chunk_unpacker_prepare(arl_chunk_unpacker_t *unpacker, const arl_pull_t *pull,
                                        const arl_chunk_geometry_t *geometry, arl_error_t *err);

int64_t arl_chunk_unpacker_table_bytes(const arl_chunk_unpacker_t *unpacker);

/* Copies chunk `chunk` out of its slot, on the engine's stream. `memory`: of the slots. */
arl_status_t arl_chunk_unpacker_run(const arl_chunk_unpacker_t *unpacker, int64_t chunk,
                                    uintptr_t memory, arl_error_t *err);

/* As of the packer. */
void arl_chunk_unpacker_free(arl_chunk_unpacker_t *unpacker, bool forked);

#endif
