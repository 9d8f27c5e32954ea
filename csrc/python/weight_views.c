/* SPDX-License-Identifier: Apache-2.0 */
/*
 * receiver.views(): a pull whose copies are made by somebody else. WeightViews is the context
 * manager and iterator, WeightView one tensor of the sender, readable through DLPack.
 */
#include "python/weight_receiver.h"

#include "python/dlpack.h"
#include "python/errors.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- mappings -------------------------------------------------------------------------------- */

arl_mapped_t *
arl_mapped_new(void)
{
    arl_mapped_t *mapped = calloc(1, sizeof(*mapped));

    if (mapped != NULL) {
        mapped->references = 1;
    }
    return mapped;
}

void
arl_mapped_drop(arl_mapped_t *mapped)
{
    if (atomic_fetch_sub(&mapped->references, 1) == 1) {
        free(mapped);
    }
}

/* An import that is shared by the block and by all DLPack tensors made from it. */
typedef struct mapping {
    _Atomic int64_t references;
    arl_import_t *import;
    arl_mapped_t *mapped;
    int64_t counted;
} mapping_t;

static mapping_t *
mapping_new(arl_mapped_t *mapped)
{
    mapping_t *mapping = calloc(1, sizeof(*mapping));

    if (mapping != NULL) {
        mapping->references = 1;
        mapping->mapped = mapped;
        (void)atomic_fetch_add(&mapped->references, 1);
    }
    return mapping;
}

static void
mapping_drop(mapping_t *mapping)
{
    if (atomic_fetch_sub(&mapping->references, 1) != 1) {
        return;
    }
    if (mapping->import != NULL) {
        mapping->import->transport->close(&mapping->import, false);
    }
    (void)atomic_fetch_sub(&mapping->mapped->live, mapping->counted);
    arl_mapped_drop(mapping->mapped);
    free(mapping);
}

/* ---- WeightViews ----------------------------------------------------------------------------- */

typedef struct weight_views {
    PyObject_HEAD
    arl_weight_receiver_t *receiver;
    PyObject *offer; /* until it is entered */
    arl_verify_t verify;
    void *stream; /* CUstream that the tensors are read on */
    double seconds;
    enum { VIEWS_NEW, VIEWS_OPEN, VIEWS_ENDED } phase;
    arl_session_t session; /* while open */
    arl_call_t call;       /* the session's deadline is in it */
    mapping_t *mapping;    /* while open */
    bool busy;             /* a call runs without the GIL */
    uint32_t *order;       /* tensors of the offer, as they are handed out; while open */
    uint32_t count;        /* of them */
    uint32_t next;         /* of `order` */
    uint32_t source;       /* tensor whose bytes were handed out last */
} weight_views_t;

typedef struct weight_view {
    PyObject_HEAD
    weight_views_t *views;
    PyObject *name;
    uint32_t source;
    arl_view_t view;
} weight_view_t;

PyObject *
arl_weight_views_new(arl_state_t *state, arl_weight_receiver_t *receiver, PyObject *offer,
                     arl_verify_t verify, void *stream, double seconds)
{
    PyTypeObject *type = state->weight_views_type;
    weight_views_t *self = (weight_views_t *)type->tp_alloc(type, 0);

    if (self != NULL) {
        self->receiver = (arl_weight_receiver_t *)Py_NewRef((PyObject *)receiver);
        self->offer = Py_NewRef(offer);
        self->verify = verify;
        self->stream = stream;
        self->seconds = seconds;
    }
    return (PyObject *)self;
}

/* Ends the block: `reason` NULL for success. The mapping lives on while DLPack tensors do. */
static void
views_end(weight_views_t *self, const arl_error_t *reason)
{
    self->phase = VIEWS_ENDED;
    PyMem_Free(self->order);
    self->order = NULL;
    mapping_drop(self->mapping); /* before the sender hears that this receiver is done */
    self->mapping = NULL;
    arl_receiver_end(&self->receiver->receiver, &self->session, reason);
    arl_guard_leave(&self->receiver->guard);
}

