/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_TRANSPORT_RING_H
#define ARL_TRANSPORT_RING_H

#include "transport/arl_transport.h"
#include "transport/cuda_chunks.h"

/*
 * ring: the weights pass through a few fixed slots of GPU memory that the sender has allocated
 * itself, so that the memory which a sync takes does not grow with the weights, and so that
 * tensors can be sent whose own memory has no IPC handle.
 *
 * The tensors are a stream of chunks (core/arl_stream.h), chunk k in slot k % slots. Two kinds of
 * sequence numbers in the control block say how far each side is: the sender's is the number of
 * chunks that are whole in their slots, each receiver's the number that it has taken out. Nothing
 * else passes between the processes, and neither waits on the GPU for the other: a number is
 * raised by the host when the work before it has ended. The offer's blob is the geometry.
 */

/* Chunks follow one another within microseconds while a sync runs, and a sleep costs more. */
static const int64_t ARL_RING_SPIN_NS = 2000000;

/* Both slots together, unless ring_bytes= says something else. */
static const int64_t ARL_RING_BYTES = (int64_t)128 << 20;

/* ---- the functions of the vtable ---- */

arl_status_t arl_ring_offer(const arl_export_request_t *request, arl_offer_t *offer,
                            arl_export_t **export_p, arl_error_t *err);
arl_status_t arl_ring_serve(arl_export_t *export, const arl_offer_t *offer, const arl_feed_t *feed,
                            arl_deadline_t *deadline, arl_error_t *err);
void arl_ring_destroy(arl_export_t *export, bool forked);
void arl_ring_discard(void **kept, bool forked);

arl_status_t arl_ring_open(const arl_pull_t *pull, arl_import_t **import_io, arl_error_t *err);
arl_status_t arl_ring_copy(const arl_pull_t *pull, arl_import_t *import, arl_error_t *err);
arl_status_t arl_ring_view(const arl_pull_t *pull, arl_import_t *import, uint32_t index,
                           const char **address_p, arl_error_t *err);
arl_status_t arl_ring_checksums(const arl_pull_t *pull, arl_import_t *import,
                                const arl_view_t *views, int64_t count, uint64_t *sums,
                                arl_error_t *err);
void arl_ring_close(arl_import_t **import_io, bool keep);

#endif
