/* SPDX-License-Identifier: Apache-2.0 */
/* DSSST1 frames for Python: arguments and docstrings. */
#include "python/wire.h"

#include "python/args.h"
#include "python/errors.h"

int
arl_wire_get_buffer(arl_state_t *state, PyObject *object, const char *call, Py_buffer *frame)
{
    if (PyUnicode_Check(object) || !PyObject_CheckBuffer(object)) {
        (void)arl_raise_format(state, ARL_ERR_WIRE, call, "expected a bytes-like object, got %s",
                               arl_type_name(object));
        return -1;
    }
    if (PyObject_GetBuffer(object, frame, PyBUF_SIMPLE) < 0) {
        if (PyErr_ExceptionMatches(PyExc_BufferError)) {
            PyErr_Clear();
            (void)arl_raise_format(state, ARL_ERR_WIRE, call,
                                   "expected contiguous bytes, got a strided %s",
                                   arl_type_name(object));
        }
        return -1;
    }
    return 0;
}

/* ---- dumps ----------------------------------------------------------------------------------- */

PyDoc_STRVAR(
    dumps_doc,
    "wire_dumps(obj, metadata=None)\n--\n\n"
    "Encodes an object as one DSSST1 frame and returns it as bytes.\n\n"
    "obj is a tree of dicts, lists and tuples whose leaves are tensors (torch, NumPy, or\n"
    "with __dlpack__; any shape, dense or strided, of up to 8 dimensions) and values that\n"
    "json.dumps takes. Tensors of other devices are copied to the CPU first. metadata, a\n"
    "dict, travels beside it and can be read alone with wire_read_metadata.\n\n"
    "The bytes of the tensors are copied once, without the GIL; nobody may write to the\n"
    "tensors meanwhile. Parts without tensors travel as JSON: in them tuples become lists\n"
    "and keys become strings.\n\n"
    "Raises WireError for keys that are not strings in a dict that holds a tensor, for two\n"
    "tensors whose paths would get one name, for a dtype that the format lacks, for nesting\n"
    "beyond 512 levels of JSON and for a header beyond 64 MiB; TypeError for a value\n"
    "without a JSON form.");

static PyObject *
wire_dumps(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"obj", "metadata"};
    static const arl_signature_t signature = {"wire_dumps", 2, 2, 1, names};
    PyObject *bound[2];

    if (arl_args_bind(&signature, args, nargs, kwnames, bound) < 0) {
        return NULL;
    }
    return arl_wire_encode(arl_state_from_module(module), bound[0], bound[1]);
}

/* ---- loads ----------------------------------------------------------------------------------- */

PyDoc_STRVAR(
    loads_doc,
    "wire_loads(frame, *, as_='auto', copy=True)\n--\n\n"
    "Decodes one DSSST1 frame, given as any contiguous bytes-like object.\n\n"
    "as_ is 'torch', 'numpy' or 'auto': torch where it has been imported, else NumPy.\n"
    "With copy=True every tensor owns fresh memory, filled once and without the GIL. With\n"
    "copy=False tensors are views of the frame, which they keep alive; those that are not\n"
    "aligned to their element size are copied all the same. NumPy views of read-only bytes\n"
    "are read-only; torch has no read-only tensors, so a writable buffer (a bytearray) is\n"
    "needed there.\n\n"
    "Whatever the order of keys and white space, the frame must be sound: WireError says\n"
    "which rule it breaks. Nothing is ever unpickled. A frame that holds bfloat16 or float8\n"
    "cannot be decoded to NumPy (WireError). ValueError for copy=False with torch and\n"
    "read-only bytes.");

/* Which library the tensors come from. */
static int
read_like(arl_state_t *state, PyObject *as, arl_tensor_kind_t *like_p)
{
    const bool torch =
        as != NULL && PyUnicode_Check(as) && PyUnicode_CompareWithASCIIString(as, "torch") == 0;
    int ready;

    if (as != NULL && PyUnicode_Check(as) && PyUnicode_CompareWithASCIIString(as, "numpy") == 0) {
        *like_p = ARL_TENSOR_NUMPY;
        return 0;
    }
    if (!torch && as != NULL &&
        (!PyUnicode_Check(as) || PyUnicode_CompareWithASCIIString(as, "auto") != 0)) {
        PyErr_Format(PyExc_ValueError, "wire_loads: as_ must be 'auto', 'torch' or 'numpy', not %R",
                     as);
        return -1;
    }
    if (torch) { /* asked for by name, so it may be imported */
        PyObject *imported = PyImport_ImportModule("torch");

        if (imported == NULL) {
            return -1;
        }
        Py_DECREF(imported);
    }
    ready = arl_torch_ready(state);
    if (ready < 0) {
        return -1;
    }
    *like_p = ready || torch ? ARL_TENSOR_TORCH : ARL_TENSOR_NUMPY;
    return 0;
}

