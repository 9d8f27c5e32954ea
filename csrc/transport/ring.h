/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_TRANSPORT_RING_H
#define ARL_TRANSPORT_RING_H

#include "core/arl_stream.h"

#include "transport/arl_transport.h"
#include "transport/cuda_copy.h"
#include "transport/cuda_engine.h"

/*
 * ring: the weights pass through a few fixed slots of GPU memory that the sender has allocated
 * itself, so that the memory which a sync takes does not grow with the weights, and so that
 * tensors can be sent whose own memory has no IPC handle.
 *
 * The tensors are a stream of chunks (core/arl_stream.h), chunk k in slot k % slots. Two kinds of
 * sequence numbers in the control block say how far each side is: the sender's is the number of
 * chunks that are whole in their slots, each receiver's the number that it has taken out. Nothing
 * else passes between the processes, and neither waits on the GPU for the other: a number is
 * raised by the host when the work before it has ended.
 */
enum {
    ARL_RING_SLOTS_MAX = 8,
    ARL_RING_SLOTS = 2,
    ARL_RING_SLOT_ALIGN = 1 << 16,
};

/* Both slots together, unless ring_bytes= says something else. */
static const int64_t ARL_RING_BYTES = (int64_t)128 << 20;

/* The offer's blob: same machine, so in its own representation. */
typedef struct arl_ring_geometry {
    uint32_t slots;
    uint32_t reserved;
    uint64_t slot_bytes;
} arl_ring_geometry_t;

_Static_assert(sizeof(arl_ring_geometry_t) == 16, "layout of the ring's blob");

/*
 * Work that is put on a stream in order and ends in order: at most one item a slot is under way.
 */
typedef struct arl_ring_queue {
    const arl_cuda_engine_t *engine;
    uint32_t slots;
    int64_t launched;
    int64_t ended;
    arl_cu_event_t events[ARL_RING_SLOTS_MAX];
} arl_ring_queue_t;

arl_status_t arl_ring_queue_open(arl_ring_queue_t *queue, const arl_cuda_engine_t *engine,
                                 uint32_t slots, arl_error_t *err);
void arl_ring_queue_close(arl_ring_queue_t *queue); /* also twice, and when never opened */
void
arl_ring_queue_reset(arl_ring_queue_t *queue); /* for the next sync; nothing may be under way */

/* Marks the end of item `launched` on the engine's stream. The device must be current. */
arl_status_t arl_ring_queue_mark(arl_ring_queue_t *queue, arl_error_t *err);

/* Counts the items that have ended. The device must be current. */
arl_status_t arl_ring_queue_poll(arl_ring_queue_t *queue, arl_error_t *err);

/* Waits until the stream is idle, a second at most: what is about to be freed may be in use. */
bool arl_ring_idle(const arl_cuda_engine_t *engine);

/* ---- the functions of the vtable ---- */

arl_status_t arl_ring_offer(const arl_export_request_t *request, arl_offer_t *offer,
                            arl_export_t **export_p, arl_error_t *err);
arl_status_t arl_ring_serve(arl_export_t *export, const arl_offer_t *offer, const arl_feed_t *feed,
                            arl_deadline_t *deadline, arl_error_t *err);
void arl_ring_destroy(arl_export_t *export, bool forked);
void arl_ring_discard(void **kept, bool forked);

arl_status_t arl_ring_open(const arl_pull_t *pull, arl_import_t **import_io, arl_error_t *err);
arl_status_t arl_ring_copy(const arl_pull_t *pull, arl_import_t *import, arl_error_t *err);
arl_status_t arl_ring_checksum(const arl_pull_t *pull, arl_import_t *import, const arl_view_t *view,
                               uint64_t *sum_p, arl_error_t *err);
void arl_ring_close(arl_import_t **import_io, bool keep);

#endif
