/* SPDX-License-Identifier: Apache-2.0 */
/* Configuration, devices, contexts, memory, IPC and modules of the fake driver. */
#include "fake_cuda.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;
fake_config_t fake_config;
fake_control_t *fake_control;
fake_device_t fake_devices[FAKE_DEVICES_MAX];
int fake_device_count;
long fake_live[FAKE_LIVE_COUNT];

bool fake_initialised;
pid_t fake_initialised_pid;
static struct arl_cu_context contexts[FAKE_DEVICES_MAX];

static _Thread_local struct arl_cu_context *stack[FAKE_STACK_MAX];
static _Thread_local int stack_depth;

/* ---- configuration -------------------------------------------------------------------------- */

static long
env_long(const char *name, long otherwise)
{
    const char *text = getenv(name);

    return text == NULL || text[0] == '\0' ? otherwise : strtol(text, NULL, 0);
}

static void
uuid_text(const fake_device_t *device, char text[ARL_CUDA_UUID_TEXT])
{
    const unsigned char *u = device->uuid;

    (void)snprintf(text, ARL_CUDA_UUID_TEXT,
                   "%s-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
                   device->mig ? "MIG" : "GPU", u[0], u[1], u[2], u[3], u[4], u[5], u[6], u[7],
                   u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
}

/* "3" or "GPU,MIG,GPU". */
static int
read_physical(fake_device_t *physical)
{
    const char *text = getenv("FAKE_CUDA_DEVICES");
    char copy[128];
    int count = 0;
    char *rest = NULL;

    if (text == NULL || text[0] == '\0') {
        text = "2";
    }
    (void)snprintf(copy, sizeof(copy), "%s", text);
    if (copy[0] >= '0' && copy[0] <= '9') {
        count = atoi(copy);
        count = count > FAKE_DEVICES_MAX ? FAKE_DEVICES_MAX : count;
    }
    else {
        for (char *item = strtok_r(copy, ",", &rest); item != NULL && count < FAKE_DEVICES_MAX;
             item = strtok_r(NULL, ",", &rest)) {
            physical[count++].mig = strcmp(item, "MIG") == 0;
        }
    }
    for (int i = 0; i < count; i++) {
        physical[i].physical = i;
        for (int b = 0; b < 16; b++) {
            physical[i].uuid[b] = (unsigned char)(0x10 * (i + 1) + b);
        }
    }
    return count;
}

/* An entry that names no device ends the list, as in the real driver. */
static void
select_visible(const fake_device_t *physical, int count)
{
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    char copy[512], uuid[ARL_CUDA_UUID_TEXT], *rest = NULL;

    fake_device_count = 0;
    if (text == NULL) {
        memcpy(fake_devices, physical, sizeof(fake_devices));
        fake_device_count = count;
        return;
    }
    (void)snprintf(copy, sizeof(copy), "%s", text);
    for (char *item = strtok_r(copy, ",", &rest); item != NULL; item = strtok_r(NULL, ",", &rest)) {
        int found = -1;

        for (int i = 0; i < count; i++) {
            uuid_text(&physical[i], uuid);
            if (strncmp(item, uuid, strlen(item)) == 0 && strlen(item) > 4) {
                found = i;
            }
        }
        if (found < 0 && item[0] >= '0' && item[0] <= '9' && atoi(item) < count) {
            found = atoi(item);
        }
        if (found < 0 || fake_device_count == FAKE_DEVICES_MAX) {
            return;
        }
        fake_devices[fake_device_count++] = physical[found];
    }
}

static int
open_control(void)
{
    char name[FAKE_NAME_MAX];
    int fd;

    (void)snprintf(name, sizeof(name), "/%s-control", fake_config.session);
    fd = shm_open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) {
        return -1;
    }
    if (ftruncate(fd, FAKE_PAGE) < 0) {
        (void)close(fd);
        return -1;
    }
    fake_control = mmap(NULL, FAKE_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    (void)close(fd);
    return fake_control == MAP_FAILED ? -1 : 0;
}

static int
initialise(void)
{
    fake_device_t physical[FAKE_DEVICES_MAX] = {{0}};
    const char *session = getenv("FAKE_CUDA_SESSION");

    fake_config.version = (int)env_long("FAKE_CUDA_DRIVER_VERSION", 13000);
    fake_config.lag_us = env_long("FAKE_CUDA_LAG_US", 0);
    fake_config.no_ptx = env_long("FAKE_CUDA_NO_PTX", 0) != 0;
    fake_config.no_ipc = env_long("FAKE_CUDA_NO_IPC", 0) != 0;
    fake_config.no_peer = env_long("FAKE_CUDA_NO_PEER", 0) != 0;
    fake_config.memory = (size_t)env_long("FAKE_CUDA_MEMORY", 1L << 30);
    (void)snprintf(fake_config.session, sizeof(fake_config.session), "%s",
                   session == NULL ? "fakecuda" : session);
    select_visible(physical, read_physical(physical));
    if (open_control() < 0) {
        return FAKE_ERROR_UNKNOWN;
    }
    for (int i = 0; i < fake_device_count; i++) {
        contexts[i].ordinal = i;
    }
    return fake_device_count == 0 ? ARL_CUDA_ERROR_NO_DEVICE : 0;
}

/* ---- failures and misuse -------------------------------------------------------------------- */

typedef struct failure {
    char name[48]; /* or "any" */
    long nth;      /* counted from 1; 0: unused */
    long seen;
    int code;
} failure_t;

static failure_t failures[8];
static long calls_total;
static bool failures_read;

FAKE_EXPORT void fake_cuda_fail(const char *name, long nth, int code);
FAKE_EXPORT long fake_cuda_calls(void);
FAKE_EXPORT void fake_cuda_fail_clear(void);

FAKE_EXPORT void
fake_cuda_fail(const char *name, long nth, int code)
{
    for (size_t i = 0; i < sizeof(failures) / sizeof(failures[0]); i++) {
        if (failures[i].nth == 0) {
            (void)snprintf(failures[i].name, sizeof(failures[i].name), "%s", name);
            failures[i].nth = nth;
            failures[i].seen = 0;
            failures[i].code = code == 0 ? FAKE_ERROR_UNKNOWN : code;
            return;
        }
    }
}

FAKE_EXPORT void
fake_cuda_fail_clear(void)
{
    memset(failures, 0, sizeof(failures));
}

/* Calls that can fail, made so far: the bound for a sweep over n. */
FAKE_EXPORT long
fake_cuda_calls(void)
{
    return calls_total;
}

/* FAKE_CUDA_FAIL="cuMemAlloc_v2:2,any:17:2" */
static void
failures_from_environment(void)
{
    const char *text = getenv("FAKE_CUDA_FAIL");
    char copy[256], *rest = NULL;

    failures_read = true;
    if (text == NULL) {
        return;
    }
    (void)snprintf(copy, sizeof(copy), "%s", text);
    for (char *item = strtok_r(copy, ",", &rest); item != NULL; item = strtok_r(NULL, ",", &rest)) {
        char name[48];
        long nth = 0;
        int code = 0;

        if (sscanf(item, "%47[^:]:%ld:%d", name, &nth, &code) >= 2) {
            fake_cuda_fail(name, nth, code);
        }
    }
}

int
fake_fail_point(const char *name)
{
    int code = 0;

    (void)pthread_mutex_lock(&fake_lock);
    if (!failures_read) {
        failures_from_environment();
    }
    calls_total++;
    for (size_t i = 0; i < sizeof(failures) / sizeof(failures[0]); i++) {
        failure_t *failure = &failures[i];

        if (failure->nth > 0 &&
            (strcmp(failure->name, "any") == 0 || strcmp(failure->name, name) == 0)) {
            failure->seen++;
            if (failure->seen == failure->nth) {
                code = failure->code;
            }
        }
    }
    (void)pthread_mutex_unlock(&fake_lock);
    return code;
}

void
fake_misuse(const char *format, ...)
{
    char text[240];
    va_list args;

    va_start(args, format);
    (void)vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    if (fake_control != NULL && atomic_fetch_add(&fake_control->misuse_count, 1) == 0) {
        (void)snprintf(fake_control->first_misuse, sizeof(fake_control->first_misuse), "%s", text);
    }
    (void)fprintf(stderr, "fake CUDA: %s\n", text);
}

const char *
fake_session(void)
{
    return fake_config.session;
}

/* A number that no other process of the session gets. */
long long
fake_serial(void)
{
    return atomic_fetch_add(&fake_control->serial, 1);
}

FAKE_EXPORT long fake_cuda_live(int what);
FAKE_EXPORT long
fake_cuda_live(int what)
{
    return fake_live[what];
}

/* ---- start and errors ----------------------------------------------------------------------- */

FAKE_EXPORT arl_cuInit_fn cuInit;
FAKE_EXPORT arl_cu_result_t
cuInit(unsigned int flags)
{
    int code;

    FAKE_FAIL();
    if (flags != 0) {
        return ARL_CUDA_ERROR_INVALID_VALUE;
    }
    (void)pthread_mutex_lock(&fake_lock);
    if (!fake_initialised) {
        code = initialise();
        fake_initialised = code == 0;
        fake_initialised_pid = getpid();
    }
    else { /* not in the child of a process that has initialised it */
        code = fake_initialised_pid == getpid() ? 0 : ARL_CUDA_ERROR_NOT_INITIALIZED;
    }
    (void)pthread_mutex_unlock(&fake_lock);
    return code;
}

FAKE_EXPORT arl_cuDriverGetVersion_fn cuDriverGetVersion;
FAKE_EXPORT arl_cu_result_t
cuDriverGetVersion(int *version)
{
    FAKE_FAIL();
    *version = (int)env_long("FAKE_CUDA_DRIVER_VERSION", 13000);
    return 0;
}

static const struct {
    int code;
    const char *name;
    const char *text;
} errors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported"},
    {218, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

FAKE_EXPORT arl_cuGetErrorName_fn cuGetErrorName;
FAKE_EXPORT arl_cu_result_t
cuGetErrorName(arl_cu_result_t error, const char **name)
{
    for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++) {
        if (errors[i].code == error) {
            *name = errors[i].name;
            return 0;
        }
    }
    *name = NULL;
    return ARL_CUDA_ERROR_INVALID_VALUE;
}

FAKE_EXPORT arl_cuGetErrorString_fn cuGetErrorString;
FAKE_EXPORT arl_cu_result_t
cuGetErrorString(arl_cu_result_t error, const char **text)
{
    for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++) {
        if (errors[i].code == error) {
            *text = errors[i].text;
            return 0;
        }
    }
    *text = NULL;
    return ARL_CUDA_ERROR_INVALID_VALUE;
}

