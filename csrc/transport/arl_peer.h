/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_TRANSPORT_PEER_H
#define ARL_TRANSPORT_PEER_H

#include "core/arl_offer.h"

/* Who this process is. */
arl_status_t arl_peer_self(arl_peer_t *peer_p, arl_error_t *err);

bool arl_peer_equal(const arl_peer_t *a, const arl_peer_t *b);

/* Whether the process with this pid and start time runs. A zombie does not. Only for peers of
 * this machine and PID namespace. */
bool arl_peer_alive(int64_t pid, uint64_t start_time);

/*
 * Says whether a peer still runs, cheaply and as often as wanted. With a pidfd where the kernel
 * has them; that also wins the race against pids that are used again.
 */
typedef struct arl_peer_watch {
    arl_peer_t peer;
    int pidfd; /* -1: /proc is asked each time */
} arl_peer_watch_t;

void arl_peer_watch_open(arl_peer_watch_t *watch, const arl_peer_t *peer);
bool arl_peer_watch_alive(const arl_peer_watch_t *watch);
void arl_peer_watch_close(arl_peer_watch_t *watch);

#endif
