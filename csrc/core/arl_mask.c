/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_mask.h"

#include "core/arl_threads.h"

#include <string.h>

enum { BLOCK = 256 }; /* elements summed at a time while looking for the first one */

/* What a stretch of a row holds: the sum of its values, and all their bits together. */
typedef struct tally {
    uint64_t sum;
    uint64_t bits;
} tally_t;

/* Contiguous elements of one width; the compiler vectorises it. Unaligned data is fine. */
#define TALLY_LOOP(type)                                                                           \
    tally_t tally = {0, 0};                                                                        \
                                                                                                   \
    for (int64_t i = 0; i < count; i++) {                                                          \
        type value;                                                                                \
                                                                                                   \
        memcpy(&value, data + i * (int64_t)sizeof(type), sizeof(type));                            \
        tally.sum += value;                                                                        \
        tally.bits |= value;                                                                       \
    }                                                                                              \
    return tally;

static tally_t
tally_dense_1(const char *data, int64_t count)
{
    TALLY_LOOP(uint8_t)
}

static tally_t
tally_dense_2(const char *data, int64_t count)
{
    TALLY_LOOP(uint16_t)
}

static tally_t
tally_dense_4(const char *data, int64_t count)
{
    TALLY_LOOP(uint32_t)
}

static tally_t
tally_dense_8(const char *data, int64_t count)
{
    TALLY_LOOP(uint64_t)
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

static tally_t
mask_tally(const char *data, int64_t stride, size_t itemsize, int64_t count)
{
    tally_t tally = {0, 0};

    if (stride == (int64_t)itemsize) {
        switch (itemsize) {
        case 1:
            return tally_dense_1(data, count);
        case 2:
            return tally_dense_2(data, count);
        case 4:
            return tally_dense_4(data, count);
        default:
            return tally_dense_8(data, count);
        }
    }
    for (int64_t i = 0; i < count; i++) {
        const uint64_t value = mask_value(data + i * stride, itemsize);

        tally.sum += value;
        tally.bits |= value;
    }
    return tally;
}

typedef struct mask_context {
    const arl_view_t *mask;
    int64_t *starts;
    int64_t *lengths; /* -1 marks a row that the caller has to describe */
} mask_context_t;

static const char *
mask_row(const arl_view_t *mask, int64_t row)
{
    return (const char *)mask->data + row * mask->strides[0];
}

/* Skips zeros by blocks, then finds the first one inside its block. */
static int64_t
mask_first(const arl_view_t *mask, const char *row)
{
    const int64_t width = mask->shape[1], stride = mask->strides[1];
    int64_t column = 0;

    while (column < width) {
        const int64_t count = width - column < BLOCK ? width - column : BLOCK;

        if (mask_tally(row + column * stride, stride, mask->itemsize, count).bits != 0) {
            while (mask_value(row + column * stride, mask->itemsize) == 0) {
                column++;
            }
            return column;
        }
        column += count;
    }
    return width;
}

static void
mask_rows(void *opaque, int64_t begin, int64_t end)
{
    const mask_context_t *context = opaque;
    const arl_view_t *mask = context->mask;
    const int64_t width = mask->shape[1], stride = mask->strides[1];

    for (int64_t row = begin; row < end; row++) {
        const char *data = mask_row(mask, row);
        const int64_t start = mask_first(mask, data);
        const tally_t rest =
            mask_tally(data + start * stride, stride, mask->itemsize, width - start);
        bool fine = rest.bits <= 1;

        /* With values of 0 and 1 alone the sum is the number of ones, at most width - start. */
        if (fine && rest.sum > 0) {
            const tally_t run =
                mask_tally(data + start * stride, stride, mask->itemsize, (int64_t)rest.sum);

            fine = run.sum == rest.sum;
        }
        context->starts[row] = start;
        context->lengths[row] = fine ? (int64_t)rest.sum : -1;
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
    mask_context_t context = {mask, starts, lengths};
    const char kind = arl_dtype_kind(mask->dtype);

    if (mask->ndim != 2 || (kind != 'b' && kind != 'i' && kind != 'u')) {
        char text[96];

        arl_view_describe(mask, text, sizeof(text));
        return arl_error_set(err, ARL_ERR_PAYLOAD, "read mask",
                             "%s: is %s, a bool or integer mask of two dimensions is needed", key,
                             text);
    }
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
