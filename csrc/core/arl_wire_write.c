/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_wire.h"

#include <stdlib.h>
#include <string.h>

static const char writing[] = "wire.dumps";

/* The format's order of dtypes; a dtype that is not here cannot be written. */
static int
dtype_rank(arl_dtype_t dtype)
{
    static const unsigned char ranks[ARL_DTYPE_COUNT] = {
        [ARL_DTYPE_BOOL] = 1,    [ARL_DTYPE_U8] = 2,      [ARL_DTYPE_I8] = 3,
        [ARL_DTYPE_F8_E5M2] = 4, [ARL_DTYPE_F8_E4M3] = 5, [ARL_DTYPE_I16] = 6,
        [ARL_DTYPE_U16] = 7,     [ARL_DTYPE_F16] = 8,     [ARL_DTYPE_BF16] = 9,
        [ARL_DTYPE_I32] = 10,    [ARL_DTYPE_U32] = 11,    [ARL_DTYPE_F32] = 12,
        [ARL_DTYPE_F64] = 13,    [ARL_DTYPE_I64] = 14,    [ARL_DTYPE_U64] = 15,
    };

    return ranks[dtype];
}

static int
item_by_name(const void *left, const void *right)
{
    const arl_wire_item_t *a = left, *b = right;

    return arl_wire_compare_names(a->name, a->name_size, b->name, b->name_size);
}

static int
item_by_rank(const void *left, const void *right)
{
    const arl_wire_item_t *a = left, *b = right;
    int order = dtype_rank(b->view.dtype) - dtype_rank(a->view.dtype);

    return order != 0 ? order : item_by_name(left, right);
}

static arl_status_t
check_item_names(arl_wire_item_t *items, int64_t count, arl_error_t *err)
{
    qsort(items, (size_t)count, sizeof(*items), item_by_name);
    for (int64_t i = 1; i < count; i++) {
        if (item_by_name(&items[i - 1], &items[i]) == 0) {
            return arl_error_set(err, ARL_ERR_WIRE, writing,
                                 "the tensors %s and %s would both be stored as \"%.*s\", and one "
                                 "would be lost; rename one of the keys",
                                 items[i - 1].path, items[i].path,
                                 arl_json_quoted(items[i].name_size), items[i].name);
        }
    }
    return ARL_OK;
}

arl_status_t
arl_wire_layout(arl_wire_item_t *items, int64_t count, int64_t *data_size_p, arl_error_t *err)
{
    int64_t size = 0;
    arl_status_t status;

    for (int64_t i = 0; i < count; i++) {
        items[i].nbytes = arl_view_nbytes(&items[i].view);
        if (dtype_rank(items[i].view.dtype) == 0) {
            return arl_error_set(err, ARL_ERR_WIRE, writing,
                                 "%s: dtype %s has no name in the wire format", items[i].path,
                                 arl_dtype_name(items[i].view.dtype));
        }
    }
    if (count > 1) {
        status = check_item_names(items, count, err);
        if (status != ARL_OK) {
            return status;
        }
        qsort(items, (size_t)count, sizeof(*items), item_by_rank);
    }
    for (int64_t i = 0; i < count; i++) {
        items[i].begin = size;
        if (items[i].nbytes < 0 || __builtin_add_overflow(size, items[i].nbytes, &size)) {
            return arl_error_set(err, ARL_ERR_WIRE, writing,
                                 "%s: the sizes of the tensors overflow", items[i].path);
        }
    }
    *data_size_p = size;
    return ARL_OK;
}

static void
put_item(arl_text_t *out, const arl_wire_item_t *item)
{
    arl_json_put_string(out, item->name, item->name_size);
    arl_text_put_string(out, ":{\"dtype\":\"");
    arl_text_put_string(out, arl_dtype_wire_name(item->view.dtype));
    arl_text_put_string(out, "\",\"shape\":[");
    if (item->scalar) {
        arl_text_put_char(out, '1');
    }
    for (int i = 0; i < item->view.ndim; i++) {
        if (i > 0) {
            arl_text_put_char(out, ',');
        }
        arl_text_put_int64(out, item->view.shape[i]);
    }
    arl_text_put_string(out, "],\"data_offsets\":[");
    arl_text_put_int64(out, item->begin);
    arl_text_put_char(out, ',');
    arl_text_put_int64(out, item->begin + item->nbytes);
    arl_text_put_string(out, "]}");
}

arl_status_t
arl_wire_write_header(arl_text_t *out, const arl_wire_item_t *items, int64_t count, const char *dss,
                      size_t dss_size, const char *op, size_t op_size, arl_error_t *err)
{
    size_t start = out->size;
    uint64_t length = 0;
    arl_status_t status;

    arl_text_put(out, &length, sizeof(length));
    arl_text_put_string(out, "{\"" ARL_WIRE_METADATA_KEY "\":{\"dss\":");
    arl_json_put_string(out, dss, dss_size);
    if (op != NULL) {
        arl_text_put_string(out, ",\"op\":");
        arl_json_put_string(out, op, op_size);
    }
    arl_text_put_char(out, '}');
    for (int64_t i = 0; i < count; i++) {
        arl_text_put_char(out, ',');
        put_item(out, &items[i]);
    }
    arl_text_put_char(out, '}');
    while ((out->size - start) % ARL_WIRE_ALIGNMENT != 0 && !out->failed) {
        arl_text_put_char(out, ' ');
    }
    status = arl_text_status(out, writing, err);
    if (status != ARL_OK) {
        return status;
    }
    length = out->size - start - ARL_WIRE_LENGTH_SIZE;
    if (length > ARL_WIRE_HEADER_MAX) {
        return arl_error_set(err, ARL_ERR_WIRE, writing,
                             "the header would be %llu bytes, readers accept %d: send large lists "
                             "as tensors",
                             (unsigned long long)length, (int)ARL_WIRE_HEADER_MAX);
    }
    memcpy(out->data + start, &length, sizeof(length));
    return ARL_OK;
}
