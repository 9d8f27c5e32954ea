/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The awaitable. One core, operation_send; send(), throw(), close() and iteration are thin. It
 * passes everything through: what the transport yields goes up, what the loop sends goes down,
 * exceptions and cancellation keep their type and gain a note that says how far things were.
 */
#include "python/operation.h"

#include "python/errors.h"
#include "python/tensor.h"

/* ---- life ------------------------------------------------------------------------------------ */

arl_operation_t *
arl_operation_new(arl_client_t *client, const arl_operation_kind_t *kind, const char *name)
{
    PyTypeObject *type = client->state->operation_type;
    arl_operation_t *op = (arl_operation_t *)type->tp_alloc(type, 0);

    if (op != NULL) {
        op->kind = kind;
        op->name = name;
        op->state = client->state;
        op->client = Py_NewRef((PyObject *)client);
    }
    return op;
}

static int
operation_traverse(PyObject *self, visitproc visit, void *arg)
{
    arl_operation_t *op = (arl_operation_t *)self;

    Py_VISIT(Py_TYPE(self));
#define OPERATION_VISIT(name) Py_VISIT(op->name);
    ARL_OPERATION_OBJECTS(OPERATION_VISIT)
#undef OPERATION_VISIT
    return 0;
}

static int
operation_clear(PyObject *self)
{
    arl_operation_t *op = (arl_operation_t *)self;

    op->status = ARL_OPERATION_DONE;
#define OPERATION_CLEAR(name) Py_CLEAR(op->name);
    ARL_OPERATION_OBJECTS(OPERATION_CLEAR)
#undef OPERATION_CLEAR
    return 0;
}

static void
operation_abandon(arl_operation_t *op)
{
    if (op->kind->abandon != NULL) {
        op->kind->abandon(op);
    }
}

static void
operation_dealloc(PyObject *self)
{
    arl_operation_t *op = (arl_operation_t *)self;
    PyTypeObject *type = Py_TYPE(self);

    PyObject_GC_UnTrack(self);
    if (op->status == ARL_OPERATION_SUSPENDED) {
        operation_abandon(op);
    }
    (void)operation_clear(self); /* a suspended coroutine of the transport closes itself */
    type->tp_free(self);
    Py_DECREF(type);
}

/* The end of an operation: batches and answers are let go at once, not with the object. */
static void
operation_finish(arl_operation_t *op)
{
    (void)operation_clear((PyObject *)op);
}

/* ---- notes ----------------------------------------------------------------------------------- */

/* exception.add_note(text); before 3.11 the list that it would have made. */
static int
exception_add_note(PyObject *exception, PyObject *text)
{
#if PY_VERSION_HEX >= 0x030B0000
    PyObject *done = PyObject_CallMethod(exception, "add_note", "O", text);

    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
#else
    PyObject *notes = PyObject_GetAttrString(exception, "__notes__");
    int status;

    if (notes == NULL) {
        PyErr_Clear();
        notes = PyList_New(0);
        if (notes == NULL || PyObject_SetAttrString(exception, "__notes__", notes) < 0) {
            Py_XDECREF(notes);
            return -1;
        }
    }
    status = PyList_Append(notes, text);
    Py_DECREF(notes);
    return status;
#endif
}

/* Adds where the operation was to the live exception, which stays the live exception. */
static void
operation_annotate(const arl_operation_t *op)
{
    PyObject *type, *value, *traceback, *text;
    char where[256];

    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL) {
        (void)PyException_SetTraceback(value, traceback);
    }
    op->kind->describe(op, where, sizeof(where));
    text = PyUnicode_FromFormat("arctic_rl_c: %s %s", op->name, where);
    if (text == NULL || exception_add_note(value, text) < 0) {
        PyErr_Clear(); /* the failure itself matters more than the note */
    }
    Py_XDECREF(text);
    PyErr_Restore(type, value, traceback);
}

static PySendResult
operation_fail(arl_operation_t *op)
{
    operation_annotate(op);
    operation_abandon(op);
    operation_finish(op);
    return PYGEN_ERROR;
}

/* ---- driving --------------------------------------------------------------------------------- */

