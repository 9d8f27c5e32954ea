/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/cuda_copy.h"

#include "transport/cuda_kernels.h"
#include "transport/cuda_tables.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Blocks of the strided kernel for each one of the other: it has less under way in each thread. */
enum { STRIDED_TIMES = 2 };

/* ---- prepared plans ------------------------------------------------------------------------- */

struct arl_cuda_plan {
    const arl_cuda_engine_t *engine;
    uint32_t base_count;
    uintptr_t *bases; /* of the last run; the upload reads it, so it lives as long as the plan */
    bool bases_known;

    /* With kernels: one allocation that holds all the tables. */
    arl_cu_ptr_t memory;
    size_t memory_bytes;
    arl_cu_ptr_t segments, strided, items, device_bases;
    uint32_t segment_count, item_count;

    /* Without: the copies, and the graph made of them for the last bases. */
    arl_copy_t *copies;
    int64_t copy_count;
    arl_cu_graph_exec_t graph;
};

static arl_status_t
plan_check(const arl_copy_t *copies, int64_t count, uint32_t base_count, arl_error_t *err)
{
    for (int64_t i = 0; i < count; i++) {
        if (copies[i].alloc >= base_count) {
            return arl_error_set(err, ARL_ERR_VALUE, "prepare copies",
                                 "copy %lld reads from allocation %u of %u", (long long)i,
                                 copies[i].alloc, base_count);
        }
        if (copies[i].run_bytes <= 0 || copies[i].ndim < 0 || copies[i].ndim > ARL_VIEW_DIMS_MAX) {
            return arl_error_set(err, ARL_ERR_VALUE, "prepare copies",
                                 "copy %lld has runs of %lld bytes over %d dimensions",
                                 (long long)i, (long long)copies[i].run_bytes, copies[i].ndim);
        }
    }
    return ARL_OK;
}

static size_t
align_up(size_t value)
{
    return (value + 255) & ~(size_t)255;
}

/* Device memory for the tables, and the tables into it. */
static arl_status_t
plan_upload(arl_cuda_plan_t *plan, const arl_cuda_tables_t *tables, arl_deadline_t *deadline,
            arl_error_t *err)
{
    const arl_cuda_engine_t *engine = plan->engine;
    const arl_cuda_api_t *api = engine->device.api;
    const struct {
        const void *from;
        size_t size;
        arl_cu_ptr_t *to;
    } parts[] = {
        {tables->segments, tables->segment_count * sizeof(*tables->segments), &plan->segments},
        {tables->strided, tables->strided_count * sizeof(*tables->strided), &plan->strided},
        {tables->items, tables->item_count * sizeof(*tables->items), &plan->items},
        {NULL, plan->base_count * sizeof(*plan->bases), &plan->device_bases},
    };
    enum { PARTS = sizeof(parts) / sizeof(parts[0]) };
    const char *step = "cuMemAlloc";
    arl_cu_result_t result;
    arl_status_t status;

    for (size_t i = 0; i < PARTS; i++) {
        plan->memory_bytes += align_up(parts[i].size);
    }
    if (plan->memory_bytes == 0) { /* nothing to copy, from nowhere */
        return ARL_OK;
    }
    result = api->cuMemAlloc_v2(&plan->memory, plan->memory_bytes);
    if (result != ARL_CUDA_SUCCESS) {
        plan->memory = 0;
    }
    for (size_t i = 0, offset = 0; i < PARTS && result == ARL_CUDA_SUCCESS; i++) {
        *parts[i].to = plan->memory + offset;
        offset += align_up(parts[i].size);
        if (parts[i].from != NULL && parts[i].size > 0) {
            step = "cuMemcpyAsync";
            result = api->cuMemcpyAsync(*parts[i].to, (arl_cu_ptr_t)parts[i].from, parts[i].size,
                                        engine->stream);
        }
    }
    if (result != ARL_CUDA_SUCCESS) {
        return arl_cuda_error_set(api, err, ARL_ERR_SYNC, result, step,
                                  "%zu bytes of copy tables on device %d (%s)", plan->memory_bytes,
                                  engine->device.ordinal, engine->device.name);
    }
    plan->segment_count = (uint32_t)tables->segment_count;
    plan->item_count = (uint32_t)tables->item_count;
    /* The host's tables are freed next, so they must have been read. */
    status = arl_cuda_stream_wait(&engine->device, engine->stream, deadline, NULL, NULL,
                                  "upload of the copy tables", err);
    if (status == ARL_ERR_TIMEOUT) {
        plan->memory = 0; /* freeing waits for the device; one that hangs keeps its memory */
    }
    return status;
}

