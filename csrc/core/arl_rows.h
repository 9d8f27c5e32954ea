/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_ROWS_H
#define ARL_CORE_ROWS_H

#include "core/arl_pad.h"

#include <stdbool.h>

/*
 * Passes over the rows of a batch that payloads need: checks of what the server takes on trust,
 * and masks. Each reads the batch once and splits over threads; call them without the GIL.
 */

/*
 * Position ids that the server rebuilds from the mask: every row counts 0, 1, 2, …. Items are
 * int32 or int64. Any other row is ARL_ERR_PAYLOAD with the row, the place and the two numbers.
 */
arl_status_t arl_rows_check_counting(const arl_jagged_t *positions, const char *key,
                                     arl_error_t *err);

typedef struct arl_rows_groups {
    const arl_jagged_t *ids;
    const int64_t *prompt_lengths;
    int64_t group;      /* rows that share one prompt: rollout_n */
    int64_t batch_rows; /* rows of one mini-batch */
    bool regrouped;     /* the server sorts the rows of a mini-batch by prompt */
} arl_rows_groups_t;

/*
 * Rows of one prompt lie side by side, or at least (`regrouped`) in one mini-batch. The fault is
 * seen by the prompt that comes back after its run has ended early; rows that have no twin at all
 * are let through, there is nothing to share in them.
 */
arl_status_t arl_rows_check_groups(const arl_rows_groups_t *job, arl_error_t *err);

/* The mask of the padded layout: out[rows, width] is 1 where a row has an element. */
typedef struct arl_rows_mask {
    int64_t rows;
    int64_t prompt_width;
    int64_t width;
    const int64_t *prompt_lengths;
    const int64_t *response_lengths;
    int64_t *out; /* dense */
} arl_rows_mask_t;

void arl_rows_fill_mask(const arl_rows_mask_t *job);

/* The sum of rows [begin, end) of a dense [rows, width] whose dtype arl_rows_can_sum accepts. */
bool arl_rows_can_sum(arl_dtype_t dtype);
int64_t arl_rows_sum(const arl_view_t *mask, int64_t begin, int64_t end);

#endif
