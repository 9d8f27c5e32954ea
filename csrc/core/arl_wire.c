/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_wire.h"

#include <stdlib.h>
#include <string.h>

static const char reading[] = "wire.loads";

/* What every complaint about the frame itself starts with. */
#define NOT_A_FRAME "not a valid DSSST1 safetensors payload: "

/* ---- header: parsing state ------------------------------------------------------------------ */

typedef struct header_parser {
    arl_json_reader_t json;
    arl_wire_header_t header;
    int64_t capacity;  /* of header.tensors */
    char *next_string; /* free end of header.strings */
    arl_error_t *err;
} header_parser_t;

/* Copies a string without its escapes. The strings of a header never outgrow its text. */
static arl_status_t
take_string(header_parser_t *parser, const arl_json_token_t *token, const char **string_p,
            size_t *size_p)
{
    bool surrogates;
    size_t size = arl_json_unescape(&parser->json, token, parser->next_string, &surrogates);

    if (surrogates) {
        return arl_error_set(parser->err, ARL_ERR_WIRE, reading,
                             "%s: byte %zu: a string holds half of a surrogate pair",
                             parser->json.what, token->begin);
    }
    *string_p = parser->next_string;
    *size_p = size;
    parser->next_string += size;
    return ARL_OK;
}

static arl_status_t
parse_metadata(header_parser_t *parser)
{
    arl_wire_header_t *header = &parser->header;
    arl_json_token_t token, value;
    arl_status_t status;

    status = arl_json_take(&parser->json, ARL_JSON_OBJECT, "\"__metadata__\"", &token, parser->err);
    while (status == ARL_OK) {
        const char **string_p = NULL;
        size_t *size_p = NULL;

        status = arl_json_next(&parser->json, &token, parser->err);
        if (status != ARL_OK || token.kind == ARL_JSON_OBJECT_END) {
            break;
        }
        if (arl_json_equals(&parser->json, &token, "dss")) {
            string_p = &header->dss;
            size_p = &header->dss_size;
        }
        else if (arl_json_equals(&parser->json, &token, "op")) {
            string_p = &header->op;
            size_p = &header->op_size;
        }
        status = arl_json_take(&parser->json, ARL_JSON_STRING, "a value of \"__metadata__\"",
                               &value, parser->err);
        if (status != ARL_OK || string_p == NULL) {
            continue;
        }
        if (*string_p != NULL) {
            return arl_error_set(parser->err, ARL_ERR_WIRE, reading,
                                 "%s: byte %zu: \"__metadata__\" holds the key \"%.*s\" twice",
                                 parser->json.what, token.begin, (int)(token.end - token.begin),
                                 parser->json.text + token.begin);
        }
        status = take_string(parser, &value, string_p, size_p);
    }
    return status;
}

/* ---- header: one tensor --------------------------------------------------------------------- */

static arl_status_t
entry_fail(const header_parser_t *parser, const arl_wire_tensor_t *tensor, const char *problem)
{
    return arl_error_set(parser->err, ARL_ERR_WIRE, reading, NOT_A_FRAME "tensor \"%.*s\": %s",
                         arl_json_quoted(tensor->name_size), tensor->name, problem);
}

/* An array of at most `limit` integers that are not negative; *count_p is how many. */
static arl_status_t
parse_sizes(header_parser_t *parser, const arl_wire_tensor_t *tensor, int limit, const char *field,
            int64_t *values, int *count_p)
{
    arl_json_token_t token;
    arl_status_t status;
    int count = 0;

    status = arl_json_take(&parser->json, ARL_JSON_ARRAY, field, &token, parser->err);
    while (status == ARL_OK) {
        status = arl_json_next(&parser->json, &token, parser->err);
        if (status != ARL_OK) {
            return status;
        }
        if (token.kind == ARL_JSON_ARRAY_END) {
            break;
        }
        if (count == limit) {
            return arl_error_set(parser->err, ARL_ERR_WIRE, reading,
                                 NOT_A_FRAME "tensor \"%.*s\": %s has more than %d numbers",
                                 arl_json_quoted(tensor->name_size), tensor->name, field, limit);
        }
        if (token.kind != ARL_JSON_INTEGER ||
            !arl_json_int64(&parser->json, &token, &values[count]) || values[count] < 0) {
            return arl_error_set(parser->err, ARL_ERR_WIRE, reading,
                                 NOT_A_FRAME "tensor \"%.*s\": %s[%d] must be an integer from 0 to "
                                             "2^63 - 1",
                                 arl_json_quoted(tensor->name_size), tensor->name, field, count);
        }
        count++;
    }
    *count_p = count;
    return status;
}

