/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/host_shm_cuda.h"

#include "core/arl_hash.h"

#include "transport/cuda_mapping.h"
#include "transport/cuda_offer.h"

#include <stdlib.h>
#include <string.h>

static const char OFFER[] = "offer";
static const char PULL[] = "pull";

/* Of both slots: more is not faster, and a sampler has little memory left. */
static const int64_t STAGE_BYTES = (int64_t)64 << 20;

arl_status_t
arl_host_geometry(int64_t ring_bytes, arl_chunk_geometry_t *geometry_p, arl_error_t *err)
{
    return arl_chunk_geometry_make(ring_bytes, STAGE_BYTES, ARL_CHUNK_SLOTS, geometry_p, err);
}

/* ---- the stage: slots between a device and the file ------------------------------------------ */

typedef struct stage {
    arl_cuda_engine_t *engine; /* NULL: closed. Its stream runs the kernels. */
    arl_cu_stream_t wire;      /* copies between slots and file */
    arl_cuda_queue_t kernels;  /* the chunks on either stream */
    arl_cuda_queue_t copies;
    arl_chunk_geometry_t geometry;
    arl_cu_ptr_t memory;
    void *map; /* that the driver was last asked to pin */
    bool pinned;
} stage_t;

static bool
stage_idle(const stage_t *stage)
{
    const arl_cuda_device_t *device = &stage->engine->device;

    return arl_cuda_idle(device, stage->engine->stream, ARL_CUDA_IDLE_SECONDS) &&
           (stage->wire == NULL || arl_cuda_idle(device, stage->wire, ARL_CUDA_IDLE_SECONDS));
}

static void
stage_unpin(stage_t *stage)
{
    if (stage->pinned) {
        const arl_cuda_device_t *device = &stage->engine->device;
        const bool entered = arl_cuda_device_enter(device);

        (void)device->api->cuMemHostUnregister(stage->map); /* nobody to tell on the way out */
        arl_cuda_device_leave(device, entered);
    }
    stage->pinned = false;
    stage->map = NULL;
}

/* Nothing but speed depends on it. */
static void
stage_pin(stage_t *stage, const void *map, size_t size, unsigned int flags)
{
    const arl_cuda_device_t *device = &stage->engine->device;

    if (stage->map == map) {
        return;
    }
    stage_unpin(stage);
    stage->map = (void *)(uintptr_t)map;
    if (arl_cuda_device_push(device, NULL) == ARL_OK) {
        stage->pinned =
            device->api->cuMemHostRegister_v2(stage->map, size, flags) == ARL_CUDA_SUCCESS;
        arl_cuda_device_pop(device);
    }
}

/* `idle`: nothing runs any more. Otherwise all that the device may use is given up. */
static void
stage_close(stage_t *stage, bool idle)
{
    const arl_cuda_device_t *device = &stage->engine->device;

    if (idle) {
        const bool entered = arl_cuda_device_enter(device);

        stage_unpin(stage);
        if (stage->memory != 0) {
            (void)device->api->cuMemFree_v2(stage->memory);
        }
        if (stage->wire != NULL) {
            (void)device->api->cuStreamDestroy_v2(stage->wire);
        }
        arl_cuda_device_leave(device, entered);
    }
    arl_cuda_queue_close(&stage->kernels);
    arl_cuda_queue_close(&stage->copies);
    arl_cuda_engine_release(stage->engine);
    stage->engine = NULL;
}

static arl_status_t
stage_allocate(stage_t *stage, const char *operation, arl_error_t *err)
{
    const arl_cuda_device_t *device = &stage->engine->device;
    const size_t bytes = arl_chunk_geometry_bytes(&stage->geometry);
    const char *step = "cuStreamCreate";
    arl_cu_result_t result;
    arl_status_t status = arl_cuda_device_push(device, err);

    if (status != ARL_OK) {
        return status;
    }
    result = device->api->cuStreamCreate(&stage->wire, ARL_CUDA_STREAM_NON_BLOCKING);
    if (result != ARL_CUDA_SUCCESS) {
        stage->wire = NULL;
    }
    else {
        step = "cuMemAlloc";
        result = device->api->cuMemAlloc_v2(&stage->memory, bytes);
        if (result != ARL_CUDA_SUCCESS) {
            stage->memory = 0;
        }
    }
    arl_cuda_device_pop(device);
    if (result != ARL_CUDA_SUCCESS) {
        return arl_cuda_error_set(device->api, err, ARL_ERR_SYNC, result, step,
                                  "%s: slots of %zu bytes between device %d (%s) and shared "
                                  "memory; ring_bytes= of the sender makes them smaller",
                                  operation, bytes, device->ordinal, device->name);
    }
    return ARL_OK;
}

