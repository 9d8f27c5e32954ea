/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Config objects as JSON would give them back (contract 4.2), without the text in between: a
 * copy that holds nothing but dict, list, str, int, float, bool and None.
 */
#include "python/payload_rows.h"

#include "python/errors.h"
#include "python/tensor.h"

static PyObject *plain_copy(arl_state_t *state, PyObject *object);

static PyObject *
plain_list(arl_state_t *state, PyObject *sequence) /* a list or tuple */
{
    PyObject *items = PySequence_Tuple(sequence), *list; /* a snapshot: items may run Python code */

    if (items == NULL) {
        return NULL;
    }
    list = PyList_New(PyTuple_GET_SIZE(items));
    for (Py_ssize_t i = 0; list != NULL && i < PyTuple_GET_SIZE(items); i++) {
        PyObject *item = plain_copy(state, PyTuple_GET_ITEM(items, i)); /* borrowed from items */

        if (item == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, i, item);
    }
    Py_DECREF(items);
    return list;
}

/* JSON has only text keys: numbers, booleans and None become their JSON text. */
static PyObject *
plain_key(arl_state_t *state, PyObject *key)
{
    if (PyUnicode_Check(key)) {
        return PyUnicode_FromObject(key);
    }
    if (PyBool_Check(key)) {
        return PyUnicode_FromString(key == Py_True ? "true" : "false");
    }
    if (key == Py_None) {
        return PyUnicode_FromString("null");
    }
    if (PyLong_Check(key)) {
        return PyLong_Type.tp_repr(key);
    }
    if (PyFloat_Check(key)) {
        const double value = PyFloat_AS_DOUBLE(key);

        if (value != value) {
            return PyUnicode_FromString("NaN");
        }
        if (value - value != 0.0) {
            return PyUnicode_FromString(value > 0.0 ? "Infinity" : "-Infinity");
        }
        return PyFloat_Type.tp_repr(key);
    }
    return arl_raise_format(
        state, ARL_ERR_PAYLOAD, "serialise config",
        "actor_config: a dict has a key of type %s; only text, numbers, bool and "
        "None can be keys",
        arl_type_name(key));
}

static PyObject *
plain_dict(arl_state_t *state, PyObject *mapping) /* a dict */
{
    PyObject *items = PyMapping_Items(mapping), *dict; /* a snapshot, as above */

    if (items == NULL) {
        return NULL;
    }
    dict = PyDict_New();
    for (Py_ssize_t i = 0; dict != NULL && i < PyList_GET_SIZE(items); i++) {
        PyObject *item = PyList_GET_ITEM(items, i); /* borrowed from items */
        PyObject *key, *value = NULL;

        if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 2) {
            PyErr_SetString(PyExc_ValueError, "items() must return pairs");
            key = NULL;
        }
        else {
            key = plain_key(state, PyTuple_GET_ITEM(item, 0)); /* borrowed from item */
            /* borrowed from item */
            value = key == NULL ? NULL : plain_copy(state, PyTuple_GET_ITEM(item, 1));
        }
        if (value == NULL || PyDict_SetItem(dict, key, value) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(value);
        Py_XDECREF(key);
    }
    Py_DECREF(items);
    return dict;
}

/* Subclasses (enums, NumPy's float64) lose their type, as they would in text. */
static PyObject *
plain_copy(arl_state_t *state, PyObject *object)
{
    PyObject *copy;

    if (object == Py_None || PyBool_Check(object) || PyUnicode_CheckExact(object) ||
        PyLong_CheckExact(object) || PyFloat_CheckExact(object)) {
        return Py_NewRef(object);
    }
    if (PyUnicode_Check(object)) {
        return PyUnicode_FromObject(object);
    }
    if (PyLong_Check(object)) {
        return PyNumber_Long(object);
    }
    if (PyFloat_Check(object)) {
        return PyFloat_FromDouble(PyFloat_AS_DOUBLE(object));
    }
    if (!PyDict_Check(object) && !PyList_Check(object) && !PyTuple_Check(object)) {
        return Py_NewRef(Py_None); /* no JSON form */
    }
    if (Py_EnterRecursiveCall(" while serialising a config")) {
        return NULL;
    }
    copy = PyDict_Check(object) ? plain_dict(state, object) : plain_list(state, object);
    Py_LeaveRecursiveCall();
    return copy;
}

PyObject *
arl_payload_plain(arl_state_t *state, PyObject *object, const char *key)
{
    PyObject *attributes, *copy;

    if (object == Py_None) {
        return PyDict_New();
    }
    if (PyDict_Check(object)) {
        return plain_dict(state, object);
    }
    attributes = PyObject_GetAttr(object, state->names.__dict__);
    if (attributes == NULL || !PyDict_Check(attributes)) {
        Py_XDECREF(attributes);
        PyErr_Clear();
        return arl_raise_format(state, ARL_ERR_PAYLOAD, "serialise config",
                                "%s: a %s has no attributes to serialise; pass a dataclass, a "
                                "namespace or a dict",
                                key, arl_type_name(object));
    }
    if (PyDict_Contains(attributes, state->names._metadata) > 0) {
        Py_DECREF(attributes);
        return arl_raise_format(state, ARL_ERR_PAYLOAD, "serialise config",
                                "%s: is an OmegaConf container; pass "
                                "OmegaConf.to_container(%s, resolve=True)",
                                key, key);
    }
    copy = plain_dict(state, attributes);
    Py_DECREF(attributes);
    return copy;
}

/* ---- copies of copies ------------------------------------------------------------------------ */

static PyObject *
renew_list(PyObject *list)
{
    PyObject *copy = PyList_New(PyList_GET_SIZE(list));

    for (Py_ssize_t i = 0; copy != NULL && i < PyList_GET_SIZE(list); i++) {
        /* borrowed from list, which nobody else has */
        PyObject *item = arl_payload_renew(PyList_GET_ITEM(list, i));

        if (item == NULL) {
            Py_CLEAR(copy);
            break;
        }
        PyList_SET_ITEM(copy, i, item);
    }
    return copy;
}

static PyObject *
renew_dict(PyObject *dict)
{
    PyObject *copy = PyDict_Copy(dict), *key, *value;
    Py_ssize_t place = 0;

    /* borrowed from dict; of the copy only values change, so that it stays as it is */
    while (copy != NULL && PyDict_Next(dict, &place, &key, &value)) {
        PyObject *item;

        if (!PyDict_CheckExact(value) && !PyList_CheckExact(value)) {
            continue;
        }
        item = arl_payload_renew(value);
        if (item == NULL || PyDict_SetItem(copy, key, item) < 0) {
            Py_CLEAR(copy);
        }
        Py_XDECREF(item);
    }
    return copy;
}

PyObject *
arl_payload_renew(PyObject *plain)
{
    PyObject *copy;

    if (!PyDict_CheckExact(plain) && !PyList_CheckExact(plain)) {
        return Py_NewRef(plain);
    }
    if (Py_EnterRecursiveCall(" while serialising a config")) {
        return NULL;
    }
    copy = PyDict_CheckExact(plain) ? renew_dict(plain) : renew_list(plain);
    Py_LeaveRecursiveCall();
    return copy;
}
