/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/cuda_memory.h"
#include "transport/cuda_offer.h"
#include "transport/nccl.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static const char OFFER[] = "offer";
static const char SERVE[] = "serve";

/*
 * What outlives an offer: the communicator always, buckets and tables when the sender keeps them.
 * Counted, since a receiver of this process may still hold the export.
 */
typedef struct hub {
    atomic_int references;
    arl_nccl_link_t link;
    arl_chunk_packer_t packer;
} hub_t;

typedef struct nccl_export {
    arl_export_t base;
    hub_t *hub;
    bool keep; /* the buckets, for the next offer */
    uint8_t *blob;
} nccl_export_t;

/* Numbers of communicators, of all senders of this process. */
static _Atomic uint64_t generations;

/* ---- the hub -------------------------------------------------------------------------------- */

static void
drop_buckets(hub_t *hub)
{
    if (arl_nccl_link_deallocate(&hub->link)) {
        arl_chunk_packer_free(&hub->packer, false); /* its tables name the buckets */
    }
}

static void
hub_free(hub_t *hub, bool forked)
{
    if (atomic_fetch_sub(&hub->references, 1) != 1) {
        return;
    }
    if (!forked) {
        arl_nccl_link_finish(&hub->link);
        drop_buckets(hub);
    }
    arl_nccl_link_close(&hub->link, forked);
    arl_chunk_packer_free(&hub->packer, true);
    free(hub);
}

void
arl_nccl_discard(void **kept, bool forked)
{
    if (*kept != NULL) {
        hub_free(*kept, forked);
        *kept = NULL;
    }
}

void
arl_nccl_destroy(arl_export_t *base, bool forked)
{
    nccl_export_t *export = (nccl_export_t *)base;

    if (!export->keep && !forked) {
        drop_buckets(export->hub);
    }
    hub_free(export->hub, forked);
    free(export->blob);
    free(export);
}

/* The kept hub when it is on the same device and nobody else uses it, or a new one. */
static arl_status_t
take_hub(const arl_export_request_t *request, int ordinal, hub_t **hub_p, arl_error_t *err)
{
    hub_t *hub = *request->kept;
    arl_status_t status;

    if (hub != NULL && hub->link.engine->device.ordinal == ordinal &&
        atomic_load(&hub->references) == 1) {
        atomic_fetch_add(&hub->references, 1);
        *hub_p = hub;
        return ARL_OK;
    }
    arl_nccl_discard(request->kept, false);
    hub = calloc(1, sizeof(*hub));
    if (hub == NULL) {
        return arl_error_set(err, ARL_ERR_NOMEM, OFFER, "out of memory");
    }
    status = arl_nccl_link_open(ordinal, &hub->link, err);
    if (status != ARL_OK) {
        free(hub);
        return status;
    }
    hub->packer.engine = hub->link.engine;
    hub->references = 2; /* the offer's and the sender's */
    *request->kept = hub;
    *hub_p = hub;
    return ARL_OK;
}

/* ---- making an offer ------------------------------------------------------------------------ */

/* What receivers compare before NCCL is touched. */
static arl_status_t
write_blob(const hub_t *hub, nccl_export_t *export, arl_offer_t *offer, arl_error_t *err)
{
    char settings[ARL_NCCL_SETTINGS_MAX];
    const size_t size = arl_nccl_settings_write(settings);
    arl_nccl_blob_t head = {
        .geometry = hub->link.geometry,
        .version = arl_nccl_found()->version,
        .settings_size = (uint32_t)size,
    };

    export->blob = malloc(sizeof(head) + size);
    if (export->blob == NULL) {
        return arl_error_set(err, ARL_ERR_NOMEM, OFFER, "out of memory");
    }
    memcpy(export->blob, &head, sizeof(head));
    memcpy(export->blob + sizeof(head), settings, size);
    offer->blob = export->blob;
    offer->blob_size = (uint32_t)(sizeof(head) + size);
    offer->unit = arl_cuda_unit(&hub->link.engine->device);
    return ARL_OK;
}

/* Buckets and tables for the tensors of this offer. */
static arl_status_t
prepare(hub_t *hub, const arl_export_request_t *request, const arl_offer_t *offer, bool complete,
        arl_error_t *err)
{
    arl_chunk_geometry_t geometry;
    arl_status_t status =
        arl_chunk_geometry_make(request->ring_bytes, ARL_NCCL_BYTES, &geometry, err);

    if (status == ARL_OK) {
        status = arl_nccl_link_allocate(&hub->link, &geometry, err);
    }
    if (status != ARL_OK) {
        return status;
    }
    if (hub->packer.memory != hub->link.buckets ||
        memcmp(&hub->packer.geometry, &geometry, sizeof(geometry)) != 0) {
        arl_chunk_packer_free(&hub->packer, false);
        hub->packer.memory = hub->link.buckets;
        hub->packer.geometry = geometry;
    }
    return arl_chunk_packer_prepare(&hub->packer, request, offer, complete, err);
}

