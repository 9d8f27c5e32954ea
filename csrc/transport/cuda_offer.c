/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/cuda_offer.h"

#include "transport/cuda_copy.h"

#include <stdlib.h>

static const char OFFER[] = "offer";

arl_status_t
arl_cuda_offer_settle(const arl_export_request_t *request, const arl_cuda_engine_t *engine,
                      arl_error_t *err)
{
    arl_status_t status = arl_cuda_engine_follow(engine, request->stream, err);

    return status != ARL_OK
               ? status
               : arl_cuda_stream_wait(&engine->device, engine->stream, request->deadline, NULL,
                                      NULL, "what the caller's stream held at offer()", err);
}

arl_status_t
arl_cuda_offer_checksums(const arl_export_request_t *request, const arl_cuda_engine_t *engine,
                         arl_offer_t *offer, arl_error_t *err)
{
    arl_view_t *views;
    uint64_t *sums;
    int64_t count = 0;
    arl_status_t status;

    if (request->verify == ARL_VERIFY_NONE) {
        return ARL_OK;
    }
    views = malloc(((size_t)request->count + 1) * sizeof(*views));
    sums = malloc(((size_t)request->count + 1) * sizeof(*sums));
    if (views == NULL || sums == NULL) {
        status = arl_error_set(err, ARL_ERR_NOMEM, OFFER, "out of memory for %u checksums",
                               request->count);
        goto free_arrays;
    }
    for (uint32_t i = 0; i < request->count; i++) {
        if (arl_offer_has_checksum(offer, i)) {
            views[count++] = request->sources[i].view;
        }
    }
    status = arl_cuda_checksum(engine, views, count, request->deadline, sums, err);
    count = 0;
    for (uint32_t i = 0; i < request->count && status == ARL_OK; i++) {
        if (arl_offer_has_checksum(offer, i)) {
            offer->tensors[i].checksum = sums[count++];
        }
    }
free_arrays:
    free(sums);
    free(views);
    return status;
}
