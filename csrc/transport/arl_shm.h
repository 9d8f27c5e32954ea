/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_TRANSPORT_SHM_H
#define ARL_TRANSPORT_SHM_H

#include "core/arl_offer.h"

/*
 * A file of POSIX shared memory, mapped. Private: mode 0600, a name with 96 random bits, and
 * only ever opened by the user who made it. The descriptor is closed once the file is mapped.
 *
 * The maker's PID namespace, pid and start time are part of the file's name, so that what a
 * killed process left behind is known for what it is and taken away by the next (arl_shm_sweep).
 *
 * The struct of a file that is still linked is in a list: it stays where it is until closed.
 */
typedef struct arl_shm {
    char name[ARL_OFFER_HOST_MAX]; /* "/arl-…" */
    void *map;
    size_t size;
    bool linked; /* made here, and its name not removed yet as far as is known here */
    struct arl_shm *next;
} arl_shm_t;

/*
 * Makes a file of `size` > 0 bytes, all zero, and maps it for writing. Its pages are reserved:
 * a full /dev/shm is ARL_ERR_SYSTEM (ENOSPC, with the numbers) now, and not SIGBUS later.
 */
arl_status_t arl_shm_create(size_t size, arl_shm_t *shm_p, arl_error_t *err);

typedef enum arl_shm_mode {
    ARL_SHM_READ,
    ARL_SHM_WRITE,
    ARL_SHM_COPY, /* private and writable: a stray write harms nobody else */
} arl_shm_mode_t;

/*
 * Maps a file that another process of this user made, if it has exactly `size` bytes.
 * ARL_ERR_PEER_LOST when there is none of that name (the caller knows more about why),
 * ARL_ERR_SYNC when it is someone else's or of another size.
 */
arl_status_t arl_shm_open(const char *name, size_t size, arl_shm_mode_t mode, arl_shm_t *shm_p,
                          arl_error_t *err);

/* Removes the name; mappings stay. Safe to repeat, also when another process was faster. */
void arl_shm_unlink(arl_shm_t *shm);

/* Removes the name if it was made here, and the mapping. Safe to repeat. */
void arl_shm_close(arl_shm_t *shm);

/* For a child after fork: removes its copy of the mapping and leaves the name alone. */
void arl_shm_forget(arl_shm_t *shm);

/* Removes the files of processes that are gone, whatever their end was. */
void arl_shm_sweep(void);

/* Fills `bytes` from the kernel's generator. */
arl_status_t arl_random(void *bytes, size_t size, arl_error_t *err);

#endif
