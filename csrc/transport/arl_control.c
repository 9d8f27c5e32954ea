/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/arl_control.h"

#include "transport/arl_peer.h"
#include "transport/arl_shm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const uint64_t CONTROL_MAGIC = UINT64_C(0x4c52544e434c5241); /* "ARLCNTRL" */
enum { CONTROL_FORMAT = 1 };

/* The receivers' last chunks are being copied when a stream's sender begins to wait for them. */
static const int64_t WAIT_SPIN_NS = 1000 * 1000;

static const char SERVE[] = "serve";
static const char PULL[] = "pull";
static const char JOIN[] = "join";

struct arl_control {
    arl_shm_t shm;
    arl_control_page_t *page;
    uint32_t slots;        /* our own copy, as of all here: the page can be written to by others */
    uint32_t receivers;    /* those of the last slots; the first are co-senders' */
    const char *operation; /* for the errors of a receiver or a co-sender */
    bool sender;
    uint32_t slot;
    arl_peer_watch_t *watches; /* sender: one for each slot, open when `watched` */
    bool *watched;
    arl_peer_watch_t sender_watch; /* receiver */
    bool borrowed;                 /* the watch is another's to close */
};

static size_t
control_size(uint32_t slots)
{
    return sizeof(arl_control_page_t) + slots * sizeof(arl_control_slot_t);
}

static uint32_t
slot_state(const arl_control_t *control, uint32_t slot)
{
    return atomic_load_explicit(&control->page->slots[slot].state, memory_order_acquire);
}

/* Also for a text that the other side may be writing to: always terminated. */
static void
copy_text(char *out, size_t size, const char *text)
{
    (void)snprintf(out, size, "%.*s", ARL_CONTROL_TEXT_MAX - 1, text);
}

/* ---- the sender's side ----------------------------------------------------------------------- */

arl_status_t
arl_control_create(uint32_t receivers, uint32_t senders, const uint8_t *nonce, uint64_t epoch,
                   arl_control_t **control_p, arl_error_t *err)
{
    const uint32_t slots = receivers + senders - 1;
    arl_control_t *control = calloc(1, sizeof(*control));
    arl_status_t status;

    if (control == NULL || (control->watches = calloc(slots, sizeof(*control->watches))) == NULL ||
        (control->watched = calloc(slots, sizeof(*control->watched))) == NULL) {
        status =
            arl_error_set(err, ARL_ERR_NOMEM, "offer", "out of memory for %u receivers", receivers);
        goto free_control;
    }
    ARL_CHECK_GOTO(status, arl_shm_create(control_size(slots), &control->shm, err), free_control);
    control->page = control->shm.map;
    control->slots = slots;
    control->receivers = receivers;
    control->sender = true;
    control->page->magic = CONTROL_MAGIC;
    control->page->format = CONTROL_FORMAT;
    control->page->receivers = receivers;
    control->page->senders = senders;
    memcpy(control->page->nonce, nonce, sizeof(control->page->nonce));
    control->page->epoch = epoch;
    arl_control_set_sender(control, ARL_SENDER_OFFERED);
    *control_p = control;
    return ARL_OK;
free_control:
    if (control != NULL) {
        free(control->watched);
        free(control->watches);
        free(control);
    }
    return status;
}

const char *
arl_control_name(const arl_control_t *control)
{
    return control->shm.name;
}

void
arl_control_set_sender(arl_control_t *control, arl_sender_state_t state)
{
    atomic_store_explicit(&control->page->sender_state, (uint32_t)state, memory_order_release);
}

static bool
slot_active(uint32_t state)
{
    return state == ARL_SLOT_ATTACHED || state == ARL_SLOT_WRITING;
}

static bool
slot_alive(arl_control_t *control, uint32_t slot)
{
    if (!control->watched[slot]) {
        arl_peer_watch_open(&control->watches[slot], &control->page->slots[slot].peer);
        control->watched[slot] = true;
    }
    return arl_peer_watch_alive(&control->watches[slot]);
}

/* The number of a receiver that died before it had finished, or -1. Its last act may have been
 * to finish, so the state is read again after it is known to be dead. */
static int
find_dead(arl_control_t *control)
{
    for (uint32_t i = 0; i < control->slots; i++) {
        if (slot_active(slot_state(control, i)) && !slot_alive(control, i) &&
            slot_active(slot_state(control, i))) {
            return (int)i;
        }
    }
    return -1;
}

static int
find_failed(const arl_control_t *control)
{
    for (uint32_t i = 0; i < control->slots; i++) {
        if (slot_state(control, i) == ARL_SLOT_FAILED) {
            return (int)i;
        }
    }
    return -1;
}

static uint32_t
joining(const arl_control_t *control)
{
    return control->slots - control->receivers;
}

