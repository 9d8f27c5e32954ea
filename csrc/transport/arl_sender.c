/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/arl_sender.h"

#include "core/arl_names.h"

#include "transport/arl_peer.h"
#include "transport/arl_shm.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char OFFER[] = "offer";
static const char SERVE[] = "serve";
static const char RELEASE[] = "release";
static const char JOIN[] = "join";

static const int64_t SWEEP_NS = INT64_C(1000000000);

/* ---- the registry: offers of this process ---------------------------------------------------- */

static pthread_mutex_t registry_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t registry_once = PTHREAD_ONCE_INIT;
static arl_export_t *registry;

/* A child has none of its own yet, and its copy of the parent's is not to be used. */
static void
registry_after_fork(void)
{
    (void)pthread_mutex_init(&registry_lock, NULL);
    registry = NULL;
}

static void
registry_prepare(void)
{
    (void)pthread_atfork(NULL, NULL, registry_after_fork);
}

static void
registry_add(arl_export_t *export)
{
    (void)pthread_once(&registry_once, registry_prepare);
    (void)pthread_mutex_lock(&registry_lock);
    export->references = 1;
    export->next = registry;
    registry = export;
    (void)pthread_mutex_unlock(&registry_lock);
}

static void
registry_remove(arl_export_t *export) /* with the lock held */
{
    for (arl_export_t **at = &registry; *at != NULL; at = &(*at)->next) {
        if (*at == export) {
            *at = export->next;
            return;
        }
    }
}

arl_export_t *
arl_export_find(const arl_offer_t *offer)
{
    arl_export_t *found;

    (void)pthread_mutex_lock(&registry_lock);
    for (found = registry; found != NULL; found = found->next) {
        if (found->epoch == offer->epoch &&
            memcmp(found->nonce, offer->nonce, sizeof(found->nonce)) == 0) {
            found->references++;
            break;
        }
    }
    (void)pthread_mutex_unlock(&registry_lock);
    return found;
}

arl_export_t *
arl_export_hold(arl_export_t *export)
{
    (void)pthread_mutex_lock(&registry_lock);
    export->references++;
    (void)pthread_mutex_unlock(&registry_lock);
    return export;
}

void
arl_export_drop(arl_export_t *export)
{
    bool last;

    (void)pthread_mutex_lock(&registry_lock);
    last = --export->references == 0;
    if (last) {
        registry_remove(export);
    }
    (void)pthread_mutex_unlock(&registry_lock);
    if (last) {
        export->transport->destroy(export, false);
    }
}

/* ---- making an offer ------------------------------------------------------------------------- */

arl_status_t
arl_sender_init(arl_sender_t *sender, arl_error_t *err)
{
    memset(sender, 0, sizeof(*sender));
    return arl_random(sender->nonce, sizeof(sender->nonce), err);
}

/* What makes two tensors the same: the key of the alias table. No padding inside. */
typedef struct alias_key {
    uint64_t data;
    uint64_t dtype;
    int64_t dims[2 * ARL_VIEW_DIMS_MAX]; /* sizes, then strides, of the dimensions there are */
} alias_key_t;

static arl_status_t
find_aliases(const arl_source_t *sources, uint32_t count, uint32_t *alias_of, const char *operation,
             arl_error_t *err)
{
    alias_key_t *keys = calloc((size_t)count + 1, sizeof(*keys));
    arl_names_t table = {0};
    arl_status_t status;

    if (keys == NULL) {
        return arl_error_set(err, ARL_ERR_NOMEM, operation, "out of memory for %u tensors", count);
    }
    ARL_CHECK_GOTO(status, arl_names_init(&table, count, err), free_keys);
    for (uint32_t i = 0; i < count; i++) {
        const arl_view_t *view = &sources[i].view;
        const size_t size = (size_t)view->ndim * sizeof(view->shape[0]);

        alias_of[i] = i;
        if (view->data == NULL) { /* a specification, or no elements */
            continue;
        }
        keys[i].data = (uint64_t)(uintptr_t)view->data;
        keys[i].dtype = (uint64_t)view->dtype;
        memcpy(&keys[i].dims[0], view->shape, size);
        memcpy(&keys[i].dims[view->ndim], view->strides, size);
        alias_of[i] = arl_names_add(&table, (const char *)&keys[i],
                                    (uint32_t)(offsetof(alias_key_t, dims) + 2 * size), i);
    }
    arl_names_free(&table);
free_keys:
    free(keys);
    return status;
}