static bool
is_iterable_coroutine(PyObject *object) /* a generator under types.coroutine */
{
    PyObject *code = PyObject_GetAttrString(object, "gi_code");
    const bool is = code != NULL && PyCode_Check(code) &&
                    (((PyCodeObject *)code)->co_flags & CO_ITERABLE_COROUTINE) != 0;

    Py_XDECREF(code);
    PyErr_Clear();
    return is;
}

/* What `await object` would iterate over. */
static PyObject *
awaitable_iterator(const arl_operation_t *op, PyObject *object)
{
    const PyAsyncMethods *methods = Py_TYPE(object)->tp_as_async;
    PyObject *iterator;

    if (PyCoro_CheckExact(object) || (PyGen_CheckExact(object) && is_iterable_coroutine(object))) {
        return Py_NewRef(object);
    }
    if (methods == NULL || methods->am_await == NULL) {
        return PyErr_Format(PyExc_TypeError,
                            "%s: the transport's method returned a %s, which cannot be awaited; "
                            "its methods must be coroutine functions",
                            op->name, arl_type_name(object));
    }
    iterator = methods->am_await(object);
    if (iterator != NULL && (!PyIter_Check(iterator) || PyCoro_CheckExact(iterator))) {
        PyErr_Format(PyExc_TypeError, "%s: %s.__await__ returned a %s, not an iterator", op->name,
                     arl_type_name(object), arl_type_name(iterator));
        Py_CLEAR(iterator);
    }
    return iterator;
}

/*
 * Sends `value` to what is being driven. NEXT: it waits, *result_p goes up. RETURN: it has ended,
 * *result_p is its answer. ERROR: the operation has failed, *result_p is untouched.
 */
static PySendResult
operation_resume(arl_operation_t *op, PyObject *value, PyObject **result_p)
{
    PyObject *given = NULL;
    const PySendResult sent = PyIter_Send(op->waiting, value, &given);

    if (sent == PYGEN_ERROR) {
        return operation_fail(op);
    }
    if (sent == PYGEN_NEXT) {
        op->status = ARL_OPERATION_SUSPENDED;
    }
    else {
        Py_CLEAR(op->waiting);
    }
    *result_p = given;
    return sent;
}

/*
 * From one answer on: begins the next call, or ends. `answer` is stolen, NULL at the start. A call
 * that is done already is not waited for: no turn of the loop is spent on it.
 */
static PySendResult
operation_proceed(arl_operation_t *op, PyObject *answer, PyObject **result_p)
{
    PySendResult sent;

    do {
        PyObject *next = NULL;
        const int more = op->kind->advance(op, answer, &next);

        Py_CLEAR(answer);
        if (more < 0) {
            return operation_fail(op);
        }
        if (more == 0) {
            operation_finish(op);
            *result_p = next;
            return PYGEN_RETURN;
        }
        Py_XSETREF(op->waiting, awaitable_iterator(op, next));
        Py_DECREF(next);
        if (op->waiting == NULL) {
            return operation_fail(op);
        }
        sent = operation_resume(op, Py_None, &answer);
    } while (sent == PYGEN_RETURN);
    if (sent == PYGEN_NEXT) {
        *result_p = answer;
    }
    return sent;
}

/* Refuses what a coroutine would refuse too, then marks the operation as running. */
static int
operation_enter(arl_operation_t *op)
{
    if (op->status == ARL_OPERATION_RUNNING) {
        PyErr_Format(PyExc_ValueError, "%s is already executing", op->name);
        return -1;
    }
    if (op->status == ARL_OPERATION_DONE) {
        PyErr_Format(PyExc_RuntimeError, "cannot reuse an already awaited %s", op->name);
        return -1;
    }
    return 0;
}

static PySendResult
operation_send(PyObject *self, PyObject *value, PyObject **result_p)
{
    arl_operation_t *op = (arl_operation_t *)self;
    const bool begins = op->status == ARL_OPERATION_NEW;
    PyObject *given = NULL;
    PySendResult sent;

    *result_p = NULL; /* callers tell an error from a return by it */
    if (operation_enter(op) < 0) {
        return PYGEN_ERROR;
    }
    if (begins && value != Py_None) {
        PyErr_Format(PyExc_TypeError, "can't send non-None value to a just-started %s", op->name);
        return PYGEN_ERROR;
    }
    op->status = ARL_OPERATION_RUNNING;
    if (begins) {
        return operation_proceed(op, NULL, result_p);
    }
    sent = operation_resume(op, value, &given);
    if (sent == PYGEN_RETURN) {
        return operation_proceed(op, given, result_p);
    }
    *result_p = given;
    return sent;
}

