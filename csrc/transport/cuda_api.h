/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_TRANSPORT_CUDA_API_H
#define ARL_TRANSPORT_CUDA_API_H

#include "core/arl_status.h"
#include "transport/arl_loader.h"

/*
 * The CUDA driver (libcuda.so.1), loaded at run time.
 *
 * Only the driver is used, not the runtime library: it comes with every GPU, its ABI is the
 * same for CUDA 12 and 13, it shares the primary contexts (and so every pointer and stream) with
 * whatever runtime the process uses, also two of them, and its failures leave no error behind in
 * the runtime's "last error", where the next kernel launch of torch would find it.
 *
 * The declarations are our own, so that no CUDA header is needed to build. tests/test_headers.py
 * compiles them against cuda.h wherever there is one: it defines ARL_CUDA_TYPES to the real
 * types, and then compares every prototype, constant and struct.
 */

#ifndef ARL_CUDA_TYPES
typedef int arl_cu_result_t;
typedef int arl_cu_device_t;
typedef uintptr_t arl_cu_ptr_t; /* same size and class as the driver's unsigned long long */
typedef struct arl_cu_context *arl_cu_context_t;
typedef struct arl_cu_stream *arl_cu_stream_t;
typedef struct arl_cu_event *arl_cu_event_t;
typedef struct arl_cu_module *arl_cu_module_t;
typedef struct arl_cu_function *arl_cu_function_t;
typedef struct arl_cu_graph *arl_cu_graph_t;
typedef struct arl_cu_graph_node *arl_cu_graph_node_t;
typedef struct arl_cu_graph_exec *arl_cu_graph_exec_t;
typedef int arl_cu_device_attribute_t;
typedef int arl_cu_pointer_attribute_t;
typedef int arl_cu_jit_option_t;

typedef struct arl_cu_uuid {
    char bytes[16];
} arl_cu_uuid_t;

typedef struct arl_cu_ipc_handle {
    char reserved[64];
} arl_cu_ipc_handle_t;

typedef struct arl_cu_memcpy3d {
    size_t src_x, src_y, src_z, src_lod;
    int src_memory_type;
    const void *src_host;
    arl_cu_ptr_t src_device;
    void *src_array;
    void *reserved0;
    size_t src_pitch, src_height;
    size_t dst_x, dst_y, dst_z, dst_lod;
    int dst_memory_type;
    void *dst_host;
    arl_cu_ptr_t dst_device;
    void *dst_array;
    void *reserved1;
    size_t dst_pitch, dst_height;
    size_t width, height, depth;
} arl_cu_memcpy3d_t;
#endif

/* The numbers that are used. */
enum {
    ARL_CUDA_SUCCESS = 0,
    ARL_CUDA_ERROR_INVALID_VALUE = 1,
    ARL_CUDA_ERROR_OUT_OF_MEMORY = 2,
    ARL_CUDA_ERROR_NOT_INITIALIZED = 3,
    ARL_CUDA_ERROR_NO_DEVICE = 100,
    ARL_CUDA_ERROR_INVALID_CONTEXT = 201,
    ARL_CUDA_ERROR_NOT_READY = 600,
    ARL_CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,

    ARL_CUDA_DEVICE_SM_COUNT = 16,
    ARL_CUDA_DEVICE_CC_MAJOR = 75,
    ARL_CUDA_DEVICE_CC_MINOR = 76,

    ARL_CUDA_POINTER_MEMORY_TYPE = 2,
    ARL_CUDA_POINTER_BUFFER_ID = 7,
    ARL_CUDA_POINTER_IS_MANAGED = 8,
    ARL_CUDA_POINTER_DEVICE_ORDINAL = 9,
    ARL_CUDA_POINTER_LEGACY_IPC_CAPABLE = 10,
    ARL_CUDA_POINTER_RANGE_START = 11,
    ARL_CUDA_POINTER_RANGE_SIZE = 12,

    ARL_CUDA_MEMORY_DEVICE = 2,
    ARL_CUDA_STREAM_NON_BLOCKING = 1,
    ARL_CUDA_EVENT_DISABLE_TIMING = 2,
    ARL_CUDA_IPC_LAZY_ENABLE_PEER_ACCESS = 1,
    ARL_CUDA_HOST_REGISTER_READ_ONLY = 8,
};

/*
 * Symbol (also the field's name), driver version that first had it, and parameters. Every one
 * returns a CUresult. All are required: CUDA 12.0 has them all.
 */
