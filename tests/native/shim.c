/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The C layers as ctypes likes them: handles, numbers, and one error per thread. Built by
 * __init__.py together with csrc/core and csrc/transport.
 */
#include "core/arl_plan.h"
#include "core/arl_stream.h"
#include "transport/cuda_copy.h"
#include "transport/nccl_api.h"

#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

static _Thread_local arl_error_t error;

EXPORT size_t shim_sizeof(int which);
EXPORT const char *shim_error_text(void);
EXPORT const char *shim_error_code(void);
EXPORT const char *shim_error_operation(void);
EXPORT int shim_cuda_load(void);
EXPORT int shim_nccl_load(void);
EXPORT const char *shim_found(int nccl, int field);
EXPORT void shim_add_root(const char *folder);
EXPORT int shim_pointer_query(const void *pointer, arl_cuda_pointer_t *info_p);
EXPORT arl_cuda_engine_t *shim_engine_open(int ordinal, unsigned threads, unsigned blocks);
EXPORT void shim_engine_close(arl_cuda_engine_t *engine);
EXPORT void shim_engine_drop_kernels(arl_cuda_engine_t *engine);
EXPORT const char *shim_engine_fallback(const arl_cuda_engine_t *engine);
EXPORT void *shim_engine_stream(const arl_cuda_engine_t *engine);
EXPORT int shim_engine_follow(const arl_cuda_engine_t *engine, void *stream);
EXPORT int shim_wait(const arl_cuda_engine_t *engine, void *stream, double seconds);
EXPORT int64_t shim_shape(arl_copy_t *copy_p, size_t itemsize, int ndim, const int64_t *shape,
                          const int64_t *src_strides, const int64_t *dst_strides);
EXPORT arl_cuda_plan_t *shim_plan_create(const arl_cuda_engine_t *engine, const arl_copy_t *copies,
                                         int64_t count, uint32_t base_count, double seconds);
EXPORT int shim_plan_run(arl_cuda_plan_t *plan, const uintptr_t *bases, void *stream);
EXPORT const char *shim_plan_kind(const arl_cuda_plan_t *plan);
EXPORT size_t shim_plan_table_bytes(const arl_cuda_plan_t *plan);
EXPORT void shim_plan_free(arl_cuda_plan_t *plan);
EXPORT int shim_checksum(const arl_cuda_engine_t *engine, const arl_view_t *views, int64_t count,
                         double seconds, uint64_t *sums);

EXPORT arl_stream_t *shim_stream_new(int64_t count, const int *dtypes, const int *ndims,
                                     const int64_t *shapes, const uint32_t *alias_of,
                                     int64_t chunk_bytes);
EXPORT void shim_stream_free(arl_stream_t *stream);
EXPORT int64_t shim_stream_chunks(const arl_stream_t *stream);
EXPORT int64_t shim_stream_fill(const arl_stream_t *stream, int64_t chunk);
EXPORT int64_t shim_stream_pack(const arl_stream_t *stream, int64_t chunk, const arl_view_t *views,
                                char *base);
EXPORT int64_t shim_stream_unpack(const arl_stream_t *stream, int64_t chunk,
                                  const arl_copy_t *copies, int64_t count, const char *base);

static arl_error_t *
fresh(void)
{
    arl_error_clear(&error);
    return &error;
}

size_t
shim_sizeof(int which)
{
    return which == 0   ? sizeof(arl_copy_t)
           : which == 1 ? sizeof(arl_view_t)
                        : sizeof(arl_cuda_pointer_t);
}

const char *
shim_error_text(void)
{
    return error.text;
}

const char *
shim_error_code(void)
{
    return arl_status_name(error.code);
}

const char *
shim_error_operation(void)
{
    return error.operation;
}

int
shim_cuda_load(void)
{
    const arl_cuda_api_t *api;

    return arl_cuda_load(&api, fresh());
}

int
shim_nccl_load(void)
{
    const arl_nccl_api_t *api;

    return arl_nccl_load(&api, fresh());
}

const char *
shim_found(int nccl, int field)
{
    const arl_library_found_t *found = nccl ? arl_nccl_found() : arl_cuda_found();

    if (found == NULL) {
        return NULL;
    }
    return field == 0 ? found->path : field == 1 ? found->how : found->version_text;
}

void
shim_add_root(const char *folder)
{
    arl_library_add_root(folder);
}

int
shim_pointer_query(const void *pointer, arl_cuda_pointer_t *info_p)
{
    const arl_cuda_api_t *api;
    arl_status_t status = arl_cuda_load(&api, fresh());

    return status != ARL_OK ? status
                            : arl_cuda_pointer_query(api, pointer, "weight", info_p, &error);
}

arl_cuda_engine_t *
shim_engine_open(int ordinal, unsigned threads, unsigned blocks)
{
    arl_cuda_engine_t *engine = calloc(1, sizeof(*engine));

    if (engine == NULL || arl_cuda_engine_open(ordinal, engine, fresh()) != ARL_OK) {
        free(engine);
        return NULL;
    }
    engine->threads = threads > 0 ? threads : engine->threads;
    engine->blocks_per_sm = blocks > 0 ? blocks : engine->blocks_per_sm;
    return engine;
}

void
shim_engine_close(arl_cuda_engine_t *engine)
{
    arl_cuda_engine_close(engine);
    arl_cuda_engine_close(engine);
    free(engine);
}

/* As if they had not loaded; plans made before must be gone. */
void
shim_engine_drop_kernels(arl_cuda_engine_t *engine)
{
    const bool entered = arl_cuda_device_enter(&engine->device);

    (void)engine->device.api->cuModuleUnload(engine->module);
    arl_cuda_device_leave(&engine->device, entered);
    engine->module = NULL;
}

