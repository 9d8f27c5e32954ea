/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_PAD_H
#define ARL_CORE_PAD_H

#include "core/arl_status.h"
#include "core/arl_view.h"

/*
 * The batch kernels: jagged rows to the padded wire layout and back. Rows are independent, so
 * each kernel splits over arl_parallel_for. Checks come first and apart: arl_*_check names the
 * row and leaves the outputs untouched; arl_*_run trusts what was checked.
 *
 * Copies go by item size (1, 2, 4, 8 or 16 bytes), so every fixed-width dtype works.
 */

enum { ARL_ITEM_MAX = 16 };

/* Row i is the elements offsets[i] .. offsets[i] + lengths[i]) of `values`. */
typedef struct arl_jagged {
    const char *values;
    size_t itemsize;
    int64_t stride; /* bytes from one element to the next */
    int64_t rows;
    const int64_t *offsets; /* at least `rows` entries, in elements */
    const int64_t *lengths; /* `rows` entries */
} arl_jagged_t;

/*
 * Left-padded prompt and right-padded response: out[rows, prompt_width + response_width]. Row i
 * holds prompt_lengths[i] then response_lengths[i] elements. Parts longer than their width are
 * refused by the check unless `truncate`; then the prompt keeps its end, the response its start.
 */
typedef struct arl_pad_job {
    arl_jagged_t input;
    const int64_t *prompt_lengths;
    const int64_t *response_lengths;
    int64_t prompt_width;
    int64_t response_width;
    bool truncate;
    unsigned char fill[ARL_ITEM_MAX]; /* one element, in the input's own representation */
    char *out;                        /* dense */
} arl_pad_job_t;

/* ARL_ERR_PAYLOAD names the first bad row and its numbers; `key` names the field. */
arl_status_t arl_pad_check(const arl_pad_job_t *job, const char *key, arl_error_t *err);
void arl_pad_run(const arl_pad_job_t *job);

/* A dense [rows, width] to read from; strides in bytes, of any sign. */
typedef struct arl_matrix {
    const char *data;
    size_t itemsize;
    int64_t rows;
    int64_t width;
    int64_t row_stride;
    int64_t col_stride;
} arl_matrix_t;

/* out[rows, width] = zeros, then the columns of `in` at the right. width >= in.width. */
typedef struct arl_left_pad_job {
    arl_matrix_t in;
    int64_t width;
    char *out; /* dense */
} arl_left_pad_job_t;

void arl_left_pad_run(const arl_left_pad_job_t *job);

/* Takes lengths[i] elements from column starts[i] of each row and lays them at offsets[i]. */
typedef struct arl_unpad_job {
    arl_matrix_t in;
    const int64_t *starts;
    const int64_t *lengths;
    const int64_t *offsets;
    char *out;
} arl_unpad_job_t;

/* Each row's span must lie inside the matrix. */
arl_status_t arl_unpad_check(const arl_unpad_job_t *job, const char *key, arl_error_t *err);
void arl_unpad_run(const arl_unpad_job_t *job);

/* Moves the whole flat vector one slot left; the last slot becomes zero. `stride` in bytes. */
void arl_shift_predict_next_run(const char *in, int64_t stride, char *out, size_t itemsize,
                                int64_t count);

#endif