/* On failure the stage may be open, if it has an engine: close it. */
static arl_status_t
stage_open(stage_t *stage, int ordinal, const arl_chunk_geometry_t *geometry, const char *operation,
           arl_error_t *err)
{
    arl_status_t status;

    stage->geometry = *geometry;
    status = arl_cuda_engine_acquire(ordinal, &stage->engine, err);
    if (status != ARL_OK) {
        stage->engine = NULL;
        return status;
    }
    ARL_CHECK_GOTO(status, stage_allocate(stage, operation, err), done);
    ARL_CHECK_GOTO(status,
                   arl_cuda_queue_open(&stage->kernels, &stage->engine->device,
                                       stage->engine->stream, geometry->slots, err),
                   done);
    status = arl_cuda_queue_open(&stage->copies, &stage->engine->device, stage->wire,
                                 geometry->slots, err);
done:
    return status;
}

static void
stage_rewind(stage_t *stage)
{
    arl_cuda_queue_reset(&stage->kernels);
    arl_cuda_queue_reset(&stage->copies);
}

static uintptr_t
slot_address(const stage_t *stage, int64_t chunk)
{
    return (uintptr_t)stage->memory + (uintptr_t)((uint64_t)chunk % stage->geometry.slots) *
                                          (uintptr_t)stage->geometry.slot_bytes;
}

/*
 * Puts a copy on the wire. From memory that is not pinned it keeps its caller for as long as it
 * takes, so it is waited for: then all before it is done, and the deadline is looked at again
 * after each chunk.
 */
static arl_status_t
stage_copy(stage_t *stage, uintptr_t dst, uintptr_t src, int64_t bytes, arl_deadline_t *deadline,
           arl_error_t *err)
{
    const arl_cuda_device_t *device = &stage->engine->device;
    arl_cu_result_t result;

    if (bytes > 0) {
        result = device->api->cuMemcpyAsync((arl_cu_ptr_t)dst, (arl_cu_ptr_t)src, (size_t)bytes,
                                            stage->wire);
        if (result != ARL_CUDA_SUCCESS) {
            return arl_cuda_error_set(device->api, err, ARL_ERR_SYNC, result, "cuMemcpyAsync",
                                      "chunk %lld, %lld bytes between device %d (%s) and shared "
                                      "memory",
                                      (long long)stage->copies.launched, (long long)bytes,
                                      device->ordinal, device->name);
        }
    }
    return stage->pinned ? ARL_OK
                         : arl_cuda_stream_wait(device, stage->wire, deadline, NULL, NULL,
                                                "a chunk of shared memory", err);
}

/* A copy of the offer in which the tensors are placed in the stream. Free its tensors. */
static arl_status_t
stream_offer(const arl_offer_t *offer, arl_offer_t *streamed_p, arl_error_t *err)
{
    const size_t size = (size_t)offer->tensor_count * sizeof(*offer->tensors);

    *streamed_p = *offer;
    streamed_p->tensors = malloc(size + 1);
    if (streamed_p->tensors == NULL) {
        return arl_error_set(err, ARL_ERR_NOMEM, "read offer", "out of memory for %u tensors",
                             offer->tensor_count);
    }
    memcpy(streamed_p->tensors, offer->tensors, size);
    arl_stream_place(streamed_p);
    return ARL_OK;
}

/* ---- sender --------------------------------------------------------------------------------- */

struct arl_host_source {
    stage_t stage;
    arl_chunk_packer_t packer;
};

bool
arl_host_source_free(arl_host_source_t *source, bool forked)
{
    bool idle = true;

    if (source == NULL) {
        return true;
    }
    if (!forked &&
        source->stage.engine != NULL) { /* in a child nothing of the driver's is touched */
        idle = stage_idle(&source->stage);
        if (idle) {
            arl_chunk_packer_free(&source->packer, false);
        }
        stage_close(&source->stage, idle);
    }
    arl_chunk_packer_free(&source->packer, true);
    free(source);
    return idle;
}

