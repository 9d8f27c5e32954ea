/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/cuda_memory.h"
#include "transport/cuda_offer.h"
#include "transport/nccl.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static const char OFFER[] = "offer";
static const char SERVE[] = "serve";
static const char JOIN[] = "join";

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

/* Buckets and tables for the tensors of an offer, of which this sender has a share. */
static arl_status_t
prepare(hub_t *hub, const arl_export_request_t *request, const arl_offer_t *offer, uint32_t rank,
        const arl_chunk_geometry_t *geometry, bool complete, arl_error_t *err)
{
    arl_status_t status = arl_nccl_link_allocate(&hub->link, geometry, err);

    if (status != ARL_OK) {
        return status;
    }
    if (hub->packer.memory != hub->link.buckets ||
        memcmp(&hub->packer.geometry, geometry, sizeof(*geometry)) != 0) {
        arl_chunk_packer_free(&hub->packer, false);
        hub->packer.memory = hub->link.buckets;
        hub->packer.geometry = *geometry;
    }
    arl_chunk_packer_share(&hub->packer, rank, request->senders);
    return arl_chunk_packer_prepare(&hub->packer, request, offer, complete, err);
}

static arl_status_t
check_complete(uint32_t senders, bool complete, const char *operation, arl_error_t *err)
{
    if (senders > 1 && !complete) {
        return arl_error_set(err, ARL_ERR_VALUE, operation,
                             "some tensors come only during serve(), and with senders=%u each "
                             "sender needs all of them at %s(); use one sender to feed them",
                             senders, operation);
    }
    return ARL_OK;
}

static int64_t
extra_bytes(const hub_t *hub)
{
    return (int64_t)arl_chunk_geometry_bytes(&hub->link.geometry) +
           arl_chunk_packer_table_bytes(&hub->packer);
}

