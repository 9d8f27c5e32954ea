/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/cuda_tables.h"

#include "transport/cuda_kernels_ptx.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum {
    /* Below this a run's table entry is no longer small beside the run. */
    RUN_BYTES_MIN = 2048,
    UNIT_MAX = 16,
};

_Static_assert((int)ARL_K_DIMS == (int)ARL_VIEW_DIMS_MAX, "the kernels take every view");
_Static_assert(sizeof(arl_k_segment_t) == 24, "the segment table's layout");
_Static_assert(sizeof(arl_k_strided_t) == 192, "the strided table's layout");
_Static_assert(sizeof(arl_k_item_t) == 16, "the item table's layout");
_Static_assert(sizeof(arl_k_array_t) == 160, "the array table's layout");

const char *
arl_kernels_ptx(void)
{
    return kernels_ptx;
}

bool
arl_cuda_table_reserve(void **array, size_t *room, size_t count, size_t entry_size)
{
    size_t wanted = *room < 64 ? 64 : *room * 2, size;
    void *grown;

    if (count < *room) {
        return true;
    }
    if (__builtin_mul_overflow(wanted, entry_size, &size)) {
        return false;
    }
    grown = realloc(*array, size);
    if (grown == NULL) {
        return false;
    }
    *array = grown;
    *room = wanted;
    return true;
}

static arl_status_t
table_full(size_t count, const char *what, arl_error_t *err)
{
    if (count >= UINT32_MAX) {
        return arl_error_set(err, ARL_ERR_VALUE, "prepare copies", "more than 2^32 %s", what);
    }
    return arl_error_set_errno(err, "prepare copies", ENOMEM, "a table of %zu %s", count, what);
}

/* ---- segments ------------------------------------------------------------------------------- */

static arl_status_t
add_run(arl_cuda_tables_t *tables, const arl_copy_t *copy, int64_t src_offset, uintptr_t dst,
        arl_error_t *err)
{
    for (int64_t done = 0; done < copy->run_bytes; done += ARL_K_SEGMENT_BYTES) {
        const int64_t left = copy->run_bytes - done;

        if (tables->segment_count >= UINT32_MAX ||
            !arl_cuda_table_reserve((void **)&tables->segments, &tables->segment_room,
                                    tables->segment_count, sizeof(*tables->segments))) {
            return table_full(tables->segment_count, "segments", err);
        }
        tables->segments[tables->segment_count++] = (arl_k_segment_t){
            .src_offset = (arl_k_u64)(src_offset + done),
            .dst = dst + (arl_k_u64)done,
            .nbytes = (arl_k_u32)(left < ARL_K_SEGMENT_BYTES ? left : ARL_K_SEGMENT_BYTES),
            .base = copy->alloc,
        };
    }
    return ARL_OK;
}

static arl_status_t
add_runs(arl_cuda_tables_t *tables, const arl_copy_t *copy, arl_error_t *err)
{
    int64_t index[ARL_VIEW_DIMS_MAX] = {0};
    int64_t src = copy->src_offset, dst = 0;

    for (;;) {
        arl_status_t status =
            add_run(tables, copy, src, (uintptr_t)copy->dst + (uintptr_t)dst, err);
        int d = copy->ndim - 1;

        if (status != ARL_OK) {
            return status;
        }
        while (d >= 0 && ++index[d] == copy->count[d]) { /* carry into the next outer dimension */
            src -= (copy->count[d] - 1) * copy->src_stride[d];
            dst -= (copy->count[d] - 1) * copy->dst_stride[d];
            index[d] = 0;
            d--;
        }
        if (d < 0) {
            return ARL_OK;
        }
        src += copy->src_stride[d];
        dst += copy->dst_stride[d];
    }
}

/* ---- strided -------------------------------------------------------------------------------- */