arl_status_t
arl_nccl_offer(const arl_export_request_t *request, arl_offer_t *offer, arl_export_t **export_p,
               arl_error_t *err)
{
    nccl_export_t *export = calloc(1, sizeof(*export));
    bool complete = false;
    int ordinal = 0;
    hub_t *hub;
    arl_status_t status;

    if (export == NULL) {
        return arl_error_set(err, ARL_ERR_NOMEM, OFFER, "out of memory");
    }
    ARL_CHECK_GOTO(status, arl_chunk_survey(request, &ordinal, &complete, err), free_export);
    arl_stream_place(offer);
    ARL_CHECK_GOTO(status, take_hub(request, ordinal, &export->hub, err), free_export);
    hub = export->hub;
    export->keep = request->keep;
    ARL_CHECK_GOTO(status, prepare(hub, request, offer, complete, err), destroy_export);
    ARL_CHECK_GOTO(status, arl_cuda_offer_settle(request, hub->link.engine, err), destroy_export);
    ARL_CHECK_GOTO(status, write_blob(hub, export, offer, err), destroy_export);
    ARL_CHECK_GOTO(status, arl_cuda_offer_checksums(request, hub->link.engine, offer, err),
                   destroy_export);
    export->base.bytes = hub->packer.stream.total_bytes;
    export->base.extra_bytes = (int64_t)arl_chunk_geometry_bytes(&hub->link.geometry) +
                               arl_chunk_packer_table_bytes(&hub->packer);
    *export_p = &export->base;
    return ARL_OK;
destroy_export:
    offer->blob = NULL;
    arl_nccl_destroy(&export->base, false);
    return status;
free_export:
    free(export);
    return status;
}

/* ---- before NCCL is touched ----------------------------------------------------------------- */

static bool
all_have_come(void *context)
{
    const arl_nccl_watch_t *watch = context;
    arl_control_page_t *page = arl_control_page(watch->control);

    for (uint32_t i = 0; i < page->receivers; i++) {
        if (atomic_load_explicit(&page->slots[i].sequence, memory_order_acquire) == 0) {
            return false;
        }
    }
    return true;
}

static bool
receivers_well(void *context)
{
    const arl_nccl_watch_t *watch = context;

    return watch->check(watch->control, NULL) == ARL_OK;
}

static arl_status_t
wait_for_hellos(const arl_nccl_watch_t *watch, arl_error_t *err)
{
    arl_control_page_t *page = arl_control_page(watch->control);
    uint32_t came = 0;
    arl_status_t status =
        arl_deadline_wait(watch->deadline, all_have_come, receivers_well, (void *)watch);

    if (status == ARL_OK) {
        return ARL_OK;
    }
    if (status == ARL_ERR_PEER_LOST) {
        status = watch->check(watch->control, err);
        return status != ARL_OK ? status : ARL_ERR_PEER_LOST;
    }
    for (uint32_t i = 0; i < page->receivers; i++) {
        came += atomic_load_explicit(&page->slots[i].sequence, memory_order_acquire) != 0;
    }
    if (status == ARL_ERR_INTERRUPTED) {
        return arl_error_set(err, status, SERVE, "interrupted while waiting for receivers");
    }
    return arl_error_set(err, status, SERVE,
                         "after %.1f s, %u of %u receivers have come, and NCCL needs all of them "
                         "at once; did every one call pull() with this offer, and is receivers= "
                         "right?",
                         arl_deadline_elapsed_s(watch->deadline), came, page->receivers);
}

/* Two ranks on one device: NCCL would refuse that too, with less to say. */
static arl_status_t
check_devices(const arl_nccl_hello_t *hellos, uint32_t count, arl_error_t *err)
{
    char text[ARL_CUDA_UUID_TEXT];

    for (uint32_t i = 0; i < count; i++) {
        for (uint32_t j = 0; j < i; j++) {
            if (memcmp(hellos[i].uuid, hellos[j].uuid, sizeof(hellos[i].uuid)) == 0) {
                arl_cuda_uuid_text(hellos[i].uuid, text);
                return arl_error_set(err, ARL_ERR_UNAVAILABLE, SERVE,
                                     "receivers %u and %u are both on %s, and NCCL places no two "
                                     "ranks on one GPU; give each a GPU of its own, or serve them "
                                     "with a sender on that GPU over cuda_ipc",
                                     j, i, text);
            }
        }
    }
    return ARL_OK;
}

