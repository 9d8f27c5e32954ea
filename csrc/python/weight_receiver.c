/* SPDX-License-Identifier: Apache-2.0 */
#include "python/weight_receiver.h"

#include "python/errors.h"

#include <stdlib.h>
#include <string.h>

/* Never synced, wherever they stand in a name (contract 6.4). */
static const char *const non_synced_default[] = {
    ".inv_freq",      ".weight_scale", ".input_scale",   ".weight_zero_point",
    ".weight_qzeros", ".weight_g_idx", ".weight_packed", ".weight_shape",
};

/* ---- making ---------------------------------------------------------------------------------- */

/* The bindings, from the views as they are now. */
static int
bind_params(arl_state_t *state, arl_weight_receiver_t *self)
{
    arl_error_t err = ARL_ERROR_INIT;
    arl_binding_set_t *set = &self->receiver.set;

    for (Py_ssize_t i = 0; i < self->params.count; i++) {
        const arl_param_t *param = &self->params.items[i];

        self->bindings[i] = (arl_binding_t){
            .name = param->text,
            .name_length = param->length,
            .expected = param->tensor.owner == NULL,
            .dst = param->tensor.view,
            .dim = param->dim,
            .start = param->start,
            .full = param->full,
        };
    }
    arl_receiver_rebind(&self->receiver);
    arl_binding_set_free(set);
    set->bindings = self->bindings;
    set->count = (uint32_t)self->params.count;
    if (arl_binding_set_init(set, &err) != ARL_OK) {
        (void)arl_raise(state, &err);
        return -1;
    }
    return 0;
}

static int
text_of(PyObject *object, const char *what, const char **text_p, Py_ssize_t *length_p)
{
    if (!PyUnicode_Check(object)) {
        PyErr_Format(PyExc_TypeError, "WeightReceiver: %s are str, not %s", what,
                     arl_type_name(object));
        return -1;
    }
    *text_p = PyUnicode_AsUTF8AndSize(object, length_p);
    return *text_p == NULL ? -1 : 0;
}

/* Returns a tuple (of name, target, name, target, …) that owns the texts. */
static PyObject *
read_aliases(arl_weight_receiver_t *self, PyObject *aliases)
{
    PyObject *items, *texts;
    Py_ssize_t count;

    if (aliases == Py_None) {
        return PyTuple_New(0);
    }
    if (!PyDict_Check(aliases) && PyObject_HasAttrStringWithError(aliases, "items") <= 0) {
        PyErr_Format(PyExc_TypeError, "WeightReceiver: aliases maps names to names, got %s",
                     arl_type_name(aliases));
        return NULL;
    }
    items = PyMapping_Items(aliases);
    if (items == NULL) {
        return NULL;
    }
    count = PyList_GET_SIZE(items);
    texts = PyTuple_New(2 * count);
    self->aliases = PyMem_New(arl_alias_t, (size_t)count + 1);
    if (texts == NULL || self->aliases == NULL) {
        goto release;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *pair = PyList_GET_ITEM(items, i); /* borrowed from items */
        arl_alias_t *alias = &self->aliases[i];
        PyObject *name, *target;
        Py_ssize_t length, target_length;

        if (!PyTuple_Check(pair)) {
            PyErr_SetString(PyExc_TypeError, "WeightReceiver: aliases maps names to names");
            goto release;
        }
        if (!PyArg_ParseTuple(pair, "OO;WeightReceiver: aliases maps names to names", &name,
                              &target) ||
            text_of(name, "aliases", &alias->name, &length) < 0 ||
            text_of(target, "aliases", &alias->target, &target_length) < 0) {
            goto release;
        }
        alias->name_length = (uint32_t)length;
        alias->target_length = (uint32_t)target_length;
        PyTuple_SET_ITEM(texts, 2 * i, Py_NewRef(name));
        PyTuple_SET_ITEM(texts, 2 * i + 1, Py_NewRef(target));
    }
    Py_DECREF(items);
    self->receiver.set.aliases = self->aliases;
    self->receiver.set.alias_count = (uint32_t)count;
    return texts;
release:
    if (!PyErr_Occurred()) {
        (void)PyErr_NoMemory();
    }
    Py_XDECREF(texts);
    Py_DECREF(items);
    return NULL;
}

