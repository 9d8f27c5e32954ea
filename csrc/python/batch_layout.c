/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What batch.c needs to know before bytes move: how rows divide into prompt and response, and
 * what the padding is.
 */
#include "python/batch.h"

#include "core/arl_mask.h"
#include "core/arl_scalar.h"
#include "core/arl_threads.h"
#include "python/errors.h"

#include <string.h>

/* Less than this moves in a few microseconds, which a contended GIL hand-over easily exceeds. */
enum { KEEP_GIL_BYTES = 64 * 1024 };

int
arl_batch_begin(arl_state_t *state, int64_t nbytes, PyThreadState **saved_p)
{
    arl_error_t err = ARL_ERROR_INIT;

    if (arl_threads_prepare(&err) != ARL_OK) {
        (void)arl_raise(state, &err);
        return -1;
    }
    *saved_p = nbytes > KEEP_GIL_BYTES ? PyEval_SaveThread() : NULL;
    return 0;
}

void
arl_batch_end(PyThreadState *saved)
{
    if (saved != NULL) {
        PyEval_RestoreThread(saved);
    }
}

/* arl_nested_check, but a nested tensor of the wrong layout is a fault of the batch. */
static int
check_nested(arl_state_t *state, PyObject *object, const char *key)
{
    const int nested = arl_nested_check(state, object);

    if (nested < 0 && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        (void)arl_raise_format(state, ARL_ERR_PAYLOAD, "import nested tensor",
                               "%s: is a nested tensor of strided layout; build it with "
                               "layout=torch.jagged",
                               key);
    }
    return nested;
}

int
arl_batch_nested_import(arl_state_t *state, PyObject *object, const char *key, arl_nested_t *out_p)
{
    const int nested = check_nested(state, object, key);

    if (nested == 0) {
        (void)arl_raise_format(state, ARL_ERR_PAYLOAD, "import nested tensor",
                               "%s: expected a nested jagged torch tensor or a tuple (values, "
                               "offsets), got %s",
                               key, arl_type_name(object));
    }
    if (nested <= 0) {
        return -1;
    }
    return arl_nested_import(state, object, key, ARL_ERR_PAYLOAD, out_p);
}

/* ---- one side: prompts or responses ---------------------------------------------------------- */

typedef enum side_form { SIDE_NESTED, SIDE_DENSE, SIDE_LENGTHS } side_form_t;

static const char *const form_names[] = {"nested", "a dense tensor", "a list of lengths"};

typedef struct side {
    side_form_t form;
    int64_t rows;
    int64_t width;    /* dense: columns; otherwise the longest row */
    int64_t *lengths; /* owned (PyMem); NULL when dense: the mask knows them */
} side_t;

static int64_t *
lengths_new(int64_t rows)
{
    int64_t *lengths = PyMem_New(int64_t, rows > 0 ? (size_t)rows : 1);

    if (lengths == NULL) {
        (void)PyErr_NoMemory();
    }
    return lengths;
}

static int
read_length(arl_state_t *state, PyObject *item, const char *key, int64_t index, int64_t *length_p)
{
    if (!PyIndex_Check(item)) {
        (void)arl_raise_format(state, ARL_ERR_PAYLOAD, "read lengths",
                               "%s: entry %lld is a %s, an integer length is needed", key,
                               (long long)index, arl_type_name(item));
        return -1;
    }
    *length_p = PyNumber_AsSsize_t(item, PyExc_OverflowError);
    if (*length_p != -1 || !PyErr_Occurred()) {
        return 0;
    }
    if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        (void)arl_raise_format(state, ARL_ERR_PAYLOAD, "read lengths",
                               "%s: entry %lld does not fit in 64 bits", key, (long long)index);
    }
    return -1;
}

static int
side_read_sequence(arl_state_t *state, PyObject *object, const char *key, side_t *side)
{
    PyObject *items = PySequence_Tuple(object); /* a copy: an __index__ may change the list */
    int status = -1;

    if (items == NULL) {
        return -1;
    }
    side->form = SIDE_LENGTHS;
    side->rows = PyTuple_GET_SIZE(items);
    side->lengths = lengths_new(side->rows);
    if (side->lengths == NULL) {
        goto release_items;
    }
    for (int64_t i = 0; i < side->rows; i++) {
        PyObject *item = PyTuple_GET_ITEM(items, i); /* borrowed from items */

        if (read_length(state, item, key, i, &side->lengths[i]) < 0) {
            goto release_items;
        }
    }
    status = 0;
release_items:
    Py_DECREF(items);
    return status;
}

