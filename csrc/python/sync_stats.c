/* SPDX-License-Identifier: Apache-2.0 */
#include "python/weights.h"

#include "python/errors.h"

#include <string.h>

/* Attribute, field, kind (i signed, u unsigned, f double), docstring. */
#define SYNC_STATS_NUMBERS(X)                                                                      \
    X("tensors", tensors, 'i', "int: tensors that were written (receiver) or offered (sender)")    \
    X("bytes", bytes, 'i', "int: bytes of those tensors")                                          \
    X("version", version, 'u', "int: version of the weights")                                      \
    X("untouched", untouched, 'i',                                                                 \
      "int: names of the receiver that the offer left out; more than 0 only with partial=True")    \
    X("verified", verified, 'i', "int: tensors whose checksum was compared with the sender's")     \
    X("extra_bytes", extra_bytes, 'i',                                                             \
      "int: memory that was needed beside the tensors themselves, on this side")                   \
    X("offer_seconds", offer_s, 'f', "float: making the offer (sender)")                           \
    X("validate_seconds", validate_s, 'f',                                                         \
      "float: reading the offer and checking names, dtypes and shapes")                            \
    X("open_seconds", open_s, 'f', "float: attaching to the sender and mapping its memory")        \
    X("copy_seconds", copy_s, 'f',                                                                 \
      "float: moving the bytes (receiver), or waiting for all receivers (sender)")                 \
    X("verify_seconds", verify_s, 'f', "float: computing checksums")                               \
    X("close_seconds", close_s, 'f', "float: closing mappings and telling the sender")             \
    X("seconds", total_s, 'f', "float: all of it")

typedef struct sync_stats {
    PyObject_HEAD
    arl_sync_stats_t stats;
} sync_stats_t;

typedef struct number_field {
    const char *name;
    size_t offset; /* in arl_sync_stats_t */
    char kind;
} number_field_t;

static const number_field_t number_fields[] = {
#define SYNC_STATS_FIELD(name, field, kind, doc) {name, offsetof(arl_sync_stats_t, field), kind},
    SYNC_STATS_NUMBERS(SYNC_STATS_FIELD)
#undef SYNC_STATS_FIELD
};

enum {
#define SYNC_STATS_INDEX(name, field, kind, doc) NUMBER_##field,
    SYNC_STATS_NUMBERS(SYNC_STATS_INDEX)
#undef SYNC_STATS_INDEX
        NUMBER_COUNT
};

/* `closure`: the field. */
static PyObject *
sync_stats_get_number(PyObject *self, void *closure)
{
    const number_field_t *field = closure;
    const char *at = (const char *)&((sync_stats_t *)self)->stats + field->offset;

    switch (field->kind) {
    case 'f':
        return PyFloat_FromDouble(*(const double *)at);
    case 'u':
        return PyLong_FromUnsignedLongLong(*(const uint64_t *)at);
    default:
        return PyLong_FromLongLong(*(const int64_t *)at);
    }
}

static PyObject *
sync_stats_get_transport(PyObject *self, void *closure)
{
    (void)closure;
    return PyUnicode_FromString(((sync_stats_t *)self)->stats.transport->name);
}