/* ---- the coroutine protocol in Python -------------------------------------------------------- */

/* Turns the end into StopIteration. Always an instance: a tuple result must not become its args. */
static PyObject *
sent_to_object(PySendResult sent, PyObject *result)
{
    PyObject *stop;

    if (sent != PYGEN_RETURN) {
        return result;
    }
    stop = PyObject_CallOneArg(PyExc_StopIteration, result);
    Py_DECREF(result);
    if (stop != NULL) {
        PyErr_SetObject(PyExc_StopIteration, stop);
        Py_DECREF(stop);
    }
    return NULL;
}

static PyObject *
operation_iternext(PyObject *self)
{
    PyObject *result;
    const PySendResult sent = operation_send(self, Py_None, &result);

    return sent_to_object(sent, result);
}

static PyObject *
operation_await(PyObject *self)
{
    arl_operation_t *op = (arl_operation_t *)self;

    if (op->awaited || op->status != ARL_OPERATION_NEW) {
        return PyErr_Format(PyExc_RuntimeError,
                            op->status == ARL_OPERATION_DONE ? "cannot reuse an already awaited %s"
                                                             : "%s is being awaited already",
                            op->name);
    }
    op->awaited = true;
    return Py_NewRef(self);
}

PyDoc_STRVAR(send_doc, "send($self, value, /)\n"
                       "--\n\n"
                       "Resume the operation; what event loops call. StopIteration carries the "
                       "result.");

static PyObject *
operation_send_method(PyObject *self, PyObject *value)
{
    PyObject *result;
    const PySendResult sent = operation_send(self, value, &result);

    return sent_to_object(sent, result);
}

/* The exception that throw(type[, value[, traceback]]) means. */
static PyObject *
throw_exception(PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *type = Py_NewRef(args[0]);
    PyObject *value = nargs > 1 && args[1] != Py_None ? Py_NewRef(args[1]) : NULL;
    PyObject *traceback = nargs > 2 && args[2] != Py_None ? Py_NewRef(args[2]) : NULL;

    if (traceback != NULL && !PyTraceBack_Check(traceback)) {
        PyErr_SetString(PyExc_TypeError, "throw() third argument must be a traceback object");
        goto release_parts;
    }
    if (PyExceptionInstance_Check(type) && value == NULL) {
        value = type;
        type = Py_NewRef(PyExceptionInstance_Class(value));
    }
    else if (!PyExceptionClass_Check(type)) {
        PyErr_Format(PyExc_TypeError,
                     "exceptions must be classes or instances deriving from BaseException, not %s",
                     arl_type_name(type));
        goto release_parts;
    }
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL && PyException_SetTraceback(value, traceback) < 0) {
        goto release_parts;
    }
    Py_XDECREF(traceback);
    Py_DECREF(type);
    return value;
release_parts:
    Py_XDECREF(traceback);
    Py_XDECREF(value);
    Py_DECREF(type);
    return NULL;
}

/* Closes what is being driven. -1 with the exception that closing raised. */
static int
operation_close_waiting(arl_operation_t *op)
{
    PyObject *waiting = op->waiting, *closed = NULL;
    PyObject *method;
    int status = 0;

    op->waiting = NULL;
    if (waiting == NULL) {
        return 0;
    }
    method = PyObject_GetAttrString(waiting, "close");
    if (method != NULL) {
        closed = PyObject_CallNoArgs(method);
        Py_DECREF(method);
        status = closed == NULL ? -1 : 0;
        Py_XDECREF(closed);
    }
    else if (PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear(); /* a plain iterator */
    }
    else {
        status = -1;
    }
    Py_DECREF(waiting);
    return status;
}

