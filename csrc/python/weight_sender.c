/* SPDX-License-Identifier: Apache-2.0 */
#include "python/args.h"
#include "python/errors.h"
#include "python/weight_feed.h"
#include "python/weights.h"

#include "transport/arl_sender.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

typedef struct weight_sender {
    PyObject_HEAD
    arl_guard_t guard;
    arl_sender_t sender;
    arl_params_t params;
    PyObject *transport_name; /* str or None; the choice borrows its text */
    double timeout;
} weight_sender_t;

/* ---- making ---------------------------------------------------------------------------------- */

/* None, False or True to -1, 0 or 1. */
static int
read_wish(PyObject *value, const char *name, int *wish_p)
{
    if (value == NULL || value == Py_None) {
        *wish_p = -1;
        return 0;
    }
    if (!PyBool_Check(value)) {
        PyErr_Format(PyExc_TypeError, "WeightSender: %s is True, False or None, not %s", name,
                     arl_type_name(value));
        return -1;
    }
    *wish_p = value == Py_True;
    return 0;
}

static int
read_options(weight_sender_t *self, PyObject *const *wishes, PyObject *transport, PyObject *timeout,
             PyObject *verify)
{
    arl_choice_t *choice = &self->sender.choice;

    if (read_wish(wishes[0], "cuda_ipc", &choice->cuda_ipc) < 0 ||
        read_wish(wishes[1], "low_memory", &choice->low_memory) < 0 ||
        read_wish(wishes[2], "colocated", &choice->colocated) < 0 ||
        arl_seconds(timeout, 60.0, &self->timeout) < 0 ||
        arl_verify_from(verify, &self->sender.verify) < 0) {
        return -1;
    }
    self->transport_name = Py_NewRef(transport);
    if (transport != Py_None) {
        choice->transport = PyUnicode_AsUTF8(transport);
        if (choice->transport == NULL) {
            return -1;
        }
    }
    return 0;
}

/* NULL leaves a default. */
static int
read_counts(weight_sender_t *self, PyObject *receivers, PyObject *senders, PyObject *ring_bytes)
{
    static const char call[] = "WeightSender";
    int64_t number;

    self->sender.receivers = 1;
    self->sender.senders = 1;
    if (receivers != NULL) {
        if (arl_args_integer(call, "receivers", receivers, 1, ARL_OFFER_RECEIVERS_MAX, &number) <
            0) {
            return -1;
        }
        self->sender.receivers = (uint32_t)number;
    }
    if (senders != NULL) {
        if (arl_args_integer(call, "senders", senders, 1, ARL_OFFER_SENDERS_MAX, &number) < 0) {
            return -1;
        }
        self->sender.senders = (uint32_t)number;
    }
    if (ring_bytes != NULL) {
        if (arl_args_integer(call, "ring_bytes", ring_bytes, 0, INT64_MAX, &number) < 0) {
            return -1;
        }
        self->sender.ring_bytes = number;
    }
    return 0;
}

