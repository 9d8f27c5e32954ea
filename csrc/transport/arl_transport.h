/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_TRANSPORT_TRANSPORT_H
#define ARL_TRANSPORT_TRANSPORT_H

#include "core/arl_binding.h"
#include "core/arl_deadline.h"
#include "core/arl_offer.h"
#include "core/arl_plan.h"

#include "transport/arl_control.h"

/*
 * How bytes move between processes: one table of functions for each way. The sender and the
 * receiver (arl_sender.h, arl_receiver.h) do what is the same for all of them: the offer, the
 * checks, the control block, the states, the deadlines. None of it knows Python; all of it is
 * called without the GIL.
 */

/* Numbers that offers carry; never reused. */
#define ARL_TRANSPORT_TABLE(X)                                                                     \
    X(HOST_SHM, 1, host_shm)                                                                       \
    X(CUDA_IPC, 2, cuda_ipc)                                                                       \
    X(RING, 3, ring)                                                                               \
    X(NCCL, 4, nccl)

typedef enum arl_transport_id {
    ARL_TRANSPORT_NONE = 0,
#define ARL_TRANSPORT_ENUM(name, value, field) ARL_TRANSPORT_##name = (value),
    ARL_TRANSPORT_TABLE(ARL_TRANSPORT_ENUM)
#undef ARL_TRANSPORT_ENUM
        ARL_TRANSPORT_COUNT
} arl_transport_id_t;

/* One tensor of the sender. A specification, of a tensor that will be streamed, has no data. */
typedef struct arl_source {
    const char *name; /* UTF-8, borrowed */
    uint32_t name_length;
    arl_view_t view;
} arl_source_t;

/* What a sender is asked to offer. */
typedef struct arl_export_request {
    const arl_source_t *sources;
    const uint32_t *alias_of; /* for each: the first one with the very same memory */
    uint32_t count;
    uint32_t receivers;
    uint32_t senders; /* that share in sending, this one among them */
    arl_verify_t verify;
    int64_t ring_bytes; /* 0: the transport's default */
    bool keep;          /* what can serve the next offer too may be kept in `*kept` */
    void **kept;        /* the transport's own, NULL at first; one for the life of a sender */
    void *stream;       /* CUstream of the caller, which the bytes are ordered after */
    arl_deadline_t *deadline;
} arl_export_request_t;

struct arl_transport;
typedef struct arl_sync_stats arl_sync_stats_t;

/*
 * The sender's end of one offer. A transport's own struct begins with it. Counted: the sender
 * holds it, and so does each receiver of the same process, which uses `bases` directly instead
 * of mapping what is mapped already.
 */
typedef struct arl_export {
    const struct arl_transport *transport;
    arl_control_t *control; /* NULL when no receiver is on this machine */
    uint8_t nonce[ARL_OFFER_ID_BYTES];
    uint64_t epoch;
    uint32_t tensors;
    int64_t bytes;       /* of all distinct tensors */
    int64_t extra_bytes; /* memory that the offer itself takes */
    bool in_place;       /* receivers read memory that will change when the offer is over: its end
                          * waits for those that are at it */
    const char *const *bases; /* one for each allocation of the offer, in this process */
    int64_t references;       /* under the registry's lock */
    struct arl_export *next;  /* in the registry */
} arl_export_t;

/* The receiver's end. Also the place where kept mappings live between pulls. */
typedef struct arl_import {
    const struct arl_transport *transport;
    const char *const *bases; /* one for each allocation of the offer; NULL when streamed */
    int64_t mappings;         /* of foreign memory, open now */
    int64_t extra_bytes;
    const char *fallback; /* why it works another way than it should; NULL or empty: it does not */
    arl_device_type_t device_type; /* where the mapped memory is; cleared is the CPU */
    int device_index;
} arl_import_t;

/* The tensors of a streaming sender, one after another in the order of the offer, aliases left
 * out. `next` fills the view of tensor `index`, which stays valid until the call for the next. */
typedef struct arl_feed {
    arl_status_t (*next)(void *context, uint32_t index, arl_view_t *view_p, arl_error_t *err);
    void *context;
    void *stream; /* CUstream that the caller makes the tensors on */
} arl_feed_t;

/* One pull, as a transport sees it. */
typedef struct arl_pull {
    const arl_offer_t *offer;
    const arl_plan_t *plan;       /* copies in the order of the offer's tensors */
    const arl_binding_set_t *set; /* that the plan was made for */
    arl_control_t *control;       /* NULL when the sender is on another machine */
    arl_export_t *local;          /* the sender's end, when it is in this process */
    bool views;                   /* the mapping will be handed out: protect the sender's bytes */
    bool keep;                    /* keep_mapped=True: memory may be kept for the next pull */
    void *stream;                 /* CUstream of the caller, which the copies are ordered after */
    arl_deadline_t *deadline;
} arl_pull_t;

