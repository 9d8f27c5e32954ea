/* SPDX-License-Identifier: Apache-2.0 */
#include "python/errors.h"

#include <stdarg.h>

PyMethodDef arl_errors_methods[] = {{NULL, NULL, 0, NULL}};

/* Status to exception. Builtins where the fault is plainly the caller's or the system's. */
static PyObject *
error_class(const arl_state_t *state, arl_status_t code) /* borrowed from state */
{
    switch (code) {
    case ARL_OK:
        break;
    case ARL_ERR_NOMEM:
        return PyExc_MemoryError;
    case ARL_ERR_TYPE:
        return PyExc_TypeError;
    case ARL_ERR_VALUE:
        return PyExc_ValueError;
    case ARL_ERR_CLOSED:
        return state->closed_error;
    case ARL_ERR_PROCESS:
        return state->process_error;
    case ARL_ERR_SYSTEM:
        return PyExc_OSError;
    case ARL_ERR_INTERRUPTED:
        return PyExc_KeyboardInterrupt;
    case ARL_ERR_CONFIG:
        return state->config_error;
    case ARL_ERR_PAYLOAD:
        return state->payload_error;
    case ARL_ERR_WIRE:
        return state->wire_error;
    case ARL_ERR_UNAVAILABLE:
        return state->transport_unavailable_error;
    case ARL_ERR_SYNC:
        return state->weight_sync_error;
    case ARL_ERR_MISMATCH:
        return state->weight_mismatch_error;
    case ARL_ERR_TIMEOUT:
        return state->peer_timeout_error;
    case ARL_ERR_PEER_LOST:
        return state->peer_lost_error;
    case ARL_ERR_TORN:
        return state->torn_weights_error;
    }
    return PyExc_SystemError;
}

/* Attributes live in the instance dictionary, so they survive pickling. */
static int
error_set_attribute(PyObject *exception, const char *name, PyObject *value)
{
    int status;

    if (value == NULL) {
        return -1;
    }
    status = PyObject_SetAttrString(exception, name, value);
    Py_DECREF(value);
    return status;
}

static PyObject *
error_instance(PyObject *class, const arl_error_t *err)
{
    PyObject *text, *exception;

    /* The text may quote bytes that came from outside and are not UTF-8. */
    text = PyUnicode_DecodeUTF8(err->text, (Py_ssize_t)strlen(err->text), "replace");
    if (text == NULL) {
        return NULL;
    }
    if (class == PyExc_OSError) { /* makes FileNotFoundError and its kin from the number */
        exception = PyObject_CallFunction(class, "iO", (int)err->foreign, text);
    }
    else {
        exception = PyObject_CallOneArg(class, text);
    }
    Py_DECREF(text);
    if (exception == NULL) {
        return NULL;
    }
    if (error_set_attribute(exception, "code", PyUnicode_FromString(arl_status_name(err->code))) <
            0 ||
        error_set_attribute(exception, "operation", PyUnicode_FromString(err->operation)) < 0 ||
        error_set_attribute(exception, "rank",
                            err->rank >= 0 ? PyLong_FromLong(err->rank) : Py_NewRef(Py_None)) < 0 ||
        error_set_attribute(exception, "domain",
                            PyUnicode_FromString(arl_domain_name(err->domain))) < 0 ||
        error_set_attribute(exception, "foreign", PyLong_FromLongLong(err->foreign)) < 0) {
        Py_DECREF(exception);
        return NULL;
    }
    return exception;
}

PyObject *
arl_raise(arl_state_t *state, const arl_error_t *err)
{
    PyObject *class, *exception;

    if (PyErr_Occurred()) {
        return NULL;
    }
    class = error_class(state, err->code);
    exception = error_instance(class, err);
    if (exception != NULL) {
        PyErr_SetObject((PyObject *)Py_TYPE(exception), exception);
        Py_DECREF(exception);
    }
    return NULL;
}

PyObject *
arl_raise_format(arl_state_t *state, arl_status_t code, const char *operation, const char *format,
                 ...)
{
    arl_error_t err = ARL_ERROR_INIT;
    va_list args;

    err.code = code;
    (void)snprintf(err.operation, sizeof(err.operation), "%s", operation);
    va_start(args, format);
    (void)vsnprintf(err.text, sizeof(err.text), format, args);
    va_end(args);
    return arl_raise(state, &err);
}

bool
arl_deadline_check_signals(void *context)
{
    PyThreadState **thread = (PyThreadState **)context;
    bool raised;

    PyEval_RestoreThread(*thread);
    raised = PyErr_CheckSignals() != 0;
    *thread = PyEval_SaveThread();
    return raised;
}

static PyObject *
error_new(PyObject *module, const char *name, PyObject *base, PyObject *builtin, const char *doc)
{
    PyObject *bases, *class;
    char full_name[96];

    (void)snprintf(full_name, sizeof(full_name), "arctic_rl_c.%s", name);
    if (base == NULL) {
        bases = Py_NewRef(builtin);
    }
    else if (builtin == NULL) {
        bases = Py_NewRef(base);
    }
    else {
        bases = PyTuple_Pack(2, base, builtin);
        if (bases == NULL) {
            return NULL;
        }
    }
    class = PyErr_NewExceptionWithDoc(full_name, doc, bases, NULL);
    Py_DECREF(bases);
    if (class != NULL && PyModule_AddObjectRef(module, name, class) < 0) {
        Py_CLEAR(class);
    }
    return class;
}

int
arl_errors_exec(PyObject *module, arl_state_t *state)
{
#define ARL_ERROR_NEW(field, name, base, builtin, doc)                                             \
    state->field = error_new(module, name, ARL_ERROR_BASE_##base, builtin, doc);                   \
    if (state->field == NULL) {                                                                    \
        return -1;                                                                                 \
    }
#define ARL_ERROR_BASE_NULL NULL
#define ARL_ERROR_BASE_arctic_error state->arctic_error
#define ARL_ERROR_BASE_weight_sync_error state->weight_sync_error
    ARL_STATE_ERRORS(ARL_ERROR_NEW)
#undef ARL_ERROR_NEW
    return 0;
}
