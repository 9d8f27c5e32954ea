/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_PYTHON_OPERATION_H
#define ARL_PYTHON_OPERATION_H

#include "python/client.h"

/*
 * What an operation of the client returns: an awaitable that calls the transport, drives what the
 * call returned, and shapes the answer. One operation makes one call, or a chain of them; each
 * kind says what comes next. Nothing is called before the first send.
 */
typedef struct arl_operation arl_operation_t;

typedef struct arl_operation_kind {
    /*
     * The next thing to do. `answer` is what the last call gave, NULL at the start. Returns 1 with
     * a new awaitable in *next_p, 0 with the operation's result in *next_p, -1 on error.
     */
    int (*advance)(arl_operation_t *op, PyObject *answer, PyObject **next_p);
    /* Where an operation that failed had come to, for the note on its exception. */
    void (*describe)(const arl_operation_t *op, char *text, size_t size);
    /* Called once when an operation that has begun ends without a result; may be NULL. */
    void (*abandon)(arl_operation_t *op);
} arl_operation_kind_t;

typedef enum arl_operation_status {
    ARL_OPERATION_NEW,
    ARL_OPERATION_SUSPENDED, /* waiting for the transport */
    ARL_OPERATION_RUNNING,   /* inside send, throw or close */
    ARL_OPERATION_DONE,
} arl_operation_status_t;

#define ARL_OPERATION_OBJECTS(X)                                                                   \
    X(client)  /* arl_client_t */                                                                  \
    X(waiting) /* the iterator of the awaitable that is being driven */                            \
    X(method)  /* name of the transport's method, for single calls */                              \
    X(payload) /* log-prob: the payload; update: list of them; others: keywords of the call */     \
    X(lengths) /* update: global_token_num */                                                      \
    X(answers) /* update: metrics of each step so far */                                           \
    X(partial) /* update: metrics of the forward-backward whose step has not come yet */

struct arl_operation {
    PyObject_HEAD
    const arl_operation_kind_t *kind;
    const char *name; /* "update_actor" */
    arl_state_t *state;
    arl_operation_status_t status;
    bool awaited;
    bool wants_entropy; /* log-prob */
    bool reference;     /* log-prob */
    bool stepping;      /* update: the optimizer step is under way */
    bool closing;       /* destroy: this is the one that closes the client */
    int64_t rows;       /* log-prob: shape of what comes back; generate: prompts */
    int64_t width;
    int64_t minibatches; /* update: steps of one epoch */
    int64_t steps;       /* update: of all epochs */
    int64_t steps_done;
#define ARL_OPERATION_FIELD(name) PyObject *name;
    ARL_OPERATION_OBJECTS(ARL_OPERATION_FIELD)
#undef ARL_OPERATION_FIELD
};

/* A new operation of `client`, not yet begun; the caller fills in what its kind needs. */
arl_operation_t *arl_operation_new(arl_client_t *client, const arl_operation_kind_t *kind,
                                   const char *name);

/* Kinds. A single call returns the answer as it is, after `method(**payload)`. */
extern const arl_operation_kind_t arl_operation_single;
extern const arl_operation_kind_t arl_operation_generate;
extern const arl_operation_kind_t arl_operation_log_prob;
extern const arl_operation_kind_t arl_operation_update;
extern const arl_operation_kind_t arl_operation_reset_cache;
extern const arl_operation_kind_t arl_operation_destroy;

/* "metrics" of an answer, as a new dict; PayloadError says whose answer lacks it. */
PyObject *arl_operation_metrics(arl_operation_t *op, PyObject *answer, const char *method);

/* One member of an answer: a new reference, NULL with PayloadError. */
PyObject *arl_operation_member(arl_operation_t *op, PyObject *answer, PyObject *name,
                               const char *method);

#endif
