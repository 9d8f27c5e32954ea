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

/* RuntimeError before __init__; _open adds ClosedError after destroy(). */
int arl_client_check_ready(const arl_client_t *client, const char *operation);
int arl_client_check_open(const arl_client_t *client, const char *operation);

/* Methods, in client_train.c, client_generate.c and client_calls.c. */
#define ARL_CLIENT_METHODS(X)                                                                      \
    X(compute_log_prob)                                                                            \
    X(update_actor)                                                                                \
    X(log_probs_to_nested)                                                                         \
    X(generate)                                                                                    \
    X(sync_weights)                                                                                \
    X(save_checkpoint)                                                                             \
    X(load_checkpoint)                                                                             \
    X(wake_up_inference)                                                                           \
    X(sleep_inference)
#define ARL_CLIENT_METHODS_NOARGS(X)                                                               \
    X(reset_prefix_cache)                                                                          \
    X(reconnect_handle)                                                                            \
    X(destroy)

#define ARL_CLIENT_DECLARE(name)                                                                   \
    PyObject *arl_client_##name(PyObject *self, PyObject *const *args, Py_ssize_t nargs,           \
                                PyObject *kwnames);                                                \
    extern const char arl_client_##name##_doc[];
ARL_CLIENT_METHODS(ARL_CLIENT_DECLARE)
#undef ARL_CLIENT_DECLARE
#define ARL_CLIENT_DECLARE(name)                                                                   \
    PyObject *arl_client_##name(PyObject *self, PyObject *ignored);                                \
    extern const char arl_client_##name##_doc[];
ARL_CLIENT_METHODS_NOARGS(ARL_CLIENT_DECLARE)
#undef ARL_CLIENT_DECLARE

#endif