/* Of the slots [first, last). */
static uint32_t
count_state(const arl_control_t *control, uint32_t first, uint32_t last, arl_slot_state_t low,
            arl_slot_state_t high)
{
    uint32_t count = 0;

    for (uint32_t i = first; i < last; i++) {
        const uint32_t state = slot_state(control, i);

        count += state >= (uint32_t)low && state <= (uint32_t)high;
    }
    return count;
}

void
arl_control_who(const arl_control_t *control, uint32_t slot, char *text, size_t size)
{
    const uint32_t others = joining(control);

    (void)snprintf(text, size, "%s %u", slot < others ? "sender" : "receiver",
                   slot < others ? slot + 1 : slot - others);
}

void
arl_control_count(const arl_control_t *control, bool finished, char *text, size_t size)
{
    const arl_slot_state_t least = finished ? ARL_SLOT_DONE : ARL_SLOT_TAKEN;
    const arl_slot_state_t most = finished ? ARL_SLOT_DONE : ARL_SLOT_FAILED;
    const uint32_t others = joining(control);
    const uint32_t receivers = count_state(control, others, control->slots, least, most);

    if (others == 0) {
        (void)snprintf(text, size, "%u of %u receivers", receivers, control->receivers);
        return;
    }
    (void)snprintf(text, size, "%u of %u receivers and %u of %u joining senders", receivers,
                   control->receivers, count_state(control, 0, others, least, most), others);
}

static arl_status_t
report_slot(arl_control_t *control, int slot, bool dead, arl_error_t *err)
{
    const arl_control_slot_t *it = &control->page->slots[slot];
    const bool writing = slot_state(control, (uint32_t)slot) == ARL_SLOT_WRITING;
    const bool receives = (uint32_t)slot >= joining(control);
    const uint32_t among = receives ? control->receivers : joining(control) + 1;
    char text[ARL_CONTROL_TEXT_MAX], who[32];
    arl_status_t status;

    arl_control_who(control, (uint32_t)slot, who, sizeof(who));
    if (dead) {
        status = arl_error_set(err, ARL_ERR_PEER_LOST, SERVE,
                               "%s of %u (pid %lld) died %s; restart it and make a new offer", who,
                               among, (long long)it->peer.pid,
                               writing    ? "while it copied the weights"
                               : receives ? "before it took them"
                                          : "during the sync");
    }
    else {
        copy_text(text, sizeof(text), it->error_text);
        status = arl_error_set(err, ARL_ERR_SYNC, SERVE, "%s of %u (pid %lld) failed: %s", who,
                               among, (long long)it->peer.pid, text);
    }
    if (err != NULL && err->rank < 0 && receives) {
        err->rank = slot - (int)joining(control);
    }
    return status;
}

arl_status_t
arl_control_check_receivers(arl_control_t *control, arl_error_t *err)
{
    /* The dead first: where several receivers depend on one another, the failures that the
     * others report are what follows from it. */
    int slot = find_dead(control);

    if (slot >= 0) {
        return report_slot(control, slot, true, err);
    }
    slot = find_failed(control);
    return slot >= 0 ? report_slot(control, slot, false, err) : ARL_OK;
}

static bool
wait_ready(void *context)
{
    const arl_control_t *control = context;

    return count_state(control, 0, control->slots, ARL_SLOT_DONE, ARL_SLOT_DONE) ==
               control->slots ||
           find_failed(control) >= 0;
}

static bool
wait_alive(void *context)
{
    return find_dead(context) < 0;
}

arl_status_t
arl_control_wait_receivers(arl_control_t *control, arl_deadline_t *deadline, arl_error_t *err)
{
    arl_status_t status =
        arl_deadline_wait_spinning(deadline, WAIT_SPIN_NS, wait_ready, wait_alive, control);

    if (status == ARL_ERR_TIMEOUT) {
        const uint32_t came =
            count_state(control, joining(control), control->slots, ARL_SLOT_TAKEN, ARL_SLOT_FAILED);
        char done[80];

        arl_control_count(control, true, done, sizeof(done));
        return arl_error_set(err, status, SERVE,
                             "after %.1f s, %s have finished and %u never called pull(); does the "
                             "offer reach all of them, is receivers= right, and is timeout= long "
                             "enough?",
                             arl_deadline_elapsed_s(deadline), done, control->receivers - came);
    }
    if (status == ARL_ERR_INTERRUPTED) {
        return arl_error_set(err, status, SERVE, "interrupted while waiting for receivers");
    }
    return arl_control_check_receivers(control, err);
}

uint32_t
arl_control_active(arl_control_t *control)
{
    uint32_t count = 0;

    atomic_thread_fence(memory_order_seq_cst); /* pairs with the one in arl_control_attach */
    for (uint32_t i = 0; i < control->slots; i++) {
        count += slot_active(slot_state(control, i)) && slot_alive(control, i);
    }
    return count;
}

