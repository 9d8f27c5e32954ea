/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/cuda_api.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- loading -------------------------------------------------------------------------------- */

void
arl_cuda_version_text(int version, char *text, size_t size)
{
    (void)snprintf(text, size, "%d.%d", version / 1000, version % 1000 / 10);
}

static const char *
error_name(const arl_cuda_api_t *api, arl_cu_result_t result)
{
    const char *name = NULL;

    if (api->cuGetErrorName == NULL || api->cuGetErrorName(result, &name) != 0 || name == NULL) {
        return "unknown CUDA error";
    }
    return name;
}

static const char *
error_text(const arl_cuda_api_t *api, arl_cu_result_t result)
{
    const char *text = NULL;

    if (api->cuGetErrorString == NULL || api->cuGetErrorString(result, &text) != 0 ||
        text == NULL) {
        return "no description";
    }
    return text;
}

static bool
driver_version(const void *table, int *version_p, char *reason, size_t size)
{
    const arl_cuda_api_t *api = table;
    arl_cu_result_t result;

    if (api->cuDriverGetVersion == NULL) {
        return false;
    }
    result = api->cuDriverGetVersion(version_p); /* works before cuInit */
    if (result != ARL_CUDA_SUCCESS) {
        (void)snprintf(reason, size, "cuDriverGetVersion: %s", error_name(api, result));
        return false;
    }
    return true;
}

static const arl_symbol_t symbols[] = {
#define ARL_CUDA_SYMBOL(symbol, since, params)                                                     \
    {.name = #symbol,                                                                              \
     .offset = offsetof(arl_cuda_api_t, symbol),                                                   \
     .min_version = (since),                                                                       \
     .required = true},
    ARL_CUDA_FUNCTIONS(ARL_CUDA_SYMBOL)
#undef ARL_CUDA_SYMBOL
};

static const char *const no_folders[] = {NULL};

static const arl_library_t library = {
    .title = "the CUDA driver",
    .stem = "libcuda",
    .sonames = (const char *const[]){"libcuda.so.1", NULL},
    .wheel_folders = no_folders, /* the driver comes with the GPU's host, never as a wheel */
    .system_folders = (const char *const[]){"/usr/lib/wsl/lib", "/usr/local/nvidia/lib64",
                                            "/run/opengl-driver/lib", NULL},
    .override_env = "ARCTIC_RL_C_CUDA_DRIVER",
    .install_hint =
        "Install an NVIDIA driver of branch 525 or later on the host; in a container, start it "
        "with the GPUs (docker run --gpus all). ARCTIC_RL_C_CUDA_DRIVER=<path of libcuda.so.1> "
        "names one that lies elsewhere. CPU tensors need none of this (host_shm).",
    .min_version = ARL_CUDA_VERSION_MIN,
    .symbols = symbols,
    .symbol_count = sizeof(symbols) / sizeof(symbols[0]),
    .version = driver_version,
    .version_text = arl_cuda_version_text,
};

typedef struct loaded {
    arl_cuda_api_t api;
    arl_library_found_t found;
    pid_t pid; /* that initialised the driver */
} loaded_t;

static _Atomic(loaded_t *) published;

static arl_status_t
driver_init(const loaded_t *loaded, arl_error_t *err)
{
    const arl_cu_result_t result = loaded->api.cuInit(0);
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");

    if (result == ARL_CUDA_SUCCESS) {
        return ARL_OK;
    }
    return arl_cuda_error_set(
        &loaded->api, err, ARL_ERR_UNAVAILABLE, result, "cuInit",
        "driver %s (%s, %s) is there but does not start; CUDA_VISIBLE_DEVICES is %s%s%s; see "
        "whether nvidia-smi works here, and whether this process was forked from one that used "
        "CUDA (start it with spawn)",
        loaded->found.version_text, loaded->found.path, loaded->found.how,
        visible == NULL ? "" : "\"", visible == NULL ? "not set" : visible,
        visible == NULL ? "" : "\"");
}

static arl_status_t
loaded_use(const loaded_t *loaded, const arl_cuda_api_t **api_p, arl_error_t *err)
{
    if (loaded->pid != getpid()) {
        return arl_error_set(err, ARL_ERR_UNAVAILABLE, "use CUDA after fork",
                             "process %ld was forked from process %ld, which had initialised CUDA; "
                             "CUDA does not survive a fork: start workers with spawn "
                             "(multiprocessing.get_context(\"spawn\"))",
                             (long)getpid(), (long)loaded->pid);
    }
    *api_p = &loaded->api;
    return ARL_OK;
}

