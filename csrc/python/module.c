/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The module object: state, features, nothing else. Reading order of csrc: core/arl_status.h,
 * core/arl_view.h, python/state.h, then whichever feature is wanted.
 */
#define ARL_IMPORTS_NUMPY
#include "python/state.h"

static int
module_traverse(PyObject *module, visitproc visit, void *arg)
{
    arl_state_t *state = arl_state_from_module(module);

#define ARL_VISIT(field) Py_VISIT(state->field);
#define ARL_VISIT_ERROR(field, name, base, builtin, doc) Py_VISIT(state->field);
#define ARL_VISIT_NAME(name) Py_VISIT(state->names.name);
    ARL_STATE_TYPES(ARL_VISIT)
    ARL_STATE_OBJECTS(ARL_VISIT)
    ARL_STATE_ERRORS(ARL_VISIT_ERROR)
    ARL_STATE_NAMES(ARL_VISIT_NAME)
#undef ARL_VISIT
#undef ARL_VISIT_ERROR
#undef ARL_VISIT_NAME
    for (int i = 0; i < ARL_DTYPE_COUNT; i++) {
        Py_VISIT(state->torch_dtype_of[i]);
    }
    return 0;
}

static int
module_clear(PyObject *module)
{
    arl_state_t *state = arl_state_from_module(module);

#define ARL_CLEAR(field) Py_CLEAR(state->field);
#define ARL_CLEAR_ERROR(field, name, base, builtin, doc) Py_CLEAR(state->field);
#define ARL_CLEAR_NAME(name) Py_CLEAR(state->names.name);
    ARL_STATE_TYPES(ARL_CLEAR)
    ARL_STATE_OBJECTS(ARL_CLEAR)
    ARL_STATE_ERRORS(ARL_CLEAR_ERROR)
    ARL_STATE_NAMES(ARL_CLEAR_NAME)
#undef ARL_CLEAR
#undef ARL_CLEAR_ERROR
#undef ARL_CLEAR_NAME
    for (int i = 0; i < ARL_DTYPE_COUNT; i++) {
        Py_CLEAR(state->torch_dtype_of[i]);
    }
    return 0;
}

static void
module_free(void *module)
{
    (void)module_clear((PyObject *)module);
}

static int
module_add_names(arl_state_t *state)
{
#define ARL_INTERN(name)                                                                           \
    state->names.name = PyUnicode_InternFromString(#name);                                         \
    if (state->names.name == NULL) {                                                               \
        return -1;                                                                                 \
    }
    ARL_STATE_NAMES(ARL_INTERN)
#undef ARL_INTERN
    return 0;
}

/* A failure leaves the half-filled state to module_free. */
static int
module_exec(PyObject *module)
{
    arl_state_t *state = arl_state_from_module(module);
    PyObject *numpy = PyImport_ImportModule("numpy"); /* whose macro makes all errors one */

    Py_XDECREF(numpy);
    if (numpy == NULL || PyArray_ImportNumPyAPI() < 0 || module_add_names(state) < 0) {
        return -1;
    }
#define ARL_FEATURE_EXEC(feature)                                                                  \
    if (PyModule_AddFunctions(module, arl_##feature##_methods) < 0 ||                              \
        arl_##feature##_exec(module, state) < 0) {                                                 \
        return -1;                                                                                 \
    }
    ARL_FEATURES(ARL_FEATURE_EXEC)
#undef ARL_FEATURE_EXEC
    return 0;
}

arl_state_t *
arl_state_from_type(PyTypeObject *type)
{
#if PY_VERSION_HEX >= 0x030B0000
    PyObject *module = PyType_GetModuleByDef(type, &arl_module_def);

    return module == NULL ? NULL : arl_state_from_module(module);
#else
    /* 3.10 has no PyType_GetModuleByDef: walk the MRO for the type that came from our module. */
    PyObject *mro = type->tp_mro;

    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(mro); i++) {
        PyTypeObject *base = (PyTypeObject *)PyTuple_GET_ITEM(mro, i); /* borrowed from mro */

        if (PyType_HasFeature(base, Py_TPFLAGS_HEAPTYPE)) {
            PyObject *module = ((PyHeapTypeObject *)base)->ht_module; /* borrowed from base */

            if (module != NULL && PyModule_GetDef(module) == &arl_module_def) {
                return arl_state_from_module(module);
            }
        }
    }
    PyErr_Format(PyExc_TypeError, "%s is not a type of arctic_rl_c", type->tp_name);
    return NULL;
#endif
}

int
arl_state_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **slot)
{
    *slot = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    if (*slot == NULL) {
        return -1;
    }
    return PyModule_AddType(module, *slot);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#if PY_VERSION_HEX >= 0x030C0000
    /* NumPy's C API table is per process, so more cannot be claimed. */
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, NULL},
};

PyDoc_STRVAR(module_doc, "The C half of arctic_rl_c: batches, payloads, wire format, weight sync.");

struct PyModuleDef arl_module_def = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "arctic_rl_c._core",
    .m_doc = module_doc,
    .m_size = sizeof(arl_state_t),
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__core(void);

PyMODINIT_FUNC
PyInit__core(void)
{
    return PyModuleDef_Init(&arl_module_def);
}