/* Returns a tuple that owns the texts; empty for the default ones. */
static PyObject *
read_excluded(arl_weight_receiver_t *self, PyObject *parts)
{
    const Py_ssize_t standard = sizeof(non_synced_default) / sizeof(non_synced_default[0]);
    PyObject *texts = parts == Py_None ? PyTuple_New(0) : PySequence_Tuple(parts);
    Py_ssize_t count;

    if (texts == NULL) {
        return NULL;
    }
    if (PyUnicode_Check(parts)) {
        PyErr_SetString(PyExc_TypeError, "WeightReceiver: non_synced is a sequence of str");
        Py_DECREF(texts);
        return NULL;
    }
    count = parts == Py_None ? standard : PyTuple_GET_SIZE(texts);
    self->excluded = PyMem_New(arl_text_t, (size_t)count + 1);
    if (self->excluded == NULL) {
        (void)PyErr_NoMemory();
        Py_DECREF(texts);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        arl_text_t *text = &self->excluded[i];
        Py_ssize_t length;

        if (parts == Py_None) {
            *text = (arl_text_t){non_synced_default[i], strlen(non_synced_default[i])};
            continue;
        }
        if (text_of(PyTuple_GET_ITEM(texts, i), /* borrowed from texts */
                    "parts in non_synced", &text->text, &length) < 0) {
            Py_DECREF(texts);
            return NULL;
        }
        text->length = (size_t)length;
    }
    self->receiver.set.excluded = self->excluded;
    self->receiver.set.excluded_count = (uint32_t)count;
    return texts;
}

static int
read_texts(arl_weight_receiver_t *self, PyObject *aliases, PyObject *non_synced)
{
    PyObject *alias_texts, *excluded_texts;

    alias_texts = read_aliases(self, aliases);
    excluded_texts = alias_texts == NULL ? NULL : read_excluded(self, non_synced);
    if (excluded_texts == NULL) {
        Py_XDECREF(alias_texts);
        return -1;
    }
    self->texts = PyTuple_Pack(2, alias_texts, excluded_texts);
    Py_DECREF(alias_texts);
    Py_DECREF(excluded_texts);
    return self->texts == NULL ? -1 : 0;
}

/* The server this replaces can be told by this variable to go on with names that do not match. */
static int
warn_of_environment(arl_state_t *state)
{
    const char *strict = getenv("ARCTIC_WEIGHT_SYNC_STRICT_NAMES");

    if (strict != NULL && strcmp(strict, "0") == 0) {
        return arl_log(
            state, "warning",
            "ARCTIC_WEIGHT_SYNC_STRICT_NAMES=0 has no effect on WeightReceiver: names are "
            "checked both ways; pass partial=True for offers that leave names out");
    }
    return 0;
}

static PyObject *
weight_receiver_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"params",      "partial", "aliases", "non_synced",
                            "keep_mapped", "timeout", "log",     NULL};
    PyObject *params, *aliases = Py_None, *non_synced = Py_None, *timeout = NULL, *log = Py_None;
    int partial = 0, keep_mapped = 0;
    arl_state_t *state = arl_state_from_type(type);
    arl_weight_receiver_t *self;

    if (state == NULL || !PyArg_ParseTupleAndKeywords(args, kwargs, "O|$pOOpOO:WeightReceiver",
                                                      names, &params, &partial, &aliases,
                                                      &non_synced, &keep_mapped, &timeout, &log)) {
        return NULL;
    }
    self = (arl_weight_receiver_t *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    arl_guard_init(&self->guard, "WeightReceiver");
    self->mapped = arl_mapped_new();
    if (self->mapped == NULL) {
        (void)PyErr_NoMemory();
        goto release;
    }
    self->receiver.set.partial = partial != 0;
    self->receiver.keep_mapped = keep_mapped != 0;
    self->log = Py_NewRef(log);
    if (arl_seconds(timeout, 60.0, &self->timeout) < 0 ||
        read_texts(self, aliases, non_synced) < 0 ||
        arl_params_read(state, params, ARL_ROLE_RECEIVER, &self->params) < 0) {
        goto release;
    }
    if (self->params.count == 0) {
        PyErr_SetString(PyExc_ValueError, "WeightReceiver: there are no parameters");
        goto release;
    }
    self->bindings = PyMem_New(arl_binding_t, (size_t)self->params.count);
    if (self->bindings == NULL) {
        (void)PyErr_NoMemory();
        goto release;
    }
    if (bind_params(state, self) < 0) {
        goto release;
    }
    if (!partial && warn_of_environment(state) < 0) {
        goto release;
    }
    return (PyObject *)self;
release:
    Py_DECREF(self);
    return NULL;
}

/* ---- calls ----------------------------------------------------------------------------------- */

