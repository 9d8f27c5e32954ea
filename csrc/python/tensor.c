/* SPDX-License-Identifier: Apache-2.0 */
#include "python/tensor.h"

#include "python/errors.h"
#include "python/tensor_dlpack.h"

#include <string.h>

const char *
arl_type_name(PyObject *object)
{
    return Py_TYPE(object)->tp_name;
}

/* ---- torch, looked up once ---------------------------------------------------------------- */

static int
torch_cache_dtypes(arl_state_t *state, PyObject *torch)
{
    PyObject *dtypes = PyDict_New(); /* torch.dtype -> our number */

    if (dtypes == NULL) {
        return -1;
    }
    for (int i = 1; i < ARL_DTYPE_COUNT; i++) {
        PyObject *dtype, *number;
        int status;

        if (!arl_dtype_valid(i)) {
            continue;
        }
        dtype = PyObject_GetAttrString(torch, arl_dtype_name((arl_dtype_t)i));
        if (dtype == NULL) { /* a dtype younger than this torch */
            if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
                Py_DECREF(dtypes);
                return -1;
            }
            PyErr_Clear();
            continue;
        }
        Py_XSETREF(state->torch_dtype_of[i], dtype);
        number = PyLong_FromLong(i);
        status = number == NULL ? -1 : PyDict_SetItem(dtypes, dtype, number);
        Py_XDECREF(number);
        if (status < 0) {
            Py_DECREF(dtypes);
            return -1;
        }
    }
    Py_XSETREF(state->torch_dtypes, dtypes);
    return 0;
}

/* Something that this torch may not have. */
static int
torch_cache_optional(PyObject *owner, const char *name, PyObject **field)
{
    PyObject *value = PyObject_GetAttrString(owner, name);

    if (value == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        PyErr_Clear();
    }
    Py_XSETREF(*field, value);
    return 0;
}

static int
torch_cache(arl_state_t *state, PyObject *torch)
{
    PyObject *nested, *nn = PyObject_GetAttrString(torch, "nn");

    if (nn == NULL) {
        return -1;
    }
    Py_XSETREF(state->torch_parameter_type, PyObject_GetAttrString(nn, "Parameter"));
    Py_DECREF(nn);
    if (state->torch_parameter_type == NULL) {
        return -1;
    }
    nested = PyObject_GetAttrString(torch, "nested");
    if (nested == NULL) {
        return -1;
    }
    /* Set, not assigned: an attempt on a half-imported torch may have filled some already. */
    Py_XSETREF(state->torch_nested_from_jagged,
               PyObject_GetAttrString(nested, "nested_tensor_from_jagged"));
    Py_DECREF(nested);
    Py_XSETREF(state->torch_from_numpy, PyObject_GetAttrString(torch, "from_numpy"));
    Py_XSETREF(state->torch_jagged, PyObject_GetAttrString(torch, "jagged"));
    Py_XSETREF(state->torch_strided, PyObject_GetAttrString(torch, "strided"));
    Py_XSETREF(state->torch_tensor_type, PyObject_GetAttrString(torch, "Tensor"));
    if (state->torch_nested_from_jagged == NULL || state->torch_from_numpy == NULL ||
        state->torch_jagged == NULL || state->torch_strided == NULL ||
        state->torch_tensor_type == NULL || torch_cache_dtypes(state, torch) < 0) {
        return -1;
    }
    if (torch_cache_optional(state->torch_tensor_type, ARL_DL_EXCHANGE_ATTRIBUTE,
                             &state->torch_exchange) < 0) {
        return -1;
    }
    state->torch = Py_NewRef(torch); /* last: says that all of it is there */
    return 0;
}

/* Caches it, too. 0 also while it is still importing. */
int
arl_torch_ready(arl_state_t *state)
{
    PyObject *modules, *torch;

    if (state->torch != NULL) {
        return 1;
    }
    modules = PySys_GetObject("modules"); /* borrowed from sys, used at once */
    if (modules == NULL) {
        return 0;
    }
    torch = PyMapping_GetItemString(modules, "torch");
    if (torch == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_KeyError)) {
            return -1;
        }
        PyErr_Clear();
        return 0;
    }
    if (torch_cache(state, torch) < 0) {
        Py_DECREF(torch);
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        PyErr_Clear();
        return 0;
    }
    Py_DECREF(torch);
    return 1;
}

