/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors out: what came in as torch goes out as torch, everything else as NumPy. */
#include "python/tensor.h"

#include "core/arl_pages.h"

static const char pages_name[] = "arctic_rl_c.pages";

/* NumPy's type for `dtype`; for those it lacks, an integer of the same size (bits alone matter,
 * a torch view gives the real dtype back). */
static int
numpy_type_for(arl_dtype_t dtype, bool *exact_p)
{
    *exact_p = true;
    switch (dtype) {
    case ARL_DTYPE_BOOL:
        return NPY_BOOL;
    case ARL_DTYPE_U8:
        return NPY_UINT8;
    case ARL_DTYPE_I8:
        return NPY_INT8;
    case ARL_DTYPE_U16:
        return NPY_UINT16;
    case ARL_DTYPE_I16:
        return NPY_INT16;
    case ARL_DTYPE_U32:
        return NPY_UINT32;
    case ARL_DTYPE_I32:
        return NPY_INT32;
    case ARL_DTYPE_U64:
        return NPY_UINT64;
    case ARL_DTYPE_I64:
        return NPY_INT64;
    case ARL_DTYPE_F16:
        return NPY_FLOAT16;
    case ARL_DTYPE_F32:
        return NPY_FLOAT32;
    case ARL_DTYPE_F64:
        return NPY_FLOAT64;
    case ARL_DTYPE_C64:
        return NPY_COMPLEX64;
    case ARL_DTYPE_C128:
        return NPY_COMPLEX128;
    default:
        *exact_p = false;
        return arl_dtype_size(dtype) == 1 ? NPY_INT8 : NPY_INT16;
    }
}

static PyObject *
torch_from_array(arl_state_t *state, PyObject *array, arl_dtype_t dtype, bool exact)
{
    PyObject *tensor = PyObject_CallOneArg(state->torch_from_numpy, array);

    if (tensor != NULL && !exact) {
        PyObject *viewed =
            PyObject_CallMethodOneArg(tensor, state->names.view, state->torch_dtype_of[dtype]);

        Py_SETREF(tensor, viewed);
    }
    return tensor;
}

/* NumPy gives an empty array strides of 0, with which torch refuses view(dtype). */
static void
dense_strides(PyArrayObject *array)
{
    npy_intp stride = (npy_intp)PyArray_ITEMSIZE(array);

    for (int i = PyArray_NDIM(array) - 1; i >= 0; i--) {
        PyArray_STRIDES(array)[i] = stride;
        stride *= PyArray_DIM(array, i) > 0 ? PyArray_DIM(array, i) : 1;
    }
}

/* `array`, a new one, as what `like` asks for; steals it. */
static PyObject *
finish_array(arl_state_t *state, arl_tensor_kind_t like, arl_dtype_t dtype, bool exact,
             PyObject *array)
{
    if (array != NULL && like == ARL_TENSOR_TORCH) {
        PyObject *tensor;

        dense_strides((PyArrayObject *)array);
        tensor = torch_from_array(state, array, dtype, exact);

        Py_SETREF(array, tensor); /* the tensor keeps the array alive */
    }
    return array;
}

/* NumPy's type and sizes for a new array; -1 with an exception where NumPy has none. */
static int
prepare_array(arl_tensor_kind_t like, arl_dtype_t dtype, int ndim, const int64_t *shape,
              npy_intp *dims, bool *exact_p)
{
    const int numpy_type = numpy_type_for(dtype, exact_p);

    if (!*exact_p && like != ARL_TENSOR_TORCH) {
        PyErr_Format(PyExc_TypeError, "NumPy has no %s; pass torch tensors instead",
                     arl_dtype_name(dtype));
        return -1;
    }
    for (int i = 0; i < ndim; i++) {
        dims[i] = (npy_intp)shape[i];
    }
    return numpy_type;
}