typedef enum entry_field {
    FIELD_DTYPE = 1,
    FIELD_SHAPE = 2,
    FIELD_OFFSETS = 4,
    FIELD_ALL = FIELD_DTYPE | FIELD_SHAPE | FIELD_OFFSETS,
} entry_field_t;

static arl_status_t
parse_dtype(header_parser_t *parser, arl_wire_tensor_t *tensor)
{
    arl_json_token_t token;
    arl_status_t status =
        arl_json_take(&parser->json, ARL_JSON_STRING, "dtype", &token, parser->err);

    if (status != ARL_OK) {
        return status;
    }
    tensor->dtype =
        arl_dtype_from_wire_name(parser->json.text + token.begin, token.end - token.begin);
    if (tensor->dtype == ARL_DTYPE_NONE) {
        return arl_error_set(parser->err, ARL_ERR_WIRE, reading,
                             NOT_A_FRAME "tensor \"%.*s\": dtype \"%.*s\" is not known",
                             arl_json_quoted(tensor->name_size), tensor->name,
                             arl_json_quoted(token.end - token.begin),
                             parser->json.text + token.begin);
    }
    return ARL_OK;
}

static arl_status_t
parse_offsets(header_parser_t *parser, arl_wire_tensor_t *tensor)
{
    int64_t offsets[2];
    int count = 0;
    arl_status_t status = parse_sizes(parser, tensor, 2, "data_offsets", offsets, &count);

    if (status != ARL_OK) {
        return status;
    }
    if (count != 2 || offsets[1] < offsets[0]) {
        return entry_fail(parser, tensor, "data_offsets must be [begin, end] with begin <= end");
    }
    tensor->begin = offsets[0];
    tensor->nbytes = offsets[1] - offsets[0];
    return ARL_OK;
}

static entry_field_t
field_of(const header_parser_t *parser, const arl_json_token_t *key)
{
    if (arl_json_equals(&parser->json, key, "dtype")) {
        return FIELD_DTYPE;
    }
    if (arl_json_equals(&parser->json, key, "shape")) {
        return FIELD_SHAPE;
    }
    return arl_json_equals(&parser->json, key, "data_offsets") ? FIELD_OFFSETS : 0;
}

/* One field after its key. Fields that are not known are left to the future. */
static arl_status_t
parse_field(header_parser_t *parser, arl_wire_tensor_t *tensor, entry_field_t field)
{
    arl_json_token_t token;
    arl_status_t status;

    switch (field) {
    case FIELD_DTYPE:
        return parse_dtype(parser, tensor);
    case FIELD_SHAPE:
        return parse_sizes(parser, tensor, ARL_VIEW_DIMS_MAX, "shape", tensor->shape,
                           &tensor->ndim);
    case FIELD_OFFSETS:
        return parse_offsets(parser, tensor);
    default:
        status = arl_json_next(&parser->json, &token, parser->err);
        return status == ARL_OK ? arl_json_skip(&parser->json, &token, parser->err) : status;
    }
}

/* False when the bytes overflow, also where one size is 0 and the others alone would: whoever
 * computes strides multiplies those. */
static bool
sizes_fit(const arl_view_t *view)
{
    int64_t nbytes = (int64_t)view->itemsize;

    for (int i = 0; i < view->ndim; i++) {
        if (view->shape[i] != 0 && __builtin_mul_overflow(nbytes, view->shape[i], &nbytes)) {
            return false;
        }
    }
    return true;
}

