/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_rows.h"

#include "core/arl_threads.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static const char *
row_data(const arl_jagged_t *rows, int64_t row)
{
    return rows->values + rows->offsets[row] * rows->stride;
}

static bool
is_dense(const arl_jagged_t *rows)
{
    return rows->stride == (int64_t)rows->itemsize;
}

/* What a pass over all rows reads; decides whether threads are worth waking. */
static int64_t
rows_nbytes(const arl_jagged_t *rows, const int64_t *lengths)
{
    int64_t count = 0;

    for (int64_t row = 0; row < rows->rows; row++) {
        count += lengths[row];
    }
    return count * (int64_t)rows->itemsize;
}

/* ---- counting -------------------------------------------------------------------------------- */

typedef struct counting {
    const arl_jagged_t *positions;
    _Atomic int64_t first_bad; /* row, or rows */
} counting_t;

/* No branch inside, so that the compiler makes vectors of it. */
static bool
counts_int64(const int64_t *values, int64_t count)
{
    int64_t difference = 0;

    for (int64_t i = 0; i < count; i++) {
        difference |= values[i] ^ i;
    }
    return difference == 0;
}

static bool
counts_int32(const int32_t *values, int64_t count)
{
    int32_t difference = 0;

    for (int64_t i = 0; i < count; i++) {
        difference |= values[i] ^ (int32_t)i;
    }
    return difference == 0;
}

static int64_t
position_at(const arl_jagged_t *positions, int64_t row, int64_t place)
{
    const char *item = row_data(positions, row) + place * positions->stride;
    int64_t wide;
    int32_t narrow;

    if (positions->itemsize == sizeof(wide)) {
        memcpy(&wide, item, sizeof(wide));
        return wide;
    }
    memcpy(&narrow, item, sizeof(narrow));
    return narrow;
}

static bool
row_counts(const arl_jagged_t *positions, int64_t row)
{
    const char *data = row_data(positions, row);
    const int64_t length = positions->lengths[row];
    int64_t place = 0;

    if (is_dense(positions) && (uintptr_t)data % positions->itemsize == 0) {
        return positions->itemsize == sizeof(int64_t)
                   ? counts_int64((const int64_t *)(const void *)data, length)
                   : counts_int32((const int32_t *)(const void *)data, length);
    }
    while (place < length && position_at(positions, row, place) == place) {
        place++;
    }
    return place == length;
}

static void
counting_task(void *context, int64_t begin, int64_t end)
{
    counting_t *counting = context;
    const arl_jagged_t *positions = counting->positions;

    for (int64_t row = begin; row < end; row++) {
        int64_t first;

        if (row_counts(positions, row)) {
            continue;
        }
        first = atomic_load(&counting->first_bad);
        while (row < first && !atomic_compare_exchange_weak(&counting->first_bad, &first, row)) {
        }
        return;
    }
}

arl_status_t
arl_rows_check_counting(const arl_jagged_t *positions, const char *key, arl_error_t *err)
{
    counting_t counting = {.positions = positions, .first_bad = positions->rows};
    int64_t row, place = 0;

    arl_parallel_for(positions->rows, rows_nbytes(positions, positions->lengths), counting_task,
                     &counting);
    row = atomic_load(&counting.first_bad);
    if (row == positions->rows) {
        return ARL_OK;
    }
    while (position_at(positions, row, place) == place) {
        place++;
    }
    return arl_error_set(err, ARL_ERR_PAYLOAD, "check position ids",
                         "%s: row %lld holds %lld at place %lld, not %lld; the server rebuilds "
                         "dropped position ids by counting, so these would be lost: set "
                         "remote_backend.comms.drop_position_ids=false",
                         key, (long long)row, (long long)position_at(positions, row, place),
                         (long long)place, (long long)place);
}

/* ---- groups ---------------------------------------------------------------------------------- */

/* Rows with one prompt, side by side within one mini-batch. */
typedef struct run {
    uint64_t hash;
    int64_t row;
    int64_t count;
} run_t;

typedef struct twins {
    const arl_rows_groups_t *job;
    unsigned char *same; /* row i has the prompt of row i - 1 */
} twins_t;