/* Raises `exception` inside the transport's coroutine, as `yield from` does. */
static PyObject *
operation_throw_inside(arl_operation_t *op, PyObject *exception)
{
    PyObject *method, *yielded, *answer = NULL, *result = NULL;
    PySendResult sent;

    if (PyErr_GivenExceptionMatches(exception, PyExc_GeneratorExit)) {
        if (operation_close_waiting(op) == 0) {
            PyErr_SetObject((PyObject *)Py_TYPE(exception), exception);
        }
        operation_abandon(op);
        operation_finish(op);
        return NULL;
    }
    method = PyObject_GetAttrString(op->waiting, "throw");
    if (method == NULL) {
        if (PyErr_ExceptionMatches(PyExc_AttributeError)) {
            PyErr_SetObject((PyObject *)Py_TYPE(exception), exception);
        }
        (void)operation_fail(op);
        return NULL;
    }
    yielded = PyObject_CallOneArg(method, exception);
    Py_DECREF(method);
    if (yielded != NULL) {
        op->status = ARL_OPERATION_SUSPENDED;
        return yielded;
    }
    if (!PyErr_ExceptionMatches(PyExc_StopIteration)) {
        (void)operation_fail(op);
        return NULL;
    }
    {
        PyObject *type, *value, *traceback; /* it swallowed the exception and returned */

        PyErr_Fetch(&type, &value, &traceback);
        PyErr_NormalizeException(&type, &value, &traceback);
        answer = PyObject_GetAttrString(value, "value");
        Py_DECREF(type);
        Py_DECREF(value);
        Py_XDECREF(traceback);
    }
    Py_CLEAR(op->waiting);
    if (answer == NULL) {
        (void)operation_fail(op);
        return NULL;
    }
    sent = operation_proceed(op, answer, &result);
    return sent_to_object(sent, result);
}

PyDoc_STRVAR(throw_doc, "throw($self, type, value=None, traceback=None, /)\n"
                        "--\n\n"
                        "Raise an exception inside the operation; how event loops cancel.");

static PyObject *
operation_throw_method(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    arl_operation_t *op = (arl_operation_t *)self;
    PyObject *exception, *result;

    if (nargs < 1 || nargs > 3) {
        return PyErr_Format(PyExc_TypeError, "throw() takes 1 to 3 arguments (%zd given)", nargs);
    }
    if (operation_enter(op) < 0) {
        return NULL;
    }
    exception = throw_exception(args, nargs);
    if (exception == NULL) {
        return NULL;
    }
    if (op->status == ARL_OPERATION_NEW) { /* never begun: nothing to tell the transport */
        operation_finish(op);
        PyErr_SetObject((PyObject *)Py_TYPE(exception), exception);
        Py_DECREF(exception);
        return NULL;
    }
    op->status = ARL_OPERATION_RUNNING;
    result = operation_throw_inside(op, exception);
    Py_DECREF(exception);
    return result;
}

PyDoc_STRVAR(close_doc, "close($self, /)\n"
                        "--\n\n"
                        "End the operation where it is. Does nothing to one that has ended.");

