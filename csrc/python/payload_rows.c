/* SPDX-License-Identifier: Apache-2.0 */
/* The incoming batch: reading its entries, its layout, and rows of it. */
#include "python/payload_rows.h"

#include "core/arl_rows.h"
#include "python/errors.h"

#include <stdarg.h>

/* ---- entries --------------------------------------------------------------------------------- */

/* Scalars travel in wrappers (tensordict's NonTensorData); what they hold is their `data`. */
static PyObject *
entry_unwrap(arl_state_t *state, PyObject *value) /* steals value */
{
    PyObject *inner;
    int tensor;

    if (value == Py_None || PyLong_Check(value) || PyFloat_Check(value) || PyUnicode_Check(value) ||
        PyTuple_Check(value) || PyList_Check(value) || PyDict_Check(value) ||
        PyArray_Check(value)) {
        return value;
    }
    tensor = arl_is_torch_tensor(state, value);
    if (tensor == 0) {
        tensor = PyObject_HasAttrWithError(value, state->names.__dlpack__);
    }
    if (tensor != 0) {
        if (tensor < 0) {
            Py_CLEAR(value);
        }
        return value;
    }
    inner = PyObject_GetAttr(value, state->names.data);
    if (inner == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            Py_CLEAR(value);
            return NULL;
        }
        PyErr_Clear();
        return value;
    }
    Py_DECREF(value);
    return inner;
}

int
arl_payload_data_get(arl_state_t *state, PyObject *data, PyObject *key, PyObject **value_p)
{
    PyObject *value;

    if (PyDict_CheckExact(data)) {
        const int found = PyDict_GetItemRef(data, key, &value);

        if (found <= 0) {
            return found;
        }
    }
    else {
        value = PyObject_GetItem(data, key);
        if (value == NULL) {
            if (!PyErr_ExceptionMatches(PyExc_KeyError)) {
                return -1;
            }
            PyErr_Clear();
            return 0;
        }
    }
    *value_p = entry_unwrap(state, value);
    return *value_p == NULL ? -1 : 1;
}

PyObject *
arl_payload_data_require(arl_state_t *state, PyObject *data, PyObject *key, const char *operation)
{
    PyObject *value;
    const int found = arl_payload_data_get(state, data, key, &value);

    if (found == 0) {
        const char *name = PyUnicode_AsUTF8(key);

        return arl_raise_format(state, ARL_ERR_PAYLOAD, operation, "%s: data has no '%s'",
                                operation, name == NULL ? "?" : name);
    }
    return found < 0 ? NULL : value;
}

/* A width that the batch declares: -1 where it does not, or says "none" with a negative one. */
static int
width_get(arl_state_t *state, const arl_payload_request_t *request, PyObject *key, int64_t *width_p)
{
    PyObject *value;
    Py_ssize_t width = -1;
    const int found = arl_payload_data_get(state, request->data, key, &value);

    if (found < 0) {
        return -1;
    }
    if (found > 0) {
        const bool given = value != Py_None;

        width = given ? PyNumber_AsSsize_t(value, PyExc_OverflowError) : -1;
        Py_DECREF(value);
        if (given && width == -1 && PyErr_Occurred()) {
            return -1;
        }
    }
    *width_p = width < 0 ? -1 : width;
    return 0;
}

/* ---- the batch ------------------------------------------------------------------------------- */

static int
rows_check_ids(arl_state_t *state, const char *operation, const char *key,
               const arl_nested_t *nested)
{
    const arl_view_t *values = &nested->values.view;
    char text[96];

    if (values->ndim == 1 && (values->dtype == ARL_DTYPE_I32 || values->dtype == ARL_DTYPE_I64)) {
        return 0;
    }
    arl_view_describe(values, text, sizeof(text));
    (void)arl_raise_format(state, ARL_ERR_PAYLOAD, operation,
                           values->ndim == 1
                               ? "%s: has values %s, int32 or int64 is needed"
                               : "%s: has values %s, one-dimensional rows are needed (rows of "
                                 "several components, as for mrope, have no place on the wire)",
                           key, text);
    return -1;
}

/* One form for both sides. 1 jagged, 0 dense, -1 error. */
static int
rows_check_form(arl_state_t *state, const char *operation, const arl_payload_rows_t *rows)
{
    const int prompts = arl_nested_check(state, rows->prompts);
    const int responses = prompts < 0 ? -1 : arl_nested_check(state, rows->responses);

    if (prompts < 0 || responses < 0) {
        return -1;
    }
    if (prompts != responses) {
        (void)arl_raise_format(
            state, ARL_ERR_PAYLOAD, operation,
            "prompts are %s and responses %s: both must be nested, or both dense",
            prompts ? "nested" : "dense", responses ? "nested" : "dense");
        return -1;
    }
    return prompts;
}

