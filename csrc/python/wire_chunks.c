/* SPDX-License-Identifier: Apache-2.0 */
/* Frames cut into byte chunks and put together again. The rules are core/arl_wire_chunk's. */
#include "python/wire.h"

#include "core/arl_pages.h"
#include "core/arl_plan.h"
#include "core/arl_threads.h"
#include "core/arl_wire_chunk.h"
#include "python/errors.h"

#include <stdlib.h>

static const char encoding[] = "wire.encode_byte_chunks";
static const char decoding[] = "wire.decode_byte_chunks";

/* ---- encoding -------------------------------------------------------------------------------- */

static int
read_text(PyObject *object, const char *role, const char **text_p, size_t *size_p)
{
    Py_ssize_t size;

    if (!PyUnicode_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s: %s must be a string, not %s", encoding, role,
                     arl_type_name(object));
        return -1;
    }
    *text_p = PyUnicode_AsUTF8AndSize(object, &size);
    *size_p = (size_t)size;
    return *text_p == NULL ? -1 : 0;
}

/* The id that ties the chunks of one request together, when the caller has none. */
static PyObject *
new_group_id(void)
{
    PyObject *module = PyImport_ImportModule("uuid"), *id, *text = NULL;

    if (module == NULL) {
        return NULL;
    }
    id = PyObject_CallMethod(module, "uuid4", NULL);
    Py_DECREF(module);
    if (id != NULL) {
        text = PyObject_Str(id);
        Py_DECREF(id);
    }
    return text;
}

/* One chunk's frame with its header in place; the payload's copy is added to the plan. */
static PyObject *
new_chunk(arl_state_t *state, const arl_wire_chunk_t *chunk, int64_t begin, int64_t size,
          arl_plan_t *plan)
{
    arl_error_t err = ARL_ERROR_INIT;
    arl_text_t header = {0};
    PyObject *frame = NULL;

    if (arl_wire_chunk_write_header(&header, chunk, size, &err) != ARL_OK) {
        (void)arl_raise(state, &err);
    }
    else {
        frame = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)header.size + size);
    }
    if (frame != NULL) {
        char *bytes = PyBytes_AS_STRING(frame);

        arl_pages_prefer_huge(bytes, header.size + (size_t)size);
        memcpy(bytes, header.data, header.size);
        plan->copies[plan->count++] = (arl_copy_t){
            .src_offset = begin,
            .dst = bytes + header.size,
            .run_bytes = size,
        };
        plan->total_bytes += size;
    }
    arl_text_free(&header);
    return frame;
}

/* A list of new chunks whose payloads are planned, not copied. */
static PyObject *
new_chunks(arl_state_t *state, arl_wire_chunk_t *chunk, int64_t payload_size, arl_plan_t *plan)
{
    PyObject *list = PyList_New((Py_ssize_t)chunk->total);

    plan->copies = calloc((size_t)chunk->total, sizeof(*plan->copies));
    if (list != NULL && plan->copies == NULL) {
        Py_CLEAR(list);
        (void)PyErr_NoMemory();
    }
    for (int64_t i = 0; list != NULL && i < chunk->total; i++) {
        const int64_t begin = i * payload_size, left = chunk->frame_size - begin;
        PyObject *frame;

        chunk->index = i;
        frame = new_chunk(state, chunk, begin, left < payload_size ? left : payload_size, plan);
        if (frame == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)i, frame);
    }
    return list;
}

static PyObject *
cut_frame(arl_state_t *state, const Py_buffer *frame, arl_wire_chunk_t *chunk, int64_t max_bytes)
{
    const char *bytes = frame->buf;
    arl_error_t err = ARL_ERROR_INIT;
    arl_plan_t plan = {0};
    int64_t payload_size = 0;
    PyObject *list;
    arl_status_t status;

    Py_BEGIN_ALLOW_THREADS
    arl_sha256_hex(bytes, (size_t)chunk->frame_size, chunk->sha256);
    status = arl_wire_chunk_plan(chunk, max_bytes, &payload_size, &err);
    Py_END_ALLOW_THREADS
    if (status != ARL_OK) {
        return arl_raise(state, &err);
    }
    list = new_chunks(state, chunk, payload_size, &plan);
    if (list != NULL) {
        Py_BEGIN_ALLOW_THREADS
        status = arl_plan_run_host(&plan, &bytes, &err);
        Py_END_ALLOW_THREADS
        if (status != ARL_OK) {
            Py_CLEAR(list);
            (void)arl_raise(state, &err);
        }
    }
    arl_plan_free(&plan);
    return list;
}