int
arl_is_torch_tensor(arl_state_t *state, PyObject *object)
{
    int ready;

    if (PyArray_Check(object) || PyLong_Check(object) || PyDict_Check(object)) {
        return 0;
    }
    ready = arl_torch_ready(state);
    if (ready <= 0) {
        return ready;
    }
    return PyObject_TypeCheck(object, (PyTypeObject *)state->torch_tensor_type) ? 1 : 0;
}

/* ---- torch import --------------------------------------------------------------------------- */

/* Reads a tuple (or torch.Size) of integers. Returns its length, or -1. */
static int
read_dims(PyObject *dims, int64_t *out)
{
    Py_ssize_t n;

    if (!PyTuple_Check(dims)) {
        PyErr_Format(PyExc_TypeError, "expected a tuple of sizes, got %s", arl_type_name(dims));
        return -1;
    }
    n = PyTuple_GET_SIZE(dims);
    if (n > ARL_VIEW_DIMS_MAX) {
        return (int)n; /* the caller says so with its key */
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        out[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(dims, i)); /* borrowed from dims */
        if (out[i] == -1 && PyErr_Occurred()) {
            return -1;
        }
    }
    return (int)n;
}

static int
torch_read_shape(arl_state_t *state, PyObject *object, const char *key, arl_status_t code,
                 arl_view_t *view)
{
    PyObject *shape, *stride;
    int ndim, stride_ndim;

    shape = PyObject_GetAttr(object, state->names.shape);
    if (shape == NULL) {
        return -1;
    }
    ndim = read_dims(shape, view->shape);
    Py_DECREF(shape);
    if (ndim < 0) {
        return -1;
    }
    if (ndim > ARL_VIEW_DIMS_MAX) {
        (void)arl_raise_format(state, code, "import tensor",
                               "%s: has %d dimensions, at most %d are supported", key, ndim,
                               (int)ARL_VIEW_DIMS_MAX);
        return -1;
    }
    stride = PyObject_CallMethodNoArgs(object, state->names.stride);
    if (stride == NULL) {
        return -1;
    }
    stride_ndim = read_dims(stride, view->strides);
    Py_DECREF(stride);
    if (stride_ndim != ndim) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_RuntimeError, "torch tensor's shape and stride disagree");
        }
        return -1;
    }
    view->ndim = ndim;
    for (int i = 0; i < ndim; i++) {
        view->strides[i] *= (int64_t)view->itemsize;
    }
    return 0;
}

static int
torch_read_dtype(arl_state_t *state, PyObject *object, const char *key, arl_status_t code,
                 arl_view_t *view)
{
    PyObject *dtype, *number = NULL;
    int found;

    dtype = PyObject_GetAttr(object, state->names.dtype);
    if (dtype == NULL) {
        return -1;
    }
    found = PyDict_GetItemRef(state->torch_dtypes, dtype, &number);
    if (found == 0) {
        PyObject *text = PyObject_Str(dtype);

        if (text != NULL) {
            const char *name = PyUnicode_AsUTF8(text);

            (void)arl_raise_format(state, code == ARL_ERR_PAYLOAD ? code : ARL_ERR_TYPE,
                                   "import tensor", "%s: dtype %s is not supported", key,
                                   name == NULL ? "?" : name);
            Py_DECREF(text);
        }
    }
    Py_DECREF(dtype);
    if (found <= 0) {
        return -1;
    }
    view->dtype = (arl_dtype_t)PyLong_AsLong(number);
    view->itemsize = arl_dtype_size(view->dtype);
    Py_DECREF(number);
    return 0;
}