/* Whether all of them hold the communicator that this side holds. */
static bool
connected(const arl_nccl_link_t *link, const arl_nccl_hello_t *hellos, uint32_t count)
{
    if (link->comm == NULL || link->world != (int)count + 1) {
        return false;
    }
    for (uint32_t i = 0; i < count; i++) {
        if (hellos[i].generation != link->generation) {
            return false;
        }
    }
    return true;
}

static arl_status_t
read_hellos(const hub_t *hub, const arl_control_page_t *page, arl_nccl_hello_t *hellos,
            arl_error_t *err)
{
    const arl_stream_t *stream = &hub->packer.stream;

    for (uint32_t i = 0; i < page->receivers; i++) {
        memcpy(&hellos[i], page->slots[i].message, sizeof(hellos[i]));
        if (hellos[i].layout_id != hub->packer.layout_id ||
            hellos[i].chunk_count != stream->chunk_count ||
            hellos[i].total_bytes != stream->total_bytes) {
            return arl_error_set(
                err, ARL_ERR_MISMATCH, SERVE,
                "receiver %u expects %lld chunks of %lld bytes (layout %016llx), "
                "the offer has %lld of %lld (%016llx): it read another offer, or "
                "is another version of arctic_rl_c",
                i, (long long)hellos[i].chunk_count, (long long)hellos[i].total_bytes,
                (unsigned long long)hellos[i].layout_id, (long long)stream->chunk_count,
                (long long)stream->total_bytes, (unsigned long long)hub->packer.layout_id);
        }
    }
    return stream->chunk_count > 0 ? check_devices(hellos, page->receivers, err) : ARL_OK;
}

/* Tells all receivers to begin, and joins the communicator if it is a new one. */
static arl_status_t
connect_all(hub_t *hub, const arl_nccl_hello_t *hellos, const arl_nccl_watch_t *watch,
            arl_error_t *err)
{
    arl_control_page_t *page = arl_control_page(watch->control);
    arl_nccl_link_t *link = &hub->link;
    arl_nccl_result_t result;
    arl_nccl_id_t id;
    uint64_t generation;

    if (connected(link, hellos, page->receivers)) {
        atomic_store_explicit(&page->sequence, link->generation << 1, memory_order_release);
        return ARL_OK;
    }
    arl_nccl_link_finish(link);
    result = link->api->ncclGetUniqueId(&id);
    if (result != ARL_NCCL_SUCCESS) {
        return arl_nccl_error_set(link->api, err, ARL_ERR_SYNC, result, NULL, "ncclGetUniqueId",
                                  "no communicator can be made here; does NCCL_SOCKET_IFNAME name "
                                  "an interface that is there?");
    }
    for (uint32_t i = 0; i < page->receivers; i++) {
        memcpy(page->slots[i].message, &id, sizeof(id));
    }
    generation = atomic_fetch_add(&generations, 1) + 1;
    atomic_store_explicit(&page->sequence, generation << 1 | 1, memory_order_release);
    return arl_nccl_link_connect(link, &id, 0, (int)page->receivers + 1, generation, watch, err);
}

static arl_status_t
meet(hub_t *hub, const arl_nccl_watch_t *watch, arl_error_t *err)
{
    arl_control_page_t *page = arl_control_page(watch->control);
    arl_nccl_hello_t *hellos = calloc(page->receivers, sizeof(*hellos));
    arl_status_t status;

    if (hellos == NULL) {
        return arl_error_set(err, ARL_ERR_NOMEM, SERVE, "out of memory for %u receivers",
                             page->receivers);
    }
    ARL_CHECK_GOTO(status, wait_for_hellos(watch, err), free_hellos);
    ARL_CHECK_GOTO(status, read_hellos(hub, page, hellos, err), free_hellos);
    if (hub->packer.stream.chunk_count == 0) { /* no bytes, no communicator */
        atomic_store_explicit(&page->sequence, 2, memory_order_release);
        goto free_hellos;
    }
    ARL_CHECK_GOTO(status, connect_all(hub, hellos, watch, err), free_hellos);
free_hellos:
    free(hellos);
    return status;
}

/* ---- serving -------------------------------------------------------------------------------- */

typedef struct nccl_server {
    arl_chunk_server_t base;
    arl_nccl_link_t *link;
    arl_nccl_watch_t watch;
} nccl_server_t;

