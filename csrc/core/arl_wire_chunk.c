/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_wire_chunk.h"

#include <stdlib.h>
#include <string.h>

static const char encoding[] = "wire.encode_byte_chunks";
static const char decoding[] = "wire.decode_byte_chunks";

enum { HEADROOM = 8192 }; /* what the first guess leaves for a chunk's own header */

#define PAYLOAD_KEY "payload"

static const char *const kind_names[] = {"none", "request", "result"};
static const char *const kind_keys[] = {"", "request_chunk", "result_chunk"};

arl_wire_chunk_kind_t
arl_wire_chunk_kind(const char *name, size_t size)
{
    for (int kind = ARL_WIRE_CHUNK_REQUEST; kind <= ARL_WIRE_CHUNK_RESULT; kind++) {
        if (strlen(kind_names[kind]) == size && memcmp(kind_names[kind], name, size) == 0) {
            return (arl_wire_chunk_kind_t)kind;
        }
    }
    return ARL_WIRE_CHUNK_NONE;
}

/* ---- writing ------------------------------------------------------------------------------- */

static void
put_field(arl_text_t *out, const char *name, int64_t value)
{
    arl_text_put_string(out, name);
    arl_text_put_int64(out, value);
}

static void
put_metadata(arl_text_t *out, const arl_wire_chunk_t *chunk)
{
    arl_text_put_string(out, "{\"");
    arl_text_put_string(out, kind_keys[chunk->kind]);
    put_field(out, "\": {\"chunk_idx\": ", chunk->index);
    put_field(out, ", \"total_chunks\": ", chunk->total);
    arl_text_put_string(out, ", \"frame_sha256\": ");
    arl_json_put_string(out, chunk->sha256, sizeof(chunk->sha256));
    put_field(out, ", \"frame_size_bytes\": ", chunk->frame_size);
    if (chunk->group != NULL) {
        arl_text_put_string(out, ", \"chunk_group_id\": ");
        arl_json_put_string(out, chunk->group, chunk->group_size);
    }
    if (chunk->operation != NULL) {
        arl_text_put_string(out, ", \"operation\": ");
        arl_json_put_string(out, chunk->operation, chunk->operation_size);
    }
    arl_text_put_string(out, "}}");
}

arl_status_t
arl_wire_chunk_write_header(arl_text_t *out, const arl_wire_chunk_t *chunk, int64_t payload_size,
                            arl_error_t *err)
{
    static const char dss[] = "{\"v\": \"" ARL_WIRE_VERSION "\", \"tree\": "
                              "[\"d\", [[\"" PAYLOAD_KEY "\", [\"t\", \"" PAYLOAD_KEY "\"]]]]}";
    arl_wire_item_t item = {
        .name = PAYLOAD_KEY,
        .name_size = strlen(PAYLOAD_KEY),
        .path = PAYLOAD_KEY,
        .view = {.dtype = ARL_DTYPE_U8, .itemsize = 1, .ndim = 1, .shape = {payload_size}},
    };
    arl_text_t op = {0};
    int64_t data_size;
    arl_status_t status;

    put_metadata(&op, chunk);
    status = arl_text_status(&op, encoding, err);
    if (status == ARL_OK) {
        status = arl_wire_layout(&item, 1, &data_size, err);
    }
    if (status == ARL_OK) {
        status = arl_wire_write_header(out, &item, 1, dss, strlen(dss), op.data, op.size, err);
    }
    arl_text_free(&op);
    return status;
}

/* Bytes of the largest chunk. Headers grow with the digits of the index, so it is one of the
 * last two: the last full one, or the last. */