typedef struct arl_transport {
    arl_transport_id_t id;
    const char *name;
    bool needs_gpu; /* the tensors must be in GPU memory; otherwise they may */
    bool same_host; /* offers of other machines are refused */
    bool streams;   /* bytes move during serve(); the offer has no allocations */
    bool connects;  /* what open() makes is kept after every pull that went well */

    /* Whether it can work in this process; ARL_ERR_UNAVAILABLE says why not. */
    arl_status_t (*probe)(arl_error_t *err);

    /* ---- sender ---- */

    /* Whether it can send just these tensors; ARL_ERR_UNAVAILABLE becomes the reason of a
     * fallback, where there is one. NULL: any. */
    arl_status_t (*accepts)(const arl_export_request_t *request, arl_error_t *err);

    /*
     * Prepares an offer: fills allocs (malloc, freed by the caller) and alloc_count, blob, unit,
     * and of each tensor alloc, offset, strides and (by request->verify) checksum; the rest is
     * there. Makes the export, with its base cleared but for bases, bytes, extra_bytes and
     * in_place.
     */
    arl_status_t (*offer)(const arl_export_request_t *request, arl_offer_t *offer,
                          arl_export_t **export_p, arl_error_t *err);

    /* Moves the bytes (streaming transports only), until all receivers have them. */
    arl_status_t (*serve)(arl_export_t *export, const arl_offer_t *offer, const arl_feed_t *feed,
                          arl_deadline_t *deadline, arl_error_t *err);

    /*
     * Sends the part of sender `rank` (above 0) of another process's offer, whose tensors the
     * request's are like, until all receivers have it. Fills bytes and extra_bytes of the
     * statistics. NULL: one sender sends all.
     */
    arl_status_t (*join)(const arl_export_request_t *request, const arl_offer_t *offer,
                         uint32_t rank, arl_control_t *control, arl_sync_stats_t *stats,
                         arl_error_t *err);

    /* Frees all. No receiver of this process uses it any more; never blocks. `forked`: the
     * caller is a child of the process that made it, and must not touch what is shared. */
    void (*destroy)(arl_export_t *export, bool forked);

    /* Frees what was kept between offers and sets it to NULL. NULL: nothing ever is. */
    void (*discard)(void **kept, bool forked);

    /* ---- receiver ---- */

    /*
     * Makes the sender's memory readable here. `*import_io` is NULL or what an earlier pull
     * kept: of that, all that is still the same is used again and the rest closed. Checks the
     * identity and size of all that it opens against the offer.
     */
    arl_status_t (*open)(const arl_pull_t *pull, arl_import_t **import_io, arl_error_t *err);

    /* Runs the plan. When it returns ARL_OK, all bytes are written and visible to any later work
     * of this process. */
    arl_status_t (*copy)(const arl_pull_t *pull, arl_import_t *import, arl_error_t *err);

    /*
     * Streaming transports whose tensors can be lent one at a time: brings tensor `index`, which
     * is no alias and comes after the one before, and says where its dense bytes are until the
     * next call. What is in between is passed over; the offer's tensor_count passes over the
     * rest. Written after what pull->stream holds, and there when it returns. NULL: the import's
     * bases are all there is to it.
     */
    arl_status_t (*view)(const arl_pull_t *pull, arl_import_t *import, uint32_t index,
                         const char **address_p, arl_error_t *err);

    /* The checksums of tensors, of the sender (base from the import) or of the receiver. */
    arl_status_t (*checksums)(const arl_pull_t *pull, arl_import_t *import, const arl_view_t *views,
                              int64_t count, uint64_t *sums, arl_error_t *err);

    /* `keep`: keeps what the next pull may use again; otherwise closes all, frees, sets NULL. */
    void (*close)(arl_import_t **import_io, bool keep);
} arl_transport_t;

#define ARL_TRANSPORT_DECLARE(name, value, field)                                                  \
    extern const arl_transport_t arl_transport_##field;
ARL_TRANSPORT_TABLE(ARL_TRANSPORT_DECLARE)
#undef ARL_TRANSPORT_DECLARE

/* Whether an offer comes from where its transport can work with it: for one that works within a
 * machine, this one, and a process that can be seen from here. */
arl_status_t arl_transport_check_origin(const arl_transport_t *transport, const arl_offer_t *offer,
                                        const char *operation, arl_error_t *err);

/* NULL for a number or name that is none. */
const arl_transport_t *arl_transport_get(uint32_t id);
const arl_transport_t *arl_transport_find(const char *name);

/* What the caller of a sender asked for; -1 is "not said". */
typedef struct arl_choice {
    const char *transport; /* by name, or NULL */
    int cuda_ipc;
    int low_memory;
    int colocated; /* sender and receivers are on the same GPU (or host) */
} arl_choice_t;

/*
 * Chooses the transport. Contradictory wishes are ARL_ERR_VALUE; a wish that cannot be had is
 * ARL_ERR_UNAVAILABLE. `fallback` (ARL_OFFER_REASON_MAX bytes) becomes the reason when another
 * transport is used than the wishes name, or when the wishes leave only host_shm to GPU memory;
 * it is empty otherwise.
 */
arl_status_t arl_transport_choose(const arl_choice_t *choice, const arl_export_request_t *request,
                                  const arl_transport_t **transport_p, char *fallback,
                                  arl_error_t *err);

/* ---- what happened, for SyncStats ---- */

struct arl_sync_stats {
    const arl_transport_t *transport;
    char fallback[ARL_OFFER_REASON_MAX];
    int64_t tensors;
    int64_t bytes;
    uint64_t version;
    double offer_s;
    double open_s;
    double validate_s;
    double copy_s;
    double verify_s;
    double close_s;
    double total_s;
    int64_t extra_bytes;
    int64_t verified;  /* tensors whose checksum was compared */
    int64_t untouched; /* names of the receiver that the offer left out */
};

#endif
