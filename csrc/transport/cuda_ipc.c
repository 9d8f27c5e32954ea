/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_ipc: receivers map the sender's own allocations and copy out of them on the GPU. The
 * sender may not write to its tensors, nor free them, until every receiver has finished.
 *
 * The offer is ordered after the caller's stream by waiting for it, so that no receiver ever
 * waits on the GPU for a process that may die. The receiver waits for its copies for the same
 * reason: pull returns when they are done, under its deadline.
 */
#include "transport/arl_sender.h"
#include "transport/arl_transport.h"
#include "transport/cuda_copy.h"
#include "transport/cuda_mapping.h"
#include "transport/cuda_memory.h"
#include "transport/cuda_offer.h"

#include <stdlib.h>
#include <string.h>

static const char OFFER[] = "offer";
static const char PULL[] = "pull";

static arl_status_t
cuda_probe(arl_error_t *err)
{
    arl_error_t reason = ARL_ERROR_INIT;
    const arl_cuda_api_t *api;

    if (arl_cuda_load(&api, &reason) == ARL_OK) {
        return ARL_OK;
    }
    return arl_error_set(err, reason.code, "probe", "the transport cuda_ipc: %s", reason.text);
}

/* ---- sender --------------------------------------------------------------------------------- */

typedef struct cuda_export {
    arl_export_t base;
    const char *addresses[]; /* of the allocations; base.bases points here */
} cuda_export_t;

static bool
view_has_bytes(const arl_view_t *view)
{
    return arl_view_nbytes(view) > 0;
}

/* Enters every tensor's allocation in `ranges`; all must be on one device, and be exportable. */
static arl_status_t
find_allocations(const arl_export_request_t *request, arl_cuda_ranges_t *ranges, int *ordinal_p,
                 arl_error_t *err)
{
    const arl_source_t *first = NULL;
    int ordinal = -1;

    for (uint32_t i = 0; i < request->count; i++) {
        const arl_source_t *source = &request->sources[i];
        arl_cuda_pointer_t info;
        arl_status_t status;

        if (!view_has_bytes(&source->view) || request->alias_of[i] != i) {
            continue;
        }
        if (source->view.data == NULL) {
            return arl_error_set(err, ARL_ERR_VALUE, OFFER,
                                 "%.*s is a specification without data; only low_memory=True sends "
                                 "tensors that come later",
                                 (int)source->name_length, source->name);
        }
        status = arl_cuda_ranges_find(ranges, &source->view, source->name, source->name_length,
                                      &info, err);
        if (status != ARL_OK) {
            return status;
        }
        if (!info.legacy_ipc) {
            return arl_error_set(
                err, ARL_ERR_UNAVAILABLE, OFFER, "%.*s is in memory that has no IPC handle (%s)",
                (int)(source->name_length < 48 ? source->name_length : 48), source->name,
                info.managed ? "managed memory" : "expandable segments, a memory pool or VMM");
        }
        if (first != NULL && info.ordinal != ordinal) {
            return arl_error_set(err, ARL_ERR_VALUE, OFFER,
                                 "%.*s is on device %d and %.*s on device %d; use one sender for "
                                 "each device",
                                 (int)first->name_length, first->name, ordinal,
                                 (int)source->name_length, source->name, info.ordinal);
        }
        first = first == NULL ? source : first;
        ordinal = info.ordinal;
    }
    *ordinal_p = ordinal < 0 ? request->sources[0].view.device_index : ordinal;
    return ARL_OK;
}

static arl_status_t
cuda_accepts(const arl_export_request_t *request, arl_error_t *err)
{
    arl_cuda_ranges_t ranges = {0};
    arl_status_t status = arl_cuda_load(&ranges.api, err);
    int ordinal;

    if (status == ARL_OK) {
        status = find_allocations(request, &ranges, &ordinal, err);
    }
    arl_cuda_ranges_free(&ranges);
    return status;
}

static arl_status_t
describe_allocations(const arl_cuda_ranges_t *ranges, const arl_cuda_device_t *device,
                     arl_offer_t *offer, cuda_export_t *export, arl_error_t *err)
{
    for (uint32_t i = 0; i < offer->alloc_count; i++) {
        arl_offer_alloc_t *alloc = &offer->allocs[i];
        const arl_cuda_pointer_t *info = &ranges->items[i];
        arl_status_t status;

        alloc->kind = ARL_ALLOC_CUDA_IPC;
        alloc->size = info->size;
        alloc->base_id = info->buffer_id;
        alloc->unit = offer->unit;
        status = arl_cuda_memory_handle(device, info, alloc->handle, err);
        if (status != ARL_OK) {
            return status;
        }
        export->addresses[i] = (const char *)info->base;
    }
    return ARL_OK;
}