static int
side_read_tensor(arl_state_t *state, PyObject *object, const char *key, side_t *side)
{
    arl_tensor_t tensor = {0};
    int status = 0;

    if (arl_tensor_import(state, object, key, ARL_TENSOR_CPU_ONLY, ARL_ERR_PAYLOAD, &tensor) < 0) {
        return -1;
    }
    if (tensor.view.ndim == 1) {
        side->form = SIDE_LENGTHS;
        status =
            arl_tensor_read_int64(state, object, key, ARL_ERR_PAYLOAD, &side->lengths, &side->rows);
    }
    else if (tensor.view.ndim == 2) {
        side->form = SIDE_DENSE;
        side->rows = tensor.view.shape[0];
        side->width = tensor.view.shape[1];
    }
    else {
        char text[96];

        arl_view_describe(&tensor.view, text, sizeof(text));
        (void)arl_raise_format(state, ARL_ERR_PAYLOAD, "read lengths",
                               "%s: is %s; pass it nested, dense [rows, width], or as row lengths",
                               key, text);
        status = -1;
    }
    arl_tensor_release(&tensor);
    return status;
}

static int
side_read_nested(arl_state_t *state, PyObject *object, const char *key, side_t *side)
{
    arl_nested_t nested = {0};

    if (arl_nested_import(state, object, key, ARL_ERR_PAYLOAD, &nested) < 0) {
        return -1;
    }
    side->form = SIDE_NESTED;
    side->rows = nested.rows;
    side->lengths = nested.lengths; /* moved */
    nested.lengths = NULL;
    arl_nested_release(&nested);
    return 0;
}

/* A list is row lengths; so is a tuple, unless it is the pair (values, offsets). */
static bool
is_length_sequence(PyObject *object)
{
    PyObject *first;

    if (PyList_Check(object)) {
        return true;
    }
    if (!PyTuple_Check(object)) {
        return false;
    }
    if (PyTuple_GET_SIZE(object) != 2) {
        return true;
    }
    first = PyTuple_GET_ITEM(object, 0); /* borrowed from object */
    return PyLong_Check(first) || PyArray_IsScalar(first, Integer);
}

/* On failure the caller frees side->lengths. */
static int
side_read(arl_state_t *state, PyObject *object, const char *key, side_t *side)
{
    int status;

    if (is_length_sequence(object)) {
        status = side_read_sequence(state, object, key, side);
    }
    else {
        const int nested = check_nested(state, object, key);

        status = nested < 0    ? -1
                 : nested != 0 ? side_read_nested(state, object, key, side)
                               : side_read_tensor(state, object, key, side);
    }
    if (status < 0) {
        return -1;
    }
    for (int64_t i = 0; side->lengths != NULL && i < side->rows; i++) {
        side->width = side->lengths[i] > side->width ? side->lengths[i] : side->width;
    }
    return 0;
}

/* ---- the mask -------------------------------------------------------------------------------- */

static int
mask_import(arl_state_t *state, PyObject *object, int64_t rows, int64_t width, arl_tensor_t *mask)
{
    const int nested = PyTuple_Check(object) ? 1 : check_nested(state, object, "attention_mask");
    char text[96];

    if (nested != 0) {
        if (nested > 0) {
            (void)arl_raise_format(state, ARL_ERR_PAYLOAD, "read mask",
                                   "attention_mask: is nested; a dense [rows, width] mask is "
                                   "needed");
        }
        return -1;
    }
    if (arl_tensor_import(state, object, "attention_mask", ARL_TENSOR_CPU_ONLY, ARL_ERR_PAYLOAD,
                          mask) < 0) {
        return -1;
    }
    if (mask->view.ndim == 2 && mask->view.shape[0] == rows &&
        (width < 0 || mask->view.shape[1] == width)) {
        return 0;
    }
    arl_view_describe(&mask->view, text, sizeof(text));
    arl_tensor_release(mask);
    if (width < 0) {
        (void)arl_raise_format(state, ARL_ERR_PAYLOAD, "read mask",
                               "attention_mask: is %s, two dimensions and %lld rows are needed",
                               text, (long long)rows);
    }
    else {
        (void)arl_raise_format(state, ARL_ERR_PAYLOAD, "read mask",
                               "attention_mask: is %s, [%lld, %lld] is needed", text,
                               (long long)rows, (long long)width);
    }
    return -1;
}

int64_t *
arl_batch_mask_spans(arl_state_t *state, PyObject *attention_mask, int64_t rows, int64_t width)
{
    arl_error_t err = ARL_ERROR_INIT;
    arl_tensor_t mask = {0};
    PyThreadState *saved;
    int64_t *spans = NULL;

    if (mask_import(state, attention_mask, rows, width, &mask) < 0) {
        return NULL;
    }
    spans = lengths_new(2 * rows);
    if (spans == NULL || arl_batch_begin(state, arl_view_nbytes(&mask.view), &saved) < 0) {
        goto release_mask;
    }
    (void)arl_mask_spans(&mask.view, "attention_mask", spans, spans + rows, &err);
    arl_batch_end(saved);
    if (err.code == ARL_OK) {
        arl_tensor_release(&mask);
        return spans;
    }
    (void)arl_raise(state, &err);
release_mask:
    PyMem_Free(spans);
    arl_tensor_release(&mask);
    return NULL;
}