static int
views_begin(arl_state_t *state, weight_views_t *self, const Py_buffer *offer)
{
    arl_status_t status;

    self->receiver->receiver.stream = self->stream;
    arl_call_begin(&self->call, self->seconds);
    status =
        arl_receiver_begin(&self->receiver->receiver, offer->buf, (size_t)offer->len, self->verify,
                           true, &self->call.deadline, &self->session, &self->call.err);
    arl_call_end(&self->call);
    if (status != ARL_OK) {
        (void)arl_raise(state, &self->call.err);
        return -1;
    }
    return 0;
}

/*
 * Tensors that are synced, in the order of the offer; streamed ones in the order of the stream,
 * with those that share a tensor's bytes right after it.
 */
static int
views_order(weight_views_t *self)
{
    const arl_offer_t *offer = &self->session.offer;
    const bool streams = self->session.transport->view != NULL;
    uint32_t *place = PyMem_Calloc((size_t)offer->tensor_count + 1, sizeof(*place));
    uint32_t *order = PyMem_Calloc((size_t)offer->tensor_count + 1, sizeof(*order));

    if (place == NULL || order == NULL) {
        PyMem_Free(place);
        PyMem_Free(order);
        return -1;
    }
    for (uint32_t i = 0; i < offer->tensor_count; i++) {
        place[(streams ? offer->tensors[i].alias_of : i) + 1]++;
    }
    for (uint32_t i = 0; i < offer->tensor_count; i++) {
        place[i + 1] += place[i];
    }
    for (uint32_t i = 0; i < offer->tensor_count; i++) {
        order[place[streams ? offer->tensors[i].alias_of : i]++] = i;
    }
    PyMem_Free(place);
    for (uint32_t i = 0; i < offer->tensor_count; i++) {
        const arl_offer_tensor_t *tensor = &offer->tensors[order[i]];

        if (!arl_binding_set_excludes(&self->receiver->receiver.set, tensor->name,
                                      tensor->name_length)) {
            order[self->count++] = order[i];
        }
    }
    self->order = order;
    self->source = UINT32_MAX;
    return 0;
}

static PyObject *
weight_views_enter(PyObject *op, PyObject *unused)
{
    weight_views_t *self = (weight_views_t *)op;
    arl_weight_receiver_t *receiver = self->receiver;
    arl_state_t *state = arl_state_from_type(Py_TYPE(op));
    mapping_t *mapping;
    arl_error_t reason = ARL_ERROR_INIT;
    Py_buffer offer;

    (void)unused;
    if (state == NULL || arl_guard_enter(state, &receiver->guard, "views") < 0) {
        return NULL;
    }
    if (self->phase != VIEWS_NEW) {
        PyErr_SetString(PyExc_RuntimeError, "views() is entered once; an offer is used once");
        goto leave;
    }
    if (PyObject_GetBuffer(self->offer, &offer, PyBUF_SIMPLE) < 0) {
        goto leave;
    }
    mapping = mapping_new(receiver->mapped);
    if (mapping == NULL) {
        (void)PyErr_NoMemory();
        goto release_offer;
    }
    if (arl_weight_receiver_refresh(state, receiver) < 0 || views_begin(state, self, &offer) < 0) {
        goto drop_mapping;
    }
    self->session.stats.tensors = 0; /* counted as they are handed out */
    self->session.stats.bytes = 0;
    mapping->import = self->session.import;
    mapping->counted = mapping->import->mappings;
    (void)atomic_fetch_add(&receiver->mapped->live, mapping->counted);
    self->session.import = NULL;
    self->mapping = mapping;
    self->phase = VIEWS_OPEN;
    arl_receiver_tear(&receiver->receiver, &self->session);
    PyBuffer_Release(&offer);
    Py_CLEAR(self->offer);
    if (views_order(self) < 0) {
        (void)arl_error_set(&reason, ARL_ERR_NOMEM, "views", "out of memory");
        views_end(self, &reason);
        return PyErr_NoMemory();
    }
    if (self->session.fresh &&
        arl_weight_receiver_log(state, receiver, self->session.transport->name) < 0) {
        (void)arl_error_set(&reason, ARL_ERR_INTERRUPTED, "views", "interrupted");
        views_end(self, &reason);
        return NULL;
    }
    return Py_NewRef(op);
drop_mapping:
    mapping_drop(mapping);
release_offer:
    PyBuffer_Release(&offer);
leave:
    arl_guard_leave(&receiver->guard);
    return NULL;
}