static void
place_tensors(const arl_export_request_t *request, const arl_cuda_ranges_t *ranges,
              arl_offer_t *offer, cuda_export_t *export)
{
    for (uint32_t i = 0; i < request->count; i++) {
        const arl_view_t *view = &request->sources[i].view;
        arl_offer_tensor_t *tensor = &offer->tensors[i];
        int64_t low, high;

        memcpy(tensor->strides, view->strides, (size_t)view->ndim * sizeof(tensor->strides[0]));
        if (!view_has_bytes(view)) {
            tensor->alloc = offer->alloc_count > 0 ? 0 : ARL_OFFER_STREAMED;
            continue;
        }
        arl_view_extent(view, &low, &high);
        tensor->alloc = arl_cuda_ranges_index(ranges, (uintptr_t)view->data + (uintptr_t)low);
        tensor->offset = (uintptr_t)view->data - ranges->items[tensor->alloc].base;
        if (request->alias_of[i] == i) {
            export->base.bytes += arl_view_nbytes(view);
        }
    }
}

/* Waits for what the caller has put on its stream, then sums what is to be verified. */
static arl_status_t
settle(const arl_export_request_t *request, int ordinal, const arl_cuda_ranges_t *ranges,
       arl_offer_t *offer, cuda_export_t *export, arl_error_t *err)
{
    arl_cuda_engine_t *engine;
    arl_status_t status = arl_cuda_engine_acquire(ordinal, &engine, err);

    if (status != ARL_OK) {
        return status;
    }
    offer->unit = arl_cuda_unit(&engine->device);
    ARL_CHECK_GOTO(status, describe_allocations(ranges, &engine->device, offer, export, err),
                   release_engine);
    place_tensors(request, ranges, offer, export);
    ARL_CHECK_GOTO(status, arl_cuda_offer_settle(request, engine, err), release_engine);
    status = arl_cuda_offer_checksums(request, engine, offer, err);
release_engine:
    arl_cuda_engine_release(engine);
    return status;
}

static arl_status_t
cuda_offer(const arl_export_request_t *request, arl_offer_t *offer, arl_export_t **export_p,
           arl_error_t *err)
{
    arl_cuda_ranges_t ranges = {0};
    cuda_export_t *export = NULL;
    int ordinal;
    arl_status_t status;

    ARL_CHECK_GOTO(status, arl_cuda_load(&ranges.api, err), free_ranges);
    ARL_CHECK_GOTO(status, find_allocations(request, &ranges, &ordinal, err), free_ranges);
    if (ranges.count > ARL_OFFER_ALLOCS_MAX) {
        status = arl_error_set(err, ARL_ERR_VALUE, OFFER,
                               "the tensors lie in %zu allocations, at most %d are supported",
                               ranges.count, (int)ARL_OFFER_ALLOCS_MAX);
        goto free_ranges;
    }
    export = calloc(1, sizeof(*export) + (ranges.count + 1) * sizeof(export->addresses[0]));
    offer->allocs = calloc(ranges.count + 1, sizeof(*offer->allocs));
    if (export == NULL || offer->allocs == NULL) {
        status = arl_error_set(err, ARL_ERR_NOMEM, OFFER, "out of memory for %zu allocations",
                               ranges.count);
        goto free_export;
    }
    offer->alloc_count = (uint32_t)ranges.count;
    export->base.bases = export->addresses;
    export->base.in_place = true;
    ARL_CHECK_GOTO(status, settle(request, ordinal, &ranges, offer, export, err), free_export);
    arl_cuda_ranges_free(&ranges);
    *export_p = &export->base;
    return ARL_OK;

free_export:
    free(export);
free_ranges:
    arl_cuda_ranges_free(&ranges);
    return status;
}

static void
cuda_destroy(arl_export_t *base, bool forked)
{
    (void)forked; /* nothing of the driver's is held */
    free(base);
}

/* ---- receiver ------------------------------------------------------------------------------- */

typedef struct cuda_import {
    arl_import_t base;
    arl_cuda_engine_t *engine;
    arl_export_t *local; /* same process: its addresses, no mappings */
    arl_peer_t sender;   /* whose mappings these are */
    uint32_t count;
    arl_cuda_mapping_t *mappings;
    const char **addresses; /* base.bases points here */
    arl_cuda_plan_t *plan;
    uint64_t plan_serial;
} cuda_import_t;

/* Closes all. What still runs must end first: a copy that failed half way, or timed out. Waits a
 * second for it, and otherwise gives mappings and tables up rather than block. */
