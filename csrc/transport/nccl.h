/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_TRANSPORT_NCCL_H
#define ARL_TRANSPORT_NCCL_H

#include "transport/arl_transport.h"
#include "transport/cuda_chunks.h"
#include "transport/nccl_api.h"

/*
 * nccl: the weights go from the sender's GPU to those of the receivers through one communicator,
 * of which the sender is rank 0 and receiver i rank i + 1.
 *
 * The tensors are a stream of chunks. A chunk is packed into a bucket by one launch on the
 * engine's stream, while the one before it is on the wire: a stream of its own, on which NCCL
 * works. The receivers unpack in the same way. Events order the two streams, so the host only
 * posts and then looks on; a few chunks are posted ahead, never more than ARL_CUDA_QUEUE_MAX.
 *
 * NCCL itself compares nothing, and what differs between two ranks shows as a hang. So everything
 * is compared before it is called:
 *
 *     sender    offer(): version, settings, device, buckets in the offer's blob
 *     receiver  open():  compares them; leaves a hello in its slot's message; slot sequence 1
 *     sender    serve(): when all have come, compares the hellos; puts a new unique id into each
 *                        message, unless all of them and it hold one communicator already; page
 *                        sequence = generation of the communicator * 2 + (1 when it is new)
 *     both               ncclCommInitRankConfig where it is new, and the transfer
 *
 * A unique id is made when all have come, and not with the offer: each costs its maker a
 * listening socket and a thread until every rank has used it.
 */

/* Both buckets together, unless ring_bytes= says something else. */
static const int64_t ARL_NCCL_BYTES = (int64_t)256 << 20;

/* The offer's blob; the text of the settings follows. Same machine, so in its own
 * representation. */
typedef struct arl_nccl_blob {
    arl_chunk_geometry_t geometry;
    int32_t version;
    uint32_t settings_size;
} arl_nccl_blob_t;

/* What a receiver leaves in its slot's message. */
typedef struct arl_nccl_hello {
    uint8_t uuid[ARL_OFFER_ID_BYTES]; /* of its device */
    uint64_t layout_id;
    int64_t chunk_count;
    int64_t total_bytes;
    uint64_t generation; /* of the communicator that it holds with this sender; 0: none */
} arl_nccl_hello_t;

_Static_assert(sizeof(arl_nccl_blob_t) == 24, "layout of the blob of nccl");
_Static_assert(sizeof(arl_nccl_hello_t) <= ARL_CONTROL_MESSAGE_MAX, "a hello fits a message");
_Static_assert(sizeof(arl_nccl_id_t) == ARL_CONTROL_MESSAGE_MAX, "a unique id fits a message");

/* ---- settings ------------------------------------------------------------------------------- */

enum { ARL_NCCL_SETTINGS_MAX = 4096 };

/* "NAME=value" lines of the environment variables that all ranks must have alike. */
size_t arl_nccl_settings_write(char text[ARL_NCCL_SETTINGS_MAX]);

/* ARL_ERR_UNAVAILABLE names each one that differs, with both values. `theirs` may hold anything. */
arl_status_t arl_nccl_settings_compare(const char *theirs, size_t theirs_size, arl_error_t *err);

/* ---- one side's end ------------------------------------------------------------------------- */

/* Who to look at while waiting, and for how long. */
typedef struct arl_nccl_watch {
    const char *operation; /* "serve", "pull" */
    arl_deadline_t *deadline;
    arl_control_t *control;
    arl_status_t (*check)(arl_control_t *control, arl_error_t *err);
} arl_nccl_watch_t;

typedef struct arl_nccl_link {
    const arl_nccl_api_t *api;
    arl_cuda_engine_t *engine;
    arl_cu_stream_t wire;
    arl_nccl_comm_t comm; /* NULL: not connected */
    int world;
    uint64_t generation; /* of `comm`, counted by its sender */
    arl_cu_ptr_t buckets;
    arl_chunk_geometry_t geometry;
    bool stuck;             /* work did not end in time when it was last looked at */
    arl_cuda_queue_t wired; /* transfers, on `wire` */
    arl_cuda_queue_t moved; /* packing or unpacking, on the engine's stream */
} arl_nccl_link_t;

/* Zero-initialised a link is closed. */
arl_status_t arl_nccl_link_open(int ordinal, arl_nccl_link_t *link_p, arl_error_t *err);

/* Closes all, politely where the communicator is well. Also twice. `forked`: nothing of NCCL or
 * of the driver is touched. */
void arl_nccl_link_close(arl_nccl_link_t *link, bool forked);

/* The buckets, unless they are there with this geometry. */
arl_status_t arl_nccl_link_allocate(arl_nccl_link_t *link, const arl_chunk_geometry_t *geometry,
                                    arl_error_t *err);
/* Returns whether they are gone: they stay where work on them does not end. */
bool arl_nccl_link_deallocate(arl_nccl_link_t *link);

/* Joins the communicator of `id`. On failure there is none. */
arl_status_t arl_nccl_link_connect(arl_nccl_link_t *link, const arl_nccl_id_t *id, int rank,
                                   int world, uint64_t generation, const arl_nccl_watch_t *watch,
                                   arl_error_t *err);

/* Ends the communicator; what is under way ends with it. */
void arl_nccl_link_finish(arl_nccl_link_t *link);
void arl_nccl_link_abort(arl_nccl_link_t *link);

/* Waits for what is under way. False where it does not end: a device that hangs is waited for
 * once. */
bool arl_nccl_link_idle(arl_nccl_link_t *link);

/* For a sync: nothing is under way. */
void arl_nccl_link_reset(arl_nccl_link_t *link);

/*
 * Puts the transfer of `size` bytes between rank 0 and all the others on the wire, from or into
 * `buffer`, and returns when it has been launched. The device must be current.
 */
arl_status_t arl_nccl_link_post(arl_nccl_link_t *link, bool send, uintptr_t buffer, size_t size,
                                const arl_nccl_watch_t *watch, arl_error_t *err);

/* Waits until `queue`, one of the link's, has ended `goal` items. The device must be current. */
arl_status_t arl_nccl_link_reach(arl_nccl_link_t *link, arl_cuda_queue_t *queue, int64_t goal,
                                 const arl_nccl_watch_t *watch, arl_error_t *err);

static inline uintptr_t
arl_nccl_link_bucket(const arl_nccl_link_t *link, int64_t chunk)
{
    return (uintptr_t)link->buckets + (uintptr_t)((uint64_t)chunk % link->geometry.slots) *
                                          (uintptr_t)link->geometry.slot_bytes;
}

/* ---- the functions of the vtable ---- */

arl_status_t arl_nccl_offer(const arl_export_request_t *request, arl_offer_t *offer,
                            arl_export_t **export_p, arl_error_t *err);
arl_status_t arl_nccl_serve(arl_export_t *export, const arl_offer_t *offer, const arl_feed_t *feed,
                            arl_deadline_t *deadline, arl_error_t *err);
void arl_nccl_destroy(arl_export_t *export, bool forked);
void arl_nccl_discard(void **kept, bool forked);

arl_status_t arl_nccl_pull_open(const arl_pull_t *pull, arl_import_t **import_io, arl_error_t *err);
arl_status_t arl_nccl_pull_copy(const arl_pull_t *pull, arl_import_t *import, arl_error_t *err);
arl_status_t arl_nccl_pull_checksums(const arl_pull_t *pull, arl_import_t *import,
                                     const arl_view_t *views, int64_t count, uint64_t *sums,
                                     arl_error_t *err);
void arl_nccl_pull_close(arl_import_t **import_io, bool keep);

#endif
