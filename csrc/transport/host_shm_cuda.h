/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_TRANSPORT_HOST_SHM_CUDA_H
#define ARL_TRANSPORT_HOST_SHM_CUDA_H

#include "transport/cuda_chunks.h"

/*
 * host_shm for tensors in GPU memory, on either side.
 *
 * The file is the stream of core/arl_stream.h from end to end: every tensor at a multiple of 256
 * bytes, aliases left out, so chunk k of any size is the file's bytes from k times that size on.
 * The sender's kernels gather a chunk into one of two slots of GPU memory while the slot before is
 * on its way to the file; the receiver's do the same the other way round. So layouts do not matter,
 * small tensors travel together, and the memory it takes is bounded, whatever the tensors are.
 *
 * A file that is kept for the next offers is registered with the driver (pinned), once on each
 * side, and copies of it then run at the speed of the bus. One that is used once is not:
 * registering takes longer than the slower copy does. Where the driver refuses, the slower copy
 * it is.
 *
 * None of this may be called with the GIL held.
 */

/* The slots that ring_bytes= asks for. */
arl_status_t arl_host_geometry(int64_t ring_bytes, arl_chunk_geometry_t *geometry_p,
                               arl_error_t *err);

/* ---- sender --------------------------------------------------------------------------------- */

typedef struct arl_host_source arl_host_source_t;

/*
 * Copies the request's tensors to the file at `map`, where the offer says they are, and sums those
 * that are to be verified: all ordered after the request's stream, and done when it returns.
 * `*source_io` is NULL or from the offer before; it may be set on failure, too.
 */
arl_status_t arl_host_source_fill(const arl_export_request_t *request, arl_offer_t *offer,
                                  const arl_chunk_geometry_t *geometry, void *map, size_t size,
                                  arl_host_source_t **source_io, arl_error_t *err);

/* GPU memory that it takes. */
int64_t arl_host_source_bytes(const arl_host_source_t *source);

/* Frees it. False: the device may still write to the file, which must then stay mapped. NULL is
 * fine. */
bool arl_host_source_free(arl_host_source_t *source, bool forked);

/* ---- receiver ------------------------------------------------------------------------------- */

typedef struct arl_host_target arl_host_target_t;

/*
 * Prepares the pull whose file is mapped at `map`. `*target_io` is NULL or from an earlier pull
 * with the same mapping, and becomes NULL when nothing goes to GPU memory; it may be set on
 * failure, too. `pin`: the mapping will be used again.
 */
arl_status_t arl_host_target_prepare(const arl_pull_t *pull, const void *map, size_t size, bool pin,
                                     arl_host_target_t **target_io, arl_error_t *err);

/* Runs the pull's plan, all of it. */
arl_status_t arl_host_target_copy(arl_host_target_t *target, const arl_pull_t *pull,
                                  const char *map, arl_error_t *err);

/* The checksums of tensors in either memory. */
arl_status_t arl_host_target_checksums(const arl_host_target_t *target, const arl_pull_t *pull,
                                       const arl_view_t *views, int64_t count, uint64_t *sums,
                                       arl_error_t *err);

/* Why the kernels are not used; empty when they are. */
const char *arl_host_target_fallback(const arl_host_target_t *target);

/* GPU memory that it takes. */
int64_t arl_host_target_bytes(const arl_host_target_t *target);

/* Frees it. False: the device may still read the file, which must then stay mapped. NULL is
 * fine. */
bool arl_host_target_free(arl_host_target_t *target);

#endif