/* Brings the bytes of tensor `index` here; the offer's tensor_count passes over the rest. */
static int
views_bring(arl_state_t *state, weight_views_t *self, uint32_t index, const char **address_p)
{
    const arl_transport_t *transport = self->session.transport;
    arl_status_t status;

    if (transport->view == NULL) {
        *address_p = self->mapping->import->bases[self->session.offer.tensors[index].alloc];
        return 0;
    }
    self->source = UINT32_MAX; /* what was handed out before is not valid any more */
    self->busy = true;
    arl_call_resume(&self->call);
    status = transport->view(&self->session.pull, self->mapping->import, index, address_p,
                             &self->call.err);
    arl_call_end(&self->call);
    self->busy = false;
    if (status != ARL_OK) {
        (void)arl_raise(state, &self->call.err);
        return -1;
    }
    self->source = index;
    return 0;
}

static int
verify_view(arl_state_t *state, weight_views_t *self, uint32_t index, const arl_view_t *view)
{
    const arl_offer_tensor_t *tensor = &self->session.offer.tensors[index];
    arl_error_t err = ARL_ERROR_INIT;
    arl_status_t status;
    uint64_t sum = 0;

    if (self->verify == ARL_VERIFY_NONE ||
        (self->verify == ARL_VERIFY_SAMPLE && !arl_offer_sampled(&self->session.offer, index))) {
        return 0;
    }
    self->busy = true;
    Py_BEGIN_ALLOW_THREADS
    status = self->session.transport->checksums(&self->session.pull, self->mapping->import, view, 1,
                                                &sum, &err);
    Py_END_ALLOW_THREADS
    self->busy = false;
    if (status == ARL_OK && sum != tensor->checksum) {
        status = arl_error_set(&err, ARL_ERR_SYNC, "verify",
                               "%.*s: the checksum of the mapped bytes is %016llx, the sender's is "
                               "%016llx",
                               (int)tensor->name_length, tensor->name, (unsigned long long)sum,
                               (unsigned long long)tensor->checksum);
    }
    if (status != ARL_OK) {
        (void)arl_raise(state, &err);
        return -1;
    }
    self->session.stats.verified++;
    return 0;
}

/* The block is its process's: a child that ended it would tell the sender that all were read. */
static PyObject *
refuse_forked(arl_state_t *state, const weight_views_t *self)
{
    return arl_raise_format(state, ARL_ERR_PROCESS, "views",
                            "the block of views() belongs to process %lld, and this is its child "
                            "%lld; read the weights there, or pull an offer here",
                            (long long)self->receiver->guard.owner, (long long)getpid());
}

static PyObject *
refuse_busy(void)
{
    PyErr_SetString(PyExc_RuntimeError,
                    "views() waits for a tensor in another thread; use it from one at a time");
    return NULL;
}