static arl_status_t
plan_fill(arl_cuda_plan_t *plan, const arl_copy_t *copies, int64_t count, arl_deadline_t *deadline,
          arl_error_t *err)
{
    arl_cuda_tables_t tables = {0};
    arl_status_t status;

    if (plan->engine->module == NULL) { /* the graph is made for the bases of each run */
        plan->copies = malloc((size_t)(count > 0 ? count : 1) * sizeof(*copies));
        if (plan->copies == NULL) {
            return arl_error_set_errno(err, "prepare copies", errno, "%lld copies",
                                       (long long)count);
        }
        if (count > 0) {
            memcpy(plan->copies, copies, (size_t)count * sizeof(*copies));
        }
        plan->copy_count = count;
        return ARL_OK;
    }
    status = arl_cuda_tables_build(&tables, copies, count, err);
    if (status == ARL_OK) {
        status = arl_cuda_device_push(&plan->engine->device, err);
    }
    if (status == ARL_OK) {
        status = plan_upload(plan, &tables, deadline, err);
        arl_cuda_device_pop(&plan->engine->device);
    }
    arl_cuda_tables_free(&tables);
    return status;
}

arl_status_t
arl_cuda_plan_create(const arl_cuda_engine_t *engine, const arl_copy_t *copies, int64_t count,
                     uint32_t base_count, arl_deadline_t *deadline, arl_cuda_plan_t **plan_p,
                     arl_error_t *err)
{
    arl_cuda_plan_t *plan;
    arl_status_t status = plan_check(copies, count, base_count, err);

    if (status != ARL_OK) {
        return status;
    }
    plan = calloc(1, sizeof(*plan));
    if (plan != NULL) {
        plan->bases = calloc(base_count > 0 ? base_count : 1, sizeof(*plan->bases));
    }
    if (plan == NULL || plan->bases == NULL) {
        free(plan);
        return arl_error_set_errno(err, "prepare copies", errno, "%u bases", base_count);
    }
    plan->engine = engine;
    plan->base_count = base_count;
    status = plan_fill(plan, copies, count, deadline, err);
    if (status != ARL_OK) {
        arl_cuda_plan_free(plan);
        return status;
    }
    *plan_p = plan;
    return ARL_OK;
}

static unsigned int
grid_size(const arl_cuda_engine_t *engine, uint32_t work, unsigned int times)
{
    const unsigned int share = engine->share > 0 ? engine->share : 1;
    const unsigned int all = (unsigned int)engine->device.sm_count * engine->blocks_per_sm * times;
    const unsigned int most = all > share ? all / share : 1;

    return work < most ? work : most;
}

/* Returns the name of the call that failed. */
static const char *
plan_launch(const arl_cuda_plan_t *plan, arl_cu_stream_t stream, arl_cu_result_t *result)
{
    const arl_cuda_engine_t *engine = plan->engine;
    const arl_cuda_api_t *api = engine->device.api;
    arl_cu_ptr_t segments = plan->segments, strided = plan->strided, items = plan->items;
    arl_cu_ptr_t bases = plan->device_bases;
    uint32_t segment_count = plan->segment_count, item_count = plan->item_count;

    *result = ARL_CUDA_SUCCESS;
    if (segment_count > 0) {
        void *params[] = {&segments, &bases, &segment_count};

        *result = api->cuLaunchKernel(engine->copy_segments, grid_size(engine, segment_count, 1), 1,
                                      1, engine->threads, 1, 1, 0, stream, params, NULL);
    }
    if (item_count > 0 && *result == ARL_CUDA_SUCCESS) {
        void *params[] = {&strided, &items, &bases, &item_count};

        *result =
            api->cuLaunchKernel(engine->copy_strided, grid_size(engine, item_count, STRIDED_TIMES),
                                1, 1, engine->threads, 1, 1, 0, stream, params, NULL);
    }
    return "cuLaunchKernel";
}

static const char *
plan_run_kernels(arl_cuda_plan_t *plan, arl_cu_stream_t stream, bool bases_changed,
                 arl_cu_result_t *result)
{
    if (bases_changed) {
        /* Small and from pageable memory: the driver has taken a copy when this returns. */
        *result = plan->engine->device.api->cuMemcpyAsync(
            plan->device_bases, (arl_cu_ptr_t)plan->bases, plan->base_count * sizeof(*plan->bases),
            stream);
        if (*result != ARL_CUDA_SUCCESS) {
            return "cuMemcpyAsync";
        }
    }
    return plan_launch(plan, stream, result);
}

