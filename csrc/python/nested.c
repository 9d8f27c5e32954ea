/* SPDX-License-Identifier: Apache-2.0 */
/* Jagged batches in and out: nested torch tensors, and (values, offsets) tuples for NumPy. */
#include "python/tensor.h"

#include "python/errors.h"

int
arl_nested_check(arl_state_t *state, PyObject *object)
{
    PyObject *nested, *layout;
    int torch, is_nested;

    if (PyTuple_Check(object)) {
        return PyTuple_GET_SIZE(object) == 2;
    }
    if ((PyObject *)Py_TYPE(object) == state->torch_nested_type) {
        return 1; /* is_nested and layout go through torch's Python dispatch: 12 us a tensor */
    }
    torch = arl_is_torch_tensor(state, object);
    if (torch <= 0) {
        return torch;
    }
    nested = PyObject_GetAttr(object, state->names.is_nested);
    if (nested == NULL) {
        return -1;
    }
    is_nested = PyObject_IsTrue(nested);
    Py_DECREF(nested);
    if (is_nested <= 0) {
        return is_nested;
    }
    layout = PyObject_GetAttr(object, state->names.layout);
    if (layout == NULL) {
        return -1;
    }
    if (layout != state->torch_jagged) {
        PyErr_SetString(PyExc_TypeError,
                        "nested tensor with strided layout; build it with layout=torch.jagged");
        is_nested = -1;
    }
    else if ((PyObject *)Py_TYPE(object) != state->torch_tensor_type) {
        Py_XSETREF(state->torch_nested_type, Py_NewRef(Py_TYPE(object)));
    }
    Py_DECREF(layout);
    return is_nested;
}

/* arl_tensor_read_int64 of a part of a jagged tensor, which messages name: "input offsets". */
static int
nested_read_int64(arl_state_t *state, PyObject *object, const char *key, const char *part,
                  arl_status_t code, int64_t **values_p, int64_t *count_p)
{
    char name[96];

    (void)snprintf(name, sizeof(name), "%.80s %s", key, part);
    return arl_tensor_read_int64(state, object, name, code, values_p, count_p);
}

/* Fills nested->lengths from the offsets, or from `lengths` where rows leave holes. */
static int
nested_read_rows(arl_state_t *state, PyObject *lengths, const char *key, arl_status_t code,
                 arl_nested_t *nested, int64_t offset_count)
{
    if (offset_count < 1) {
        (void)arl_raise_format(state, code, "import nested tensor",
                               "%s: offsets are empty, rows + 1 entries are needed", key);
        return -1;
    }
    nested->rows = offset_count - 1;
    if (lengths != Py_None) {
        int64_t count;

        if (nested_read_int64(state, lengths, key, "lengths", code, &nested->lengths, &count) < 0) {
            return -1;
        }
        if (count != nested->rows) {
            (void)arl_raise_format(state, code, "import nested tensor",
                                   "%s: %lld lengths for %lld rows", key, (long long)count,
                                   (long long)nested->rows);
            return -1;
        }
        return 0;
    }
    nested->lengths = PyMem_New(int64_t, nested->rows > 0 ? (size_t)nested->rows : 1);
    if (nested->lengths == NULL) {
        (void)PyErr_NoMemory();
        return -1;
    }
    for (int64_t i = 0; i < nested->rows; i++) {
        if (__builtin_sub_overflow(nested->offsets[i + 1], nested->offsets[i],
                                   &nested->lengths[i])) {
            nested->lengths[i] = -1;
        }
    }
    return 0;
}

/*
 * Rows of several components ([4, total] position ids of mrope, [total, width] features) are
 * refused here, once for every caller: which axis is the ragged one must never be guessed.
 */
