/* SPDX-License-Identifier: Apache-2.0 */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include "transport/cuda_api.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <unistd.h>

/*
 * A CUDA driver without a GPU. Device memory is POSIX shared memory, so that handles work
 * between real processes; stream work runs on a thread of its own, after a lag when one is set,
 * and in the least convenient order that the rules allow. See __init__.py for how it is driven.
 */
#define FAKE_EXPORT __attribute__((visibility("default")))

enum {
    FAKE_DEVICES_MAX = 8,
    FAKE_IMPORTERS_MAX = 32,
    FAKE_NAME_MAX = 48,
    FAKE_PAGE = 4096,
    FAKE_STACK_MAX = 16,

    FAKE_ERROR_INVALID_DEVICE = 101,
    FAKE_ERROR_PEER_UNSUPPORTED = 217,
    FAKE_ERROR_INVALID_PTX = 218,
    FAKE_ERROR_INVALID_HANDLE = 400,
    FAKE_ERROR_NOT_FOUND = 500,
    FAKE_ERROR_ALREADY_REGISTERED = 712,
    FAKE_ERROR_NOT_SUPPORTED = 801,
    FAKE_ERROR_UNKNOWN = 999,
};

typedef struct fake_config {
    int version;
    long lag_us;
    bool no_ptx;
    bool no_ipc;
    bool no_peer;
    size_t memory; /* per device and process */
    char session[20];
} fake_config_t;

typedef struct fake_device {
    int physical; /* index on the pretended host */
    bool mig;
    unsigned char uuid[16];
    size_t used;
} fake_device_t;

/* Shared between the processes of a session, for what a parent wants to know of its children. */
typedef struct fake_control {
    _Atomic int misuse_count;
    char first_misuse[240];
    _Atomic long long serial;
} fake_control_t;

struct arl_cu_context {
    int ordinal;
    int retained;
    unsigned peers; /* bit per ordinal */
};

/* At the start of the shared memory of each allocation; the data begins one page later. */
typedef struct fake_header {
    uint32_t magic;
    uint32_t exporter;
    uint64_t size;
    int32_t physical;
    _Atomic int freed;
    _Atomic int importers[FAKE_IMPORTERS_MAX]; /* pids */
} fake_header_t;

typedef enum fake_kind {
    FAKE_LEGACY,
    FAKE_VMM,
    FAKE_IMPORTED,
    FAKE_HOST,
    FAKE_REGISTERED
} fake_kind_t;

typedef struct fake_block {
    struct fake_block *next;
    fake_kind_t kind;
    int ordinal;
    uintptr_t base;
    size_t size;
    uint64_t buffer_id;
    uint64_t serial;
    uint32_t exporter;
    int opens; /* imported blocks */
    fake_header_t *header;
    char name[FAKE_NAME_MAX];
} fake_block_t;

/* One lock for everything; never held while a caller's code runs. */
extern pthread_mutex_t fake_lock;
extern fake_config_t fake_config;
extern fake_control_t *fake_control;
extern fake_device_t fake_devices[FAKE_DEVICES_MAX];
extern int fake_device_count;

enum {
    FAKE_ALLOCATIONS,
    FAKE_MAPPINGS,
    FAKE_HOST_BLOCKS,
    FAKE_STREAMS,
    FAKE_EVENTS,
    FAKE_MODULES,
    FAKE_GRAPHS,
    FAKE_CONTEXTS,
    FAKE_LIVE_COUNT
};
extern long fake_live[FAKE_LIVE_COUNT];

extern bool fake_initialised;
extern pid_t fake_initialised_pid;

/* Counts the call and returns the code to fail with, or 0. */
FAKE_EXPORT int fake_fail_point(const char *name);
FAKE_EXPORT void fake_misuse(const char *format, ...) __attribute__((format(printf, 1, 2)));
FAKE_EXPORT const char *fake_session(void);
FAKE_EXPORT long long fake_serial(void);

/* The context on top of this thread's stack, or NULL. */
struct arl_cu_context *fake_current(void);

/* With the lock held. The block that holds [pointer, pointer + size), or NULL. */
fake_block_t *fake_block_find(uintptr_t pointer, size_t size);
/* True when the address was device memory once and is not any more. */
bool fake_was_freed(uintptr_t pointer);

/* ---- streams: also for fake_nccl ---- */
void fake_drain(void); /* with the lock held */

/* A piece of stream work. `run` is called with the lock held when everything before it is done;
 * false: not finished, ask again. `drop` frees the context. */
typedef bool (*fake_run_fn)(void *context);
FAKE_EXPORT int fake_stream_push(arl_cu_stream_t stream, fake_run_fn run, void (*drop)(void *),
                                 void *context);
FAKE_EXPORT int fake_current_physical(void);
FAKE_EXPORT int fake_current_ordinal(void);
FAKE_EXPORT bool fake_pointer_valid(const void *pointer, size_t size);

/* ---- kernels ---- */
int fake_kernel_find(const char *image, const char *name); /* -1 when unknown */
/* Copies the parameters, as the real launch does. NULL when out of memory. */
void *fake_kernel_prepare(int kernel, unsigned grid, unsigned block, void **params);
bool fake_kernel_run(void *launch);

#define FAKE_FAIL()                                                                                \
    do {                                                                                           \
        const int fake_code_ = fake_fail_point(__func__);                                          \
        if (fake_code_ != 0) {                                                                     \
            return fake_code_;                                                                     \
        }                                                                                          \
    } while (0)

#define NEED_INIT()                                                                                \
    do {                                                                                           \
        if (!fake_initialised || fake_initialised_pid != getpid()) {                               \
            return ARL_CUDA_ERROR_NOT_INITIALIZED;                                                 \
        }                                                                                          \
    } while (0)
#define NEED_DEVICE(device)                                                                        \
    do {                                                                                           \
        NEED_INIT();                                                                               \
        if ((device) < 0 || (device) >= fake_device_count) {                                       \
            return FAKE_ERROR_INVALID_DEVICE;                                                      \
        }                                                                                          \
    } while (0)
#define NEED_CONTEXT()                                                                             \
    do {                                                                                           \
        NEED_INIT();                                                                               \
        if (fake_current() == NULL) {                                                              \
            return ARL_CUDA_ERROR_INVALID_CONTEXT;                                                 \
        }                                                                                          \
    } while (0)

#endif