const char *
shim_engine_fallback(const arl_cuda_engine_t *engine)
{
    return engine->fallback_reason;
}

void *
shim_engine_stream(const arl_cuda_engine_t *engine)
{
    return engine->stream;
}

int
shim_engine_follow(const arl_cuda_engine_t *engine, void *stream)
{
    return arl_cuda_engine_follow(engine, stream, fresh());
}

int
shim_wait(const arl_cuda_engine_t *engine, void *stream, double seconds)
{
    arl_deadline_t deadline;

    arl_deadline_start(&deadline, seconds);
    return arl_cuda_stream_wait(&engine->device, stream, &deadline, NULL, NULL, "the copy",
                                fresh());
}

int64_t
shim_shape(arl_copy_t *copy_p, size_t itemsize, int ndim, const int64_t *shape,
           const int64_t *src_strides, const int64_t *dst_strides)
{
    return arl_copy_shape(copy_p, itemsize, ndim, shape, src_strides, dst_strides)
               ? arl_copy_bytes(copy_p)
               : 0;
}

arl_cuda_plan_t *
shim_plan_create(const arl_cuda_engine_t *engine, const arl_copy_t *copies, int64_t count,
                 uint32_t base_count, double seconds)
{
    arl_cuda_plan_t *plan = NULL;
    arl_deadline_t deadline;

    arl_deadline_start(&deadline, seconds);
    return arl_cuda_plan_create(engine, copies, count, base_count, &deadline, &plan, fresh()) ==
                   ARL_OK
               ? plan
               : NULL;
}

int
shim_plan_run(arl_cuda_plan_t *plan, const uintptr_t *bases, void *stream)
{
    return arl_cuda_plan_run(plan, bases, stream, fresh());
}

const char *
shim_plan_kind(const arl_cuda_plan_t *plan)
{
    return arl_cuda_plan_kind(plan);
}

size_t
shim_plan_table_bytes(const arl_cuda_plan_t *plan)
{
    return arl_cuda_plan_table_bytes(plan);
}

void
shim_plan_free(arl_cuda_plan_t *plan)
{
    arl_cuda_plan_free(plan);
}

int
shim_checksum(const arl_cuda_engine_t *engine, const arl_view_t *views, int64_t count,
              double seconds, uint64_t *sums)
{
    arl_deadline_t deadline;

    arl_deadline_start(&deadline, seconds);
    return arl_cuda_checksum(engine, views, count, &deadline, sums, fresh());
}

/* ---- streams -------------------------------------------------------------------------------- */

arl_stream_t *
shim_stream_new(int64_t count, const int *dtypes, const int *ndims, const int64_t *shapes,
                const uint32_t *alias_of, int64_t chunk_bytes)
{
    arl_offer_t offer = {.tensor_count = (uint32_t)count};
    arl_stream_t *stream = calloc(1, sizeof(*stream));
    arl_status_t status;

    offer.tensors = calloc((size_t)count + 1, sizeof(*offer.tensors));
    for (int64_t i = 0; i < count; i++) {
        offer.tensors[i].dtype = (arl_dtype_t)dtypes[i];
        offer.tensors[i].ndim = ndims[i];
        offer.tensors[i].alias_of = alias_of[i];
        memcpy(offer.tensors[i].shape, shapes + i * ARL_VIEW_DIMS_MAX,
               sizeof(offer.tensors[i].shape));
    }
    arl_stream_place(&offer);
    status = arl_stream_init(&offer, chunk_bytes, stream, fresh());
    free(offer.tensors);
    if (status != ARL_OK) {
        free(stream);
        return NULL;
    }
    return stream;
}

void
shim_stream_free(arl_stream_t *stream)
{
    arl_stream_free(stream);
    arl_stream_free(stream); /* twice, as its header allows */
    free(stream);
}

int64_t
shim_stream_chunks(const arl_stream_t *stream)
{
    return stream->chunk_count;
}

int64_t
shim_stream_fill(const arl_stream_t *stream, int64_t chunk)
{
    return stream->fill[chunk];
}

/* Fills one chunk at `base`; returns the number of copies, or a status. */
int64_t
shim_stream_pack(const arl_stream_t *stream, int64_t chunk, const arl_view_t *views, char *base)
{
    int64_t copies = 0;

    for (int64_t i = stream->first_piece[chunk]; i < stream->first_piece[chunk + 1]; i++) {
        const arl_stream_piece_t *piece = &stream->pieces[i];
        const arl_view_t *view = &views[piece->tensor];
        arl_copy_list_t list = {0};
        arl_status_t status = arl_stream_pack(piece, view, 0, base, &list, fresh());

        for (int64_t j = 0; j < list.count; j++) {
            arl_copy_run_host(&list.items[j], view->data);
        }
        copies += list.count;
        arl_copy_list_free(&list);
        if (status != ARL_OK) {
            return status;
        }
    }
    return copies;
}

/* Takes one chunk apart; returns the number of copies, or a status. */
int64_t
shim_stream_unpack(const arl_stream_t *stream, int64_t chunk, const arl_copy_t *copies,
                   int64_t count, const char *base)
{
    arl_plan_t plan = {.copies = (arl_copy_t *)(uintptr_t)copies, .count = count};
    arl_copy_list_t list = {0};
    arl_status_t status = arl_stream_unpack(stream, &plan, chunk, &list, fresh());
    int64_t cut = list.count;

    for (int64_t j = 0; j < list.count; j++) {
        arl_copy_run_host(&list.items[j], base);
    }
    arl_copy_list_free(&list);
    return status == ARL_OK ? cut : status;
}