/* The mask that the padded rows have, for a jagged batch that brings none. */
static PyObject *
rows_make_mask(arl_state_t *state, const arl_payload_rows_t *rows)
{
    arl_rows_mask_t job = {.rows = rows->layout.rows,
                           .prompt_width = rows->layout.prompt_width,
                           .width = rows->width,
                           .prompt_lengths = rows->layout.prompt_lengths,
                           .response_lengths = rows->layout.response_lengths};
    PyThreadState *saved;
    arl_view_t view;
    PyObject *mask = arl_tensor_new(state, rows->input_ids.values.kind, ARL_DTYPE_I64, 2,
                                    (int64_t[]){job.rows, job.width}, &view);

    if (mask == NULL || arl_batch_begin(state, arl_view_nbytes(&view), &saved) < 0) {
        Py_XDECREF(mask);
        return NULL;
    }
    job.out = view.data;
    arl_rows_fill_mask(&job);
    arl_batch_end(saved);
    return mask;
}

/* What padding would refuse, refused before anything else is made of the lengths. */
static int
rows_check_lengths(arl_state_t *state, const arl_payload_request_t *request,
                   const arl_payload_rows_t *rows)
{
    const arl_pad_job_t job = {.input = arl_batch_jagged(&rows->input_ids),
                               .prompt_lengths = rows->layout.prompt_lengths,
                               .response_lengths = rows->layout.response_lengths,
                               .prompt_width = rows->layout.prompt_width,
                               .response_width = rows->layout.response_width};
    arl_error_t err = ARL_ERROR_INIT;

    if (rows->layout.rows != rows->input_ids.rows) {
        (void)arl_raise_format(state, ARL_ERR_PAYLOAD, request->operation,
                               "input_ids: has %lld rows, prompts and responses have %lld",
                               (long long)rows->input_ids.rows, (long long)rows->layout.rows);
        return -1;
    }
    if (arl_pad_check(&job, "input_ids", &err) != ARL_OK) {
        (void)arl_raise(state, &err);
        return -1;
    }
    return 0;
}

static int
rows_read_layout(arl_state_t *state, const arl_payload_request_t *request, arl_payload_rows_t *rows)
{
    int64_t prompt_width = -1, response_width = -1;
    const int jagged = rows_check_form(state, request->operation, rows);

    if (jagged < 0) {
        return -1;
    }
    rows->jagged = jagged != 0;
    /* Dense sides have the width that they have; the declared ones are for jagged sides. */
    if (rows->jagged &&
        (width_get(state, request, state->names.max_prompt_len, &prompt_width) < 0 ||
         width_get(state, request, state->names.max_response_len, &response_width) < 0)) {
        return -1;
    }
    if (arl_batch_layout_import(state, rows->prompts, rows->responses, rows->attention_mask,
                                prompt_width, response_width, &rows->layout) < 0) {
        return -1;
    }
    if (__builtin_add_overflow(rows->layout.prompt_width, rows->layout.response_width,
                               &rows->width)) {
        (void)arl_raise_format(state, ARL_ERR_PAYLOAD, request->operation,
                               "max_prompt_len %lld and max_response_len %lld overflow",
                               (long long)prompt_width, (long long)response_width);
        return -1;
    }
    if (rows_check_lengths(state, request, rows) < 0) {
        return -1;
    }
    if (rows->attention_mask == NULL) {
        rows->attention_mask = rows_make_mask(state, rows);
    }
    return rows->attention_mask == NULL ? -1 : 0;
}

static int
rows_read(arl_state_t *state, const arl_payload_request_t *request, PyObject *input_ids,
          arl_payload_rows_t *rows)
{
    const char *operation = request->operation;
    PyObject *data = request->data;

    if (arl_batch_nested_import(state, input_ids, "input_ids", &rows->input_ids) < 0 ||
        rows_check_ids(state, operation, "input_ids", &rows->input_ids) < 0) {
        return -1;
    }
    if (rows->input_ids.rows == 0) {
        (void)arl_raise_format(state, ARL_ERR_PAYLOAD, operation,
                               "input_ids: the batch is empty, at least one row is needed");
        return -1;
    }
    rows->prompts = arl_payload_data_require(state, data, state->names.prompts, operation);
    if (rows->prompts == NULL) {
        return -1;
    }
    rows->responses = arl_payload_data_require(state, data, state->names.responses, operation);
    if (rows->responses == NULL ||
        arl_payload_data_get(state, data, state->names.attention_mask, &rows->attention_mask) < 0) {
        return -1;
    }
    return rows_read_layout(state, request, rows);
}

