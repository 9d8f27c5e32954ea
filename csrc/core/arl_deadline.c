/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_deadline.h"

#include <sched.h>
#include <time.h>

enum {
    NS_PER_US = 1000,
    NS_PER_MS = 1000000,
    SPIN_NS = 50 * NS_PER_US,
    SLEEP_MIN_NS = 2 * NS_PER_US,
    SLEEP_MAX_NS = 1 * NS_PER_MS,
    SLEEP_SHARE = 16, /* a sleep is at most this part of what was waited before it */
    ALIVE_EVERY_NS = 10 * NS_PER_MS,
    INTERRUPT_EVERY_NS = 50 * NS_PER_MS,
};

static const int64_t NS_PER_S = 1000000000;

int64_t
arl_clock_ns(void)
{
    struct timespec now;

    (void)clock_gettime(CLOCK_MONOTONIC, &now); /* cannot fail for this clock */
    return (int64_t)now.tv_sec * NS_PER_S + now.tv_nsec;
}

void
arl_deadline_start(arl_deadline_t *deadline, double seconds)
{
    deadline->start_ns = arl_clock_ns();
    deadline->interrupted = NULL;
    deadline->context = NULL;
    deadline->next_interrupt_check_ns = deadline->start_ns + INTERRUPT_EVERY_NS;
    if (seconds < 0) {
        deadline->limit_ns = -1;
    }
    else if (seconds > 0) {
        if (seconds > ARL_SECONDS_MAX) {
            seconds = ARL_SECONDS_MAX;
        }
        deadline->limit_ns = (int64_t)(seconds * 1e9);
    }
    else { /* 0, or not a number */
        deadline->limit_ns = 0;
    }
}

int64_t
arl_deadline_left_ns(const arl_deadline_t *deadline)
{
    int64_t left;

    if (deadline->limit_ns < 0) {
        return INT64_MAX;
    }
    left = deadline->limit_ns - (arl_clock_ns() - deadline->start_ns);
    return left > 0 ? left : 0;
}

bool
arl_deadline_expired(const arl_deadline_t *deadline)
{
    return arl_deadline_left_ns(deadline) == 0;
}

double
arl_deadline_elapsed_s(const arl_deadline_t *deadline)
{
    return (double)(arl_clock_ns() - deadline->start_ns) / 1e9;
}

static bool
deadline_interrupted(arl_deadline_t *deadline, int64_t now)
{
    if (deadline->interrupted == NULL || now < deadline->next_interrupt_check_ns) {
        return false;
    }
    deadline->next_interrupt_check_ns = now + INTERRUPT_EVERY_NS;
    return deadline->interrupted(deadline->context);
}

arl_status_t
arl_deadline_wait(arl_deadline_t *deadline, bool (*ready)(void *context),
                  bool (*alive)(void *context), void *context)
{
    return arl_deadline_wait_spinning(deadline, SPIN_NS, ready, alive, context);
}

static void
deadline_sleep(int64_t waited_ns)
{
    int64_t sleep_ns = waited_ns / SLEEP_SHARE;

    sleep_ns = sleep_ns < SLEEP_MIN_NS ? SLEEP_MIN_NS : sleep_ns;
    sleep_ns = sleep_ns > SLEEP_MAX_NS ? SLEEP_MAX_NS : sleep_ns;
    (void)nanosleep(&(struct timespec){.tv_sec = 0, .tv_nsec = sleep_ns},
                    NULL); /* EINTR: shorter */
}

arl_status_t
arl_deadline_wait_spinning(arl_deadline_t *deadline, int64_t spin_ns, bool (*ready)(void *context),
                           bool (*alive)(void *context), void *context)
{
    const int64_t begin = arl_clock_ns();
    int64_t next_alive = begin;

    for (;;) {
        int64_t now;

        if (ready(context)) {
            return ARL_OK;
        }
        now = arl_clock_ns();
        if (deadline_interrupted(deadline, now)) {
            return ARL_ERR_INTERRUPTED;
        }
        if (alive != NULL && now >= next_alive) {
            if (!alive(context)) {
                /* It may have finished its part and then left: look once more. */
                return ready(context) ? ARL_OK : ARL_ERR_PEER_LOST;
            }
            next_alive = now + ALIVE_EVERY_NS;
        }
        if (arl_deadline_expired(deadline)) {
            return ready(context) ? ARL_OK : ARL_ERR_TIMEOUT;
        }
        if (now - begin >= spin_ns) {
            deadline_sleep(now - begin);
        }
        else {
            (void)sched_yield(); /* what is waited for may need this very core */
        }
    }
}