static arl_status_t
largest_chunk(arl_wire_chunk_t *chunk, int64_t payload_size, int64_t *largest_p, arl_error_t *err)
{
    const int64_t last = chunk->total - 1;
    int64_t largest = 0;

    for (int64_t index = last > 0 ? last - 1 : 0; index <= last; index++) {
        const int64_t size = index == last ? chunk->frame_size - last * payload_size : payload_size;
        arl_text_t header = {0};
        arl_status_t status;

        chunk->index = index;
        status = arl_wire_chunk_write_header(&header, chunk, size, err);
        if (status == ARL_OK && (int64_t)header.size + size > largest) {
            largest = (int64_t)header.size + size;
        }
        arl_text_free(&header);
        if (status != ARL_OK) {
            return status;
        }
    }
    *largest_p = largest;
    return ARL_OK;
}

arl_status_t
arl_wire_chunk_plan(arl_wire_chunk_t *chunk, int64_t max_bytes, int64_t *payload_size_p,
                    arl_error_t *err)
{
    int64_t payload_size = max_bytes > HEADROOM ? max_bytes - HEADROOM : 1;

    for (;;) {
        int64_t largest = 0;
        arl_status_t status;

        chunk->total = chunk->frame_size / payload_size + (chunk->frame_size % payload_size != 0);
        status = largest_chunk(chunk, payload_size, &largest, err);
        if (status != ARL_OK) {
            return status;
        }
        if (largest <= max_bytes) {
            *payload_size_p = payload_size;
            return ARL_OK;
        }
        if (payload_size == 1) {
            return arl_error_set(err, ARL_ERR_WIRE, encoding,
                                 "max_bytes=%lld is too small: a chunk with a single byte of "
                                 "payload takes %lld bytes",
                                 (long long)max_bytes, (long long)largest);
        }
        payload_size /= 2;
    }
}

/* ---- reading: metadata --------------------------------------------------------------------- */

typedef struct chunk_parser {
    arl_json_reader_t json;
    arl_wire_chunk_t chunk;
    char *next_string;
    arl_error_t *err;
} chunk_parser_t;

static arl_status_t
parse_count(chunk_parser_t *parser, const char *field, int64_t least, int64_t *value_p)
{
    arl_json_token_t token;
    arl_status_t status =
        arl_json_take(&parser->json, ARL_JSON_INTEGER, field, &token, parser->err);

    if (status != ARL_OK) {
        return status;
    }
    if (!arl_json_int64(&parser->json, &token, value_p) || *value_p < least) {
        return arl_error_set(parser->err, ARL_ERR_WIRE, decoding,
                             "chunk metadata: %s must be at least %lld, found %.*s", field,
                             (long long)least, arl_json_quoted(token.end - token.begin),
                             parser->json.text + token.begin);
    }
    return ARL_OK;
}

/* A string, or null for a missing one. */
static arl_status_t
parse_string(chunk_parser_t *parser, const char *field, const char **string_p, size_t *size_p)
{
    arl_json_token_t token;
    bool surrogates;
    arl_status_t status = arl_json_next(&parser->json, &token, parser->err);

    if (status != ARL_OK || token.kind == ARL_JSON_NULL) {
        return status;
    }
    if (token.kind != ARL_JSON_STRING) {
        return arl_error_set(parser->err, ARL_ERR_WIRE, decoding,
                             "chunk metadata: %s must be a string, found %s", field,
                             arl_json_kind_name(token.kind));
    }
    *string_p = parser->next_string;
    *size_p = arl_json_unescape(&parser->json, &token, parser->next_string, &surrogates);
    parser->next_string += *size_p;
    return ARL_OK;
}

static arl_status_t
parse_digest(chunk_parser_t *parser)
{
    const char *digest = NULL;
    size_t size = 0;
    arl_status_t status = parse_string(parser, "frame_sha256", &digest, &size);

    if (status == ARL_OK && size != ARL_SHA256_HEX) {
        return arl_error_set(parser->err, ARL_ERR_WIRE, decoding,
                             "chunk metadata: frame_sha256 must be %d hexadecimal digits, found "
                             "%zu characters",
                             (int)ARL_SHA256_HEX, size);
    }
    if (status == ARL_OK) {
        memcpy(parser->chunk.sha256, digest, ARL_SHA256_HEX);
    }
    return status;
}