/* Dense form: fills both lengths of `layout` from the mask. */
static int
layout_from_mask(arl_state_t *state, PyObject *attention_mask, int64_t prompt_width, int64_t width,
                 arl_batch_layout_t *layout)
{
    int64_t *const starts = arl_batch_mask_spans(state, attention_mask, layout->rows, width);
    arl_error_t err = ARL_ERROR_INIT;

    if (starts == NULL) {
        return -1;
    }
    layout->prompt_lengths = lengths_new(layout->rows);
    layout->response_lengths = lengths_new(layout->rows);
    if (layout->prompt_lengths == NULL || layout->response_lengths == NULL) {
        PyMem_Free(starts);
        return -1;
    }
    (void)arl_mask_split(starts, starts + layout->rows, layout->rows, prompt_width,
                         "attention_mask", layout->prompt_lengths, layout->response_lengths, &err);
    PyMem_Free(starts);
    if (err.code != ARL_OK) {
        (void)arl_raise(state, &err);
        return -1;
    }
    return 0;
}

/* Other forms: the mask is not needed, but where it is given it must not contradict. */
static int
layout_check_mask(arl_state_t *state, PyObject *attention_mask, const arl_batch_layout_t *layout)
{
    int64_t *const starts = arl_batch_mask_spans(state, attention_mask, layout->rows, -1);
    const int64_t *ones;
    int64_t row = 0;

    if (starts == NULL) {
        return -1;
    }
    ones = starts + layout->rows;
    while (row < layout->rows && layout->prompt_lengths[row] <= ones[row] &&
           layout->response_lengths[row] == ones[row] - layout->prompt_lengths[row]) {
        row++;
    }
    if (row < layout->rows) {
        (void)arl_raise_format(state, ARL_ERR_PAYLOAD, "read mask",
                               "attention_mask: row %lld has %lld ones, but its prompt has %lld "
                               "elements and its response %lld",
                               (long long)row, (long long)ones[row],
                               (long long)layout->prompt_lengths[row],
                               (long long)layout->response_lengths[row]);
    }
    PyMem_Free(starts);
    return row < layout->rows ? -1 : 0;
}

/* ---- both sides together --------------------------------------------------------------------- */

static int
layout_check_sides(arl_state_t *state, const side_t *prompts, const side_t *responses,
                   bool has_mask, int64_t *width_p)
{
    if (prompts->form != responses->form) {
        (void)arl_raise_format(state, ARL_ERR_PAYLOAD, "read layout",
                               "prompts and responses differ in form: prompts are %s, responses "
                               "are %s; pass both in one form",
                               form_names[prompts->form], form_names[responses->form]);
        return -1;
    }
    if (__builtin_add_overflow(prompts->width, responses->width, width_p)) {
        (void)arl_raise_format(state, ARL_ERR_PAYLOAD, "read layout",
                               "widths %lld of prompts and %lld of responses overflow",
                               (long long)prompts->width, (long long)responses->width);
        return -1;
    }
    if (prompts->rows != responses->rows) {
        (void)arl_raise_format(state, ARL_ERR_PAYLOAD, "read layout",
                               "prompts have %lld rows, responses %lld", (long long)prompts->rows,
                               (long long)responses->rows);
        return -1;
    }
    if (prompts->form == SIDE_DENSE && !has_mask) {
        (void)arl_raise_format(state, ARL_ERR_PAYLOAD, "read layout",
                               "attention_mask is needed: dense prompts and responses do not say "
                               "how long their rows are");
        return -1;
    }
    return 0;
}

