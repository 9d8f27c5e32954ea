/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_THREADS_H
#define ARL_CORE_THREADS_H

#include "core/arl_status.h"

/*
 * A small pool for work that is split by rows. It is created by the first large call, holds no
 * more threads than the process may run on (affinity mask, cgroup CPU quota), and is made anew
 * in a child after fork. Its threads never touch Python.
 */

/* An explicit ARCTIC_RL_C_THREADS wins over what was found; this is its upper bound. */
enum { ARL_THREADS_MAX = 256 };

/* One piece: rows [begin, end). Called from several threads at once, never twice for a row. */
typedef void (*arl_task_fn)(void *context, int64_t begin, int64_t end);

/* Settles the number of threads, once per process. ARL_ERR_CONFIG when ARCTIC_RL_C_THREADS is
 * not a number from 1 to ARL_THREADS_MAX; without this call such a value counts as unset. */
arl_status_t arl_threads_prepare(arl_error_t *err);

/* Threads that a large call uses, the caller included; at least 1. */
int arl_threads_count(void);

/*
 * Runs `task` over [0, count) and returns when all of it is done. Splits only when `nbytes`,
 * the bytes that the whole call moves, is large enough to pay for waking threads; otherwise
 * (or when the pool cannot be made, or another thread is using it) runs on the caller.
 * Call it without the GIL.
 */
void arl_parallel_for(int64_t count, int64_t nbytes, arl_task_fn task, void *context);

/* CPUs' worth of time that the control groups of this process allow, rounded up, or 0 when
 * there is no limit. `root` is where cgroupfs is mounted, `membership` a /proc/self/cgroup. */
int arl_threads_quota(const char *root, const char *membership);

#endif