static arl_status_t
chunk_begin(arl_chunk_server_t *base, arl_error_t *err)
{
    nccl_server_t *server = (nccl_server_t *)base;
    arl_nccl_link_t *link = server->link;
    /* The chunk that was in this bucket before. Fed copies are waited for by the host, with an eye
     * on the deadline only, so they do not begin before they can end. */
    const int64_t before = base->next - link->geometry.slots;
    const int64_t room = base->next - ARL_CUDA_QUEUE_MAX + 1;
    arl_status_t status = arl_nccl_link_reach(
        link, &link->wired, base->feed != NULL ? before + 1 : room, &server->watch, err);

    return status != ARL_OK
               ? status
               : arl_cuda_queue_follow(&link->wired, before, link->engine->stream, err);
}

static arl_status_t
chunk_end(arl_chunk_server_t *base, arl_error_t *err)
{
    nccl_server_t *server = (nccl_server_t *)base;
    arl_nccl_link_t *link = server->link;
    arl_status_t status = ARL_OK;

    if (base->next >= base->packed) {
        status = arl_cuda_queue_mark(&link->moved, err);
    }
    if (status == ARL_OK) {
        status = arl_cuda_queue_follow(&link->moved, base->next, link->wire, err);
    }
    return status != ARL_OK ? status
                            : arl_nccl_link_post(link, true, arl_nccl_link_bucket(link, base->next),
                                                 (size_t)base->packer->stream.fill[base->next],
                                                 &server->watch, err);
}

/* What feeds the tensors runs code of the caller's, which may well wait for the device (a free, a
 * synchronize), and would do so for ever if a peer died now. */
static arl_status_t
all_sent(arl_chunk_server_t *base, arl_error_t *err)
{
    nccl_server_t *server = (nccl_server_t *)base;
    arl_nccl_link_t *link = server->link;

    return arl_nccl_link_reach(link, &link->wired, link->wired.launched, &server->watch, err);
}

/* Fills the buckets once, before anybody has come: the first chunks need not be waited for. */
static arl_status_t
pack_ahead(nccl_server_t *server, arl_error_t *err)
{
    arl_chunk_server_t *base = &server->base;
    const arl_chunk_packer_t *packer = base->packer;
    const uintptr_t zero = 0;
    arl_status_t status = ARL_OK;

    while (base->feed == NULL && base->packed < packer->geometry.slots &&
           base->packed < packer->stream.chunk_count && status == ARL_OK) {
        status = arl_cuda_plan_run(packer->plans[base->packed], &zero, packer->engine->stream, err);
        if (status == ARL_OK) {
            status = arl_cuda_queue_mark(&server->link->moved, err);
            base->packed++;
        }
    }
    return status;
}

/* The device is current. */
static arl_status_t
send_all(nccl_server_t *server, hub_t *hub, arl_error_t *err)
{
    arl_status_t status = pack_ahead(server, err);

    if (status == ARL_OK) {
        status = meet(hub, &server->watch, err);
    }
    if (status == ARL_OK) {
        status = arl_chunk_serve(&server->base, err);
    }
    return status == ARL_OK ? all_sent(&server->base, err) : status;
}

arl_status_t
arl_nccl_serve(arl_export_t *base, const arl_offer_t *offer, const arl_feed_t *feed,
               arl_deadline_t *deadline, arl_error_t *err)
{
    hub_t *hub = ((nccl_export_t *)base)->hub;
    const arl_cuda_device_t *device = &hub->link.engine->device;
    nccl_server_t server = {.base = {.packer = &hub->packer,
                                     .offer = offer,
                                     .feed = feed,
                                     .deadline = deadline,
                                     .begin = chunk_begin,
                                     .end = chunk_end,
                                     .fed = all_sent,
                                     .quiet = all_sent},
                            .link = &hub->link,
                            .watch = {.operation = SERVE,
                                      .deadline = deadline,
                                      .control = base->control,
                                      .check = arl_control_check_receivers}};
    arl_status_t status;

    if (atomic_load(&arl_control_page(base->control)->sequence) != 0) {
        return arl_error_set(err, ARL_ERR_SYNC, SERVE,
                             "this offer was served already; make a new one with offer()");
    }
    status = arl_chunk_serve_check(&server.base, err);
    if (status != ARL_OK || (status = arl_cuda_device_push(device, err)) != ARL_OK) {
        return status;
    }
    arl_nccl_link_reset(&hub->link);
    status = send_all(&server, hub, err);
    arl_cuda_device_pop(device);
    if (status != ARL_OK) {
        /* Where nobody has been told to begin, the communicator is as good as before. */
        if (atomic_load(&arl_control_page(base->control)->sequence) != 0) {
            arl_nccl_link_abort(&hub->link);
        }
        (void)arl_nccl_link_idle(&hub->link); /* the caller's tensors may go now */
    }
    return status;
}