arl_status_t
arl_cuda_load(const arl_cuda_api_t **api_p, arl_error_t *err)
{
    loaded_t *loaded = atomic_load(&published), *first = NULL;
    arl_status_t status;

    if (loaded != NULL) {
        return loaded_use(loaded, api_p, err);
    }
    loaded = calloc(1, sizeof(*loaded));
    if (loaded == NULL) {
        return arl_error_set_errno(err, "load the CUDA driver", errno, "%zu bytes",
                                   sizeof(*loaded));
    }
    ARL_CHECK_GOTO(status, arl_library_load(&library, &loaded->api, &loaded->found, err),
                   free_loaded);
    ARL_CHECK_GOTO(status, driver_init(loaded, err), free_loaded);
    loaded->pid = getpid();
    if (!atomic_compare_exchange_strong(&published, &first, loaded)) {
        free(loaded); /* another thread was first; both tables are the same */
        loaded = first;
    }
    return loaded_use(loaded, api_p, err);

free_loaded:
    free(loaded);
    return status;
}

const arl_library_found_t *
arl_cuda_found(void)
{
    const loaded_t *loaded = atomic_load(&published);

    return loaded == NULL ? NULL : &loaded->found;
}

/* ---- errors --------------------------------------------------------------------------------- */

arl_status_t
arl_cuda_error_set(const arl_cuda_api_t *api, arl_error_t *err, arl_status_t code,
                   arl_cu_result_t result, const char *operation, const char *format, ...)
{
    char rest[ARL_ERROR_TEXT_MAX - 256];
    va_list args;

    if (result == ARL_CUDA_ERROR_OUT_OF_MEMORY) {
        code = ARL_ERR_NOMEM;
    }
    va_start(args, format);
    (void)vsnprintf(rest, sizeof(rest), format, args);
    va_end(args);
    return arl_error_set_foreign(err, code, ARL_DOMAIN_CUDA_DRIVER, result, operation,
                                 "%s: %s (%s): %s", operation, error_name(api, result),
                                 error_text(api, result), rest);
}

void
arl_cuda_uuid_text(const unsigned char uuid[16], char text[ARL_CUDA_UUID_TEXT])
{
    static const char digits[] = "0123456789abcdef";
    size_t used = 4;

    memcpy(text, "GPU-", 4);
    for (size_t i = 0; i < 16; i++) {
        if (i == 4 || i == 6 || i == 8 || i == 10) {
            text[used++] = '-';
        }
        text[used++] = digits[uuid[i] >> 4];
        text[used++] = digits[uuid[i] & 15];
    }
    text[used] = '\0';
}

/* ---- devices -------------------------------------------------------------------------------- */

static arl_status_t
device_identify(arl_cuda_device_t *device, arl_error_t *err)
{
    const arl_cuda_api_t *api = device->api;
    arl_cu_uuid_t uuid;
    arl_cu_result_t result;

    result = api->cuDeviceGet(&device->device, device->ordinal);
    if (result == ARL_CUDA_SUCCESS) {
        result = api->cuDeviceGetUuid_v2(&uuid, device->device);
    }
    if (result == ARL_CUDA_SUCCESS) {
        memcpy(device->uuid, uuid.bytes, sizeof(device->uuid));
        result =
            api->cuDeviceGetAttribute(&device->sm_count, ARL_CUDA_DEVICE_SM_COUNT, device->device);
    }
    if (result == ARL_CUDA_SUCCESS) {
        result = api->cuDeviceGetName(device->name, ARL_CUDA_NAME_MAX, device->device);
    }
    if (result != ARL_CUDA_SUCCESS) {
        return arl_cuda_error_set(api, err, ARL_ERR_UNAVAILABLE, result, "open CUDA device",
                                  "device %d", device->ordinal);
    }
    return ARL_OK;
}

arl_status_t
arl_cuda_device_open(int ordinal, arl_cuda_device_t *device_p, arl_error_t *err)
{
    arl_cuda_device_t device = {.ordinal = ordinal};
    arl_cu_result_t result;
    arl_status_t status;

    status = arl_cuda_load(&device.api, err);
    if (status == ARL_OK) {
        status = device_identify(&device, err);
    }
    if (status != ARL_OK) {
        return status;
    }
    result = device.api->cuDevicePrimaryCtxRetain(&device.context, device.device);
    if (result != ARL_CUDA_SUCCESS) {
        return arl_cuda_error_set(device.api, err, ARL_ERR_UNAVAILABLE, result,
                                  "cuDevicePrimaryCtxRetain",
                                  "device %d (%s); is it in exclusive mode and taken by another "
                                  "process, or full?",
                                  ordinal, device.name);
    }
    *device_p = device;
    return ARL_OK;
}

arl_status_t
arl_cuda_device_count(const arl_cuda_api_t **api_p, int *count_p, arl_error_t *err)
{
    arl_status_t status = arl_cuda_load(api_p, err);
    arl_cu_result_t result;

    if (status != ARL_OK) {
        return status;
    }
    result = (*api_p)->cuDeviceGetCount(count_p);
    if (result != ARL_CUDA_SUCCESS) {
        return arl_cuda_error_set(*api_p, err, ARL_ERR_UNAVAILABLE, result, "cuDeviceGetCount",
                                  "looking at the devices");
    }
    return ARL_OK;
}