static PyObject *
weight_views_next(PyObject *op)
{
    weight_views_t *self = (weight_views_t *)op;
    arl_state_t *state = arl_state_from_type(Py_TYPE(op));
    const arl_offer_tensor_t *tensor;
    const char *address = NULL;
    weight_view_t *view;
    uint32_t index, source;

    if (state == NULL) {
        return NULL;
    }
    if (self->phase != VIEWS_OPEN) {
        return arl_raise_format(state, ARL_ERR_CLOSED, "views",
                                self->phase == VIEWS_NEW ? "views() is for a with statement"
                                                         : "the block of views() has ended");
    }
    if (arl_guard_forked(&self->receiver->guard)) {
        return refuse_forked(state, self);
    }
    if (self->busy) {
        return refuse_busy();
    }
    if (self->next == self->count) {
        return NULL; /* the end of the iteration */
    }
    index = self->order[self->next];
    tensor = &self->session.offer.tensors[index];
    source = self->session.transport->view == NULL ? index : tensor->alias_of;
    if (views_bring(state, self, source, &address) < 0) {
        return NULL;
    }
    view = (weight_view_t *)state->weight_view_type->tp_alloc(state->weight_view_type, 0);
    if (view == NULL) {
        return NULL;
    }
    view->views = (weight_views_t *)Py_NewRef(op);
    view->source = source;
    view->view = arl_offer_tensor_view(&self->session.offer, index, address);
    view->view.device_type = self->mapping->import->device_type;
    view->view.device_index = self->mapping->import->device_index;
    view->name = PyUnicode_DecodeUTF8(tensor->name, (Py_ssize_t)tensor->name_length, NULL);
    if (view->name == NULL || verify_view(state, self, index, &view->view) < 0) {
        Py_DECREF(view);
        return NULL;
    }
    self->next++;
    self->session.stats.tensors++;
    self->session.stats.bytes += arl_view_nbytes(&view->view);
    return Py_BuildValue("(ON)", view->name, view);
}

static PyObject *
weight_views_exit(PyObject *op, PyObject *args)
{
    weight_views_t *self = (weight_views_t *)op;
    arl_state_t *state = arl_state_from_type(Py_TYPE(op));
    arl_error_t reason = ARL_ERROR_INIT;
    PyObject *type = Py_None, *value = Py_None, *traceback = Py_None;
    const char *address;

    if (state == NULL || !PyArg_ParseTuple(args, "|OOO:__exit__", &type, &value, &traceback)) {
        return NULL;
    }
    if (self->phase != VIEWS_OPEN) {
        return Py_NewRef(Py_False);
    }
    if (arl_guard_forked(&self->receiver->guard)) {
        /* What ends the child, as SystemExit does, is not replaced. */
        return type != Py_None ? Py_NewRef(Py_False) : refuse_forked(state, self);
    }
    if (self->busy) {
        return refuse_busy();
    }
    if (type != Py_None) {
        (void)arl_error_set(&reason, ARL_ERR_SYNC, "views",
                            "the code that read the weights raised %s",
                            PyType_Check(type) ? ((PyTypeObject *)type)->tp_name : "an exception");
        views_end(self, &reason);
        return Py_NewRef(Py_False);
    }
    if (self->next < self->count) {
        (void)arl_error_set(&reason, ARL_ERR_SYNC, "views",
                            "the block ended after %u of %u tensors: the rest was not loaded, so "
                            "the weights are torn",
                            self->next, self->count);
        views_end(self, &reason);
        return arl_raise(state, &reason);
    }
    if (self->session.transport->view != NULL &&
        views_bring(state, self, self->session.offer.tensor_count, &address) < 0) {
        views_end(self, &self->call.err);
        return NULL;
    }
    views_end(self, NULL);
    return Py_NewRef(Py_False);
}

static PyObject *
weight_views_get_stats(PyObject *op, void *closure)
{
    weight_views_t *self = (weight_views_t *)op;
    arl_state_t *state = arl_state_from_type(Py_TYPE(op));

    (void)closure;
    if (state == NULL) {
        return NULL;
    }
    if (self->phase != VIEWS_ENDED) {
        return Py_NewRef(Py_None);
    }
    return arl_sync_stats_new(state, &self->session.stats);
}

static int
weight_views_traverse(PyObject *op, visitproc visit, void *arg)
{
    weight_views_t *self = (weight_views_t *)op;

    Py_VISIT(Py_TYPE(op));
    Py_VISIT((PyObject *)self->receiver);
    Py_VISIT(self->offer);
    return 0;
}

