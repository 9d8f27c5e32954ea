/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The payloads of one update: one pass over the batch makes the padded tensors, mini-batches are
 * views of them. Every dict and list is its payload's own, because a server in this process writes
 * into them.
 */
#include "python/payload_rows.h"

#include "core/arl_rows.h"
#include "python/errors.h"

/* ---- reading --------------------------------------------------------------------------------- */

/* One update_actor on its way. Zero-initialise. */
typedef struct update {
    arl_payload_rows_t rows;
    arl_payload_meta_t meta;
    arl_payload_columns_t columns;
    arl_nested_t prompts;    /* imported only to be cut */
    arl_nested_t responses;  /* the same */
    arl_tensor_t count_mask; /* what batch_num_tokens counts: unpadded */
    PyObject *is_weights;    /* [rows, R], or None */
    bool use_kl_loss;
    int64_t minibatches;
    int64_t batch_rows;
} update_t;

static void
update_release(update_t *update)
{
    arl_payload_columns_release(&update->columns);
    arl_nested_release(&update->prompts);
    arl_nested_release(&update->responses);
    arl_tensor_release(&update->count_mask);
    Py_CLEAR(update->is_weights);
    arl_payload_meta_close(&update->meta);
    arl_payload_rows_close(&update->rows);
}

/* An option of actor_config: an attribute, or an entry of a dict; None where it has none. */
static PyObject *
option_get(PyObject *actor_config, PyObject *name)
{
    PyObject *value = PyDict_Check(actor_config) ? PyObject_GetItem(actor_config, name)
                                                 : PyObject_GetAttr(actor_config, name);

    if (value == NULL &&
        (PyErr_ExceptionMatches(PyExc_KeyError) || PyErr_ExceptionMatches(PyExc_AttributeError))) {
        PyErr_Clear();
        value = Py_NewRef(Py_None);
    }
    return value;
}

static int
option_is_true(PyObject *actor_config, PyObject *name)
{
    PyObject *value = option_get(actor_config, name);
    const int truth = value == NULL ? -1 : PyObject_IsTrue(value);

    Py_XDECREF(value);
    return truth;
}

static int
update_read_config(arl_state_t *state, const arl_payload_request_t *request, update_t *update)
{
    const int use_kl_loss = option_is_true(request->actor_config, state->names.use_kl_loss);
    const int entropy = use_kl_loss < 0
                            ? -1
                            : option_is_true(request->actor_config, state->names.calculate_entropy);
    PyObject *policy;

    if (entropy < 0) {
        return -1;
    }
    update->use_kl_loss = use_kl_loss > 0;
    Py_XSETREF(update->meta.calculate_entropy, Py_NewRef(entropy ? Py_True : Py_False));
    policy = option_get(request->actor_config, state->names.policy_loss);
    if (policy == NULL) {
        return -1;
    }
    update->meta.actor_config = arl_payload_plain(state, request->actor_config, "actor_config");
    if (update->meta.actor_config != NULL) {
        update->meta.policy_loss_config =
            arl_payload_plain(state, policy, "actor_config.policy_loss");
    }
    Py_DECREF(policy);
    if (update->meta.policy_loss_config == NULL) {
        return -1;
    }
    return arl_payload_check_loss(state, request, update->meta.actor_config,
                                  update->meta.policy_loss_config);
}

