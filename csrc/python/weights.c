/* SPDX-License-Identifier: Apache-2.0 */
#include "python/weights.h"

#include "python/args.h"
#include "python/errors.h"
#include "python/tensor_dlpack.h"

#include <math.h>
#include <stdarg.h>
#include <string.h>
#include <unistd.h>

/* ---- named tensors --------------------------------------------------------------------------- */

static void
param_clear(arl_param_t *param)
{
    arl_tensor_release(&param->tensor);
    Py_CLEAR(param->storage);
    Py_CLEAR(param->object);
    Py_CLEAR(param->name);
}

void
arl_params_clear(arl_params_t *params)
{
    arl_params_t old = *params;

    /* Emptied first: what is released may run code that looks at the owner. */
    memset(params, 0, sizeof(*params));
    for (Py_ssize_t i = 0; i < old.count; i++) {
        param_clear(&old.items[i]);
    }
    PyMem_Free(old.items);
}

int
arl_params_traverse(arl_params_t *params, visitproc visit, void *arg)
{
    for (Py_ssize_t i = 0; i < params->count; i++) {
        arl_param_t *param = &params->items[i];

        Py_VISIT(param->name);
        Py_VISIT(param->object);
        Py_VISIT(param->tensor.owner);
        Py_VISIT(param->storage);
    }
    return 0;
}

/* Imports `param->object`, and holds on to torch's storage. */
static int
param_import(arl_state_t *state, arl_param_t *param, arl_role_t role)
{
    const int flags = role == ARL_ROLE_RECEIVER ? ARL_TENSOR_WRITABLE : 0;
    arl_tensor_t tensor = {0};
    PyObject *storage = NULL;

    if (arl_tensor_import(state, param->object, param->text, flags, ARL_ERR_VALUE, &tensor) < 0) {
        return -1;
    }
    if (tensor.view.data == NULL && arl_view_nbytes(&tensor.view) > 0) {
        (void)arl_raise_format(state, ARL_ERR_VALUE, "import tensor",
                               "%s: has no memory of its own here (a meta, fake, sharded or "
                               "offloaded tensor?)",
                               param->text);
        arl_tensor_release(&tensor);
        return -1;
    }
    if (tensor.kind == ARL_TENSOR_TORCH) {
        storage = PyObject_CallMethodNoArgs(param->object, state->names.untyped_storage);
        if (storage == NULL) {
            arl_tensor_release(&tensor);
            return -1;
        }
    }
    arl_tensor_release(&param->tensor);
    Py_XSETREF(param->storage, storage);
    param->tensor = tensor;
    return 0;
}

/* (dtype, shape): a tensor that will come later. Its view has no data, on the CPU or wherever it
 * will come from. */
static int
param_specify(arl_state_t *state, arl_param_t *param)
{
    PyObject *dtype = PyTuple_GET_ITEM(param->object, 0); /* borrowed from object */
    PyObject *shape = PyTuple_GET_ITEM(param->object, 1); /* borrowed from object */
    PyObject *text = PyObject_Str(dtype), *sizes = NULL;
    arl_view_t *view = &param->tensor.view;
    const char *name;
    int status = -1;

    if (text == NULL || (name = PyUnicode_AsUTF8(text)) == NULL) {
        goto release;
    }
    view->dtype = arl_dtype_from_name(strncmp(name, "torch.", 6) == 0 ? name + 6 : name);
    if (view->dtype == ARL_DTYPE_NONE) {
        (void)arl_raise_format(state, ARL_ERR_TYPE, "import tensor",
                               "%s: dtype %s is not supported", param->text, name);
        goto release;
    }
    sizes = PySequence_Tuple(shape);
    if (sizes == NULL) {
        if (PyErr_ExceptionMatches(PyExc_TypeError) && Py_TYPE(shape)->tp_iter == NULL) {
            PyErr_Clear();
            (void)arl_raise_format(state, ARL_ERR_TYPE, "import tensor",
                                   "%s: expected (dtype, shape) with a sequence of sizes, got %s",
                                   param->text, arl_type_name(shape));
        }
        goto release;
    }
    if (PyTuple_GET_SIZE(sizes) > ARL_VIEW_DIMS_MAX) {
        (void)arl_raise_format(state, ARL_ERR_VALUE, "import tensor",
                               "%s: has %zd dimensions, at most %d are supported", param->text,
                               PyTuple_GET_SIZE(sizes), (int)ARL_VIEW_DIMS_MAX);
        goto release;
    }
    view->itemsize = arl_dtype_size(view->dtype);
    view->ndim = (int)PyTuple_GET_SIZE(sizes);
    view->device_type = ARL_DEVICE_CUDA;
    for (int i = 0; i < view->ndim; i++) { /* items are borrowed from sizes */
        /* borrowed from sizes */
        if (arl_args_integer(param->text, "a size of its shape", PyTuple_GET_ITEM(sizes, i),
                             INT64_MIN, INT64_MAX, &view->shape[i]) < 0) {
            goto release;
        }
    }
    if (arl_view_nbytes(view) < 0) {
        (void)arl_raise_format(state, ARL_ERR_VALUE, "import tensor",
                               "%s: its sizes are negative or their product overflows",
                               param->text);
        goto release;
    }
    status = 0;
release:
    Py_XDECREF(sizes);
    Py_XDECREF(text);
    return status;
}

