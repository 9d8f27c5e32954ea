/* SPDX-License-Identifier: Apache-2.0 */
/* The client's methods that send no batch: one call each, and the way back from log-probs. */
#include "python/client.h"

#include "python/args.h"
#include "python/batch.h"
#include "python/client_check.h"
#include "python/errors.h"
#include "python/operation.h"

/* ---- single calls ---------------------------------------------------------------------------- */

/* Steals `keywords`, which may be NULL after an error. */
static PyObject *
call_new(arl_client_t *client, const arl_operation_kind_t *kind, const char *name, PyObject *method,
         PyObject *keywords)
{
    arl_operation_t *op = keywords == NULL ? NULL : arl_operation_new(client, kind, name);

    if (op == NULL) {
        Py_XDECREF(keywords);
        return NULL;
    }
    op->method = Py_NewRef(method);
    op->payload = keywords;
    return (PyObject *)op;
}

static int
keyword_set(PyObject *keywords, PyObject *name, PyObject *value)
{
    return value == NULL ? 0 : PyDict_SetItem(keywords, name, value);
}

/* None and absent mean the stored flag; anything but a bool is a mistake. */
static int
check_three_valued(const char *name, PyObject **value)
{
    if (*value == Py_None) {
        *value = NULL;
    }
    if (*value != NULL && !PyBool_Check(*value)) {
        PyErr_Format(PyExc_TypeError, "sync_weights() argument '%s' must be True, False or None",
                     name);
        return -1;
    }
    return 0;
}

/*
 * The flat generation's server knows no stored flags: both are always sent. The nested one's
 * does: only what overrides them is.
 */
static PyObject *
sync_keywords(const arl_client_t *client, PyObject *cuda_ipc, PyObject *low_memory)
{
    const arl_state_t *state = client->state;
    PyObject *ipc = cuda_ipc != NULL ? cuda_ipc : client->cuda_ipc;
    PyObject *keywords;

    if (low_memory == Py_True && ipc != Py_True) {
        return arl_raise_format(client->state, ARL_ERR_CONFIG, "sync_weights",
                                "sync_weights: low_memory=True is a way of cuda_ipc, which is "
                                "False %s",
                                cuda_ipc != NULL ? "in this call"
                                                 : "in remote_backend.weight_sync");
    }
    if (!client->rules.final) {
        cuda_ipc = ipc;
        if (low_memory == NULL) { /* the stored one, as far as it means anything */
            low_memory = ipc == Py_True ? client->low_memory : Py_False;
        }
    }
    keywords = PyDict_New();
    if (keywords != NULL && (keyword_set(keywords, state->names.cuda_ipc, cuda_ipc) < 0 ||
                             keyword_set(keywords, state->names.low_memory, low_memory) < 0)) {
        Py_CLEAR(keywords);
    }
    return keywords;
}

const char arl_client_sync_weights_doc[] =
    "sync_weights($self, cuda_ipc=None, low_memory=None)\n"
    "--\n\n"
    "Bring the trainer's weights to the sampler.\n\n"
    "None uses the stored value of remote_backend.weight_sync, True or False overrides\n"
    "it for this call. Awaiting gives the transport's dict. Raises ConfigError where\n"
    "low_memory=True is asked for without cuda_ipc.";

PyObject *
arl_client_sync_weights(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"cuda_ipc", "low_memory"};
    static const arl_signature_t signature = {"sync_weights", 2, 2, 0, names};
    arl_client_t *client = (arl_client_t *)self;
    PyObject *bound[2];

    if (arl_args_bind(&signature, args, nargs, kwnames, bound) < 0 ||
        check_three_valued("cuda_ipc", &bound[0]) < 0 ||
        check_three_valued("low_memory", &bound[1]) < 0 ||
        arl_client_check_open(client, "sync_weights") < 0) {
        return NULL;
    }
    return call_new(client, &arl_operation_single, "sync_weights",
                    client->state->names.sync_weights, sync_keywords(client, bound[0], bound[1]));
}