/* Importance weights ride in meta, as recorded; the server reads them nowhere else. */
static int
update_read_weights(arl_state_t *state, const arl_payload_request_t *request, update_t *update)
{
    arl_tensor_t tensor = {0};
    int64_t rows;
    const int found = arl_payload_data_get(state, request->data, state->names.rollout_is_weights,
                                           &update->is_weights);

    if (found < 0) {
        return -1;
    }
    if (found == 0) {
        update->is_weights = Py_NewRef(Py_None);
    }
    if (update->is_weights == Py_None) {
        return 0;
    }
    if (arl_tensor_import(state, update->is_weights, "rollout_is_weights", 0, ARL_ERR_PAYLOAD,
                          &tensor) < 0) {
        return -1;
    }
    rows = tensor.view.ndim == 2 ? tensor.view.shape[0] : -1;
    arl_tensor_release(&tensor);
    if (rows != update->rows.layout.rows) {
        (void)arl_raise_format(state, ARL_ERR_PAYLOAD, request->operation,
                               "rollout_is_weights: two dimensions and %lld rows are needed",
                               (long long)update->rows.layout.rows);
        return -1;
    }
    if (!request->server_limits) {
        return 0;
    }
    return arl_payload_warn(request->warned, ARL_WARN_IS_WEIGHTS,
                            "%s: rollout_is_weights travels in meta, where the server neither "
                            "shards nor aligns it with the tokens; its effect on the loss is not "
                            "what it says",
                            request->operation);
}

/* The flat generation counts loss_mask, the nested one response_mask; both unpadded. */
static int
update_read_count_mask(arl_state_t *state, const arl_payload_request_t *request, update_t *update)
{
    PyObject *key = request->rules->final ? state->names.response_mask : state->names.loss_mask;
    const char *name = PyUnicode_AsUTF8(key); /* interned ASCII: cannot fail */
    const arl_view_t *view = &update->count_mask.view;
    PyObject *object = arl_payload_data_require(state, request->data, key, request->operation);
    int status;
    char text[96];

    if (object == NULL) {
        return -1;
    }
    status = arl_tensor_import(state, object, name, ARL_TENSOR_CPU_ONLY, ARL_ERR_PAYLOAD,
                               &update->count_mask);
    Py_DECREF(object);
    if (status < 0) {
        return -1;
    }
    if (view->ndim == 2 && view->shape[0] == update->rows.layout.rows &&
        arl_rows_can_sum(view->dtype)) {
        return 0;
    }
    arl_view_describe(view, text, sizeof(text));
    (void)arl_raise_format(state, ARL_ERR_PAYLOAD, request->operation,
                           "%s: is %s, %lld rows of bool or integers are needed", name, text,
                           (long long)update->rows.layout.rows);
    return -1;
}

static int
update_read_batch_size(arl_state_t *state, const arl_payload_request_t *request, int64_t rollout_n,
                       update_t *update)
{
    const arl_payload_rules_t *rules = request->rules;
    int64_t size;

    if (!rules->final) {
        update->meta.global_batch_size = arl_payload_data_require(
            state, request->data, state->names.global_batch_size, request->operation);
        return update->meta.global_batch_size == NULL ? -1 : 0;
    }
    if (__builtin_mul_overflow(rules->mini_batch_size, rollout_n, &size)) {
        (void)arl_raise_format(state, ARL_ERR_CONFIG, request->operation,
                               "ppo_mini_batch_size times rollout_n overflows");
        return -1;
    }
    update->meta.global_batch_size = PyLong_FromLongLong(size);
    return update->meta.global_batch_size == NULL ? -1 : 0;
}

/* Everything that can be wrong is found before the first tensor is made. */
static int
update_open(arl_state_t *state, const arl_payload_request_t *request, update_t *update)
{
    const int64_t minibatches = arl_payload_minibatches(state, request->rules, request->operation);
    int64_t rollout_n;

    if (minibatches < 0 || arl_payload_rows_open(state, request, &update->rows) < 0 ||
        arl_payload_meta_open(state, request, &update->rows, &update->meta) < 0 ||
        arl_payload_rollout_n(state, request, &rollout_n) < 0) {
        return -1;
    }
    update->minibatches = minibatches;
    update->batch_rows = update->rows.layout.rows / minibatches;
    if (update->rows.layout.rows % minibatches != 0) {
        (void)arl_raise_format(state, ARL_ERR_PAYLOAD, request->operation,
                               "%s: %lld rows cannot be cut into %lld equal mini-batches "
                               "(data.train_batch_size %lld / ppo_mini_batch_size %lld prompts)",
                               request->operation, (long long)update->rows.layout.rows,
                               (long long)minibatches, (long long)request->rules->train_batch_size,
                               (long long)request->rules->mini_batch_size);
        return -1;
    }
    if (update_read_config(state, request, update) < 0 ||
        update_read_batch_size(state, request, rollout_n, update) < 0 ||
        update_read_count_mask(state, request, update) < 0 ||
        update_read_weights(state, request, update) < 0 ||
        arl_payload_check_groups(state, request, &update->rows, rollout_n, update->batch_rows) <
            0) {
        return -1;
    }
    return arl_payload_check_common(state, request, &update->rows, update->batch_rows);
}

