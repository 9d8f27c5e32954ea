/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/arl_peer.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static const char OPERATION[] = "identify process";

/* Reads a small file of /proc. Returns its length, or -1 with errno. */
static ssize_t
read_small(const char *path, char *text, size_t size)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    size_t used = 0;
    ssize_t n;
    int errnum;

    if (fd < 0) {
        return -1;
    }
    do {
        n = read(fd, text + used, size - 1 - used);
        errnum = n < 0 ? errno : 0;
        used += n > 0 ? (size_t)n : 0;
    } while ((n > 0 && used < size - 1) || errnum == EINTR);
    (void)close(fd);
    text[used] = '\0';
    errno = errnum;
    return errnum == 0 ? (ssize_t)used : -1;
}

/* Fields 3 (state) and 22 (start time) of /proc/<pid>/stat. Field 2, the command, is in
 * parentheses and may itself hold spaces and parentheses. False with errno; EPROTO for a text
 * that is not understood. */
static bool
read_stat(int64_t pid, char *state_p, uint64_t *start_time_p)
{
    char path[64], text[1024];
    const char *at;

    (void)snprintf(path, sizeof(path), "/proc/%lld/stat", (long long)pid);
    if (read_small(path, text, sizeof(text)) < 0) {
        return false;
    }
    errno = EPROTO;
    at = strrchr(text, ')');
    if (at == NULL || at[1] != ' ' || at[2] == '\0') {
        return false;
    }
    at += 2;
    *state_p = *at;
    for (int field = 3; field < 22; field++) {
        at = strchr(at, ' ');
        if (at == NULL) {
            return false;
        }
        at++;
    }
    *start_time_p = strtoull(at, NULL, 10);
    return true;
}

/* "1b4e28ba-2fa1-11d2-883f-0016d3cca427\n" to 16 bytes. */
static bool
parse_uuid(const char *text, uint8_t *out)
{
    static const char hex[] = "0123456789abcdef";
    int digits = 0;

    memset(out, 0, ARL_OFFER_ID_BYTES);
    for (; *text != '\0' && digits < 2 * ARL_OFFER_ID_BYTES; text++) {
        const char *found = strchr(hex, *text);

        if (found != NULL) { /* and not a hyphen */
            out[digits / 2] = (uint8_t)(out[digits / 2] << 4 | (found - hex));
            digits++;
        }
    }
    return digits == 2 * ARL_OFFER_ID_BYTES;
}

static arl_status_t
peer_read_self(arl_peer_t *peer_p, arl_error_t *err)
{
    arl_peer_t peer = {.pid = getpid()};
    struct stat info;
    char text[64], state;

    if (read_small("/proc/sys/kernel/random/boot_id", text, sizeof(text)) < 0 ||
        !parse_uuid(text, peer.boot_id)) {
        return arl_error_set_errno(err, OPERATION, errno,
                                   "cannot read /proc/sys/kernel/random/boot_id (is /proc there?)");
    }
    if (stat("/proc/self/ns/pid", &info) != 0) {
        return arl_error_set_errno(err, OPERATION, errno, "cannot read /proc/self/ns/pid");
    }
    peer.pid_namespace = info.st_ino;
    if (!read_stat(peer.pid, &state, &peer.start_time)) {
        return arl_error_set_errno(err, OPERATION, errno, "cannot read /proc/%lld/stat",
                                   (long long)peer.pid);
    }
    *peer_p = peer;
    return ARL_OK;
}

/* Asked for several times in each offer and pull, and never different in one process. */
static pthread_mutex_t self_lock = PTHREAD_MUTEX_INITIALIZER;
static arl_peer_t self_known; /* its pid tells a child after fork that it is not its own */

arl_status_t
arl_peer_self(arl_peer_t *peer_p, arl_error_t *err)
{
    arl_status_t status = ARL_OK;

    /* Tried only: in a child that was forked while another thread had it, it stays locked. */
    if (pthread_mutex_trylock(&self_lock) != 0) {
        return peer_read_self(peer_p, err);
    }
    if (self_known.pid != getpid()) {
        status = peer_read_self(&self_known, err);
    }
    if (status == ARL_OK) {
        *peer_p = self_known;
    }
    (void)pthread_mutex_unlock(&self_lock);
    return status;
}

bool
arl_peer_equal(const arl_peer_t *a, const arl_peer_t *b)
{
    return a->pid == b->pid && a->start_time == b->start_time &&
           a->pid_namespace == b->pid_namespace &&
           memcmp(a->boot_id, b->boot_id, sizeof(a->boot_id)) == 0;
}

bool
arl_peer_alive(int64_t pid, uint64_t start_time)
{
    uint64_t found;
    char state;

    if (!read_stat(pid, &state, &found)) {
        /* Only a missing entry is a death. Whatever else went wrong (no descriptor left, say)
         * tells nothing about the peer. */
        return errno != ENOENT && errno != ESRCH;
    }
    return found == start_time && state != 'Z' && state != 'X';
}

void
arl_peer_watch_open(arl_peer_watch_t *watch, const arl_peer_t *peer)
{
    watch->peer = *peer;
    watch->pidfd = -1;
#ifdef SYS_pidfd_open
    watch->pidfd = (int)syscall(SYS_pidfd_open, (pid_t)peer->pid, 0);
    if (watch->pidfd >= 0 && !arl_peer_alive(peer->pid, peer->start_time)) {
        /* Another process may have the pid by now: the descriptor would watch that one. */
        (void)close(watch->pidfd);
        watch->pidfd = -1;
    }
#endif
}

bool
arl_peer_watch_alive(const arl_peer_watch_t *watch)
{
    struct pollfd poller = {.fd = watch->pidfd, .events = POLLIN};

    if (watch->pidfd < 0) {
        return arl_peer_alive(watch->peer.pid, watch->peer.start_time);
    }
    return poll(&poller, 1, 0) <= 0; /* readable once it has exited; an error tells nothing */
}

void
arl_peer_watch_close(arl_peer_watch_t *watch)
{
    if (watch->pidfd >= 0) {
        (void)close(watch->pidfd);
        watch->pidfd = -1;
    }
}