static void
weight_views_dealloc(PyObject *op)
{
    weight_views_t *self = (weight_views_t *)op;
    PyTypeObject *type = Py_TYPE(op);

    PyObject_GC_UnTrack(op);
    if (self->phase == VIEWS_OPEN && arl_guard_forked(&self->receiver->guard)) {
        mapping_drop(self->mapping);
        arl_session_forget(&self->session);
    }
    else if (self->phase == VIEWS_OPEN) {
        arl_error_t reason = ARL_ERROR_INIT;

        (void)arl_error_set(&reason, ARL_ERR_SYNC, "views", "the block was left without its end");
        views_end(self, &reason);
    }
    PyMem_Free(self->order);
    Py_CLEAR(self->offer);
    Py_CLEAR(self->receiver);
    type->tp_free(op);
    Py_DECREF(type);
}

/* ---- WeightView ------------------------------------------------------------------------------ */

/* What a DLPack tensor owns: both forms of the struct, its sizes, and a share of the mapping. */
typedef struct exported {
    union {
        arl_dl_managed_t plain;
        arl_dl_managed_versioned_t versioned;
    } dl;
    int64_t shape[ARL_VIEW_DIMS_MAX];
    int64_t strides[ARL_VIEW_DIMS_MAX];
    mapping_t *mapping;
} exported_t;

static void
exported_free(exported_t *exported)
{
    mapping_drop(exported->mapping);
    free(exported);
}

static void
delete_plain(arl_dl_managed_t *managed)
{
    exported_free(managed->manager);
}

static void
delete_versioned(arl_dl_managed_versioned_t *managed)
{
    exported_free(managed->manager);
}

/* A capsule that nobody consumed still owns its tensor. */
static void
delete_capsule(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, ARL_DL_CAPSULE)) {
        arl_dl_managed_t *managed = PyCapsule_GetPointer(capsule, ARL_DL_CAPSULE);

        managed->deleter(managed);
    }
    else if (PyCapsule_IsValid(capsule, ARL_DL_CAPSULE_VERSIONED)) {
        arl_dl_managed_versioned_t *managed =
            PyCapsule_GetPointer(capsule, ARL_DL_CAPSULE_VERSIONED);

        managed->deleter(managed);
    }
}

static void
fill_tensor(exported_t *exported, const arl_view_t *view, arl_dl_tensor_t *tensor)
{
    for (int i = 0; i < view->ndim; i++) {
        exported->shape[i] = view->shape[i];
        exported->strides[i] = view->strides[i] / (int64_t)view->itemsize;
    }
    tensor->data = view->data;
    tensor->device.type = view->device_type == ARL_DEVICE_CUDA ? ARL_DL_CUDA : ARL_DL_CPU;
    tensor->device.id = view->device_index;
    tensor->ndim = view->ndim;
    tensor->dtype = arl_dlpack_from_dtype(view->dtype);
    tensor->shape = exported->shape;
    tensor->strides = exported->strides;
}

static PyObject *
export_view(weight_view_t *self, bool versioned)
{
    exported_t *exported = calloc(1, sizeof(*exported));
    PyObject *capsule;

    if (exported == NULL) {
        return PyErr_NoMemory();
    }
    exported->mapping = self->views->mapping;
    (void)atomic_fetch_add(&exported->mapping->references, 1);
    if (versioned) {
        arl_dl_managed_versioned_t *managed = &exported->dl.versioned;

        managed->version.major = 1;
        managed->flags = ARL_DL_FLAG_READ_ONLY;
        managed->manager = exported;
        managed->deleter = delete_versioned;
        fill_tensor(exported, &self->view, &managed->tensor);
        capsule = PyCapsule_New(managed, ARL_DL_CAPSULE_VERSIONED, delete_capsule);
    }
    else { /* has no way to say read-only: the mapping is private, so a write stays here */
        arl_dl_managed_t *managed = &exported->dl.plain;

        managed->manager = exported;
        managed->deleter = delete_plain;
        fill_tensor(exported, &self->view, &managed->tensor);
        capsule = PyCapsule_New(managed, ARL_DL_CAPSULE, delete_capsule);
    }
    if (capsule == NULL) {
        exported_free(exported);
    }
    return capsule;
}

