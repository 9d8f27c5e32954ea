/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_mask.h"

#include "core/arl_threads.h"

#include <string.h>

enum { BLOCK_BYTES = 1024 }; /* compared at a time: memcmp at its best, the pattern stays in L1 */

/* One block of each value that a mask may hold. */
typedef struct mask_blocks {
    unsigned char of[2][BLOCK_BYTES];
} mask_blocks_t;

static void
mask_blocks_fill(mask_blocks_t *blocks, size_t itemsize)
{
    memset(blocks, 0, sizeof(*blocks));
    for (size_t i = 0; i < BLOCK_BYTES; i += itemsize) {
        blocks->of[1][i] = 1; /* little endian: the low byte comes first */
    }
}

static uint64_t
mask_value(const char *data, size_t itemsize)
{
    uint8_t one;
    uint16_t two;
    uint32_t four;
    uint64_t eight;

    switch (itemsize) {
    case 1:
        memcpy(&one, data, sizeof(one));
        return one;
    case 2:
        memcpy(&two, data, sizeof(two));
        return two;
    case 4:
        memcpy(&four, data, sizeof(four));
        return four;
    default:
        memcpy(&eight, data, sizeof(eight));
        return eight;
    }
}

/* The first column from `column` on that does not hold `wanted`, or the width. */
static int64_t
mask_skip(const arl_view_t *mask, const mask_blocks_t *blocks, const char *row, int64_t column,
          int wanted)
{
    const int64_t width = mask->shape[1], stride = mask->strides[1];
    const int64_t block = BLOCK_BYTES / (int64_t)mask->itemsize;

    if (stride == (int64_t)mask->itemsize) {
        while (width - column >= block &&
               memcmp(row + column * stride, blocks->of[wanted], BLOCK_BYTES) == 0) {
            column += block;
        }
    }
    while (column < width &&
           mask_value(row + column * stride, mask->itemsize) == (uint64_t)wanted) {
        column++;
    }
    return column;
}

typedef struct mask_context {
    const arl_view_t *mask;
    int64_t *starts;
    int64_t *lengths; /* -1 marks a row that the caller has to describe */
    mask_blocks_t blocks;
} mask_context_t;

static const char *
mask_row(const arl_view_t *mask, int64_t row)
{
    return (const char *)mask->data + row * mask->strides[0];
}

/* Zeros, ones, zeros, and nothing else: one pass. */
static void
mask_rows(void *opaque, int64_t begin, int64_t end)
{
    const mask_context_t *context = opaque;
    const arl_view_t *mask = context->mask;

    for (int64_t row = begin; row < end; row++) {
        const char *data = mask_row(mask, row);
        const int64_t first = mask_skip(mask, &context->blocks, data, 0, 0);
        const int64_t last = mask_skip(mask, &context->blocks, data, first, 1);
        const bool fine = mask_skip(mask, &context->blocks, data, last, 0) == mask->shape[1];

        context->starts[row] = first;
        context->lengths[row] = fine ? last - first : -1;
    }
}

/* Finds what is wrong with a row again, slowly, to say where. */
static arl_status_t
mask_describe(const arl_view_t *mask, int64_t row, const char *key, arl_error_t *err)
{
    const char *data = mask_row(mask, row);
    int64_t gap = -1; /* first zero after the first one */
    bool seen = false;

    for (int64_t column = 0; column < mask->shape[1]; column++) {
        const uint64_t value = mask_value(data + column * mask->strides[1], mask->itemsize);

        if (value > 1) {
            return arl_error_set(err, ARL_ERR_PAYLOAD, "read mask",
                                 "%s: row %lld, column %lld is neither 0 nor 1", key,
                                 (long long)row, (long long)column);
        }
        if (value == 1 && gap >= 0) {
            return arl_error_set(err, ARL_ERR_PAYLOAD, "read mask",
                                 "%s: row %lld has zeros between ones (0 at column %lld, 1 again "
                                 "at column %lld); the ones of a row must be one unbroken run",
                                 key, (long long)row, (long long)gap, (long long)column);
        }
        if (value == 0 && seen && gap < 0) {
            gap = column;
        }
        seen = seen || value == 1;
    }
    return arl_error_set(err, ARL_ERR_PAYLOAD, "read mask",
                         "%s: row %lld changed while it was read", key, (long long)row);
}

arl_status_t
arl_mask_spans(const arl_view_t *mask, const char *key, int64_t *starts, int64_t *lengths,
               arl_error_t *err)
{
    mask_context_t context = {.mask = mask, .starts = starts, .lengths = lengths};
    const char kind = arl_dtype_kind(mask->dtype);

    if (mask->ndim != 2 || (kind != 'b' && kind != 'i' && kind != 'u')) {
        char text[96];

        arl_view_describe(mask, text, sizeof(text));
        return arl_error_set(err, ARL_ERR_PAYLOAD, "read mask",
                             "%s: is %s, a bool or integer mask of two dimensions is needed", key,
                             text);
    }
    mask_blocks_fill(&context.blocks, mask->itemsize);
    arl_parallel_for(mask->shape[0], arl_view_nbytes(mask), mask_rows, &context);
    for (int64_t row = 0; row < mask->shape[0]; row++) {
        if (lengths[row] < 0) {
            return mask_describe(mask, row, key, err);
        }
    }
    return ARL_OK;
}

arl_status_t
arl_mask_split(const int64_t *starts, const int64_t *lengths, int64_t rows, int64_t prompt_width,
               const char *key, int64_t *prompt_lengths, int64_t *response_lengths,
               arl_error_t *err)
{
    for (int64_t row = 0; row < rows; row++) {
        const int64_t start = starts[row], end = start + lengths[row];

        if (lengths[row] > 0 && (start > prompt_width || end < prompt_width)) {
            return arl_error_set(
                err, ARL_ERR_PAYLOAD, "read mask",
                "%s: row %lld has its ones in columns [%lld, %lld), but prompts end and responses "
                "begin at column %lld (left-padded prompt, right-padded response)",
                key, (long long)row, (long long)start, (long long)end, (long long)prompt_width);
        }
        prompt_lengths[row] = lengths[row] > 0 ? prompt_width - start : 0;
        response_lengths[row] = lengths[row] - prompt_lengths[row];
    }
    return ARL_OK;
}