static PyObject *
sync_stats_get_fallback_reason(PyObject *self, void *closure)
{
    const char *text = ((sync_stats_t *)self)->stats.fallback;

    (void)closure;
    if (text[0] == '\0') {
        return Py_NewRef(Py_None);
    }
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

static PyGetSetDef sync_stats_getset[] = {
    {"transport", sync_stats_get_transport, NULL,
     "str: how the bytes went: host_shm, cuda_ipc, ring or nccl", NULL},
    {"fallback_reason", sync_stats_get_fallback_reason, NULL,
     "str or None: why it was not the transport that was asked for", NULL},
#define SYNC_STATS_GETTER(name, field, kind, doc)                                                  \
    {name, sync_stats_get_number, NULL, doc, (void *)&number_fields[NUMBER_##field]},
    SYNC_STATS_NUMBERS(SYNC_STATS_GETTER)
#undef SYNC_STATS_GETTER
        {NULL, NULL, NULL, NULL, NULL},
};

static PyObject *
sync_stats_as_dict(PyObject *self, PyObject *unused)
{
    PyObject *dict = PyDict_New();

    (void)unused;
    for (const PyGetSetDef *def = sync_stats_getset; dict != NULL && def->name != NULL; def++) {
        PyObject *value = def->get(self, def->closure);

        if (value == NULL || PyDict_SetItemString(dict, def->name, value) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(value);
    }
    return dict;
}

static PyObject *
sync_stats_repr(PyObject *self)
{
    const arl_sync_stats_t *stats = &((sync_stats_t *)self)->stats;
    const double mib = (double)stats->bytes / (1 << 20);
    char text[512], reason[ARL_OFFER_REASON_MAX + 32] = "";

    if (stats->fallback[0] != '\0') {
        (void)snprintf(reason, sizeof(reason), ", fallback_reason='%s'", stats->fallback);
    }
    (void)snprintf(text, sizeof(text),
                   "<SyncStats version %llu: %lld tensors, %.2f MiB over %s in %.2f ms%s>",
                   (unsigned long long)stats->version, (long long)stats->tensors, mib,
                   stats->transport->name, stats->total_s * 1e3, reason);
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

PyObject *
arl_sync_stats_new(arl_state_t *state, const arl_sync_stats_t *stats)
{
    sync_stats_t *self =
        (sync_stats_t *)state->sync_stats_type->tp_alloc(state->sync_stats_type, 0);

    if (self != NULL) {
        self->stats = *stats;
    }
    return (PyObject *)self;
}

/* ---- pickling: SyncStats(**stats.as_dict()) -------------------------------------------------- */

static int
read_text(PyObject *fields, const char *name, char *out, size_t size)
{
    PyObject *value;
    const char *text = "";
    int found = PyDict_GetItemStringRef(fields, name, &value);

    if (found < 0) {
        return -1;
    }
    if (found > 0 && value != Py_None) {
        text = PyUnicode_AsUTF8(value);
    }
    if (text != NULL) {
        (void)snprintf(out, size, "%s", text);
    }
    Py_XDECREF(value);
    return text == NULL ? -1 : 0;
}

static int
read_number(sync_stats_t *self, const number_field_t *field, PyObject *fields)
{
    PyObject *value;
    char *at = (char *)&self->stats + field->offset;

    if (PyDict_GetItemStringRef(fields, field->name, &value) <= 0) {
        return PyErr_Occurred() ? -1 : 0;
    }
    if (field->kind == 'f') {
        *(double *)at = PyFloat_AsDouble(value);
    }
    else if (field->kind == 'u') {
        *(uint64_t *)at = PyLong_AsUnsignedLongLong(value);
    }
    else {
        *(int64_t *)at = PyLong_AsLongLong(value);
    }
    Py_DECREF(value);
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *
sync_stats_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    sync_stats_t *self;
    char name[32];

    if (PyTuple_GET_SIZE(args) != 0 || kwargs == NULL) {
        PyErr_SetString(PyExc_TypeError, "SyncStats() takes its fields as keywords");
        return NULL;
    }
    self = (sync_stats_t *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    if (read_text(kwargs, "transport", name, sizeof(name)) < 0 ||
        read_text(kwargs, "fallback_reason", self->stats.fallback, sizeof(self->stats.fallback)) <
            0) {
        Py_DECREF(self);
        return NULL;
    }
    self->stats.transport = arl_transport_find(name);
    if (self->stats.transport == NULL) {
        PyErr_Format(PyExc_ValueError, "SyncStats: unknown transport \"%s\"", name);
        Py_DECREF(self);
        return NULL;
    }
    for (int i = 0; i < NUMBER_COUNT; i++) {
        if (read_number(self, &number_fields[i], kwargs) < 0) {
            Py_DECREF(self);
            return NULL;
        }
    }
    return (PyObject *)self;
}

static PyObject *
sync_stats_getnewargs_ex(PyObject *self, PyObject *unused)
{
    PyObject *fields = sync_stats_as_dict(self, unused);

    return fields == NULL ? NULL : Py_BuildValue("(()N)", fields);
}

/* ---- type ------------------------------------------------------------------------------------ */

static int
sync_stats_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static void
sync_stats_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);

    PyObject_GC_UnTrack(self);
    type->tp_free(self);
    Py_DECREF(type);
}

PyDoc_STRVAR(sync_stats_doc,
             "SyncStats(**fields)\n--\n\n"
             "What one weight sync did: how, how much, how long. Attributes are read-only; times\n"
             "are seconds. WeightReceiver.pull() and WeightSender.serve() return one. It pickles.");

PyDoc_STRVAR(as_dict_doc, "as_dict($self, /)\n--\n\n"
                          "All fields by name, as plain str, int, float and None.");

PyDoc_STRVAR(getnewargs_doc, "__getnewargs_ex__($self, /)\n--\n\nHelper for pickle.");

static PyMethodDef sync_stats_type_methods[] = {
    {"as_dict", sync_stats_as_dict, METH_NOARGS, as_dict_doc},
    {"__getnewargs_ex__", sync_stats_getnewargs_ex, METH_NOARGS, getnewargs_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot sync_stats_slots[] = {
    {Py_tp_doc, (void *)sync_stats_doc}, {Py_tp_new, sync_stats_new},
    {Py_tp_dealloc, sync_stats_dealloc}, {Py_tp_traverse, sync_stats_traverse},
    {Py_tp_repr, sync_stats_repr},       {Py_tp_methods, sync_stats_type_methods},
    {Py_tp_getset, sync_stats_getset},   {0, NULL},
};

static PyType_Spec sync_stats_spec = {
    .name = "arctic_rl_c.SyncStats",
    .basicsize = sizeof(sync_stats_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = sync_stats_slots,
};

PyMethodDef arl_sync_stats_methods[] = {{NULL, NULL, 0, NULL}};

int
arl_sync_stats_exec(PyObject *module, arl_state_t *state)
{
    return arl_state_add_type(module, &sync_stats_spec, &state->sync_stats_type);
}
