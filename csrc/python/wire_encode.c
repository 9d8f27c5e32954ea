/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Objects to frames. The walk writes the tree and notes the tensors; then the layout is known
 * to the byte, one allocation holds the frame, and the tensors' bytes go straight to their
 * places in it, over several threads and without the GIL.
 */
#include "python/wire.h"

#include "core/arl_pages.h"
#include "core/arl_plan.h"
#include "core/arl_threads.h"
#include "python/errors.h"
#include "python/json_value.h"

#include <stdlib.h>

static const char operation[] = "wire.dumps";

typedef struct entry {
    arl_tensor_t tensor;
    size_t name; /* offsets in encoder.strings, since that moves as it grows */
    size_t name_size;
    size_t path;
    bool scalar;
} entry_t;

typedef struct encoder {
    arl_state_t *state;
    arl_text_t tree;    /* JSON of the tree so far */
    arl_text_t key;     /* names and indices down to the current node, joined with dots */
    arl_text_t path;    /* the same for people: ['batch']['input_ids'] */
    arl_text_t strings; /* names and paths of the entries */
    entry_t *entries;
    int64_t count;
    int64_t capacity;
    arl_wire_item_t *items; /* what the core lays out; made when the walk is over */
    arl_plan_t plan;
    const char **bases; /* where each copy of the plan reads */
} encoder_t;

static void
encoder_release(encoder_t *encoder)
{
    for (int64_t i = 0; i < encoder->count; i++) {
        arl_tensor_release(&encoder->entries[i].tensor);
    }
    PyMem_Free(encoder->entries);
    PyMem_Free(encoder->items);
    PyMem_Free(encoder->bases);
    arl_plan_free(&encoder->plan);
    arl_text_free(&encoder->tree);
    arl_text_free(&encoder->key);
    arl_text_free(&encoder->path);
    arl_text_free(&encoder->strings);
}

/* ---- which containers hold tensors ----------------------------------------------------------- */

static bool
is_plain(PyObject *object)
{
    return object == Py_None || PyUnicode_CheckExact(object) || PyLong_CheckExact(object) ||
           PyFloat_CheckExact(object) || PyBool_Check(object);
}

static int
is_tensor(arl_state_t *state, PyObject *object)
{
    int torch;

    if (PyArray_Check(object)) {
        return 1;
    }
    torch = arl_is_torch_tensor(state, object);
    /* The type is asked, since instances may invent attributes. */
    return torch != 0 ? torch
                      : PyObject_HasAttrStringWithError((PyObject *)Py_TYPE(object), "__dlpack__");
}

static int
too_deep(arl_state_t *state)
{
    (void)arl_raise_format(state, ARL_ERR_WIRE, operation,
                           "the object is nested too deep for the %d levels of its JSON tree, or "
                           "contains itself",
                           (int)ARL_JSON_DEPTH_MAX);
    return -1;
}

/* The elements of a list or tuple, the items of a dict, as something that cannot change. */
static PyObject *
snapshot(PyObject *container)
{
    if (PyDict_Check(container)) {
        return PyMapping_Items(container); /* subclasses may have an order of their own */
    }
    return PySequence_Tuple(container);
}

static bool
is_container(PyObject *object)
{
    return PyDict_Check(object) || PyList_Check(object) || PyTuple_Check(object);
}

static int has_tensor(arl_state_t *state, PyObject *object, int depth);

static int
element_has_tensor(arl_state_t *state, PyObject *element, int depth)
{
    int found;

    if (is_plain(element)) {
        return 0;
    }
    Py_INCREF(element); /* asking it may run code that drops it from its container */
    found = has_tensor(state, element, depth);
    Py_DECREF(element);
    return found;
}