/* An array over memory that `owner` keeps alive. */
static PyObject *
array_over(int ndim, npy_intp *dims, int numpy_type, void *data, int flags, PyObject *owner)
{
    PyObject *array =
        PyArray_New(&PyArray_Type, ndim, dims, numpy_type, NULL, data, 0, flags, NULL);

    if (array != NULL &&
        PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(owner)) < 0) { /* steals owner */
        Py_CLEAR(array);
    }
    return array;
}

static void
pages_destroy(PyObject *capsule)
{
    arl_pages_free(PyCapsule_GetPointer(capsule, pages_name),
                   (size_t)(uintptr_t)PyCapsule_GetContext(capsule));
}

/* The capsule that owns new pages, and gives them back when the last array over them goes. */
static PyObject *
new_pages(size_t nbytes)
{
    void *data = arl_pages_alloc(nbytes);
    PyObject *capsule;

    if (data == NULL) {
        return PyErr_NoMemory();
    }
    capsule = PyCapsule_New(data, pages_name, NULL);
    if (capsule == NULL || PyCapsule_SetContext(capsule, (void *)(uintptr_t)nbytes) < 0 ||
        PyCapsule_SetDestructor(capsule, pages_destroy) < 0) {
        Py_XDECREF(capsule);
        arl_pages_free(data, nbytes);
        return NULL;
    }
    return capsule;
}

/* An array of uninitialised memory: NumPy's own, or huge pages where they pay. */
static PyObject *
new_array(int ndim, npy_intp *dims, int numpy_type, size_t nbytes)
{
    PyObject *pages, *array;

    if (!arl_pages_worthwhile(nbytes)) {
        return PyArray_EMPTY(ndim, dims, numpy_type, 0);
    }
    pages = new_pages(nbytes);
    if (pages == NULL) {
        return NULL;
    }
    array = array_over(ndim, dims, numpy_type, PyCapsule_GetPointer(pages, pages_name),
                       NPY_ARRAY_CARRAY, pages);
    Py_DECREF(pages);
    return array;
}

PyObject *
arl_tensor_new(arl_state_t *state, arl_tensor_kind_t like, arl_dtype_t dtype, int ndim,
               const int64_t *shape, arl_view_t *view_p)
{
    npy_intp dims[ARL_VIEW_DIMS_MAX];
    PyObject *array;
    arl_view_t view = {0};
    bool exact;
    int numpy_type;

    view.dtype = dtype;
    view.itemsize = arl_dtype_size(dtype);
    view.ndim = ndim;
    for (int i = ndim - 1; i >= 0; i--) {
        view.shape[i] = shape[i];
        view.strides[i] = i == ndim - 1
                              ? (int64_t)view.itemsize
                              : view.strides[i + 1] * (shape[i + 1] > 0 ? shape[i + 1] : 1);
    }
    if (arl_view_nbytes(&view) < 0) {
        return PyErr_Format(PyExc_OverflowError, "output of %d dimensions does not fit in memory",
                            ndim);
    }
    numpy_type = prepare_array(like, dtype, ndim, shape, dims, &exact);
    if (numpy_type < 0) {
        return NULL;
    }
    array = new_array(ndim, dims, numpy_type, (size_t)arl_view_nbytes(&view));
    if (array == NULL) {
        return NULL;
    }
    view.data = PyArray_DATA((PyArrayObject *)array);
    array = finish_array(state, like, dtype, exact, array);
    if (array != NULL) {
        *view_p = view;
    }
    return array;
}

PyObject *
arl_tensor_over(arl_state_t *state, arl_tensor_kind_t like, arl_dtype_t dtype, int ndim,
                const int64_t *shape, void *data, bool readonly, PyObject *owner)
{
    npy_intp dims[ARL_VIEW_DIMS_MAX];
    PyObject *array;
    bool exact;
    const int numpy_type = prepare_array(like, dtype, ndim, shape, dims, &exact);

    if (numpy_type < 0) {
        return NULL;
    }
    array = array_over(ndim, dims, numpy_type, data,
                       readonly ? NPY_ARRAY_CARRAY_RO : NPY_ARRAY_CARRAY, owner);
    return finish_array(state, like, dtype, exact, array);
}