/* clang-format off */
#define ARL_CUDA_FUNCTIONS(X)                                                                      \
    X(cuInit, 2000, (unsigned int flags))                                                          \
    X(cuDriverGetVersion, 2020, (int *version))                                                    \
    X(cuGetErrorName, 6000, (arl_cu_result_t error, const char **name))                            \
    X(cuGetErrorString, 6000, (arl_cu_result_t error, const char **text))                          \
    X(cuDeviceGetCount, 2000, (int *count))                                                        \
    X(cuDeviceGet, 2000, (arl_cu_device_t *device, int ordinal))                                   \
    X(cuDeviceGetName, 2000, (char *name, int size, arl_cu_device_t device))                       \
    X(cuDeviceGetUuid_v2, 11040, (arl_cu_uuid_t *uuid, arl_cu_device_t device))                    \
    X(cuDeviceTotalMem_v2, 3020, (size_t *bytes, arl_cu_device_t device))                          \
    X(cuDeviceGetAttribute, 2000,                                                                  \
      (int *value, arl_cu_device_attribute_t attribute, arl_cu_device_t device))                   \
    X(cuDeviceCanAccessPeer, 4000, (int *can, arl_cu_device_t device, arl_cu_device_t peer))       \
    X(cuDevicePrimaryCtxRetain, 7000, (arl_cu_context_t *context, arl_cu_device_t device))         \
    X(cuDevicePrimaryCtxRelease_v2, 11000, (arl_cu_device_t device))                               \
    X(cuCtxPushCurrent_v2, 4000, (arl_cu_context_t context))                                       \
    X(cuCtxPopCurrent_v2, 4000, (arl_cu_context_t *context))                                       \
    X(cuCtxEnablePeerAccess, 4000, (arl_cu_context_t peer, unsigned int flags))                    \
    X(cuMemAlloc_v2, 3020, (arl_cu_ptr_t *pointer, size_t size))                                   \
    X(cuMemFree_v2, 3020, (arl_cu_ptr_t pointer))                                                  \
    X(cuMemAllocHost_v2, 3020, (void **pointer, size_t size))                                      \
    X(cuMemFreeHost, 2000, (void *pointer))                                                        \
    X(cuMemHostRegister_v2, 6050, (void *pointer, size_t size, unsigned int flags))                \
    X(cuMemHostUnregister, 4000, (void *pointer))                                                  \
    X(cuMemGetInfo_v2, 3020, (size_t *free_bytes, size_t *total_bytes))                            \
    X(cuPointerGetAttributes, 7000,                                                                \
      (unsigned int count, arl_cu_pointer_attribute_t *attributes, void **data,                    \
       arl_cu_ptr_t pointer))                                                                      \
    X(cuMemcpyAsync, 4000,                                                                         \
      (arl_cu_ptr_t dst, arl_cu_ptr_t src, size_t size, arl_cu_stream_t stream))                   \
    X(cuStreamCreate, 2000, (arl_cu_stream_t *stream, unsigned int flags))                         \
    X(cuStreamDestroy_v2, 4000, (arl_cu_stream_t stream))                                          \
    X(cuStreamQuery, 2000, (arl_cu_stream_t stream))                                               \
    X(cuStreamSynchronize, 2000, (arl_cu_stream_t stream))                                         \
    X(cuStreamWaitEvent, 3020, (arl_cu_stream_t stream, arl_cu_event_t event, unsigned int flags)) \
    X(cuEventCreate, 2000, (arl_cu_event_t *event, unsigned int flags))                            \
    X(cuEventDestroy_v2, 4000, (arl_cu_event_t event))                                             \
    X(cuEventRecord, 2000, (arl_cu_event_t event, arl_cu_stream_t stream))                         \
    X(cuEventQuery, 2000, (arl_cu_event_t event))                                                  \
    X(cuEventSynchronize, 2000, (arl_cu_event_t event))                                            \
    X(cuIpcGetMemHandle, 4010, (arl_cu_ipc_handle_t *handle, arl_cu_ptr_t pointer))                \
    X(cuIpcOpenMemHandle_v2, 11000,                                                                \
      (arl_cu_ptr_t *pointer, arl_cu_ipc_handle_t handle, unsigned int flags))                     \
    X(cuIpcCloseMemHandle, 4010, (arl_cu_ptr_t pointer))                                           \
    X(cuModuleLoadDataEx, 2010,                                                                    \
      (arl_cu_module_t *module, const void *image, unsigned int count,                             \
       arl_cu_jit_option_t *options, void **values))                                               \
    X(cuModuleUnload, 2000, (arl_cu_module_t module))                                              \
    X(cuModuleGetFunction, 2000,                                                                   \
      (arl_cu_function_t *function, arl_cu_module_t module, const char *name))                     \
    X(cuLaunchKernel, 4000,                                                                        \
      (arl_cu_function_t function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,  \
       unsigned int block_x, unsigned int block_y, unsigned int block_z,                           \
       unsigned int shared_bytes, arl_cu_stream_t stream, void **params, void **extra))            \
    X(cuGraphCreate, 10000, (arl_cu_graph_t *graph, unsigned int flags))                           \
    X(cuGraphAddMemcpyNode, 10000,                                                                 \
      (arl_cu_graph_node_t *node, arl_cu_graph_t graph, const arl_cu_graph_node_t *dependencies,   \
       size_t count, const arl_cu_memcpy3d_t *copy, arl_cu_context_t context))                     \
    X(cuGraphInstantiateWithFlags, 11040,                                                          \
      (arl_cu_graph_exec_t *exec, arl_cu_graph_t graph, unsigned long long flags))                 \
    X(cuGraphLaunch, 10000, (arl_cu_graph_exec_t exec, arl_cu_stream_t stream))                    \
    X(cuGraphExecDestroy, 10000, (arl_cu_graph_exec_t exec))                                       \
    X(cuGraphDestroy, 10000, (arl_cu_graph_t graph))
