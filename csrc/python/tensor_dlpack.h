/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_PYTHON_TENSOR_DLPACK_H
#define ARL_PYTHON_TENSOR_DLPACK_H

#include "python/dlpack.h"
#include "python/tensor.h"

/* Of an object with __dlpack__; as arl_tensor_import. */
int arl_dlpack_import(arl_state_t *state, PyObject *object, const char *key, arl_status_t code,
                      arl_tensor_t *out_p);

/* torch's table of C functions, or NULL: it is too old, or speaks another version of it. */
const arl_dl_exchange_t *arl_torch_exchange(arl_state_t *state);

/*
 * True when a torch tensor is known to be where and what `view` says: memory, dtype, shape,
 * strides and device. False also when that cannot be told this way, and never an exception: then
 * import it anew. Takes a fifth of the time that asking for the address alone takes in Python.
 */
bool arl_torch_unchanged(arl_state_t *state, const arl_dl_exchange_t *exchange, PyObject *object,
                         const arl_view_t *view);

#endif