/* ---- the receiver's side --------------------------------------------------------------------- */

static arl_status_t
sender_gone(const arl_offer_t *offer, const char *operation, arl_error_t *err)
{
    return arl_error_set(err, ARL_ERR_PEER_LOST, operation,
                         "the sender (pid %lld on %s) of this offer has exited or was killed; "
                         "the weights here are as they were",
                         (long long)offer->sender.pid, offer->host);
}

static arl_status_t
take_slot(arl_control_t *control, uint32_t rank, const arl_peer_t *self, arl_error_t *err)
{
    const uint32_t first = rank > 0 ? rank - 1 : joining(control);
    const uint32_t last = rank > 0 ? rank : control->slots;

    for (uint32_t i = first; i < last; i++) {
        arl_control_slot_t *slot = &control->page->slots[i];
        uint32_t expected = ARL_SLOT_FREE;

        if (atomic_compare_exchange_strong(&slot->state, &expected, ARL_SLOT_TAKEN)) {
            slot->peer = *self;
            control->slot = i;
            atomic_store_explicit(&slot->state, ARL_SLOT_ATTACHED, memory_order_release);
            if (atomic_fetch_add(&control->page->attached, 1) + 1 == control->slots) {
                arl_shm_unlink(&control->shm); /* nobody else will look for it */
            }
            return ARL_OK;
        }
    }
    if (rank > 0) {
        return arl_error_set(err, ARL_ERR_SYNC, JOIN,
                             "sender %u has joined this offer already: each rank is one sender's, "
                             "and offers are used once",
                             rank);
    }
    return arl_error_set(err, ARL_ERR_SYNC, PULL,
                         "this offer was for %u receivers, and so many have taken it already; "
                         "offers are used once: make a new one, or pass the right receivers= to "
                         "WeightSender",
                         control->receivers);
}

static arl_status_t
check_page(const arl_control_t *control, const arl_offer_t *offer, arl_error_t *err)
{
    const arl_control_page_t *page = control->page;

    if (page->magic != CONTROL_MAGIC || page->format != CONTROL_FORMAT ||
        page->receivers != offer->receivers || page->senders != offer->senders ||
        page->epoch != offer->epoch ||
        memcmp(page->nonce, offer->nonce, sizeof(page->nonce)) != 0) {
        return arl_error_set(err, ARL_ERR_SYNC, control->operation,
                             "the control block %s was not made for this offer", offer->control);
    }
    return ARL_OK;
}

/* There is no block of that name: it was either removed or never was. */
static arl_status_t
explain_missing(const arl_offer_t *offer, const char *operation, arl_error_t *err)
{
    if (!arl_peer_alive(offer->sender.pid, offer->sender.start_time)) {
        arl_shm_sweep(); /* of what it may have left */
        return sender_gone(offer, operation, err);
    }
    return arl_error_set(err, ARL_ERR_SYNC, operation,
                         "this offer (version %llu) is over: its sender released it or made a new "
                         "one, or its %u receiver%s ha%s taken it already (or the two do not share "
                         "/dev/shm, as containers may not)",
                         (unsigned long long)offer->epoch, offer->receivers,
                         offer->receivers == 1 ? "" : "s", offer->receivers == 1 ? "s" : "ve");
}

arl_status_t
arl_control_attach(const arl_offer_t *offer, uint32_t rank, const arl_peer_watch_t *sender,
                   arl_control_t **control_p, arl_error_t *err)
{
    const char *operation = rank > 0 ? JOIN : PULL;
    arl_control_t *control = calloc(1, sizeof(*control));
    arl_error_t reason = ARL_ERROR_INIT;
    arl_peer_t self;
    arl_status_t status;

    if (control == NULL) {
        return arl_error_set(err, ARL_ERR_NOMEM, operation, "out of memory");
    }
    ARL_CHECK_GOTO(status, arl_peer_self(&self, err), free_control);
    control->slots = offer->receivers + offer->senders - 1;
    control->receivers = offer->receivers;
    control->operation = operation;
    status = arl_shm_open(offer->control, control_size(control->slots), ARL_SHM_WRITE,
                          &control->shm, &reason);
    if (status == ARL_ERR_PEER_LOST) {
        status = explain_missing(offer, operation, err);
        goto free_control;
    }
    if (status != ARL_OK) {
        (void)arl_error_copy(err, &reason);
        goto free_control;
    }
    control->page = control->shm.map;
    ARL_CHECK_GOTO(status, check_page(control, offer, err), close_shm);
    if (sender != NULL) {
        control->sender_watch = *sender;
        control->borrowed = true;
    }
    else {
        arl_peer_watch_open(&control->sender_watch, &offer->sender);
    }
    if (!arl_peer_watch_alive(&control->sender_watch)) {
        status = sender_gone(offer, operation, err);
        arl_shm_sweep(); /* what it left: nobody else may come */
        goto close_watch;
    }
    ARL_CHECK_GOTO(status, arl_control_check_sender(control, err), close_watch);
    ARL_CHECK_GOTO(status, take_slot(control, rank, &self, err), close_watch);
    /* Either the sender's release sees this slot, or this sees the release. */
    atomic_thread_fence(memory_order_seq_cst);
    ARL_CHECK_GOTO(status, arl_control_check_sender(control, err), fail_slot);
    *control_p = control;
    return ARL_OK;
fail_slot:
    arl_control_set_slot(control, ARL_SLOT_FAILED);
close_watch:
    if (!control->borrowed) {
        arl_peer_watch_close(&control->sender_watch);
    }
close_shm:
    arl_shm_close(&control->shm);
free_control:
    free(control);
    return status;
}