/* 1 when a tensor is somewhere in `object`, 0 when not, -1 on error. */
static int
has_tensor(arl_state_t *state, PyObject *object, int depth)
{
    int found = 0;

    if (!is_container(object)) {
        return is_plain(object) ? 0 : is_tensor(state, object);
    }
    if (depth >= ARL_JSON_DEPTH_MAX) {
        return too_deep(state);
    }
    if (PyDict_Check(object)) {
        PyObject *key, *value;
        Py_ssize_t position = 0;

        /* borrowed from object; the values are held while they are looked into */
        while (found == 0 && PyDict_Next(object, &position, &key, &value)) {
            found = element_has_tensor(state, value, depth + 1);
        }
        return found;
    }
    for (Py_ssize_t i = 0; found == 0 && i < PySequence_Fast_GET_SIZE(object); i++) {
        /* borrowed from object; held while it is looked into */
        found = element_has_tensor(state, PySequence_Fast_GET_ITEM(object, i), depth + 1);
    }
    return found;
}

/* ---- the path -------------------------------------------------------------------------------- */

typedef struct place {
    size_t key;
    size_t path;
} place_t;

static place_t
here(const encoder_t *encoder)
{
    return (place_t){encoder->key.size, encoder->path.size};
}

static void
go_back(encoder_t *encoder, place_t place)
{
    encoder->key.size = place.key;
    encoder->path.size = place.path;
}

static void
enter(encoder_t *encoder, bool root, const char *name, size_t size, const char *quote)
{
    if (!root) {
        arl_text_put_char(&encoder->key, '.');
    }
    arl_text_put(&encoder->key, name, size);
    arl_text_put_char(&encoder->path, '[');
    arl_text_put_string(&encoder->path, quote);
    arl_text_put(&encoder->path, name, size);
    arl_text_put_string(&encoder->path, quote);
    arl_text_put_char(&encoder->path, ']');
}

/* The path as a C string, for messages; good until the next move. */
static const char *
path_text(encoder_t *encoder)
{
    if (encoder->path.size == 0) {
        return "the object";
    }
    if (!arl_text_reserve(&encoder->path, 1)) {
        return "?";
    }
    encoder->path.data[encoder->path.size] = '\0';
    return encoder->path.data;
}

/* ---- tensors --------------------------------------------------------------------------------- */

/* Tensors of other devices are brought to the CPU, as the format has no place for a device. */
static int
import_tensor(encoder_t *encoder, PyObject *object, arl_tensor_t *tensor)
{
    arl_state_t *state = encoder->state;
    const char *path = path_text(encoder);
    PyObject *detached, *moved;
    int status;

    if (arl_tensor_import(state, object, path, 0, ARL_ERR_WIRE, tensor) < 0 ||
        tensor->view.device_type == ARL_DEVICE_CPU) {
        return PyErr_Occurred() ? -1 : 0;
    }
    if (tensor->kind != ARL_TENSOR_TORCH) { /* nobody to ask for a copy: refuse it by name */
        arl_tensor_release(tensor);
        return arl_tensor_import(state, object, path, ARL_TENSOR_CPU_ONLY, ARL_ERR_WIRE, tensor);
    }
    arl_tensor_release(tensor);
    detached = PyObject_CallMethodNoArgs(object, state->names.detach);
    moved = detached == NULL ? NULL : PyObject_CallMethodNoArgs(detached, state->names.cpu);
    Py_XDECREF(detached);
    if (moved == NULL) {
        return -1;
    }
    status = arl_tensor_import(state, moved, path, ARL_TENSOR_CPU_ONLY, ARL_ERR_WIRE, tensor);
    Py_DECREF(moved);
    return status;
}

static entry_t *
new_entry(encoder_t *encoder)
{
    if (encoder->count == encoder->capacity) {
        int64_t capacity = encoder->capacity == 0 ? 16 : encoder->capacity * 2;
        entry_t *entries = encoder->entries;

        PyMem_Resize(entries, entry_t, (size_t)capacity);
        if (entries == NULL) {
            (void)PyErr_NoMemory();
            return NULL;
        }
        encoder->entries = entries;
        encoder->capacity = capacity;
    }
    return &encoder->entries[encoder->count];
}

/* Two names belong to the format itself: readers take them for something else. */
static bool
is_reserved(const arl_text_t *key)
{
    static const char *const reserved[] = {ARL_WIRE_METADATA_KEY, ARL_WIRE_EMPTY_KEY};

    for (size_t i = 0; i < sizeof(reserved) / sizeof(reserved[0]); i++) {
        if (strlen(reserved[i]) == key->size && memcmp(reserved[i], key->data, key->size) == 0) {
            return true;
        }
    }
    return false;
}