/* The frame alone, as bytes: what was given when it is that already. */
static PyObject *
single_frame(PyObject *object, const Py_buffer *frame)
{
    return PyBytes_CheckExact(object) ? Py_NewRef(object)
                                      : PyBytes_FromStringAndSize(frame->buf, frame->len);
}

static PyObject *
encode_chunks(arl_state_t *state, PyObject *object, const Py_buffer *frame, int64_t max_bytes,
              arl_wire_chunk_t *chunk, PyObject *group)
{
    PyObject *chunks, *id;

    if (max_bytes <= 0 || frame->len <= max_bytes) {
        chunks = PyList_New(1);
        if (chunks != NULL) {
            PyObject *single = single_frame(object, frame);

            if (single == NULL) {
                Py_CLEAR(chunks);
            }
            else {
                PyList_SET_ITEM(chunks, 0, single);
            }
        }
        return chunks;
    }
    if (chunk->kind != ARL_WIRE_CHUNK_REQUEST) {
        return cut_frame(state, frame, chunk, max_bytes);
    }
    id = group != NULL ? Py_NewRef(group) : new_group_id();
    if (id == NULL) {
        return NULL;
    }
    chunks = read_text(id, "chunk_group_id", &chunk->group, &chunk->group_size) < 0
                 ? NULL
                 : cut_frame(state, frame, chunk, max_bytes);
    Py_DECREF(id);
    return chunks;
}

PyObject *
arl_wire_encode_chunks(arl_state_t *state, PyObject *object, int64_t max_bytes, PyObject *kind,
                       PyObject *operation, PyObject *group)
{
    arl_wire_chunk_t chunk = {0};
    const char *kind_text;
    size_t kind_size;
    Py_buffer frame;
    PyObject *chunks;

    if (read_text(kind, "kind", &kind_text, &kind_size) < 0 ||
        (operation != NULL &&
         read_text(operation, "operation", &chunk.operation, &chunk.operation_size) < 0)) {
        return NULL;
    }
    chunk.kind = arl_wire_chunk_kind(kind_text, kind_size);
    if (chunk.kind == ARL_WIRE_CHUNK_NONE) {
        return arl_raise_format(state, ARL_ERR_WIRE, encoding,
                                "kind must be \"request\" or \"result\", found \"%.*s\"",
                                arl_json_quoted(kind_size), kind_text);
    }
    if (chunk.kind == ARL_WIRE_CHUNK_RESULT && group != NULL) {
        return arl_raise_format(state, ARL_ERR_WIRE, encoding,
                                "chunk_group_id belongs to requests; a result's chunks have none");
    }
    if (arl_wire_get_buffer(state, object, encoding, &frame) < 0) {
        return NULL;
    }
    chunk.frame_size = frame.len;
    chunks = encode_chunks(state, object, &frame, max_bytes, &chunk, group);
    PyBuffer_Release(&frame);
    return chunks;
}

/* ---- decoding -------------------------------------------------------------------------------- */

typedef struct chunk_set {
    arl_wire_chunk_t *chunks; /* sorted by index once checked */
    Py_buffer *frames;        /* in the order given */
    int64_t parsed;
    int64_t held;
    arl_plan_t plan;
    const char **bases;
} chunk_set_t;

static void
chunk_set_release(chunk_set_t *set)
{
    for (int64_t i = 0; i < set->parsed; i++) {
        arl_wire_chunk_free(&set->chunks[i]);
    }
    for (int64_t i = 0; i < set->held; i++) {
        PyBuffer_Release(&set->frames[i]);
    }
    arl_plan_free(&set->plan);
    PyMem_Free(set->chunks);
    PyMem_Free(set->frames);
    PyMem_Free(set->bases);
}