static int
torch_read_device(arl_state_t *state, PyObject *object, const char *key, arl_view_t *view)
{
    PyObject *device, *type = NULL, *index = NULL;
    int status = -1;

    (void)key;
    device = PyObject_GetAttr(object, state->names.device);
    if (device == NULL) {
        return -1;
    }
    type = PyObject_GetAttr(device, state->names.type);
    index = type == NULL ? NULL : PyObject_GetAttr(device, state->names.index);
    if (index == NULL) {
        goto release;
    }
    view->device_index = 0;
    if (PyUnicode_CompareWithASCIIString(type, "cpu") == 0) {
        view->device_type = ARL_DEVICE_CPU;
    }
    else {
        view->device_type = PyUnicode_CompareWithASCIIString(type, "cuda") == 0 ? ARL_DEVICE_CUDA
                                                                                : ARL_DEVICE_OTHER;
        if (index != Py_None) {
            view->device_index = (int)PyLong_AsLong(index);
            if (view->device_index == -1 && PyErr_Occurred()) {
                goto release;
            }
        }
    }
    status = 0;
release:
    Py_XDECREF(index);
    Py_XDECREF(type);
    Py_DECREF(device);
    return status;
}

static int
torch_check_strided(arl_state_t *state, PyObject *object, const char *key, arl_status_t code)
{
    PyObject *layout = PyObject_GetAttr(object, state->names.layout);
    bool strided;

    if (layout == NULL) {
        return -1;
    }
    strided = layout == state->torch_strided;
    if (!strided) {
        PyObject *text = PyObject_Str(layout);

        if (text != NULL) {
            const char *name = PyUnicode_AsUTF8(text);

            (void)arl_raise_format(state, code, "import tensor",
                                   "%s: layout is %s, a dense (strided) tensor is needed", key,
                                   name == NULL ? "?" : name);
            Py_DECREF(text);
        }
    }
    Py_DECREF(layout);
    return strided ? 0 : -1;
}

/*
 * conj() and the imaginary part of a conjugate are views with a flag: their memory holds other
 * values than they show. Only dtypes that complex numbers are made of can carry it.
 */
static int
torch_check_resolved(arl_state_t *state, PyObject *object, const char *key, arl_status_t code,
                     const arl_view_t *view)
{
    PyObject *const flags[] = {state->names.is_conj, state->names.is_neg};
    static const char *const cures[] = {"resolve_conj", "resolve_neg"};
    const char kind = arl_dtype_kind(view->dtype);

    for (int i = kind == 'c' ? 0 : 1; i < (kind == 'c' || kind == 'f' ? 2 : 0); i++) {
        PyObject *flag = PyObject_CallMethodNoArgs(object, flags[i]);
        const int set = flag == NULL ? -1 : PyObject_IsTrue(flag);

        Py_XDECREF(flag);
        if (set > 0) {
            (void)arl_raise_format(state, code, "import tensor",
                                   "%s: is a lazy view whose memory holds other values; call "
                                   ".%s() first",
                                   key, cures[i]);
        }
        if (set != 0) {
            return -1;
        }
    }
    return 0;
}

static int
torch_import(arl_state_t *state, PyObject *object, const char *key, arl_status_t code,
             arl_tensor_t *out_p)
{
    arl_view_t view = {0};
    PyObject *pointer;

    if (torch_check_strided(state, object, key, code) < 0 ||
        torch_read_dtype(state, object, key, code, &view) < 0 ||
        torch_read_shape(state, object, key, code, &view) < 0 ||
        torch_check_resolved(state, object, key, code, &view) < 0 ||
        torch_read_device(state, object, key, &view) < 0) {
        return -1;
    }
    if (view.device_type != ARL_DEVICE_OTHER) { /* meta and fake tensors have no storage */
        pointer = PyObject_CallMethodNoArgs(object, state->names.data_ptr);
        if (pointer == NULL) {
            return -1;
        }
        view.data = PyLong_AsVoidPtr(pointer);
        Py_DECREF(pointer);
        if (view.data == NULL && PyErr_Occurred()) {
            return -1;
        }
    }
    out_p->view = view;
    out_p->kind = ARL_TENSOR_TORCH;
    out_p->owner = Py_NewRef(object);
    return 0;
}

