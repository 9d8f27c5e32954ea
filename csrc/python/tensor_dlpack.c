/* SPDX-License-Identifier: Apache-2.0 */
#include "python/tensor_dlpack.h"

#include "python/errors.h"

/* ---- import --------------------------------------------------------------------------------- */

static PyObject *
dlpack_capsule(PyObject *object)
{
    PyObject *method, *kwargs, *empty, *capsule = NULL;

    method = PyObject_GetAttrString(object, "__dlpack__");
    if (method == NULL) {
        return NULL;
    }
    kwargs = Py_BuildValue("{s(ii)}", "max_version", 1, 0);
    empty = PyTuple_New(0);
    if (kwargs != NULL && empty != NULL) {
        capsule = PyObject_Call(method, empty, kwargs);
        if (capsule == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear(); /* a producer older than DLPack 1.0 */
            capsule = PyObject_CallNoArgs(method);
        }
    }
    Py_XDECREF(empty);
    Py_XDECREF(kwargs);
    Py_DECREF(method);
    return capsule;
}

/*
 * Shape, and strides in bytes. False for strides that no memory could hold: numbers are the
 * producer's word only, and what is computed from them later must not overflow.
 */
static bool
dlpack_read_layout(const arl_dl_tensor_t *tensor, arl_view_t *view)
{
    const int64_t far = INT64_MAX / (2 * (int64_t)ARL_VIEW_DIMS_MAX);
    int64_t dense = (int64_t)view->itemsize;

    for (int i = view->ndim - 1; i >= 0; i--) {
        const int64_t size = tensor->shape[i];
        int64_t *stride = &view->strides[i], reach;

        view->shape[i] = size;
        if (tensor->strides == NULL) { /* dense row-major, by the standard */
            *stride = dense;
            /* Too large a product is refused with the sizes, unless there are no elements. */
            (void)__builtin_mul_overflow(dense, size, &dense);
            continue;
        }
        /* The stride of one element means nothing, so it may be any number. */
        if ((__builtin_mul_overflow(tensor->strides[i], (int64_t)view->itemsize, stride) ||
             __builtin_mul_overflow(*stride, size - 1, &reach) || reach > far || reach < -far) &&
            size > 1) {
            return false;
        }
    }
    return true;
}

static arl_device_type_t
device_type(const arl_dl_device_t *device)
{
    switch (device->type) {
    case ARL_DL_CPU:
    case ARL_DL_CUDA_HOST:
        return ARL_DEVICE_CPU;
    case ARL_DL_CUDA:
        return ARL_DEVICE_CUDA;
    default:
        return ARL_DEVICE_OTHER;
    }
}

static int
dlpack_fill(arl_state_t *state, const arl_dl_tensor_t *tensor, const char *key, arl_status_t code,
            arl_view_t *view)
{
    view->dtype = arl_dlpack_dtype(tensor->dtype);
    if (view->dtype == ARL_DTYPE_NONE) {
        (void)arl_raise_format(state, code == ARL_ERR_PAYLOAD ? code : ARL_ERR_TYPE,
                               "import tensor",
                               "%s: DLPack dtype (code %d, %d bits, %d lanes) is not supported",
                               key, tensor->dtype.code, tensor->dtype.bits, tensor->dtype.lanes);
        return -1;
    }
    if (tensor->ndim < 0 || tensor->ndim > ARL_VIEW_DIMS_MAX) {
        (void)arl_raise_format(state, code, "import tensor",
                               "%s: has %d dimensions, at most %d are supported", key,
                               (int)tensor->ndim, (int)ARL_VIEW_DIMS_MAX);
        return -1;
    }
    view->itemsize = arl_dtype_size(view->dtype);
    view->ndim = tensor->ndim;
    if (!dlpack_read_layout(tensor, view)) {
        (void)arl_raise_format(state, code, "import tensor",
                               "%s: its DLPack strides reach beyond the address space", key);
        return -1;
    }
    view->data = (char *)tensor->data + tensor->byte_offset;
    view->device_type = device_type(&tensor->device);
    view->device_index = view->device_type == ARL_DEVICE_CPU ? 0 : tensor->device.id;
    return 0;
}