/* method(path=None, **options): what is given goes on, nothing else does. */
static PyObject *
checkpoint_call(arl_client_t *client, const char *name, PyObject *method, PyObject *const *args,
                Py_ssize_t nargs, PyObject *kwnames)
{
    const Py_ssize_t count = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    PyObject *keywords;

    if (nargs > 1) {
        return PyErr_Format(PyExc_TypeError, "%s() takes at most 1 positional argument (%zd given)",
                            name, nargs);
    }
    if (arl_client_check_open(client, name) < 0) {
        return NULL;
    }
    keywords = PyDict_New();
    if (keywords != NULL && nargs == 1 &&
        PyDict_SetItem(keywords, client->state->names.path, args[0]) < 0) {
        Py_CLEAR(keywords);
    }
    for (Py_ssize_t i = 0; keywords != NULL && i < count; i++) {
        PyObject *key = PyTuple_GET_ITEM(kwnames, i); /* borrowed from kwnames */

        if (PyDict_Contains(keywords, key) == 1) {
            PyErr_Format(PyExc_TypeError, "%s() got multiple values for argument '%U'", name, key);
            Py_CLEAR(keywords);
        }
        else if (PyDict_SetItem(keywords, key, args[nargs + i]) < 0) {
            Py_CLEAR(keywords);
        }
    }
    if (keywords != NULL && arl_client_check_checkpoint(client, name, keywords) < 0) {
        Py_CLEAR(keywords);
    }
    return call_new(client, &arl_operation_single, name, method, keywords);
}

const char arl_client_save_checkpoint_doc[] =
    "save_checkpoint($self, path=None, **options)\n"
    "--\n\n"
    "Save the trainer's state on the server. What is given (path, step, checkpoint_id,\n"
    "export_hf, save_total_limit, …) goes to the transport unchanged, and nothing else,\n"
    "a path object as text; awaiting gives its dict. Raises TypeError for a path of\n"
    "another kind, PayloadError for a step or a limit that is no whole number from 0 on.";

PyObject *
arl_client_save_checkpoint(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames)
{
    arl_client_t *client = (arl_client_t *)self;

    return checkpoint_call(client, "save_checkpoint", client->state->names.save_checkpoint, args,
                           nargs, kwnames);
}

const char arl_client_load_checkpoint_doc[] =
    "load_checkpoint($self, path=None, **options)\n"
    "--\n\n"
    "Load the trainer's state on the server. What is given (path, step) goes to the\n"
    "transport unchanged, a path object as text; awaiting gives its dict. Raises as\n"
    "save_checkpoint does.";

PyObject *
arl_client_load_checkpoint(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames)
{
    arl_client_t *client = (arl_client_t *)self;

    return checkpoint_call(client, "load_checkpoint", client->state->names.load_checkpoint, args,
                           nargs, kwnames);
}

const char arl_client_wake_up_inference_doc[] =
    "wake_up_inference($self, tags=None)\n"
    "--\n\n"
    "Wake the sampler: all of it, or the parts named in `tags` (\"weights\",\n"
    "\"kv_cache\"). Awaiting gives the transport's dict. Raises PayloadError for other\n"
    "names or none.";

PyObject *
arl_client_wake_up_inference(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *kwnames)
{
    static const char *const names[] = {"tags"};
    static const arl_signature_t signature = {"wake_up_inference", 1, 1, 0, names};
    arl_client_t *client = (arl_client_t *)self;
    PyObject *tags, *keywords;

    if (arl_args_bind(&signature, args, nargs, kwnames, &tags) < 0 ||
        arl_client_check_open(client, "wake_up_inference") < 0 ||
        arl_client_check_tags(client, tags) < 0) {
        return NULL;
    }
    keywords = PyDict_New();
    if (keywords != NULL &&
        PyDict_SetItem(keywords, client->state->names.tags, tags == NULL ? Py_None : tags) < 0) {
        Py_CLEAR(keywords);
    }
    return call_new(client, &arl_operation_single, "wake_up_inference",
                    client->state->names.wake_inference, keywords);
}

