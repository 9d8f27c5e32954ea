/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_PYTHON_PAYLOAD_ROWS_H
#define ARL_PYTHON_PAYLOAD_ROWS_H

#include "python/batch.h"
#include "python/payload.h"

/* Shared by the payload_*.c files, and by nobody else. */

/* The incoming batch, opened: what all payloads need of it. Zero-initialise; close is then safe
 * at any time, also twice. */
typedef struct arl_payload_rows {
    arl_nested_t input_ids;
    arl_batch_layout_t layout;
    int64_t width; /* prompt_width + response_width */
    bool jagged;   /* prompts and responses came nested */
    PyObject *prompts;
    PyObject *responses;
    PyObject *attention_mask; /* as it came; made from the lengths where a jagged batch has none */
} arl_payload_rows_t;

int arl_payload_rows_open(arl_state_t *state, const arl_payload_request_t *request,
                          arl_payload_rows_t *rows);
void arl_payload_rows_close(arl_payload_rows_t *rows);

/* position_ids, opened against `rows`: one-dimensional, integers, the same row lengths. */
int arl_payload_positions_import(arl_state_t *state, const arl_payload_request_t *request,
                                 PyObject *object, const arl_payload_rows_t *rows,
                                 arl_nested_t *positions_p);

/* A response-only tensor [rows, R], left-padded to the batch's width (contract 3.5). */
PyObject *arl_payload_response_column(arl_state_t *state, const arl_payload_request_t *request,
                                      PyObject *key, const char *kinds,
                                      const arl_payload_rows_t *rows);

/* Rows [begin, end) of a dense tensor or array: a view. */
PyObject *arl_payload_slice(arl_state_t *state, PyObject *tensor, int64_t begin, int64_t end);

/* Rows [begin, end) of a jagged batch: a view of the values under new offsets. `nested` is
 * `object`, imported. */
PyObject *arl_payload_slice_nested(arl_state_t *state, PyObject *object, const arl_nested_t *nested,
                                   int64_t begin, int64_t end);

/* ---- payload_build.c ------------------------------------------------------------------------- */

enum { ARL_PAYLOAD_COLUMNS_MAX = 10 };

typedef struct arl_payload_column {
    PyObject *name;             /* borrowed from state */
    PyObject *value;            /* strong; all rows */
    const arl_nested_t *nested; /* `value` imported, where it is jagged and has to be cut */
} arl_payload_column_t;

/* The batch, in the order in which it is sent. Zero-initialise. */
typedef struct arl_payload_columns {
    arl_payload_column_t column[ARL_PAYLOAD_COLUMNS_MAX];
    int count;
} arl_payload_columns_t;

void arl_payload_columns_release(arl_payload_columns_t *columns);

/* Steals `value`; NULL is an error that has been raised. */
int arl_payload_column_add(arl_payload_columns_t *columns, PyObject *name, PyObject *value,
                           const arl_nested_t *nested);

/* ids, [positions], mask, prompts: the head of every batch; positions once more, where the nested
 * generation writes them, if at all. */
int arl_payload_add_head(arl_state_t *state, const arl_payload_request_t *request,
                         const arl_payload_rows_t *rows, PyObject *pad_token_id,
                         arl_payload_columns_t *columns);
int arl_payload_add_positions(arl_state_t *state, const arl_payload_request_t *request,
                              const arl_payload_rows_t *rows, arl_payload_columns_t *columns);

/* The batch dict of rows [begin, end); `whole` says that these are all. */
PyObject *arl_payload_columns_dict(arl_state_t *state, const arl_payload_columns_t *columns,
                                   int64_t begin, int64_t end, bool whole);

/* Steals the three parts; any of them may be NULL after an error. */
PyObject *arl_payload_new(arl_state_t *state, PyObject *batch, PyObject *meta,
                          PyObject *processing);

/* The checks that both kinds of payload need, for batches of `batch_rows`. */
int arl_payload_check_common(arl_state_t *state, const arl_payload_request_t *request,
                             const arl_payload_rows_t *rows, int64_t batch_rows);

/* ---- payload_check.c: before anything is built, then before it is sent ----------------------- */

int arl_payload_check_limits(arl_state_t *state, const arl_payload_request_t *request,
                             const arl_payload_rows_t *rows, int64_t batch_rows);
int arl_payload_check_groups(arl_state_t *state, const arl_payload_request_t *request,
                             const arl_payload_rows_t *rows, int64_t rollout_n, int64_t batch_rows);
int arl_payload_check_positions(arl_state_t *state, const arl_payload_request_t *request,
                                const arl_payload_rows_t *rows);
int arl_payload_check_mask(arl_state_t *state, const arl_payload_request_t *request,
                           const arl_payload_rows_t *rows);
/* `actor` and `policy` are plain dicts (arl_payload_plain). */
int arl_payload_check_loss(arl_state_t *state, const arl_payload_request_t *request,
                           PyObject *actor, PyObject *policy);

/* ---- payload_meta.c, payload_plain.c --------------------------------------------------------- */

/* Every key of meta, in no order; the orders are in payload_meta.c. */
#define ARL_PAYLOAD_META_KEYS(X)                                                                   \
    X(zorro_train_enable)                                                                          \
    X(zorro_train_max_rollouts)                                                                    \
    X(load_balancer)                                                                               \
    X(rollout_n)                                                                                   \
    X(max_prompt_len)                                                                              \
    X(max_response_len)                                                                            \
    X(max_token_len_per_gpu)                                                                       \
    X(temperature)                                                                                 \
    X(calculate_entropy)                                                                           \
    X(pad_token_id)                                                                                \
    X(drop_position_ids)                                                                           \
    X(logits_optimization)                                                                         \
    X(logits_optimization_peak_mem_size_in_gib)                                                    \
    X(logits_compute_in_fp32)                                                                      \
    X(global_batch_size)                                                                           \
    X(batch_num_tokens)                                                                            \
    X(rollout_is_weights)                                                                          \
    X(actor_config)                                                                                \
    X(policy_loss_config)

/* The values of meta, as they go in: strong references. Zero-initialise. */
typedef struct arl_payload_meta {
#define ARL_META_FIELD(name) PyObject *name;
    ARL_PAYLOAD_META_KEYS(ARL_META_FIELD)
#undef ARL_META_FIELD
} arl_payload_meta_t;

/* Fills what the config, the request and the layout say. */
int arl_payload_meta_open(arl_state_t *state, const arl_payload_request_t *request,
                          const arl_payload_rows_t *rows, arl_payload_meta_t *meta);
void arl_payload_meta_close(arl_payload_meta_t *meta);
PyObject *arl_payload_meta_dict(arl_state_t *state, const arl_payload_meta_t *meta, bool final,
                                bool update);
PyObject *arl_payload_processing(arl_state_t *state, bool temperature, bool update);

/* rollout_n of the request as a number. */
int arl_payload_rollout_n(arl_state_t *state, const arl_payload_request_t *request,
                          int64_t *rollout_n_p);

/* A copy of what arl_payload_plain made, dicts and lists anew. */
PyObject *arl_payload_renew(PyObject *plain);

/* `object`'s attributes as JSON would give them back; {} for None. */
PyObject *arl_payload_plain(arl_state_t *state, PyObject *object, const char *key);

#endif