static bool
same_prompt(const arl_rows_groups_t *job, int64_t a, int64_t b)
{
    const int64_t length = job->prompt_lengths[a];
    const char *left = row_data(job->ids, a), *right = row_data(job->ids, b);

    if (length != job->prompt_lengths[b]) {
        return false;
    }
    if (is_dense(job->ids)) {
        return memcmp(left, right, (size_t)length * job->ids->itemsize) == 0;
    }
    for (int64_t i = 0; i < length; i++) {
        if (memcmp(left + i * job->ids->stride, right + i * job->ids->stride, job->ids->itemsize) !=
            0) {
            return false;
        }
    }
    return true;
}

static void
twins_task(void *context, int64_t begin, int64_t end)
{
    twins_t *twins = context;

    for (int64_t row = begin; row < end; row++) {
        twins->same[row] =
            row > 0 && row % twins->job->batch_rows != 0 && same_prompt(twins->job, row - 1, row);
    }
}

/* FNV-1a over the low words of the ids: only has to tell prompts apart, matches are compared. */
static uint64_t
prompt_hash(const arl_rows_groups_t *job, int64_t row)
{
    const char *data = row_data(job->ids, row);
    uint64_t hash = 14695981039346656037ULL;

    for (int64_t i = 0; i < job->prompt_lengths[row]; i++) {
        uint32_t word;

        memcpy(&word, data + i * job->ids->stride, sizeof(word));
        hash = (hash ^ word) * 1099511628211ULL;
    }
    return hash;
}

static int
run_compare(const void *a, const void *b)
{
    const run_t *left = a, *right = b;

    if (left->hash != right->hash) {
        return left->hash < right->hash ? -1 : 1;
    }
    return left->row < right->row ? -1 : left->row > right->row;
}

static arl_status_t
groups_describe(const arl_rows_groups_t *job, const run_t *first, const run_t *second,
                arl_error_t *err)
{
    const int64_t a = first->row / job->batch_rows, b = second->row / job->batch_rows;

    if (a != b) {
        return arl_error_set(err, ARL_ERR_PAYLOAD, "check rollout groups",
                             "rows %lld and %lld have one prompt but lie in mini-batches %lld and "
                             "%lld of %lld rows: the %lld rollouts of a prompt must stay together "
                             "for prompt sharing (zorro_train.enable)",
                             (long long)first->row, (long long)second->row, (long long)a,
                             (long long)b, (long long)job->batch_rows, (long long)job->group);
    }
    return arl_error_set(err, ARL_ERR_PAYLOAD, "check rollout groups",
                         "rows %lld and %lld have one prompt with other prompts in between: the "
                         "%lld rollouts of a prompt must lie side by side for prompt sharing "
                         "(zorro_train.enable); sort the batch by prompt",
                         (long long)first->row, (long long)second->row, (long long)job->group);
}

/* `runs` in row order. Called only when some run is not a whole number of groups. */
static arl_status_t
groups_find_split(const arl_rows_groups_t *job, run_t *runs, int64_t count, arl_error_t *err)
{
    const run_t *first = NULL; /* the split that shows first in the batch */

    for (int64_t i = 0; i < count; i++) {
        runs[i].hash = prompt_hash(job, runs[i].row);
    }
    qsort(runs, (size_t)count, sizeof(*runs), run_compare);
    for (int64_t i = 1; i < count; i++) {
        const run_t *a = &runs[i - 1], *b = &runs[i];
        const bool apart = !job->regrouped || a->row / job->batch_rows != b->row / job->batch_rows;

        if (a->hash == b->hash && apart && (first == NULL || b->row < first[1].row) &&
            (a->count % job->group != 0 || b->count % job->group != 0) &&
            same_prompt(job, a->row, b->row)) {
            first = a;
        }
    }
    return first == NULL ? ARL_OK : groups_describe(job, first, first + 1, err);
}

