/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_plan.h"

#include "core/arl_threads.h"

#include <stdlib.h>
#include <string.h>

enum {
    PIECE_BYTES = 1 << 20, /* what one thread takes at a time */
    TILE = 32,             /* elements: a tile of a transposing copy touches TILE cache lines */
};

/* ---- shape ---------------------------------------------------------------------------------- */

typedef struct dim {
    int64_t count;
    int64_t src;
    int64_t dst;
} dim_t;

static int64_t
magnitude(int64_t value)
{
    return value < 0 ? -value : value;
}

/* Outermost first: by how far apart the destination's elements are, so that the innermost loop
 * writes the nearest ones. Layouts that are permuted alike become dense again by it. */
static bool
dim_before(const dim_t *a, const dim_t *b)
{
    if (magnitude(a->dst) != magnitude(b->dst)) {
        return magnitude(a->dst) > magnitude(b->dst);
    }
    return magnitude(a->src) > magnitude(b->src);
}

static void
dims_sort(dim_t *dims, int n)
{
    for (int i = 1; i < n; i++) {
        dim_t moved = dims[i];
        int j = i;

        for (; j > 0 && dim_before(&moved, &dims[j - 1]); j--) {
            dims[j] = dims[j - 1];
        }
        dims[j] = moved;
    }
}

/* Joins neighbours that are one dimension on both sides. Returns how many are left. */
static int
dims_merge(dim_t *dims, int n)
{
    int kept = 0;

    for (int i = 0; i < n; i++) {
        dim_t *outer = kept > 0 ? &dims[kept - 1] : NULL;

        if (outer != NULL && outer->src == dims[i].src * dims[i].count &&
            outer->dst == dims[i].dst * dims[i].count) {
            outer->count *= dims[i].count;
            outer->src = dims[i].src;
            outer->dst = dims[i].dst;
        }
        else {
            dims[kept++] = dims[i];
        }
    }
    return kept;
}

bool
arl_copy_shape(arl_copy_t *copy_p, size_t itemsize, int ndim, const int64_t *shape,
               const int64_t *src_strides, const int64_t *dst_strides)
{
    const int64_t item = (int64_t)itemsize;
    dim_t dims[ARL_VIEW_DIMS_MAX];
    int n = 0;

    for (int i = 0; i < ndim; i++) {
        if (shape[i] == 0) {
            return false;
        }
        if (shape[i] != 1) {
            dims[n++] = (dim_t){shape[i], src_strides[i], dst_strides[i]};
        }
    }
    dims_sort(dims, n);
    n = dims_merge(dims, n);
    copy_p->run_bytes = item;
    if (n > 0 && dims[n - 1].src == item && dims[n - 1].dst == item) {
        copy_p->run_bytes = item * dims[n - 1].count;
        n--;
    }
    copy_p->ndim = n;
    for (int i = 0; i < n; i++) {
        copy_p->count[i] = dims[i].count;
        copy_p->src_stride[i] = dims[i].src;
        copy_p->dst_stride[i] = dims[i].dst;
    }
    return true;
}

static int64_t
copy_runs(const arl_copy_t *copy)
{
    int64_t runs = 1;

    for (int i = 0; i < copy->ndim; i++) {
        runs *= copy->count[i];
    }
    return runs;
}

int64_t
arl_copy_bytes(const arl_copy_t *copy)
{
    return copy_runs(copy) * copy->run_bytes;
}

/* ---- running on the host -------------------------------------------------------------------- */

/* A fixed size lets the compiler make one load and one store of it. */
#define COPY_ELEMENTS(bytes)                                                                       \
    for (int64_t i = 0; i < count; i++) {                                                          \
        memcpy(dst + i * dst_stride, src + i * src_stride, (bytes));                               \
    }                                                                                              \
    break

static void
copy_line(char *dst, int64_t dst_stride, const char *src, int64_t src_stride, int64_t count,
          int64_t run_bytes)
{
    switch (run_bytes) {
    case 1:
        COPY_ELEMENTS(1);
    case 2:
        COPY_ELEMENTS(2);
    case 4:
        COPY_ELEMENTS(4);
    case 8:
        COPY_ELEMENTS(8);
    case 16:
        COPY_ELEMENTS(16);
    default:
        COPY_ELEMENTS((size_t)run_bytes);
    }
}

/* Rows [begin, end) of the innermost two dimensions. Short runs go tile by tile, since one side
 * is then usually transposed and a whole line of it would not stay in the cache. */
static void
copy_plane(const arl_copy_t *copy, char *dst, const char *src, int64_t begin, int64_t end)
{
    const int row = copy->ndim - 2, col = copy->ndim - 1;
    const int64_t width = copy->count[col];
    const int64_t tile = copy->run_bytes <= 16 ? TILE : width;

    for (int64_t top = begin; top < end; top += TILE) {
        const int64_t bottom = end - top < TILE ? end : top + TILE;

        for (int64_t left = 0; left < width; left += tile) {
            const int64_t count = width - left < tile ? width - left : tile;

            for (int64_t i = top; i < bottom; i++) {
                copy_line(dst + i * copy->dst_stride[row] + left * copy->dst_stride[col],
                          copy->dst_stride[col],
                          src + i * copy->src_stride[row] + left * copy->src_stride[col],
                          copy->src_stride[col], count, copy->run_bytes);
            }
        }
    }
}

