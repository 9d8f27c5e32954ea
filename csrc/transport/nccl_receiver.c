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
    uint8_t nonce[ARL_OFFER_ID_BYTES]; /* of the sender that the communicator is with */
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

/* ---- before NCCL is touched ----------------------------------------------------------------- */

static arl_status_t
check_blob(const arl_offer_t *offer, arl_chunk_geometry_t *geometry_p, arl_error_t *err)
{
    arl_nccl_blob_t blob = {0};
    const int version = arl_nccl_found()->version;
    char theirs[ARL_LIBRARY_VERSION_MAX], ours[ARL_LIBRARY_VERSION_MAX];

    if (offer->blob_size >= sizeof(blob)) {
        memcpy(&blob, offer->blob, sizeof(blob));
    }
    if (offer->alloc_count != 0 || !arl_chunk_geometry_valid(&blob.geometry) ||
        offer->blob_size - sizeof(blob) != blob.settings_size) {
        return arl_error_set(err, ARL_ERR_SYNC, PULL,
                             "offer is not valid: it describes no buckets of nccl");
    }
    if (blob.version != version) {
        arl_nccl_version_text(blob.version, theirs, sizeof(theirs));
        arl_nccl_version_text(version, ours, sizeof(ours));
        return arl_error_set(err, ARL_ERR_UNAVAILABLE, PULL,
                             "the sender runs NCCL %s and this receiver NCCL %s (%s), which do not "
                             "work together; install the same one for both, or name it with "
                             "ARCTIC_RL_C_NCCL",
                             theirs, ours, arl_nccl_found()->path);
    }
    *geometry_p = blob.geometry;
    return arl_nccl_settings_compare((const char *)offer->blob + sizeof(blob), blob.settings_size,
                                     err);
}

static arl_status_t
check_device(const arl_offer_t *offer, const arl_cuda_device_t *device, arl_error_t *err)
{
    char text[ARL_CUDA_UUID_TEXT];

    if (memcmp(offer->unit.uuid, device->uuid, sizeof(device->uuid)) != 0) {
        return ARL_OK;
    }
    arl_cuda_uuid_text(device->uuid, text);
    return arl_error_set(err, ARL_ERR_UNAVAILABLE, PULL,
                         "the sender and this receiver are both on %s, and NCCL places no two "
                         "ranks on one GPU; make the sender with cuda_ipc=True, or with "
                         "colocated=True for host_shm",
                         text);
}

static bool
sender_spoke(void *context)
{
    const arl_pull_t *pull = context;

    return atomic_load_explicit(&arl_control_page(pull->control)->sequence, memory_order_acquire) !=
           0;
}

static bool
sender_well(void *context)
{
    const arl_pull_t *pull = context;

    return arl_control_check_sender(pull->control, NULL) == ARL_OK;
}

/* Says that this receiver has come, and waits until the sender has seen all of them. */
static arl_status_t
meet(nccl_import_t *import, const arl_pull_t *pull, uint64_t *sequence_p, arl_error_t *err)
{
    arl_control_page_t *page = arl_control_page(pull->control);
    arl_control_slot_t *slot = &page->slots[arl_control_slot(pull->control)];
    arl_nccl_hello_t hello = {
        .layout_id = pull->offer->layout_id,
        .chunk_count = import->unpacker.stream.chunk_count,
        .total_bytes = import->unpacker.stream.total_bytes,
        .generation = memcmp(import->nonce, pull->offer->nonce, sizeof(import->nonce)) == 0
                          ? import->link.generation
                          : 0,
    };
    arl_status_t status;

    memcpy(hello.uuid, import->link.engine->device.uuid, sizeof(hello.uuid));
    memcpy(slot->message, &hello, sizeof(hello));
    atomic_store_explicit(&slot->sequence, 1, memory_order_release);
    status = arl_deadline_wait(pull->deadline, sender_spoke, sender_well, (void *)pull);
    if (status == ARL_OK) {
        *sequence_p = atomic_load_explicit(&page->sequence, memory_order_acquire);
        return ARL_OK;
    }
    if (status == ARL_ERR_PEER_LOST) {
        status = arl_control_check_sender(pull->control, err);
        return status != ARL_OK ? status : ARL_ERR_PEER_LOST;
    }
    if (status == ARL_ERR_INTERRUPTED) {
        return arl_error_set(err, status, PULL, "interrupted while waiting for the sender");
    }
    return arl_error_set(err, status, PULL,
                         "after %.1f s, the sender (pid %lld) has not begun; is it in serve(), "
                         "which must run at the same time as pull(), have all %u receivers come, "
                         "and is timeout= long enough?",
                         arl_deadline_elapsed_s(pull->deadline), (long long)pull->offer->sender.pid,
                         pull->offer->receivers);
}