/* Tensors that come later will be on `device`, or where the first one that is there is. */
static int
place_specifications(arl_params_t *params, PyObject *device)
{
    int64_t ordinal = 0;

    if (device != Py_None) {
        PyObject *index = PyObject_GetAttrString(device, "index"); /* torch.device has one */
        int status;

        if (index == NULL && !PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        if (index == NULL || PyCallable_Check(index)) { /* a str's is a method */
            PyErr_Clear();
            Py_XSETREF(index, Py_NewRef(device));
        }
        status = arl_args_integer("WeightSender", "device", index, 0, INT_MAX, &ordinal);
        Py_DECREF(index);
        if (status < 0) {
            return -1;
        }
    }
    for (Py_ssize_t i = 0; device == Py_None && i < params->count; i++) {
        if (params->items[i].tensor.owner != NULL) {
            ordinal = params->items[i].tensor.view.device_index;
            break;
        }
    }
    for (Py_ssize_t i = 0; i < params->count; i++) {
        if (params->items[i].tensor.owner == NULL) {
            params->items[i].tensor.view.device_index = (int)ordinal;
        }
    }
    return 0;
}

static PyObject *
weight_sender_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"params",    "cuda_ipc", "low_memory", "transport",  "receivers",
                            "colocated", "timeout",  "verify",     "ring_bytes", "keep_mapped",
                            "device",    "senders",  NULL};
    PyObject *params, *transport = Py_None, *timeout = NULL, *verify = NULL, *device = Py_None;
    PyObject *wishes[3] = {NULL, NULL, NULL};
    PyObject *receivers = NULL, *senders = NULL, *ring_bytes = NULL;
    int keep_mapped = 0;
    arl_error_t err = ARL_ERROR_INIT;
    arl_state_t *state = arl_state_from_type(type);
    weight_sender_t *self;

    if (state == NULL || !PyArg_ParseTupleAndKeywords(
                             args, kwargs, "O|$OOOOOOOOpOO:WeightSender", names, &params,
                             &wishes[0], &wishes[1], &transport, &receivers, &wishes[2], &timeout,
                             &verify, &ring_bytes, &keep_mapped, &device, &senders)) {
        return NULL;
    }
    self = (weight_sender_t *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    arl_guard_init(&self->guard, "WeightSender");
    if (arl_sender_init(&self->sender, &err) != ARL_OK) {
        (void)arl_raise(state, &err);
        goto release;
    }
    self->sender.keep_mapped = keep_mapped != 0;
    if (read_options(self, wishes, transport, timeout, verify) < 0 ||
        read_counts(self, receivers, senders, ring_bytes) < 0 ||
        arl_params_read(state, params, ARL_ROLE_SENDER, &self->params) < 0 ||
        place_specifications(&self->params, device) < 0) {
        goto release;
    }
    if (self->params.count == 0) {
        PyErr_SetString(PyExc_ValueError, "WeightSender: there are no parameters");
        goto release;
    }
    return (PyObject *)self;
release:
    Py_DECREF(self);
    return NULL;
}

/* ---- calls ----------------------------------------------------------------------------------- */

/* The views of the parameters, as they are now, for the transports. PyMem_Free it. */
static arl_source_t *
make_sources(arl_state_t *state, arl_params_t *params)
{
    arl_source_t *sources;
    bool changed;

    if (arl_params_refresh(state, params, ARL_ROLE_SENDER, &changed) < 0) {
        return NULL;
    }
    sources = PyMem_New(arl_source_t, (size_t)params->count);
    if (sources == NULL) {
        (void)PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < params->count; i++) {
        const arl_param_t *param = &params->items[i];

        sources[i] = (arl_source_t){param->text, param->length, param->tensor.view};
    }
    return sources;
}

static int
read_version(PyObject *value, uint64_t *version_p)
{
    PyObject *index;

    *version_p = 0;
    if (value == NULL || value == Py_None) {
        return 0;
    }
    if (!PyIndex_Check(value)) {
        PyErr_Format(PyExc_TypeError, "offer: version is an integer, not %s", arl_type_name(value));
        return -1;
    }
    index = PyNumber_Index(value);
    if (index == NULL) {
        return -1;
    }
    *version_p = PyLong_AsUnsignedLongLong(index);
    if (PyErr_Occurred()) {
        PyErr_Clear();
        PyErr_Format(PyExc_OverflowError, "offer: version is 1 to 2**64 - 1, not %R", index);
        Py_DECREF(index);
        return -1;
    }
    Py_DECREF(index);
    if (*version_p == 0) {
        PyErr_SetString(PyExc_ValueError, "offer: versions begin at 1");
        return -1;
    }
    return 0;
}

static PyObject *
offer_bytes(arl_state_t *state, weight_sender_t *self, uint64_t version, void *stream,
            double seconds)
{
    arl_source_t *sources;
    uint8_t *bytes = NULL;
    size_t size = 0;
    PyObject *result;
    arl_call_t call;
    arl_status_t status;

    sources = make_sources(state, &self->params);
    if (sources == NULL) {
        return NULL;
    }
    arl_call_begin(&call, seconds);
    status = arl_sender_offer(&self->sender, sources, (uint32_t)self->params.count, version, stream,
                              &call.deadline, &bytes, &size, &call.err);
    arl_call_end(&call);
    PyMem_Free(sources);
    if (status != ARL_OK) {
        return arl_raise(state, &call.err);
    }
    result = PyBytes_FromStringAndSize((const char *)bytes, (Py_ssize_t)size);
    free(bytes);
    if (result == NULL) {
        arl_sender_abandon(&self->sender, false);
    }
    return result;
}