const char arl_client_sleep_inference_doc[] =
    "sleep_inference($self, level=1)\n"
    "--\n\n"
    "Put the sampler to sleep. Level 1 keeps its weights aside, level 2 drops them: a\n"
    "weight sync must follow before it generates again. Awaiting gives the transport's\n"
    "dict. Raises PayloadError for another level.";

PyObject *
arl_client_sleep_inference(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames)
{
    static const char *const names[] = {"level"};
    static const arl_signature_t signature = {"sleep_inference", 1, 1, 0, names};
    arl_client_t *client = (arl_client_t *)self;
    PyObject *bound, *level, *keywords;

    if (arl_args_bind(&signature, args, nargs, kwnames, &bound) < 0 ||
        arl_client_check_open(client, "sleep_inference") < 0) {
        return NULL;
    }
    level = arl_client_check_level(client, bound);
    keywords = level == NULL ? NULL : PyDict_New();
    if (keywords != NULL && PyDict_SetItem(keywords, client->state->names.level, level) < 0) {
        Py_CLEAR(keywords);
    }
    Py_XDECREF(level);
    return call_new(client, &arl_operation_single, "sleep_inference",
                    client->state->names.sleep_inference, keywords);
}

const char arl_client_reset_prefix_cache_doc[] =
    "reset_prefix_cache($self, /)\n"
    "--\n\n"
    "Forget the prefixes that the sampler has cached. Awaiting gives the transport's\n"
    "answer, or raises TransportUnavailableError where the server refused.";

PyObject *
arl_client_reset_prefix_cache(PyObject *self, PyObject *ignored)
{
    arl_client_t *client = (arl_client_t *)self;

    (void)ignored;
    if (arl_client_check_open(client, "reset_prefix_cache") < 0) {
        return NULL;
    }
    return call_new(client, &arl_operation_reset_cache, "reset_prefix_cache",
                    client->state->names.reset_prefix_cache, PyDict_New());
}

/* ---- reconnect, destroy ---------------------------------------------------------------------- */

const char arl_client_reconnect_handle_doc[] =
    "reconnect_handle($self, /)\n"
    "--\n\n"
    "What another process needs to attach to the same server: the transport's own\n"
    "picklable dict, with its name under \"transport\". A client on a transport that was\n"
    "re-attached is not the owner: its destroy() leaves the server's jobs alone.";

PyObject *
arl_client_reconnect_handle(PyObject *self, PyObject *ignored)
{
    arl_client_t *client = (arl_client_t *)self;
    PyObject *handle, *name, *copy = NULL;

    (void)ignored;
    if (arl_client_check_open(client, "reconnect_handle") < 0) {
        return NULL;
    }
    handle = PyObject_CallMethodNoArgs(client->transport, client->state->names.reconnect_handle);
    if (handle == NULL) {
        return NULL;
    }
    if (!PyDict_Check(handle)) {
        PyErr_Format(PyExc_TypeError, "reconnect_handle: the transport gave a %s, a dict is needed",
                     Py_TYPE(handle)->tp_name);
        Py_DECREF(handle);
        return NULL;
    }
    name = PyObject_GetAttr(client->transport, client->state->names.name);
    if (name != NULL) {
        copy = PyDict_Copy(handle);
        if (copy != NULL && PyDict_SetItem(copy, client->state->names.transport, name) < 0) {
            Py_CLEAR(copy);
        }
        Py_DECREF(name);
    }
    Py_DECREF(handle);
    return copy;
}

/* shutdown() by the owner; by others detach(), which not every transport needs. */
static int
destroy_begin(arl_client_t *client, PyObject **next_p)
{
    PyObject *method;

    if (client->transport == NULL || client->phase == ARL_CLIENT_CLOSED ||
        client->phase == ARL_CLIENT_CLOSING) {
        *next_p = Py_NewRef(Py_None);
        return 0;
    }
    client->phase = ARL_CLIENT_CLOSING;
    method = PyObject_GetAttr(client->transport, client->owner ? client->state->names.shutdown
                                                               : client->state->names.detach);
    if (method == NULL && !client->owner && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
        client->phase = ARL_CLIENT_CLOSED;
        *next_p = Py_NewRef(Py_None);
        return 0;
    }
    *next_p = method == NULL ? NULL : PyObject_CallNoArgs(method);
    Py_XDECREF(method);
    return *next_p == NULL ? -1 : 1;
}