int
arl_payload_rows_open(arl_state_t *state, const arl_payload_request_t *request,
                      arl_payload_rows_t *rows)
{
    PyObject *input_ids =
        arl_payload_data_require(state, request->data, state->names.input_ids, request->operation);
    int status;

    if (input_ids == NULL) {
        return -1;
    }
    status = rows_read(state, request, input_ids, rows);
    Py_DECREF(input_ids);
    return status;
}

void
arl_payload_rows_close(arl_payload_rows_t *rows)
{
    arl_nested_release(&rows->input_ids);
    arl_batch_layout_release(&rows->layout);
    Py_CLEAR(rows->prompts);
    Py_CLEAR(rows->responses);
    Py_CLEAR(rows->attention_mask);
}

int
arl_payload_positions_import(arl_state_t *state, const arl_payload_request_t *request,
                             PyObject *object, const arl_payload_rows_t *rows,
                             arl_nested_t *positions_p)
{
    arl_nested_t positions = {0};

    if (arl_batch_nested_import(state, object, "position_ids", &positions) < 0 ||
        rows_check_ids(state, request->operation, "position_ids", &positions) < 0) {
        goto release_positions;
    }
    if (positions.rows != rows->layout.rows) {
        (void)arl_raise_format(state, ARL_ERR_PAYLOAD, request->operation,
                               "position_ids: has %lld rows, input_ids has %lld",
                               (long long)positions.rows, (long long)rows->layout.rows);
        goto release_positions;
    }
    for (int64_t row = 0; row < positions.rows; row++) {
        if (positions.lengths[row] != rows->input_ids.lengths[row]) {
            (void)arl_raise_format(state, ARL_ERR_PAYLOAD, request->operation,
                                   "position_ids: row %lld has %lld elements, input_ids has %lld",
                                   (long long)row, (long long)positions.lengths[row],
                                   (long long)rows->input_ids.lengths[row]);
            goto release_positions;
        }
    }
    *positions_p = positions;
    return 0;
release_positions:
    arl_nested_release(&positions);
    return -1;
}

/* ---- columns --------------------------------------------------------------------------------- */

/* `kinds`: the dtype kinds (arl_dtype_kind) that the column may have. */
static int
column_check(arl_state_t *state, const arl_payload_request_t *request, const char *key,
             const char *kinds, const arl_view_t *view, const arl_payload_rows_t *rows)
{
    char text[96];

    if (view->ndim != 2 || view->shape[0] != rows->layout.rows ||
        strchr(kinds, arl_dtype_kind(view->dtype)) == NULL) {
        arl_view_describe(view, text, sizeof(text));
        (void)arl_raise_format(state, ARL_ERR_PAYLOAD, request->operation,
                               "%s: is %s, [%lld, %lld] of %s is needed", key, text,
                               (long long)rows->layout.rows, (long long)rows->layout.response_width,
                               strchr(kinds, 'f') != NULL ? "a float type" : "bool or integers");
        return -1;
    }
    if (view->shape[1] == rows->layout.response_width || view->shape[1] == rows->width) {
        return 0;
    }
    return arl_payload_warn(
        request->warned, ARL_WARN_RESPONSE_WIDTH,
        "%s: %s has %lld columns, responses are padded to %lld: left-padded to [%lld, %lld], its "
        "columns do not line up with the responses",
        request->operation, key, (long long)view->shape[1], (long long)rows->layout.response_width,
        (long long)rows->layout.rows, (long long)rows->width);
}

PyObject *
arl_payload_response_column(arl_state_t *state, const arl_payload_request_t *request, PyObject *key,
                            const char *kinds, const arl_payload_rows_t *rows)
{
    const char *name = PyUnicode_AsUTF8(key); /* interned ASCII: cannot fail */
    PyObject *object, *padded = NULL;
    arl_tensor_t tensor = {0};

    object = arl_payload_data_require(state, request->data, key, request->operation);
    if (object == NULL) {
        return NULL;
    }
    if (arl_nested_check(state, object) > 0) {
        Py_DECREF(object);
        return arl_raise_format(state, ARL_ERR_PAYLOAD, request->operation,
                                "%s: is nested, a dense [rows, R] tensor is needed", name);
    }
    if (!PyErr_Occurred() && arl_tensor_import(state, object, name, ARL_TENSOR_CPU_ONLY,
                                               ARL_ERR_PAYLOAD, &tensor) == 0) {
        if (column_check(state, request, name, kinds, &tensor.view, rows) == 0) {
            padded = arl_batch_left_pad(state, object, rows->width, ARL_BATCH_WIDE_ERROR, name);
        }
        arl_tensor_release(&tensor);
    }
    Py_DECREF(object);
    return padded;
}