static void
put_name_and_path(encoder_t *encoder, entry_t *entry, bool root)
{
    arl_text_t *strings = &encoder->strings;

    entry->name = strings->size;
    if (root) {
        arl_text_put_string(strings, ARL_WIRE_ROOT_KEY);
    }
    else {
        arl_text_put(strings, encoder->key.data, encoder->key.size);
        if (is_reserved(&encoder->key)) {
            arl_text_put_char(strings, '~');
        }
    }
    entry->name_size = strings->size - entry->name;
    entry->path = strings->size;
    arl_text_put_string(strings, path_text(encoder));
    arl_text_put_char(strings, '\0');
}

static int
write_tensor(encoder_t *encoder, PyObject *object, bool root)
{
    entry_t *entry = new_entry(encoder);
    PyObject *name;

    if (entry == NULL) {
        return -1;
    }
    *entry = (entry_t){0};
    if (import_tensor(encoder, object, &entry->tensor) < 0) {
        return -1;
    }
    encoder->count++; /* from here on encoder_release lets go of the tensor */
    entry->scalar = entry->tensor.view.ndim == 0;
    put_name_and_path(encoder, entry, root);
    if (encoder->strings.failed) {
        (void)PyErr_NoMemory();
        return -1;
    }
    name = PyUnicode_DecodeUTF8(encoder->strings.data + entry->name, (Py_ssize_t)entry->name_size,
                                "strict");
    if (name == NULL) {
        return -1;
    }
    arl_text_put_string(&encoder->tree, "[\"t\", ");
    arl_json_write_string(&encoder->tree, name);
    Py_DECREF(name);
    arl_text_put_string(&encoder->tree, entry->scalar ? ", {\"scalar\": true}]" : "]");
    return 0;
}

/* ---- nodes ----------------------------------------------------------------------------------- */

static int write_node(encoder_t *encoder, PyObject *object, bool root, int depth);

static int
write_elements(encoder_t *encoder, PyObject *elements, bool root, int depth)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(elements); i++) {
        place_t place = here(encoder);
        char index[24];
        int size = snprintf(index, sizeof(index), "%zd", i);

        if (i > 0) {
            arl_text_put_string(&encoder->tree, ", ");
        }
        enter(encoder, root, index, (size_t)size, "");
        /* borrowed from elements, which nobody else holds */
        if (write_node(encoder, PyTuple_GET_ITEM(elements, i), false, depth) < 0) {
            return -1;
        }
        go_back(encoder, place);
    }
    return 0;
}

static const char *
dict_name(encoder_t *encoder, PyObject *key, Py_ssize_t *size_p)
{
    const char *name;

    if (!PyUnicode_Check(key)) {
        (void)arl_raise_format(encoder->state, ARL_ERR_WIRE, operation,
                               "%s: a dict that holds tensors has a key of type %s; its keys must "
                               "be strings",
                               path_text(encoder), arl_type_name(key));
        return NULL;
    }
    name = PyUnicode_AsUTF8AndSize(key, size_p);
    if (name == NULL && PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) {
        PyErr_Clear();
        (void)arl_raise_format(encoder->state, ARL_ERR_WIRE, operation,
                               "%s: a dict that holds tensors has a key with half of a surrogate "
                               "pair; it has no UTF-8 form",
                               path_text(encoder));
    }
    return name;
}

static int
write_item(encoder_t *encoder, PyObject *key, PyObject *value, bool root, int depth)
{
    place_t place = here(encoder);
    Py_ssize_t size;
    const char *name = dict_name(encoder, key, &size);

    if (name == NULL) {
        return -1;
    }
    arl_text_put_char(&encoder->tree, '[');
    arl_json_write_string(&encoder->tree, key);
    arl_text_put_string(&encoder->tree, ", ");
    enter(encoder, root, name, (size_t)size, "'");
    if (write_node(encoder, value, false, depth) < 0) {
        return -1;
    }
    go_back(encoder, place);
    arl_text_put_char(&encoder->tree, ']');
    return 0;
}

