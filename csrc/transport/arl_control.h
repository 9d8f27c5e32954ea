/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_TRANSPORT_CONTROL_H
#define ARL_TRANSPORT_CONTROL_H

#include "core/arl_deadline.h"
#include "core/arl_offer.h"

#include "transport/arl_peer.h"

#include <stdatomic.h>

/*
 * The control block: a page or two of shared memory, one for each offer, in which sender and
 * receivers of one machine see each other's progress without any call. The sender makes it,
 * each receiver takes a slot, and the name goes when the last slot is taken.
 *
 * Where several senders share the work (nccl), the first of them made the offer and is "the
 * sender" here; sender `rank` of the others has slot rank - 1, and the receivers come after them.
 *
 *     receiver   free -> taken -> attached -> writing -> done
 *                                     \           \---> failed
 *                                      \--------------> failed
 *     co-sender  free -> taken -> attached -> done or failed
 *     sender     offered -> serving -> served; released or failed from any of them
 *
 * States are stored with release and read with acquire: who reads a state sees all that was
 * written before it. Every wait here has a deadline, and ends when the other side dies.
 */
typedef enum arl_slot_state {
    ARL_SLOT_FREE = 0,
    ARL_SLOT_TAKEN, /* being filled in */
    ARL_SLOT_ATTACHED,
    ARL_SLOT_WRITING, /* its weights are torn */
    ARL_SLOT_DONE,
    ARL_SLOT_FAILED,
} arl_slot_state_t;

typedef enum arl_sender_state {
    ARL_SENDER_OFFERED = 1,
    ARL_SENDER_SERVING,
    ARL_SENDER_SERVED,
    ARL_SENDER_RELEASED,
    ARL_SENDER_FAILED,
} arl_sender_state_t;

enum { ARL_CONTROL_TEXT_MAX = 512, ARL_CONTROL_MESSAGE_MAX = 128 };

/* Who writes what has cache lines of its own. */
typedef struct arl_control_slot {
    _Alignas(64) _Atomic uint32_t state;
    int32_t error_code; /* arl_status_t, when failed */
    arl_peer_t peer;
    uint8_t message[ARL_CONTROL_MESSAGE_MAX]; /* the transport's own */
    char error_text[ARL_CONTROL_TEXT_MAX];
    _Alignas(64) _Atomic uint64_t sequence; /* chunks that this receiver has taken */
} arl_control_slot_t;

typedef struct arl_control_page {
    uint64_t magic;
    uint32_t format;
    uint32_t receivers;
    uint8_t nonce[ARL_OFFER_ID_BYTES];
    uint64_t epoch;
    uint32_t senders;
    _Alignas(64) _Atomic uint32_t sender_state;
    int32_t error_code;
    _Atomic uint32_t attached; /* slots that are taken */
    _Atomic uint32_t opened;   /* receivers that need no names any more */
    char error_text[ARL_CONTROL_TEXT_MAX];
    _Alignas(64) _Atomic uint64_t sequence; /* chunks that the sender has written */
    arl_control_slot_t slots[];
} arl_control_page_t;

_Static_assert(sizeof(arl_control_slot_t) == 768, "layout of the control block");
_Static_assert(sizeof(arl_control_page_t) == 704, "layout of the control block");
_Static_assert(ATOMIC_INT_LOCK_FREE == 2 && ATOMIC_LLONG_LOCK_FREE == 2,
               "atomics in shared memory must not use a lock of one process");

typedef struct arl_control arl_control_t;

/* ---- the sender's side ---- */

arl_status_t arl_control_create(uint32_t receivers, uint32_t senders, const uint8_t *nonce,
                                uint64_t epoch, arl_control_t **control_p, arl_error_t *err);

/* For the offer. */
const char *arl_control_name(const arl_control_t *control);

void arl_control_set_sender(arl_control_t *control, arl_sender_state_t state);

/*
 * Waits until every receiver and co-sender is done. ARL_ERR_TIMEOUT counts who did not come or not
 * finish, ARL_ERR_PEER_LOST tells of a receiver that died, ARL_ERR_SYNC repeats what one reported;
 * err->rank is the receiver's number.
 */
arl_status_t arl_control_wait_receivers(arl_control_t *control, arl_deadline_t *deadline,
                                        arl_error_t *err);

/* ARL_OK while no receiver and no co-sender has failed or died: for the loops of streaming
 * transports. */
arl_status_t arl_control_check_receivers(arl_control_t *control, arl_error_t *err);

/* Receivers that are attached, alive and not finished. */
uint32_t arl_control_active(arl_control_t *control);

/* Who has slot `slot`, for messages: "receiver 0", "sender 1". */
void arl_control_who(const arl_control_t *control, uint32_t slot, char *text, size_t size);

/* "1 of 2 receivers and 0 of 1 joining senders": who has come at least so far. */
void arl_control_count(const arl_control_t *control, bool finished, char *text, size_t size);

/* ---- the receiver's side ---- */

/* Opens the block of an offer and takes a slot in it: a receiver's where `rank` is 0, otherwise
 * that of co-sender `rank`, which is below offer->senders. `sender` watches the offer's sender and
 * outlives the control; NULL: it opens one of its own. The errors tell a sender that died from an
 * offer that was released or used up. */
arl_status_t arl_control_attach(const arl_offer_t *offer, uint32_t rank,
                                const arl_peer_watch_t *sender, arl_control_t **control_p,
                                arl_error_t *err);

void arl_control_set_slot(arl_control_t *control, arl_slot_state_t state);

/* ARL_OK while the sender lives and has neither failed nor released the offer. */
arl_status_t arl_control_check_sender(arl_control_t *control, arl_error_t *err);

/* Whether the sender's process lives, whatever it says of the offer: a release waits for the
 * receivers that are still at it. */
bool arl_control_sender_alive(const arl_control_t *control);

/* Each receiver says once that it has opened all it needs by name. True for the last one, which
 * then removes the names. */
bool arl_control_opened(arl_control_t *control);

/* ---- both sides ---- */

/* Tells the other side why this one gives up. */
void arl_control_fail(arl_control_t *control, const arl_error_t *reason);

/* The page itself, for the sequences and messages of the transports. */
arl_control_page_t *arl_control_page(arl_control_t *control);
uint32_t arl_control_slot(const arl_control_t *control);  /* this side's own */
uint32_t arl_control_slots(const arl_control_t *control); /* of receivers and co-senders */

/* A receiver that is not done has failed by it, a sender's offer is released. Frees; NULL is
 * fine. */
void arl_control_close(arl_control_t *control);

/* In a child after fork: frees without a word to the other side. */
void arl_control_forget(arl_control_t *control);

#endif
