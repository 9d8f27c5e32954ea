/* SPDX-License-Identifier: Apache-2.0 */
/* Meta and processing: everything in a payload that is not a batch tensor (contract 4.1, 4.3). */
#include "python/payload_rows.h"

#include "python/errors.h"

#include <math.h>

/* ---- key order ------------------------------------------------------------------------------- */

typedef struct meta_key {
    size_t name;  /* offset of the interned name in the state */
    size_t value; /* offset of the value in arl_payload_meta_t */
} meta_key_t;

#define KEY(key)                                                                                   \
    {                                                                                              \
        offsetof(arl_state_t, names.key), offsetof(arl_payload_meta_t, key)                        \
    }

/* The orders in which the two generations of the client write their keys, per call. */
static const meta_key_t seed_log_prob[] = {
    KEY(zorro_train_enable), KEY(zorro_train_max_rollouts), KEY(rollout_n),
    KEY(max_prompt_len),     KEY(max_response_len),         KEY(max_token_len_per_gpu),
    KEY(temperature),        KEY(calculate_entropy),        KEY(pad_token_id),
};
static const meta_key_t seed_update[] = {
    KEY(rollout_n),
    KEY(max_prompt_len),
    KEY(max_response_len),
    KEY(max_token_len_per_gpu),
    KEY(temperature),
    KEY(zorro_train_enable),
    KEY(zorro_train_max_rollouts),
    KEY(global_batch_size),
    KEY(rollout_is_weights),
    KEY(batch_num_tokens),
    KEY(calculate_entropy),
    KEY(pad_token_id),
    KEY(actor_config),
    KEY(policy_loss_config),
};
#define FINAL_KEYS                                                                                 \
    KEY(zorro_train_enable), KEY(zorro_train_max_rollouts), KEY(load_balancer), KEY(rollout_n),    \
        KEY(max_prompt_len), KEY(max_response_len), KEY(max_token_len_per_gpu), KEY(temperature),  \
        KEY(calculate_entropy), KEY(pad_token_id), KEY(drop_position_ids),                         \
        KEY(logits_optimization), KEY(logits_optimization_peak_mem_size_in_gib),                   \
        KEY(logits_compute_in_fp32)
static const meta_key_t final_log_prob[] = {FINAL_KEYS};
static const meta_key_t final_update[] = {
    FINAL_KEYS,
    KEY(actor_config),
    KEY(policy_loss_config),
    KEY(global_batch_size),
    KEY(batch_num_tokens),
    KEY(rollout_is_weights),
};

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static const struct {
    const meta_key_t *keys;
    size_t count;
} orders[2][2] = {
    {{seed_log_prob, COUNT(seed_log_prob)}, {seed_update, COUNT(seed_update)}},
    {{final_log_prob, COUNT(final_log_prob)}, {final_update, COUNT(final_update)}},
};

PyObject *
arl_payload_meta_dict(arl_state_t *state, const arl_payload_meta_t *meta, bool final, bool update)
{
    const meta_key_t *keys = orders[final][update].keys;
    PyObject *dict = PyDict_New();

    for (size_t i = 0; dict != NULL && i < orders[final][update].count; i++) {
        PyObject *name = *(PyObject **)((char *)state + keys[i].name);
        PyObject *value = *(PyObject *const *)((const char *)meta + keys[i].value);

        if (PyDict_SetItem(dict, name, value) < 0) {
            Py_CLEAR(dict);
        }
    }
    return dict;
}

void
arl_payload_meta_close(arl_payload_meta_t *meta)
{
#define META_CLEAR(name) Py_CLEAR(meta->name);
    ARL_PAYLOAD_META_KEYS(META_CLEAR)
#undef META_CLEAR
}

/* ---- values ---------------------------------------------------------------------------------- */

/* A finite number above zero, as a Python float or int. */
static PyObject *
temperature_read(arl_state_t *state, const char *operation, PyObject *value)
{
    double number = PyBool_Check(value) ? NAN : PyFloat_AsDouble(value);
    bool failed = number == -1.0 && PyErr_Occurred();

    PyErr_Clear(); /* one message for all that is no number */
    if (failed || !isfinite(number) || number <= 0.0) {
        PyObject *text = PyObject_Repr(value);
        const char *shown = text == NULL ? NULL : PyUnicode_AsUTF8(text);

        PyErr_Clear();
        (void)arl_raise_format(state, ARL_ERR_PAYLOAD, operation,
                               "temperature: is %s, a finite number above 0 is needed (log-probs "
                               "are divided by it)",
                               shown == NULL ? arl_type_name(value) : shown);
        Py_XDECREF(text);
        return NULL;
    }
    return PyFloat_CheckExact(value) || PyLong_CheckExact(value) ? Py_NewRef(value)
                                                                 : PyFloat_FromDouble(number);
}