int
arl_weight_receiver_log(arl_state_t *state, arl_weight_receiver_t *self, const char *context)
{
    const arl_plan_report_t *report = &self->receiver.report;
    char line[256];
    PyObject *result;

    (void)snprintf(line, sizeof(line),
                   "[weight-sync names validated] context=%s sender=%u expected=%u", context,
                   report->sender_names, report->expected_names);
    if (self->log == Py_None) {
        return arl_log(state, "info", "%s", line);
    }
    result = PyObject_CallFunction(self->log, "s", line);
    Py_XDECREF(result);
    return result == NULL ? arl_log_failed(self->log) : 0;
}

int
arl_weight_receiver_refresh(arl_state_t *state, arl_weight_receiver_t *self)
{
    bool changed;

    if (arl_params_refresh(state, &self->params, ARL_ROLE_RECEIVER, &changed) < 0) {
        return -1;
    }
    return changed ? bind_params(state, self) : 0;
}

static int
check_destinations(arl_state_t *state, const arl_weight_receiver_t *self)
{
    for (Py_ssize_t i = 0; i < self->params.count; i++) {
        if (self->bindings[i].expected) {
            (void)arl_raise_format(state, ARL_ERR_VALUE, "pull",
                                   "%s: is a name without a tensor to write to; use views(), or "
                                   "give the tensor",
                                   self->params.items[i].text);
            return -1;
        }
    }
    return 0;
}

static PyObject *
pull_bytes(arl_state_t *state, arl_weight_receiver_t *self, const Py_buffer *offer,
           arl_verify_t verify, double seconds)
{
    arl_sync_stats_t stats;
    arl_call_t call;
    arl_status_t status;
    bool fresh = false;

    if (arl_weight_receiver_refresh(state, self) < 0 || check_destinations(state, self) < 0) {
        return NULL;
    }
    arl_call_begin(&call, seconds);
    status = arl_receiver_pull(&self->receiver, offer->buf, (size_t)offer->len, verify,
                               &call.deadline, &stats, &fresh, &call.err);
    arl_call_end(&call);
    if (status != ARL_OK) {
        return arl_raise(state, &call.err);
    }
    if (fresh && arl_weight_receiver_log(state, self, stats.transport->name) < 0) {
        return NULL;
    }
    return arl_sync_stats_new(state, &stats);
}

static PyObject *
weight_receiver_pull(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"offer", "timeout", "verify", "stream", NULL};
    arl_weight_receiver_t *self = (arl_weight_receiver_t *)op;
    PyObject *timeout = NULL, *verify = NULL, *stream = Py_None, *result = NULL;
    arl_state_t *state = arl_state_from_type(Py_TYPE(op));
    arl_verify_t mode;
    Py_buffer offer;
    double seconds;

    if (state == NULL || !PyArg_ParseTupleAndKeywords(args, kwargs, "y*|$OOO:pull", names, &offer,
                                                      &timeout, &verify, &stream)) {
        return NULL;
    }
    if (arl_seconds(timeout, self->timeout, &seconds) < 0 || arl_verify_from(verify, &mode) < 0 ||
        arl_guard_enter(state, &self->guard, "pull") < 0) {
        PyBuffer_Release(&offer);
        return NULL;
    }
    if (arl_stream_from(state, stream, &self->params, &self->receiver.stream) == 0) {
        result = pull_bytes(state, self, &offer, mode, seconds);
    }
    arl_guard_leave(&self->guard);
    PyBuffer_Release(&offer);
    return result;
}

static PyObject *
weight_receiver_views(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"offer", "timeout", "verify", "stream", NULL};
    arl_weight_receiver_t *self = (arl_weight_receiver_t *)op;
    PyObject *offer, *timeout = NULL, *verify = NULL, *stream = Py_None;
    void *reads = NULL;
    arl_state_t *state = arl_state_from_type(Py_TYPE(op));
    arl_verify_t mode;
    double seconds;

    if (state == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "O|$OOO:views", names, &offer, &timeout, &verify,
                                     &stream) ||
        arl_seconds(timeout, self->timeout, &seconds) < 0 || arl_verify_from(verify, &mode) < 0 ||
        arl_stream_from(state, stream, &self->params, &reads) < 0) {
        return NULL;
    }
    return arl_weight_views_new(state, self, offer, mode, reads, seconds);
}

static PyObject *
weight_receiver_check(PyObject *op, PyObject *unused)
{
    arl_weight_receiver_t *self = (arl_weight_receiver_t *)op;
    arl_state_t *state = arl_state_from_type(Py_TYPE(op));

    (void)unused;
    if (state == NULL) {
        return NULL;
    }
    if (self->receiver.torn) {
        return arl_raise_format(state, ARL_ERR_TORN, "check",
                                "the weights are a mixture of two versions: %s; pull a full set",
                                self->receiver.torn_text);
    }
    return Py_NewRef(Py_None);
}