static arl_status_t
check_sources(const arl_source_t *sources, uint32_t count, const char *operation, arl_error_t *err)
{
    arl_names_t table = {0};
    arl_status_t status = arl_names_init(&table, count, err);

    if (status != ARL_OK) {
        return status;
    }
    if (count == 0) {
        status = arl_error_set(err, ARL_ERR_VALUE, operation, "there are no tensors to offer");
    }
    for (uint32_t i = 0; i < count && status == ARL_OK; i++) {
        if (sources[i].name_length == 0) {
            status = arl_error_set(err, ARL_ERR_VALUE, operation, "tensor %u has an empty name", i);
        }
        else if (arl_names_add(&table, sources[i].name, sources[i].name_length, i) != i) {
            status = arl_error_set(err, ARL_ERR_VALUE, operation, "the name %.*s comes twice",
                                   (int)sources[i].name_length, sources[i].name);
        }
    }
    arl_names_free(&table);
    return status;
}

static bool
source_equal(const arl_source_t *a, const arl_source_t *b)
{
    const size_t size = (size_t)a->view.ndim * sizeof(a->view.shape[0]);

    /* The text of a name is its owner's, and never changes. */
    return a->name == b->name && a->name_length == b->name_length && a->view.data == b->view.data &&
           a->view.dtype == b->view.dtype && a->view.ndim == b->view.ndim &&
           a->view.device_type == b->view.device_type &&
           a->view.device_index == b->view.device_index &&
           memcmp(a->view.shape, b->view.shape, size) == 0 &&
           memcmp(a->view.strides, b->view.strides, size) == 0;
}

static bool
sources_known(const arl_sender_t *sender, const arl_source_t *sources, uint32_t count)
{
    if (sender->known == NULL || sender->known_count != count) {
        return false;
    }
    for (uint32_t i = 0; i < count; i++) {
        if (!source_equal(&sender->known[i], &sources[i])) {
            return false;
        }
    }
    return true;
}

static void
forget_sources(arl_sender_t *sender)
{
    free(sender->known);
    free(sender->alias_of);
    sender->known = NULL;
    sender->alias_of = NULL;
    sender->layout_id = 0;
}

/* Checks the sources and finds out which are the same; once, as long as nothing changes. */
static arl_status_t
learn_sources(arl_sender_t *sender, const arl_source_t *sources, uint32_t count,
              const char *operation, arl_error_t *err)
{
    arl_status_t status;

    if (sources_known(sender, sources, count)) {
        return ARL_OK;
    }
    forget_sources(sender);
    status = check_sources(sources, count, operation, err);
    if (status != ARL_OK) {
        return status;
    }
    sender->known = malloc(((size_t)count + 1) * sizeof(*sender->known));
    sender->alias_of = malloc(((size_t)count + 1) * sizeof(*sender->alias_of));
    if (sender->known == NULL || sender->alias_of == NULL) {
        status =
            arl_error_set(err, ARL_ERR_NOMEM, operation, "out of memory for %u tensors", count);
    }
    else {
        status = find_aliases(sources, count, sender->alias_of, operation, err);
    }
    if (status != ARL_OK) {
        forget_sources(sender);
        return status;
    }
    memcpy(sender->known, sources, (size_t)count * sizeof(*sources));
    sender->known_count = count;
    return ARL_OK;
}

