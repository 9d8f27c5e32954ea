/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/arl_receiver.h"

#include "transport/arl_peer.h"
#include "transport/arl_sender.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char PULL[] = "pull";

/* Seconds since the last phase ended; this one ends now. */
static double
phase_end(arl_session_t *session)
{
    const int64_t now = arl_clock_ns();
    const double seconds = (double)(now - session->mark_ns) / 1e9;

    session->mark_ns = now;
    return seconds;
}

/* ---- checks before anything is opened -------------------------------------------------------- */

static arl_status_t
check_new(const arl_receiver_t *receiver, const arl_offer_t *offer, arl_error_t *err)
{
    if (offer->epoch == 0) {
        return arl_error_set(err, ARL_ERR_SYNC, PULL, "offer is not valid: it has version 0");
    }
    for (uint32_t i = 0; i < ARL_RECEIVER_SEEN_MAX; i++) {
        if (receiver->seen[i].epoch >= offer->epoch &&
            memcmp(receiver->seen[i].nonce, offer->nonce, sizeof(offer->nonce)) == 0) {
            return arl_error_set(err, ARL_ERR_SYNC, PULL,
                                 "this offer has version %llu, and version %llu of the same sender "
                                 "was pulled already: offers are used once, and in order",
                                 (unsigned long long)offer->epoch,
                                 (unsigned long long)receiver->seen[i].epoch);
        }
    }
    return ARL_OK;
}

static void
remember(arl_receiver_t *receiver, const arl_offer_t *offer)
{
    uint32_t at;

    for (at = 0; at < ARL_RECEIVER_SEEN_MAX; at++) {
        if (receiver->seen[at].epoch != 0 &&
            memcmp(receiver->seen[at].nonce, offer->nonce, sizeof(offer->nonce)) == 0) {
            receiver->seen[at].epoch = offer->epoch;
            return;
        }
    }
    at = receiver->seen_next;
    receiver->seen_next = (at + 1) % ARL_RECEIVER_SEEN_MAX;
    memcpy(receiver->seen[at].nonce, offer->nonce, sizeof(offer->nonce));
    receiver->seen[at].epoch = offer->epoch;
}

static arl_status_t
check_verify(const arl_offer_t *offer, arl_verify_t verify, arl_error_t *err)
{
    if (verify > offer->verify) {
        return arl_error_set(err, ARL_ERR_SYNC, PULL,
                             "verify=\"%s\" needs checksums that this offer does not carry; make "
                             "the sender with verify=\"%s\" too",
                             verify == ARL_VERIFY_ALL ? "all" : "sample",
                             verify == ARL_VERIFY_ALL ? "all" : "sample");
    }
    return ARL_OK;
}

/* Reads the offer and all that can be said about it by itself. */
static arl_status_t
read_offer(const arl_receiver_t *receiver, const void *bytes, size_t size, arl_session_t *session,
           arl_error_t *err)
{
    arl_offer_t *offer = &session->offer;
    arl_status_t status =
        arl_offer_decode(bytes, size, receiver->planned ? &receiver->plan_offer : NULL, offer, err);

    if (status != ARL_OK) {
        return status;
    }
    session->transport = arl_transport_get(offer->transport);
    if (session->transport == NULL) {
        return arl_error_set(err, ARL_ERR_SYNC, PULL,
                             "offer is not valid: transport %u is not known here",
                             offer->transport);
    }
    ARL_CHECK_GOTO(status, session->transport->probe(err), done);
    ARL_CHECK_GOTO(status, arl_transport_check_origin(session->transport, offer, PULL, err), done);
    ARL_CHECK_GOTO(status, check_new(receiver, offer, err), done);
    ARL_CHECK_GOTO(status, check_verify(offer, session->verify, err), done);
    if (session->transport->same_host && offer->control[0] == '\0') {
        status =
            arl_error_set(err, ARL_ERR_SYNC, PULL, "offer is not valid: %s needs a control block",
                          session->transport->name);
    }
done:
    return status;
}

/* ---- the plan -------------------------------------------------------------------------------- */

static void
forget_plan(arl_receiver_t *receiver)
{
    arl_plan_free(&receiver->plan);
    arl_offer_free(&receiver->plan_offer);
    receiver->planned = false;
}

void
arl_receiver_rebind(arl_receiver_t *receiver)
{
    forget_plan(receiver);
}

