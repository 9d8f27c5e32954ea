/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nccl.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Both sides are usually there within a few hundred microseconds of each other. */
static const int64_t MEET_SPIN_NS = 2 * 1000 * 1000;

static const char SERVE[] = "serve";
static const char JOIN[] = "join";

/* Numbers of communicators, of all senders of this process. */
static _Atomic uint64_t generations;

/* ---- rank 0 --------------------------------------------------------------------------------- */

static bool
all_have_come(void *context)
{
    const arl_nccl_watch_t *watch = context;
    arl_control_page_t *page = arl_control_page(watch->control);

    for (uint32_t i = 0; i < arl_control_slots(watch->control); i++) {
        if (atomic_load_explicit(&page->slots[i].sequence, memory_order_acquire) == 0) {
            return false;
        }
    }
    return true;
}

static bool
peers_well(void *context)
{
    const arl_nccl_watch_t *watch = context;

    return watch->check(watch->control, NULL) == ARL_OK;
}

static arl_status_t
wait_for_hellos(const arl_nccl_watch_t *watch, bool shared, arl_error_t *err)
{
    char came[80];
    arl_status_t status = arl_deadline_wait_spinning(watch->deadline, MEET_SPIN_NS, all_have_come,
                                                     peers_well, (void *)watch);

    if (status == ARL_OK) {
        return ARL_OK;
    }
    if (status == ARL_ERR_PEER_LOST) {
        status = watch->check(watch->control, err);
        return status != ARL_OK ? status : ARL_ERR_PEER_LOST;
    }
    if (status == ARL_ERR_INTERRUPTED) {
        return arl_error_set(err, status, SERVE, "interrupted while waiting for receivers");
    }
    arl_control_count(watch->control, false, came, sizeof(came));
    return arl_error_set(err, status, SERVE,
                         "after %.1f s, %s have come, and NCCL needs all of them at once; did "
                         "every one call pull()%s with this offer, and is receivers=%s right?",
                         arl_deadline_elapsed_s(watch->deadline), came, shared ? " or join()" : "",
                         shared ? " or senders=" : "");
}

/* Two ranks on one device: NCCL would refuse that too, with less to say. */
static arl_status_t
check_devices(const arl_control_t *control, uint32_t joining, const arl_nccl_hello_t *hellos,
              arl_error_t *err)
{
    char text[ARL_CUDA_UUID_TEXT], who[2][32], both[80];

    for (uint32_t i = 0; i < arl_control_slots(control); i++) {
        for (uint32_t j = 0; j < i; j++) {
            if (memcmp(hellos[i].uuid, hellos[j].uuid, sizeof(hellos[i].uuid)) != 0) {
                continue;
            }
            arl_cuda_uuid_text(hellos[i].uuid, text);
            arl_control_who(control, j, who[0], sizeof(who[0]));
            arl_control_who(control, i, who[1], sizeof(who[1]));
            if (j >= joining) {
                (void)snprintf(both, sizeof(both), "receivers %u and %u", j - joining, i - joining);
            }
            else {
                (void)snprintf(both, sizeof(both), "%s and %s", who[0], who[1]);
            }
            return arl_error_set(err, ARL_ERR_UNAVAILABLE, SERVE,
                                 "%s are both on %s, and NCCL places no two ranks on one GPU; give "
                                 "each a GPU of its own, or serve them with a sender on that GPU "
                                 "over cuda_ipc",
                                 both, text);
        }
    }
    return ARL_OK;
}

static arl_status_t
read_hellos(const arl_nccl_watch_t *watch, const arl_stream_t *stream, const arl_offer_t *offer,
            arl_nccl_hello_t *hellos, arl_error_t *err)
{
    const uint64_t layout_id = offer->layout_id;
    const arl_control_page_t *page = arl_control_page(watch->control);
    char who[32];

    for (uint32_t i = 0; i < arl_control_slots(watch->control); i++) {
        memcpy(&hellos[i], page->slots[i].message, sizeof(hellos[i]));
        if (hellos[i].layout_id == layout_id && hellos[i].chunk_count == stream->chunk_count &&
            hellos[i].total_bytes == stream->total_bytes) {
            continue;
        }
        arl_control_who(watch->control, i, who, sizeof(who));
        return arl_error_set(
            err, ARL_ERR_MISMATCH, SERVE,
            "%s expects %lld chunks of %lld bytes (layout %016llx), the offer "
            "has %lld of %lld (%016llx): it read another offer, or is another "
            "version of arctic_rl_c",
            who, (long long)hellos[i].chunk_count, (long long)hellos[i].total_bytes,
            (unsigned long long)hellos[i].layout_id, (long long)stream->chunk_count,
            (long long)stream->total_bytes, (unsigned long long)layout_id);
    }
    return stream->chunk_count > 0 ? check_devices(watch->control, offer->senders - 1, hellos, err)
                                   : ARL_OK;
}

