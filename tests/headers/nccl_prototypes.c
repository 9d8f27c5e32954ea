/* SPDX-License-Identifier: Apache-2.0 */
/* Compiled, never run: the prototypes of nccl_api.h, with the real types in place of ours. */
#include <nccl.h>

#define ARL_NCCL_TYPES
typedef ncclResult_t arl_nccl_result_t;
typedef ncclDataType_t arl_nccl_type_t;
typedef ncclComm_t arl_nccl_comm_t;
typedef ncclUniqueId arl_nccl_id_t;
typedef ncclConfig_t arl_nccl_config_t;

/* Of cuda_api.h only the stream's type matters here. */
#define arl_cu_stream_t own_cu_stream_t
#include "transport/cuda_api.h"
#undef arl_cu_stream_t
typedef cudaStream_t arl_cu_stream_t;
#include "transport/nccl_api.h"

#define SAME_PROTOTYPE(name, since, type, params)                                                  \
    _Static_assert(__builtin_types_compatible_p(__typeof__(&name), arl_##name##_fn *), #name);
ARL_NCCL_FUNCTIONS(SAME_PROTOTYPE)
