/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_status.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const char *
arl_status_name(arl_status_t status)
{
    switch (status) {
    case ARL_OK:
        return "ARL_OK";
#define ARL_STATUS_CASE(name, value, text)                                                         \
    case name:                                                                                     \
        return #name;
        ARL_STATUS_TABLE(ARL_STATUS_CASE)
#undef ARL_STATUS_CASE
    }
    return "ARL_ERR_?";
}

const char *
arl_status_text(arl_status_t status)
{
    switch (status) {
    case ARL_OK:
        return "ok";
#define ARL_STATUS_CASE(name, value, text)                                                         \
    case name:                                                                                     \
        return text;
        ARL_STATUS_TABLE(ARL_STATUS_CASE)
#undef ARL_STATUS_CASE
    }
    return "unknown status";
}

const char *
arl_domain_name(arl_domain_t domain)
{
    switch (domain) {
    case ARL_DOMAIN_NONE:
        return "none";
    case ARL_DOMAIN_ERRNO:
        return "errno";
    case ARL_DOMAIN_CUDA_RUNTIME:
        return "cudaError_t";
    case ARL_DOMAIN_CUDA_DRIVER:
        return "CUresult";
    case ARL_DOMAIN_NCCL:
        return "ncclResult_t";
    }
    return "?";
}

__attribute__((format(printf, 6, 0))) static void
error_vset(arl_error_t *err, arl_status_t code, arl_domain_t domain, int64_t foreign,
           const char *operation, const char *format, va_list args)
{
    err->code = code;
    err->domain = domain;
    err->foreign = foreign;
    (void)snprintf(err->operation, sizeof(err->operation), "%s", operation);
    (void)vsnprintf(err->text, sizeof(err->text), format, args);
}

arl_status_t
arl_error_set(arl_error_t *err, arl_status_t code, const char *operation, const char *format, ...)
{
    va_list args;

    if (err == NULL) {
        return code;
    }
    if (err->code != ARL_OK) {
        return err->code;
    }
    va_start(args, format);
    error_vset(err, code, ARL_DOMAIN_NONE, 0, operation, format, args);
    va_end(args);
    return code;
}

arl_status_t
arl_error_set_errno(arl_error_t *err, const char *operation, int errnum, const char *format, ...)
{
    arl_status_t code = (errnum == ENOMEM) ? ARL_ERR_NOMEM : ARL_ERR_SYSTEM;
    va_list args;
    size_t used;

    if (err == NULL) {
        return code;
    }
    if (err->code != ARL_OK) {
        return err->code;
    }
    va_start(args, format);
    error_vset(err, code, ARL_DOMAIN_ERRNO, errnum, operation, format, args);
    va_end(args);
    used = strlen(err->text);
    /* GNU strerror_r: thread-safe, and may return a static string instead of the buffer. */
    char reason[128];
    (void)snprintf(err->text + used, sizeof(err->text) - used, ": %s",
                   strerror_r(errnum, reason, sizeof(reason)));
    return code;
}

arl_status_t
arl_error_set_foreign(arl_error_t *err, arl_status_t code, arl_domain_t domain, int64_t foreign,
                      const char *operation, const char *format, ...)
{
    va_list args;

    if (err == NULL) {
        return code;
    }
    if (err->code != ARL_OK) {
        return err->code;
    }
    va_start(args, format);
    error_vset(err, code, domain, foreign, operation, format, args);
    va_end(args);
    return code;
}

arl_status_t
arl_error_copy(arl_error_t *err, const arl_error_t *from)
{
    if (err == NULL) {
        return from->code;
    }
    if (err->code == ARL_OK) {
        *err = *from;
    }
    return err->code;
}

void
arl_error_clear(arl_error_t *err)
{
    err->code = ARL_OK;
    err->domain = ARL_DOMAIN_NONE;
    err->foreign = 0;
    err->rank = -1;
    err->operation[0] = '\0';
    err->text[0] = '\0';
}
