/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_PAD_H
#define ARL_CORE_PAD_H

#include "core/arl_status.h"
#include "core/arl_view.h"

/*
 * The batch kernels: jagged rows to the padded wire layout and back. Rows are independent, so
 * each kernel splits over arl_parallel_for. They validate nothing but what they are told to:
 * the arl_*_check functions come first, name the row, and leave the outputs untouched.
 *
 * Copies go by item size (1, 2, 4, 8 or 16 bytes), so every fixed-width dtype works.
 */

enum { ARL_ITEM_MAX = 16 };

/* Rows laid end to end: row i is values[offsets[i] .. offsets[i] + lengths[i]). */
typedef struct arl_jagged {
    const char *values;
    size_t itemsize;
    int64_t value_count; /* elements in `values` */
    int64_t rows;
    const int64_t *offsets; /* rows + 1 entries, in elements */
    const int64_t *lengths; /* rows entries, or NULL: offsets[i + 1] - offsets[i] */
} arl_jagged_t;

/* Left-padded prompt and right-padded response: out[rows, prompt_width + response_width].
 * Row i holds prompt_lengths[i] then response_lengths[i] elements (contract 3.2). */
typedef struct arl_pad_job {
    const arl_jagged_t *input;
    const int64_t *prompt_lengths;
    const int64_t *response_lengths;
    int64_t prompt_width;
    int64_t response_width;
    unsigned char fill[ARL_ITEM_MAX]; /* one element, in the input's own representation */
    char *out;                        /* dense */
} arl_pad_job_t;

/* Checks that lengths are non-negative, fit their widths, and add up to the rows; `key` names
 * the field in messages. ARL_ERR_PAYLOAD names the first bad row and the numbers. */
arl_status_t arl_pad_check(const arl_pad_job_t *job, const char *key, arl_error_t *err);
void arl_pad_run(const arl_pad_job_t *job);

/* out[rows, width] = zeros, then the `in_width` columns of `in` at the right (contract 3.5). */
typedef struct arl_left_pad_job {
    const char *in; /* first element; rows are row_stride bytes apart, columns col_stride */
    int64_t row_stride;
    int64_t col_stride;
    size_t itemsize;
    int64_t rows;
    int64_t in_width;
    int64_t width; /* >= in_width */
    char *out;
} arl_left_pad_job_t;

void arl_left_pad_run(const arl_left_pad_job_t *job);

/* Takes, from each row of a dense [rows, width], `lengths[i]` elements from `starts[i]` on, and
 * lays them end to end at offsets[i] of `out` (contract 3.6, make_njt). */
typedef struct arl_unpad_job {
    const char *in;
    int64_t row_stride;
    int64_t col_stride;
    size_t itemsize;
    int64_t rows;
    int64_t width;
    const int64_t *starts;
    const int64_t *lengths;
    const int64_t *offsets; /* rows + 1 */
    char *out;
} arl_unpad_job_t;

arl_status_t arl_unpad_check(const arl_unpad_job_t *job, const char *key, arl_error_t *err);
void arl_unpad_run(const arl_unpad_job_t *job);

/* Moves the whole flat vector one slot left; the last slot becomes zero (contract 3.6). */
void arl_shift_predict_next_run(const char *in, char *out, size_t itemsize, int64_t count);

/*
 * Reads a dense 0/1 mask [rows, width]: first one, number of ones. A row whose ones are not
 * one unbroken run is ARL_ERR_PAYLOAD with the row and column. A row of zeros has start `width`.
 */
arl_status_t arl_mask_spans(const arl_view_t *mask, const char *key, int64_t *starts,
                            int64_t *lengths, arl_error_t *err);

#endif