static arl_status_t
check_size(const header_parser_t *parser, const arl_wire_tensor_t *tensor)
{
    arl_view_t view = {.dtype = tensor->dtype, .ndim = tensor->ndim};
    char text[96];

    view.itemsize = arl_dtype_size(tensor->dtype);
    memcpy(view.shape, tensor->shape, sizeof(view.shape));
    arl_view_describe(&view, text, sizeof(text));
    if (!sizes_fit(&view)) {
        return arl_error_set(parser->err, ARL_ERR_WIRE, reading,
                             NOT_A_FRAME "tensor \"%.*s\": the sizes of %s overflow",
                             arl_json_quoted(tensor->name_size), tensor->name, text);
    }
    if (arl_view_nbytes(&view) != tensor->nbytes) {
        return arl_error_set(parser->err, ARL_ERR_WIRE, reading,
                             NOT_A_FRAME "tensor \"%.*s\": %s needs %lld bytes, its data_offsets "
                                         "span %lld",
                             arl_json_quoted(tensor->name_size), tensor->name, text,
                             (long long)arl_view_nbytes(&view), (long long)tensor->nbytes);
    }
    return ARL_OK;
}

static arl_status_t
parse_entry(header_parser_t *parser, const arl_json_token_t *name)
{
    arl_wire_tensor_t tensor = {0};
    arl_json_token_t token;
    arl_status_t status;
    unsigned seen = 0;

    status = take_string(parser, name, &tensor.name, &tensor.name_size);
    if (status == ARL_OK) {
        status =
            arl_json_take(&parser->json, ARL_JSON_OBJECT, "a tensor's entry", &token, parser->err);
    }
    while (status == ARL_OK) {
        entry_field_t field;

        status = arl_json_next(&parser->json, &token, parser->err);
        if (status != ARL_OK || token.kind == ARL_JSON_OBJECT_END) {
            break;
        }
        field = field_of(parser, &token);
        if ((seen & field) != 0) {
            return entry_fail(parser, &tensor, "a field is given twice");
        }
        seen |= field;
        status = parse_field(parser, &tensor, field);
    }
    if (status != ARL_OK) {
        return status;
    }
    if (seen != FIELD_ALL) {
        return entry_fail(parser, &tensor, "needs dtype, shape and data_offsets");
    }
    status = check_size(parser, &tensor);
    if (status == ARL_OK) {
        parser->header.tensors[parser->header.count++] = tensor;
    }
    return status;
}

static arl_status_t
reserve_tensor(header_parser_t *parser)
{
    arl_wire_header_t *header = &parser->header;

    if (header->count == parser->capacity) {
        int64_t capacity = parser->capacity == 0 ? 16 : parser->capacity * 2;
        arl_wire_tensor_t *tensors =
            realloc(header->tensors, (size_t)capacity * sizeof(*header->tensors));

        if (tensors == NULL) {
            return arl_error_set(parser->err, ARL_ERR_NOMEM, reading,
                                 "out of memory for the table of %lld tensors",
                                 (long long)capacity);
        }
        header->tensors = tensors;
        parser->capacity = capacity;
    }
    return ARL_OK;
}

static arl_status_t
parse_entries(header_parser_t *parser)
{
    arl_json_token_t token;
    arl_status_t status;
    bool metadata_seen = false;

    status = arl_json_take(&parser->json, ARL_JSON_OBJECT, "the header", &token, parser->err);
    while (status == ARL_OK) {
        status = arl_json_next(&parser->json, &token, parser->err);
        if (status != ARL_OK || token.kind == ARL_JSON_OBJECT_END) {
            break;
        }
        if (arl_json_equals(&parser->json, &token, ARL_WIRE_METADATA_KEY)) {
            if (metadata_seen) {
                return arl_error_set(parser->err, ARL_ERR_WIRE, reading,
                                     NOT_A_FRAME "the header holds \"__metadata__\" twice");
            }
            metadata_seen = true;
            status = parse_metadata(parser);
        }
        else {
            status = reserve_tensor(parser);
            if (status == ARL_OK) {
                status = parse_entry(parser, &token);
            }
        }
    }
    return status == ARL_OK ? arl_json_take(&parser->json, ARL_JSON_END,
                                            "what follows the header's object", &token, parser->err)
                            : status;
}