/* Binding: (tensor, dim, start, full). */
static int
param_bind(arl_state_t *state, arl_param_t *param)
{
    PyObject *binding = param->object;
    int64_t numbers[3];

    if (PyTuple_GET_SIZE(binding) != 4) {
        (void)arl_raise_format(state, ARL_ERR_TYPE, "bind parameters",
                               "%s: expected a tensor or a Binding(tensor, dim, start, full), got "
                               "a tuple of %zd",
                               param->text, PyTuple_GET_SIZE(binding));
        return -1;
    }
    for (int i = 0; i < 3; i++) { /* items are borrowed from binding */
        static const char *const names[] = {"dim of a Binding", "start of a Binding",
                                            "full of a Binding"};

        /* borrowed from binding */
        if (arl_args_integer(param->text, names[i], PyTuple_GET_ITEM(binding, i + 1), INT64_MIN,
                             INT64_MAX, &numbers[i]) < 0) {
            return -1;
        }
    }
    if (numbers[0] < 0 || numbers[0] >= ARL_VIEW_DIMS_MAX) {
        (void)arl_raise_format(state, ARL_ERR_VALUE, "bind parameters",
                               "%s: the dimension of a Binding is 0 to %d, not %lld", param->text,
                               ARL_VIEW_DIMS_MAX - 1, (long long)numbers[0]);
        return -1;
    }
    param->dim = (int)numbers[0];
    param->start = numbers[1];
    param->full = numbers[2];
    param->object = Py_NewRef(PyTuple_GET_ITEM(binding, 0)); /* borrowed until here */
    Py_DECREF(binding);
    return 0;
}

/* Appends one; steals nothing. */
static int
params_add(arl_state_t *state, arl_params_t *params, PyObject *name, PyObject *value,
           arl_role_t role)
{
    arl_param_t *param;
    Py_ssize_t length;

    if (params->count == params->capacity) {
        const Py_ssize_t capacity = params->capacity > 0 ? params->capacity * 2 : 64;
        arl_param_t *items = PyMem_Resize(params->items, arl_param_t, (size_t)capacity);

        if (items == NULL) {
            (void)PyErr_NoMemory();
            return -1;
        }
        params->items = items;
        params->capacity = capacity;
    }
    param = &params->items[params->count];
    memset(param, 0, sizeof(*param));
    param->text = PyUnicode_AsUTF8AndSize(name, &length);
    if (param->text == NULL) {
        return -1;
    }
    param->dim = -1;
    param->length = length > UINT32_MAX ? UINT32_MAX : (uint32_t)length;
    param->name = Py_NewRef(name);
    param->object = Py_NewRef(value);
    params->count++; /* from here on arl_params_clear releases it */
    if (strlen(param->text) != (size_t)length) {
        (void)arl_raise_format(state, ARL_ERR_VALUE, "import tensor",
                               "%s: the name has a NUL character after it", param->text);
        return -1;
    }
    if (value == Py_None && role == ARL_ROLE_RECEIVER) {
        return 0;
    }
    if (PyTuple_Check(value)) {
        if (role == ARL_ROLE_SENDER && PyTuple_GET_SIZE(value) == 2) {
            return param_specify(state, param);
        }
        if (role == ARL_ROLE_RECEIVER && param_bind(state, param) < 0) {
            return -1;
        }
    }
    return param_import(state, param, role);
}

