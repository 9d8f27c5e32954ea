/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_TRANSPORT_CUDA_ENGINE_H
#define ARL_TRANSPORT_CUDA_ENGINE_H

#include "core/arl_deadline.h"
#include "transport/cuda_api.h"

/*
 * An engine is a device with the kernels loaded and a stream of its own. It is used by one at a
 * time; loading the kernels costs milliseconds, so engines that are given back are kept for the
 * next one who asks.
 *
 * None of this may be called with the GIL held. The functions push and pop the context.
 */

/*
 * A wait for what a GPU does is spun this long before it sleeps: a copy or transfer of some GB ends
 * within it, from another GPU too. A sleep is longer than it was meant to be, up to a tenth of what
 * was waited; where both sides of a transfer slept, 0.2 of 4 ms.
 */
static const int64_t ARL_CUDA_SPIN_NS = 20 * 1000 * 1000;

typedef struct arl_cuda_engine {
    arl_cuda_device_t device;
    arl_cu_stream_t stream; /* non-blocking: ordered after nothing but what it waits for */
    arl_cu_module_t module; /* NULL: no kernels */
    arl_cu_function_t copy_segments;
    arl_cu_function_t copy_strided;
    arl_cu_function_t checksum;
    unsigned int threads;         /* of a block */
    unsigned int blocks_per_sm;   /* most blocks of a launch, for each multiprocessor */
    unsigned int share;           /* copies get one multiprocessor in so many; 0 is 1 */
    char fallback_reason[128];    /* why there are no kernels; empty when there are */
    struct arl_cuda_engine *next; /* in the pool */
} arl_cuda_engine_t;

/* Opens the device too. Zero-initialised it is closed; closing twice is fine. */
arl_status_t arl_cuda_engine_open(int ordinal, arl_cuda_engine_t *engine_p, arl_error_t *err);
void arl_cuda_engine_close(arl_cuda_engine_t *engine);

/*
 * Waits under the deadline until everything on `stream` is done. ARL_ERR_TIMEOUT says `what`
 * was waited for; the work itself cannot be taken back. `alive` as in arl_deadline_wait.
 */
arl_status_t arl_cuda_stream_wait(const arl_cuda_device_t *device, arl_cu_stream_t stream,
                                  arl_deadline_t *deadline, bool (*alive)(void *context),
                                  void *context, const char *what, arl_error_t *err);

/* Lets the engine's stream wait for what `stream` (a caller's) holds now, without the host. */
arl_status_t arl_cuda_engine_follow(const arl_cuda_engine_t *engine, arl_cu_stream_t stream,
                                    arl_error_t *err);

/*
 * An engine of this device for the caller alone, out of the pool or a new one. Given back it
 * keeps its context, module and stream for the life of the process; one whose work has not ended
 * is lost instead, since nothing of it can be freed without waiting.
 */
arl_status_t arl_cuda_engine_acquire(int ordinal, arl_cuda_engine_t **engine_p, arl_error_t *err);
void arl_cuda_engine_release(arl_cuda_engine_t *engine); /* NULL is fine */

/* Closes the engines that nobody uses: for tests that count what is open. */
void arl_cuda_engine_trim(void);

#endif
