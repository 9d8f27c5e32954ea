/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/cuda_survey.h"

#include <stdio.h>
#include <string.h>

/* What the driver shares between processes is at least this large. */
static const size_t TRIAL_BYTES = (size_t)2 << 20;

static void
survey_reason(arl_cuda_survey_t *survey, const arl_error_t *err)
{
    (void)snprintf(survey->ipc_reason, sizeof(survey->ipc_reason), "%.*s",
                   (int)sizeof(survey->ipc_reason) - 1, err->text);
}

static void
survey_ipc(const arl_cuda_device_t *device, arl_cuda_survey_t *survey)
{
    const arl_cuda_api_t *api = device->api;
    arl_error_t err = ARL_ERROR_INIT;
    arl_cu_ipc_handle_t handle;
    const char *step = "cuMemAlloc";
    arl_cu_ptr_t memory = 0;
    arl_cu_result_t result;

    if (arl_cuda_device_push(device, &err) != ARL_OK) {
        survey_reason(survey, &err);
        return;
    }
    result = api->cuMemAlloc_v2(&memory, TRIAL_BYTES);
    if (result == ARL_CUDA_SUCCESS) {
        step = "cuIpcGetMemHandle";
        result = api->cuIpcGetMemHandle(&handle, memory);
        (void)api->cuMemFree_v2(memory); /* what was to be learnt is known */
    }
    arl_cuda_device_pop(device);
    survey->ipc = result == ARL_CUDA_SUCCESS;
    if (!survey->ipc) {
        (void)arl_cuda_error_set(api, &err, ARL_ERR_UNAVAILABLE, result, step,
                                 "a trial of %zu bytes", TRIAL_BYTES);
        survey_reason(survey, &err);
    }
}

static void
survey_numbers(const arl_cuda_api_t *api, arl_cuda_survey_t *survey, int count)
{
    const struct {
        int attribute;
        int *value;
    } wanted[] = {
        {ARL_CUDA_DEVICE_CC_MAJOR, &survey->cc_major},
        {ARL_CUDA_DEVICE_CC_MINOR, &survey->cc_minor},
        {ARL_CUDA_DEVICE_SM_COUNT, &survey->sm_count},
    };
    arl_cu_device_t device, peer;
    arl_cu_uuid_t uuid;
    size_t memory = 0;

    if (api->cuDeviceGet(&device, survey->ordinal) != ARL_CUDA_SUCCESS) {
        return; /* the attempt to open it says why */
    }
    (void)api->cuDeviceGetName(survey->name, ARL_CUDA_NAME_MAX, device);
    if (api->cuDeviceGetUuid_v2(&uuid, device) == ARL_CUDA_SUCCESS) {
        memcpy(survey->uuid, uuid.bytes, sizeof(survey->uuid));
    }
    for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++) {
        (void)api->cuDeviceGetAttribute(wanted[i].value, wanted[i].attribute, device);
    }
    if (api->cuDeviceTotalMem_v2(&memory, device) == ARL_CUDA_SUCCESS) {
        survey->memory = memory;
    }
    for (int i = 0; i < count; i++) {
        int can = 0;

        if (i != survey->ordinal && api->cuDeviceGet(&peer, i) == ARL_CUDA_SUCCESS &&
            api->cuDeviceCanAccessPeer(&can, device, peer) == ARL_CUDA_SUCCESS && can) {
            survey->peers |= UINT64_C(1) << i;
        }
    }
}

arl_status_t
arl_cuda_survey(arl_cuda_survey_t *devices, int room, int *count_p, arl_error_t *err)
{
    const arl_cuda_api_t *api;
    int count = 0;
    arl_status_t status = arl_cuda_device_count(&api, &count, err);

    if (status != ARL_OK) {
        return status;
    }
    count = count < room ? count : room;
    memset(devices, 0, (size_t)count * sizeof(*devices));
    for (int i = 0; i < count; i++) {
        arl_error_t reason = ARL_ERROR_INIT;
        arl_cuda_device_t device;

        devices[i].ordinal = i;
        survey_numbers(api, &devices[i], count);
        if (arl_cuda_device_open(i, &device, &reason) == ARL_OK) {
            survey_ipc(&device, &devices[i]);
            arl_cuda_device_close(&device);
        }
        else {
            survey_reason(&devices[i], &reason);
        }
    }
    *count_p = count;
    return ARL_OK;
}