static int
params_add_pair(arl_state_t *state, arl_params_t *params, PyObject *pair, arl_role_t role)
{
    PyObject *fast, *name, *value;
    int status = 0;

    fast = PySequence_Fast(pair, "parameters: expected a mapping, or pairs of name and tensor");
    if (fast == NULL) {
        return -1;
    }
    name = PySequence_Fast_GET_SIZE(fast) == 2
               ? PySequence_Fast_GET_ITEM(fast, 0) /* borrowed from fast */
               : NULL;
    if (name == NULL || !PyUnicode_Check(name)) {
        PyErr_SetString(PyExc_TypeError,
                        "parameters: expected a mapping, or pairs of name (str) and tensor");
        Py_DECREF(fast);
        return -1;
    }
    value = PySequence_Fast_GET_ITEM(fast, 1); /* borrowed from fast */
    if (PyList_Check(value) && role == ARL_ROLE_RECEIVER) {
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value) && status == 0; i++) {
            PyObject *item = PyList_GetItemRef(value, i);

            status = item == NULL ? -1 : params_add(state, params, name, item, role);
            Py_XDECREF(item);
        }
    }
    else {
        status = params_add(state, params, name, value, role);
    }
    Py_DECREF(fast);
    return status;
}

/* The pairs of a mapping, or what gives pairs by itself; a new reference. */
static PyObject *
params_items(PyObject *object)
{
    PyObject *method;

    if (PyDict_CheckExact(object)) {
        return PyDict_Items(object);
    }
    method = PyObject_GetAttrString(object, "items");
    if (method != NULL) {
        Py_SETREF(method, PyObject_CallNoArgs(method));
        return method;
    }
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
        return NULL;
    }
    PyErr_Clear();
    if (PyUnicode_Check(object) || PyBytes_Check(object) || PyByteArray_Check(object) ||
        (Py_TYPE(object)->tp_iter == NULL && !PySequence_Check(object))) {
        PyErr_Format(PyExc_TypeError,
                     "parameters: expected a mapping of name to tensor, or an "
                     "iterable of such pairs, got %s",
                     arl_type_name(object));
        return NULL;
    }
    return Py_NewRef(object);
}

int
arl_params_read(arl_state_t *state, PyObject *object, arl_role_t role, arl_params_t *params_p)
{
    arl_params_t params = {0};
    PyObject *items, *iterator, *pair;

    items = params_items(object);
    iterator = items == NULL ? NULL : PyObject_GetIter(items);
    Py_XDECREF(items);
    if (iterator == NULL) {
        return -1;
    }
    while ((pair = PyIter_Next(iterator)) != NULL) {
        const int status = params_add_pair(state, &params, pair, role);

        Py_DECREF(pair);
        if (status < 0) {
            break;
        }
    }
    Py_DECREF(iterator);
    if (PyErr_Occurred()) {
        arl_params_clear(&params);
        return -1;
    }
    if (params.count > ARL_OFFER_TENSORS_MAX) {
        (void)arl_raise_format(state, ARL_ERR_VALUE, "import tensor",
                               "%zd parameters, at most %d are supported", params.count,
                               (int)ARL_OFFER_TENSORS_MAX);
        arl_params_clear(&params);
        return -1;
    }
    *params_p = params;
    return 0;
}

static bool
views_equal(const arl_view_t *a, const arl_view_t *b)
{
    const size_t size = (size_t)a->ndim * sizeof(a->shape[0]);

    return a->data == b->data && a->dtype == b->dtype && a->ndim == b->ndim &&
           a->device_type == b->device_type && a->device_index == b->device_index &&
           memcmp(a->shape, b->shape, size) == 0 && memcmp(a->strides, b->strides, size) == 0;
}