static void
import_free(cuda_import_t *import)
{
    const arl_cuda_api_t *api;
    bool idle = true;

    if (arl_cuda_load(&api, NULL) != ARL_OK) {
        goto free_memory; /* a child after fork: nothing of the driver's may be touched */
    }
    if (import->engine != NULL) {
        arl_deadline_t deadline;

        arl_deadline_start(&deadline, 1.0);
        idle = arl_cuda_stream_wait(&import->engine->device, import->engine->stream, &deadline,
                                    NULL, NULL, "close", NULL) != ARL_ERR_TIMEOUT;
    }
    if (idle) {
        for (uint32_t i = 0; i < import->count; i++) {
            arl_cuda_mapping_close(&import->engine->device, &import->mappings[i]);
        }
        arl_cuda_plan_free(import->plan);
    }
    arl_cuda_engine_release(import->engine);
free_memory:
    if (import->local != NULL) {
        arl_export_drop(import->local);
    }
    free(import->mappings);
    free(import->addresses);
    free(import);
}

static void
cuda_close(arl_import_t **import_io, bool keep)
{
    cuda_import_t *import = (cuda_import_t *)*import_io;

    if (import == NULL) {
        return;
    }
    if (keep) { /* the engine and the tables, and of another process the mappings */
        if (import->local != NULL) {
            arl_export_drop(import->local);
            import->local = NULL;
            import->base.bases = NULL;
        }
        return;
    }
    import_free(import);
    *import_io = NULL;
}

/* What an earlier pull kept and this offer still has. */
static arl_cuda_mapping_t *
find_kept(cuda_import_t *kept, uint32_t index, const arl_offer_alloc_t *alloc)
{
    for (uint32_t i = 0; i < kept->count; i++) { /* unchanged offers find it at once */
        arl_cuda_mapping_t *mapping = &kept->mappings[(index + i) % kept->count];

        if (arl_cuda_mapping_of(mapping, alloc)) {
            return mapping;
        }
    }
    return NULL;
}

static arl_status_t
map_all(const arl_pull_t *pull, cuda_import_t *import, cuda_import_t *kept, arl_error_t *err)
{
    const arl_cuda_device_t *device = &import->engine->device;
    arl_status_t status = arl_cuda_device_push(device, err);

    if (status != ARL_OK) {
        return status;
    }
    for (uint32_t i = 0; i < import->count && status == ARL_OK; i++) {
        arl_cuda_mapping_t *mapping = &import->mappings[i];
        arl_cuda_mapping_t *old = kept == NULL ? NULL : find_kept(kept, i, &pull->offer->allocs[i]);

        if (old != NULL) {
            *mapping = *old;
            old->address = NULL;
        }
        else {
            status = arl_cuda_mapping_open(pull, device, i, mapping, err);
        }
        import->addresses[i] = mapping->address;
        import->base.mappings += mapping->address != NULL;
    }
    arl_cuda_device_pop(device);
    return status;
}

static cuda_import_t *
import_new(const arl_pull_t *pull, arl_error_t *err)
{
    const size_t count = (size_t)pull->offer->alloc_count + 1;
    cuda_import_t *import = calloc(1, sizeof(*import));

    if (import != NULL) {
        import->mappings = calloc(count, sizeof(*import->mappings));
        import->addresses = calloc(count, sizeof(*import->addresses));
    }
    if (import == NULL || import->mappings == NULL || import->addresses == NULL) {
        if (import != NULL) {
            free(import->mappings);
            free(import->addresses);
        }
        free(import);
        (void)arl_error_set(err, ARL_ERR_NOMEM, PULL, "out of memory for %u allocations",
                            pull->offer->alloc_count);
        return NULL;
    }
    import->base.transport = &arl_transport_cuda_ipc;
    import->sender = pull->offer->sender;
    return import;
}

/* Takes over the engine, and with it the tables, when the device is still the same. */
static arl_status_t
take_engine(cuda_import_t *import, cuda_import_t *kept, int ordinal, arl_error_t *err)
{
    if (kept == NULL || kept->engine->device.ordinal != ordinal) {
        return arl_cuda_engine_acquire(ordinal, &import->engine, err);
    }
    import->engine = kept->engine;
    import->plan = kept->plan;
    import->plan_serial = kept->plan_serial;
    kept->plan = NULL;
    return ARL_OK;
}

static arl_status_t
find_ordinal(const arl_pull_t *pull, int *ordinal_p, arl_error_t *err)
{
    arl_cuda_device_t device;
    arl_status_t status = ARL_OK;

    *ordinal_p = -1;
    if (!pull->views) {
        status = arl_cuda_find_destination(pull, ordinal_p, err);
    }
    if (status == ARL_OK && *ordinal_p < 0) { /* nothing is written: be where the sender is */
        status = arl_cuda_device_find(pull->offer->unit.uuid, &device, err);
        if (status == ARL_OK) {
            *ordinal_p = device.ordinal;
        }
    }
    return status;
}