/* ---- devices -------------------------------------------------------------------------------- */

FAKE_EXPORT arl_cuDeviceGetCount_fn cuDeviceGetCount;
FAKE_EXPORT arl_cu_result_t
cuDeviceGetCount(int *count)
{
    FAKE_FAIL();
    NEED_INIT();
    *count = fake_device_count;
    return 0;
}

FAKE_EXPORT arl_cuDeviceGet_fn cuDeviceGet;
FAKE_EXPORT arl_cu_result_t
cuDeviceGet(arl_cu_device_t *device, int ordinal)
{
    FAKE_FAIL();
    NEED_DEVICE(ordinal);
    *device = ordinal;
    return 0;
}

FAKE_EXPORT arl_cuDeviceGetName_fn cuDeviceGetName;
FAKE_EXPORT arl_cu_result_t
cuDeviceGetName(char *name, int size, arl_cu_device_t device)
{
    FAKE_FAIL();
    NEED_DEVICE(device);
    (void)snprintf(name, (size_t)size, "Fake GPU %d%s", fake_devices[device].physical,
                   fake_devices[device].mig ? " MIG 1g" : "");
    return 0;
}

FAKE_EXPORT arl_cuDeviceGetUuid_v2_fn cuDeviceGetUuid_v2;
FAKE_EXPORT arl_cu_result_t
cuDeviceGetUuid_v2(arl_cu_uuid_t *uuid, arl_cu_device_t device)
{
    FAKE_FAIL();
    NEED_DEVICE(device);
    memcpy(uuid->bytes, fake_devices[device].uuid, sizeof(uuid->bytes));
    return 0;
}

