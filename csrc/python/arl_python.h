/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_PYTHON_H
#define ARL_PYTHON_H

/* The first include of every file in csrc/python, and of no file elsewhere. */
#include <Python.h>

/* One import_array() for the whole extension: module.c does it, the others share its table. */
#define NPY_NO_DEPRECATED_API NPY_1_23_API_VERSION
#define NPY_TARGET_VERSION NPY_1_23_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL arl_numpy_api
#ifndef ARL_IMPORTS_NUMPY
#    define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#if PY_VERSION_HEX < 0x030A0000
#    error "arctic_rl_c needs CPython 3.10 or later"
#endif

/* Py_NewRef, Py_XNewRef: 3.10. PyType_FromModuleAndSpec, PyType_GetModuleByDef: 3.10 / 3.11. */
#if PY_VERSION_HEX < 0x030D0000
/* As in 3.13: 1 found (strong reference), 0 missing, -1 error. */
static inline int
PyDict_GetItemRef(PyObject *dict, PyObject *key, PyObject **result)
{
    PyObject *item = PyDict_GetItemWithError(dict, key); /* borrowed, made strong below */

    *result = Py_XNewRef(item);
    if (item != NULL) {
        return 1;
    }
    return PyErr_Occurred() ? -1 : 0;
}

static inline int
PyDict_GetItemStringRef(PyObject *dict, const char *key, PyObject **result)
{
    PyObject *name = PyUnicode_FromString(key);
    int found;

    *result = NULL;
    if (name == NULL) {
        return -1;
    }
    found = PyDict_GetItemRef(dict, name, result);
    Py_DECREF(name);
    return found;
}

/* As in 3.13: PyObject_HasAttr would take a failed allocation for "no". */
static inline int
PyObject_HasAttrWithError(PyObject *object, PyObject *name)
{
    PyObject *attribute = PyObject_GetAttr(object, name);

    if (attribute != NULL) {
        Py_DECREF(attribute);
        return 1;
    }
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
        return -1;
    }
    PyErr_Clear();
    return 0;
}

static inline int
PyObject_HasAttrStringWithError(PyObject *object, const char *name)
{
    PyObject *text = PyUnicode_FromString(name);
    int found = text == NULL ? -1 : PyObject_HasAttrWithError(object, text);

    Py_XDECREF(text);
    return found;
}

static inline PyObject *
PyList_GetItemRef(PyObject *list, Py_ssize_t index)
{
    return Py_XNewRef(PyList_GetItem(list, index)); /* borrowed, made strong here */
}
#endif

#endif