/* ---- NumPy import --------------------------------------------------------------------------- */

/* ARL_DTYPE_NONE for a dtype that we lack, or with an exception set. */
static arl_dtype_t
numpy_dtype(PyArrayObject *array)
{
    PyArray_Descr *descr = PyArray_DESCR(array);
    PyObject *name;
    arl_dtype_t dtype = ARL_DTYPE_NONE;

    if (PyArray_ISBYTESWAPPED(array)) {
        return ARL_DTYPE_NONE;
    }
    /* By name, so that ml_dtypes' bfloat16 and float8 arrays work too. */
    name = PyObject_GetAttrString((PyObject *)descr, "name");
    if (name != NULL && PyUnicode_Check(name)) {
        const char *text = PyUnicode_AsUTF8(name);

        if (text != NULL) {
            dtype = arl_dtype_from_name(text);
        }
    }
    Py_XDECREF(name);
    return dtype;
}

static arl_dtype_t
numpy_dtype_fast(PyArrayObject *array)
{
    if (PyArray_ISBYTESWAPPED(array)) {
        return ARL_DTYPE_NONE;
    }
    switch (PyArray_TYPE(array)) {
    case NPY_BOOL:
        return ARL_DTYPE_BOOL;
    case NPY_INT32:
        return ARL_DTYPE_I32;
    case NPY_INT64:
        return ARL_DTYPE_I64;
    case NPY_FLOAT32:
        return ARL_DTYPE_F32;
    case NPY_FLOAT64:
        return ARL_DTYPE_F64;
    default:
        return numpy_dtype(array);
    }
}

static int
numpy_import(arl_state_t *state, PyObject *object, const char *key, arl_status_t code,
             arl_tensor_t *out_p)
{
    PyArrayObject *array = (PyArrayObject *)object;
    arl_view_t view = {0};

    view.dtype = numpy_dtype_fast(array);
    if (view.dtype == ARL_DTYPE_NONE) {
        PyObject *text = PyErr_Occurred() ? NULL : PyObject_Str((PyObject *)PyArray_DESCR(array));

        if (text != NULL) {
            const char *name = PyUnicode_AsUTF8(text);

            (void)arl_raise_format(state, code == ARL_ERR_PAYLOAD ? code : ARL_ERR_TYPE,
                                   "import tensor", "%s: dtype %s is not supported", key,
                                   name == NULL ? "?" : name);
            Py_DECREF(text);
        }
        return -1;
    }
    if (PyArray_NDIM(array) > ARL_VIEW_DIMS_MAX) {
        (void)arl_raise_format(state, code, "import tensor",
                               "%s: has %d dimensions, at most %d are supported", key,
                               PyArray_NDIM(array), (int)ARL_VIEW_DIMS_MAX);
        return -1;
    }
    view.itemsize = arl_dtype_size(view.dtype);
    view.data = PyArray_DATA(array);
    view.ndim = PyArray_NDIM(array);
    for (int i = 0; i < view.ndim; i++) {
        view.shape[i] = (int64_t)PyArray_DIM(array, i);
        view.strides[i] = (int64_t)PyArray_STRIDE(array, i);
    }
    view.readonly = !PyArray_ISWRITEABLE(array);
    out_p->view = view;
    out_p->kind = ARL_TENSOR_NUMPY;
    out_p->owner = Py_NewRef(object);
    return 0;
}

/* ---- public ---------------------------------------------------------------------------------- */

static int
tensor_import_any(arl_state_t *state, PyObject *object, const char *key, arl_status_t code,
                  arl_tensor_t *out_p)
{
    int torch, dlpack;

    if (PyArray_Check(object)) {
        return numpy_import(state, object, key, code, out_p);
    }
    torch = arl_is_torch_tensor(state, object);
    if (torch != 0) {
        return torch < 0 ? -1 : torch_import(state, object, key, code, out_p);
    }
    dlpack = PyObject_HasAttrStringWithError(object, "__dlpack__");
    if (dlpack != 0) {
        return dlpack < 0 ? -1 : arl_dlpack_import(state, object, key, code, out_p);
    }
    (void)arl_raise_format(state, code == ARL_ERR_PAYLOAD ? code : ARL_ERR_TYPE, "import tensor",
                           "%s: expected a torch tensor, a NumPy array or an object with "
                           "__dlpack__, got %s",
                           key, arl_type_name(object));
    return -1;
}

