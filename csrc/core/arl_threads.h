/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_THREADS_H
#define ARL_CORE_THREADS_H

#include "core/arl_status.h"

/*
 * A small pool for work that is split by rows. It is created on first use, holds no more
 * threads than the process may run on (sched_getaffinity, ARCTIC_RL_C_THREADS), and is made
 * anew in a child after fork. Its threads never touch Python.
 */

/* One piece: rows [begin, end). Called from several threads at once, never twice for a row. */
typedef void (*arl_task_fn)(void *context, int64_t begin, int64_t end);

/*
 * Runs `task` over [0, count) and returns when all of it is done. Splits only when `nbytes`,
 * the bytes that the whole call moves, is large enough to pay for waking threads; otherwise
 * (or when the pool cannot be made, or another thread is using it) runs on the caller.
 * Call it without the GIL.
 */
void arl_parallel_for(int64_t count, int64_t nbytes, arl_task_fn task, void *context);

/* Threads that a large call uses, the caller included; at least 1. */
int arl_threads_count(void);

#endif