/* A pair of small integers; None leaves them as they are. */
static int
read_pair(PyObject *pair, const char *name, int *first, int *second)
{
    if (pair == Py_None) {
        return 0;
    }
    if (!PyTuple_Check(pair)) {
        PyErr_Format(PyExc_TypeError, "__dlpack__: %s is a pair of int or None", name);
        return -1;
    }
    return PyArg_ParseTuple(pair, "ii", first, second) ? 0 : -1;
}

static PyObject *
weight_view_dlpack(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"stream", "max_version", "dl_device", "copy", NULL};
    weight_view_t *self = (weight_view_t *)op;
    PyObject *stream = Py_None, *max_version = Py_None, *device = Py_None, *copy = Py_None;
    arl_state_t *state = arl_state_from_type(Py_TYPE(op));
    int major = 0, minor = 0, type = ARL_DL_CPU, index = 0;

    if (state == NULL || !PyArg_ParseTupleAndKeywords(args, kwargs, "|$OOOO:__dlpack__", names,
                                                      &stream, &max_version, &device, &copy)) {
        return NULL;
    }
    if (self->views->phase != VIEWS_OPEN) {
        return arl_raise_format(state, ARL_ERR_CLOSED, "views",
                                "the block of views() has ended, and its tensors with it");
    }
    if (self->views->session.transport->view != NULL && self->views->source != self->source) {
        return arl_raise_format(state, ARL_ERR_CLOSED, "views",
                                "%s has made room for the tensor after it: through a ring each is "
                                "valid until the next is asked for",
                                PyUnicode_AsUTF8(self->name));
    }
    if (read_pair(max_version, "max_version", &major, &minor) < 0 ||
        read_pair(device, "dl_device", &type, &index) < 0) {
        return NULL;
    }
    if (type != ARL_DL_CPU || index != 0 || copy == Py_True) {
        PyErr_SetString(PyExc_BufferError,
                        "__dlpack__: a weight view is neither copied nor moved to a device");
        return NULL;
    }
    return export_view(self, major >= 1);
}

static PyObject *
weight_view_dlpack_device(PyObject *op, PyObject *unused)
{
    const arl_view_t *view = &((weight_view_t *)op)->view;

    (void)unused;
    return Py_BuildValue("(ii)", view->device_type == ARL_DEVICE_CUDA ? ARL_DL_CUDA : ARL_DL_CPU,
                         view->device_index);
}

static PyObject *
weight_view_get_name(PyObject *op, void *closure)
{
    (void)closure;
    return Py_NewRef(((weight_view_t *)op)->name);
}

static PyObject *
weight_view_get_dtype(PyObject *op, void *closure)
{
    (void)closure;
    return PyUnicode_FromString(arl_dtype_name(((weight_view_t *)op)->view.dtype));
}

static PyObject *
weight_view_get_shape(PyObject *op, void *closure)
{
    const arl_view_t *view = &((weight_view_t *)op)->view;
    PyObject *shape = PyTuple_New(view->ndim);

    (void)closure;
    for (int i = 0; shape != NULL && i < view->ndim; i++) {
        PyObject *size = PyLong_FromLongLong(view->shape[i]);

        if (size == NULL) {
            Py_CLEAR(shape);
        }
        else {
            PyTuple_SET_ITEM(shape, i, size);
        }
    }
    return shape;
}

static PyObject *
weight_view_get_nbytes(PyObject *op, void *closure)
{
    (void)closure;
    return PyLong_FromLongLong(arl_view_nbytes(&((weight_view_t *)op)->view));
}

static PyObject *
weight_view_repr(PyObject *op)
{
    const weight_view_t *self = (const weight_view_t *)op;
    char text[96];

    arl_view_describe(&self->view, text, sizeof(text));
    return PyUnicode_FromFormat("<WeightView %U: %s%s>", self->name, text,
                                self->views->phase == VIEWS_OPEN ? "" : ", ended");
}

static int
weight_view_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    Py_VISIT((PyObject *)((weight_view_t *)op)->views);
    return 0;
}

static void
weight_view_dealloc(PyObject *op)
{
    weight_view_t *self = (weight_view_t *)op;
    PyTypeObject *type = Py_TYPE(op);

    PyObject_GC_UnTrack(op);
    Py_CLEAR(self->name);
    Py_CLEAR(self->views);
    type->tp_free(op);
    Py_DECREF(type);
}

