/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_TRANSPORT_CUDA_COPY_H
#define ARL_TRANSPORT_CUDA_COPY_H

#include "core/arl_deadline.h"
#include "core/arl_plan.h"
#include "transport/cuda_engine.h"

/*
 * Copies and checksums on a device.
 *
 * A prepared plan is a list of copies turned into tables in device memory, made once while the
 * layout stays the same and run as often as wanted: one launch for the contiguous runs, cut into
 * segments of 64 KiB, and one for what is scattered. Sources are named by base and offset, so that
 * a mapping that moved costs one small upload and no new tables.
 *
 * Where the kernels do not load (no JIT compiler, a driver policy), a graph of memcpy nodes does
 * the same work; the engine's `fallback_reason` says so, and callers report it.
 *
 * None of this may be called with the GIL held. The functions push and pop the context.
 */

typedef struct arl_cuda_plan arl_cuda_plan_t;

/*
 * Prepares `count` copies whose `alloc` indexes `base_count` bases. The copies are not needed
 * afterwards. Their destinations must be device memory that is accessible from the engine's
 * device. Waits for the upload of the tables.
 */
arl_status_t arl_cuda_plan_create(const arl_cuda_engine_t *engine, const arl_copy_t *copies,
                                  int64_t count, uint32_t base_count, arl_deadline_t *deadline,
                                  arl_cuda_plan_t **plan_p, arl_error_t *err);

/*
 * Puts the copies on `stream`; returns when they are enqueued, not when they are done. `bases`
 * are the addresses of the source allocations, 16-byte aligned (the driver's are, to 256). A run
 * with other bases than the last one must not overtake it: use the same stream, or wait.
 */
arl_status_t arl_cuda_plan_run(arl_cuda_plan_t *plan, const uintptr_t *bases,
                               arl_cu_stream_t stream, arl_error_t *err);

/* "segments", "segments+strided" or "graph", for SyncStats. */
const char *arl_cuda_plan_kind(const arl_cuda_plan_t *plan);

/* Device memory that the tables take. */
size_t arl_cuda_plan_table_bytes(const arl_cuda_plan_t *plan);

/* All runs must be done. NULL is fine. */
void arl_cuda_plan_free(arl_cuda_plan_t *plan);

/*
 * The checksums (arl_checksum_view) of arrays in device memory, computed there; waits for the
 * result under the deadline, ordered after what is on the engine's stream. Without kernels the
 * bytes are brought to the host, which is slow.
 */
arl_status_t arl_cuda_checksum(const arl_cuda_engine_t *engine, const arl_view_t *views,
                               int64_t count, arl_deadline_t *deadline, uint64_t *sums,
                               arl_error_t *err);

#endif