/* Whether all of them hold the communicator that this side holds, and led itself. */
static bool
connected(const arl_nccl_link_t *link, const arl_nccl_place_t *wanted,
          const arl_nccl_hello_t *hellos)
{
    const arl_nccl_place_t *place = &link->place;

    if (link->comm == NULL || place->world != wanted->world || place->senders != wanted->senders ||
        place->rank != wanted->rank ||
        memcmp(place->nonce, wanted->nonce, sizeof(place->nonce)) != 0) {
        return false;
    }
    for (int i = 0; i + 1 < place->world; i++) {
        if (hellos[i].generation != place->generation) {
            return false;
        }
    }
    return true;
}

/* Tells all others to begin, and joins the communicator if it is a new one. */
static arl_status_t
connect_all(arl_nccl_link_t *link, const arl_offer_t *offer, const arl_nccl_hello_t *hellos,
            const arl_nccl_watch_t *watch, arl_error_t *err)
{
    arl_control_page_t *page = arl_control_page(watch->control);
    const uint32_t slots = arl_control_slots(watch->control);
    arl_nccl_place_t place = {.rank = 0, .world = (int)slots + 1, .senders = (int)offer->senders};
    arl_nccl_result_t result;
    arl_nccl_id_t id;

    memcpy(place.nonce, offer->nonce, sizeof(place.nonce));
    if (connected(link, &place, hellos)) {
        atomic_store_explicit(&page->sequence, link->place.generation << 1, memory_order_release);
        return ARL_OK;
    }
    arl_nccl_link_finish(link);
    result = link->api->ncclGetUniqueId(&id);
    if (result != ARL_NCCL_SUCCESS) {
        return arl_nccl_error_set(link->api, err, ARL_ERR_SYNC, result, NULL, "ncclGetUniqueId",
                                  "no communicator can be made here; does NCCL_SOCKET_IFNAME name "
                                  "an interface that is there?");
    }
    for (uint32_t i = 0; i < slots; i++) {
        memcpy(page->slots[i].message, &id, sizeof(id));
    }
    place.generation = atomic_fetch_add(&generations, 1) + 1;
    atomic_store_explicit(&page->sequence, place.generation << 1 | 1, memory_order_release);
    return arl_nccl_link_connect(link, &id, &place, watch, err);
}

arl_status_t
arl_nccl_meet_lead(arl_nccl_link_t *link, const arl_stream_t *stream, const arl_offer_t *offer,
                   const arl_nccl_watch_t *watch, arl_error_t *err)
{
    const uint32_t slots = arl_control_slots(watch->control);
    arl_control_page_t *page = arl_control_page(watch->control);
    arl_nccl_hello_t *hellos = calloc(slots, sizeof(*hellos));
    arl_status_t status;

    if (hellos == NULL) {
        return arl_error_set(err, ARL_ERR_NOMEM, SERVE, "out of memory for %u receivers", slots);
    }
    ARL_CHECK_GOTO(status, wait_for_hellos(watch, offer->senders > 1, err), free_hellos);
    ARL_CHECK_GOTO(status, read_hellos(watch, stream, offer, hellos, err), free_hellos);
    if (stream->chunk_count == 0) { /* no bytes, no communicator */
        atomic_store_explicit(&page->sequence, 2, memory_order_release);
        goto free_hellos;
    }
    ARL_CHECK_GOTO(status, connect_all(link, offer, hellos, watch, err), free_hellos);
free_hellos:
    free(hellos);
    return status;
}

/* ---- the other ranks ------------------------------------------------------------------------ */

static bool
is_join(const char *operation)
{
    return strcmp(operation, JOIN) == 0;
}

static const char *
self_name(const char *operation)
{
    return is_join(operation) ? "this sender" : "this receiver";
}

arl_status_t
arl_nccl_check_blob(const arl_offer_t *offer, const char *operation,
                    arl_chunk_geometry_t *geometry_p, arl_error_t *err)
{
    arl_nccl_blob_t blob = {0};
    const int version = arl_nccl_found()->version;
    char theirs[ARL_LIBRARY_VERSION_MAX], ours[ARL_LIBRARY_VERSION_MAX];

    if (offer->blob_size >= sizeof(blob)) {
        memcpy(&blob, offer->blob, sizeof(blob));
    }
    if (offer->alloc_count != 0 || !arl_chunk_geometry_valid(&blob.geometry) ||
        blob.geometry.slots % offer->senders != 0 ||
        offer->blob_size - sizeof(blob) != blob.settings_size) {
        return arl_error_set(err, ARL_ERR_SYNC, operation,
                             "offer is not valid: it describes no buckets of nccl");
    }
    if (blob.version != version) {
        arl_nccl_version_text(blob.version, theirs, sizeof(theirs));
        arl_nccl_version_text(version, ours, sizeof(ours));
        return arl_error_set(err, ARL_ERR_UNAVAILABLE, operation,
                             "the offer's sender runs NCCL %s and %s NCCL %s (%s), which do not "
                             "work together; install the same one for both, or name it with "
                             "ARCTIC_RL_C_NCCL",
                             theirs, self_name(operation), ours, arl_nccl_found()->path);
    }
    *geometry_p = blob.geometry;
    return arl_nccl_settings_compare((const char *)offer->blob + sizeof(blob), blob.settings_size,
                                     operation, self_name(operation), err);
}