static PyObject *
weight_sender_offer(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"version", "timeout", "stream", NULL};
    weight_sender_t *self = (weight_sender_t *)op;
    PyObject *version = NULL, *timeout = NULL, *stream = Py_None, *result;
    arl_state_t *state = arl_state_from_type(Py_TYPE(op));
    void *stream_pointer = NULL;
    uint64_t number;
    double seconds;

    if (state == NULL || !PyArg_ParseTupleAndKeywords(args, kwargs, "|$OOO:offer", names, &version,
                                                      &timeout, &stream)) {
        return NULL;
    }
    if (read_version(version, &number) < 0 || arl_seconds(timeout, self->timeout, &seconds) < 0) {
        return NULL;
    }
    if (arl_guard_enter(state, &self->guard, "offer") < 0) {
        return NULL;
    }
    if (arl_stream_from(state, stream, &self->params, &stream_pointer) < 0) {
        arl_guard_leave(&self->guard);
        return NULL;
    }
    result = offer_bytes(state, self, number, stream_pointer, seconds);
    arl_guard_leave(&self->guard);
    return result;
}

/* The GIL is released for all of it; a feed takes it back for each tensor. */
static PyObject *
serve_offer(arl_state_t *state, weight_sender_t *self, arl_weight_feed_t *feed, double seconds)
{
    arl_sync_stats_t stats;
    arl_call_t call;
    arl_status_t status;

    if (feed != NULL) {
        feed->thread = &call.thread;
    }
    arl_call_begin(&call, seconds);
    status = arl_sender_serve(&self->sender, feed == NULL ? NULL : &feed->feed, &call.deadline,
                              &stats, &call.err);
    arl_call_end(&call);
    return status == ARL_OK ? arl_sync_stats_new(state, &stats) : arl_raise(state, &call.err);
}

static PyObject *
weight_sender_serve(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tensors", "timeout", "stream", NULL};
    weight_sender_t *self = (weight_sender_t *)op;
    PyObject *tensors = Py_None, *timeout = NULL, *stream = Py_None, *result = NULL;
    arl_state_t *state = arl_state_from_type(Py_TYPE(op));
    arl_weight_feed_t feed;
    double seconds;

    if (state == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "|O$OO:serve", names, &tensors, &timeout,
                                     &stream) ||
        arl_seconds(timeout, self->timeout, &seconds) < 0 ||
        arl_guard_enter(state, &self->guard, "serve") < 0) {
        return NULL;
    }
    if (tensors == Py_None) {
        result = serve_offer(state, self, NULL, seconds);
    }
    else if (arl_weight_feed_open(state, tensors, &self->params, &feed) == 0) {
        if (arl_stream_from(state, stream, &self->params, &feed.feed.stream) == 0) {
            result = serve_offer(state, self, &feed, seconds);
        }
        arl_weight_feed_close(&feed);
    }
    arl_guard_leave(&self->guard);
    return result;
}

static PyObject *
join_offer(arl_state_t *state, weight_sender_t *self, const Py_buffer *offer, uint32_t rank,
           void *stream, double seconds)
{
    arl_source_t *sources;
    arl_sync_stats_t stats;
    arl_call_t call;
    arl_status_t status;

    sources = make_sources(state, &self->params);
    if (sources == NULL) {
        return NULL;
    }
    arl_call_begin(&call, seconds);
    status = arl_sender_join(&self->sender, sources, (uint32_t)self->params.count, offer->buf,
                             (size_t)offer->len, rank, stream, &call.deadline, &stats, &call.err);
    arl_call_end(&call);
    PyMem_Free(sources);
    return status == ARL_OK ? arl_sync_stats_new(state, &stats) : arl_raise(state, &call.err);
}

