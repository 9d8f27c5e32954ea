/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/cuda_mapping.h"
#include "transport/nccl.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static const char PULL[] = "pull";

typedef struct nccl_import {
    arl_import_t base;
    arl_nccl_link_t link;
    arl_chunk_unpacker_t unpacker;
    bool keep; /* the buckets, for the next pull */
} nccl_import_t;

/* ---- opening and closing -------------------------------------------------------------------- */

static void
drop_buckets(nccl_import_t *import)
{
    if (arl_nccl_link_deallocate(&import->link)) {
        arl_chunk_unpacker_free(&import->unpacker, false);
    }
}

void
arl_nccl_pull_close(arl_import_t **import_io, bool keep)
{
    nccl_import_t *import = (nccl_import_t *)*import_io;
    const arl_nccl_api_t *api;
    bool forked;

    if (import == NULL) {
        return;
    }
    forked = arl_nccl_load(&api, NULL) != ARL_OK; /* then nothing of the driver's may be touched */
    if (keep) {
        if (!import->keep && !forked) {
            drop_buckets(import);
        }
        return;
    }
    if (!forked && import->link.engine != NULL) {
        arl_nccl_link_finish(&import->link);
        drop_buckets(import);
    }
    arl_nccl_link_close(&import->link, forked);
    arl_chunk_unpacker_free(&import->unpacker, true);
    free(import);
    *import_io = NULL;
}

static arl_status_t
import_new(int ordinal, nccl_import_t **import_p, arl_error_t *err)
{
    nccl_import_t *import = calloc(1, sizeof(*import));
    arl_status_t status;

    if (import == NULL) {
        return arl_error_set(err, ARL_ERR_NOMEM, PULL, "out of memory");
    }
    import->base.transport = &arl_transport_nccl;
    import->base.device_type = ARL_DEVICE_CUDA;
    import->base.device_index = ordinal;
    status = arl_nccl_link_open(ordinal, &import->link, err);
    if (status != ARL_OK) {
        free(import);
        return status;
    }
    import->unpacker.engine = import->link.engine;
    *import_p = import;
    return ARL_OK;
}

static arl_nccl_watch_t
watch_of(const arl_pull_t *pull)
{
    return (arl_nccl_watch_t){.operation = PULL,
                              .deadline = pull->deadline,
                              .control = pull->control,
                              .check = arl_control_check_sender};
}

/* The device that receives. */
static arl_status_t
find_device(const arl_pull_t *pull, int *ordinal_p, arl_error_t *err)
{
    arl_status_t status = arl_cuda_find_destination(pull, ordinal_p, err);

    if (status == ARL_OK && *ordinal_p < 0) {
        *ordinal_p = 0; /* there is nothing to write: any will do */
    }
    return status;
}

arl_status_t
arl_nccl_pull_open(const arl_pull_t *pull, arl_import_t **import_io, arl_error_t *err)
{
    nccl_import_t *import = (nccl_import_t *)*import_io;
    const arl_nccl_watch_t watch = watch_of(pull);
    arl_chunk_geometry_t geometry;
    int ordinal = -1;
    arl_status_t status;

    if (pull->views) {
        return arl_error_set(err, ARL_ERR_UNAVAILABLE, PULL,
                             "views() shows the sender's own memory, which nccl does not reach; "
                             "use pull() into tensors of your own");
    }
    ARL_CHECK_GOTO(status, arl_nccl_check_blob(pull->offer, PULL, &geometry, err), done);
    ARL_CHECK_GOTO(status, find_device(pull, &ordinal, err), done);
    if (import != NULL && import->base.device_index != ordinal) {
        arl_nccl_pull_close(import_io, false);
        import = NULL;
    }
    if (import == NULL) {
        ARL_CHECK_GOTO(status, import_new(ordinal, &import, err), done);
        *import_io = &import->base;
    }
    import->keep = pull->keep;
    /* The caller closes what is in *import_io when one of these fails. */
    ARL_CHECK_GOTO(status, arl_nccl_link_allocate(&import->link, &geometry, err), done);
    ARL_CHECK_GOTO(status, arl_chunk_unpacker_prepare(&import->unpacker, pull, &geometry, err),
                   done);
    import->base.fallback = import->link.engine->fallback_reason;
    if (import->unpacker.stream.chunk_count > 0) {
        ARL_CHECK_GOTO(status,
                       arl_nccl_check_device(pull->offer, PULL, &import->link.engine->device, err),
                       done);
    }
    import->base.extra_bytes = (int64_t)arl_chunk_geometry_bytes(&geometry) +
                               arl_chunk_unpacker_table_bytes(&import->unpacker);
    status =
        arl_nccl_meet_follow(&import->link, &import->unpacker.stream, pull->offer, &watch, err);
done:
    return status;
}