arl_status_t
arl_nccl_check_device(const arl_offer_t *offer, const char *operation,
                      const arl_cuda_device_t *device, arl_error_t *err)
{
    char text[ARL_CUDA_UUID_TEXT];

    if (memcmp(offer->unit.uuid, device->uuid, sizeof(device->uuid)) != 0) {
        return ARL_OK;
    }
    arl_cuda_uuid_text(device->uuid, text);
    return arl_error_set(err, ARL_ERR_UNAVAILABLE, operation,
                         "the offer's sender and %s are both on %s, and NCCL places no two "
                         "ranks on one GPU; %s",
                         self_name(operation), text,
                         is_join(operation)
                             ? "give each sender a GPU of its own, or make fewer (senders=)"
                             : "make the sender with cuda_ipc=True, or with colocated=True for "
                               "host_shm");
}

static bool
sender_spoke(void *context)
{
    const arl_nccl_watch_t *watch = context;

    return atomic_load_explicit(&arl_control_page(watch->control)->sequence,
                                memory_order_acquire) != 0;
}

static arl_status_t
wait_for_sender(const arl_offer_t *offer, const arl_nccl_watch_t *watch, arl_error_t *err)
{
    arl_status_t status = arl_deadline_wait_spinning(watch->deadline, MEET_SPIN_NS, sender_spoke,
                                                     peers_well, (void *)watch);

    if (status == ARL_ERR_PEER_LOST) {
        status = watch->check(watch->control, err);
        return status != ARL_OK ? status : ARL_ERR_PEER_LOST;
    }
    if (status == ARL_ERR_INTERRUPTED) {
        return arl_error_set(err, status, watch->operation,
                             "interrupted while waiting for the sender");
    }
    if (status != ARL_OK) {
        return arl_error_set(err, status, watch->operation,
                             "after %.1f s, the sender (pid %lld) has not begun; is it in serve(), "
                             "which must run at the same time as %s(), have all %u receivers%s "
                             "come, and is timeout= long enough?",
                             arl_deadline_elapsed_s(watch->deadline), (long long)offer->sender.pid,
                             watch->operation, offer->receivers,
                             offer->senders > 1 ? " and all senders" : "");
    }
    return ARL_OK;
}

arl_status_t
arl_nccl_meet_follow(arl_nccl_link_t *link, const arl_stream_t *stream, const arl_offer_t *offer,
                     const arl_nccl_watch_t *watch, arl_error_t *err)
{
    const uint32_t number = arl_control_slot(watch->control);
    arl_control_page_t *page = arl_control_page(watch->control);
    arl_control_slot_t *slot = &page->slots[number];
    arl_nccl_place_t place = {.rank = (int)number + 1,
                              .world = (int)arl_control_slots(watch->control) + 1,
                              .senders = (int)offer->senders};
    arl_nccl_hello_t hello = {.layout_id = offer->layout_id,
                              .chunk_count = stream->chunk_count,
                              .total_bytes = stream->total_bytes};
    arl_nccl_id_t id;
    uint64_t sequence;
    arl_status_t status;

    memcpy(place.nonce, offer->nonce, sizeof(place.nonce));
    memcpy(hello.uuid, link->engine->device.uuid, sizeof(hello.uuid));
    /* Which receiver is which makes no difference; which sender does. */
    if (memcmp(link->place.nonce, offer->nonce, sizeof(offer->nonce)) == 0 &&
        (place.rank >= place.senders || place.rank == link->place.rank)) {
        hello.generation = link->place.generation;
    }
    memcpy(slot->message, &hello, sizeof(hello));
    atomic_store_explicit(&slot->sequence, 1, memory_order_release);
    status = wait_for_sender(offer, watch, err);
    if (status != ARL_OK || stream->chunk_count == 0) {
        return status;
    }
    sequence = atomic_load_explicit(&page->sequence, memory_order_acquire);
    if ((sequence & 1) == 0) {
        return hello.generation != 0 && sequence >> 1 == hello.generation
                   ? ARL_OK
                   : arl_error_set(err, ARL_ERR_SYNC, watch->operation,
                                   "the sender goes on with a communicator that %s is not part of",
                                   self_name(watch->operation));
    }
    arl_nccl_link_finish(link);
    memcpy(&id, slot->message, sizeof(id));
    place.generation = sequence >> 1;
    return arl_nccl_link_connect(link, &id, &place, watch, err);
}