/* Takes the plan at hand when it was made for the same layout, or makes one. */
static arl_status_t
make_plan(arl_receiver_t *receiver, const void *bytes, size_t size, arl_session_t *session,
          arl_error_t *err)
{
    arl_plan_t plan;
    arl_plan_report_t report;
    arl_offer_t kept;
    arl_status_t status;

    session->fresh = !receiver->planned ||
                     !arl_offer_same_layout(&receiver->plan_offer, &session->offer) ||
                     receiver->plan_offer.transport != session->offer.transport;
    if (!session->fresh) {
        return ARL_OK;
    }
    status = arl_plan_build(&session->offer, &receiver->set, session->transport->name, &plan,
                            &report, err);
    if (status != ARL_OK) {
        return status;
    }
    /* A copy that outlives the session. */
    status = arl_offer_decode(bytes, size, &session->offer, &kept, err);
    if (status != ARL_OK) {
        arl_plan_free(&plan);
        return status;
    }
    forget_plan(receiver);
    receiver->plan = plan;
    receiver->report = report;
    receiver->plan_offer = kept;
    receiver->planned = true;
    return ARL_OK;
}

/* ---- the sender's process -------------------------------------------------------------------- */

static void
forget_sender(arl_receiver_t *receiver)
{
    if (receiver->watching) {
        arl_peer_watch_close(&receiver->sender);
        receiver->watching = false;
    }
}

/* One sender makes offer after offer: what tells that it lives is opened once. */
static const arl_peer_watch_t *
watch_sender(arl_receiver_t *receiver, const arl_peer_t *sender)
{
    if (!receiver->watching || !arl_peer_equal(&receiver->sender.peer, sender)) {
        forget_sender(receiver);
        arl_peer_watch_open(&receiver->sender, sender);
        receiver->watching = true;
    }
    return &receiver->sender;
}

/* ---- a session ------------------------------------------------------------------------------- */

static void
close_session(arl_session_t *session)
{
    if (session->pull.local != NULL) {
        arl_export_drop(session->pull.local);
        session->pull.local = NULL;
    }
    arl_control_close(session->pull.control);
    session->pull.control = NULL;
    arl_offer_free(&session->offer);
}

static arl_status_t
open_session(arl_receiver_t *receiver, const void *bytes, size_t size, arl_session_t *session,
             arl_error_t *err)
{
    arl_import_t **kept = &receiver->kept[session->transport->id];
    arl_status_t status = ARL_OK;

    if (session->offer.control[0] != '\0') {
        ARL_CHECK_GOTO(status,
                       arl_control_attach(&session->offer, 0,
                                          watch_sender(receiver, &session->offer.sender),
                                          &session->pull.control, err),
                       done);
    }
    session->stats.open_s = phase_end(session);
    ARL_CHECK_GOTO(status, make_plan(receiver, bytes, size, session, err), done);
    session->pull.plan = &receiver->plan;
    session->pull.set = &receiver->set;
    session->stats.validate_s += phase_end(session);
    session->pull.local = arl_export_find(&session->offer);
    session->import = *kept;
    *kept = NULL;
    status = session->transport->open(&session->pull, &session->import, err);
    session->stats.open_s += phase_end(session);
done:
    return status;
}

arl_status_t
arl_receiver_begin(arl_receiver_t *receiver, const void *bytes, size_t size, arl_verify_t verify,
                   bool views, arl_deadline_t *deadline, arl_session_t *session_p, arl_error_t *err)
{
    arl_error_t reason = ARL_ERROR_INIT;
    arl_session_t *session = session_p;
    arl_status_t status;

    memset(session, 0, sizeof(*session));
    session->mark_ns = deadline->start_ns;
    session->verify = verify;
    session->was_torn = receiver->torn;
    session->pull.offer = &session->offer;
    session->pull.views = views;
    session->pull.keep = receiver->keep_mapped;
    session->pull.deadline = deadline;
    session->pull.stream = receiver->stream;
    status = read_offer(receiver, bytes, size, session, &reason);
    session->stats.validate_s = phase_end(session);
    if (status == ARL_OK) {
        status = open_session(receiver, bytes, size, session, &reason);
    }
    if (status != ARL_OK) {
        if (session->import != NULL) {
            session->transport->close(&session->import, false);
        }
        if (session->pull.control != NULL) {
            arl_control_fail(session->pull.control, &reason);
        }
        close_session(session);
        return arl_error_copy(err, &reason);
    }
    session->stats.transport = session->transport;
    memcpy(session->stats.fallback, session->offer.fallback, sizeof(session->stats.fallback));
    session->stats.version = session->offer.epoch;
    session->stats.tensors = receiver->report.tensors;
    session->stats.untouched = receiver->report.untouched;
    session->stats.bytes = receiver->plan.total_bytes;
    session->stats.extra_bytes = session->import->extra_bytes;
    if (session->stats.fallback[0] == '\0' && session->import->fallback != NULL) {
        (void)snprintf(session->stats.fallback, sizeof(session->stats.fallback), "%.*s",
                       (int)sizeof(session->stats.fallback) - 1, session->import->fallback);
    }
    return ARL_OK;
}