static arl_status_t
plan_run_graph(arl_cuda_plan_t *plan, arl_cu_stream_t stream, bool bases_changed, arl_error_t *err)
{
    const arl_cuda_device_t *device = &plan->engine->device;
    arl_cu_result_t result;

    if (bases_changed && plan->graph != NULL) {
        (void)device->api->cuGraphExecDestroy(plan->graph); /* a new one is made in any case */
        plan->graph = NULL;
    }
    if (plan->graph == NULL) {
        arl_status_t status = arl_cuda_graph_build(device, plan->copies, plan->copy_count,
                                                   plan->bases, &plan->graph, err);

        if (status != ARL_OK) {
            return status;
        }
    }
    result = device->api->cuGraphLaunch(plan->graph, stream);
    if (result != ARL_CUDA_SUCCESS) {
        return arl_cuda_error_set(device->api, err, ARL_ERR_SYNC, result, "cuGraphLaunch",
                                  "%lld copies on device %d (%s)", (long long)plan->copy_count,
                                  device->ordinal, device->name);
    }
    return ARL_OK;
}

static arl_status_t
plan_set_bases(arl_cuda_plan_t *plan, const uintptr_t *bases, bool *changed_p, arl_error_t *err)
{
    const size_t size = plan->base_count * sizeof(*bases);

    for (uint32_t i = 0; i < plan->base_count; i++) {
        if ((bases[i] & 15) != 0) { /* the units of the strided kernel rely on it */
            return arl_error_set(err, ARL_ERR_VALUE, "run copies",
                                 "allocation %u begins at 0x%llx, which is not 16-byte aligned", i,
                                 (unsigned long long)bases[i]);
        }
    }
    *changed_p = size > 0 && (!plan->bases_known || memcmp(plan->bases, bases, size) != 0);
    if (*changed_p) {
        memcpy(plan->bases, bases, size);
        plan->bases_known = false; /* until the device has them too */
    }
    return ARL_OK;
}

arl_status_t
arl_cuda_plan_run(arl_cuda_plan_t *plan, const uintptr_t *bases, arl_cu_stream_t stream,
                  arl_error_t *err)
{
    const arl_cuda_device_t *device = &plan->engine->device;
    arl_cu_result_t result = ARL_CUDA_SUCCESS;
    bool changed;
    arl_status_t status = plan_set_bases(plan, bases, &changed, err);

    if (status == ARL_OK) {
        status = arl_cuda_device_push(device, err);
    }
    if (status != ARL_OK) {
        return status;
    }
    if (plan->engine->module == NULL) {
        status = plan_run_graph(plan, stream, changed, err);
    }
    else {
        const char *step = plan_run_kernels(plan, stream, changed, &result);

        if (result != ARL_CUDA_SUCCESS) {
            status = arl_cuda_error_set(device->api, err, ARL_ERR_SYNC, result, step,
                                        "%u segments and %u strided items on device %d (%s)",
                                        plan->segment_count, plan->item_count, device->ordinal,
                                        device->name);
        }
    }
    arl_cuda_device_pop(device);
    plan->bases_known = status == ARL_OK;
    return status;
}

const char *
arl_cuda_plan_kind(const arl_cuda_plan_t *plan)
{
    if (plan->engine->module == NULL) {
        return "graph";
    }
    return plan->item_count == 0 ? "segments" : "segments+strided";
}

size_t
arl_cuda_plan_table_bytes(const arl_cuda_plan_t *plan)
{
    return plan->memory_bytes;
}

void
arl_cuda_plan_free(arl_cuda_plan_t *plan)
{
    if (plan == NULL) {
        return;
    }
    if (plan->memory != 0 || plan->graph != NULL) {
        const arl_cuda_api_t *api = plan->engine->device.api;
        const bool entered = arl_cuda_device_enter(&plan->engine->device);

        if (plan->memory != 0) {
            (void)api->cuMemFree_v2(plan->memory); /* nobody to tell, nothing else to try */
        }
        if (plan->graph != NULL) {
            (void)api->cuGraphExecDestroy(plan->graph);
        }
        arl_cuda_device_leave(&plan->engine->device, entered);
    }
    free(plan->copies);
    free(plan->bases);
    free(plan);
}
