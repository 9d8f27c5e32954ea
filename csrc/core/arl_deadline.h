/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_DEADLINE_H
#define ARL_CORE_DEADLINE_H

#include "core/arl_status.h"

#include <stdbool.h>

/*
 * The one clock that rules a call. It is made once where the call enters C, handed down to
 * every wait, and never restarted: `timeout=` bounds the call, not each of its steps.
 *
 * `interrupted` lets the owner stop a wait (Ctrl-C): it is called about every 50 ms while
 * waiting, without the GIL held, and returns true when the call should give up.
 */
typedef struct arl_deadline {
    int64_t start_ns;
    int64_t limit_ns; /* length of the whole call; negative: none */
    bool (*interrupted)(void *context);
    void *context;
    int64_t next_interrupt_check_ns;
} arl_deadline_t;

/* The longest deadline, in seconds: about 31 years, so that sums of nanoseconds do not wrap. */
enum { ARL_SECONDS_MAX = 1000000000 };

/* Monotonic nanoseconds since an arbitrary point. */
int64_t arl_clock_ns(void);

/* `seconds` < 0: no limit (only tests and tools do that). Not-a-number counts as 0, more than
 * ARL_SECONDS_MAX as that. */
void arl_deadline_start(arl_deadline_t *deadline, double seconds);

bool arl_deadline_expired(const arl_deadline_t *deadline);

/* Nanoseconds left, never negative; INT64_MAX without a limit. */
int64_t arl_deadline_left_ns(const arl_deadline_t *deadline);

/* Seconds since the start, for messages and SyncStats. */
double arl_deadline_elapsed_s(const arl_deadline_t *deadline);

/*
 * Waits until `ready(context)` is true, with a short spin and then growing sleeps (a sixteenth
 * of what was waited so far, at most 1 ms), so that a wait that ends soon costs microseconds and
 * one that does not costs no core.
 * Returns ARL_OK, ARL_ERR_TIMEOUT, or ARL_ERR_INTERRUPTED. It fills no error: the caller knows
 * the phase and the peer, and says them. `alive(context)`, if not NULL, is asked about every
 * 10 ms; false ends the wait with ARL_ERR_PEER_LOST.
 */
arl_status_t arl_deadline_wait(arl_deadline_t *deadline, bool (*ready)(void *context),
                               bool (*alive)(void *context), void *context);

/* The same with a spin of `spin_ns`, for what is known to end soon and where the time counts. */
arl_status_t arl_deadline_wait_spinning(arl_deadline_t *deadline, int64_t spin_ns,
                                        bool (*ready)(void *context), bool (*alive)(void *context),
                                        void *context);

#endif