void
arl_receiver_tear(arl_receiver_t *receiver, arl_session_t *session)
{
    receiver->torn = true;
    (void)snprintf(receiver->torn_text, sizeof(receiver->torn_text),
                   "version %llu is being written", (unsigned long long)session->offer.epoch);
    if (session->pull.control != NULL) {
        arl_control_set_slot(session->pull.control, ARL_SLOT_WRITING);
    }
}

/* The tensors to be summed for one copy: its destination; and of one that takes only a part, the
 * whole source, for the sender's checksum, and the part. */
enum { SUM_DST, SUM_SOURCE, SUM_BOX, SUMS };

/* Fills the views of one copy. Returns how many there are; 0 for a part of what was streamed, of
 * which the whole is nowhere. */
static int64_t
views_to_sum(const arl_receiver_t *receiver, const arl_session_t *session, const arl_copy_t *copy,
             arl_view_t views[SUMS])
{
    const arl_binding_t *binding = &receiver->set.bindings[copy->binding];
    const char *const *bases = session->import->bases;

    views[SUM_DST] = binding->dst;
    if (binding->dim < 0) {
        return 1;
    }
    if (bases == NULL) {
        return 0;
    }
    views[SUM_SOURCE] = arl_offer_tensor_view(&session->offer, copy->tensor, bases[copy->alloc]);
    views[SUM_BOX] = arl_binding_box(binding, &views[SUM_SOURCE]);
    return SUMS;
}

static arl_status_t
compare_sums(const arl_session_t *session, const arl_copy_t *copy, const uint64_t *sums,
             int64_t count, arl_error_t *err)
{
    const arl_offer_tensor_t *tensor = &session->offer.tensors[copy->tensor];
    uint64_t found = sums[SUM_DST], wanted = tensor->checksum;

    if (count == SUMS && sums[SUM_SOURCE] == wanted) {
        wanted = sums[SUM_BOX];
    }
    else if (count == SUMS) {
        found = sums[SUM_SOURCE];
    }
    if (found == wanted) {
        return ARL_OK;
    }
    return arl_error_set(err, ARL_ERR_SYNC, "verify",
                         "%.*s: the checksum is %016llx after the copy, the sender's is %016llx; "
                         "was the tensor written to during the sync?",
                         (int)tensor->name_length, tensor->name, (unsigned long long)found,
                         (unsigned long long)wanted);
}

static bool
copy_is_verified(const arl_session_t *session, const arl_copy_t *copy)
{
    return session->verify != ARL_VERIFY_SAMPLE || arl_offer_sampled(&session->offer, copy->tensor);
}

/* Sums everything at once, since on a GPU each call has a wait in it, and then compares. */
static arl_status_t
verify_all(const arl_receiver_t *receiver, arl_session_t *session, arl_error_t *err)
{
    const arl_plan_t *plan = &receiver->plan;
    arl_view_t *views = malloc(((size_t)plan->count + 1) * SUMS * sizeof(*views));
    uint64_t *sums = malloc(((size_t)plan->count + 1) * SUMS * sizeof(*sums));
    int64_t used = 0;
    arl_status_t status;

    if (views == NULL || sums == NULL) {
        status = arl_error_set(err, ARL_ERR_NOMEM, "verify", "out of memory for %lld checksums",
                               (long long)plan->count);
        goto free_arrays;
    }
    for (int64_t i = 0; i < plan->count; i++) {
        if (copy_is_verified(session, &plan->copies[i])) {
            used += views_to_sum(receiver, session, &plan->copies[i], &views[used]);
        }
    }
    ARL_CHECK_GOTO(
        status,
        session->transport->checksums(&session->pull, session->import, views, used, sums, err),
        free_arrays);
    used = 0;
    for (int64_t i = 0; i < plan->count && status == ARL_OK; i++) {
        int64_t count;

        if (!copy_is_verified(session, &plan->copies[i])) {
            continue;
        }
        count = views_to_sum(receiver, session, &plan->copies[i], &views[used]);
        if (count > 0) {
            status = compare_sums(session, &plan->copies[i], &sums[used], count, err);
            session->stats.verified += status == ARL_OK;
        }
        used += count;
    }
free_arrays:
    free(sums);
    free(views);
    return status;
}