void
arl_control_set_slot(arl_control_t *control, arl_slot_state_t state)
{
    atomic_store_explicit(&control->page->slots[control->slot].state, (uint32_t)state,
                          memory_order_release);
}

bool
arl_control_sender_alive(const arl_control_t *control)
{
    return arl_peer_watch_alive(&control->sender_watch);
}

arl_status_t
arl_control_check_sender(arl_control_t *control, arl_error_t *err)
{
    const arl_peer_t *peer = &control->sender_watch.peer;
    char text[ARL_CONTROL_TEXT_MAX];

    switch (atomic_load_explicit(&control->page->sender_state, memory_order_acquire)) {
    case ARL_SENDER_RELEASED:
        return arl_error_set(err, ARL_ERR_SYNC, control->operation,
                             "the sender (pid %lld) has released this offer, or made a newer one",
                             (long long)peer->pid);
    case ARL_SENDER_FAILED:
        copy_text(text, sizeof(text), control->page->error_text);
        return arl_error_set(err, ARL_ERR_SYNC, control->operation,
                             "the sender (pid %lld) gave up: %s", (long long)peer->pid, text);
    default:
        break;
    }
    if (!arl_peer_watch_alive(&control->sender_watch)) {
        return arl_error_set(err, ARL_ERR_PEER_LOST, control->operation,
                             "the sender (pid %lld) exited or was killed during the sync",
                             (long long)peer->pid);
    }
    return ARL_OK;
}

bool
arl_control_opened(arl_control_t *control)
{
    return atomic_fetch_add(&control->page->opened, 1) + 1 == control->receivers;
}

/* ---- both sides ------------------------------------------------------------------------------ */

void
arl_control_fail(arl_control_t *control, const arl_error_t *reason)
{
    char *text = control->sender ? control->page->error_text
                                 : control->page->slots[control->slot].error_text;
    int32_t *code = control->sender ? &control->page->error_code
                                    : &control->page->slots[control->slot].error_code;

    copy_text(text, ARL_CONTROL_TEXT_MAX, reason->text);
    *code = (int32_t)reason->code;
    if (control->sender) {
        arl_control_set_sender(control, ARL_SENDER_FAILED);
    }
    else {
        arl_control_set_slot(control, ARL_SLOT_FAILED);
    }
}

arl_control_page_t *
arl_control_page(arl_control_t *control)
{
    return control->page;
}

uint32_t
arl_control_slot(const arl_control_t *control)
{
    return control->slot;
}

uint32_t
arl_control_slots(const arl_control_t *control)
{
    return control->slots;
}

static void
control_free(arl_control_t *control)
{
    for (uint32_t i = 0; control->sender && i < control->slots; i++) {
        if (control->watched[i]) {
            arl_peer_watch_close(&control->watches[i]);
        }
    }
    if (!control->sender && !control->borrowed) {
        arl_peer_watch_close(&control->sender_watch);
    }
    free(control->watched);
    free(control->watches);
    free(control);
}

void
arl_control_close(arl_control_t *control)
{
    if (control == NULL) {
        return;
    }
    if (control->sender) {
        uint32_t state = atomic_load(&control->page->sender_state);

        if (state != ARL_SENDER_FAILED) {
            arl_control_set_sender(control, ARL_SENDER_RELEASED);
        }
    }
    else if (slot_active(slot_state(control, control->slot))) {
        arl_error_t reason = ARL_ERROR_INIT;

        (void)arl_error_set(&reason, ARL_ERR_SYNC, control->operation,
                            "it was closed before it had finished");
        arl_control_fail(control, &reason);
    }
    arl_shm_close(&control->shm);
    control_free(control);
}

void
arl_control_forget(arl_control_t *control)
{
    if (control != NULL) {
        arl_shm_forget(&control->shm);
        control_free(control);
    }
}
