/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_PYTHON_WIRE_H
#define ARL_PYTHON_WIRE_H

#include "python/tensor.h"

#include "core/arl_wire.h"

/* The halves of feature `wire`; wire.c holds the method table and the docstrings. */

/* A new bytes object: the frame of `object`, with `metadata` (NULL, or a dict) as its "op". */
PyObject *arl_wire_encode(arl_state_t *state, PyObject *object, PyObject *metadata);

typedef struct arl_wire_options {
    arl_tensor_kind_t like; /* torch or NumPy */
    bool copy;
} arl_wire_options_t;

/* What a frame holds. `buffer` is what was given, for views to keep alive. */
PyObject *arl_wire_decode(arl_state_t *state, PyObject *buffer, const Py_buffer *frame,
                          const arl_wire_options_t *options);

/* The frame's "op" metadata as a dict; empty when there is none or the frame is not valid. */
PyObject *arl_wire_decode_metadata(arl_state_t *state, const Py_buffer *frame);

PyObject *arl_wire_encode_chunks(arl_state_t *state, PyObject *object, int64_t max_bytes,
                                 PyObject *kind, PyObject *operation, PyObject *group);
PyObject *arl_wire_decode_chunks(arl_state_t *state, PyObject *chunks);

/* Reads a bytes-like object; WireError, naming `call`, for others. */
int arl_wire_get_buffer(arl_state_t *state, PyObject *object, const char *call, Py_buffer *frame);

#endif
