/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_TRANSPORT_NCCL_API_H
#define ARL_TRANSPORT_NCCL_API_H

#include "core/arl_status.h"
#include "transport/arl_loader.h"
#include "transport/cuda_api.h"

#include <limits.h>

/*
 * NCCL (libnccl.so.2), 2.19 or later, loaded at run time. Streams are the driver's: NCCL's
 * cudaStream_t is the same handle. Declarations are our own, compared with nccl.h by
 * tests/test_headers.py as in cuda_api.h.
 */

#ifndef ARL_NCCL_TYPES
typedef int arl_nccl_result_t;
typedef int arl_nccl_type_t;
typedef struct arl_nccl_comm *arl_nccl_comm_t;

typedef struct arl_nccl_id {
    char internal[128];
} arl_nccl_id_t;

/*
 * The configuration as NCCL 2.17 laid it out. Later versions append fields, and read no more
 * than `size` bytes of a configuration whose `version` is older than theirs.
 */
typedef struct arl_nccl_config {
    size_t size;
    unsigned int magic;
    unsigned int version;
    int blocking;
    int cga_cluster_size;
    int min_ctas;
    int max_ctas;
    const char *net_name;
    int split_share;
} arl_nccl_config_t;
#endif

enum {
    ARL_NCCL_SUCCESS = 0,
    ARL_NCCL_UNHANDLED_CUDA_ERROR = 1,
    ARL_NCCL_SYSTEM_ERROR = 2,
    ARL_NCCL_INTERNAL_ERROR = 3,
    ARL_NCCL_INVALID_ARGUMENT = 4,
    ARL_NCCL_INVALID_USAGE = 5,
    ARL_NCCL_REMOTE_ERROR = 6,
    ARL_NCCL_IN_PROGRESS = 7,

    ARL_NCCL_UINT8 = 1,
};

#define ARL_NCCL_CONFIG_MAGIC 0xcafebeefU
#define ARL_NCCL_UNDEFINED INT_MIN

/* Non-blocking, everything else as NCCL (and the user's NCCL_* variables) would have it. */
#define ARL_NCCL_CONFIG_INIT                                                                       \
    {                                                                                              \
        .size = sizeof(arl_nccl_config_t), .magic = ARL_NCCL_CONFIG_MAGIC,                         \
        .version = ARL_NCCL_VERSION_MIN, .blocking = 0, .cga_cluster_size = ARL_NCCL_UNDEFINED,    \
        .min_ctas = ARL_NCCL_UNDEFINED, .max_ctas = ARL_NCCL_UNDEFINED, .net_name = NULL,          \
        .split_share = ARL_NCCL_UNDEFINED                                                          \
    }

/* Symbol (also the field's name), NCCL version that first had it, return type, parameters. */
/* clang-format off */
#define ARL_NCCL_FUNCTIONS(X)                                                                      \
    X(ncclGetVersion, 2000, arl_nccl_result_t, (int *version))                                     \
    X(ncclGetUniqueId, 2000, arl_nccl_result_t, (arl_nccl_id_t *id))                               \
    X(ncclCommInitRankConfig, 21403, arl_nccl_result_t,                                            \
      (arl_nccl_comm_t *comm, int nranks, arl_nccl_id_t id, int rank, arl_nccl_config_t *config))  \
    X(ncclCommGetAsyncError, 2400, arl_nccl_result_t,                                              \
      (arl_nccl_comm_t comm, arl_nccl_result_t *error))                                            \
    X(ncclCommFinalize, 21403, arl_nccl_result_t, (arl_nccl_comm_t comm))                          \
    X(ncclCommAbort, 2400, arl_nccl_result_t, (arl_nccl_comm_t comm))                              \
    X(ncclCommCuDevice, 2000, arl_nccl_result_t, (const arl_nccl_comm_t comm, int *device))        \
    X(ncclGetErrorString, 2000, const char *, (arl_nccl_result_t result))                          \
    X(ncclGetLastError, 21301, const char *, (arl_nccl_comm_t comm))                               \
    X(ncclGroupStart, 2000, arl_nccl_result_t, (void))                                             \
    X(ncclGroupEnd, 2000, arl_nccl_result_t, (void))                                               \
    X(ncclSend, 2703, arl_nccl_result_t,                                                           \
      (const void *buffer, size_t count, arl_nccl_type_t type, int peer, arl_nccl_comm_t comm,     \
       arl_cu_stream_t stream))                                                                    \
    X(ncclRecv, 2703, arl_nccl_result_t,                                                           \
      (void *buffer, size_t count, arl_nccl_type_t type, int peer, arl_nccl_comm_t comm,           \
       arl_cu_stream_t stream))                                                                    \
    X(ncclBroadcast, 2202, arl_nccl_result_t,                                                      \
      (const void *send, void *receive, size_t count, arl_nccl_type_t type, int root,              \
       arl_nccl_comm_t comm, arl_cu_stream_t stream))
/* clang-format on */

enum { ARL_NCCL_VERSION_MIN = 21900 };

#define ARL_NCCL_TYPE(name, since, type, params) typedef type(arl_##name##_fn) params;
ARL_NCCL_FUNCTIONS(ARL_NCCL_TYPE)
#undef ARL_NCCL_TYPE

typedef struct arl_nccl_api {
#define ARL_NCCL_FIELD(name, since, type, params) arl_##name##_fn *name;
    ARL_NCCL_FUNCTIONS(ARL_NCCL_FIELD)
#undef ARL_NCCL_FIELD
} arl_nccl_api_t;

/* As arl_cuda_load: on first use, lock-free, all or nothing; loads the CUDA driver first. */
arl_status_t arl_nccl_load(const arl_nccl_api_t **api_p, arl_error_t *err);
const arl_library_found_t *arl_nccl_found(void);

/*
 * Describes a failed call: NCCL's text for `result`, its last error for `comm` (may be NULL),
 * then the rest. Returns the code that was set.
 */
arl_status_t arl_nccl_error_set(const arl_nccl_api_t *api, arl_error_t *err, arl_status_t code,
                                arl_nccl_result_t result, arl_nccl_comm_t comm,
                                const char *operation, const char *format, ...)
    __attribute__((format(printf, 7, 8)));

/* 21903 -> "2.19.3" */
void arl_nccl_version_text(int version, char *text, size_t size);

#endif