/* All of the offer that is the same for every transport. */
static arl_status_t
fill_offer(arl_sender_t *sender, const arl_export_request_t *request, arl_offer_t *offer,
           arl_error_t *err)
{
    arl_offer_tensor_t *tensors = calloc((size_t)request->count + 1, sizeof(*tensors));

    if (tensors == NULL) {
        return arl_error_set(err, ARL_ERR_NOMEM, OFFER, "out of memory for %u tensors",
                             request->count);
    }
    for (uint32_t i = 0; i < request->count; i++) {
        const arl_source_t *source = &request->sources[i];

        tensors[i].name = source->name;
        tensors[i].name_length = source->name_length;
        tensors[i].dtype = source->view.dtype;
        tensors[i].ndim = source->view.ndim;
        memcpy(tensors[i].shape, source->view.shape,
               (size_t)source->view.ndim * sizeof(tensors[i].shape[0]));
        tensors[i].alias_of = request->alias_of[i];
    }
    offer->tensors = tensors;
    offer->tensor_count = request->count;
    if (sender->layout_id == 0) {
        sender->layout_id = arl_offer_layout_id(offer);
    }
    offer->layout_id = sender->layout_id;
    offer->verify = request->verify;
    offer->receivers = request->receivers;
    offer->senders = request->senders;
    offer->sender = sender->self;
    memcpy(offer->nonce, sender->nonce, sizeof(offer->nonce));
    offer->epoch = sender->epoch;
    if (gethostname(offer->host, sizeof(offer->host)) != 0) {
        offer->host[0] = '\0';
    }
    offer->host[sizeof(offer->host) - 1] = '\0';
    return ARL_OK;
}

static void
free_offer(arl_offer_t *offer)
{
    free(offer->tensors);
    free(offer->allocs);
    memset(offer, 0, sizeof(*offer));
}

static void
fill_stats(const arl_sender_t *sender, const arl_export_t *export, const arl_offer_t *offer,
           const arl_deadline_t *deadline, arl_sync_stats_t *stats)
{
    memset(stats, 0, sizeof(*stats));
    stats->transport = export->transport;
    memcpy(stats->fallback, offer->fallback, sizeof(stats->fallback));
    stats->tensors = offer->tensor_count;
    stats->bytes = export->bytes;
    stats->version = sender->epoch;
    stats->offer_s = arl_deadline_elapsed_s(deadline);
    stats->extra_bytes = export->extra_bytes;
}

/* Makes the export and its control block; on success the sender owns the export and `offer`. */
static arl_status_t
make_export(arl_sender_t *sender, arl_export_request_t *request, uint8_t **bytes_p, size_t *size_p,
            arl_error_t *err)
{
    const arl_transport_t *transport;
    arl_export_t *export = NULL;
    arl_offer_t offer = {0};
    arl_status_t status;

    ARL_CHECK_GOTO(status, fill_offer(sender, request, &offer, err), free_offer);
    ARL_CHECK_GOTO(status,
                   arl_transport_choose(&sender->choice, request, &transport, offer.fallback, err),
                   free_offer);
    offer.transport = (uint32_t)transport->id;
    request->kept = &sender->kept[transport->id];
    ARL_CHECK_GOTO(status, transport->offer(request, &offer, &export, err), free_offer);
    export->transport = transport;
    export->tensors = request->count;
    export->epoch = sender->epoch;
    memcpy(export->nonce, sender->nonce, sizeof(export->nonce));
    ARL_CHECK_GOTO(status,
                   arl_control_create(request->receivers, request->senders, sender->nonce,
                                      sender->epoch, &export->control, err),
                   destroy_export);
    (void)snprintf(offer.control, sizeof(offer.control), "%s", arl_control_name(export->control));
    ARL_CHECK_GOTO(status, arl_offer_encode(&offer, bytes_p, size_p, err), destroy_export);
    registry_add(export);
    fill_stats(sender, export, &offer, request->deadline, &sender->stats);
    sender->current = export;
    sender->offer = offer;
    return ARL_OK;
destroy_export:
    arl_control_close(export->control);
    export->control = NULL;
    transport->destroy(export, false);
free_offer:
    free_offer(&offer);
    return status;
}