arl_status_t
arl_rows_check_groups(const arl_rows_groups_t *job, arl_error_t *err)
{
    const int64_t rows = job->ids->rows;
    twins_t twins = {.job = job, .same = NULL};
    run_t *runs = NULL;
    int64_t count = 0;
    bool whole = true;
    arl_status_t status = ARL_OK;

    if (job->group <= 1 || rows == 0) {
        return ARL_OK;
    }
    twins.same = malloc((size_t)rows);
    runs = malloc((size_t)rows * sizeof(*runs));
    if (twins.same == NULL || runs == NULL) {
        status = arl_error_set(err, ARL_ERR_NOMEM, "check rollout groups",
                               "no memory for %lld rows", (long long)rows);
        goto free_runs;
    }
    arl_parallel_for(rows, rows_nbytes(job->ids, job->prompt_lengths), twins_task, &twins);
    for (int64_t row = 0; row < rows; row++) {
        if (!twins.same[row]) {
            whole = whole && (count == 0 || runs[count - 1].count % job->group == 0);
            runs[count++] = (run_t){.row = row, .count = 0};
        }
        runs[count - 1].count++;
    }
    whole = whole && runs[count - 1].count % job->group == 0;
    if (!whole) {
        status = groups_find_split(job, runs, count, err);
    }
free_runs:
    free(runs);
    free(twins.same);
    return status;
}

/* ---- masks ----------------------------------------------------------------------------------- */

static void
mask_fill_task(void *context, int64_t begin, int64_t end)
{
    const arl_rows_mask_t *job = context;

    for (int64_t row = begin; row < end; row++) {
        const int64_t first = job->prompt_width - job->prompt_lengths[row];
        const int64_t last = job->prompt_width + job->response_lengths[row];
        int64_t *out = job->out + row * job->width;

        for (int64_t i = 0; i < job->width; i++) {
            out[i] = i >= first && i < last;
        }
    }
}

void
arl_rows_fill_mask(const arl_rows_mask_t *job)
{
    arl_parallel_for(job->rows, job->rows * job->width * (int64_t)sizeof(*job->out), mask_fill_task,
                     (void *)(uintptr_t)job); /* the task only reads it */
}

typedef struct mask_sum {
    const arl_view_t *mask;
    int64_t first;
    _Atomic int64_t total;
} mask_sum_t;

/* Two loops, so that the dense one becomes vectors. */
#define SUM_ITEMS(type)                                                                            \
    {                                                                                              \
        type item;                                                                                 \
                                                                                                   \
        if (stride == (int64_t)sizeof(item)) {                                                     \
            for (int64_t i = 0; i < width; i++) {                                                  \
                memcpy(&item, row + i * (int64_t)sizeof(item), sizeof(item));                      \
                sum += (uint64_t)item;                                                             \
            }                                                                                      \
            return (int64_t)sum;                                                                   \
        }                                                                                          \
        for (int64_t i = 0; i < width; i++) {                                                      \
            memcpy(&item, row + i * stride, sizeof(item));                                         \
            sum += (uint64_t)item;                                                                 \
        }                                                                                          \
        return (int64_t)sum;                                                                       \
    }

static int64_t
mask_row_sum(arl_dtype_t dtype, const char *row, int64_t width, int64_t stride)
{
    uint64_t sum = 0; /* wraps, where a mask holds nonsense */

    switch (dtype) {
    case ARL_DTYPE_BOOL:
    case ARL_DTYPE_U8:
        SUM_ITEMS(uint8_t)
    case ARL_DTYPE_I8:
        SUM_ITEMS(int8_t)
    case ARL_DTYPE_I16:
        SUM_ITEMS(int16_t)
    case ARL_DTYPE_I32:
        SUM_ITEMS(int32_t)
    default:
        SUM_ITEMS(int64_t)
    }
}

static void
mask_sum_task(void *context, int64_t begin, int64_t end)
{
    mask_sum_t *sum = context;
    const arl_view_t *mask = sum->mask;
    int64_t part = 0;

    for (int64_t row = sum->first + begin; row < sum->first + end; row++) {
        part += mask_row_sum(mask->dtype, (const char *)mask->data + row * mask->strides[0],
                             mask->shape[1], mask->strides[1]);
    }
    atomic_fetch_add(&sum->total, part);
}

bool
arl_rows_can_sum(arl_dtype_t dtype)
{
    return dtype == ARL_DTYPE_BOOL || dtype == ARL_DTYPE_U8 || arl_dtype_kind(dtype) == 'i';
}

int64_t
arl_rows_sum(const arl_view_t *mask, int64_t begin, int64_t end)
{
    mask_sum_t sum = {.mask = mask, .first = begin, .total = 0};

    arl_parallel_for(end - begin, (end - begin) * mask->shape[1] * (int64_t)mask->itemsize,
                     mask_sum_task, &sum);
    return atomic_load(&sum.total);
}