/* The capsule is the owner: as it is never renamed, its destructor calls the producer's deleter. */
int
arl_dlpack_import(arl_state_t *state, PyObject *object, const char *key, arl_status_t code,
                  arl_tensor_t *out_p)
{
    PyObject *capsule = dlpack_capsule(object);
    const arl_dl_tensor_t *tensor = NULL;
    arl_view_t view = {0};

    if (capsule == NULL) {
        return -1;
    }
    if (PyCapsule_IsValid(capsule, ARL_DL_CAPSULE_VERSIONED)) {
        const arl_dl_managed_versioned_t *managed =
            PyCapsule_GetPointer(capsule, ARL_DL_CAPSULE_VERSIONED);

        if (managed->version.major != 1) {
            (void)arl_raise_format(state, code, "import tensor",
                                   "%s: DLPack version %u.%u, only 1.x is understood", key,
                                   managed->version.major, managed->version.minor);
            Py_DECREF(capsule);
            return -1;
        }
        tensor = &managed->tensor;
        view.readonly = (managed->flags & ARL_DL_FLAG_READ_ONLY) != 0;
    }
    else if (PyCapsule_IsValid(capsule, ARL_DL_CAPSULE)) {
        tensor = &((const arl_dl_managed_t *)PyCapsule_GetPointer(capsule, ARL_DL_CAPSULE))->tensor;
    }
    if (tensor == NULL) {
        (void)arl_raise_format(state, code, "import tensor",
                               "%s: %s.__dlpack__ returned no DLPack capsule", key,
                               arl_type_name(object));
        Py_DECREF(capsule);
        return -1;
    }
    if (dlpack_fill(state, tensor, key, code, &view) < 0) {
        Py_DECREF(capsule);
        return -1;
    }
    out_p->view = view;
    out_p->kind = ARL_TENSOR_DLPACK;
    out_p->owner = capsule;
    return 0;
}

/* ---- a look at a torch tensor ---------------------------------------------------------------- */

const arl_dl_exchange_t *
arl_torch_exchange(arl_state_t *state)
{
    const arl_dl_exchange_t *exchange;

    if (state->torch_exchange == NULL ||
        !PyCapsule_IsValid(state->torch_exchange, ARL_DL_EXCHANGE_CAPSULE)) {
        return NULL;
    }
    exchange = PyCapsule_GetPointer(state->torch_exchange, ARL_DL_EXCHANGE_CAPSULE);
    return exchange->version.major == 1 && exchange->version.minor >= 3 && exchange->look != NULL
               ? exchange
               : NULL;
}

/* A stride of fewer than two elements means nothing, and producers write there what they like. */
static bool
same_layout(const arl_dl_tensor_t *tensor, const arl_view_t *view)
{
    const int64_t item = (int64_t)view->itemsize;

    if (tensor->ndim != view->ndim || tensor->strides == NULL) {
        return false;
    }
    for (int i = 0; i < view->ndim; i++) {
        if (tensor->shape[i] != view->shape[i] ||
            (view->shape[i] > 1 && tensor->strides[i] != view->strides[i] / item)) {
            return false;
        }
    }
    return true;
}

bool
arl_torch_unchanged(arl_state_t *state, const arl_dl_exchange_t *exchange, PyObject *object,
                    const arl_view_t *view)
{
    const PyObject *type = (const PyObject *)Py_TYPE(object);
    arl_dl_tensor_t tensor;
    arl_device_type_t device;

    /* Types of others may answer for memory that is not what they stand for. */
    if (exchange == NULL ||
        (type != state->torch_tensor_type && type != state->torch_parameter_type)) {
        return false;
    }
    if (exchange->look(object, &tensor) != 0) { /* a dtype that DLPack lacks, say */
        PyErr_Clear();
        return false;
    }
    device = device_type(&tensor.device);
    return (char *)tensor.data + tensor.byte_offset == (char *)view->data &&
           arl_dlpack_dtype(tensor.dtype) == view->dtype && device == view->device_type &&
           (device == ARL_DEVICE_CPU || tensor.device.id == view->device_index) &&
           same_layout(&tensor, view);
}