/* ---- header: the whole ---------------------------------------------------------------------- */

int
arl_wire_compare_names(const char *a, size_t a_size, const char *b, size_t b_size)
{
    size_t shared = a_size < b_size ? a_size : b_size;
    int order = shared == 0 ? 0 : memcmp(a, b, shared);

    return order != 0 ? order : (a_size > b_size) - (a_size < b_size);
}

static int
tensor_by_place(const void *left, const void *right)
{
    const arl_wire_tensor_t *a = left, *b = right;

    if (a->begin != b->begin) {
        return a->begin < b->begin ? -1 : 1;
    }
    return (a->nbytes > b->nbytes) - (a->nbytes < b->nbytes); /* empty ones first */
}

static int
tensor_by_name(const void *left, const void *right)
{
    const arl_wire_tensor_t *a = left, *b = right;

    return arl_wire_compare_names(a->name, a->name_size, b->name, b->name_size);
}

static void
sort_tensors(arl_wire_header_t *header, int (*compare)(const void *, const void *))
{
    if (header->count > 1) {
        qsort(header->tensors, (size_t)header->count, sizeof(*header->tensors), compare);
    }
}

static arl_status_t
check_places(header_parser_t *parser, int64_t data_size)
{
    arl_wire_header_t *header = &parser->header;
    int64_t at = 0;

    sort_tensors(header, tensor_by_place);
    for (int64_t i = 0; i < header->count; i++) {
        const arl_wire_tensor_t *tensor = &header->tensors[i];

        if (tensor->begin != at) {
            return arl_error_set(
                parser->err, ARL_ERR_WIRE, reading,
                NOT_A_FRAME "tensor \"%.*s\": its data begins at byte %lld, %s "
                            "byte %lld where the one before ends",
                arl_json_quoted(tensor->name_size), tensor->name, (long long)tensor->begin,
                tensor->begin > at ? "leaving a hole after" : "overlapping", (long long)at);
        }
        if (tensor->nbytes > data_size - at) {
            return arl_error_set(parser->err, ARL_ERR_WIRE, reading,
                                 NOT_A_FRAME "tensor \"%.*s\": its data is %lld bytes, the frame "
                                             "holds %lld more",
                                 arl_json_quoted(tensor->name_size), tensor->name,
                                 (long long)tensor->nbytes, (long long)(data_size - at));
        }
        at += tensor->nbytes;
    }
    if (at != data_size) {
        return arl_error_set(parser->err, ARL_ERR_WIRE, reading,
                             NOT_A_FRAME "%lld bytes follow the last tensor's data",
                             (long long)(data_size - at));
    }
    return ARL_OK;
}

static arl_status_t
check_names(header_parser_t *parser)
{
    arl_wire_header_t *header = &parser->header;

    sort_tensors(header, tensor_by_name);
    for (int64_t i = 1; i < header->count; i++) {
        const arl_wire_tensor_t *tensor = &header->tensors[i];

        if (tensor_by_name(tensor - 1, tensor) == 0) {
            return arl_error_set(parser->err, ARL_ERR_WIRE, reading,
                                 NOT_A_FRAME "the header holds tensor \"%.*s\" twice",
                                 arl_json_quoted(tensor->name_size), tensor->name);
        }
    }
    return ARL_OK;
}