arl_status_t
arl_cuda_device_find(const unsigned char uuid[16], arl_cuda_device_t *device_p, arl_error_t *err)
{
    char wanted[ARL_CUDA_UUID_TEXT], text[ARL_CUDA_UUID_TEXT], visible[512] = "";
    const arl_cuda_api_t *api;
    size_t used = 0;
    int count = 0;
    arl_status_t status = arl_cuda_device_count(&api, &count, err);

    if (status != ARL_OK) {
        return status;
    }
    for (int i = 0; i < count; i++) {
        arl_cuda_device_t device = {.api = api, .ordinal = i};

        status = device_identify(&device, err);
        if (status != ARL_OK) {
            return status;
        }
        if (memcmp(device.uuid, uuid, sizeof(device.uuid)) == 0) {
            *device_p = device;
            return ARL_OK;
        }
        arl_cuda_uuid_text(device.uuid, text);
        if (used < sizeof(visible)) {
            used += (size_t)snprintf(visible + used, sizeof(visible) - used, "%s%s",
                                     i > 0 ? ", " : "", text);
        }
    }
    arl_cuda_uuid_text(uuid, wanted);
    return arl_error_set(err, ARL_ERR_UNAVAILABLE, "find CUDA device",
                         "device %s is not visible in this process, which sees %d: %s. Give it "
                         "that device too (CUDA_VISIBLE_DEVICES), or use another transport",
                         wanted, count, count > 0 ? visible : "none");
}

void
arl_cuda_device_close(arl_cuda_device_t *device)
{
    if (device->context != NULL) {
        (void)device->api->cuDevicePrimaryCtxRelease_v2(device->device); /* nothing left to do */
    }
    device->context = NULL;
}

arl_status_t
arl_cuda_device_push(const arl_cuda_device_t *device, arl_error_t *err)
{
    const arl_cu_result_t result = device->api->cuCtxPushCurrent_v2(device->context);

    if (result != ARL_CUDA_SUCCESS) {
        return arl_cuda_error_set(device->api, err, ARL_ERR_SYNC, result, "cuCtxPushCurrent",
                                  "device %d (%s)", device->ordinal, device->name);
    }
    return ARL_OK;
}

void
arl_cuda_device_pop(const arl_cuda_device_t *device)
{
    arl_cu_context_t popped;

    (void)device->api->cuCtxPopCurrent_v2(&popped); /* only fails when nothing was pushed */
}

bool
arl_cuda_device_enter(const arl_cuda_device_t *device)
{
    return device->api->cuCtxPushCurrent_v2(device->context) == ARL_CUDA_SUCCESS;
}

void
arl_cuda_device_leave(const arl_cuda_device_t *device, bool entered)
{
    if (entered) {
        arl_cuda_device_pop(device);
    }
}

/* ---- pointers ------------------------------------------------------------------------------- */

arl_status_t
arl_cuda_pointer_query(const arl_cuda_api_t *api, const void *pointer, const char *what,
                       arl_cuda_pointer_t *info_p, arl_error_t *err)
{
    /* One call for all of them. Flags are a byte or an int, by attribute: zeroed, either works. */
    unsigned int type = 0, managed = 0, legacy_ipc = 0;
    unsigned long long base = 0, id = 0;
    int ordinal = -1;
    size_t size = 0;
    arl_cu_pointer_attribute_t attributes[] = {
        ARL_CUDA_POINTER_MEMORY_TYPE,        ARL_CUDA_POINTER_DEVICE_ORDINAL,
        ARL_CUDA_POINTER_BUFFER_ID,          ARL_CUDA_POINTER_RANGE_START,
        ARL_CUDA_POINTER_RANGE_SIZE,         ARL_CUDA_POINTER_IS_MANAGED,
        ARL_CUDA_POINTER_LEGACY_IPC_CAPABLE,
    };
    void *data[] = {&type, &ordinal, &id, &base, &size, &managed, &legacy_ipc};
    const arl_cu_result_t result = api->cuPointerGetAttributes(
        sizeof(attributes) / sizeof(attributes[0]), attributes, data, (arl_cu_ptr_t)pointer);

    if (result != ARL_CUDA_SUCCESS) {
        /* A pointer that is none is the caller's fault; anything else is not. */
        return arl_cuda_error_set(
            api, err, result == ARL_CUDA_ERROR_INVALID_VALUE ? ARL_ERR_VALUE : ARL_ERR_SYNC, result,
            "cuPointerGetAttributes", "%s at 0x%" PRIxPTR, what, (uintptr_t)pointer);
    }
    if (type != ARL_CUDA_MEMORY_DEVICE && managed == 0) {
        return arl_error_set(err, ARL_ERR_VALUE, "query pointer",
                             "%s: 0x%" PRIxPTR " is not memory of a CUDA device (memory type %u); "
                             "was it freed, or is it asleep (unmapped)?",
                             what, (uintptr_t)pointer, type);
    }
    *info_p = (arl_cuda_pointer_t){
        .ordinal = ordinal,
        .base = (uintptr_t)base,
        .size = size,
        .buffer_id = id,
        .legacy_ipc = legacy_ipc != 0 && managed == 0,
        .managed = managed != 0,
    };
    return ARL_OK;
}