static int
parse_chunks(arl_state_t *state, PyObject *list, chunk_set_t *set)
{
    const size_t count = (size_t)PyTuple_GET_SIZE(list), room = count > 0 ? count : 1;

    set->chunks = PyMem_New(arl_wire_chunk_t, room);
    set->frames = PyMem_New(Py_buffer, room);
    set->bases = PyMem_New(const char *, room);
    set->plan.copies = calloc(room, sizeof(*set->plan.copies));
    if (set->chunks == NULL || set->frames == NULL || set->bases == NULL ||
        set->plan.copies == NULL) {
        (void)PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < count; i++) {
        arl_error_t err = ARL_ERROR_INIT;
        /* borrowed from list, a tuple that nobody else holds */
        PyObject *item = PyTuple_GET_ITEM(list, (Py_ssize_t)i);

        if (arl_wire_get_buffer(state, item, decoding, &set->frames[i]) < 0) {
            return -1;
        }
        set->held++;
        if (arl_wire_chunk_parse(set->frames[i].buf, (size_t)set->frames[i].len, &set->chunks[i],
                                 &err) != ARL_OK) {
            (void)arl_raise(state, &err);
            return -1;
        }
        set->parsed++;
    }
    return 0;
}

static void
plan_join(chunk_set_t *set, char *bytes)
{
    for (int64_t i = 0; i < set->parsed; i++) {
        const arl_wire_chunk_t *chunk = &set->chunks[i];

        if (chunk->payload_size > 0) {
            set->bases[set->plan.count] = chunk->payload;
            set->plan.copies[set->plan.count] = (arl_copy_t){
                .alloc = (uint32_t)set->plan.count,
                .dst = bytes,
                .run_bytes = (int64_t)chunk->payload_size,
            };
            set->plan.count++;
            set->plan.total_bytes += (int64_t)chunk->payload_size;
            bytes += chunk->payload_size;
        }
    }
}

static PyObject *
join_chunks(arl_state_t *state, chunk_set_t *set)
{
    arl_error_t err = ARL_ERROR_INIT;
    char sha256[ARL_SHA256_HEX];
    PyObject *frame;
    char *bytes;
    size_t size;
    arl_status_t status = arl_wire_chunks_check(set->chunks, set->parsed, &err);

    if (status != ARL_OK) {
        return arl_raise(state, &err);
    }
    size = (size_t)set->chunks[0].frame_size; /* checked against what the chunks hold */
    frame = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
    if (frame == NULL) {
        return NULL;
    }
    bytes = PyBytes_AS_STRING(frame);
    plan_join(set, bytes);
    Py_BEGIN_ALLOW_THREADS
    arl_pages_prefer_huge(bytes, size);
    status = arl_plan_run_host(&set->plan, set->bases, &err);
    arl_sha256_hex(bytes, size, sha256);
    Py_END_ALLOW_THREADS
    if (status == ARL_OK && memcmp(sha256, set->chunks[0].sha256, sizeof(sha256)) != 0) {
        status =
            arl_error_set(&err, ARL_ERR_WIRE, decoding,
                          "the joined bytes have SHA-256 %.*s, frame_sha256 says %.*s",
                          (int)sizeof(sha256), sha256, (int)sizeof(sha256), set->chunks[0].sha256);
    }
    if (status != ARL_OK) {
        Py_DECREF(frame);
        return arl_raise(state, &err);
    }
    return frame;
}

PyObject *
arl_wire_decode_chunks(arl_state_t *state, PyObject *chunks)
{
    chunk_set_t set = {0};
    PyObject *list, *frame = NULL;

    if (PyObject_CheckBuffer(chunks)) { /* bytes are iterable too, but not into frames */
        return arl_raise_format(state, ARL_ERR_WIRE, decoding,
                                "expected a list of chunks, got one %s", arl_type_name(chunks));
    }
    list = PySequence_Tuple(chunks);
    if (list == NULL) {
        return NULL;
    }
    if (parse_chunks(state, list, &set) == 0) {
        if (set.parsed == 1 && set.chunks[0].kind == ARL_WIRE_CHUNK_NONE) {
            /* borrowed from list */
            frame = single_frame(PyTuple_GET_ITEM(list, 0), &set.frames[0]);
        }
        else {
            frame = join_chunks(state, &set);
        }
    }
    chunk_set_release(&set);
    Py_DECREF(list);
    return frame;
}