/* The widest unit that divides every address and stride. Bases are multiples of it. */
static uint32_t
copy_unit(const arl_copy_t *copy)
{
    uint64_t bits = UNIT_MAX | (uint64_t)copy->run_bytes | (uint64_t)copy->src_offset |
                    (uint64_t)(uintptr_t)copy->dst;

    for (int d = 0; d < copy->ndim; d++) {
        bits |= (uint64_t)copy->src_stride[d] | (uint64_t)copy->dst_stride[d];
    }
    return (uint32_t)(bits & (~bits + 1)); /* the lowest bit */
}

static arl_status_t
add_items(arl_cuda_tables_t *tables, uint64_t units, arl_error_t *err)
{
    const uint32_t entry = (uint32_t)(tables->strided_count - 1);

    for (uint64_t first = 0; first < units; first += ARL_K_ITEM_UNITS) {
        const uint64_t left = units - first;

        if (tables->item_count >= UINT32_MAX ||
            !arl_cuda_table_reserve((void **)&tables->items, &tables->item_room, tables->item_count,
                                    sizeof(*tables->items))) {
            return table_full(tables->item_count, "items", err);
        }
        tables->items[tables->item_count++] = (arl_k_item_t){
            .entry = entry,
            .count = (arl_k_u32)(left < ARL_K_ITEM_UNITS ? left : ARL_K_ITEM_UNITS),
            .first = first,
        };
    }
    return ARL_OK;
}

static int
longest_dim(const arl_copy_t *copy)
{
    int longest = 0;

    for (int d = 1; d < copy->ndim; d++) {
        longest = copy->count[d] > copy->count[longest] ? d : longest;
    }
    return longest;
}

static arl_status_t
add_strided(arl_cuda_tables_t *tables, const arl_copy_t *copy, arl_error_t *err)
{
    const uint32_t unit = copy_unit(copy);
    const uint64_t units = (uint64_t)arl_copy_bytes(copy) / unit;
    arl_k_strided_t entry = {
        .src_offset = (arl_k_u64)copy->src_offset,
        .dst = (uintptr_t)copy->dst,
        .base = copy->alloc,
        .unit = unit,
        .row_units = (arl_k_u32)(copy->run_bytes / unit),
        .ndim = (arl_k_u32)copy->ndim,
    };

    if (units > UINT32_MAX) { /* the kernel counts in 32 bits: halve it */
        const int d = longest_dim(copy);
        const int64_t half = copy->count[d] / 2;
        arl_copy_t part = *copy;
        arl_status_t status;

        part.count[d] = half;
        status = add_strided(tables, &part, err);
        if (status != ARL_OK) {
            return status;
        }
        part.count[d] = copy->count[d] - half;
        part.src_offset += half * copy->src_stride[d];
        part.dst += half * copy->dst_stride[d];
        return add_strided(tables, &part, err);
    }
    for (int d = 0; d < copy->ndim; d++) {
        entry.count[d] = (arl_k_u32)copy->count[d];
        entry.src_stride[d] = copy->src_stride[d];
        entry.dst_stride[d] = copy->dst_stride[d];
    }
    if (tables->strided_count >= UINT32_MAX ||
        !arl_cuda_table_reserve((void **)&tables->strided, &tables->strided_room,
                                tables->strided_count, sizeof(*tables->strided))) {
        return table_full(tables->strided_count, "strided entries", err);
    }
    tables->strided[tables->strided_count++] = entry;
    return add_items(tables, units, err);
}

arl_status_t
arl_cuda_tables_build(arl_cuda_tables_t *tables, const arl_copy_t *copies, int64_t count,
                      arl_error_t *err)
{
    for (int64_t i = 0; i < count; i++) {
        const arl_copy_t *copy = &copies[i];
        arl_status_t status;

        if (copy->ndim == 0 || copy->run_bytes >= RUN_BYTES_MIN) {
            status = add_runs(tables, copy, err);
        }
        else {
            status = add_strided(tables, copy, err);
        }
        if (status != ARL_OK) {
            return status;
        }
    }
    return ARL_OK;
}

void
arl_cuda_tables_free(arl_cuda_tables_t *tables)
{
    free(tables->segments);
    free(tables->strided);
    free(tables->items);
    memset(tables, 0, sizeof(*tables));
}