enum { SEEN_INDEX = 1, SEEN_TOTAL = 2, SEEN_DIGEST = 4, SEEN_SIZE = 8, SEEN_ALL = 15 };

/* One field after its key; returns through *seen_p which required one it was. */
static arl_status_t
parse_field(chunk_parser_t *parser, const arl_json_token_t *key, unsigned *seen_p)
{
    arl_wire_chunk_t *chunk = &parser->chunk;
    arl_json_token_t token;
    arl_status_t status;

    if (arl_json_equals(&parser->json, key, "chunk_idx")) {
        *seen_p |= SEEN_INDEX;
        return parse_count(parser, "chunk_idx", 0, &chunk->index);
    }
    if (arl_json_equals(&parser->json, key, "total_chunks")) {
        *seen_p |= SEEN_TOTAL;
        return parse_count(parser, "total_chunks", 1, &chunk->total);
    }
    if (arl_json_equals(&parser->json, key, "frame_size_bytes")) {
        *seen_p |= SEEN_SIZE;
        return parse_count(parser, "frame_size_bytes", 0, &chunk->frame_size);
    }
    if (arl_json_equals(&parser->json, key, "frame_sha256")) {
        *seen_p |= SEEN_DIGEST;
        return parse_digest(parser);
    }
    if (arl_json_equals(&parser->json, key, "chunk_group_id")) {
        return parse_string(parser, "chunk_group_id", &chunk->group, &chunk->group_size);
    }
    if (arl_json_equals(&parser->json, key, "operation")) {
        return parse_string(parser, "operation", &chunk->operation, &chunk->operation_size);
    }
    status = arl_json_next(&parser->json, &token, parser->err);
    return status == ARL_OK ? arl_json_skip(&parser->json, &token, parser->err) : status;
}

static arl_status_t
parse_fields(chunk_parser_t *parser)
{
    arl_json_token_t token;
    unsigned seen = 0;
    arl_status_t status =
        arl_json_take(&parser->json, ARL_JSON_OBJECT, "chunk metadata", &token, parser->err);

    while (status == ARL_OK) {
        status = arl_json_next(&parser->json, &token, parser->err);
        if (status != ARL_OK || token.kind == ARL_JSON_OBJECT_END) {
            break;
        }
        status = parse_field(parser, &token, &seen);
    }
    if (status == ARL_OK && seen != SEEN_ALL) {
        return arl_error_set(parser->err, ARL_ERR_WIRE, decoding,
                             "chunk metadata: needs chunk_idx, total_chunks, frame_sha256 and "
                             "frame_size_bytes");
    }
    return status;
}

/* Finds the chunk's part of the "op" metadata, whatever else is beside it. */
static arl_status_t
parse_metadata(chunk_parser_t *parser)
{
    arl_json_token_t token;
    arl_status_t status = arl_json_next(&parser->json, &token, parser->err);

    if (status != ARL_OK || token.kind != ARL_JSON_OBJECT) {
        return status;
    }
    while (status == ARL_OK) {
        arl_wire_chunk_kind_t kind = ARL_WIRE_CHUNK_NONE;

        status = arl_json_next(&parser->json, &token, parser->err);
        if (status != ARL_OK || token.kind == ARL_JSON_OBJECT_END) {
            break;
        }
        for (int i = ARL_WIRE_CHUNK_REQUEST; i <= ARL_WIRE_CHUNK_RESULT; i++) {
            if (arl_json_equals(&parser->json, &token, kind_keys[i])) {
                kind = (arl_wire_chunk_kind_t)i;
            }
        }
        if (kind == ARL_WIRE_CHUNK_NONE) {
            status = arl_json_next(&parser->json, &token, parser->err);
            status = status == ARL_OK ? arl_json_skip(&parser->json, &token, parser->err) : status;
        }
        else if (parser->chunk.kind != ARL_WIRE_CHUNK_NONE) {
            return arl_error_set(parser->err, ARL_ERR_WIRE, decoding,
                                 "chunk metadata: there is more than one of request_chunk and "
                                 "result_chunk");
        }
        else {
            parser->chunk.kind = kind;
            status = parse_fields(parser);
        }
    }
    return status;
}

