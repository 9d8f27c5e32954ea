/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_PYTHON_CLIENT_H
#define ARL_PYTHON_CLIENT_H

#include "python/payload.h"

/* How prompts travel. */
typedef enum arl_prompts_as {
    ARL_PROMPTS_AUTO, /* ids where the server takes them, else text, and say so once */
    ARL_PROMPTS_IDS,
    ARL_PROMPTS_TEXT,
} arl_prompts_as_t;

typedef enum arl_client_phase {
    ARL_CLIENT_OPEN,
    ARL_CLIENT_CLOSING, /* destroy() is under way */
    ARL_CLIENT_BROKEN,  /* destroy() failed: it may be tried again, nothing else may */
    ARL_CLIENT_CLOSED,
} arl_client_phase_t;

#define ARL_CLIENT_OBJECTS(X)                                                                      \
    X(transport)                                                                                   \
    X(config)    /* normalised */                                                                  \
    X(tokenizer) /* or None */                                                                     \
    X(cuda_ipc)  /* the stored flags of weight sync: Py_True, Py_False */                          \
    X(low_memory)

typedef struct arl_client {
    PyObject_HEAD
    arl_state_t *state;
    arl_payload_rules_t rules;
    arl_client_phase_t phase;
    arl_prompts_as_t prompts_as;
    bool owner; /* destroy() ends the server's jobs */
    bool temperature_in_log_prob;
    bool server_limits; /* the server has the limits of the published one */
    bool serves_reference;
    bool accepts_token_ids;
    bool accepts_routing_key;
    bool accepts_strict;
    int64_t context_limit; /* longest prompt + response of the sampler, in tokens */
    unsigned warned;       /* bits of arl_payload_warning_t */
#define ARL_CLIENT_FIELD(name) PyObject *name;
    ARL_CLIENT_OBJECTS(ARL_CLIENT_FIELD)
#undef ARL_CLIENT_FIELD
} arl_client_t;

/* ClosedError (or RuntimeError before __init__) unless `operation` may begin. */
int arl_client_check_open(const arl_client_t *client, const char *operation);

/* Methods that live in files of their own. */
PyObject *arl_client_compute_log_prob(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                                      PyObject *kwnames);
PyObject *arl_client_update_actor(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                                  PyObject *kwnames);
PyObject *arl_client_generate(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                              PyObject *kwnames);
extern const char arl_client_compute_log_prob_doc[];
extern const char arl_client_update_actor_doc[];
extern const char arl_client_generate_doc[];

#endif