static PyObject *
wire_loads(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"frame", "as_", "copy"};
    static const arl_signature_t signature = {"wire_loads", 3, 1, 1, names};
    arl_state_t *state = arl_state_from_module(module);
    arl_wire_options_t options = {.copy = true};
    PyObject *bound[3], *object;
    Py_buffer frame;

    if (arl_args_bind(&signature, args, nargs, kwnames, bound) < 0 ||
        read_like(state, bound[1], &options.like) < 0) {
        return NULL;
    }
    if (bound[2] != NULL) {
        int truth = PyObject_IsTrue(bound[2]);

        if (truth < 0) {
            return NULL;
        }
        options.copy = truth != 0;
    }
    if (arl_wire_get_buffer(state, bound[0], "wire.loads", &frame) < 0) {
        return NULL;
    }
    if (!options.copy && options.like == ARL_TENSOR_TORCH && frame.readonly) {
        PyBuffer_Release(&frame);
        PyErr_Format(PyExc_ValueError,
                     "wire_loads: copy=False needs a writable buffer for torch tensors, which "
                     "cannot be read-only; got read-only %s. Pass a bytearray, as_='numpy' or "
                     "copy=True",
                     arl_type_name(bound[0]));
        return NULL;
    }
    object = arl_wire_decode(state, bound[0], &frame, &options);
    PyBuffer_Release(&frame);
    return object;
}

/* ---- metadata -------------------------------------------------------------------------------- */

PyDoc_STRVAR(
    read_metadata_doc,
    "wire_read_metadata(frame, /)\n--\n\n"
    "Returns the metadata that wire_dumps was given, as a dict, without decoding the rest.\n\n"
    "A peek: an empty dict when there is none, and also for a bad frame, which wire_loads\n"
    "will complain about.");

static PyObject *
wire_read_metadata(PyObject *module, PyObject *object)
{
    arl_state_t *state = arl_state_from_module(module);
    PyObject *metadata;
    Py_buffer frame;

    if (arl_wire_get_buffer(state, object, "wire.read_metadata", &frame) < 0) {
        if (!PyErr_ExceptionMatches(state->wire_error)) {
            return NULL;
        }
        PyErr_Clear();
        return PyDict_New();
    }
    metadata = arl_wire_decode_metadata(state, &frame);
    PyBuffer_Release(&frame);
    return metadata;
}

/* ---- chunks ---------------------------------------------------------------------------------- */

PyDoc_STRVAR(
    encode_chunks_doc,
    "wire_encode_byte_chunks(frame, max_bytes, kind, *, operation=None, chunk_group_id=None)"
    "\n--\n\n"
    "Cuts an encoded frame into chunks of at most max_bytes bytes and returns their list.\n\n"
    "Each chunk is itself a frame, {'payload': uint8[k]}, whose metadata says what it is a\n"
    "part of: kind is 'request' or 'result', operation a name for the receiver to route by.\n"
    "Requests carry a group id, a random UUID unless one is given. A frame that fits, or\n"
    "max_bytes <= 0, gives [frame]. Raises WireError for another kind, for a group id with\n"
    "a result, and when max_bytes is too small for even one byte of payload.");

static PyObject *
none_is_missing(PyObject *object)
{
    return object == Py_None ? NULL : object;
}

static PyObject *
wire_encode_byte_chunks(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                        PyObject *kwnames)
{
    static const char *const names[] = {"frame", "max_bytes", "kind", "operation",
                                        "chunk_group_id"};
    static const arl_signature_t signature = {"wire_encode_byte_chunks", 5, 3, 3, names};
    PyObject *bound[5];
    long long max_bytes;

    if (arl_args_bind(&signature, args, nargs, kwnames, bound) < 0) {
        return NULL;
    }
    max_bytes = PyLong_AsLongLong(bound[1]);
    if (max_bytes == -1 && PyErr_Occurred()) {
        return NULL;
    }
    return arl_wire_encode_chunks(arl_state_from_module(module), bound[0], max_bytes, bound[2],
                                  none_is_missing(bound[3]), none_is_missing(bound[4]));
}

PyDoc_STRVAR(
    decode_chunks_doc,
    "wire_decode_byte_chunks(chunks, /)\n--\n\n"
    "Joins the chunks of one frame, given in any order, and returns the frame as bytes.\n\n"
    "One frame without chunk metadata is returned as it is. Raises WireError unless all\n"
    "chunks belong together, none is missing or given twice, and the joined bytes have the\n"
    "size and the SHA-256 that the chunks announce.");

static PyObject *
wire_decode_byte_chunks(PyObject *module, PyObject *chunks)
{
    return arl_wire_decode_chunks(arl_state_from_module(module), chunks);
}

/* ---- feature --------------------------------------------------------------------------------- */

#define WIRE_METHOD(name, flags, doc)                                                              \
    {                                                                                              \
#        name, (PyCFunction)(void (*)(void))name, flags, doc                                       \
    }

PyMethodDef arl_wire_methods[] = {
    WIRE_METHOD(wire_dumps, METH_FASTCALL | METH_KEYWORDS, dumps_doc),
    WIRE_METHOD(wire_loads, METH_FASTCALL | METH_KEYWORDS, loads_doc),
    WIRE_METHOD(wire_read_metadata, METH_O, read_metadata_doc),
    WIRE_METHOD(wire_encode_byte_chunks, METH_FASTCALL | METH_KEYWORDS, encode_chunks_doc),
    WIRE_METHOD(wire_decode_byte_chunks, METH_O, decode_chunks_doc),
    {NULL, NULL, 0, NULL},
};

int
arl_wire_exec(PyObject *module, arl_state_t *state)
{
    (void)module;
    (void)state;
    return 0;
}