static PyObject *
weight_sender_join(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"offer", "rank", "timeout", "stream", NULL};
    weight_sender_t *self = (weight_sender_t *)op;
    PyObject *place, *timeout = NULL, *stream = Py_None, *result = NULL;
    arl_state_t *state = arl_state_from_type(Py_TYPE(op));
    void *stream_pointer = NULL;
    Py_buffer offer;
    double seconds;
    int64_t rank;

    if (state == NULL || !PyArg_ParseTupleAndKeywords(args, kwargs, "y*O|$OO:join", names, &offer,
                                                      &place, &timeout, &stream)) {
        return NULL;
    }
    if (arl_args_integer("join", "rank", place, INT64_MIN, INT64_MAX, &rank) < 0) {
        goto release_offer;
    }
    if (rank < 1 || rank >= ARL_OFFER_SENDERS_MAX) {
        PyErr_Format(PyExc_ValueError,
                     "join: rank is 1 to senders - 1, not %lld; rank 0 calls offer() and serve()",
                     (long long)rank);
        goto release_offer;
    }
    if (arl_seconds(timeout, self->timeout, &seconds) < 0 ||
        arl_guard_enter(state, &self->guard, "join") < 0) {
        goto release_offer;
    }
    if (arl_stream_from(state, stream, &self->params, &stream_pointer) == 0) {
        result = join_offer(state, self, &offer, (uint32_t)rank, stream_pointer, seconds);
    }
    arl_guard_leave(&self->guard);
release_offer:
    PyBuffer_Release(&offer);
    return result;
}

static int
end_offer(arl_state_t *state, weight_sender_t *self, double seconds)
{
    arl_call_t call;
    arl_status_t status;

    arl_call_begin(&call, seconds);
    status = arl_sender_release(&self->sender, &call.deadline, &call.err);
    arl_call_end(&call);
    if (status != ARL_OK) {
        (void)arl_raise(state, &call.err);
        return -1;
    }
    return 0;
}

static PyObject *
weight_sender_release(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"timeout", NULL};
    weight_sender_t *self = (weight_sender_t *)op;
    PyObject *timeout = NULL;
    arl_state_t *state = arl_state_from_type(Py_TYPE(op));
    double seconds;
    int status;

    if (state == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "|$O:release", names, &timeout) ||
        arl_seconds(timeout, self->timeout, &seconds) < 0 ||
        arl_guard_enter(state, &self->guard, "release") < 0) {
        return NULL;
    }
    status = end_offer(state, self, seconds);
    arl_guard_leave(&self->guard);
    return status < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
weight_sender_close(PyObject *op, PyObject *unused)
{
    weight_sender_t *self = (weight_sender_t *)op;
    arl_state_t *state = arl_state_from_type(Py_TYPE(op));
    int status;

    (void)unused;
    if (state == NULL) {
        return NULL;
    }
    if (self->guard.closed) {
        return Py_NewRef(Py_None);
    }
    if (arl_guard_enter(state, &self->guard, "close") < 0) {
        return NULL;
    }
    status = end_offer(state, self, self->timeout);
    arl_guard_leave(&self->guard);
    if (status < 0) {
        return NULL;
    }
    arl_sender_close(&self->sender, false);
    self->guard.closed = true;
    arl_params_clear(&self->params);
    return Py_NewRef(Py_None);
}

static PyObject *
weight_sender_live_exports(PyObject *op, PyObject *unused)
{
    (void)unused;
    return PyLong_FromLongLong(arl_sender_live(&((weight_sender_t *)op)->sender));
}

static PyObject *
weight_sender_exit(PyObject *op, PyObject *args)
{
    (void)args;
    return weight_sender_close(op, NULL);
}

static PyObject *
weight_sender_get_version(PyObject *op, void *closure)
{
    const uint64_t epoch = ((weight_sender_t *)op)->sender.epoch;

    (void)closure;
    return epoch == 0 ? Py_NewRef(Py_None) : PyLong_FromUnsignedLongLong(epoch);
}

/* ---- type ------------------------------------------------------------------------------------ */

static int
weight_sender_traverse(PyObject *op, visitproc visit, void *arg)
{
    weight_sender_t *self = (weight_sender_t *)op;

    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->transport_name);
    return arl_params_traverse(&self->params, visit, arg);
}

static int
weight_sender_clear(PyObject *op)
{
    weight_sender_t *self = (weight_sender_t *)op;

    self->guard.closed = true; /* the offer borrows names from what is let go here */
    arl_params_clear(&self->params);
    return 0; /* transport_name is a str: no cycle goes through it, and the choice borrows it */
}