/* What dead processes left is looked for now and then: reading the folder takes as long as all
 * other work of an offer whose tensors are known. */
static void
sweep(arl_sender_t *sender)
{
    const int64_t now = arl_clock_ns();

    if (sender->swept_ns == 0 || now - sender->swept_ns >= SWEEP_NS) {
        arl_shm_sweep();
        sender->swept_ns = now;
    }
}

arl_status_t
arl_sender_offer(arl_sender_t *sender, const arl_source_t *sources, uint32_t count, uint64_t epoch,
                 void *stream, arl_deadline_t *deadline, uint8_t **bytes_p, size_t *size_p,
                 arl_error_t *err)
{
    const uint64_t last = sender->epoch;
    arl_export_request_t request = {
        .sources = sources,
        .count = count,
        .receivers = sender->receivers,
        .senders = sender->senders,
        .verify = sender->verify,
        .ring_bytes = sender->ring_bytes,
        .keep = sender->keep_mapped,
        .stream = stream,
        .deadline = deadline,
    };
    arl_status_t status = learn_sources(sender, sources, count, OFFER, err);

    if (status != ARL_OK) {
        return status;
    }
    if (epoch != 0 && epoch <= last) {
        return arl_error_set(err, ARL_ERR_VALUE, OFFER,
                             "version %llu is not above %llu, the version of the last offer",
                             (unsigned long long)epoch, (unsigned long long)last);
    }
    status = arl_sender_release(sender, deadline, err);
    if (status != ARL_OK || (status = arl_peer_self(&sender->self, err)) != ARL_OK) {
        return status;
    }
    request.alias_of = sender->alias_of;
    sweep(sender);
    sender->epoch = epoch != 0 ? epoch : last + 1;
    status = make_export(sender, &request, bytes_p, size_p, err);
    if (status != ARL_OK) {
        sender->epoch = last;
    }
    return status;
}

/* ---- serving --------------------------------------------------------------------------------- */

arl_status_t
arl_sender_serve(arl_sender_t *sender, const arl_feed_t *feed, arl_deadline_t *deadline,
                 arl_sync_stats_t *stats_p, arl_error_t *err)
{
    arl_export_t *export = sender->current;
    arl_error_t reason = ARL_ERROR_INIT;
    arl_status_t status = ARL_OK;

    if (export == NULL) {
        return arl_error_set(err, ARL_ERR_SYNC, SERVE, "there is no offer to serve; call offer()");
    }
    if (feed != NULL && !export->transport->streams) {
        return arl_error_set(err, ARL_ERR_VALUE, SERVE,
                             "%s took the tensors at offer(); serve() takes none",
                             export->transport->name);
    }
    arl_control_set_sender(export->control, ARL_SENDER_SERVING);
    if (export->transport->streams) {
        status = export->transport->serve(export, &sender->offer, feed, deadline, &reason);
    }
    if (status == ARL_OK) {
        status = arl_control_wait_receivers(export->control, deadline, &reason);
    }
    if (status != ARL_OK) {
        /* Without a stream to finish, receivers that are still at it may well succeed. */
        if (export->transport->streams) {
            arl_control_fail(export->control, &reason);
        }
        return arl_error_copy(err, &reason);
    }
    arl_control_set_sender(export->control, ARL_SENDER_SERVED);
    sender->stats.copy_s = arl_deadline_elapsed_s(deadline);
    sender->stats.total_s = sender->stats.offer_s + sender->stats.copy_s;
    *stats_p = sender->stats;
    return ARL_OK;
}

/* ---- taking part in another sender's ----------------------------------------------------------
 */

