/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_TRANSPORT_SENDER_H
#define ARL_TRANSPORT_SENDER_H

#include "transport/arl_transport.h"

/* The trainer's side of weight sync, without Python. One thread at a time. */
typedef struct arl_sender {
    uint8_t nonce[ARL_OFFER_ID_BYTES];
    arl_peer_t self;
    uint64_t epoch; /* of the last offer; 0 before the first */
    uint32_t receivers;
    uint32_t senders;
    arl_verify_t verify;
    int64_t ring_bytes;
    bool keep_mapped;
    arl_choice_t choice;
    arl_export_t *current;  /* NULL when there is no offer out */
    arl_offer_t offer;      /* of `current`, for streaming */
    arl_sync_stats_t stats; /* of `current` */
    void *kept[ARL_TRANSPORT_COUNT];

    /* What the last offer was made of, and what was found out about it: the same the next time, as
     * a rule. `known` is compared with only. */
    arl_source_t *known;
    uint32_t *alias_of;
    uint32_t known_count;
    uint64_t layout_id;
    int64_t swept_ns; /* when it last cleaned up after dead processes; 0 for never */
} arl_sender_t;

/* Draws the nonce. `receivers`, `senders`, `verify`, `ring_bytes`, `keep_mapped` and `choice` are
 * the caller's to fill. */
arl_status_t arl_sender_init(arl_sender_t *sender, arl_error_t *err);

/*
 * Makes an offer of `sources`, which replaces the one before it. `epoch` 0: the next number;
 * otherwise larger than the last one. `*bytes_p` is from malloc.
 */
arl_status_t arl_sender_offer(arl_sender_t *sender, const arl_source_t *sources, uint32_t count,
                              uint64_t epoch, void *stream, arl_deadline_t *deadline,
                              uint8_t **bytes_p, size_t *size_p, arl_error_t *err);

/* Streams what is to be streamed from `feed` (NULL: nothing to feed), and waits until every
 * receiver has finished. `stats_p` is filled on success. */
arl_status_t arl_sender_serve(arl_sender_t *sender, const arl_feed_t *feed,
                              arl_deadline_t *deadline, arl_sync_stats_t *stats_p,
                              arl_error_t *err);

/*
 * Takes part in an offer of another sender, as sender `rank` of it (above 0): checks that `sources`
 * are what it offers, and sends a share of them. An offer of its own is released first.
 */
arl_status_t arl_sender_join(arl_sender_t *sender, const arl_source_t *sources, uint32_t count,
                             const void *bytes, size_t size, uint32_t rank, void *stream,
                             arl_deadline_t *deadline, arl_sync_stats_t *stats_p, arl_error_t *err);

/* Ends the offer. Waits only where receivers are reading memory just now that will be used again;
 * when the deadline passes then, the offer stays. Without an offer it does nothing. */
arl_status_t arl_sender_release(arl_sender_t *sender, arl_deadline_t *deadline, arl_error_t *err);

/* Ends the offer at once, whoever uses it. `forked`: in a child of the process that made it. */
void arl_sender_abandon(arl_sender_t *sender, bool forked);

/* Gives back what is kept for the next offer. After the end of the last one. */
void arl_sender_close(arl_sender_t *sender, bool forked);

/* Ends of offers that this sender, or a receiver of this process, still holds. */
int64_t arl_sender_live(const arl_sender_t *sender);

/* ---- for receivers of the same process ---- */

/* The end of this very offer if it is in this process, with one more reference; or NULL. */
arl_export_t *arl_export_find(const arl_offer_t *offer);
arl_export_t *arl_export_hold(arl_export_t *export); /* one reference more */
void arl_export_drop(arl_export_t *export);

#endif