int64_t
arl_host_source_bytes(const arl_host_source_t *source)
{
    return (int64_t)arl_chunk_geometry_bytes(&source->stage.geometry) +
           arl_chunk_packer_table_bytes(&source->packer);
}

/* The kept one when it has the same slots on the same device, or a new one. */
static arl_status_t
take_source(int ordinal, const arl_chunk_geometry_t *geometry, arl_host_source_t **source_io,
            arl_error_t *err)
{
    arl_host_source_t *source = *source_io;
    arl_status_t status;

    if (source != NULL) { /* one sender has one ring_bytes */
        if (source->stage.engine->device.ordinal == ordinal) {
            return ARL_OK;
        }
        *source_io = NULL;
        (void)arl_host_source_free(source, false); /* offers that went well leave nothing running */
    }
    source = calloc(1, sizeof(*source));
    if (source == NULL) {
        return arl_error_set(err, ARL_ERR_NOMEM, OFFER, "out of memory");
    }
    status = stage_open(&source->stage, ordinal, geometry, OFFER, err);
    if (status != ARL_OK) {
        (void)arl_host_source_free(source, false);
        return status;
    }
    source->packer.engine = source->stage.engine;
    source->packer.geometry = *geometry;
    source->packer.memory = source->stage.memory;
    *source_io = source;
    return ARL_OK;
}

typedef struct file_server {
    arl_chunk_server_t base;
    stage_t *stage;
    char *map;
} file_server_t;

static arl_status_t
chunk_begin(arl_chunk_server_t *base, arl_error_t *err)
{
    const stage_t *stage = ((file_server_t *)base)->stage;

    return arl_cuda_queue_follow(&stage->copies, base->next - stage->geometry.slots,
                                 stage->engine->stream, err);
}

static arl_status_t
chunk_end(arl_chunk_server_t *base, arl_error_t *err)
{
    const file_server_t *server = (file_server_t *)base;
    stage_t *stage = server->stage;
    const int64_t k = base->next;
    const uintptr_t file =
        (uintptr_t)server->map + (uintptr_t)k * (uintptr_t)stage->geometry.slot_bytes;
    arl_status_t status = ARL_OK;

    ARL_CHECK_GOTO(status, arl_cuda_queue_mark(&stage->kernels, err), done);
    ARL_CHECK_GOTO(status, arl_cuda_queue_follow(&stage->kernels, k, stage->wire, err), done);
    ARL_CHECK_GOTO(status,
                   stage_copy(stage, file, slot_address(stage, k), base->packer->stream.fill[k],
                              base->deadline, err),
                   done);
    status = arl_cuda_queue_mark(&stage->copies, err);
done:
    return status;
}

static arl_status_t
fill_file(arl_host_source_t *source, const arl_export_request_t *request, const arl_offer_t *offer,
          char *map, arl_error_t *err)
{
    stage_t *stage = &source->stage;
    const arl_cuda_device_t *device = &stage->engine->device;
    file_server_t server = {.base = {.packer = &source->packer,
                                     .offer = offer,
                                     .deadline = request->deadline,
                                     .begin = chunk_begin,
                                     .end = chunk_end},
                            .stage = stage,
                            .map = map};
    arl_status_t status = arl_cuda_device_push(device, err);

    if (status != ARL_OK) {
        return status;
    }
    stage_rewind(stage);
    status = arl_chunk_serve(&server.base, err);
    arl_cuda_device_pop(device);
    return status != ARL_OK
               ? status
               : arl_cuda_stream_wait(device, stage->wire, request->deadline, NULL, NULL,
                                      "copy of the weights to shared memory", err);
}

arl_status_t
arl_host_source_fill(const arl_export_request_t *request, arl_offer_t *offer,
                     const arl_chunk_geometry_t *geometry, void *map, size_t size,
                     arl_host_source_t **source_io, arl_error_t *err)
{
    arl_offer_t streamed = {0};
    bool complete;
    int ordinal;
    arl_host_source_t *source;
    arl_status_t status = arl_chunk_survey(request, &ordinal, &complete, err);

    if (status != ARL_OK || (status = take_source(ordinal, geometry, source_io, err)) != ARL_OK) {
        return status;
    }
    source = *source_io;
    ARL_CHECK_GOTO(status, stream_offer(offer, &streamed, err), free_streamed);
    ARL_CHECK_GOTO(status,
                   arl_chunk_packer_prepare(&source->packer, request, &streamed, complete, err),
                   free_streamed);
    if (request->keep) {
        stage_pin(&source->stage, map, size, 0);
    }
    ARL_CHECK_GOTO(status, arl_cuda_offer_settle(request, source->stage.engine, err),
                   free_streamed);
    ARL_CHECK_GOTO(status, fill_file(source, request, offer, map, err), free_streamed);
    status = arl_cuda_offer_checksums(request, source->stage.engine, offer, err);
free_streamed:
    free(streamed.tensors);
    return status;
}

