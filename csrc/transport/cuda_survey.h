/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_TRANSPORT_CUDA_SURVEY_H
#define ARL_TRANSPORT_CUDA_SURVEY_H

#include "transport/cuda_api.h"

enum { ARL_CUDA_DEVICES_MAX = 64 };

/* What show_config tells of a device. */
typedef struct arl_cuda_survey {
    int ordinal;
    char name[ARL_CUDA_NAME_MAX];
    unsigned char uuid[16];
    int cc_major, cc_minor;
    int sm_count;
    uint64_t memory;
    uint64_t peers;       /* a bit for each ordinal that it can read */
    bool ipc;             /* a handle could be made of memory on it */
    char ipc_reason[256]; /* why not */
} arl_cuda_survey_t;

/*
 * Looks at up to `room` visible devices. Finds out by doing: a context is made on each and given
 * back, which takes a moment and, until then, some hundred megabytes of it.
 */
arl_status_t arl_cuda_survey(arl_cuda_survey_t *devices, int room, int *count_p, arl_error_t *err);

#endif
