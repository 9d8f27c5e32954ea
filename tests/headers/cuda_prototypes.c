/* SPDX-License-Identifier: Apache-2.0 */
/* Compiled, never run: the prototypes of cuda_api.h, with the real types in place of ours. */
#include <cuda.h>

#define ARL_CUDA_TYPES
typedef CUresult arl_cu_result_t;
typedef CUdevice arl_cu_device_t;
typedef CUdeviceptr arl_cu_ptr_t;
typedef CUcontext arl_cu_context_t;
typedef CUstream arl_cu_stream_t;
typedef CUevent arl_cu_event_t;
typedef CUmodule arl_cu_module_t;
typedef CUfunction arl_cu_function_t;
typedef CUgraph arl_cu_graph_t;
typedef CUgraphNode arl_cu_graph_node_t;
typedef CUgraphExec arl_cu_graph_exec_t;
typedef CUdevice_attribute arl_cu_device_attribute_t;
typedef CUpointer_attribute arl_cu_pointer_attribute_t;
typedef CUjit_option arl_cu_jit_option_t;
typedef CUuuid arl_cu_uuid_t;
typedef CUipcMemHandle arl_cu_ipc_handle_t;
typedef CUDA_MEMCPY3D arl_cu_memcpy3d_t;
#include "transport/cuda_api.h"

#define SAME_PROTOTYPE(name, since, params)                                                        \
    _Static_assert(__builtin_types_compatible_p(__typeof__(&name), arl_##name##_fn *), #name);
ARL_CUDA_FUNCTIONS(SAME_PROTOTYPE)