/* Finds where the header is. Lengths are compared by subtraction, as sums could wrap. */
static arl_status_t
find_header(const char *frame, size_t size, size_t *header_size_p, arl_error_t *err)
{
    uint64_t length;

    if (size < ARL_WIRE_LENGTH_SIZE) {
        return arl_error_set(err, ARL_ERR_WIRE, reading,
                             NOT_A_FRAME "%zu bytes, its length field alone needs %d", size,
                             (int)ARL_WIRE_LENGTH_SIZE);
    }
    memcpy(&length, frame, sizeof(length));
    if (length == 0 || length > size - ARL_WIRE_LENGTH_SIZE || length > ARL_WIRE_HEADER_MAX) {
        return arl_error_set(err, ARL_ERR_WIRE, reading,
                             NOT_A_FRAME "invalid DSSST1 safetensors header length %llu: must be "
                                         "from 1 to %d and at most the %zu bytes that follow",
                             (unsigned long long)length, (int)ARL_WIRE_HEADER_MAX,
                             size - ARL_WIRE_LENGTH_SIZE);
    }
    if (frame[ARL_WIRE_LENGTH_SIZE] != '{') {
        return arl_error_set(err, ARL_ERR_WIRE, reading,
                             NOT_A_FRAME "the header starts with byte 0x%02x, not with '{'",
                             (unsigned char)frame[ARL_WIRE_LENGTH_SIZE]);
    }
    *header_size_p = (size_t)length;
    return ARL_OK;
}

static arl_status_t
parse_frame(header_parser_t *parser, const char *frame, size_t size)
{
    size_t length = 0;
    arl_status_t status = find_header(frame, size, &length, parser->err);

    if (status != ARL_OK) {
        return status;
    }
    if (!arl_utf8_valid(frame + ARL_WIRE_LENGTH_SIZE, length)) {
        return arl_error_set(parser->err, ARL_ERR_WIRE, reading,
                             NOT_A_FRAME "the header is not valid UTF-8");
    }
    arl_json_start(&parser->json, frame + ARL_WIRE_LENGTH_SIZE, length, NOT_A_FRAME "header",
                   false);
    parser->header.data = ARL_WIRE_LENGTH_SIZE + length;
    parser->header.strings = malloc(length);
    parser->next_string = parser->header.strings;
    if (parser->header.strings == NULL) {
        return arl_error_set(parser->err, ARL_ERR_NOMEM, reading,
                             "out of memory for a header of %zu bytes", length);
    }
    status = parse_entries(parser);
    if (status == ARL_OK) {
        status = check_places(parser, (int64_t)(size - parser->header.data));
    }
    return status == ARL_OK ? check_names(parser) : status;
}

/* What a reader that trusted its input would have unpickled. */
static const char *
legacy_prefix(const unsigned char *frame, size_t size)
{
    if (size >= 2 && frame[0] == 0x80 && frame[1] >= 2 && frame[1] <= 5) {
        return "a pickle's opcode";
    }
    if (size >= 4 && memcmp(frame, "PK\x03\x04", 4) == 0) {
        return "a zip archive's signature";
    }
    return NULL;
}

arl_status_t
arl_wire_header_parse(const void *frame, size_t size, arl_wire_header_t *header_p, arl_error_t *err)
{
    arl_error_t reason = ARL_ERROR_INIT;
    header_parser_t parser = {.err = &reason};
    const char *legacy;
    arl_status_t status = parse_frame(&parser, frame, size);

    if (status == ARL_OK) {
        *header_p = parser.header;
        return ARL_OK;
    }
    arl_wire_header_free(&parser.header);
    legacy = status == ARL_ERR_WIRE ? legacy_prefix(frame, size) : NULL;
    if (legacy != NULL) {
        return arl_error_set(
            err, status, reading,
            "refusing to deserialize a legacy pickle/torch.save payload: it begins "
            "with %s; nothing that arrives is ever unpickled",
            legacy);
    }
    return arl_error_set(err, status, reading, "%s", reason.text);
}

void
arl_wire_header_free(arl_wire_header_t *header)
{
    free(header->tensors);
    free(header->strings);
    *header = (arl_wire_header_t){0};
}

const arl_wire_tensor_t *
arl_wire_header_find(const arl_wire_header_t *header, const char *name, size_t size)
{
    int64_t low = 0, high = header->count;

    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        const arl_wire_tensor_t *tensor = &header->tensors[middle];
        int order = arl_wire_compare_names(name, size, tensor->name, tensor->name_size);

        if (order == 0) {
            return tensor;
        }
        if (order < 0) {
            high = middle;
        }
        else {
            low = middle + 1;
        }
    }
    return NULL;
}

