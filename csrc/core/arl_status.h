/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_STATUS_H
#define ARL_CORE_STATUS_H

#include <stddef.h>
#include <stdint.h>

/*
 * One status type for all of csrc: 0 is success, negative is failure. Numbers of other
 * domains (errno, cudaError_t, CUresult, ncclResult_t) are never returned as a status; they
 * travel in arl_error_t beside the domain they belong to.
 *
 * The groups say what is lost: the call alone (-1..), the peer (-20..), or the receiver's
 * weights (-30..). Each code maps to one Python exception, in csrc/python/errors.c.
 */
#define ARL_STATUS_TABLE(X)                                                                        \
    /* the call: nothing changed, it may be made again */                                          \
    X(ARL_ERR_NOMEM, -1, "out of memory")                                                          \
    X(ARL_ERR_TYPE, -2, "wrong type")                                                              \
    X(ARL_ERR_VALUE, -3, "wrong value")                                                            \
    X(ARL_ERR_CONFIG, -4, "configuration error")                                                   \
    X(ARL_ERR_PAYLOAD, -5, "payload error")                                                        \
    X(ARL_ERR_WIRE, -6, "wire format error")                                                       \
    X(ARL_ERR_SYSTEM, -7, "system call failed")                                                    \
    X(ARL_ERR_UNAVAILABLE, -8, "transport unavailable")                                            \
    X(ARL_ERR_CLOSED, -9, "object is closed")                                                      \
    X(ARL_ERR_INTERRUPTED, -10, "interrupted")                                                     \
    X(ARL_ERR_PROCESS, -11, "used in another process")                                             \
    /* the peer or the exchange with it */                                                         \
    X(ARL_ERR_SYNC, -20, "weight sync failed")                                                     \
    X(ARL_ERR_MISMATCH, -21, "weights do not match")                                               \
    X(ARL_ERR_TIMEOUT, -22, "peer timed out")                                                      \
    X(ARL_ERR_PEER_LOST, -23, "peer lost")                                                         \
    /* the receiver's weights */                                                                   \
    X(ARL_ERR_TORN, -30, "weights are torn")

typedef enum arl_status {
    ARL_OK = 0,
#define ARL_STATUS_ENUM(name, value, text) name = (value),
    ARL_STATUS_TABLE(ARL_STATUS_ENUM)
#undef ARL_STATUS_ENUM
} arl_status_t;

/* Whose number `foreign` is. */
typedef enum arl_domain {
    ARL_DOMAIN_NONE = 0,
    ARL_DOMAIN_ERRNO,
    ARL_DOMAIN_CUDA_RUNTIME,
    ARL_DOMAIN_CUDA_DRIVER,
    ARL_DOMAIN_NCCL,
} arl_domain_t;

enum { ARL_ERROR_TEXT_MAX = 4096, ARL_ERROR_OPERATION_MAX = 64 };

/*
 * The description of a failure, filled once, by the function that detected it. A second
 * arl_error_set on a filled record is ignored: the first error wins, and cleanup that fails
 * afterwards cannot hide it.
 */
typedef struct arl_error {
    arl_status_t code;
    arl_domain_t domain;
    int64_t foreign; /* number in `domain`, 0 when none */
    int rank;        /* peer's rank, -1 when not about one */
    char operation[ARL_ERROR_OPERATION_MAX];
    char text[ARL_ERROR_TEXT_MAX];
} arl_error_t;

#define ARL_ERROR_INIT                                                                             \
    {                                                                                              \
        .code = ARL_OK, .domain = ARL_DOMAIN_NONE, .foreign = 0, .rank = -1, .operation = "",      \
        .text = ""                                                                                 \
    }

const char *arl_status_name(arl_status_t status);
const char *arl_status_text(arl_status_t status);
const char *arl_domain_name(arl_domain_t domain);

/* Fills `err` unless it is filled already, and returns `code` of the first failure. The text
 * says what was found, what was wanted and what to do; `operation` names the call. `err` may be
 * NULL: then only the code travels. */
arl_status_t arl_error_set(arl_error_t *err, arl_status_t code, const char *operation,
                           const char *format, ...) __attribute__((format(printf, 4, 5)));

/* The same for a failed system call; appends ": " and strerror(errnum). */
arl_status_t arl_error_set_errno(arl_error_t *err, const char *operation, int errnum,
                                 const char *format, ...) __attribute__((format(printf, 4, 5)));

/* The same with a foreign library's number; its name and text belong into `format`. */
arl_status_t arl_error_set_foreign(arl_error_t *err, arl_status_t code, arl_domain_t domain,
                                   int64_t foreign, const char *operation, const char *format, ...)
    __attribute__((format(printf, 6, 7)));

/* Hands a failure on that was described in a record of its own. Unless `err` is filled already. */
arl_status_t arl_error_copy(arl_error_t *err, const arl_error_t *from);

/* Empties a record so that it can be used for another call. */
void arl_error_clear(arl_error_t *err);

/* Names that say they jump. `label` undoes what was done so far, in reverse order. */
#define ARL_CHECK_GOTO(status, expression, label)                                                  \
    do {                                                                                           \
        (status) = (expression);                                                                   \
        if ((status) != ARL_OK) {                                                                  \
            goto label;                                                                            \
        }                                                                                          \
    } while (0)

#endif
