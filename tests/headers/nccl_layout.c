/* SPDX-License-Identifier: Apache-2.0 */
/* Compiled and run: our own NCCL types and constants beside those of the real nccl.h. */
#include <nccl.h>

#include "transport/nccl_api.h"

#define SAME_SIZE(own, real)                                                                       \
    _Static_assert(sizeof(own) == sizeof(real) && _Alignof(own) == _Alignof(real), #real)
/* Later versions append fields: the offsets of the ones we know stay. */
#define SAME_FIELD(own, real)                                                                      \
    _Static_assert(offsetof(arl_nccl_config_t, own) == offsetof(ncclConfig_t, real) &&             \
                       sizeof(((arl_nccl_config_t *)0)->own) == sizeof(((ncclConfig_t *)0)->real), \
                   #real)
#define SAME_VALUE(own, real) _Static_assert((int)(own) == (int)(real), #real)

SAME_SIZE(arl_nccl_result_t, ncclResult_t);
SAME_SIZE(arl_nccl_type_t, ncclDataType_t);
SAME_SIZE(arl_nccl_comm_t, ncclComm_t);
SAME_SIZE(arl_nccl_id_t, ncclUniqueId);
SAME_SIZE(arl_cu_stream_t, cudaStream_t);
_Static_assert(sizeof(arl_nccl_config_t) <= sizeof(ncclConfig_t), "ncclConfig_t shrank");

SAME_FIELD(size, size);
SAME_FIELD(magic, magic);
SAME_FIELD(version, version);
SAME_FIELD(blocking, blocking);
SAME_FIELD(cga_cluster_size, cgaClusterSize);
SAME_FIELD(min_ctas, minCTAs);
SAME_FIELD(max_ctas, maxCTAs);
SAME_FIELD(net_name, netName);
SAME_FIELD(split_share, splitShare);

SAME_VALUE(ARL_NCCL_SUCCESS, ncclSuccess);
SAME_VALUE(ARL_NCCL_UNHANDLED_CUDA_ERROR, ncclUnhandledCudaError);
SAME_VALUE(ARL_NCCL_SYSTEM_ERROR, ncclSystemError);
SAME_VALUE(ARL_NCCL_INTERNAL_ERROR, ncclInternalError);
SAME_VALUE(ARL_NCCL_INVALID_ARGUMENT, ncclInvalidArgument);
SAME_VALUE(ARL_NCCL_INVALID_USAGE, ncclInvalidUsage);
SAME_VALUE(ARL_NCCL_REMOTE_ERROR, ncclRemoteError);
SAME_VALUE(ARL_NCCL_IN_PROGRESS, ncclInProgress);
SAME_VALUE(ARL_NCCL_UINT8, ncclUint8);
SAME_VALUE(ARL_NCCL_UNDEFINED, NCCL_CONFIG_UNDEF_INT);

/* The initialiser's magic number has no constant in old headers: compared at run time. */
int
main(void)
{
    const ncclConfig_t real = NCCL_CONFIG_INITIALIZER;
    const arl_nccl_config_t own = ARL_NCCL_CONFIG_INIT;

    return real.magic == own.magic && real.netName == own.net_name ? 0 : 1;
}
