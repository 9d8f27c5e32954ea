/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frames to objects. The header is checked in full before anything is made; the tree is read
 * once, making each tensor where it is met; the bytes move last, all in one go, over several
 * threads and without the GIL.
 */
#include "python/wire.h"

#include "core/arl_plan.h"
#include "core/arl_threads.h"
#include "python/errors.h"
#include "python/json_value.h"

#include <stdlib.h>

static const char operation[] = "wire.loads";

typedef struct decoder {
    arl_state_t *state;
    arl_wire_header_t header;
    arl_wire_tree_t tree;
    arl_json_builder_t builder; /* over tree.json */
    const char *data;           /* the tensors' bytes */
    const arl_wire_options_t *options;
    PyObject *owner; /* keeps the frame alive for views; NULL when all is copied */
    bool readonly;
    bool *used; /* by index in header.tensors */
    arl_plan_t plan;
} decoder_t;

static PyObject *
fail(decoder_t *decoder, const arl_error_t *err)
{
    return arl_raise(decoder->state, err);
}

/* ---- tensors --------------------------------------------------------------------------------- */

static bool
can_view(const decoder_t *decoder, const arl_wire_tensor_t *tensor)
{
    const char *first = decoder->data + tensor->begin;

    return decoder->owner != NULL && (uintptr_t)first % arl_dtype_size(tensor->dtype) == 0;
}

static PyObject *
make_tensor(decoder_t *decoder, const arl_wire_tensor_t *tensor, bool scalar)
{
    const int ndim = scalar ? 0 : tensor->ndim;
    const arl_tensor_kind_t like = decoder->options->like;
    arl_view_t view;
    PyObject *object;
    arl_copy_t *copy;

    if (can_view(decoder, tensor)) {
        return arl_tensor_over(decoder->state, like, tensor->dtype, ndim, tensor->shape,
                               (void *)(uintptr_t)(decoder->data + tensor->begin),
                               decoder->readonly, decoder->owner);
    }
    object = arl_tensor_new(decoder->state, like, tensor->dtype, ndim, tensor->shape, &view);
    if (object == NULL || tensor->nbytes == 0) {
        return object;
    }
    copy = &decoder->plan.copies[decoder->plan.count++];
    *copy = (arl_copy_t){
        .tensor = (uint32_t)(tensor - decoder->header.tensors),
        .src_offset = tensor->begin,
        .dst = view.data,
        .run_bytes = tensor->nbytes,
    };
    decoder->plan.total_bytes += tensor->nbytes;
    return object;
}

static PyObject *
use_tensor(decoder_t *decoder, const char *key, size_t size, bool scalar)
{
    const arl_wire_tensor_t *tensor = arl_wire_header_find(&decoder->header, key, size);
    bool *used;

    if (tensor == NULL) {
        return arl_raise_format(decoder->state, ARL_ERR_WIRE, operation,
                                "the tree names tensor \"%.*s\", which the frame does not hold",
                                arl_json_quoted(size), key);
    }
    used = &decoder->used[tensor - decoder->header.tensors];
    if (*used) {
        return arl_raise_format(decoder->state, ARL_ERR_WIRE, operation,
                                "two places of the tree name tensor \"%.*s\": the keys of two "
                                "tensors collided when the frame was written, and one is lost",
                                arl_json_quoted(size), key);
    }
    if (scalar && tensor->nbytes != (int64_t)arl_dtype_size(tensor->dtype)) {
        return arl_raise_format(decoder->state, ARL_ERR_WIRE, operation,
                                "tensor \"%.*s\" is marked as a scalar and holds %lld bytes",
                                arl_json_quoted(size), key, (long long)tensor->nbytes);
    }
    if (decoder->options->like != ARL_TENSOR_TORCH && arl_dtype_kind(tensor->dtype) == 'x') {
        return arl_raise_format(decoder->state, ARL_ERR_WIRE, operation,
                                "tensor \"%.*s\" is %s, which NumPy does not have; decode it with "
                                "as_=\"torch\"",
                                arl_json_quoted(size), key, arl_dtype_name(tensor->dtype));
    }
    *used = true;
    return make_tensor(decoder, tensor, scalar);
}