static arl_nccl_watch_t
watch_of(const arl_pull_t *pull)
{
    return (arl_nccl_watch_t){.operation = PULL,
                              .deadline = pull->deadline,
                              .control = pull->control,
                              .check = arl_control_check_sender};
}

/* What the sender said: the communicator at hand, or a new one. */
static arl_status_t
join(nccl_import_t *import, const arl_pull_t *pull, uint64_t sequence, arl_error_t *err)
{
    const arl_nccl_watch_t watch = watch_of(pull);
    const uint32_t number = arl_control_slot(pull->control);
    arl_nccl_id_t id;

    if ((sequence & 1) == 0) {
        return sequence >> 1 == import->link.generation
                   ? ARL_OK
                   : arl_error_set(err, ARL_ERR_SYNC, PULL,
                                   "the sender goes on with a communicator that this receiver is "
                                   "not part of");
    }
    arl_nccl_link_finish(&import->link);
    memcpy(&id, arl_control_page(pull->control)->slots[number].message, sizeof(id));
    memcpy(import->nonce, pull->offer->nonce, sizeof(import->nonce));
    return arl_nccl_link_connect(&import->link, &id, (int)number + 1,
                                 (int)pull->offer->receivers + 1, sequence >> 1, &watch, err);
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
    arl_chunk_geometry_t geometry;
    uint64_t sequence = 0;
    int ordinal = -1;
    arl_status_t status;

    if (pull->views) {
        return arl_error_set(err, ARL_ERR_UNAVAILABLE, PULL,
                             "views() shows the sender's own memory, which nccl does not reach; "
                             "use pull() into tensors of your own");
    }
    ARL_CHECK_GOTO(status, check_blob(pull->offer, &geometry, err), done);
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
        ARL_CHECK_GOTO(status, check_device(pull->offer, &import->link.engine->device, err), done);
    }
    import->base.extra_bytes = (int64_t)arl_chunk_geometry_bytes(&geometry) +
                               arl_chunk_unpacker_table_bytes(&import->unpacker);
    ARL_CHECK_GOTO(status, meet(import, pull, &sequence, err), done);
    if (import->unpacker.stream.chunk_count > 0) {
        status = join(import, pull, sequence, err);
    }
done:
    return status;
}

/* ---- receiving ------------------------------------------------------------------------------ */

static arl_status_t
take_chunk(nccl_import_t *import, int64_t chunk, const arl_nccl_watch_t *watch, arl_error_t *err)
{
    arl_nccl_link_t *link = &import->link;
    const uintptr_t bucket = arl_nccl_link_bucket(link, chunk);
    const size_t size = (size_t)import->unpacker.stream.fill[chunk];
    arl_status_t status;

    ARL_CHECK_GOTO(
        status, arl_nccl_link_reach(link, &link->moved, chunk - ARL_CUDA_QUEUE_MAX + 1, watch, err),
        done);
    /* Into a bucket that has been emptied; out of it when it is full. */
    ARL_CHECK_GOTO(
        status, arl_cuda_queue_follow(&link->moved, chunk - link->geometry.slots, link->wire, err),
        done);
    ARL_CHECK_GOTO(status, arl_nccl_link_post(link, false, bucket, size, watch, err), done);
    ARL_CHECK_GOTO(status, arl_cuda_queue_follow(&link->wired, chunk, link->engine->stream, err),
                   done);
    ARL_CHECK_GOTO(status,
                   arl_chunk_unpacker_run(&import->unpacker, chunk, (uintptr_t)link->buckets, err),
                   done);
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
    for (int64_t k = 0; k < import->unpacker.stream.chunk_count && status == ARL_OK; k++) {
        status = take_chunk(import, k, &watch, err);
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