/* Rows [begin, end) of the second innermost dimension, counted through all outer ones. */
static void
copy_rows(const arl_copy_t *copy, const char *src, int64_t begin, int64_t end)
{
    const int row = copy->ndim - 2;

    while (begin < end) {
        const int64_t first = begin % copy->count[row];
        const int64_t in_plane = copy->count[row] - first;
        const int64_t take = end - begin < in_plane ? end - begin : in_plane;
        int64_t index = begin / copy->count[row];
        const char *from = src;
        char *to = copy->dst;

        for (int i = row - 1; i >= 0; i--) {
            from += index % copy->count[i] * copy->src_stride[i];
            to += index % copy->count[i] * copy->dst_stride[i];
            index /= copy->count[i];
        }
        copy_plane(copy, to, from, first, first + take);
        begin += take;
    }
}

/*
 * The unit that a copy is divided by, and their number: bytes of a dense run, elements of one
 * dimension, rows of more.
 */
static int64_t
copy_units(const arl_copy_t *copy)
{
    switch (copy->ndim) {
    case 0:
        return copy->run_bytes;
    case 1:
        return copy->count[0];
    default:
        return copy_runs(copy) / copy->count[copy->ndim - 1];
    }
}

static void
copy_run_units(const arl_copy_t *copy, const char *src_base, int64_t begin, int64_t end)
{
    const char *src = src_base + copy->src_offset;

    switch (copy->ndim) {
    case 0:
        memcpy(copy->dst + begin, src + begin, (size_t)(end - begin));
        break;
    case 1:
        copy_line(copy->dst + begin * copy->dst_stride[0], copy->dst_stride[0],
                  src + begin * copy->src_stride[0], copy->src_stride[0], end - begin,
                  copy->run_bytes);
        break;
    default:
        copy_rows(copy, src, begin, end);
    }
}

void
arl_copy_run_host(const arl_copy_t *copy, const char *src_base)
{
    copy_run_units(copy, src_base, 0, copy_units(copy));
}

/* Pieces that a copy is split into, of about PIECE_BYTES each. */
static int64_t
copy_pieces(const arl_copy_t *copy)
{
    const int64_t units = copy_units(copy);
    const int64_t bytes = arl_copy_bytes(copy);
    const int64_t pieces = bytes / PIECE_BYTES + (bytes % PIECE_BYTES != 0);

    return pieces < units ? pieces : units;
}

typedef struct plan_job {
    const arl_plan_t *plan;
    const char *const *bases;
    const int64_t *first_piece; /* plan->count + 1 */
} plan_job_t;

/* The copy that piece `piece` belongs to: the last one that starts at or before it. */
static int64_t
job_find(const plan_job_t *job, int64_t piece)
{
    int64_t low = 0, high = job->plan->count - 1;

    while (low < high) {
        const int64_t middle = low + (high - low + 1) / 2;

        if (job->first_piece[middle] <= piece) {
            low = middle;
        }
        else {
            high = middle - 1;
        }
    }
    return low;
}

static void
job_run(void *context, int64_t begin, int64_t end)
{
    const plan_job_t *job = context;

    while (begin < end) {
        const int64_t index = job_find(job, begin);
        const arl_copy_t *copy = &job->plan->copies[index];
        const int64_t first = job->first_piece[index];
        const int64_t pieces = job->first_piece[index + 1] - first;
        const int64_t last = end - first < pieces ? end - first : pieces;
        const int64_t units = copy_units(copy);
        const int64_t each = units / pieces, spare = units % pieces;
        const int64_t from = begin - first;

        /* The first `spare` pieces take one unit more. */
        copy_run_units(copy, job->bases[copy->alloc], from * each + (from < spare ? from : spare),
                       last * each + (last < spare ? last : spare));
        begin = first + last;
    }
}

arl_status_t
arl_plan_run_host(const arl_plan_t *plan, const char *const *bases, arl_error_t *err)
{
    plan_job_t job = {.plan = plan, .bases = bases};
    int64_t *first_piece = calloc((size_t)plan->count + 1, sizeof(*first_piece));

    if (first_piece == NULL) {
        return arl_error_set(err, ARL_ERR_NOMEM, "copy",
                             "out of memory for the schedule of %lld copies; nothing was written",
                             (long long)plan->count);
    }
    for (int64_t i = 0; i < plan->count; i++) {
        first_piece[i + 1] = first_piece[i] + copy_pieces(&plan->copies[i]);
    }
    job.first_piece = first_piece;
    arl_parallel_for(first_piece[plan->count], plan->total_bytes, job_run, &job);
    free(first_piece);
    return ARL_OK;
}

void
arl_plan_free(arl_plan_t *plan)
{
    free(plan->copies);
    plan->copies = NULL;
    plan->count = 0;
    plan->total_bytes = 0;
}