/* ---- nodes ----------------------------------------------------------------------------------- */

static PyObject *read_node(decoder_t *decoder, const arl_json_token_t *token);

/* {"scalar": bool}, after its opening brace. Other keys are left to the future. */
static int
read_tensor_options(decoder_t *decoder, bool *scalar_p)
{
    arl_error_t err = ARL_ERROR_INIT;
    arl_json_token_t token, value;

    for (;;) {
        bool scalar;

        if (arl_json_advance(&decoder->builder, &token) < 0) {
            return -1;
        }
        if (token.kind == ARL_JSON_OBJECT_END) {
            return 0;
        }
        scalar = arl_json_equals(&decoder->tree.json, &token, "scalar");
        if (arl_json_advance(&decoder->builder, &value) < 0) {
            return -1;
        }
        if (scalar && value.kind != ARL_JSON_TRUE && value.kind != ARL_JSON_FALSE) {
            (void)arl_raise_format(decoder->state, ARL_ERR_WIRE, operation,
                                   "tree: \"scalar\" must be true or false, found %s",
                                   arl_json_kind_name(value.kind));
            return -1;
        }
        if (scalar) {
            *scalar_p = value.kind == ARL_JSON_TRUE;
        }
        if (arl_json_skip(&decoder->tree.json, &value, &err) != ARL_OK) {
            (void)fail(decoder, &err);
            return -1;
        }
    }
}

/* The rest of ["t", key] or ["t", key, {…}], its closing bracket included. */
static PyObject *
read_tensor_node(decoder_t *decoder)
{
    arl_json_token_t token;
    PyObject *key, *tensor = NULL;
    const char *name;
    Py_ssize_t size;
    bool scalar = false;

    if (arl_json_expect(&decoder->builder, ARL_JSON_STRING, "a tensor's key", &token) < 0) {
        return NULL;
    }
    key = arl_json_read_string(&decoder->builder, &token);
    if (key == NULL) {
        return NULL;
    }
    if (arl_json_advance(&decoder->builder, &token) < 0) {
        goto release_key;
    }
    if (token.kind == ARL_JSON_OBJECT && (read_tensor_options(decoder, &scalar) < 0 ||
                                          arl_json_advance(&decoder->builder, &token) < 0)) {
        goto release_key;
    }
    if (token.kind != ARL_JSON_ARRAY_END) {
        (void)arl_raise_format(decoder->state, ARL_ERR_WIRE, operation,
                               "tree: a tensor's node goes on with %s",
                               arl_json_kind_name(token.kind));
        goto release_key;
    }
    name = PyUnicode_AsUTF8AndSize(key, &size);
    if (name == NULL && PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) {
        PyErr_Clear(); /* half of a surrogate pair: no header can hold such a name */
        name = "?";
        size = 1;
    }
    if (name != NULL) {
        tensor = use_tensor(decoder, name, (size_t)size, scalar);
    }
release_key:
    Py_DECREF(key);
    return tensor;
}

/* [NODE, …] of a list or tuple node. */
static PyObject *
read_nodes(decoder_t *decoder)
{
    PyObject *list = PyList_New(0);
    arl_json_token_t token;

    if (list == NULL ||
        arl_json_expect(&decoder->builder, ARL_JSON_ARRAY, "the elements of a node", &token) < 0) {
        goto fail;
    }
    while (arl_json_advance(&decoder->builder, &token) == 0) {
        PyObject *item;
        int status;

        if (token.kind == ARL_JSON_ARRAY_END) {
            return list;
        }
        item = read_node(decoder, &token);
        status = item == NULL ? -1 : PyList_Append(list, item);
        Py_XDECREF(item);
        if (status < 0) {
            break;
        }
    }
fail:
    Py_XDECREF(list);
    return NULL;
}

