/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nccl_api.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

void
arl_nccl_version_text(int version, char *text, size_t size)
{
    /* Up to 2.8 a minor version had one digit: 2804 is 2.8.4, 21903 is 2.19.3. */
    const int major = version < 10000 ? 1000 : 10000;

    (void)snprintf(text, size, "%d.%d.%d", version / major, version % major / 100, version % 100);
}

static bool
nccl_version(const void *table, int *version_p, char *reason, size_t size)
{
    const arl_nccl_api_t *api = table;
    arl_nccl_result_t result;

    if (api->ncclGetVersion == NULL) {
        return false;
    }
    result = api->ncclGetVersion(version_p);
    if (result != ARL_NCCL_SUCCESS) {
        (void)snprintf(reason, size, "ncclGetVersion failed with %d", (int)result);
        return false;
    }
    return true;
}

static const arl_symbol_t symbols[] = {
#define ARL_NCCL_SYMBOL(symbol, since, type, params)                                               \
    {.name = #symbol,                                                                              \
     .offset = offsetof(arl_nccl_api_t, symbol),                                                   \
     .min_version = (since),                                                                       \
     .required = true},
    ARL_NCCL_FUNCTIONS(ARL_NCCL_SYMBOL)
#undef ARL_NCCL_SYMBOL
};

static const arl_library_t library = {
    .title = "NCCL",
    .stem = "libnccl",
    .sonames = (const char *const[]){"libnccl.so.2", NULL},
    .wheel_folders = (const char *const[]){"nvidia/nccl/lib", NULL},
    .system_folders = (const char *const[]){"/usr/local/cuda/lib64", NULL},
    .override_env = "ARCTIC_RL_C_NCCL",
    .install_hint = "pip install 'arctic_rl_c[cuda13]' (or [cuda12]) installs it, and so does "
                    "torch with CUDA; ARCTIC_RL_C_NCCL=<path of libnccl.so.2> names one that lies "
                    "elsewhere.",
    .min_version = ARL_NCCL_VERSION_MIN,
    .symbols = symbols,
    .symbol_count = sizeof(symbols) / sizeof(symbols[0]),
    .version = nccl_version,
    .version_text = arl_nccl_version_text,
};

typedef struct loaded {
    arl_nccl_api_t api;
    arl_library_found_t found;
} loaded_t;

static _Atomic(loaded_t *) published;

arl_status_t
arl_nccl_load(const arl_nccl_api_t **api_p, arl_error_t *err)
{
    loaded_t *loaded = atomic_load(&published), *first = NULL;
    arl_error_t reason = ARL_ERROR_INIT;
    const arl_cuda_api_t *cuda;
    arl_status_t status;

    /* Also when the table is there: NCCL without a driver, or after a fork, must not be used. */
    status = arl_cuda_load(&cuda, &reason);
    if (status != ARL_OK) {
        return arl_error_set(err, status, "load NCCL", "NCCL needs the CUDA driver: %s",
                             reason.text);
    }
    if (loaded == NULL) {
        loaded = calloc(1, sizeof(*loaded));
        if (loaded == NULL) {
            return arl_error_set_errno(err, "load NCCL", errno, "%zu bytes", sizeof(*loaded));
        }
        status = arl_library_load(&library, &loaded->api, &loaded->found, err);
        if (status != ARL_OK) {
            free(loaded);
            return status;
        }
        if (!atomic_compare_exchange_strong(&published, &first, loaded)) {
            free(loaded); /* another thread was first; both tables are the same */
            loaded = first;
        }
    }
    *api_p = &loaded->api;
    return ARL_OK;
}

const arl_library_found_t *
arl_nccl_found(void)
{
    const loaded_t *loaded = atomic_load(&published);

    return loaded == NULL ? NULL : &loaded->found;
}

arl_status_t
arl_nccl_error_set(const arl_nccl_api_t *api, arl_error_t *err, arl_status_t code,
                   arl_nccl_result_t result, arl_nccl_comm_t comm, const char *operation,
                   const char *format, ...)
{
    const char *text = api->ncclGetErrorString(result);
    const char *last = api->ncclGetLastError(comm);
    char rest[ARL_ERROR_TEXT_MAX - 512];
    va_list args;

    va_start(args, format);
    (void)vsnprintf(rest, sizeof(rest), format, args);
    va_end(args);
    if (last == NULL || last[0] == '\0') {
        return arl_error_set_foreign(err, code, ARL_DOMAIN_NCCL, result, operation, "%s: %s: %s",
                                     operation, text == NULL ? "?" : text, rest);
    }
    return arl_error_set_foreign(err, code, ARL_DOMAIN_NCCL, result, operation,
                                 "%s: %s: %s; NCCL says: %.400s", operation,
                                 text == NULL ? "?" : text, rest, last);
}