int
arl_params_refresh(arl_state_t *state, arl_params_t *params, arl_role_t role, bool *changed_p)
{
    const arl_dl_exchange_t *exchange = arl_torch_exchange(state);

    *changed_p = false;
    for (Py_ssize_t i = 0; i < params->count; i++) {
        arl_param_t *param = &params->items[i];
        const arl_view_t before = param->tensor.view;

        if (param->tensor.owner == NULL || /* a name or a specification alone */
            /* or a DLPack capsule, which owns the memory that it was made for */
            param->tensor.kind == ARL_TENSOR_DLPACK) {
            continue;
        }
        if (param->tensor.kind == ARL_TENSOR_TORCH &&
            arl_torch_unchanged(state, exchange, param->object, &before)) {
            continue;
        }
        if (param_import(state, param, role) < 0) {
            return -1;
        }
        *changed_p = *changed_p || !views_equal(&before, &param->tensor.view);
    }
    return 0;
}

/* ---- streams --------------------------------------------------------------------------------- */

/* An integer, or what an attribute says. Steals nothing. */
static int
stream_read(arl_state_t *state, PyObject *value, void **stream_p)
{
    PyObject *number =
        PyLong_Check(value) ? Py_NewRef(value) : PyObject_GetAttr(value, state->names.cuda_stream);

    if (number == NULL) {
        if (PyErr_ExceptionMatches(PyExc_AttributeError)) {
            PyErr_Format(PyExc_TypeError, "stream is a torch.cuda.Stream or an integer, not %s",
                         arl_type_name(value));
        }
        return -1;
    }
    *stream_p = PyLong_AsVoidPtr(number);
    Py_DECREF(number);
    return *stream_p == NULL && PyErr_Occurred() ? -1 : 0;
}

static int
stream_of_torch(arl_state_t *state, int device, void **stream_p)
{
    PyObject *cuda = PyObject_GetAttr(state->torch, state->names.cuda), *stream = NULL;
    int status = -1;

    if (cuda != NULL) {
        stream = PyObject_CallMethod(cuda, "current_stream", "i", device);
    }
    if (stream != NULL) {
        status = stream_read(state, stream, stream_p);
    }
    Py_XDECREF(stream);
    Py_XDECREF(cuda);
    return status;
}

int
arl_stream_from(arl_state_t *state, PyObject *value, const arl_params_t *params, void **stream_p)
{
    *stream_p = NULL;
    if (value != NULL && value != Py_None) {
        return stream_read(state, value, stream_p);
    }
    for (Py_ssize_t i = 0; i < params->count; i++) {
        const arl_tensor_t *tensor = &params->items[i].tensor;

        if (tensor->owner != NULL && tensor->kind == ARL_TENSOR_TORCH &&
            tensor->view.device_type == ARL_DEVICE_CUDA) {
            return stream_of_torch(state, tensor->view.device_index, stream_p);
        }
    }
    return 0;
}

/* ---- calls ----------------------------------------------------------------------------------- */

void
arl_guard_init(arl_guard_t *guard, const char *type)
{
    guard->type = type;
    guard->owner = getpid();
    guard->closed = false;
    guard->busy = NULL;
}

bool
arl_guard_forked(const arl_guard_t *guard)
{
    return guard->owner != getpid();
}

int
arl_guard_enter(arl_state_t *state, arl_guard_t *guard, const char *method)
{
    if (arl_guard_forked(guard)) {
        (void)arl_raise_format(state, ARL_ERR_PROCESS, method,
                               "this %s belongs to process %lld, and this is its child %lld; make "
                               "one here",
                               guard->type, (long long)guard->owner, (long long)getpid());
        return -1;
    }
    if (guard->closed) {
        (void)arl_raise_format(state, ARL_ERR_CLOSED, method, "this %s is closed", guard->type);
        return -1;
    }
    if (guard->busy != NULL) {
        (void)PyErr_Format(PyExc_RuntimeError,
                           guard->thread == PyThread_get_thread_ident()
                               ? "this %s is in use by this thread, in %s(): what that calls (an "
                                 "iterator of tensors, a signal's handler) cannot use it too"
                               : "this %s is in use by another thread, in %s()",
                           guard->type, guard->busy);
        return -1;
    }
    guard->busy = method;
    guard->thread = PyThread_get_thread_ident();
    return 0;
}