static arl_status_t
prepare(const arl_pull_t *pull, cuda_import_t *import, arl_error_t *err)
{
    arl_status_t status;

    if (import->plan != NULL && import->plan_serial == pull->plan->serial) {
        return ARL_OK;
    }
    arl_cuda_plan_free(import->plan);
    import->plan = NULL;
    status = arl_cuda_plan_create(import->engine, pull->plan->copies, pull->plan->count,
                                  pull->offer->alloc_count, pull->deadline, &import->plan, err);
    if (status == ARL_OK) {
        import->plan_serial = pull->plan->serial;
        import->base.extra_bytes = (int64_t)arl_cuda_plan_table_bytes(import->plan);
    }
    return status;
}

static arl_status_t
cuda_open(const arl_pull_t *pull, arl_import_t **import_io, arl_error_t *err)
{
    cuda_import_t *kept = (cuda_import_t *)*import_io, *import;
    int ordinal;
    arl_status_t status = find_ordinal(pull, &ordinal, err);

    if (status != ARL_OK) {
        return status;
    }
    import = import_new(pull, err);
    if (import == NULL) {
        return ARL_ERR_NOMEM;
    }
    ARL_CHECK_GOTO(status, take_engine(import, kept, ordinal, err), free_import);
    import->base.device_type = ARL_DEVICE_CUDA;
    import->base.device_index = import->engine->device.ordinal;
    import->base.fallback = import->engine->fallback_reason;
    ARL_CHECK_GOTO(status, arl_cuda_check_units(pull, &import->engine->device, err), free_import);
    if (pull->local != NULL) {
        import->local = arl_export_hold(pull->local);
        import->base.bases = pull->local->bases;
    }
    else {
        import->count = pull->offer->alloc_count;
        import->base.bases = import->addresses;
        ARL_CHECK_GOTO(status, map_all(pull, import, kept, err), free_import);
    }
    if (!pull->views) { /* now, so that a device without memory for the tables tears nothing */
        status = prepare(pull, import, err);
    }
free_import:
    if (kept != NULL) {
        if (kept->engine == import->engine) {
            for (uint32_t i = 0; i < kept->count; i++) { /* what this offer has no more */
                arl_cuda_mapping_close(&kept->engine->device, &kept->mappings[i]);
            }
            kept->count = 0;
            kept->engine = NULL;
        }
        import_free(kept);
    }
    *import_io = NULL;
    if (status != ARL_OK) {
        import_free(import);
        return status;
    }
    *import_io = &import->base;
    return ARL_OK;
}

static bool
sender_alive(void *context)
{
    return arl_control_sender_alive(context);
}

static arl_status_t
cuda_copy(const arl_pull_t *pull, arl_import_t *base, arl_error_t *err)
{
    cuda_import_t *import = (cuda_import_t *)base;
    const arl_cuda_engine_t *engine = import->engine;
    arl_error_t reason = ARL_ERROR_INIT;
    arl_status_t status;

    /* What the caller's stream still reads of the old weights comes first. */
    status = arl_cuda_engine_follow(engine, pull->stream, err);
    if (status == ARL_OK) {
        status =
            arl_cuda_plan_run(import->plan, (const uintptr_t *)base->bases, engine->stream, err);
    }
    if (status != ARL_OK) {
        return status;
    }
    status = arl_cuda_stream_wait(&engine->device, engine->stream, pull->deadline,
                                  pull->control == NULL ? NULL : sender_alive, pull->control,
                                  "copy of the weights", &reason);
    if (status == ARL_ERR_PEER_LOST) { /* the control block says it better */
        status = arl_control_check_sender(pull->control, err);
    }
    return status == ARL_OK ? ARL_OK : arl_error_copy(err, &reason);
}

static arl_status_t
cuda_checksums(const arl_pull_t *pull, arl_import_t *base, const arl_view_t *views, int64_t count,
               uint64_t *sums, arl_error_t *err)
{
    const cuda_import_t *import = (const cuda_import_t *)base;

    return arl_cuda_checksum(import->engine, views, count, pull->deadline, sums, err);
}

const arl_transport_t arl_transport_cuda_ipc = {
    .id = ARL_TRANSPORT_CUDA_IPC,
    .name = "cuda_ipc",
    .needs_gpu = true,
    .same_host = true,
    .streams = false,
    .probe = cuda_probe,
    .accepts = cuda_accepts,
    .offer = cuda_offer,
    .destroy = cuda_destroy,
    .open = cuda_open,
    .copy = cuda_copy,
    .checksums = cuda_checksums,
    .close = cuda_close,
};