static PyObject *
operation_close_method(PyObject *self, PyObject *ignored)
{
    arl_operation_t *op = (arl_operation_t *)self;
    const bool begun = op->status != ARL_OPERATION_NEW;
    int status;

    (void)ignored;
    if (op->status == ARL_OPERATION_DONE) {
        Py_RETURN_NONE;
    }
    if (operation_enter(op) < 0) {
        return NULL;
    }
    op->status = ARL_OPERATION_RUNNING;
    status = operation_close_waiting(op);
    if (begun) {
        operation_abandon(op);
    }
    operation_finish(op);
    if (status < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
operation_get_name(PyObject *self, void *ignored)
{
    (void)ignored;
    return PyUnicode_FromString(((arl_operation_t *)self)->name);
}

static PyObject *
operation_get_done(PyObject *self, void *ignored)
{
    (void)ignored;
    return PyBool_FromLong(((arl_operation_t *)self)->status == ARL_OPERATION_DONE);
}

static PyObject *
operation_get_progress(PyObject *self, void *ignored)
{
    const arl_operation_t *op = (const arl_operation_t *)self;

    (void)ignored;
    return Py_BuildValue("LL", (long long)op->steps_done, (long long)op->steps);
}

static PyObject *
operation_repr(PyObject *self)
{
    static const char *const words[] = {"not begun", "waiting", "running", "done"};
    const arl_operation_t *op = (const arl_operation_t *)self;

    return PyUnicode_FromFormat("<Operation %s, %s>", op->name, words[op->status]);
}

/* ---- single calls ---------------------------------------------------------------------------- */

static int
single_advance(arl_operation_t *op, PyObject *answer, PyObject **next_p)
{
    const arl_client_t *client = (const arl_client_t *)op->client;
    PyObject *method, *empty;

    if (answer != NULL) {
        *next_p = Py_NewRef(answer);
        return 0;
    }
    if (arl_client_check_open(client, op->name) < 0) {
        return -1;
    }
    method = PyObject_GetAttr(client->transport, op->method);
    empty = method == NULL ? NULL : PyTuple_New(0);
    *next_p = empty == NULL ? NULL : PyObject_Call(method, empty, op->payload);
    Py_XDECREF(empty);
    Py_XDECREF(method);
    return *next_p == NULL ? -1 : 1;
}

static void
single_describe(const arl_operation_t *op, char *text, size_t size)
{
    const char *method = op->method == NULL ? "?" : PyUnicode_AsUTF8(op->method);

    (void)snprintf(text, size, "failed in the transport's %s", method == NULL ? "?" : method);
}

const arl_operation_kind_t arl_operation_single = {single_advance, single_describe, NULL};

/* A server that cannot reset its cache says False; that is not success. */
static int
reset_cache_advance(arl_operation_t *op, PyObject *answer, PyObject **next_p)
{
    bool refused = answer == Py_False;

    if (answer != NULL && PyDict_Check(answer)) {
        PyObject *verdict;

        if (PyDict_GetItemStringRef(answer, "success", &verdict) < 0) {
            return -1;
        }
        refused = verdict == Py_False;
        Py_XDECREF(verdict);
    }
    if (refused) {
        (void)arl_raise_format(op->state, ARL_ERR_UNAVAILABLE, op->name,
                               "%s: the server refused, as it does while requests are running; "
                               "its prefix cache may still hold what old weights computed",
                               op->name);
        return -1;
    }
    return single_advance(op, answer, next_p);
}

const arl_operation_kind_t arl_operation_reset_cache = {reset_cache_advance, single_describe, NULL};

/* ---- type ------------------------------------------------------------------------------------ */

static PyMethodDef operation_methods[] = {
    {"send", operation_send_method, METH_O, send_doc},
    {"throw", (PyCFunction)(void (*)(void))operation_throw_method, METH_FASTCALL, throw_doc},
    {"close", operation_close_method, METH_NOARGS, close_doc},
    {"__class_getitem__", Py_GenericAlias, METH_O | METH_CLASS,
     "For annotations: Operation[dict]."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef operation_getset[] = {
    {"__name__", operation_get_name, NULL, NULL, NULL},
    {"__qualname__", operation_get_name, NULL, NULL, NULL},
    {"name", operation_get_name, NULL, "The client's method that made this operation.", NULL},
    {"done", operation_get_done, NULL, "Whether it has ended, one way or the other.", NULL},
    {"progress", operation_get_progress, NULL,
     "Optimizer steps taken and to take, (0, 0) for operations that take none.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(
    operation_doc,
    "What an operation of ArcticRLClient returns; await it, once.\n\n"
    "It is a coroutine in all but type: asyncio.create_task, gather, wait_for and run take\n"
    "it as it is. Nothing is sent before it is awaited; one that never is costs nothing.\n"
    "Exceptions of the transport and cancellation pass through with their own type and a\n"
    "note (__notes__) that says which call and which mini-batch it was.");

static PyType_Slot operation_slots[] = {
    {Py_tp_doc, (void *)operation_doc},   {Py_tp_dealloc, operation_dealloc},
    {Py_tp_traverse, operation_traverse}, {Py_tp_clear, operation_clear},
    {Py_tp_repr, operation_repr},         {Py_tp_iter, PyObject_SelfIter},
    {Py_tp_iternext, operation_iternext}, {Py_tp_methods, operation_methods},
    {Py_tp_getset, operation_getset},     {Py_am_await, operation_await},
    {Py_am_send, operation_send},         {0, NULL},
};

static PyType_Spec operation_spec = {
    .name = "arctic_rl_c.Operation",
    .basicsize = (int)sizeof(arl_operation_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = operation_slots,
};

PyMethodDef arl_operation_methods[] = {{NULL, NULL, 0, NULL}};

int
arl_operation_exec(PyObject *module, arl_state_t *state)
{
    return arl_state_add_type(module, &operation_spec, &state->operation_type);
}