static int
write_items(encoder_t *encoder, PyObject *items, bool root, int depth)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items); i++) {
        PyObject *item = PyList_GET_ITEM(items, i); /* borrowed from items, which is ours alone */

        if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 2) {
            PyErr_Format(PyExc_TypeError, "%s: %s: items() must give pairs, not %s", operation,
                         path_text(encoder), arl_type_name(item));
            return -1;
        }
        if (i > 0) {
            arl_text_put_string(&encoder->tree, ", ");
        }
        /* borrowed from item */
        if (write_item(encoder, PyTuple_GET_ITEM(item, 0), PyTuple_GET_ITEM(item, 1), root, depth) <
            0) {
            return -1;
        }
    }
    return 0;
}

static int
write_container(encoder_t *encoder, PyObject *object, bool root, int depth)
{
    const bool dict = PyDict_Check(object);
    PyObject *parts;
    int status;

    if (depth + 5 > ARL_JSON_DEPTH_MAX) { /* three brackets here, two of a scalar's node inside */
        return too_deep(encoder->state);
    }
    parts = snapshot(object);
    if (parts == NULL) {
        return -1;
    }
    arl_text_put_string(&encoder->tree, dict                    ? "[\"d\", ["
                                        : PyTuple_Check(object) ? "[\"u\", ["
                                                                : "[\"l\", [");
    status = dict ? write_items(encoder, parts, root, depth + 3)
                  : write_elements(encoder, parts, root, depth + 2);
    arl_text_put_string(&encoder->tree, "]]");
    Py_DECREF(parts);
    return status;
}

/* `depth` counts the JSON brackets around the node. */
static int
write_node(encoder_t *encoder, PyObject *object, bool root, int depth)
{
    int found = has_tensor(encoder->state, object, depth);

    if (found < 0) {
        return -1;
    }
    if (PyTuple_Check(object) || (found && is_container(object))) {
        return write_container(encoder, object, root, depth);
    }
    if (found) {
        return write_tensor(encoder, object, root);
    }
    arl_text_put_string(&encoder->tree, "[\"j\", ");
    if (arl_json_write_value(encoder->state, &encoder->tree, object, depth + 1) < 0) {
        return -1;
    }
    arl_text_put_char(&encoder->tree, ']');
    return 0;
}

/* ---- the frame ------------------------------------------------------------------------------- */

/* A frame without tensors carries one byte, since some readers refuse empty files. */
static const unsigned char empty_data[1] = {0};

static int
make_items(encoder_t *encoder)
{
    const size_t room = encoder->count > 0 ? (size_t)encoder->count : 1;

    encoder->items = PyMem_New(arl_wire_item_t, room);
    encoder->bases = PyMem_New(const char *, room);
    encoder->plan.copies = calloc(room, sizeof(*encoder->plan.copies));
    if (encoder->items == NULL || encoder->bases == NULL || encoder->plan.copies == NULL) {
        (void)PyErr_NoMemory();
        return -1;
    }
    if (encoder->count == 0) {
        encoder->items[0] = (arl_wire_item_t){
            .name = ARL_WIRE_EMPTY_KEY,
            .name_size = strlen(ARL_WIRE_EMPTY_KEY),
            .path = "the placeholder",
            .view = {.data = (void *)(uintptr_t)empty_data,
                     .dtype = ARL_DTYPE_U8,
                     .itemsize = 1,
                     .ndim = 1,
                     .shape = {1},
                     .strides = {1}},
        };
        return 0;
    }
    for (int64_t i = 0; i < encoder->count; i++) {
        const entry_t *entry = &encoder->entries[i];

        encoder->items[i] = (arl_wire_item_t){
            .name = encoder->strings.data + entry->name,
            .name_size = entry->name_size,
            .path = encoder->strings.data + entry->path,
            .scalar = entry->scalar,
            .view = entry->tensor.view,
        };
    }
    return 0;
}