/* [name, NODE] after its opening bracket. */
static int
read_named(decoder_t *decoder, PyObject *dict)
{
    const Py_ssize_t before = PyDict_GET_SIZE(dict);
    arl_json_token_t token;
    PyObject *name, *value = NULL;
    int status = -1;

    if (arl_json_expect(&decoder->builder, ARL_JSON_STRING, "a name in a dict node", &token) < 0) {
        return -1;
    }
    name = arl_json_read_string(&decoder->builder, &token);
    if (name == NULL) {
        return -1;
    }
    if (arl_json_advance(&decoder->builder, &token) == 0) {
        value = read_node(decoder, &token);
    }
    if (value != NULL && PyDict_SetItem(dict, name, value) == 0) {
        status = arl_json_expect(&decoder->builder, ARL_JSON_ARRAY_END, "the end of a name's pair",
                                 &token);
    }
    if (status == 0 && PyDict_GET_SIZE(dict) == before) {
        (void)arl_raise_format(decoder->state, ARL_ERR_WIRE, operation,
                               "tree: a dict node holds one name twice");
        status = -1;
    }
    Py_XDECREF(value);
    Py_DECREF(name);
    return status;
}

/* [[name, NODE], …] of a dict node. */
static PyObject *
read_dict(decoder_t *decoder)
{
    PyObject *dict = PyDict_New();
    arl_json_token_t token;

    if (dict == NULL || arl_json_expect(&decoder->builder, ARL_JSON_ARRAY,
                                        "the items of a dict node", &token) < 0) {
        goto fail;
    }
    while (arl_json_advance(&decoder->builder, &token) == 0) {
        if (token.kind == ARL_JSON_ARRAY_END) {
            return dict;
        }
        if (token.kind != ARL_JSON_ARRAY) {
            (void)arl_raise_format(decoder->state, ARL_ERR_WIRE, operation,
                                   "tree: an item of a dict node must be [name, node], found %s",
                                   arl_json_kind_name(token.kind));
            break;
        }
        if (read_named(decoder, dict) < 0) {
            break;
        }
    }
fail:
    Py_XDECREF(dict);
    return NULL;
}

static PyObject *
read_tuple(decoder_t *decoder)
{
    PyObject *list = read_nodes(decoder), *tuple;

    if (list == NULL) {
        return NULL;
    }
    tuple = PyList_AsTuple(list);
    Py_DECREF(list);
    return tuple;
}

static PyObject *
read_value_node(decoder_t *decoder)
{
    arl_json_token_t token;

    if (arl_json_advance(&decoder->builder, &token) < 0) {
        return NULL;
    }
    return arl_json_read_value(&decoder->builder, &token);
}

/* What follows the tag, but for the closing bracket (which a tensor's node reads itself). */
static PyObject *
read_tagged(decoder_t *decoder, const arl_json_token_t *tag)
{
    static const struct {
        const char *tag;
        PyObject *(*read)(decoder_t *);
    } readers[] = {
        {"d", read_dict},
        {"l", read_nodes},
        {"u", read_tuple},
        {"j", read_value_node},
    };

    for (size_t i = 0; i < sizeof(readers) / sizeof(readers[0]); i++) {
        if (arl_json_equals(&decoder->tree.json, tag, readers[i].tag)) {
            return readers[i].read(decoder);
        }
    }
    return arl_raise_format(
        decoder->state, ARL_ERR_WIRE, operation, "tree: unknown node tag \"%.*s\"",
        arl_json_quoted(tag->end - tag->begin), decoder->tree.json.text + tag->begin);
}

static PyObject *
read_node(decoder_t *decoder, const arl_json_token_t *token)
{
    arl_json_token_t tag, end;
    PyObject *object;

    if (token->kind != ARL_JSON_ARRAY) {
        return arl_raise_format(decoder->state, ARL_ERR_WIRE, operation,
                                "tree: a node must be an array, found %s",
                                arl_json_kind_name(token->kind));
    }
    if (arl_json_expect(&decoder->builder, ARL_JSON_STRING, "a node's tag", &tag) < 0) {
        return NULL;
    }
    if (arl_json_equals(&decoder->tree.json, &tag, "t")) {
        return read_tensor_node(decoder);
    }
    object = read_tagged(decoder, &tag);
    if (object != NULL &&
        arl_json_expect(&decoder->builder, ARL_JSON_ARRAY_END, "the end of a node", &end) < 0) {
        Py_CLEAR(object);
    }
    return object;
}

/* ---- the frame ------------------------------------------------------------------------------- */