/* ---- receiver: what goes where --------------------------------------------------------------- */

struct arl_host_target {
    stage_t stage;
    arl_chunk_unpacker_t unpacker;
    uint64_t serial;    /* of the plan that the two below are parts of */
    arl_plan_t on_gpu;  /* src_offset counts from the tensor, for the stream */
    arl_plan_t on_host; /* as it was */
};

bool
arl_host_target_free(arl_host_target_t *target)
{
    const arl_cuda_api_t *api;
    bool idle = true;

    if (target == NULL) {
        return true;
    }
    /* In a child after fork nothing of the driver's may be touched. */
    if (target->stage.engine != NULL && arl_cuda_load(&api, NULL) == ARL_OK) {
        idle = stage_idle(&target->stage);
        if (idle) {
            arl_chunk_unpacker_free(&target->unpacker, false);
        }
        stage_close(&target->stage, idle);
    }
    arl_chunk_unpacker_free(&target->unpacker, true);
    arl_plan_free(&target->on_gpu);
    arl_plan_free(&target->on_host);
    free(target);
    return idle;
}

const char *
arl_host_target_fallback(const arl_host_target_t *target)
{
    return target->stage.engine->fallback_reason;
}

int64_t
arl_host_target_bytes(const arl_host_target_t *target)
{
    return (int64_t)arl_chunk_geometry_bytes(&target->stage.geometry) +
           arl_chunk_unpacker_table_bytes(&target->unpacker);
}

static arl_device_type_t
destination_of(const arl_pull_t *pull, const arl_copy_t *copy)
{
    return pull->set->bindings[copy->binding].dst.device_type;
}

static bool
writes_to_gpu(const arl_pull_t *pull)
{
    for (int64_t i = 0; i < pull->plan->count; i++) {
        if (destination_of(pull, &pull->plan->copies[i]) == ARL_DEVICE_CUDA) {
            return true;
        }
    }
    return false;
}

/* The two parts of the pull's plan. */
static arl_status_t
split_plan(const arl_pull_t *pull, arl_host_target_t *target, arl_error_t *err)
{
    const size_t room = (size_t)pull->plan->count + 1;
    arl_plan_t *gpu = &target->on_gpu, *host = &target->on_host;

    gpu->copies = calloc(room, sizeof(*gpu->copies));
    host->copies = calloc(room, sizeof(*host->copies));
    if (gpu->copies == NULL || host->copies == NULL) {
        return arl_error_set(err, ARL_ERR_NOMEM, PULL, "out of memory for %lld copies",
                             (long long)pull->plan->count);
    }
    for (int64_t i = 0; i < pull->plan->count; i++) {
        const arl_copy_t *copy = &pull->plan->copies[i];
        const bool on_gpu = destination_of(pull, copy) == ARL_DEVICE_CUDA;
        arl_plan_t *part = on_gpu ? gpu : host;
        arl_copy_t *taken = &part->copies[part->count++];

        *taken = *copy;
        if (on_gpu) {
            taken->src_offset -= (int64_t)pull->offer->tensors[copy->tensor].offset;
        }
        part->total_bytes += arl_copy_bytes(copy);
    }
    gpu->serial = target->serial = pull->plan->serial;
    return ARL_OK;
}

