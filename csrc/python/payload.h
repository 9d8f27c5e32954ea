/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_PYTHON_PAYLOAD_H
#define ARL_PYTHON_PAYLOAD_H

#include "python/state.h"

#include <stdbool.h>

/*
 * Payloads: {"batch", "meta", "processing"}, as the two generations of the server read them
 * (contract 3 and 4). payload.c puts them together; payload_rules.c knows the config,
 * payload_rows.c the incoming batch, payload_meta.c the scalars, payload_check.c what would go
 * wrong on the server.
 */

/* Config values that travel in meta as they are. */
#define ARL_PAYLOAD_RULE_OBJECTS(X)                                                                \
    X(zorro_train_enable)                                                                          \
    X(zorro_train_max_rollouts)                                                                    \
    X(load_balancer)                                                                               \
    X(max_token_len_per_gpu)                                                                       \
    X(drop_position_ids)                                                                           \
    X(logits_optimization)                                                                         \
    X(logits_optimization_peak_mem_size_in_gib)                                                    \
    X(logits_compute_in_fp32)

/* What the config says about payloads, read once per client. Zero-initialise. */
typedef struct arl_payload_rules {
    bool final;          /* nested generation: mini-batches, more meta; else one whole batch */
    bool zorro;          /* prompt sharing */
    bool balances;       /* the server reorders rows over its ranks */
    bool drop_positions; /* position ids stay home */
    int64_t rollout_n;
    int64_t max_rollouts;
    int64_t max_token_len;
    int64_t training_ranks;
    int64_t reference_ranks;
    int64_t accumulation; /* micro-batches a rank makes of its rows */
    int64_t train_batch_size;
    int64_t mini_batch_size;
    int64_t epochs;
#define ARL_PAYLOAD_RULE_FIELD(name) PyObject *name;
    ARL_PAYLOAD_RULE_OBJECTS(ARL_PAYLOAD_RULE_FIELD)
#undef ARL_PAYLOAD_RULE_FIELD
} arl_payload_rules_t;

/* `config` is in the normalised form. ConfigError names the key that is missing or wrong. */
int arl_payload_rules_init(arl_state_t *state, PyObject *config, arl_payload_rules_t *rules);
int arl_payload_rules_traverse(arl_payload_rules_t *rules, visitproc visit, void *arg);
void arl_payload_rules_clear(arl_payload_rules_t *rules);

/* Steps of one epoch: train_batch_size / mini_batch_size, or 1 in the flat generation. -1 with
 * ConfigError where the sizes do not divide. */
int64_t arl_payload_minibatches(arl_state_t *state, const arl_payload_rules_t *rules,
                                const char *operation);

/* Things said once: one bit each in arl_payload_request_t.warned. */
typedef enum arl_payload_warning {
    ARL_WARN_IS_WEIGHTS,
    ARL_WARN_MASK_LAYOUT,
    ARL_WARN_RESPONSE_WIDTH,
    ARL_WARN_JAGGED_BALANCER,
    ARL_WARN_LOSS_OPTIONS,
    ARL_WARN_ENTROPY_SLOT,
    ARL_WARN_REFERENCE_SIZE,
    ARL_WARN_DECODES,
    ARL_WARN_ROUTING_KEY,
    ARL_WARN_STRICT,
} arl_payload_warning_t;

/* One call of a builder. References are the caller's. */
typedef struct arl_payload_request {
    const char *operation; /* "update_actor", for messages */
    const arl_payload_rules_t *rules;
    PyObject *data;
    PyObject *pad_token_id;
    PyObject *rollout_n;    /* an int; NULL: the config's */
    PyObject *temperature;  /* the caller's, or NULL: data's alone counts */
    PyObject *actor_config; /* update only */
    bool calculate_entropy; /* log-prob only */
    bool reference;         /* log-prob only */
    bool temperature_in_log_prob;
    bool server_limits; /* check for what the published server cannot do */
    unsigned *warned;   /* bits of arl_payload_warning_t; NULL: say it each time */
} arl_payload_request_t;

/* Facts about what was built that shaping the response needs. */
typedef struct arl_payload_facts {
    int64_t rows;
    int64_t width; /* P + R */
} arl_payload_facts_t;

/* A payload dict, and a list of the payloads of one epoch with (optionally) the row lengths. */
PyObject *arl_payload_log_prob(arl_state_t *state, const arl_payload_request_t *request,
                               arl_payload_facts_t *facts_p);
PyObject *arl_payload_update(arl_state_t *state, const arl_payload_request_t *request,
                             PyObject **global_token_num_p);

/* A payload that the server may write into, over the same tensors. */
PyObject *arl_payload_copy(arl_state_t *state, PyObject *payload);

/* Emits a UserWarning unless `bit` was said before. `format` is for PyUnicode_FromFormat. */
int arl_payload_warn(unsigned *warned, arl_payload_warning_t bit, const char *format, ...);

/*
 * `data[key]`, unwrapped when it is a non-tensor wrapper. Returns 1 with a new reference, 0 when
 * there is no such key, -1 on error; _require makes the second a PayloadError.
 */
int arl_payload_data_get(arl_state_t *state, PyObject *data, PyObject *key, PyObject **value_p);
PyObject *arl_payload_data_require(arl_state_t *state, PyObject *data, PyObject *key,
                                   const char *operation);

#endif