static PyObject *
read_tree(decoder_t *decoder)
{
    arl_error_t err = ARL_ERROR_INIT;
    arl_json_token_t token;
    PyObject *object;

    if (arl_json_advance(&decoder->builder, &token) < 0) {
        return NULL;
    }
    object = read_node(decoder, &token);
    if (object != NULL && arl_wire_tree_close(&decoder->tree, &err) != ARL_OK) {
        Py_DECREF(object);
        return fail(decoder, &err);
    }
    return object;
}

static PyObject *
decode_header(decoder_t *decoder, const Py_buffer *frame)
{
    const size_t room = decoder->header.count > 0 ? (size_t)decoder->header.count : 1;
    arl_error_t err = ARL_ERROR_INIT;
    PyObject *object;
    arl_status_t status;

    if (arl_wire_tree_open(&decoder->header, &decoder->tree, &err) != ARL_OK) {
        return fail(decoder, &err);
    }
    decoder->data = (const char *)frame->buf + decoder->header.data;
    decoder->used = PyMem_Calloc(room, sizeof(*decoder->used));
    decoder->plan.copies = calloc(room, sizeof(*decoder->plan.copies));
    if (decoder->used == NULL || decoder->plan.copies == NULL) {
        return PyErr_NoMemory();
    }
    object = read_tree(decoder);
    if (object == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = arl_plan_run_host(&decoder->plan, &decoder->data, &err);
    Py_END_ALLOW_THREADS
    if (status != ARL_OK) {
        Py_DECREF(object);
        return fail(decoder, &err);
    }
    return object;
}

PyObject *
arl_wire_decode(arl_state_t *state, PyObject *buffer, const Py_buffer *frame,
                const arl_wire_options_t *options)
{
    decoder_t decoder = {.state = state, .options = options, .readonly = frame->readonly != 0};
    arl_error_t err = ARL_ERROR_INIT;
    PyObject *object = NULL;

    decoder.builder =
        (arl_json_builder_t){.state = state, .json = &decoder.tree.json, .err = ARL_ERROR_INIT};
    if (arl_threads_prepare(&err) != ARL_OK ||
        arl_wire_header_parse(frame->buf, (size_t)frame->len, &decoder.header, &err) != ARL_OK) {
        return fail(&decoder, &err);
    }
    if (!options->copy) {
        decoder.owner = PyMemoryView_FromObject(buffer);
    }
    if (options->copy || decoder.owner != NULL) {
        object = decode_header(&decoder, frame);
    }
    Py_XDECREF(decoder.owner);
    PyMem_Free(decoder.used);
    arl_plan_free(&decoder.plan);
    arl_json_builder_release(&decoder.builder);
    arl_wire_header_free(&decoder.header);
    return object;
}

PyObject *
arl_wire_decode_metadata(arl_state_t *state, const Py_buffer *frame)
{
    arl_wire_header_t header = {0};
    arl_error_t err = ARL_ERROR_INIT;
    arl_json_reader_t json;
    arl_json_builder_t builder = {.state = state, .json = &json, .err = ARL_ERROR_INIT};
    arl_json_token_t token;
    PyObject *metadata = NULL;
    arl_status_t status = arl_wire_header_parse(frame->buf, (size_t)frame->len, &header, &err);

    if (status == ARL_ERR_NOMEM) {
        return arl_raise(state, &err);
    }
    if (status == ARL_OK && header.op != NULL) {
        arl_json_start(&json, header.op, header.op_size, "metadata \"op\"", true);
        if (arl_json_expect(&builder, ARL_JSON_OBJECT, "it", &token) == 0) {
            metadata = arl_json_read_value(&builder, &token);
        }
        if (metadata != NULL && arl_json_expect(&builder, ARL_JSON_END, "its end", &token) < 0) {
            Py_CLEAR(metadata);
        }
    }
    arl_json_builder_release(&builder);
    arl_wire_header_free(&header);
    if (metadata == NULL && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(state->wire_error)) {
            return NULL;
        }
        PyErr_Clear(); /* a peek never complains about the frame */
    }
    return metadata == NULL ? PyDict_New() : metadata;
}