arl_status_t
arl_nccl_offer(const arl_export_request_t *request, arl_offer_t *offer, arl_export_t **export_p,
               arl_error_t *err)
{
    nccl_export_t *export = calloc(1, sizeof(*export));
    arl_chunk_geometry_t geometry;
    bool complete = false;
    int ordinal = 0;
    hub_t *hub;
    arl_status_t status;

    if (export == NULL) {
        return arl_error_set(err, ARL_ERR_NOMEM, OFFER, "out of memory");
    }
    ARL_CHECK_GOTO(status, arl_chunk_survey(request, &ordinal, &complete, err), free_export);
    ARL_CHECK_GOTO(status, check_complete(request->senders, complete, OFFER, err), free_export);
    ARL_CHECK_GOTO(status,
                   arl_chunk_geometry_make(request->ring_bytes, ARL_NCCL_BYTES,
                                           ARL_CHUNK_SLOTS * request->senders, &geometry, err),
                   free_export);
    arl_stream_place(offer);
    ARL_CHECK_GOTO(status, take_hub(request, ordinal, &export->hub, err), free_export);
    hub = export->hub;
    export->keep = request->keep;
    ARL_CHECK_GOTO(status, prepare(hub, request, offer, 0, &geometry, complete, err),
                   destroy_export);
    ARL_CHECK_GOTO(status, arl_cuda_offer_settle(request, hub->link.engine, err), destroy_export);
    ARL_CHECK_GOTO(status, write_blob(hub, export, offer, err), destroy_export);
    ARL_CHECK_GOTO(status, arl_cuda_offer_checksums(request, hub->link.engine, offer, err),
                   destroy_export);
    export->base.bytes = hub->packer.stream.total_bytes;
    export->base.extra_bytes = extra_bytes(hub);
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

/* ---- serving -------------------------------------------------------------------------------- */

typedef struct nccl_server {
    arl_chunk_server_t base;
    arl_nccl_link_t *link;
    arl_nccl_watch_t watch;
    uint32_t rank, senders;
} nccl_server_t;

static arl_status_t
chunk_begin(arl_chunk_server_t *base, arl_error_t *err)
{
    nccl_server_t *server = (nccl_server_t *)base;
    arl_nccl_link_t *link = server->link;
    const int64_t round = base->next / server->senders;
    /* The round that was in these buckets before. Fed copies are waited for by the host, with an
     * eye on the deadline only, so they do not begin before they can end. */
    const int64_t before = round - arl_nccl_link_depth(link, server->senders);
    const int64_t room = round - ARL_CUDA_QUEUE_MAX + 1;
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
    const int64_t round = base->next / server->senders;
    arl_status_t status = ARL_OK;

    if (base->next >= base->packed) {
        status = arl_cuda_queue_mark(&link->moved, err);
    }
    if (status == ARL_OK) {
        status = arl_cuda_queue_follow(&link->moved, round, link->wire, err);
    }
    return status != ARL_OK
               ? status
               : arl_nccl_link_post(link, &base->packer->stream, round, &server->watch, err);
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

/* The last round may have no chunk of this sender; the others' pass through it all the same. */
static arl_status_t
last_round(nccl_server_t *server, arl_error_t *err)
{
    const arl_stream_t *stream = &server->base.packer->stream;
    const int64_t last = arl_nccl_rounds(stream, server->senders) - 1;
    arl_nccl_link_t *link = server->link;
    arl_status_t status;

    if (last < 0 || last * server->senders + server->rank < stream->chunk_count) {
        return ARL_OK;
    }
    status =
        arl_nccl_link_reach(link, &link->wired, last - ARL_CUDA_QUEUE_MAX + 1, &server->watch, err);
    return status != ARL_OK ? status : arl_nccl_link_post(link, stream, last, &server->watch, err);
}

/* Fills the buckets once, before anybody has come: the first chunks need not be waited for. */
static arl_status_t
pack_ahead(nccl_server_t *server, arl_error_t *err)
{
    arl_chunk_server_t *base = &server->base;
    const arl_chunk_packer_t *packer = base->packer;
    const uintptr_t zero = 0;
    arl_status_t status = ARL_OK;

    for (int64_t k = server->rank; base->feed == NULL && k < packer->geometry.slots &&
                                   k < packer->stream.chunk_count && status == ARL_OK;
         k += server->senders) {
        status = arl_cuda_plan_run(packer->plans[k], &zero, packer->engine->stream, err);
        if (status == ARL_OK) {
            status = arl_cuda_queue_mark(&server->link->moved, err);
            base->packed = k + 1;
        }
    }
    return status;
}

/* The device is current. */
static arl_status_t
send_all(nccl_server_t *server, arl_error_t *err)
{
    const arl_stream_t *stream = &server->base.packer->stream;
    const arl_offer_t *offer = server->base.offer;
    arl_status_t status;

    server->link->engine->share = 1; /* the wire is idle yet */
    ARL_CHECK_GOTO(status, pack_ahead(server, err), done);
    server->link->engine->share = ARL_NCCL_SHARE;
    status = server->rank == 0
                 ? arl_nccl_meet_lead(server->link, stream, offer, &server->watch, err)
                 : arl_nccl_meet_follow(server->link, stream, offer, &server->watch, err);
    if (status == ARL_OK) {
        status = arl_chunk_serve(&server->base, err);
    }
    if (status == ARL_OK) {
        status = last_round(server, err);
    }
    if (status == ARL_OK) {
        status = all_sent(&server->base, err);
    }
done:
    return status;
}

/* This sender's part of one sync, from before the meeting to the last byte. */
static arl_status_t
run_server(nccl_server_t *server, arl_error_t *err)
{
    arl_nccl_link_t *link = server->link;
    const arl_cuda_device_t *device = &link->engine->device;
    const arl_control_page_t *page = arl_control_page(server->watch.control);
    arl_status_t status = arl_cuda_device_push(device, err);

    if (status != ARL_OK) {
        return status;
    }
    arl_nccl_link_reset(link);
    status = send_all(server, err);
    arl_cuda_device_pop(device);
    if (status != ARL_OK) {
        /* Where nobody has been told to begin, the communicator is as good as before. */
        if (atomic_load(&page->sequence) != 0) {
            arl_nccl_link_abort(link);
        }
        (void)arl_nccl_link_idle(link); /* the caller's tensors may go now */
    }
    return status;
}

static nccl_server_t
server_of(hub_t *hub, const arl_offer_t *offer, uint32_t rank, arl_control_t *control,
          arl_deadline_t *deadline)
{
    return (nccl_server_t){
        .base = {.packer = &hub->packer,
                 .offer = offer,
                 .deadline = deadline,
                 .begin = chunk_begin,
                 .end = chunk_end,
                 .fed = all_sent,
                 .quiet = all_sent},
        .link = &hub->link,
        .watch = {.operation = rank == 0 ? SERVE : JOIN,
                  .deadline = deadline,
                  .control = control,
                  .check = rank == 0 ? arl_control_check_receivers : arl_control_check_sender},
        .rank = rank,
        .senders = offer->senders};
}

arl_status_t
arl_nccl_serve(arl_export_t *base, const arl_offer_t *offer, const arl_feed_t *feed,
               arl_deadline_t *deadline, arl_error_t *err)
{
    hub_t *hub = ((nccl_export_t *)base)->hub;
    nccl_server_t server = server_of(hub, offer, 0, base->control, deadline);
    arl_status_t status;

    server.base.feed = feed;
    if (atomic_load(&arl_control_page(base->control)->sequence) != 0) {
        return arl_error_set(err, ARL_ERR_SYNC, SERVE,
                             "this offer was served already; make a new one with offer()");
    }
    if (feed != NULL && offer->senders > 1) {
        return arl_error_set(err, ARL_ERR_VALUE, SERVE,
                             "with senders=%u the tensors are those of offer(); serve() takes none",
                             offer->senders);
    }
    status = arl_chunk_serve_check(&server.base, err);
    return status != ARL_OK ? status : run_server(&server, err);
}

/* ---- taking part in another sender's offer -------------------------------------------------- */

static arl_status_t
join_with(hub_t *hub, const arl_export_request_t *request, const arl_offer_t *offer, uint32_t rank,
          const arl_chunk_geometry_t *geometry, arl_control_t *control, arl_error_t *err)
{
    nccl_server_t server = server_of(hub, offer, rank, control, request->deadline);
    arl_status_t status;

    ARL_CHECK_GOTO(status, prepare(hub, request, offer, rank, geometry, true, err), done);
    if (hub->packer.stream.chunk_count > 0) {
        ARL_CHECK_GOTO(status, arl_nccl_check_device(offer, JOIN, &hub->link.engine->device, err),
                       done);
    }
    ARL_CHECK_GOTO(status, arl_cuda_engine_follow(hub->link.engine, request->stream, err), done);
    status = run_server(&server, err);
done:
    return status;
}

/* All of these tensors must be there, on one device. */
static arl_status_t
survey(const arl_export_request_t *request, int *ordinal_p, arl_error_t *err)
{
    bool complete = false;
    arl_status_t status = arl_chunk_survey(request, ordinal_p, &complete, err);

    if (status == ARL_OK && request->sources[0].view.device_type != ARL_DEVICE_CUDA) {
        return arl_error_set(err, ARL_ERR_UNAVAILABLE, JOIN,
                             "nccl moves tensors of GPU memory, and these are in CPU memory");
    }
    return status != ARL_OK ? status : check_complete(request->senders, complete, JOIN, err);
}

arl_status_t
arl_nccl_join(const arl_export_request_t *request, const arl_offer_t *offer, uint32_t rank,
              arl_control_t *control, arl_sync_stats_t *stats, arl_error_t *err)
{
    arl_chunk_geometry_t geometry;
    int ordinal = 0;
    hub_t *hub;
    arl_status_t status;

    ARL_CHECK_GOTO(status, arl_nccl_check_blob(offer, JOIN, &geometry, err), done);
    ARL_CHECK_GOTO(status, survey(request, &ordinal, err), done);
    ARL_CHECK_GOTO(status, take_hub(request, ordinal, &hub, err), done);
    status = join_with(hub, request, offer, rank, &geometry, control, err);
    stats->bytes = hub->packer.stream.total_bytes;
    stats->extra_bytes = extra_bytes(hub);
    if (!request->keep) {
        drop_buckets(hub);
    }
    hub_free(hub, false);
done:
    return status;
}