static PyObject *
weight_receiver_live_mappings(PyObject *op, PyObject *unused)
{
    const arl_weight_receiver_t *self = (const arl_weight_receiver_t *)op;

    (void)unused;
    return PyLong_FromLongLong(arl_receiver_live(&self->receiver) + self->mapped->live);
}

static PyObject *
weight_receiver_close(PyObject *op, PyObject *unused)
{
    arl_weight_receiver_t *self = (arl_weight_receiver_t *)op;
    arl_state_t *state = arl_state_from_type(Py_TYPE(op));

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
    arl_receiver_close(&self->receiver);
    arl_guard_leave(&self->guard);
    self->guard.closed = true;
    arl_params_clear(&self->params);
    return Py_NewRef(Py_None);
}

static PyObject *
weight_receiver_exit(PyObject *op, PyObject *args)
{
    (void)args;
    return weight_receiver_close(op, NULL);
}

static PyObject *
weight_receiver_get_version(PyObject *op, void *closure)
{
    const arl_receiver_t *receiver = &((arl_weight_receiver_t *)op)->receiver;

    (void)closure;
    return receiver->versioned ? PyLong_FromUnsignedLongLong(receiver->version)
                               : Py_NewRef(Py_None);
}

static PyObject *
weight_receiver_get_torn(PyObject *op, void *closure)
{
    (void)closure;
    return PyBool_FromLong(((arl_weight_receiver_t *)op)->receiver.torn);
}

/* ---- type ------------------------------------------------------------------------------------ */

static int
arl_weight_receiver_traverse(PyObject *op, visitproc visit, void *arg)
{
    arl_weight_receiver_t *self = (arl_weight_receiver_t *)op;

    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->texts);
    Py_VISIT(self->log);
    return arl_params_traverse(&self->params, visit, arg);
}

static int
weight_receiver_clear(PyObject *op)
{
    arl_weight_receiver_t *self = (arl_weight_receiver_t *)op;

    self->guard.closed = true; /* the bindings point into what is let go here */
    arl_params_clear(&self->params);
    Py_CLEAR(self->log);
    return 0;
}

static void
weight_receiver_dealloc(PyObject *op)
{
    arl_weight_receiver_t *self = (arl_weight_receiver_t *)op;
    PyTypeObject *type = Py_TYPE(op);

    PyObject_GC_UnTrack(op);
    arl_receiver_close(&self->receiver);
    arl_binding_set_free(&self->receiver.set);
    (void)weight_receiver_clear(op);
    PyMem_Free(self->bindings);
    PyMem_Free(self->aliases);
    PyMem_Free(self->excluded);
    Py_CLEAR(self->texts);
    if (self->mapped != NULL) {
        arl_mapped_drop(self->mapped);
    }
    type->tp_free(op);
    Py_DECREF(type);
}

PyDoc_STRVAR(
    weight_receiver_doc,
    "WeightReceiver(params, *, partial=False, aliases=None, non_synced=None, keep_mapped=False,\n"
    "               timeout=60.0, log=None)\n--\n\n"
    "The sampler's side of weight sync.\n\n"
    "params: mapping of the sender's name to where that tensor goes, or an iterable of pairs. A\n"
    "value is a writable tensor (a slice of a fused parameter is one), a Binding for a part of\n"
    "the sender's tensor, a list of these for several places, or None for a name that is only\n"
    "expected (views). Destinations are written in place and never replaced; they must not\n"
    "overlap, except that several names may have the very same destination (tied weights).\n\n"
    "Names are checked both ways, dtypes and shapes must be equal. partial=True accepts offers\n"
    "that leave names out. aliases: name to name, for tied weights of which only one is sent.\n"
    "non_synced: parts of names that are left alone on both sides; None for the usual ones\n"
    "(.inv_freq and the scales and zero points of quantised weights).\n\n"
    "keep_mapped=True keeps mappings open between pulls where the transport can use them again.\n"
    "timeout: seconds for each call, unless it is given its own. log: called with the line that\n"
    "says that names were validated; None sends it to the logger arctic_rl_c.");