static int
nested_check_rows(arl_state_t *state, const char *key, arl_status_t code,
                  const arl_nested_t *nested, bool holes)
{
    const arl_view_t *values = &nested->values.view;
    int64_t total;

    if (values->ndim != 1) {
        char text[96];

        arl_view_describe(values, text, sizeof(text));
        (void)arl_raise_format(state, code, "import nested tensor",
                               "%s: its jagged values are %s, but only rows of one dimension are "
                               "supported (not mrope position ids or other rows of components)",
                               key, text);
        return -1;
    }
    total = values->shape[0];
    if (!holes && (nested->offsets[0] != 0 || nested->offsets[nested->rows] != total)) {
        (void)arl_raise_format(state, code, "import nested tensor",
                               "%s: offsets run from %lld to %lld, but there are %lld values", key,
                               (long long)nested->offsets[0],
                               (long long)nested->offsets[nested->rows], (long long)total);
        return -1;
    }
    for (int64_t i = 0; i < nested->rows; i++) {
        const int64_t offset = nested->offsets[i], length = nested->lengths[i];

        if (offset < 0 || length < 0 || offset > total || length > total - offset) {
            (void)arl_raise_format(state, code, "import nested tensor",
                                   "%s: row %lld spans [%lld, +%lld) of %lld values", key,
                                   (long long)i, (long long)offset, (long long)length,
                                   (long long)total);
            return -1;
        }
    }
    return 0;
}

/*
 * values(), offsets() or lengths() of a jagged tensor. The attribute behind the method is read
 * where torch has it: the method goes through Python dispatch and autograd, 16 us a call.
 */
static PyObject *
nested_part(arl_state_t *state, PyObject *object, PyObject *attribute, PyObject *method)
{
    if ((PyObject *)Py_TYPE(object) == state->torch_nested_type) {
        PyObject *part = PyObject_GetAttr(object, attribute);

        if (part != NULL || !PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return part;
        }
        PyErr_Clear();
    }
    return PyObject_CallMethodNoArgs(object, method);
}

int
arl_nested_import(arl_state_t *state, PyObject *object, const char *key, arl_status_t code,
                  arl_nested_t *out_p)
{
    arl_nested_t nested = {0};
    PyObject *values = NULL, *lengths = NULL;
    int64_t offset_count;

    if (PyTuple_Check(object)) {                         /* (values, offsets) */
        values = Py_NewRef(PyTuple_GET_ITEM(object, 0)); /* borrowed, made strong here */
        nested.offsets_object = Py_NewRef(PyTuple_GET_ITEM(object, 1)); /* borrowed, the same */
        lengths = Py_NewRef(Py_None);
    }
    else {
        values = nested_part(state, object, state->names._values, state->names.values);
        nested.offsets_object = values == NULL ? NULL
                                               : nested_part(state, object, state->names._offsets,
                                                             state->names.offsets);
        lengths = nested.offsets_object == NULL
                      ? NULL
                      : nested_part(state, object, state->names._lengths, state->names.lengths);
    }
    if (lengths == NULL ||
        arl_tensor_import(state, values, key, ARL_TENSOR_CPU_ONLY, code, &nested.values) < 0 ||
        nested_read_int64(state, nested.offsets_object, key, "offsets", code, &nested.offsets,
                          &offset_count) < 0 ||
        nested_read_rows(state, lengths, key, code, &nested, offset_count) < 0 ||
        nested_check_rows(state, key, code, &nested, lengths != Py_None) < 0) {
        Py_XDECREF(values);
        Py_XDECREF(lengths);
        arl_nested_release(&nested);
        return -1;
    }
    Py_DECREF(values);
    Py_DECREF(lengths);
    *out_p = nested;
    return 0;
}

void
arl_nested_release(arl_nested_t *nested)
{
    arl_tensor_release(&nested->values);
    PyMem_Free(nested->offsets);
    PyMem_Free(nested->lengths);
    nested->offsets = NULL;
    nested->lengths = NULL;
    Py_CLEAR(nested->offsets_object);
}

PyObject *
arl_nested_new(arl_state_t *state, arl_tensor_kind_t like, PyObject *values, PyObject *offsets)
{
    if (like != ARL_TENSOR_TORCH) {
        return PyTuple_Pack(2, values, offsets);
    }
    return PyObject_CallFunctionObjArgs(state->torch_nested_from_jagged, values, offsets, NULL);
}
