/* SPDX-License-Identifier: Apache-2.0 */
/* All that nccl.h needs of the runtime's headers, so that the check needs nccl.h alone. */
#ifndef ARL_STUB_CUDA_RUNTIME_H
#define ARL_STUB_CUDA_RUNTIME_H

#include <stddef.h>

typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;

#endif