/* The file must be the stream; of an offer that came from elsewhere that has to be seen. */
static arl_status_t
check_places(const arl_offer_t *offer, const arl_offer_t *streamed, arl_error_t *err)
{
    uint64_t next = 0;

    for (uint32_t i = 0; i < offer->tensor_count; i++) {
        const arl_offer_tensor_t *tensor = &offer->tensors[i];
        const arl_view_t view = arl_offer_tensor_view(offer, i, NULL);
        const int64_t bytes = arl_view_nbytes(&view);
        const uint64_t place =
            tensor->alias_of == i ? next : offer->tensors[tensor->alias_of].offset;

        if (bytes == 0) {
            continue;
        }
        if (tensor->offset != place ||
            memcmp(tensor->strides, streamed->tensors[i].strides,
                   (size_t)tensor->ndim * sizeof(tensor->strides[0])) != 0) {
            return arl_error_set(err, ARL_ERR_SYNC, PULL,
                                 "offer is not valid: tensor %u (%.*s) is not where host_shm puts "
                                 "it",
                                 i, (int)tensor->name_length, tensor->name);
        }
        if (tensor->alias_of == i) { /* inside of the file, so no sum wraps */
            next += ((uint64_t)bytes + ARL_STREAM_ALIGN - 1) / ARL_STREAM_ALIGN * ARL_STREAM_ALIGN;
        }
    }
    return ARL_OK;
}

/* The slots that the sender uses. */
static arl_status_t
read_geometry(const arl_offer_t *offer, arl_chunk_geometry_t *geometry_p, arl_error_t *err)
{
    arl_chunk_geometry_t geometry = {0};

    if (offer->blob_size == sizeof(geometry)) {
        memcpy(&geometry, offer->blob, sizeof(geometry));
    }
    if (!arl_chunk_geometry_valid(&geometry)) {
        return arl_error_set(err, ARL_ERR_SYNC, PULL, "offer is not valid: it describes no slots");
    }
    *geometry_p = geometry;
    return ARL_OK;
}

/* ---- receiver: preparing and copying --------------------------------------------------------- */

static arl_status_t
target_open(arl_host_target_t *target, const arl_pull_t *pull, const arl_chunk_geometry_t *geometry,
            arl_error_t *err)
{
    arl_offer_t streamed = {0};
    arl_pull_t part = *pull; /* what goes to the GPU, as a pull from a stream */
    int ordinal;
    arl_status_t status = split_plan(pull, target, err);

    if (status != ARL_OK) {
        return status;
    }
    part.plan = &target->on_gpu;
    part.offer = &streamed;
    ARL_CHECK_GOTO(status, stream_offer(pull->offer, &streamed, err), free_streamed);
    ARL_CHECK_GOTO(status, check_places(pull->offer, &streamed, err), free_streamed);
    ARL_CHECK_GOTO(status, arl_cuda_find_destination(&part, &ordinal, err), free_streamed);
    ARL_CHECK_GOTO(status, stage_open(&target->stage, ordinal, geometry, PULL, err), free_streamed);
    target->unpacker.engine = target->stage.engine;
    status = arl_chunk_unpacker_prepare(&target->unpacker, &part, geometry, err);
free_streamed:
    free(streamed.tensors);
    return status;
}

arl_status_t
arl_host_target_prepare(const arl_pull_t *pull, const void *map, size_t size, bool pin,
                        arl_host_target_t **target_io, arl_error_t *err)
{
    arl_host_target_t *target = *target_io;
    arl_chunk_geometry_t geometry;
    arl_status_t status;

    if (target == NULL && !writes_to_gpu(pull)) {
        return ARL_OK;
    }
    status = read_geometry(pull->offer, &geometry, err);
    if (status != ARL_OK) {
        return status;
    }
    if (target != NULL && (target->serial != pull->plan->serial ||
                           memcmp(&target->stage.geometry, &geometry, sizeof(geometry)) != 0)) {
        (void)arl_host_target_free(target); /* pulls that went well leave nothing running */
        *target_io = target = NULL;
        if (!writes_to_gpu(pull)) {
            return ARL_OK;
        }
    }
    if (target == NULL) {
        target = calloc(1, sizeof(*target));
        if (target == NULL) {
            return arl_error_set(err, ARL_ERR_NOMEM, PULL, "out of memory");
        }
        *target_io = target;
        status = target_open(target, pull, &geometry, err);
    }
    if (status == ARL_OK && pin) {
        stage_pin(&target->stage, map, size, ARL_CUDA_HOST_REGISTER_READ_ONLY);
    }
    return status;
}