/* clang-format on */

enum { ARL_CUDA_VERSION_MIN = 12000 };

#define ARL_CUDA_TYPE(name, since, params) typedef arl_cu_result_t(arl_##name##_fn) params;
ARL_CUDA_FUNCTIONS(ARL_CUDA_TYPE)
#undef ARL_CUDA_TYPE

typedef struct arl_cuda_api {
#define ARL_CUDA_FIELD(name, since, params) arl_##name##_fn *name;
    ARL_CUDA_FUNCTIONS(ARL_CUDA_FIELD)
#undef ARL_CUDA_FIELD
} arl_cuda_api_t;

/*
 * The table, loaded and initialised (cuInit) on first use. Lock-free and thread-safe: threads
 * that race each build one, and all get the one that was published first. After a fork of a
 * process that has the table, the child gets ARL_ERR_UNAVAILABLE: CUDA does not survive a fork.
 * Never call it (or anything of the table) with the GIL held.
 */
arl_status_t arl_cuda_load(const arl_cuda_api_t **api_p, arl_error_t *err);

/* What the published table was loaded from; NULL before the first successful load. */
const arl_library_found_t *arl_cuda_found(void);

/*
 * Describes a failed driver call: `code` (out of memory becomes ARL_ERR_NOMEM), the driver's
 * name and text for `result`, then ": " and the rest. Returns the code that was set.
 */
arl_status_t arl_cuda_error_set(const arl_cuda_api_t *api, arl_error_t *err, arl_status_t code,
                                arl_cu_result_t result, const char *operation, const char *format,
                                ...) __attribute__((format(printf, 6, 7)));

/* "13000" -> "13.0" */
void arl_cuda_version_text(int version, char *text, size_t size);

/* "GPU-5a3c…-…", always 40 characters and the end. MIG slices have their own UUID. */
enum { ARL_CUDA_UUID_TEXT = 41 };
void arl_cuda_uuid_text(const unsigned char uuid[16], char text[ARL_CUDA_UUID_TEXT]);

/* ---- devices -------------------------------------------------------------------------------- */

enum { ARL_CUDA_NAME_MAX = 64 };

/* A device with its primary context retained. Zero-initialised it is closed. */
typedef struct arl_cuda_device {
    const arl_cuda_api_t *api;
    int ordinal;
    arl_cu_device_t device;
    arl_cu_context_t context;
    unsigned char uuid[16];
    int sm_count;
    char name[ARL_CUDA_NAME_MAX];
} arl_cuda_device_t;

/* Opens a device by its ordinal, which is the one that the caller's runtime uses too. */
arl_status_t arl_cuda_device_open(int ordinal, arl_cuda_device_t *device_p, arl_error_t *err);

/* How many devices this process sees; loads the table too. */
arl_status_t arl_cuda_device_count(const arl_cuda_api_t **api_p, int *count_p, arl_error_t *err);

/*
 * What is known of the visible device with this UUID; ARL_ERR_UNAVAILABLE lists those that are
 * visible. It has no context, which would take 0.2 s and some hundred MB of that device where the
 * process has none there yet: there is nothing to close.
 */
arl_status_t arl_cuda_device_find(const unsigned char uuid[16], arl_cuda_device_t *device_p,
                                  arl_error_t *err);

void arl_cuda_device_close(arl_cuda_device_t *device); /* also twice */

/*
 * Makes the device's context current on this thread, and gives the thread back as it was. Every
 * call of the table that needs a context goes between the two; nothing of the caller's (its
 * current device, its last error) is changed by us.
 */
arl_status_t arl_cuda_device_push(const arl_cuda_device_t *device, arl_error_t *err);
void arl_cuda_device_pop(const arl_cuda_device_t *device);

/* For cleanup, which goes on when the context cannot be made current: what is given back then
 * fails too, or not. Pass the result to _leave. */
bool arl_cuda_device_enter(const arl_cuda_device_t *device);
void arl_cuda_device_leave(const arl_cuda_device_t *device, bool entered);

/* ---- pointers ------------------------------------------------------------------------------- */

/* What the driver knows about a pointer. */
typedef struct arl_cuda_pointer {
    int ordinal;        /* device that the memory is on */
    uintptr_t base;     /* of the allocation */
    size_t size;        /* of the allocation */
    uint64_t buffer_id; /* unique per allocation in this process, never used again */
    bool legacy_ipc;    /* a handle can be made (not expandable segments, VMM or stream pools) */
    bool managed;       /* cudaMallocManaged */
} arl_cuda_pointer_t;

/* ARL_ERR_VALUE when it is not device memory. Needs no current context. `what` names the
 * tensor in messages. */
arl_status_t arl_cuda_pointer_query(const arl_cuda_api_t *api, const void *pointer,
                                    const char *what, arl_cuda_pointer_t *info_p, arl_error_t *err);

#endif