FAKE_EXPORT arl_cuDeviceTotalMem_v2_fn cuDeviceTotalMem_v2;
FAKE_EXPORT arl_cu_result_t
cuDeviceTotalMem_v2(size_t *bytes, arl_cu_device_t device)
{
    FAKE_FAIL();
    NEED_DEVICE(device);
    *bytes = fake_config.memory;
    return 0;
}

FAKE_EXPORT arl_cuDeviceGetAttribute_fn cuDeviceGetAttribute;
FAKE_EXPORT arl_cu_result_t
cuDeviceGetAttribute(int *value, arl_cu_device_attribute_t attribute, arl_cu_device_t device)
{
    FAKE_FAIL();
    NEED_DEVICE(device);
    switch (attribute) {
    case ARL_CUDA_DEVICE_SM_COUNT:
        *value = 3; /* odd, so that work does not divide evenly */
        return 0;
    case ARL_CUDA_DEVICE_CC_MAJOR:
        *value = 9;
        return 0;
    case ARL_CUDA_DEVICE_CC_MINOR:
        *value = 0;
        return 0;
    default:
        return ARL_CUDA_ERROR_INVALID_VALUE;
    }
}

FAKE_EXPORT arl_cuDeviceCanAccessPeer_fn cuDeviceCanAccessPeer;
FAKE_EXPORT arl_cu_result_t
cuDeviceCanAccessPeer(int *can, arl_cu_device_t device, arl_cu_device_t peer)
{
    FAKE_FAIL();
    NEED_DEVICE(device);
    NEED_DEVICE(peer);
    *can = device != peer && !fake_config.no_peer && !fake_devices[device].mig &&
           !fake_devices[peer].mig;
    return 0;
}

