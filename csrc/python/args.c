/* SPDX-License-Identifier: Apache-2.0 */
#include "python/args.h"

#include "python/tensor.h"

static int
bind_keyword(const arl_signature_t *signature, PyObject *name, PyObject *value, PyObject **bound)
{
    for (int i = 0; i < signature->count; i++) {
        if (PyUnicode_CompareWithASCIIString(name, signature->names[i]) != 0) {
            continue;
        }
        if (bound[i] != NULL) {
            PyErr_Format(PyExc_TypeError, "%s() got multiple values for argument '%s'",
                         signature->function, signature->names[i]);
            return -1;
        }
        bound[i] = value;
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument '%U'",
                 signature->function, name);
    return -1;
}

int
arl_args_bind(const arl_signature_t *signature, PyObject *const *args, Py_ssize_t nargs,
              PyObject *kwnames, PyObject **bound)
{
    const Py_ssize_t keywords = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);

    if (nargs > signature->positional) {
        PyErr_Format(PyExc_TypeError, "%s() takes at most %d positional argument%s (%zd given)",
                     signature->function, signature->positional,
                     signature->positional == 1 ? "" : "s", nargs);
        return -1;
    }
    for (int i = 0; i < signature->count; i++) {
        bound[i] = i < nargs ? args[i] : NULL;
    }
    for (Py_ssize_t i = 0; i < keywords; i++) {
        PyObject *name = PyTuple_GET_ITEM(kwnames, i); /* borrowed from kwnames */

        if (bind_keyword(signature, name, args[nargs + i], bound) < 0) {
            return -1;
        }
    }
    for (int i = 0; i < signature->required; i++) {
        if (bound[i] == NULL) {
            PyErr_Format(PyExc_TypeError, "%s() missing required argument '%s' (pos %d)",
                         signature->function, signature->names[i], i + 1);
            return -1;
        }
    }
    return 0;
}

int
arl_args_size(const arl_signature_t *signature, int index, PyObject *value, int64_t fallback,
              int64_t *size_p)
{
    Py_ssize_t size;

    if (value == NULL || value == Py_None) {
        *size_p = fallback;
        return 0;
    }
    if (!PyIndex_Check(value)) {
        PyErr_Format(PyExc_TypeError, "%s() argument '%s' must be an integer, not %s",
                     signature->function, signature->names[index], arl_type_name(value));
        return -1;
    }
    size = PyNumber_AsSsize_t(value, PyExc_OverflowError);
    if (size == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (size < 0) {
        PyErr_Format(PyExc_ValueError, "%s() argument '%s' must not be negative, got %zd",
                     signature->function, signature->names[index], size);
        return -1;
    }
    *size_p = size;
    return 0;
}

int
arl_args_integer(const char *function, const char *name, PyObject *value, int64_t low, int64_t high,
                 int64_t *number_p)
{
    PyObject *index;
    long long number;
    int overflow;

    if (!PyIndex_Check(value)) {
        PyErr_Format(PyExc_TypeError, "%s: %s is an integer, not %s", function, name,
                     arl_type_name(value));
        return -1;
    }
    index = PyNumber_Index(value);
    if (index == NULL) {
        return -1;
    }
    number = PyLong_AsLongLongAndOverflow(index, &overflow);
    if (overflow != 0 || number < low || number > high) {
        PyErr_Format(overflow != 0 ? PyExc_OverflowError : PyExc_ValueError,
                     "%s: %s is %lld to %lld, not %R%s", function, name, (long long)low,
                     (long long)high, index, overflow > 0 ? ", which is too big" : "");
        Py_DECREF(index);
        return -1;
    }
    Py_DECREF(index);
    *number_p = number;
    return 0;
}

int
arl_args_flag(PyObject *value, bool fallback, bool *flag_p)
{
    const int truth = value == NULL ? fallback : PyObject_IsTrue(value);

    *flag_p = truth > 0;
    return truth < 0 ? -1 : 0;
}