int
arl_batch_layout_import(arl_state_t *state, PyObject *prompts, PyObject *responses,
                        PyObject *attention_mask, int64_t prompt_width, int64_t response_width,
                        arl_batch_layout_t *out_p)
{
    const bool has_mask = attention_mask != NULL && attention_mask != Py_None;
    arl_batch_layout_t layout = {0};
    side_t left = {0}, right = {0};
    int64_t width; /* of both sides together */
    int status = -1;

    if (side_read(state, prompts, "prompts", &left) < 0 ||
        side_read(state, responses, "responses", &right) < 0 ||
        layout_check_sides(state, &left, &right, has_mask, &width) < 0) {
        goto free_sides;
    }
    layout.rows = left.rows;
    layout.prompt_width = prompt_width >= 0 ? prompt_width : left.width;
    layout.response_width = response_width >= 0 ? response_width : right.width;
    if (left.form == SIDE_DENSE) {
        status = layout_from_mask(state, attention_mask, left.width, width, &layout);
    }
    else {
        layout.prompt_lengths = left.lengths; /* moved */
        layout.response_lengths = right.lengths;
        left.lengths = right.lengths = NULL;
        status = has_mask ? layout_check_mask(state, attention_mask, &layout) : 0;
    }
    if (status < 0) {
        arl_batch_layout_release(&layout);
        goto free_sides;
    }
    *out_p = layout;
free_sides:
    PyMem_Free(left.lengths);
    PyMem_Free(right.lengths);
    return status;
}

void
arl_batch_layout_release(arl_batch_layout_t *layout)
{
    PyMem_Free(layout->prompt_lengths);
    PyMem_Free(layout->response_lengths);
    layout->prompt_lengths = NULL;
    layout->response_lengths = NULL;
}

/* ---- the padding ----------------------------------------------------------------------------- */

static int
fill_refuse(arl_state_t *state, PyObject *pad_value, arl_dtype_t dtype, const char *key)
{
    PyObject *text = PyObject_Repr(pad_value);
    const char *shown = text == NULL ? NULL : PyUnicode_AsUTF8(text);

    if (shown != NULL) {
        (void)arl_raise_format(state, ARL_ERR_PAYLOAD, "read pad_value",
                               "%s: pad_value %.80s does not fit its dtype %s", key, shown,
                               arl_dtype_name(dtype));
    }
    Py_XDECREF(text);
    return -1;
}

/* Each fill_from_* returns 1: written; 0: does not fit; -1: error set. */
static int
fill_from_integer(PyObject *number, arl_dtype_t dtype, unsigned char *fill)
{
    int overflow;
    const int64_t narrow = PyLong_AsLongLongAndOverflow(number, &overflow);
    uint64_t wide;

    if (overflow == 0) {
        if (narrow == -1 && PyErr_Occurred()) {
            return -1;
        }
        return arl_scalar_from_int64(dtype, narrow, fill) ? 1 : 0;
    }
    if (overflow < 0) {
        return 0;
    }
    wide = PyLong_AsUnsignedLongLong(number);
    if (wide == (uint64_t)-1 && PyErr_Occurred()) {
        PyErr_Clear(); /* more than 64 bits */
        return 0;
    }
    return arl_scalar_from_uint64(dtype, wide, fill) ? 1 : 0;
}

static int
fill_from_float(PyObject *pad_value, arl_dtype_t dtype, unsigned char *fill)
{
    double value;

    if (arl_dtype_kind(dtype) == 'c' && PyComplex_Check(pad_value)) {
        const Py_complex both = PyComplex_AsCComplex(pad_value);

        return arl_scalar_from_complex(dtype, both.real, both.imag, fill) ? 1 : 0;
    }
    value = PyFloat_AsDouble(pad_value);
    if (value == -1.0 && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError) &&
            !PyErr_ExceptionMatches(PyExc_OverflowError)) {
            return -1;
        }
        PyErr_Clear();
        return 0;
    }
    return arl_scalar_from_double(dtype, value, fill) ? 1 : 0;
}

int
arl_batch_fill(arl_state_t *state, PyObject *pad_value, arl_dtype_t dtype, const char *key,
               unsigned char fill[ARL_ITEM_MAX])
{
    const char kind = arl_dtype_kind(dtype);
    int fits = 0;

    if (pad_value == Py_None) {
        (void)arl_raise_format(state, ARL_ERR_PAYLOAD, "read pad_value",
                               "%s: pad_value is None: this tokenizer has no pad token; pass the "
                               "id to pad with, for example its eos_token_id",
                               key);
        return -1;
    }
    if (kind != 'b' && kind != 'i' && kind != 'u') {
        fits = fill_from_float(pad_value, dtype, fill);
    }
    else if (PyIndex_Check(pad_value) || PyArray_IsScalar(pad_value, Bool)) {
        PyObject *number = PyArray_IsScalar(pad_value, Bool)
                               ? PyBool_FromLong(PyObject_IsTrue(pad_value))
                               : PyNumber_Index(pad_value);

        if (number != NULL) {
            fits = fill_from_integer(number, dtype, fill);
            Py_DECREF(number);
        }
        else if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear(); /* a tensor of floats or of more than one element */
        }
        else {
            fits = -1;
        }
    }
    if (fits < 0) {
        return -1;
    }
    return fits == 1 ? 0 : fill_refuse(state, pad_value, dtype, key);
}