static int
columns_add_responses(arl_state_t *state, const arl_payload_request_t *request,
                      const arl_payload_rows_t *rows, bool use_kl_loss,
                      arl_payload_columns_t *columns)
{
    PyObject *mask;

    (void)arl_payload_column_add(columns, state->names.responses, Py_NewRef(rows->responses), NULL);
    mask = arl_payload_response_column(state, request, state->names.response_mask, "biu", rows);
    if (arl_payload_column_add(columns, state->names.response_mask, mask, NULL) < 0 ||
        arl_payload_column_add(
            columns, state->names.old_log_probs,
            arl_payload_response_column(state, request, state->names.old_log_probs, "fx", rows),
            NULL) < 0 ||
        arl_payload_column_add(
            columns, state->names.advantages,
            arl_payload_response_column(state, request, state->names.advantages, "fx", rows),
            NULL) < 0 ||
        (use_kl_loss &&
         arl_payload_column_add(
             columns, state->names.ref_log_prob,
             arl_payload_response_column(state, request, state->names.ref_log_prob, "fx", rows),
             NULL) < 0) ||
        arl_payload_add_positions(state, request, rows, columns) < 0) {
        return -1;
    }
    return arl_payload_column_add(columns, state->names.loss_mask, Py_NewRef(mask), NULL);
}

static int
update_fill(arl_state_t *state, const arl_payload_request_t *request, update_t *update)
{
    const arl_payload_rows_t *rows = &update->rows;
    arl_payload_columns_t *columns = &update->columns;

    if (arl_payload_add_head(state, request, rows, update->meta.pad_token_id, columns) < 0 ||
        columns_add_responses(state, request, rows, update->use_kl_loss, columns) < 0) {
        return -1;
    }
    if (!rows->jagged || update->minibatches == 1) {
        return 0;
    }
    if (arl_nested_import(state, rows->prompts, "prompts", ARL_ERR_PAYLOAD, &update->prompts) < 0 ||
        arl_nested_import(state, rows->responses, "responses", ARL_ERR_PAYLOAD,
                          &update->responses) < 0) {
        return -1;
    }
    for (int i = 0; i < columns->count; i++) {
        arl_payload_column_t *column = &columns->column[i];

        column->nested = column->name == state->names.prompts     ? &update->prompts
                         : column->name == state->names.responses ? &update->responses
                                                                  : NULL;
    }
    return 0;
}

/* A 0-d int64 tensor: supervised tokens of rows [begin, end). */
static PyObject *
count_tokens(arl_state_t *state, const update_t *update, int64_t begin, int64_t end)
{
    const arl_view_t *mask = &update->count_mask.view;
    PyThreadState *saved;
    arl_view_t view;
    PyObject *count = arl_tensor_new(state, update->count_mask.kind, ARL_DTYPE_I64, 0, NULL, &view);

    if (count == NULL || arl_batch_begin(state, arl_view_nbytes(mask), &saved) < 0) {
        Py_XDECREF(count);
        return NULL;
    }
    *(int64_t *)view.data = arl_rows_sum(mask, begin, end);
    arl_batch_end(saved);
    return count;
}