/* ---- the tree's place in "dss" --------------------------------------------------------------- */

static arl_status_t
check_version(arl_json_reader_t *json, arl_error_t *err)
{
    arl_json_token_t token;
    arl_status_t status = arl_json_take(json, ARL_JSON_STRING, "the version", &token, err);

    if (status == ARL_OK && !arl_json_equals(json, &token, ARL_WIRE_VERSION)) {
        return arl_error_set(err, ARL_ERR_WIRE, reading,
                             "unsupported wire version \"%.*s\"; this reader understands "
                             "\"" ARL_WIRE_VERSION "\"",
                             arl_json_quoted(token.end - token.begin), json->text + token.begin);
    }
    return status;
}

/*
 * Reads keys until the tree (when the version is known) or the end of the object. *found_p is
 * a bookmark before the tree; its `text` is NULL as long as none was met.
 */
static arl_status_t
scan_dss(arl_json_reader_t *json, bool version_seen, bool tree_seen, arl_json_reader_t *found_p,
         arl_error_t *err)
{
    arl_json_token_t token;
    arl_status_t status = ARL_OK;

    found_p->text = NULL;
    while (status == ARL_OK) {
        bool version, tree;

        status = arl_json_next(json, &token, err);
        if (status != ARL_OK || token.kind == ARL_JSON_OBJECT_END) {
            break;
        }
        version = arl_json_equals(json, &token, "v");
        tree = arl_json_equals(json, &token, "tree");
        if ((version && version_seen) || (tree && tree_seen)) {
            return arl_error_set(err, ARL_ERR_WIRE, reading, "%s: holds the key \"%s\" twice",
                                 json->what, version ? "v" : "tree");
        }
        version_seen = version_seen || version;
        tree_seen = tree_seen || tree;
        if (version) {
            status = check_version(json, err);
            continue;
        }
        if (tree) {
            *found_p = *json;
            if (version_seen) {
                return ARL_OK;
            }
        }
        status = arl_json_next(json, &token, err);
        if (status == ARL_OK) {
            status = arl_json_skip(json, &token, err);
        }
    }
    if (status == ARL_OK && !(version_seen && tree_seen)) {
        return arl_error_set(err, ARL_ERR_WIRE, reading, "%s: has no \"%s\"", json->what,
                             version_seen ? "tree" : "v");
    }
    return status;
}

arl_status_t
arl_wire_tree_open(const arl_wire_header_t *header, arl_wire_tree_t *tree_p, arl_error_t *err)
{
    arl_json_reader_t json, found;
    arl_json_token_t token;
    arl_status_t status;

    if (header->dss == NULL) {
        return arl_error_set(err, ARL_ERR_WIRE, reading,
                             "the frame is a safetensors file without \"dss\" in its metadata, not "
                             "a " ARL_WIRE_VERSION " frame");
    }
    arl_json_start(&json, header->dss, header->dss_size, "metadata \"dss\"", true);
    status = arl_json_take(&json, ARL_JSON_OBJECT, "it", &token, err);
    if (status == ARL_OK) {
        status = scan_dss(&json, false, false, &found, err);
    }
    if (status != ARL_OK) {
        return status;
    }
    tree_p->version_read_after = json.at != found.at;
    tree_p->json = found;
    return ARL_OK;
}

arl_status_t
arl_wire_tree_close(arl_wire_tree_t *tree, arl_error_t *err)
{
    arl_json_reader_t ignored;
    arl_json_token_t token;
    arl_status_t status = ARL_OK;

    /* With the version after it, all of the object was read by arl_wire_tree_open. */
    if (!tree->version_read_after) {
        status = scan_dss(&tree->json, true, true, &ignored, err);
        if (status == ARL_OK) {
            status = arl_json_take(&tree->json, ARL_JSON_END, "what follows it", &token, err);
        }
    }
    return status;
}