static int
destroy_advance(arl_operation_t *op, PyObject *answer, PyObject **next_p)
{
    arl_client_t *client = (arl_client_t *)op->client;

    if (answer == NULL) {
        op->closing = client->phase != ARL_CLIENT_CLOSING; /* another one may be at it */
        return destroy_begin(client, next_p);
    }
    client->phase = ARL_CLIENT_CLOSED;
    *next_p = Py_NewRef(Py_None);
    return 0;
}

static void
destroy_describe(const arl_operation_t *op, char *text, size_t size)
{
    (void)op;
    (void)snprintf(text, size, "failed; the client stays closed, destroy() may be called again");
}

static void
destroy_abandon(arl_operation_t *op)
{
    if (op->closing && op->client != NULL) {
        ((arl_client_t *)op->client)->phase = ARL_CLIENT_BROKEN;
    }
}

const arl_operation_kind_t arl_operation_destroy = {destroy_advance, destroy_describe,
                                                    destroy_abandon};

const char arl_client_destroy_doc[] =
    "destroy($self, /)\n"
    "--\n\n"
    "End the client: every later operation raises ClosedError. The owner also ends the\n"
    "server's jobs (transport.shutdown()); a client that was re-attached never does, it\n"
    "only lets go of its own connection (transport.detach(), where there is one).\n"
    "Awaiting it gives None; again, at once. Operations under way are the transport's\n"
    "to end; update_actor begins no further mini-batch.";

PyObject *
arl_client_destroy(PyObject *self, PyObject *ignored)
{
    arl_client_t *client = (arl_client_t *)self;

    (void)ignored;
    return (PyObject *)arl_operation_new(client, &arl_operation_destroy, "destroy");
}

/* ---- the way back ---------------------------------------------------------------------------- */

const char arl_client_log_probs_to_nested_doc[] =
    "log_probs_to_nested($self, data, dense)\n"
    "--\n\n"
    "Log-probs (or entropy) of compute_log_prob as a nested tensor with the rows of\n"
    "data['input_ids'], predict-next in both generations.\n\n"
    "`dense` [B, P + R] is cut by `attention_mask` and the row lengths. Servers with\n"
    "prompt sharing (zorro_train.enable) answer response-aligned; then all values move\n"
    "one slot to the left. Raises PayloadError, naming the row, where mask and rows\n"
    "disagree.";

PyObject *
arl_client_log_probs_to_nested(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                               PyObject *kwnames)
{
    static const char *const names[] = {"data", "dense"};
    static const arl_signature_t signature = {"log_probs_to_nested", 2, 2, 2, names};
    arl_client_t *client = (arl_client_t *)self;
    arl_state_t *state = client->state;
    PyObject *bound[2], *ids, *mask, *nested = NULL;

    if (arl_args_bind(&signature, args, nargs, kwnames, bound) < 0 ||
        arl_client_check_ready(client, "log_probs_to_nested") < 0) {
        return NULL;
    }
    ids = arl_payload_data_require(state, bound[0], state->names.input_ids, "log_probs_to_nested");
    mask = ids == NULL ? NULL
                       : arl_payload_data_require(state, bound[0], state->names.attention_mask,
                                                  "log_probs_to_nested");
    if (mask != NULL) {
        nested = arl_batch_make_jagged(state, bound[1], mask, ids, "dense");
    }
    if (nested != NULL && client->rules.zorro) {
        Py_SETREF(nested, arl_batch_shift_predict_next(state, nested, "dense"));
    }
    Py_XDECREF(mask);
    Py_XDECREF(ids);
    return nested;
}