/* What is read of chunk `chunk` goes to its slot, and from there to its places. */
static arl_status_t
take_chunk(arl_host_target_t *target, int64_t chunk, const char *map, arl_deadline_t *deadline,
           arl_error_t *err)
{
    stage_t *stage = &target->stage;
    const arl_chunk_span_t *span = &target->unpacker.spans[chunk];
    const uintptr_t slot = slot_address(stage, chunk) + (uintptr_t)span->begin;
    const uintptr_t file = (uintptr_t)map + (uintptr_t)span->begin +
                           (uintptr_t)chunk * (uintptr_t)stage->geometry.slot_bytes;
    arl_status_t status = ARL_OK;

    ARL_CHECK_GOTO(
        status,
        arl_cuda_queue_follow(&stage->kernels, chunk - stage->geometry.slots, stage->wire, err),
        done);
    ARL_CHECK_GOTO(status, stage_copy(stage, slot, file, span->end - span->begin, deadline, err),
                   done);
    ARL_CHECK_GOTO(status, arl_cuda_queue_mark(&stage->copies, err), done);
    ARL_CHECK_GOTO(status, arl_cuda_queue_follow(&stage->copies, chunk, stage->engine->stream, err),
                   done);
    ARL_CHECK_GOTO(status,
                   arl_chunk_unpacker_run(&target->unpacker, chunk, (uintptr_t)stage->memory, err),
                   done);
    status = arl_cuda_queue_mark(&stage->kernels, err);
done:
    return status;
}

static arl_status_t
take_all(arl_host_target_t *target, const char *map, arl_deadline_t *deadline, arl_error_t *err)
{
    stage_t *stage = &target->stage;
    arl_status_t status = arl_cuda_device_push(&stage->engine->device, err);

    if (status != ARL_OK) {
        return status;
    }
    stage_rewind(stage);
    for (int64_t k = 0; k < target->unpacker.stream.chunk_count && status == ARL_OK; k++) {
        status = take_chunk(target, k, map, deadline, err);
    }
    arl_cuda_device_pop(&stage->engine->device);
    return status;
}

arl_status_t
arl_host_target_copy(arl_host_target_t *target, const arl_pull_t *pull, const char *map,
                     arl_error_t *err)
{
    const arl_cuda_engine_t *engine = target->stage.engine;
    arl_status_t status = ARL_OK;

    /* What the caller's stream still reads of the old weights comes first. It is waited for, since
     * a copy from memory that is not pinned would wait for it without a deadline. */
    ARL_CHECK_GOTO(status, arl_cuda_engine_follow(engine, pull->stream, err), done);
    ARL_CHECK_GOTO(status,
                   arl_cuda_stream_wait(&engine->device, engine->stream, pull->deadline, NULL, NULL,
                                        "what the caller's stream held at pull()", err),
                   done);
    ARL_CHECK_GOTO(status, take_all(target, map, pull->deadline, err), done);
    /* Meanwhile the rest, which needs no GPU. */
    ARL_CHECK_GOTO(status, arl_plan_run_host(&target->on_host, &map, err), done);
    status = arl_cuda_stream_wait(&engine->device, engine->stream, pull->deadline, NULL, NULL,
                                  "copy of the weights from shared memory", err);
done:
    return status;
}

arl_status_t
arl_host_target_checksums(const arl_host_target_t *target, const arl_pull_t *pull,
                          const arl_view_t *views, int64_t count, uint64_t *sums, arl_error_t *err)
{
    arl_view_t *on_gpu = calloc((size_t)count + 1, sizeof(*on_gpu));
    uint64_t *found = calloc((size_t)count + 1, sizeof(*found));
    int64_t used = 0;
    arl_status_t status;

    if (on_gpu == NULL || found == NULL) {
        status = arl_error_set(err, ARL_ERR_NOMEM, "verify", "out of memory for %lld checksums",
                               (long long)count);
        goto free_arrays;
    }
    for (int64_t i = 0; i < count; i++) {
        if (views[i].device_type == ARL_DEVICE_CUDA) {
            on_gpu[used++] = views[i];
        }
    }
    status = arl_cuda_checksum(target->stage.engine, on_gpu, used, pull->deadline, found, err);
    used = 0;
    for (int64_t i = 0; i < count && status == ARL_OK; i++) {
        sums[i] =
            views[i].device_type == ARL_DEVICE_CUDA ? found[used++] : arl_checksum_view(&views[i]);
    }
free_arrays:
    free(found);
    free(on_gpu);
    return status;
}
