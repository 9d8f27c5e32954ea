/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/ring.h"

static arl_status_t
ring_probe(arl_error_t *err)
{
    const arl_cuda_api_t *api;

    return arl_cuda_load(&api, err);
}

const arl_transport_t arl_transport_ring = {
    .id = ARL_TRANSPORT_RING,
    .name = "ring",
    .needs_gpu = true,
    .same_host = true,
    .streams = true,
    .probe = ring_probe,
    .offer = arl_ring_offer,
    .serve = arl_ring_serve,
    .destroy = arl_ring_destroy,
    .discard = arl_ring_discard,
    .open = arl_ring_open,
    .copy = arl_ring_copy,
    .view = arl_ring_view,
    .checksums = arl_ring_checksums,
    .close = arl_ring_close,
};
