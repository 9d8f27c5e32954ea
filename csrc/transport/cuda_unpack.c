/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/cuda_chunks.h"

#include <stdlib.h>
#include <string.h>

static const char PULL[] = "pull";

void
arl_chunk_unpacker_free(arl_chunk_unpacker_t *unpacker, bool forked)
{
    for (int64_t i = 0; i < unpacker->plan_count && !forked; i++) {
        arl_cuda_plan_free(unpacker->plans[i]);
    }
    free(unpacker->plans);
    free(unpacker->spans);
    unpacker->plans = NULL;
    unpacker->spans = NULL;
    unpacker->plan_count = 0;
    unpacker->plan_serial = 0;
    arl_stream_free(&unpacker->stream);
}

static arl_chunk_span_t
list_span(const arl_copy_list_t *list)
{
    arl_chunk_span_t span = {0, 0};

    for (int64_t i = 0; i < list->count; i++) {
        const arl_copy_t *copy = &list->items[i];
        int64_t begin = copy->src_offset, end = copy->src_offset + copy->run_bytes;

        for (int d = 0; d < copy->ndim; d++) { /* the stream is dense: no step goes back */
            end += (copy->count[d] - 1) * copy->src_stride[d];
        }
        span.begin = i == 0 || begin < span.begin ? begin : span.begin;
        span.end = end > span.end ? end : span.end;
    }
    return span;
}

static arl_status_t
plan_chunk(arl_chunk_unpacker_t *unpacker, const arl_pull_t *pull, int64_t chunk, arl_error_t *err)
{
    arl_copy_list_t list = {0};
    arl_status_t status = arl_stream_unpack(&unpacker->stream, pull->plan, chunk, &list, err);

    if (status == ARL_OK) {
        unpacker->spans[chunk] = list_span(&list);
        status = arl_cuda_plan_create(unpacker->engine, list.items, list.count, 1, pull->deadline,
                                      &unpacker->plans[chunk], err);
    }
    arl_copy_list_free(&list);
    return status;
}

arl_status_t
arl_chunk_unpacker_prepare(arl_chunk_unpacker_t *unpacker, const arl_pull_t *pull,
                           const arl_chunk_geometry_t *geometry, arl_error_t *err)
{
    arl_status_t status;

    if (unpacker->plan_serial == pull->plan->serial &&
        memcmp(&unpacker->geometry, geometry, sizeof(*geometry)) == 0) {
        return ARL_OK;
    }
    arl_chunk_unpacker_free(unpacker, false);
    unpacker->geometry = *geometry;
    status = arl_stream_init(pull->offer, (int64_t)geometry->slot_bytes, &unpacker->stream, err);
    if (status != ARL_OK) {
        return status;
    }
    unpacker->plans = calloc((size_t)unpacker->stream.chunk_count + 1, sizeof(unpacker->plans[0]));
    unpacker->spans = calloc((size_t)unpacker->stream.chunk_count + 1, sizeof(unpacker->spans[0]));
    if (unpacker->plans == NULL || unpacker->spans == NULL) {
        return arl_error_set(err, ARL_ERR_NOMEM, PULL, "out of memory for %lld chunks",
                             (long long)unpacker->stream.chunk_count);
    }
    for (int64_t k = 0; k < unpacker->stream.chunk_count && status == ARL_OK; k++) {
        status = plan_chunk(unpacker, pull, k, err);
        unpacker->plan_count = k + 1;
    }
    if (status == ARL_OK) {
        unpacker->plan_serial = pull->plan->serial;
    }
    return status;
}

int64_t
arl_chunk_unpacker_table_bytes(const arl_chunk_unpacker_t *unpacker)
{
    int64_t bytes = 0;

    for (int64_t i = 0; i < unpacker->plan_count; i++) {
        if (unpacker->plans[i] != NULL) {
            bytes += (int64_t)arl_cuda_plan_table_bytes(unpacker->plans[i]);
        }
    }
    return bytes;
}

arl_status_t
arl_chunk_unpacker_run(const arl_chunk_unpacker_t *unpacker, int64_t chunk, uintptr_t memory,
                       arl_error_t *err)
{
    const uintptr_t base = memory + (uintptr_t)((uint64_t)chunk % unpacker->geometry.slots) *
                                        (uintptr_t)unpacker->geometry.slot_bytes;

    return arl_cuda_plan_run(unpacker->plans[chunk], &base, unpacker->engine->stream, err);
}