/* ---- types ----------------------------------------------------------------------------------- */

PyDoc_STRVAR(weight_views_doc,
             "What WeightReceiver.views() returns: a context manager that is an iterator over\n"
             "(name, WeightView) inside of its block.");

PyDoc_STRVAR(views_enter_doc,
             "__enter__($self, /)\n--\n\nValidate the offer and map the sender's memory.");
PyDoc_STRVAR(views_exit_doc, "__exit__($self, /, *exc_info)\n--\n\n"
                             "End the pull; with success when all tensors were taken.");

static PyMethodDef weight_views_type_methods[] = {
    {"__enter__", weight_views_enter, METH_NOARGS, views_enter_doc},
    {"__exit__", weight_views_exit, METH_VARARGS, views_exit_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef weight_views_getset[] = {
    {"stats", weight_views_get_stats, NULL, "SyncStats or None: once the block has ended", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot weight_views_slots[] = {
    {Py_tp_doc, (void *)weight_views_doc},   {Py_tp_dealloc, weight_views_dealloc},
    {Py_tp_traverse, weight_views_traverse}, {Py_tp_iter, PyObject_SelfIter},
    {Py_tp_iternext, weight_views_next},     {Py_tp_methods, weight_views_type_methods},
    {Py_tp_getset, weight_views_getset},     {0, NULL},
};

static PyType_Spec weight_views_spec = {
    .name = "arctic_rl_c.WeightViews",
    .basicsize = sizeof(weight_views_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = weight_views_slots,
};

PyDoc_STRVAR(weight_view_doc,
             "One tensor of the sender, in its memory. Read it with torch.from_dlpack() or\n"
             "numpy.from_dlpack(), inside of the block of WeightReceiver.views() only; what still\n"
             "refers to it afterwards keeps the memory mapped, and its content may change.");

PyDoc_STRVAR(dlpack_doc,
             "__dlpack__($self, /, *, stream=None, max_version=None, dl_device=None, copy=None)\n"
             "--\n\nExport as a DLPack capsule, flagged read-only from version 1.0 on.");
PyDoc_STRVAR(dlpack_device_doc,
             "__dlpack_device__($self, /)\n--\n\nReturn DLPack's (device type, device id).");

static PyMethodDef weight_view_type_methods[] = {
    {"__dlpack__", (PyCFunction)(void (*)(void))weight_view_dlpack, METH_VARARGS | METH_KEYWORDS,
     dlpack_doc},
    {"__dlpack_device__", weight_view_dlpack_device, METH_NOARGS, dlpack_device_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef weight_view_getset[] = {
    {"name", weight_view_get_name, NULL, "str: the sender's name of the tensor", NULL},
    {"dtype", weight_view_get_dtype, NULL, "str: such as bfloat16", NULL},
    {"shape", weight_view_get_shape, NULL, "tuple of int", NULL},
    {"nbytes", weight_view_get_nbytes, NULL, "int: bytes of its elements", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot weight_view_slots[] = {
    {Py_tp_doc, (void *)weight_view_doc},
    {Py_tp_dealloc, weight_view_dealloc},
    {Py_tp_traverse, weight_view_traverse},
    {Py_tp_repr, weight_view_repr},
    {Py_tp_methods, weight_view_type_methods},
    {Py_tp_getset, weight_view_getset},
    {0, NULL},
};

static PyType_Spec weight_view_spec = {
    .name = "arctic_rl_c.WeightView",
    .basicsize = sizeof(weight_view_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = weight_view_slots,
};

PyMethodDef arl_weight_views_methods[] = {{NULL, NULL, 0, NULL}};

int
arl_weight_views_exec(PyObject *module, arl_state_t *state)
{
    if (arl_state_add_type(module, &weight_views_spec, &state->weight_views_type) < 0) {
        return -1;
    }
    return arl_state_add_type(module, &weight_view_spec, &state->weight_view_type);
}