void
arl_guard_leave(arl_guard_t *guard)
{
    guard->busy = NULL;
}

PyObject *
arl_guarded_enter(PyObject *op, PyObject *unused)
{
    arl_guard_t *guard = &((arl_guarded_t *)op)->guard;
    arl_state_t *state = arl_state_from_type(Py_TYPE(op));

    (void)unused;
    if (state == NULL || arl_guard_enter(state, guard, "__enter__") < 0) {
        return NULL;
    }
    arl_guard_leave(guard);
    return Py_NewRef(op);
}

PyObject *
arl_guarded_get_closed(PyObject *op, void *closure)
{
    (void)closure;
    return PyBool_FromLong(((arl_guarded_t *)op)->guard.closed);
}

void
arl_call_begin(arl_call_t *call, double seconds)
{
    arl_deadline_start(&call->deadline, seconds);
    arl_call_resume(call);
}

void
arl_call_resume(arl_call_t *call)
{
    call->err = (arl_error_t)ARL_ERROR_INIT;
    call->deadline.interrupted = arl_deadline_check_signals;
    call->deadline.context = &call->thread;
    call->thread = PyEval_SaveThread();
}

void
arl_call_end(arl_call_t *call)
{
    PyEval_RestoreThread(call->thread);
    call->deadline.interrupted = NULL;
}

int
arl_seconds(PyObject *value, double fallback, double *seconds_p)
{
    double seconds;

    if (value == NULL || value == Py_None) {
        *seconds_p = fallback;
        return 0;
    }
    seconds = PyFloat_AsDouble(value);
    if (seconds == -1.0 && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            PyErr_Format(PyExc_TypeError, "timeout: expected a number of seconds, got %s",
                         arl_type_name(value));
            return -1;
        }
        if (!PyErr_ExceptionMatches(PyExc_OverflowError)) {
            return -1;
        }
        PyErr_Clear();
        seconds = HUGE_VAL;
    }
    if (!isfinite(seconds) || seconds < 0 || seconds > ARL_SECONDS_MAX) {
        PyErr_Format(PyExc_ValueError,
                     "timeout: expected seconds, finite, not negative and at most %lld, got %R",
                     (long long)ARL_SECONDS_MAX, value);
        return -1;
    }
    *seconds_p = seconds;
    return 0;
}

int
arl_verify_from(PyObject *value, arl_verify_t *verify_p)
{
    if (value == NULL || value == Py_None) {
        *verify_p = ARL_VERIFY_NONE;
        return 0;
    }
    if (PyUnicode_Check(value)) {
        if (PyUnicode_CompareWithASCIIString(value, "all") == 0) {
            *verify_p = ARL_VERIFY_ALL;
            return 0;
        }
        if (PyUnicode_CompareWithASCIIString(value, "sample") == 0) {
            *verify_p = ARL_VERIFY_SAMPLE;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "verify: expected \"all\", \"sample\" or None, got %R", value);
    return -1;
}

static int
log_text(arl_state_t *state, const char *method, const char *text)
{
    PyObject *result;

    if (state->logger == NULL) {
        PyObject *logging = PyImport_ImportModule("logging");

        if (logging == NULL) {
            return -1;
        }
        state->logger = PyObject_CallMethod(logging, "getLogger", "s", "arctic_rl_c");
        Py_DECREF(logging);
        if (state->logger == NULL) {
            return -1;
        }
    }
    result = PyObject_CallMethod(state->logger, method, "s", text);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

int
arl_log_failed(PyObject *logger)
{
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return -1;
    }
    PyErr_WriteUnraisable(logger);
    return 0;
}

int
arl_log(arl_state_t *state, const char *method, const char *format, ...)
{
    char text[1024];
    va_list args;

    va_start(args, format);
    (void)vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    return log_text(state, method, text) < 0 ? arl_log_failed(state->logger) : 0;
}