static PyObject *
update_minibatch(arl_state_t *state, const arl_payload_request_t *request, update_t *update,
                 int64_t index)
{
    const int64_t begin = index * update->batch_rows, end = begin + update->batch_rows;
    const bool whole = update->minibatches == 1, last = index == update->minibatches - 1;
    arl_payload_meta_t *meta = &update->meta;
    PyObject *actor, *policy, *dict = NULL;

    Py_XSETREF(meta->batch_num_tokens, count_tokens(state, update, begin, end));
    Py_XSETREF(meta->rollout_is_weights,
               whole || update->is_weights == Py_None
                   ? Py_NewRef(update->is_weights)
                   : arl_payload_slice(state, update->is_weights, begin, end));
    if (meta->batch_num_tokens == NULL || meta->rollout_is_weights == NULL) {
        return NULL;
    }
    actor = last ? Py_NewRef(meta->actor_config) : arl_payload_renew(meta->actor_config);
    policy = actor == NULL ? NULL
             : last        ? Py_NewRef(meta->policy_loss_config)
                           : arl_payload_renew(meta->policy_loss_config);
    if (policy != NULL) {
        arl_payload_meta_t own = *meta; /* borrows all but the two dicts */

        own.actor_config = actor;
        own.policy_loss_config = policy;
        dict = arl_payload_meta_dict(state, &own, request->rules->final, true);
    }
    Py_XDECREF(policy);
    Py_XDECREF(actor);
    if (dict == NULL) {
        return NULL;
    }
    return arl_payload_new(state,
                           arl_payload_columns_dict(state, &update->columns, begin, end, whole),
                           dict, arl_payload_processing(state, true, true));
}

static PyObject *
lengths_list(const arl_nested_t *nested)
{
    PyObject *list = PyList_New((Py_ssize_t)nested->rows);

    for (int64_t row = 0; list != NULL && row < nested->rows; row++) {
        PyObject *length = PyLong_FromLongLong(nested->lengths[row]);

        if (length == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)row, length);
    }
    return list;
}

PyObject *
arl_payload_update(arl_state_t *state, const arl_payload_request_t *request,
                   PyObject **global_token_num_p)
{
    update_t update = {0};
    PyObject *payloads = NULL, *lengths = NULL;

    if (update_open(state, request, &update) < 0 || update_fill(state, request, &update) < 0) {
        goto release_update;
    }
    payloads = PyList_New((Py_ssize_t)update.minibatches);
    for (int64_t i = 0; payloads != NULL && i < update.minibatches; i++) {
        PyObject *payload = update_minibatch(state, request, &update, i);

        if (payload == NULL) {
            Py_CLEAR(payloads);
            break;
        }
        PyList_SET_ITEM(payloads, (Py_ssize_t)i, payload);
    }
    if (payloads != NULL && global_token_num_p != NULL) {
        lengths = lengths_list(&update.rows.input_ids);
        if (lengths == NULL) {
            Py_CLEAR(payloads);
        }
        else {
            *global_token_num_p = lengths;
        }
    }
release_update:
    update_release(&update);
    return payloads;
}

/* A config within meta anew. */
static int
meta_renew(PyObject *meta, PyObject *key)
{
    PyObject *config = PyDict_GetItemWithError(meta, key); /* borrowed from meta, which we own */
    PyObject *copy = config == NULL ? NULL : arl_payload_renew(config);
    const int status = copy == NULL ? -1 : PyDict_SetItem(meta, key, copy);

    Py_XDECREF(copy);
    return status;
}

/* The dicts and lists anew, the tensors shared. */
PyObject *
arl_payload_copy(arl_state_t *state, PyObject *payload)
{
    /* borrowed from payload, to be copied */
    PyObject *batch = PyDict_GetItemWithError(payload, state->names.batch);
    PyObject *meta = PyDict_GetItemWithError(payload, state->names.meta); /* borrowed likewise */

    meta = PyDict_Copy(meta);
    if (meta == NULL || meta_renew(meta, state->names.actor_config) < 0 ||
        meta_renew(meta, state->names.policy_loss_config) < 0) {
        Py_XDECREF(meta);
        return NULL;
    }
    return arl_payload_new(state, PyDict_Copy(batch), meta,
                           arl_payload_processing(state, true, true));
}
