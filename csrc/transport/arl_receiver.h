/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_TRANSPORT_RECEIVER_H
#define ARL_TRANSPORT_RECEIVER_H

#include "transport/arl_peer.h"
#include "transport/arl_transport.h"

enum { ARL_RECEIVER_SEEN_MAX = 16 };

/* The sampler's side of weight sync, without Python. One thread at a time. */
typedef struct arl_receiver {
    arl_binding_set_t set; /* the owner fills and frees it; see arl_receiver_rebind */
    bool keep_mapped;
    void *stream; /* CUstream of the caller, which the copies are ordered after; set by the owner */

    bool torn;
    char torn_text[256]; /* why */
    bool versioned;      /* some full pull has succeeded */
    uint64_t version;    /* epoch of the last one */

    /* The last epoch of each of the last senders: an offer is used once, and in order. */
    struct {
        uint8_t nonce[ARL_OFFER_ID_BYTES];
        uint64_t epoch; /* 0: free */
    } seen[ARL_RECEIVER_SEEN_MAX];
    uint32_t seen_next;

    /* The plan of the last offer, good for all that look the same. */
    bool planned;
    arl_offer_t plan_offer;
    arl_plan_t plan;
    arl_plan_report_t report;

    /* The process of the last offer. */
    bool watching;
    arl_peer_watch_t sender;

    arl_import_t *kept[ARL_TRANSPORT_COUNT];
} arl_receiver_t;

/* The set has changed (other memory, other bindings): no plan holds any more. */
void arl_receiver_rebind(arl_receiver_t *receiver);

/* One offer, from its bytes to the end. */
typedef struct arl_session {
    arl_offer_t offer;
    arl_pull_t pull;
    const arl_transport_t *transport;
    arl_import_t *import;
    arl_verify_t verify;
    bool was_torn; /* before */
    bool fresh;    /* the names were validated now, and not with an earlier offer */
    int64_t mark_ns;
    arl_sync_stats_t stats;
} arl_session_t;

/*
 * All that comes before the first byte: reads the offer, checks where it comes from and that it
 * is new, attaches to it, validates all of it against the set, and opens the sender's memory.
 * On failure nothing is held, nothing was written, and the sender knows why.
 */
arl_status_t arl_receiver_begin(arl_receiver_t *receiver, const void *bytes, size_t size,
                                arl_verify_t verify, bool views, arl_deadline_t *deadline,
                                arl_session_t *session_p, arl_error_t *err);

/* From here on the receiver is torn, until it ends with success. */
void arl_receiver_tear(arl_receiver_t *receiver, arl_session_t *session);

/* Tears, runs the plan and compares the checksums. The session is still to be ended. */
arl_status_t arl_receiver_copy(arl_receiver_t *receiver, arl_session_t *session, arl_error_t *err);

/*
 * Closes what is open and tells the sender. `reason` NULL is success: the version is set, and
 * the receiver whole again if all of its names were written. `session->import` may have been
 * taken out by the caller, who then closes it.
 */
void arl_receiver_end(arl_receiver_t *receiver, arl_session_t *session, const arl_error_t *reason);

/* In a child after fork: lets go of a session of the parent without a word to the sender. */
void arl_session_forget(arl_session_t *session);

/* Begin, copy, end. */
arl_status_t arl_receiver_pull(arl_receiver_t *receiver, const void *bytes, size_t size,
                               arl_verify_t verify, arl_deadline_t *deadline,
                               arl_sync_stats_t *stats_p, bool *fresh_p, arl_error_t *err);

/* Mappings of foreign memory that are kept. */
int64_t arl_receiver_live(const arl_receiver_t *receiver);

/* Closes them, and forgets the plan and the sender. Safe to repeat. */
void arl_receiver_close(arl_receiver_t *receiver);

#endif