/* ---- rows of a batch ------------------------------------------------------------------------- */

/* Something that can be sliced over the same memory: what is known by DLPack alone cannot. */
static PyObject *
sliceable(arl_state_t *state, PyObject *tensor)
{
    const int torch = PyArray_Check(tensor) ? 1 : arl_is_torch_tensor(state, tensor);
    PyObject *numpy, *array;

    if (torch != 0) {
        return torch < 0 ? NULL : Py_NewRef(tensor);
    }
    numpy = PyImport_ImportModule("numpy");
    array = numpy == NULL ? NULL : PyObject_CallMethod(numpy, "from_dlpack", "O", tensor);
    Py_XDECREF(numpy);
    return array;
}

PyObject *
arl_payload_slice(arl_state_t *state, PyObject *tensor, int64_t begin, int64_t end)
{
    PyObject *first = PyLong_FromLongLong(begin), *last = PyLong_FromLongLong(end);
    PyObject *slice = first == NULL || last == NULL ? NULL : PySlice_New(first, last, NULL);
    PyObject *whole = slice == NULL ? NULL : sliceable(state, tensor);
    PyObject *rows = whole == NULL ? NULL : PyObject_GetItem(whole, slice);

    Py_XDECREF(whole);
    Py_XDECREF(slice);
    Py_XDECREF(last);
    Py_XDECREF(first);
    return rows;
}

/* Integers as a 1-D tensor of the kind that `nested` is of. */
static PyObject *
numbers_new(arl_state_t *state, const arl_nested_t *nested, const int64_t *numbers, int64_t count,
            int64_t base)
{
    arl_view_t view;
    PyObject *object = arl_tensor_new(state, nested->values.kind, ARL_DTYPE_I64, 1, &count, &view);

    for (int64_t i = 0; object != NULL && i < count; i++) {
        ((int64_t *)view.data)[i] = numbers[i] - base;
    }
    return object;
}

PyObject *
arl_payload_slice_nested(arl_state_t *state, PyObject *object, const arl_nested_t *nested,
                         int64_t begin, int64_t end)
{
    /* borrowed from object or nested, either way the caller's */
    PyObject *whole = PyTuple_Check(object) ? PyTuple_GET_ITEM(object, 0) : nested->values.owner;
    const int64_t base = nested->offsets[begin];
    PyObject *values = NULL, *offsets = NULL, *lengths = NULL, *result = NULL;
    bool holes = false;

    for (int64_t row = begin; row < end; row++) {
        holes = holes || nested->lengths[row] != nested->offsets[row + 1] - nested->offsets[row];
    }
    values = arl_payload_slice(state, whole, base, nested->offsets[end]);
    offsets = values == NULL
                  ? NULL
                  : numbers_new(state, nested, nested->offsets + begin, end - begin + 1, base);
    if (offsets == NULL) {
        goto release_parts;
    }
    if (!holes) {
        result = arl_nested_new(state, nested->values.kind, values, offsets);
        goto release_parts;
    }
    lengths = numbers_new(state, nested, nested->lengths + begin, end - begin, 0);
    if (lengths != NULL) { /* only torch's jagged tensors have holes */
        result = PyObject_CallFunctionObjArgs(state->torch_nested_from_jagged, values, offsets,
                                              lengths, NULL);
    }
release_parts:
    Py_XDECREF(lengths);
    Py_XDECREF(offsets);
    Py_XDECREF(values);
    return result;
}

/* ---- warnings -------------------------------------------------------------------------------- */

int
arl_payload_warn(unsigned *warned, arl_payload_warning_t bit, const char *format, ...)
{
    PyObject *text;
    va_list args;
    int status = -1;

    if (warned != NULL && (*warned & 1U << bit) != 0) {
        return 0;
    }
    va_start(args, format);
    text = PyUnicode_FromFormatV(format, args);
    va_end(args);
    if (text != NULL) {
        status = PyErr_WarnFormat(PyExc_UserWarning, 1, "%U", text);
        Py_DECREF(text);
    }
    if (status == 0 && warned != NULL) {
        *warned |= 1U << bit;
    }
    return status;
}
