/* SPDX-License-Identifier: Apache-2.0 */
/* Compiled, never run: our own types and constants beside those of the real cuda.h. */
#include <cuda.h>

#include "transport/cuda_api.h"

#define SAME_SIZE(own, real)                                                                       \
    _Static_assert(sizeof(own) == sizeof(real) && _Alignof(own) == _Alignof(real), #real)
#define SAME_FIELD(own, real)                                                                      \
    _Static_assert(offsetof(arl_cu_memcpy3d_t, own) == offsetof(CUDA_MEMCPY3D, real) &&            \
                       sizeof(((arl_cu_memcpy3d_t *)0)->own) ==                                    \
                           sizeof(((CUDA_MEMCPY3D *)0)->real),                                     \
                   #real)
#define SAME_VALUE(own, real) _Static_assert((int)(own) == (int)(real), #real)

SAME_SIZE(arl_cu_result_t, CUresult);
SAME_SIZE(arl_cu_device_t, CUdevice);
SAME_SIZE(arl_cu_ptr_t, CUdeviceptr);
SAME_SIZE(arl_cu_context_t, CUcontext);
SAME_SIZE(arl_cu_stream_t, CUstream);
SAME_SIZE(arl_cu_event_t, CUevent);
SAME_SIZE(arl_cu_module_t, CUmodule);
SAME_SIZE(arl_cu_function_t, CUfunction);
SAME_SIZE(arl_cu_graph_t, CUgraph);
SAME_SIZE(arl_cu_graph_node_t, CUgraphNode);
SAME_SIZE(arl_cu_graph_exec_t, CUgraphExec);
SAME_SIZE(arl_cu_device_attribute_t, CUdevice_attribute);
SAME_SIZE(arl_cu_pointer_attribute_t, CUpointer_attribute);
SAME_SIZE(arl_cu_jit_option_t, CUjit_option);
SAME_SIZE(arl_cu_uuid_t, CUuuid);
SAME_SIZE(arl_cu_ipc_handle_t, CUipcMemHandle);
SAME_SIZE(arl_cu_memcpy3d_t, CUDA_MEMCPY3D);

SAME_FIELD(src_x, srcXInBytes);
SAME_FIELD(src_y, srcY);
SAME_FIELD(src_z, srcZ);
SAME_FIELD(src_lod, srcLOD);
SAME_FIELD(src_memory_type, srcMemoryType);
SAME_FIELD(src_host, srcHost);
SAME_FIELD(src_device, srcDevice);
SAME_FIELD(src_array, srcArray);
SAME_FIELD(reserved0, reserved0);
SAME_FIELD(src_pitch, srcPitch);
SAME_FIELD(src_height, srcHeight);
SAME_FIELD(dst_x, dstXInBytes);
SAME_FIELD(dst_y, dstY);
SAME_FIELD(dst_z, dstZ);
SAME_FIELD(dst_lod, dstLOD);
SAME_FIELD(dst_memory_type, dstMemoryType);
SAME_FIELD(dst_host, dstHost);
SAME_FIELD(dst_device, dstDevice);
SAME_FIELD(dst_array, dstArray);
SAME_FIELD(reserved1, reserved1);
SAME_FIELD(dst_pitch, dstPitch);
SAME_FIELD(dst_height, dstHeight);
SAME_FIELD(width, WidthInBytes);
SAME_FIELD(height, Height);
SAME_FIELD(depth, Depth);

SAME_VALUE(ARL_CUDA_SUCCESS, CUDA_SUCCESS);
SAME_VALUE(ARL_CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE);
SAME_VALUE(ARL_CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY);
SAME_VALUE(ARL_CUDA_ERROR_NOT_INITIALIZED, CUDA_ERROR_NOT_INITIALIZED);
SAME_VALUE(ARL_CUDA_ERROR_NO_DEVICE, CUDA_ERROR_NO_DEVICE);
SAME_VALUE(ARL_CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_CONTEXT);
SAME_VALUE(ARL_CUDA_ERROR_NOT_READY, CUDA_ERROR_NOT_READY);
SAME_VALUE(ARL_CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
SAME_VALUE(ARL_CUDA_DEVICE_SM_COUNT, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME_VALUE(ARL_CUDA_DEVICE_CC_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME_VALUE(ARL_CUDA_DEVICE_CC_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME_VALUE(ARL_CUDA_POINTER_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
SAME_VALUE(ARL_CUDA_POINTER_BUFFER_ID, CU_POINTER_ATTRIBUTE_BUFFER_ID);
SAME_VALUE(ARL_CUDA_POINTER_IS_MANAGED, CU_POINTER_ATTRIBUTE_IS_MANAGED);
SAME_VALUE(ARL_CUDA_POINTER_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
SAME_VALUE(ARL_CUDA_POINTER_LEGACY_IPC_CAPABLE, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE);
SAME_VALUE(ARL_CUDA_POINTER_RANGE_START, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR);
SAME_VALUE(ARL_CUDA_POINTER_RANGE_SIZE, CU_POINTER_ATTRIBUTE_RANGE_SIZE);
SAME_VALUE(ARL_CUDA_MEMORY_DEVICE, CU_MEMORYTYPE_DEVICE);
SAME_VALUE(ARL_CUDA_STREAM_NON_BLOCKING, CU_STREAM_NON_BLOCKING);
SAME_VALUE(ARL_CUDA_EVENT_DISABLE_TIMING, CU_EVENT_DISABLE_TIMING);
SAME_VALUE(ARL_CUDA_IPC_LAZY_ENABLE_PEER_ACCESS, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
SAME_VALUE(ARL_CUDA_HOST_REGISTER_READ_ONLY, CU_MEMHOSTREGISTER_READ_ONLY);
