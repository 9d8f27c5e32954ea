/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_TRANSPORT_CUDA_OFFER_H
#define ARL_TRANSPORT_CUDA_OFFER_H

#include "transport/arl_transport.h"
#include "transport/cuda_engine.h"

/* What the senders of cuda_ipc, ring and nccl share. */

/* Waits for what the caller has put on its stream, so that no receiver ever waits on the GPU for
 * a process that may die. */
arl_status_t arl_cuda_offer_settle(const arl_export_request_t *request,
                                   const arl_cuda_engine_t *engine, arl_error_t *err);

/* Fills the checksums that the request asks for, from the caller's own tensors. */
arl_status_t arl_cuda_offer_checksums(const arl_export_request_t *request,
                                      const arl_cuda_engine_t *engine, arl_offer_t *offer,
                                      arl_error_t *err);

#endif
