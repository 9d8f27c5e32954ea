/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_PYTHON_TENSOR_H
#define ARL_PYTHON_TENSOR_H

#include "python/state.h"

#include "core/arl_view.h"

/*
 * Tensors in and out. In: torch tensors, NumPy arrays, anything with __dlpack__. Out: what went
 * in as torch comes out as torch, everything else as NumPy. torch is never imported by us: a
 * torch tensor exists only where it has been imported already.
 */
typedef enum arl_tensor_kind {
    ARL_TENSOR_NUMPY = 0,
    ARL_TENSOR_TORCH = 1,
    ARL_TENSOR_DLPACK = 2,
} arl_tensor_kind_t;

/* A view with a strong reference to whatever keeps its memory alive. Hold it until the bytes
 * have moved. Zero-initialise; release is then safe at any time, also twice. */
typedef struct arl_tensor {
    arl_view_t view;
    arl_tensor_kind_t kind;
    PyObject *owner;
} arl_tensor_t;

/* A jagged batch: 1-D values, the rows' offsets and lengths as int64. Rows of several components
 * (mrope) do not import. Rows lie inside the values; they fill them unless the tensor has lengths
 * of its own, which may leave holes. */
typedef struct arl_nested {
    arl_tensor_t values;
    int64_t *offsets; /* rows + 1, owned (PyMem) */
    int64_t *lengths; /* rows, owned (PyMem); never NULL after a successful import */
    int64_t rows;
    PyObject *offsets_object; /* the tensor or array the offsets came from */
} arl_nested_t;

enum {
    ARL_TENSOR_CPU_ONLY = 1, /* refuse other devices, by name */
    ARL_TENSOR_WRITABLE = 2, /* refuse read-only memory */
};

/* `key` names the field in messages; `code` is the status to raise with (ARL_ERR_PAYLOAD for
 * batches, ARL_ERR_TYPE for weights, …). Return 0, or -1 with an exception set and nothing held. */
int arl_tensor_import(arl_state_t *state, PyObject *object, const char *key, int flags,
                      arl_status_t code, arl_tensor_t *out_p);
void arl_tensor_release(arl_tensor_t *tensor);

/* 1: a nested jagged torch tensor, or a (values, offsets) tuple; 0: something else; -1: error. */
int arl_nested_check(arl_state_t *state, PyObject *object);
int arl_nested_import(arl_state_t *state, PyObject *object, const char *key, arl_status_t code,
                      arl_nested_t *out_p);
void arl_nested_release(arl_nested_t *nested);

/* Reads a 1-D int32 or int64 tensor into a new PyMem array of int64. */
int arl_tensor_read_int64(arl_state_t *state, PyObject *object, const char *key, arl_status_t code,
                          int64_t **values_p, int64_t *count_p);

/*
 * Makes a new dense CPU tensor of uninitialised memory. Returns the object to hand to the
 * caller and fills `view_p` for writing; NULL with an exception set on failure. `like` decides
 * torch or NumPy (DLPack becomes NumPy; a dtype that NumPy lacks is then an error that says so).
 */
PyObject *arl_tensor_new(arl_state_t *state, arl_tensor_kind_t like, arl_dtype_t dtype, int ndim,
                         const int64_t *shape, arl_view_t *view_p);

/*
 * The same over memory that `owner` keeps alive, without a copy. `readonly` marks a NumPy array;
 * torch has no such mark, so the caller must not ask for it there.
 */
PyObject *arl_tensor_over(arl_state_t *state, arl_tensor_kind_t like, arl_dtype_t dtype, int ndim,
                          const int64_t *shape, void *data, bool readonly, PyObject *owner);

/* A jagged result over `values` (1-D object from arl_tensor_new) and `offsets`: a nested torch
 * tensor, or a (values, offsets) tuple for NumPy. Steals nothing. */
PyObject *arl_nested_new(arl_state_t *state, arl_tensor_kind_t like, PyObject *values,
                         PyObject *offsets);

/* Python's name of the type, for messages ("torch.Tensor", "list"). */
const char *arl_type_name(PyObject *object);

/* 1: torch is in the process and can be used; 0: it is not; -1: error. */
int arl_torch_ready(arl_state_t *state);

/* 1 when `object` is a torch tensor (also a subclass), 0 when not, -1 on error. */
int arl_is_torch_tensor(arl_state_t *state, PyObject *object);

#endif
