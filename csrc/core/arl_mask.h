/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_MASK_H
#define ARL_CORE_MASK_H

#include "core/arl_status.h"
#include "core/arl_view.h"

/*
 * Reads a dense 0/1 mask [rows, width] of a bool or integer dtype: column of the first one and
 * number of ones, per row. A row whose ones are not one unbroken run, or that holds another
 * value, is ARL_ERR_PAYLOAD with the row and column. A row of zeros has start `width`. Splits
 * over threads; call it without the GIL.
 */
arl_status_t arl_mask_spans(const arl_view_t *mask, const char *key, int64_t *starts,
                            int64_t *lengths, arl_error_t *err);

/*
 * Cuts the spans at column `prompt_width` into prompt and response lengths. A row must be laid
 * out as the wire has it: the prompt ends at that column, the response begins there.
 */
arl_status_t arl_mask_split(const int64_t *starts, const int64_t *lengths, int64_t rows,
                            int64_t prompt_width, const char *key, int64_t *prompt_lengths,
                            int64_t *response_lengths, arl_error_t *err);

#endif
