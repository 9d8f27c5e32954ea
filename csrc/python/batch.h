/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_PYTHON_BATCH_H
#define ARL_PYTHON_BATCH_H

#include "python/tensor.h"

#include "core/arl_pad.h"

/*
 * The batch kernels for other C files: what the Python functions of batch.c do, without the
 * calls through Python. `key` names the field in messages. All need the GIL and release it
 * while large arrays move. On failure NULL or -1 with an exception set, outputs untouched.
 */

/* How the rows of a batch divide into prompt and response. Zero-initialise; release is then safe
 * at any time, also twice. */
typedef struct arl_batch_layout {
    int64_t rows;
    int64_t prompt_width;
    int64_t response_width;
    int64_t *prompt_lengths;   /* rows, owned (PyMem) */
    int64_t *response_lengths; /* rows, owned (PyMem) */
} arl_batch_layout_t;

/*
 * Reads the layout from what a batch holds, in one of three forms (contract 3.2):
 *   - nested jagged prompts and responses: lengths from their offsets, widths from the longest;
 *   - dense [rows, P] and [rows, R]: lengths from `attention_mask` [rows, P + R], widths P and R;
 *   - lengths: 1-D integer tensors, arrays or lists, widths from the longest.
 * A width >= 0 overrides the default; -1 asks for it. `attention_mask` may be NULL or None, except
 * in the dense form; where given, its rows must hold as many ones as the lengths say.
 */
int arl_batch_layout_import(arl_state_t *state, PyObject *prompts, PyObject *responses,
                            PyObject *attention_mask, int64_t prompt_width, int64_t response_width,
                            arl_batch_layout_t *out_p);
void arl_batch_layout_release(arl_batch_layout_t *layout);

/* An imported jagged tensor of one dimension, as the core's kernels read it. */
static inline arl_jagged_t
arl_batch_jagged(const arl_nested_t *nested)
{
    return (arl_jagged_t){.values = nested->values.view.data,
                          .itemsize = nested->values.view.itemsize,
                          .stride = nested->values.view.strides[0],
                          .rows = nested->rows,
                          .offsets = nested->offsets,
                          .lengths = nested->lengths};
}

/* arl_nested_import for batches: PayloadError when `object` is not nested, too. */
int arl_batch_nested_import(arl_state_t *state, PyObject *object, const char *key,
                            arl_nested_t *out_p);

/* Where the ones of each row of a dense 0/1 mask begin and how many there are (arl_mask_spans). The
 * mask must have `rows` rows and, unless it is -1, `width` columns. A new PyMem array: `rows`
 * starts, then `rows` lengths. */
int64_t *arl_batch_mask_spans(arl_state_t *state, PyObject *attention_mask, int64_t rows,
                              int64_t width);

/* `pad_value` as one element of `dtype`: PayloadError when it is None, of another kind or does not
 * fit. Writes arl_dtype_size(dtype) bytes. */
int arl_batch_fill(arl_state_t *state, PyObject *pad_value, arl_dtype_t dtype, const char *key,
                   unsigned char fill[ARL_ITEM_MAX]);

/* The padded [rows, prompt_width + response_width] of `input`, torch or NumPy as it is. */
PyObject *arl_batch_pad(arl_state_t *state, const arl_nested_t *input,
                        const arl_batch_layout_t *layout, const unsigned char fill[ARL_ITEM_MAX],
                        bool truncate, const char *key);

/*
 * Brackets the moving of `nbytes`. begin settles the number of threads (-1: ARCTIC_RL_C_THREADS
 * is malformed) and releases the GIL, unless so little moves that handing the GIL to a waiting
 * thread would cost more than the copy; end takes it back.
 */
int arl_batch_begin(arl_state_t *state, int64_t nbytes, PyThreadState **saved_p);
void arl_batch_end(PyThreadState *saved);

/* What to do with a tensor that is wider than the width it is to be padded to. */
typedef enum arl_batch_wide {
    ARL_BATCH_WIDE_ERROR = 0,
    ARL_BATCH_WIDE_KEEP = 1, /* hand it back as it is, as the recorded adapters do */
} arl_batch_wide_t;

/* [rows, R] with zeros on the left up to `width` columns; a tensor that has that width already is
 * returned itself. */
PyObject *arl_batch_left_pad(arl_state_t *state, PyObject *tensor, int64_t width,
                             arl_batch_wide_t wide, const char *key);

/* Rows of a dense [rows, width], from the first 1 of their mask row on, as jagged as `like` (the
 * same offsets object). */
PyObject *arl_batch_make_jagged(arl_state_t *state, PyObject *dense, PyObject *attention_mask,
                                PyObject *like, const char *key);

/* The flat values one slot to the left, last slot zero, same offsets object. */
PyObject *arl_batch_shift_predict_next(arl_state_t *state, PyObject *nested, const char *key);

#endif