PyDoc_STRVAR(
    pull_doc,
    "pull($self, /, offer, *, timeout=None, verify=None, stream=None)\n--\n\n"
    "Copy the offered weights into the parameters; return SyncStats.\n\n"
    "All of the offer is validated before the first byte is written. verify: \"all\" or\n"
    "\"sample\" compares checksums of what was written with the sender's, which must offer "
    "them.\n"
    "stream: torch.cuda.Stream or CUstream whose work (reads of the old weights) comes before the\n"
    "copies; None is torch's current stream, or the default stream. When pull returns, all later\n"
    "work on any stream of this process sees the new weights.\n\n"
    "Raises WeightMismatchError (names, dtypes or shapes differ), WeightSyncError (the offer is\n"
    "damaged, foreign, used or over; a checksum differs), PeerLostError (the sender is gone),\n"
    "PeerTimeoutError. A failure after the first byte leaves the weights torn.");

PyDoc_STRVAR(
    views_doc,
    "views($self, /, offer, *, timeout=None, verify=None, stream=None)\n--\n\n"
    "Read the sender's memory instead of having it copied: for engines that load by themselves.\n\n"
    "Returns a context manager. Entering it validates the offer as pull() does and makes the\n"
    "weights torn; it is then an iterator over (name, WeightView), once over every tensor that is\n"
    "synced. Leaving it after all of them, without an exception, is a full pull.\n\n"
    "    with receiver.views(offer) as tensors:\n"
    "        model.load_weights((name, torch.from_dlpack(view)) for name, view in tensors)\n\n"
    "What is read is valid inside of the block only. Through a ring (low_memory) the tensors come\n"
    "one after another, and each is valid until the next is asked for; tied ones follow their\n"
    "first. stream: torch.cuda.Stream or CUstream that they are read on, so that the next is\n"
    "written after that; None as in pull(). timeout is for the whole block. verify compares the "
    "checksum of each tensor\n"
    "(or of a sample) before it is handed out. Raises as pull() does, when the block is entered;\n"
    "WeightSyncError when it is left before all tensors were taken.");

PyDoc_STRVAR(check_doc, "check($self, /)\n--\n\n"
                        "Raise TornWeightsError when the weights are a mixture of two versions.");

PyDoc_STRVAR(live_mappings_doc, "live_mappings($self, /)\n--\n\n"
                                "Number of mappings of the sender's memory that are open here.");

PyDoc_STRVAR(close_doc, "close($self, /)\n--\n\n"
                        "Close all mappings and let go of the parameters. Twice is fine.");

PyDoc_STRVAR(enter_doc, "__enter__($self, /)\n--\n\nReturn self.");
PyDoc_STRVAR(exit_doc, "__exit__($self, /, *exc_info)\n--\n\nClose.");

static PyMethodDef weight_receiver_type_methods[] = {
    {"pull", (PyCFunction)(void (*)(void))weight_receiver_pull, METH_VARARGS | METH_KEYWORDS,
     pull_doc},
    {"views", (PyCFunction)(void (*)(void))weight_receiver_views, METH_VARARGS | METH_KEYWORDS,
     views_doc},
    {"check", weight_receiver_check, METH_NOARGS, check_doc},
    {"live_mappings", weight_receiver_live_mappings, METH_NOARGS, live_mappings_doc},
    {"close", weight_receiver_close, METH_NOARGS, close_doc},
    {"__enter__", arl_guarded_enter, METH_NOARGS, enter_doc},
    {"__exit__", weight_receiver_exit, METH_VARARGS, exit_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef weight_receiver_getset[] = {
    {"version", weight_receiver_get_version, NULL,
     "int or None: version of the last full pull; None before the first", NULL},
    {"torn", weight_receiver_get_torn, NULL,
     "bool: whether a pull failed after it had begun to write", NULL},
    {"closed", arl_guarded_get_closed, NULL, "bool: whether close() was called", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot weight_receiver_slots[] = {
    {Py_tp_doc, (void *)weight_receiver_doc}, {Py_tp_new, weight_receiver_new},
    {Py_tp_dealloc, weight_receiver_dealloc}, {Py_tp_traverse, arl_weight_receiver_traverse},
    {Py_tp_clear, weight_receiver_clear},     {Py_tp_methods, weight_receiver_type_methods},
    {Py_tp_getset, weight_receiver_getset},   {0, NULL},
};

static PyType_Spec weight_receiver_spec = {
    .name = "arctic_rl_c.WeightReceiver",
    .basicsize = sizeof(arl_weight_receiver_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = weight_receiver_slots,
};

PyMethodDef arl_weight_receiver_methods[] = {{NULL, NULL, 0, NULL}};

int
arl_weight_receiver_exec(PyObject *module, arl_state_t *state)
{
    return arl_state_add_type(module, &weight_receiver_spec, &state->weight_receiver_type);
}