/* ---- receiving ------------------------------------------------------------------------------ */

/* One chunk of each sender. */
static arl_status_t
take_round(nccl_import_t *import, int64_t round, uint32_t senders, const arl_nccl_watch_t *watch,
           arl_error_t *err)
{
    const arl_stream_t *stream = &import->unpacker.stream;
    arl_nccl_link_t *link = &import->link;
    const int64_t first = round * senders;
    arl_status_t status;

    ARL_CHECK_GOTO(
        status, arl_nccl_link_reach(link, &link->moved, round - ARL_CUDA_QUEUE_MAX + 1, watch, err),
        done);
    /* Into buckets that have been emptied; out of them when they are full. */
    ARL_CHECK_GOTO(status,
                   arl_cuda_queue_follow(&link->moved, round - arl_nccl_link_depth(link, senders),
                                         link->wire, err),
                   done);
    ARL_CHECK_GOTO(status, arl_nccl_link_post(link, stream, round, watch, err), done);
    ARL_CHECK_GOTO(status, arl_cuda_queue_follow(&link->wired, round, link->engine->stream, err),
                   done);
    /* After the last round the wire is idle. */
    link->engine->share = first + senders < stream->chunk_count ? ARL_NCCL_SHARE : 1;
    for (int64_t k = first; k < first + senders && k < stream->chunk_count; k++) {
        ARL_CHECK_GOTO(status,
                       arl_chunk_unpacker_run(&import->unpacker, k, (uintptr_t)link->buckets, err),
                       done);
    }
    status = arl_cuda_queue_mark(&link->moved, err);
done:
    return status;
}

arl_status_t
arl_nccl_pull_copy(const arl_pull_t *pull, arl_import_t *base, arl_error_t *err)
{
    nccl_import_t *import = (nccl_import_t *)base;
    arl_nccl_link_t *link = &import->link;
    const arl_cuda_device_t *device = &link->engine->device;
    const arl_nccl_watch_t watch = watch_of(pull);
    const int64_t rounds = arl_nccl_rounds(&import->unpacker.stream, pull->offer->senders);
    arl_status_t status;

    /* What the caller's stream still reads of the old weights comes first. */
    status = arl_cuda_engine_follow(link->engine, pull->stream, err);
    if (status == ARL_OK) {
        status = arl_cuda_device_push(device, err);
    }
    if (status != ARL_OK) {
        arl_nccl_link_abort(link);
        return status;
    }
    arl_nccl_link_reset(link);
    for (int64_t k = 0; k < rounds && status == ARL_OK; k++) {
        status = take_round(import, k, pull->offer->senders, &watch, err);
    }
    if (status == ARL_OK) {
        status = arl_nccl_link_reach(link, &link->moved, link->moved.launched, &watch, err);
    }
    arl_cuda_device_pop(device);
    if (status != ARL_OK) {
        arl_nccl_link_abort(link);
    }
    return status;
}

arl_status_t
arl_nccl_pull_checksums(const arl_pull_t *pull, arl_import_t *base, const arl_view_t *views,
                        int64_t count, uint64_t *sums, arl_error_t *err)
{
    const nccl_import_t *import = (const nccl_import_t *)base;

    return arl_cuda_checksum(import->link.engine, views, count, pull->deadline, sums, err);
}