arl_status_t
arl_receiver_copy(arl_receiver_t *receiver, arl_session_t *session, arl_error_t *err)
{
    arl_status_t status;

    arl_receiver_tear(receiver, session);
    status = session->transport->copy(&session->pull, session->import, err);
    session->stats.copy_s = phase_end(session);
    if (status == ARL_OK && session->verify != ARL_VERIFY_NONE) {
        status = verify_all(receiver, session, err);
        session->stats.verify_s = phase_end(session);
    }
    return status;
}

void
arl_receiver_end(arl_receiver_t *receiver, arl_session_t *session, const arl_error_t *reason)
{
    const bool whole = receiver->report.untouched == 0;

    (void)phase_end(session);
    if (session->import != NULL) {
        session->transport->close(&session->import,
                                  (receiver->keep_mapped || session->transport->connects) &&
                                      reason == NULL);
        receiver->kept[session->transport->id] = session->import;
        session->import = NULL;
    }
    if (reason == NULL) {
        /* Part of a set of weights does not make another mixture whole. */
        receiver->torn = session->was_torn && !whole;
        remember(receiver, &session->offer);
        if (whole) {
            receiver->versioned = true;
            receiver->version = session->offer.epoch;
        }
        if (session->pull.control != NULL) {
            arl_control_set_slot(session->pull.control, ARL_SLOT_DONE);
        }
    }
    else {
        (void)snprintf(receiver->torn_text, sizeof(receiver->torn_text),
                       "the pull of version %llu failed: %.180s",
                       (unsigned long long)session->offer.epoch, reason->text);
        if (session->pull.control != NULL) {
            arl_control_fail(session->pull.control, reason);
        }
    }
    close_session(session);
    session->stats.close_s = phase_end(session);
    session->stats.total_s = arl_deadline_elapsed_s(session->pull.deadline);
}

void
arl_session_forget(arl_session_t *session)
{
    arl_control_forget(session->pull.control);
    session->pull.control = NULL;
    session->pull.local = NULL; /* counted in the parent */
    arl_offer_free(&session->offer);
}

arl_status_t
arl_receiver_pull(arl_receiver_t *receiver, const void *bytes, size_t size, arl_verify_t verify,
                  arl_deadline_t *deadline, arl_sync_stats_t *stats_p, bool *fresh_p,
                  arl_error_t *err)
{
    arl_error_t reason = ARL_ERROR_INIT;
    arl_session_t session;
    arl_status_t status =
        arl_receiver_begin(receiver, bytes, size, verify, false, deadline, &session, err);

    if (status != ARL_OK) {
        return status;
    }
    status = arl_receiver_copy(receiver, &session, &reason);
    arl_receiver_end(receiver, &session, status == ARL_OK ? NULL : &reason);
    if (status != ARL_OK) {
        return arl_error_copy(err, &reason);
    }
    *stats_p = session.stats;
    *fresh_p = session.fresh;
    return ARL_OK;
}

int64_t
arl_receiver_live(const arl_receiver_t *receiver)
{
    int64_t count = 0;

    for (int i = 0; i < ARL_TRANSPORT_COUNT; i++) {
        count += receiver->kept[i] != NULL ? receiver->kept[i]->mappings : 0;
    }
    return count;
}

void
arl_receiver_close(arl_receiver_t *receiver)
{
    for (int i = 0; i < ARL_TRANSPORT_COUNT; i++) {
        if (receiver->kept[i] != NULL) {
            receiver->kept[i]->transport->close(&receiver->kept[i], false);
        }
    }
    forget_plan(receiver);
    forget_sender(receiver);
}