static void
weight_sender_dealloc(PyObject *op)
{
    weight_sender_t *self = (weight_sender_t *)op;
    PyTypeObject *type = Py_TYPE(op);

    PyObject_GC_UnTrack(op);
    arl_sender_close(&self->sender, arl_guard_forked(&self->guard));
    (void)weight_sender_clear(op);
    Py_CLEAR(self->transport_name);
    type->tp_free(op);
    Py_DECREF(type);
}

PyDoc_STRVAR(
    weight_sender_doc,
    "WeightSender(params, *, cuda_ipc=None, low_memory=None, transport=None, receivers=1,\n"
    "             colocated=None, timeout=60.0, verify=None, ring_bytes=0,\n"
    "             keep_mapped=False, device=None, senders=1)\n--\n\n"
    "The trainer's side of weight sync.\n\n"
    "params: mapping of name to tensor, or an iterable of pairs such as\n"
    "model.named_parameters(). Tensors of any strides and any fixed-width dtype, all in CPU\n"
    "memory or all in CUDA memory; several names may share memory (tied weights). They are\n"
    "held, not copied: offer() sends the values they have then, also after p.data was replaced.\n"
    "For a transport that streams, a value may be (dtype, shape) of a tensor that serve() is\n"
    "given later, on `device` (an ordinal or torch.device; default: that of the others, or 0).\n\n"
    "cuda_ipc, low_memory: True, False, or None for whatever fits. colocated: whether the\n"
    "receivers share this GPU (or host). transport: one by name, host_shm, cuda_ipc, ring or\n"
    "nccl. What cannot be had is TransportUnavailableError, what contradicts itself ValueError,\n"
    "both from offer().\n\n"
    "receivers: how many pull each offer. timeout: seconds for each call that waits, unless the\n"
    "call is given its own. verify: \"all\" or \"sample\" puts checksums into the offers, for\n"
    "pull(verify=). ring_bytes: size of the ring of low_memory, or of what nccl and host_shm pass\n"
    "GPU memory through; 0 is the default size.\n"
    "keep_mapped=True keeps what the next offer can use again (over host_shm the shared memory,\n"
    "which is most of the time of an offer), until close().\n"
    "senders: how many share the work over nccl, 1 to 8, this one among them. The others hold the\n"
    "same tensors on GPUs of their own and join() each offer. This sender alone is rank 0.\n\n"
    "Use: offer(), send the bytes to the receivers, serve(), release(). One thread at a time.");

PyDoc_STRVAR(
    offer_doc,
    "offer($self, /, *, version=None, timeout=None, stream=None)\n--\n\n"
    "Offer the parameters as they are now; return the offer, as bytes for the receivers.\n\n"
    "It replaces the offer before it. version: a number above the last one; by default the next.\n"
    "stream: torch.cuda.Stream or CUstream that wrote the parameters last; None is torch's "
    "current\n"
    "stream, or the default stream. Over host_shm the bytes are copied here, and the parameters\n"
    "may change as soon as this returns; over cuda_ipc they must stay as they are until every\n"
    "receiver has finished (serve()).\n\n"
    "Raises TransportUnavailableError, OSError (shared memory is full), ValueError (tensors that\n"
    "cannot be sent), PeerTimeoutError (receivers still read the memory of the offer before).");

PyDoc_STRVAR(
    serve_doc,
    "serve($self, /, tensors=None, *, timeout=None, stream=None)\n--\n\n"
    "Wait until every receiver has finished with the offer; return SyncStats.\n\n"
    "For a transport that streams (ring, nccl) this is what moves the bytes, so it runs at the\n"
    "same time as pull(). tensors: an iterable of (name, tensor) in the order of the parameters,\n"
    "for those that were announced as (dtype, shape): each is asked for when it is sent, and may\n"
    "be freed when the next one is. stream: as in offer(), of these tensors.\n\n"
    "Raises PeerTimeoutError when one has not come or not finished in time, PeerLostError when\n"
    "one died, WeightSyncError with what one reported; error.rank is its number;\n"
    "WeightMismatchError when `tensors` gives other names, dtypes or shapes than were offered,\n"
    "and whatever the iterable itself raises.");

