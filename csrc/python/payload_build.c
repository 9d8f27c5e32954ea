/* SPDX-License-Identifier: Apache-2.0 */
/* The batch part of a payload, and log-prob payloads. */
#include "python/payload_rows.h"

/* ---- columns --------------------------------------------------------------------------------- */

void
arl_payload_columns_release(arl_payload_columns_t *columns)
{
    while (columns->count > 0) {
        Py_DECREF(columns->column[--columns->count].value);
    }
}

int
arl_payload_column_add(arl_payload_columns_t *columns, PyObject *name, PyObject *value,
                       const arl_nested_t *nested)
{
    if (value == NULL) {
        return -1;
    }
    columns->column[columns->count++] = (arl_payload_column_t){name, value, nested};
    return 0;
}

static PyObject *
column_rows(arl_state_t *state, const arl_payload_columns_t *columns, int index, PyObject *batch,
            int64_t begin, int64_t end)
{
    const arl_payload_column_t *column = &columns->column[index];

    /* loss_mask is response_mask: the same object in every mini-batch too. */
    for (int i = 0; i < index; i++) {
        if (columns->column[i].value == column->value) {
            PyObject *twin; /* stays NULL only with an error set: it was put there */

            (void)PyDict_GetItemRef(batch, columns->column[i].name, &twin);
            return twin;
        }
    }
    return column->nested != NULL
               ? arl_payload_slice_nested(state, column->value, column->nested, begin, end)
               : arl_payload_slice(state, column->value, begin, end);
}

PyObject *
arl_payload_columns_dict(arl_state_t *state, const arl_payload_columns_t *columns, int64_t begin,
                         int64_t end, bool whole)
{
    PyObject *batch = PyDict_New();

    for (int i = 0; batch != NULL && i < columns->count; i++) {
        PyObject *value = whole ? Py_NewRef(columns->column[i].value)
                                : column_rows(state, columns, i, batch, begin, end);

        if (value == NULL || PyDict_SetItem(batch, columns->column[i].name, value) < 0) {
            Py_CLEAR(batch);
        }
        Py_XDECREF(value);
    }
    return batch;
}

static PyObject *
pad_ids(arl_state_t *state, const arl_payload_rows_t *rows, const arl_nested_t *nested,
        PyObject *pad_value, const char *key)
{
    unsigned char fill[ARL_ITEM_MAX] = {0};

    if (pad_value != NULL &&
        arl_batch_fill(state, pad_value, nested->values.view.dtype, key, fill) < 0) {
        return NULL;
    }
    return arl_batch_pad(state, nested, &rows->layout, fill, false, key);
}

/* Position ids are padded with 0, on the same sides and to the same widths as the ids. */
static PyObject *
pad_positions(arl_state_t *state, const arl_payload_request_t *request,
              const arl_payload_rows_t *rows)
{
    PyObject *object, *padded;
    arl_nested_t positions = {0};

    object = arl_payload_data_require(state, request->data, state->names.position_ids,
                                      request->operation);
    if (object == NULL ||
        arl_payload_positions_import(state, request, object, rows, &positions) < 0) {
        Py_XDECREF(object);
        return NULL;
    }
    padded = pad_ids(state, rows, &positions, NULL, "position_ids");
    arl_nested_release(&positions);
    Py_DECREF(object);
    return padded;
}

int
arl_payload_add_head(arl_state_t *state, const arl_payload_request_t *request,
                     const arl_payload_rows_t *rows, PyObject *pad_token_id,
                     arl_payload_columns_t *columns)
{
    if (arl_payload_column_add(columns, state->names.input_ids,
                               pad_ids(state, rows, &rows->input_ids, pad_token_id, "input_ids"),
                               NULL) < 0) {
        return -1;
    }
    if (!request->rules->final &&
        arl_payload_column_add(columns, state->names.position_ids,
                               pad_positions(state, request, rows), NULL) < 0) {
        return -1;
    }
    (void)arl_payload_column_add(columns, state->names.attention_mask,
                                 Py_NewRef(rows->attention_mask), NULL);
    (void)arl_payload_column_add(columns, state->names.prompts, Py_NewRef(rows->prompts), NULL);
    return 0;
}

int
arl_payload_add_positions(arl_state_t *state, const arl_payload_request_t *request,
                          const arl_payload_rows_t *rows, arl_payload_columns_t *columns)
{
    if (!request->rules->final || request->rules->drop_positions) {
        return 0;
    }
    return arl_payload_column_add(columns, state->names.position_ids,
                                  pad_positions(state, request, rows), NULL);
}

/* ---- the whole ------------------------------------------------------------------------------- */

PyObject *
arl_payload_new(arl_state_t *state, PyObject *batch, PyObject *meta, PyObject *processing)
{
    PyObject *payload = NULL;

    if (batch != NULL && meta != NULL && processing != NULL) {
        payload = PyDict_New();
        if (payload != NULL && (PyDict_SetItem(payload, state->names.batch, batch) < 0 ||
                                PyDict_SetItem(payload, state->names.meta, meta) < 0 ||
                                PyDict_SetItem(payload, state->names.processing, processing) < 0)) {
            Py_CLEAR(payload);
        }
    }
    Py_XDECREF(processing);
    Py_XDECREF(meta);
    Py_XDECREF(batch);
    return payload;
}

int
arl_payload_check_common(arl_state_t *state, const arl_payload_request_t *request,
                         const arl_payload_rows_t *rows, int64_t batch_rows)
{
    if (arl_payload_check_limits(state, request, rows, batch_rows) < 0 ||
        arl_payload_check_mask(state, request, rows) < 0) {
        return -1;
    }
    return request->rules->drop_positions ? arl_payload_check_positions(state, request, rows) : 0;
}

static PyObject *
log_prob_build(arl_state_t *state, const arl_payload_request_t *request,
               const arl_payload_rows_t *rows, arl_payload_meta_t *meta)
{
    const arl_payload_rules_t *rules = request->rules;
    const int64_t count = rows->layout.rows;
    arl_payload_columns_t columns = {0};
    PyObject *payload = NULL;
    int64_t rollout_n;

    if (arl_payload_meta_open(state, request, rows, meta) < 0 ||
        arl_payload_rollout_n(state, request, &rollout_n) < 0 ||
        ((rules->zorro || rules->balances) &&
         arl_payload_check_groups(state, request, rows, rollout_n, count) < 0) ||
        arl_payload_check_common(state, request, rows, count) < 0) {
        return NULL;
    }
    if (arl_payload_add_head(state, request, rows, meta->pad_token_id, &columns) == 0 &&
        arl_payload_add_positions(state, request, rows, &columns) == 0) {
        payload =
            arl_payload_new(state, arl_payload_columns_dict(state, &columns, 0, count, true),
                            arl_payload_meta_dict(state, meta, rules->final, false),
                            arl_payload_processing(state, request->temperature_in_log_prob, false));
    }
    arl_payload_columns_release(&columns);
    return payload;
}

PyObject *
arl_payload_log_prob(arl_state_t *state, const arl_payload_request_t *request,
                     arl_payload_facts_t *facts_p)
{
    arl_payload_rows_t rows = {0};
    arl_payload_meta_t meta = {0};
    PyObject *payload = NULL;

    if (arl_payload_rows_open(state, request, &rows) == 0) {
        payload = log_prob_build(state, request, &rows, &meta);
    }
    if (payload != NULL && facts_p != NULL) {
        *facts_p = (arl_payload_facts_t){.rows = rows.layout.rows, .width = rows.width};
    }
    arl_payload_meta_close(&meta);
    arl_payload_rows_close(&rows);
    return payload;
}