/* ---- contexts ------------------------------------------------------------------------------- */

struct arl_cu_context *
fake_current(void)
{
    return stack_depth == 0 ? NULL : stack[stack_depth - 1];
}

FAKE_EXPORT int
fake_current_ordinal(void)
{
    return fake_current() == NULL ? -1 : fake_current()->ordinal;
}

FAKE_EXPORT int
fake_current_physical(void)
{
    return fake_current() == NULL ? -1 : fake_devices[fake_current()->ordinal].physical;
}

FAKE_EXPORT arl_cuDevicePrimaryCtxRetain_fn cuDevicePrimaryCtxRetain;
FAKE_EXPORT arl_cu_result_t
cuDevicePrimaryCtxRetain(arl_cu_context_t *context, arl_cu_device_t device)
{
    FAKE_FAIL();
    NEED_DEVICE(device);
    (void)pthread_mutex_lock(&fake_lock);
    contexts[device].retained++;
    fake_live[FAKE_CONTEXTS]++;
    (void)pthread_mutex_unlock(&fake_lock);
    *context = &contexts[device];
    return 0;
}

FAKE_EXPORT arl_cuDevicePrimaryCtxRelease_v2_fn cuDevicePrimaryCtxRelease_v2;
FAKE_EXPORT arl_cu_result_t
cuDevicePrimaryCtxRelease_v2(arl_cu_device_t device)
{
    const int code =
        fake_fail_point(__func__); /* reports an older failure, releases all the same */

    NEED_DEVICE(device);
    (void)pthread_mutex_lock(&fake_lock);
    if (contexts[device].retained == 0) {
        fake_misuse("primary context %d released more often than retained", device);
    }
    else {
        contexts[device].retained--;
        fake_live[FAKE_CONTEXTS]--;
    }
    (void)pthread_mutex_unlock(&fake_lock);
    return code;
}

FAKE_EXPORT arl_cuCtxPushCurrent_v2_fn cuCtxPushCurrent_v2;
FAKE_EXPORT arl_cu_result_t
cuCtxPushCurrent_v2(arl_cu_context_t context)
{
    FAKE_FAIL();
    NEED_INIT();
    if (context == NULL || context->retained == 0 || stack_depth == FAKE_STACK_MAX) {
        return ARL_CUDA_ERROR_INVALID_CONTEXT;
    }
    stack[stack_depth++] = context;
    return 0;
}

FAKE_EXPORT arl_cuCtxPopCurrent_v2_fn cuCtxPopCurrent_v2;
FAKE_EXPORT arl_cu_result_t
cuCtxPopCurrent_v2(arl_cu_context_t *context)
{
    const int code = fake_fail_point(__func__);

    NEED_INIT();
    if (stack_depth == 0) {
        fake_misuse("context popped that was not pushed");
        return ARL_CUDA_ERROR_INVALID_CONTEXT;
    }
    *context = stack[--stack_depth];
    return code;
}

FAKE_EXPORT int fake_cuda_depth(void);
FAKE_EXPORT int
fake_cuda_depth(void)
{
    return stack_depth;
}

FAKE_EXPORT arl_cuCtxEnablePeerAccess_fn cuCtxEnablePeerAccess;
FAKE_EXPORT arl_cu_result_t
cuCtxEnablePeerAccess(arl_cu_context_t peer, unsigned int flags)
{
    int can = 0;

    FAKE_FAIL();
    NEED_CONTEXT();
    if (flags != 0 || peer == NULL || peer == fake_current()) {
        return ARL_CUDA_ERROR_INVALID_VALUE;
    }
    (void)cuDeviceCanAccessPeer(&can, fake_current()->ordinal, peer->ordinal);
    if (!can) {
        return FAKE_ERROR_PEER_UNSUPPORTED;
    }
    if ((fake_current()->peers & 1U << peer->ordinal) != 0) {
        return ARL_CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    }
    fake_current()->peers |= 1U << peer->ordinal;
    return 0;
}