/* The batch's own temperature counts; a caller's is for batches that have none. */
static PyObject *
temperature_get(arl_state_t *state, const arl_payload_request_t *request)
{
    const char *operation = request->operation;
    PyObject *given = request->temperature, *value = NULL, *own, *asked;
    const int found = arl_payload_data_get(state, request->data, state->names.temperature, &value);

    if (found < 0) {
        return NULL;
    }
    if (found == 0) {
        if (given == NULL) {
            return arl_raise_format(state, ARL_ERR_PAYLOAD, operation,
                                    "%s: data has no 'temperature'; it is the one that the "
                                    "rollouts were sampled with",
                                    operation);
        }
        return temperature_read(state, operation, given);
    }
    own = temperature_read(state, operation, value);
    Py_DECREF(value);
    if (own == NULL || given == NULL) {
        return own;
    }
    asked = temperature_read(state, operation, given);
    if (asked != NULL && PyFloat_AsDouble(asked) != PyFloat_AsDouble(own)) {
        PyErr_Clear();
        (void)arl_raise_format(state, ARL_ERR_PAYLOAD, operation,
                               "temperature: the argument is %g, the batch was sampled with %g",
                               PyFloat_AsDouble(asked), PyFloat_AsDouble(own));
        Py_CLEAR(asked);
    }
    if (asked == NULL) {
        Py_DECREF(own);
        return NULL;
    }
    Py_DECREF(asked);
    return own;
}

/* An int, or something that says it is one (a NumPy integer); never a bool. */
static PyObject *
int_get(arl_state_t *state, const char *operation, const char *name, PyObject *value,
        const char *advice)
{
    if (value == NULL || PyBool_Check(value) || !PyIndex_Check(value)) {
        return arl_raise_format(
            state, ARL_ERR_PAYLOAD, operation, "%s: is %s, an int is needed%s", name,
            value == NULL || value == Py_None ? "None" : arl_type_name(value), advice);
    }
    return PyNumber_Index(value);
}

int
arl_payload_rollout_n(arl_state_t *state, const arl_payload_request_t *request,
                      int64_t *rollout_n_p)
{
    PyObject *value;
    int64_t number;

    if (request->rollout_n == NULL) {
        *rollout_n_p = request->rules->rollout_n;
        return 0;
    }
    value = int_get(state, request->operation, "rollout_n", request->rollout_n, "");
    if (value == NULL) {
        return -1;
    }
    number = PyLong_AsLongLong(value);
    Py_DECREF(value);
    if (number == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (number < 1) {
        (void)arl_raise_format(state, ARL_ERR_PAYLOAD, request->operation,
                               "rollout_n: is %lld, at least 1 is needed", (long long)number);
        return -1;
    }
    *rollout_n_p = number;
    return 0;
}

int
arl_payload_meta_open(arl_state_t *state, const arl_payload_request_t *request,
                      const arl_payload_rows_t *rows, arl_payload_meta_t *meta)
{
    const arl_payload_rules_t *rules = request->rules;
    int64_t rollout_n;

    if (arl_payload_rollout_n(state, request, &rollout_n) < 0) {
        return -1;
    }
#define META_FROM_RULES(name) meta->name = Py_NewRef(rules->name);
    ARL_PAYLOAD_RULE_OBJECTS(META_FROM_RULES)
#undef META_FROM_RULES
    meta->calculate_entropy = Py_NewRef(request->calculate_entropy ? Py_True : Py_False);
    meta->rollout_n = PyLong_FromLongLong(rollout_n);
    meta->max_prompt_len = PyLong_FromLongLong(rows->layout.prompt_width);
    meta->max_response_len = PyLong_FromLongLong(rows->layout.response_width);
    if (meta->rollout_n == NULL || meta->max_prompt_len == NULL || meta->max_response_len == NULL) {
        return -1;
    }
    meta->pad_token_id =
        int_get(state, request->operation, "pad_token_id", request->pad_token_id,
                "; a tokenizer without a pad token usually pads with its end token");
    if (meta->pad_token_id == NULL) {
        return -1;
    }
    meta->temperature = temperature_get(state, request);
    return meta->temperature == NULL ? -1 : 0;
}

/* ---- processing ------------------------------------------------------------------------------ */

PyObject *
arl_payload_processing(arl_state_t *state, bool temperature, bool update)
{
    PyObject *post, *processing;

    post = PyList_New(temperature ? 2 : 1);
    if (post == NULL) {
        return NULL;
    }
    if (temperature) {
        PyList_SET_ITEM(post, 0, Py_NewRef(state->names.apply_temperature));
    }
    PyList_SET_ITEM(post, temperature ? 1 : 0,
                    Py_NewRef(state->names.compute_entropy_and_logprobs));
    processing = PyDict_New();
    /* loss_fn is sent as None too: a server that finds no such key assumes one of its own. */
    if (processing == NULL || PyDict_SetItem(processing, state->names.post, post) < 0 ||
        PyDict_SetItem(processing, state->names.loss_fn,
                       update ? state->names.verl_grpo : Py_None) < 0) {
        Py_CLEAR(processing);
    }
    Py_DECREF(post);
    return processing;
}