/* ---- reading: payload ---------------------------------------------------------------------- */

/* The tensor of ["d", [["payload", ["t", KEY]]]]. */
static arl_status_t
find_payload(const arl_wire_header_t *header, const char *frame, arl_wire_chunk_t *chunk,
             arl_error_t *err)
{
    static const struct {
        arl_json_kind_t kind;
        const char *literal;
    } shape[] = {
        {ARL_JSON_ARRAY, NULL},     {ARL_JSON_STRING, "d"},       {ARL_JSON_ARRAY, NULL},
        {ARL_JSON_ARRAY, NULL},     {ARL_JSON_STRING, "payload"}, {ARL_JSON_ARRAY, NULL},
        {ARL_JSON_STRING, "t"},     {ARL_JSON_STRING, "payload"}, {ARL_JSON_ARRAY_END, NULL},
        {ARL_JSON_ARRAY_END, NULL}, {ARL_JSON_ARRAY_END, NULL},   {ARL_JSON_ARRAY_END, NULL},
    };
    const arl_wire_tensor_t *tensor;
    arl_wire_tree_t tree;
    arl_status_t status = arl_wire_tree_open(header, &tree, err);

    for (size_t i = 0; i < sizeof(shape) / sizeof(shape[0]) && status == ARL_OK; i++) {
        arl_json_token_t token;

        status = arl_json_next(&tree.json, &token, err);
        if (status == ARL_OK && (token.kind != shape[i].kind ||
                                 (shape[i].literal != NULL &&
                                  !arl_json_equals(&tree.json, &token, shape[i].literal)))) {
            return arl_error_set(err, ARL_ERR_WIRE, decoding,
                                 "a chunk must hold exactly {\"payload\": tensor}");
        }
    }
    if (status == ARL_OK) {
        status = arl_wire_tree_close(&tree, err);
    }
    if (status != ARL_OK) {
        return status;
    }
    tensor = arl_wire_header_find(header, PAYLOAD_KEY, strlen(PAYLOAD_KEY));
    if (tensor == NULL || tensor->dtype != ARL_DTYPE_U8 || tensor->ndim != 1) {
        return arl_error_set(err, ARL_ERR_WIRE, decoding,
                             "a chunk's payload must be a 1-D uint8 tensor, found %s of %d "
                             "dimensions",
                             tensor == NULL ? "none" : arl_dtype_name(tensor->dtype),
                             tensor == NULL ? 0 : tensor->ndim);
    }
    chunk->payload = frame + header->data + tensor->begin;
    chunk->payload_size = (size_t)tensor->nbytes;
    return ARL_OK;
}

arl_status_t
arl_wire_chunk_parse(const void *frame, size_t size, arl_wire_chunk_t *chunk_p, arl_error_t *err)
{
    arl_wire_header_t header = {0};
    chunk_parser_t parser = {.err = err};
    arl_status_t status;

    status = arl_wire_header_parse(frame, size, &header, err);
    if (status != ARL_OK || header.op == NULL) {
        goto free_header;
    }
    parser.chunk.strings = malloc(header.op_size + 1);
    parser.next_string = parser.chunk.strings;
    if (parser.chunk.strings == NULL) {
        status = arl_error_set(err, ARL_ERR_NOMEM, decoding, "out of memory for chunk metadata");
        goto free_header;
    }
    arl_json_start(&parser.json, header.op, header.op_size, "metadata \"op\"", true);
    status = parse_metadata(&parser);
    if (status == ARL_OK && parser.chunk.kind != ARL_WIRE_CHUNK_NONE) {
        status = find_payload(&header, frame, &parser.chunk, err);
    }
free_header:
    arl_wire_header_free(&header);
    if (status != ARL_OK) {
        arl_wire_chunk_free(&parser.chunk);
        return status;
    }
    *chunk_p = parser.chunk;
    return ARL_OK;
}