PyDoc_STRVAR(
    join_doc,
    "join($self, /, offer, rank, *, timeout=None, stream=None)\n--\n\n"
    "Send this sender's share of another sender's offer, until it has arrived; return "
    "SyncStats.\n\n"
    "offer: bytes from the offer() of a WeightSender over nccl with senders=. It runs at the same\n"
    "time as that one's serve() and the receivers' pull(). rank: 1 to senders - 1, a different "
    "one\n"
    "for each that joins, and the same in every sync, so that the communicator can be kept. The\n"
    "parameters have the names, dtypes, shapes and order of the offer's, and should have its\n"
    "values; they must stay as they are until this returns. The split is fixed by rank: of the\n"
    "buckets, every senders-th is this sender's. receivers=, senders= and ring_bytes= of this\n"
    "object are not used. An offer of its own is released. stream: as in offer().\n\n"
    "Raises WeightMismatchError when the tensors differ, TransportUnavailableError when NCCL's\n"
    "versions, settings or GPUs do not go together, ValueError for an offer or a rank that cannot\n"
    "be joined, PeerTimeoutError, PeerLostError, and WeightSyncError with what another reported.");

PyDoc_STRVAR(release_doc,
             "release($self, /, *, timeout=None)\n--\n\n"
             "End the offer and give its memory back. Receivers that have not begun are refused.\n"
             "Does nothing without an offer.\n\n"
             "Raises PeerTimeoutError when receivers still read memory that will be used again\n"
             "(cuda_ipc, keep_mapped); the offer then stays.");

PyDoc_STRVAR(close_doc, "close($self, /)\n--\n\n"
                        "End the offer and let go of the parameters. Twice is fine.");

PyDoc_STRVAR(live_exports_doc,
             "live_exports($self, /)\n--\n\n"
             "Number of offers whose memory is still held, by this object or by a receiver in "
             "this process.");

PyDoc_STRVAR(enter_doc, "__enter__($self, /)\n--\n\nReturn self.");
PyDoc_STRVAR(exit_doc, "__exit__($self, /, *exc_info)\n--\n\nClose.");

static PyMethodDef weight_sender_type_methods[] = {
    {"offer", (PyCFunction)(void (*)(void))weight_sender_offer, METH_VARARGS | METH_KEYWORDS,
     offer_doc},
    {"serve", (PyCFunction)(void (*)(void))weight_sender_serve, METH_VARARGS | METH_KEYWORDS,
     serve_doc},
    {"join", (PyCFunction)(void (*)(void))weight_sender_join, METH_VARARGS | METH_KEYWORDS,
     join_doc},
    {"release", (PyCFunction)(void (*)(void))weight_sender_release, METH_VARARGS | METH_KEYWORDS,
     release_doc},
    {"close", weight_sender_close, METH_NOARGS, close_doc},
    {"live_exports", weight_sender_live_exports, METH_NOARGS, live_exports_doc},
    {"__enter__", arl_guarded_enter, METH_NOARGS, enter_doc},
    {"__exit__", weight_sender_exit, METH_VARARGS, exit_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef weight_sender_getset[] = {
    {"version", weight_sender_get_version, NULL,
     "int or None: version of the last offer; None before the first", NULL},
    {"closed", arl_guarded_get_closed, NULL, "bool: whether close() was called", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot weight_sender_slots[] = {
    {Py_tp_doc, (void *)weight_sender_doc}, {Py_tp_new, weight_sender_new},
    {Py_tp_dealloc, weight_sender_dealloc}, {Py_tp_traverse, weight_sender_traverse},
    {Py_tp_clear, weight_sender_clear},     {Py_tp_methods, weight_sender_type_methods},
    {Py_tp_getset, weight_sender_getset},   {0, NULL},
};

static PyType_Spec weight_sender_spec = {
    .name = "arctic_rl_c.WeightSender",
    .basicsize = sizeof(weight_sender_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = weight_sender_slots,
};

PyMethodDef arl_weight_sender_methods[] = {{NULL, NULL, 0, NULL}};

int
arl_weight_sender_exec(PyObject *module, arl_state_t *state)
{
    return arl_state_add_type(module, &weight_sender_spec, &state->weight_sender_type);
}