/* What is sent has one layout: two sides that see it differently would mix tensors up. */
static arl_status_t
check_alike(const arl_offer_t *offer, const arl_export_request_t *request, arl_error_t *err)
{
    const uint32_t count = request->count;

    if (count != offer->tensor_count) {
        return arl_error_set(err, ARL_ERR_MISMATCH, JOIN,
                             "the offer has %u tensors and this sender %u; all senders hold the "
                             "same ones, in the same order",
                             offer->tensor_count, count);
    }
    for (uint32_t i = 0; i < count; i++) {
        const arl_offer_tensor_t *theirs = &offer->tensors[i];
        const arl_source_t *ours = &request->sources[i];
        arl_view_t wanted = {.dtype = theirs->dtype, .ndim = theirs->ndim};
        char found[96], announced[96];

        memcpy(wanted.shape, theirs->shape, sizeof(wanted.shape));
        if (ours->name_length == theirs->name_length && ours->view.dtype == theirs->dtype &&
            ours->view.ndim == theirs->ndim &&
            memcmp(ours->name, theirs->name, theirs->name_length) == 0 &&
            memcmp(ours->view.shape, theirs->shape,
                   (size_t)theirs->ndim * sizeof(theirs->shape[0])) == 0) {
            if (request->alias_of[i] == theirs->alias_of) {
                continue;
            }
            return arl_error_set(err, ARL_ERR_MISMATCH, JOIN,
                                 "%.*s shares the memory of %.*s in the offer and of %.*s here; "
                                 "all senders tie the same weights",
                                 (int)theirs->name_length, theirs->name,
                                 (int)offer->tensors[theirs->alias_of].name_length,
                                 offer->tensors[theirs->alias_of].name,
                                 (int)request->sources[request->alias_of[i]].name_length,
                                 request->sources[request->alias_of[i]].name);
        }
        arl_view_describe(&ours->view, found, sizeof(found));
        arl_view_describe(&wanted, announced, sizeof(announced));
        return arl_error_set(err, ARL_ERR_MISMATCH, JOIN,
                             "tensor %u is %.*s, %s, in the offer and %.*s, %s, here; all senders "
                             "hold the same ones, in the same order",
                             i, (int)theirs->name_length, theirs->name, announced,
                             (int)ours->name_length, ours->name, found);
    }
    return ARL_OK;
}

/* All that can be said before the offer's sender is told of this one. */
static arl_status_t
check_join(const arl_offer_t *offer, uint32_t rank, const arl_transport_t **transport_p,
           arl_error_t *err)
{
    const arl_transport_t *transport = arl_transport_get(offer->transport);

    if (transport == NULL || transport->join == NULL || offer->control[0] == '\0') {
        return arl_error_set(err, ARL_ERR_VALUE, JOIN,
                             "this offer goes over %s, where one sender serves all receivers; "
                             "senders= is for nccl",
                             transport == NULL ? "a transport that is not known here"
                                               : transport->name);
    }
    if (rank < 1 || rank >= offer->senders) {
        return arl_error_set(err, ARL_ERR_VALUE, JOIN,
                             "rank %u of %u senders: the one that made the offer is rank 0, the "
                             "others are 1 to senders - 1; is senders= of WeightSender right?",
                             rank, offer->senders);
    }
    *transport_p = transport;
    return arl_transport_check_origin(transport, offer, JOIN, err);
}

/* From the slot in the offer's control block to its end. */
static arl_status_t
join_offer(arl_sender_t *sender, arl_export_request_t *request, const arl_offer_t *offer,
           uint32_t rank, const arl_transport_t *transport, arl_sync_stats_t *stats,
           arl_error_t *err)
{
    arl_error_t reason = ARL_ERROR_INIT;
    arl_control_t *control;
    arl_status_t status = arl_control_attach(offer, rank, NULL, &control, err);

    if (status != ARL_OK) {
        return status;
    }
    request->kept = &sender->kept[transport->id];
    status = check_alike(offer, request, &reason);
    if (status == ARL_OK) {
        status = transport->probe(&reason);
    }
    if (status == ARL_OK) {
        status = transport->join(request, offer, rank, control, stats, &reason);
    }
    if (status == ARL_OK) {
        arl_control_set_slot(control, ARL_SLOT_DONE);
    }
    else {
        arl_control_fail(control, &reason);
        (void)arl_error_copy(err, &reason);
    }
    arl_control_close(control);
    return status;
}