/* One copy for each tensor, into the frame's data. */
static void
plan_copies(encoder_t *encoder, int64_t items, char *data)
{
    arl_plan_t *plan = &encoder->plan;

    for (int64_t i = 0; i < items; i++) {
        const arl_view_t *view = &encoder->items[i].view;
        arl_copy_t *copy = &plan->copies[plan->count];
        int64_t dense[ARL_VIEW_DIMS_MAX];
        int64_t stride = (int64_t)view->itemsize;

        for (int d = view->ndim - 1; d >= 0; d--) {
            dense[d] = stride;
            stride *= view->shape[d];
        }
        if (!arl_copy_shape(copy, view->itemsize, view->ndim, view->shape, view->strides, dense)) {
            continue; /* no elements */
        }
        copy->alloc = (uint32_t)plan->count;
        copy->dst = data + encoder->items[i].begin;
        encoder->bases[plan->count++] = view->data;
        plan->total_bytes += encoder->items[i].nbytes;
    }
}

static PyObject *
fill_frame(encoder_t *encoder, int64_t items, const arl_text_t *header, int64_t data_size)
{
    arl_error_t err = ARL_ERROR_INIT;
    PyObject *frame;
    Py_ssize_t size;
    char *bytes;
    arl_status_t status;

    if (__builtin_add_overflow((int64_t)header->size, data_size, &size)) {
        return arl_raise_format(encoder->state, ARL_ERR_WIRE, operation,
                                "the sizes of the tensors overflow");
    }
    frame = PyBytes_FromStringAndSize(NULL, size);
    if (frame == NULL) {
        return NULL;
    }
    bytes = PyBytes_AS_STRING(frame);
    plan_copies(encoder, items, bytes + header->size);
    Py_BEGIN_ALLOW_THREADS
    arl_pages_prefer_huge(bytes, (size_t)size);
    memcpy(bytes, header->data, header->size);
    status = arl_plan_run_host(&encoder->plan, encoder->bases, &err);
    Py_END_ALLOW_THREADS
    if (status != ARL_OK) {
        Py_DECREF(frame);
        return arl_raise(encoder->state, &err);
    }
    return frame;
}

static PyObject *
build_frame(encoder_t *encoder, const arl_text_t *op)
{
    const int64_t items = encoder->count > 0 ? encoder->count : 1;
    arl_error_t err = ARL_ERROR_INIT;
    arl_text_t header = {0};
    int64_t data_size = 0;
    PyObject *frame = NULL;
    arl_status_t status;

    if (make_items(encoder) < 0) {
        return NULL;
    }
    status = arl_wire_layout(encoder->items, items, &data_size, &err);
    if (status == ARL_OK) {
        status = arl_wire_write_header(&header, encoder->items, items, encoder->tree.data,
                                       encoder->tree.size, op->data, op->size, &err);
    }
    frame = status == ARL_OK ? fill_frame(encoder, items, &header, data_size)
                             : arl_raise(encoder->state, &err);
    arl_text_free(&header);
    return frame;
}

static int
write_metadata(arl_state_t *state, arl_text_t *op, PyObject *metadata)
{
    if (metadata == NULL || metadata == Py_None) {
        return 0;
    }
    if (!PyDict_Check(metadata)) {
        PyErr_Format(PyExc_TypeError, "%s: metadata must be a dict, not %s", operation,
                     arl_type_name(metadata));
        return -1;
    }
    return PyDict_GET_SIZE(metadata) == 0 ? 0 : arl_json_write_value(state, op, metadata, 0);
}

PyObject *
arl_wire_encode(arl_state_t *state, PyObject *object, PyObject *metadata)
{
    encoder_t encoder = {.state = state};
    arl_error_t err = ARL_ERROR_INIT;
    arl_text_t op = {0};
    PyObject *frame = NULL;

    if (arl_threads_prepare(&err) != ARL_OK) {
        return arl_raise(state, &err);
    }
    arl_text_put_string(&encoder.tree, "{\"v\": \"" ARL_WIRE_VERSION "\", \"tree\": ");
    if (write_node(&encoder, object, true, 1) == 0 && write_metadata(state, &op, metadata) == 0) {
        arl_text_put_char(&encoder.tree, '}');
        if (encoder.tree.failed || encoder.key.failed || encoder.path.failed || op.failed) {
            (void)PyErr_NoMemory();
        }
        else {
            frame = build_frame(&encoder, &op);
        }
    }
    arl_text_free(&op);
    encoder_release(&encoder);
    return frame;
}