int
arl_tensor_import(arl_state_t *state, PyObject *object, const char *key, int flags,
                  arl_status_t code, arl_tensor_t *out_p)
{
    arl_tensor_t tensor = {0};

    if (tensor_import_any(state, object, key, code, &tensor) < 0) {
        return -1;
    }
    if ((flags & ARL_TENSOR_CPU_ONLY) != 0 && tensor.view.device_type != ARL_DEVICE_CPU) {
        (void)arl_raise_format(state, code, "import tensor",
                               "%s: is on %s device %d; move it to the CPU first (.cpu())", key,
                               tensor.view.device_type == ARL_DEVICE_CUDA ? "a CUDA" : "another",
                               tensor.view.device_index);
        arl_tensor_release(&tensor);
        return -1;
    }
    if ((flags & ARL_TENSOR_WRITABLE) != 0 && tensor.view.readonly) {
        (void)arl_raise_format(state, code, "import tensor",
                               "%s: is read-only; a writable tensor is needed", key);
        arl_tensor_release(&tensor);
        return -1;
    }
    if (arl_view_nbytes(&tensor.view) < 0) {
        (void)arl_raise_format(state, code, "import tensor",
                               "%s: its sizes are negative or their product overflows", key);
        arl_tensor_release(&tensor);
        return -1;
    }
    if (tensor.view.data == NULL && arl_view_nbytes(&tensor.view) > 0 &&
        tensor.view.device_type != ARL_DEVICE_OTHER) {
        (void)arl_raise_format(state, code, "import tensor",
                               "%s: a %s without memory behind it (a wrapper or fake tensor); pass "
                               "the plain tensor it stands for",
                               key, arl_type_name(object));
        arl_tensor_release(&tensor);
        return -1;
    }
    *out_p = tensor;
    return 0;
}

void
arl_tensor_release(arl_tensor_t *tensor)
{
    Py_CLEAR(tensor->owner);
    tensor->view.data = NULL;
}

int
arl_tensor_read_int64(arl_state_t *state, PyObject *object, const char *key, arl_status_t code,
                      int64_t **values_p, int64_t *count_p)
{
    arl_tensor_t tensor = {0};
    const arl_view_t *view = &tensor.view;
    int64_t *values;

    if (arl_tensor_import(state, object, key, ARL_TENSOR_CPU_ONLY, code, &tensor) < 0) {
        return -1;
    }
    if (view->ndim != 1 || (view->dtype != ARL_DTYPE_I32 && view->dtype != ARL_DTYPE_I64)) {
        char text[96];

        arl_view_describe(view, text, sizeof(text));
        (void)arl_raise_format(state, code, "import tensor",
                               "%s: is %s, a 1-D int32 or int64 tensor is needed", key, text);
        arl_tensor_release(&tensor);
        return -1;
    }
    values = PyMem_New(int64_t, view->shape[0] > 0 ? (size_t)view->shape[0] : 1);
    if (values == NULL) {
        arl_tensor_release(&tensor);
        (void)PyErr_NoMemory();
        return -1;
    }
    for (int64_t i = 0; i < view->shape[0]; i++) {
        const char *item = (const char *)view->data + i * view->strides[0];

        if (view->dtype == ARL_DTYPE_I64) {
            memcpy(&values[i], item, sizeof(int64_t));
        }
        else {
            int32_t narrow;

            memcpy(&narrow, item, sizeof(narrow));
            values[i] = narrow;
        }
    }
    *count_p = view->shape[0];
    *values_p = values;
    arl_tensor_release(&tensor);
    return 0;
}
