/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_TRANSPORT_NCCL_H
#define ARL_TRANSPORT_NCCL_H

#include "core/arl_stream.h"
#include "transport/arl_transport.h"
#include "transport/cuda_chunks.h"
#include "transport/nccl_api.h"

/*
 * nccl: the weights go from the GPUs of the senders to those of the receivers through one
 * communicator. The sender that made the offer is rank 0, those that join it are the next ranks,
 * the receivers the last: who has slot i of the control block is rank i + 1.
 *
 * The tensors are a stream of chunks. A chunk is packed into a bucket by one launch on the
 * engine's stream, while the one before it is on the wire: a stream of its own, on which NCCL
 * works. The receivers unpack in the same way. Events order the two streams, so the host only
 * posts and then looks on; a few chunks are posted ahead, never more than ARL_CUDA_QUEUE_MAX.
 *
 * Of S senders, sender j packs and sends the chunks k with k % S == j. A round is S chunks, one of
 * each sender, in buckets of their own, put on the wire as one group: NCCL is free to move them
 * side by side, and all ranks put all groups there in the same order. With one receiver a chunk is
 * sent to it. With several it is broadcast, and the other senders take it too, into the bucket
 * where nothing of theirs is.
 *
 * NCCL itself compares nothing, and what differs between two ranks shows as a hang. So everything
 * is compared before it is called:
 *
 *     sender    offer(): version, settings, device, buckets in the offer's blob
 *     receiver  open():  compares them; leaves a hello in its slot's message; slot sequence 1
 *     co-sender join():  the same, and its tensors with those of the offer
 *     sender    serve(): when all have come, compares the hellos; puts a new unique id into each
 *                        message, unless all of them and it hold one communicator already; page
 *                        sequence = generation of the communicator * 2 + (1 when it is new)
 *     all                ncclCommInitRankConfig where it is new, and the transfer
 *
 * A unique id is made when all have come, and not with the offer: each costs its maker a
 * listening socket and a thread until every rank has used it.
 */

/* Both buckets together, unless ring_bytes= says something else. */
static const int64_t ARL_NCCL_BYTES = (int64_t)256 << 20;

/*
 * Buckets are filled and emptied by one multiprocessor in so many while another bucket is on the
 * wire: that takes a third of the wire's time, and with all of them NCCL's own blocks and loads
 * wait. On two H200 a quarter took 3.70 ms for 1.19 GB, an eighth 3.82, half 3.75 and all 3.93.
 */
enum { ARL_NCCL_SHARE = 4 };

/* The offer's blob; the text of the settings follows. Same machine, so in its own
 * representation. */
typedef struct arl_nccl_blob {
    arl_chunk_geometry_t geometry;
    int32_t version;
    uint32_t settings_size;
} arl_nccl_blob_t;

/* What a receiver or a co-sender leaves in its slot's message. */
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

/* ARL_ERR_UNAVAILABLE names each one that differs, with both values. `theirs` may hold anything;
 * `self` is "this receiver" or "this sender". */
arl_status_t arl_nccl_settings_compare(const char *theirs, size_t theirs_size,
                                       const char *operation, const char *self, arl_error_t *err);

/* ---- one side's end ------------------------------------------------------------------------- */

/* Who to look at while waiting, and for how long. */
typedef struct arl_nccl_watch {
    const char *operation; /* "serve", "join", "pull" */
    arl_deadline_t *deadline;
    arl_control_t *control;
    arl_status_t (*check)(arl_control_t *control, arl_error_t *err);
} arl_nccl_watch_t;

/* A place in a communicator. The first `senders` ranks send. */
typedef struct arl_nccl_place {
    int rank;
    int world;
    int senders;
    uint64_t generation;               /* of the communicator, counted by its first rank; 0: none */
    uint8_t nonce[ARL_OFFER_ID_BYTES]; /* of that sender */
} arl_nccl_place_t;

typedef struct arl_nccl_link {
    const arl_nccl_api_t *api;
    arl_cuda_engine_t *engine;
    arl_cu_stream_t wire;
    arl_nccl_comm_t comm;   /* NULL: not connected */
    arl_nccl_place_t place; /* in `comm` */
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
arl_status_t arl_nccl_link_connect(arl_nccl_link_t *link, const arl_nccl_id_t *id,
                                   const arl_nccl_place_t *place, const arl_nccl_watch_t *watch,
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
 * Puts this rank's part of a round on the wire, from and into the buckets of its chunks, and
 * returns when it has been launched. The device must be current.
 */
arl_status_t arl_nccl_link_post(arl_nccl_link_t *link, const arl_stream_t *stream, int64_t round,
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

/* Rounds that the buckets hold at a time. */
static inline int64_t
arl_nccl_link_depth(const arl_nccl_link_t *link, uint32_t senders)
{
    return link->geometry.slots / senders;
}

static inline int64_t
arl_nccl_rounds(const arl_stream_t *stream, uint32_t senders)
{
    return (stream->chunk_count + senders - 1) / senders;
}

/* ---- meeting -------------------------------------------------------------------------------- */

/* Rank 0: waits for all, compares them, tells them to begin, and connects. */
arl_status_t arl_nccl_meet_lead(arl_nccl_link_t *link, const arl_stream_t *stream,
                                const arl_offer_t *offer, const arl_nccl_watch_t *watch,
                                arl_error_t *err);

/* What can be compared with an offer's blob and unit: version, settings, buckets; devices, unless
 * there is nothing to send. */
arl_status_t arl_nccl_check_blob(const arl_offer_t *offer, const char *operation,
                                 arl_chunk_geometry_t *geometry_p, arl_error_t *err);
arl_status_t arl_nccl_check_device(const arl_offer_t *offer, const char *operation,
                                   const arl_cuda_device_t *device, arl_error_t *err);

/* The other ranks: says that this one has come, waits until rank 0 has seen all, and connects. */
arl_status_t arl_nccl_meet_follow(arl_nccl_link_t *link, const arl_stream_t *stream,
                                  const arl_offer_t *offer, const arl_nccl_watch_t *watch,
                                  arl_error_t *err);

/* ---- the functions of the vtable ---- */

arl_status_t arl_nccl_offer(const arl_export_request_t *request, arl_offer_t *offer,
                            arl_export_t **export_p, arl_error_t *err);
arl_status_t arl_nccl_serve(arl_export_t *export, const arl_offer_t *offer, const arl_feed_t *feed,
                            arl_deadline_t *deadline, arl_error_t *err);
arl_status_t arl_nccl_join(const arl_export_request_t *request, const arl_offer_t *offer,
                           uint32_t rank, arl_control_t *control, arl_sync_stats_t *stats,
                           arl_error_t *err);
void arl_nccl_destroy(arl_export_t *export, bool forked);
void arl_nccl_discard(void **kept, bool forked);

arl_status_t arl_nccl_pull_open(const arl_pull_t *pull, arl_import_t **import_io, arl_error_t *err);
arl_status_t arl_nccl_pull_copy(const arl_pull_t *pull, arl_import_t *import, arl_error_t *err);
arl_status_t arl_nccl_pull_checksums(const arl_pull_t *pull, arl_import_t *import,
                                     const arl_view_t *views, int64_t count, uint64_t *sums,
                                     arl_error_t *err);
void arl_nccl_pull_close(arl_import_t **import_io, bool keep);

#endif