void
arl_wire_chunk_free(arl_wire_chunk_t *chunk)
{
    free(chunk->strings);
    *chunk = (arl_wire_chunk_t){0};
}

/* ---- reading: the set ---------------------------------------------------------------------- */

static bool
same_string(const char *a, size_t a_size, const char *b, size_t b_size)
{
    if (a == NULL || b == NULL) {
        return a == b;
    }
    return arl_wire_compare_names(a, a_size, b, b_size) == 0;
}

/* The name of the first field in which two chunks of one frame must not differ, and do. */
static const char *
difference(const arl_wire_chunk_t *a, const arl_wire_chunk_t *b)
{
    if (a->kind != b->kind) {
        return "kind";
    }
    if (a->total != b->total) {
        return "total_chunks";
    }
    if (memcmp(a->sha256, b->sha256, sizeof(a->sha256)) != 0) {
        return "frame_sha256";
    }
    if (a->frame_size != b->frame_size) {
        return "frame_size_bytes";
    }
    if (!same_string(a->group, a->group_size, b->group, b->group_size)) {
        return "chunk_group_id";
    }
    if (!same_string(a->operation, a->operation_size, b->operation, b->operation_size)) {
        return "operation";
    }
    return NULL;
}

static int
chunk_by_index(const void *left, const void *right)
{
    const arl_wire_chunk_t *a = left, *b = right;

    return (a->index > b->index) - (a->index < b->index);
}

static arl_status_t
check_alike(const arl_wire_chunk_t *chunks, int64_t count, arl_error_t *err)
{
    for (int64_t i = 0; i < count; i++) {
        const char *field;

        if (chunks[i].kind == ARL_WIRE_CHUNK_NONE) {
            return arl_error_set(err, ARL_ERR_WIRE, decoding,
                                 "chunk %lld of %lld: the frame has no chunk metadata",
                                 (long long)i, (long long)count);
        }
        field = difference(&chunks[0], &chunks[i]);
        if (field != NULL) {
            return arl_error_set(err, ARL_ERR_WIRE, decoding,
                                 "chunk %lld of %lld: its %s differs from that of the first one",
                                 (long long)i, (long long)count, field);
        }
        if (chunks[i].index >= chunks[i].total) {
            return arl_error_set(err, ARL_ERR_WIRE, decoding,
                                 "chunk %lld of %lld: chunk_idx %lld is not below total_chunks "
                                 "%lld",
                                 (long long)i, (long long)count, (long long)chunks[i].index,
                                 (long long)chunks[i].total);
        }
    }
    return ARL_OK;
}

arl_status_t
arl_wire_chunks_check(arl_wire_chunk_t *chunks, int64_t count, arl_error_t *err)
{
    int64_t size = 0;
    arl_status_t status;

    if (count == 0) {
        return arl_error_set(err, ARL_ERR_WIRE, decoding, "no chunks were given");
    }
    status = check_alike(chunks, count, err);
    if (status != ARL_OK) {
        return status;
    }
    qsort(chunks, (size_t)count, sizeof(*chunks), chunk_by_index);
    for (int64_t i = 0; i < count; i++) {
        if (i > 0 && chunks[i].index == chunks[i - 1].index) {
            return arl_error_set(err, ARL_ERR_WIRE, decoding, "chunk_idx %lld was given twice",
                                 (long long)chunks[i].index);
        }
        if (__builtin_add_overflow(size, (int64_t)chunks[i].payload_size, &size)) {
            return arl_error_set(err, ARL_ERR_WIRE, decoding, "the chunks' sizes overflow");
        }
    }
    if (count != chunks[0].total) {
        return arl_error_set(err, ARL_ERR_WIRE, decoding, "%lld of %lld chunks were given",
                             (long long)count, (long long)chunks[0].total);
    }
    if (size != chunks[0].frame_size) {
        return arl_error_set(err, ARL_ERR_WIRE, decoding,
                             "the chunks hold %lld bytes, frame_size_bytes says %lld",
                             (long long)size, (long long)chunks[0].frame_size);
    }
    return ARL_OK;
}