arl_status_t
arl_sender_join(arl_sender_t *sender, const arl_source_t *sources, uint32_t count,
                const void *bytes, size_t size, uint32_t rank, void *stream,
                arl_deadline_t *deadline, arl_sync_stats_t *stats_p, arl_error_t *err)
{
    arl_export_request_t request = {
        .sources = sources,
        .count = count,
        .keep = sender->keep_mapped,
        .stream = stream,
        .deadline = deadline,
    };
    const arl_transport_t *transport = NULL;
    arl_sync_stats_t stats = {0};
    arl_offer_t offer;
    arl_status_t status = arl_offer_decode(bytes, size, NULL, &offer, err);

    if (status != ARL_OK) {
        return status;
    }
    ARL_CHECK_GOTO(status, learn_sources(sender, sources, count, JOIN, err), free_decoded);
    request.alias_of = sender->alias_of;
    ARL_CHECK_GOTO(status, check_join(&offer, rank, &transport, err), free_decoded);
    ARL_CHECK_GOTO(status, arl_sender_release(sender, deadline, err), free_decoded);
    request.receivers = offer.receivers;
    request.senders = offer.senders;
    stats.transport = transport;
    stats.tensors = count;
    stats.version = offer.epoch;
    ARL_CHECK_GOTO(status, join_offer(sender, &request, &offer, rank, transport, &stats, err),
                   free_decoded);
    sender->epoch = offer.epoch > sender->epoch ? offer.epoch : sender->epoch;
    stats.copy_s = stats.total_s = arl_deadline_elapsed_s(deadline);
    *stats_p = stats;
free_decoded:
    arl_offer_free(&offer);
    return status;
}

/* ---- ending -----------------------------------------------------------------------------------
 */

static bool
release_ready(void *context)
{
    return arl_control_active(context) == 0;
}

arl_status_t
arl_sender_release(arl_sender_t *sender, arl_deadline_t *deadline, arl_error_t *err)
{
    arl_export_t *export = sender->current;

    if (export == NULL) {
        return ARL_OK;
    }
    arl_control_set_sender(export->control, ARL_SENDER_RELEASED);
    if (export->in_place) {
        arl_status_t status = arl_deadline_wait(deadline, release_ready, NULL, export->control);

        if (status != ARL_OK) {
            return arl_error_set(err, status, RELEASE,
                                 "after %.1f s, %u receivers still read the memory of this offer; "
                                 "it must not be freed or written to yet",
                                 arl_deadline_elapsed_s(deadline),
                                 arl_control_active(export->control));
        }
    }
    arl_sender_abandon(sender, false);
    return ARL_OK;
}

void
arl_sender_abandon(arl_sender_t *sender, bool forked)
{
    arl_export_t *export = sender->current;

    if (export == NULL) {
        return;
    }
    sender->current = NULL;
    free_offer(&sender->offer);
    if (forked) {
        arl_control_forget(export->control);
        export->control = NULL;
        export->transport->destroy(export, true);
        return;
    }
    arl_control_close(export->control);
    export->control = NULL;
    arl_export_drop(export);
}

void
arl_sender_close(arl_sender_t *sender, bool forked)
{
    arl_sender_abandon(sender, forked);
    forget_sources(sender);
    for (uint32_t i = 0; i < ARL_TRANSPORT_COUNT; i++) {
        if (sender->kept[i] != NULL) {
            arl_transport_get(i)->discard(&sender->kept[i], forked);
        }
    }
}

int64_t
arl_sender_live(const arl_sender_t *sender)
{
    int64_t count = 0;

    (void)pthread_mutex_lock(&registry_lock);
    for (const arl_export_t *at = registry; at != NULL; at = at->next) {
        count += memcmp(at->nonce, sender->nonce, sizeof(at->nonce)) == 0;
    }
    (void)pthread_mutex_unlock(&registry_lock);
    return count;
}
