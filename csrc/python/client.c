/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ArcticRLClient: a transport, a config, and what follows from the two. Methods build what is to
 * be sent at once, so that a bad batch is refused where it was passed in, and return operations
 * that send it when awaited. The methods with payloads are in client_train.c and
 * client_generate.c.
 */
#include "python/client.h"

#include "python/args.h"
#include "python/batch.h"
#include "python/config.h"
#include "python/errors.h"
#include "python/operation.h"

#include <string.h>

/* ---- life ------------------------------------------------------------------------------------ */

int
arl_client_check_open(const arl_client_t *client, const char *operation)
{
    if (client->transport == NULL) {
        PyErr_Format(PyExc_RuntimeError, "%s: ArcticRLClient.__init__ has not been called",
                     operation);
        return -1;
    }
    if (client->phase != ARL_CLIENT_OPEN) {
        (void)arl_raise_format(client->state, ARL_ERR_CLOSED, operation,
                               "%s: the client was destroyed", operation);
        return -1;
    }
    return 0;
}

static int
client_traverse(PyObject *self, visitproc visit, void *arg)
{
    arl_client_t *client = (arl_client_t *)self;

    Py_VISIT(Py_TYPE(self));
#define CLIENT_VISIT(name) Py_VISIT(client->name);
    ARL_CLIENT_OBJECTS(CLIENT_VISIT)
#undef CLIENT_VISIT
    return arl_payload_rules_traverse(&client->rules, visit, arg);
}

static int
client_clear(PyObject *self)
{
    arl_client_t *client = (arl_client_t *)self;

#define CLIENT_CLEAR(name) Py_CLEAR(client->name);
    ARL_CLIENT_OBJECTS(CLIENT_CLEAR)
#undef CLIENT_CLEAR
    arl_payload_rules_clear(&client->rules);
    return 0;
}

static void
client_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);

    PyObject_GC_UnTrack(self);
    (void)client_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *
client_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    arl_state_t *state = arl_state_from_type(type);
    arl_client_t *client = state == NULL ? NULL : (arl_client_t *)type->tp_alloc(type, 0);

    (void)args;
    (void)kwargs;
    if (client != NULL) {
        client->state = state; /* lives as long as our type, which lives as long as `client` */
    }
    return (PyObject *)client;
}

/* ---- what the transport says of itself
 * ----------------------------------------------------------- */

/* A plain attribute of the transport. Without `fallback` (-1) it must be there. */
static int
transport_flag(PyObject *transport, const char *name, int fallback, bool *flag_p)
{
    PyObject *value = PyObject_GetAttrString(transport, name);
    int truth;

    if (value == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        if (fallback < 0) {
            PyErr_Clear();
            PyErr_Format(PyExc_TypeError,
                         "ArcticRLClient: a %s is no transport, it has no attribute '%s'",
                         Py_TYPE(transport)->tp_name, name);
            return -1;
        }
        PyErr_Clear();
        *flag_p = fallback;
        return 0;
    }
    truth = PyObject_IsTrue(value);
    Py_DECREF(value);
    *flag_p = truth > 0;
    return truth < 0 ? -1 : 0;
}

static int
client_read_transport(arl_client_t *client, PyObject *transport)
{
    const bool references = client->rules.reference_ranks > 0;

    return transport_flag(transport, "accepts_token_ids", -1, &client->accepts_token_ids) < 0 ||
                   transport_flag(transport, "accepts_routing_key", -1,
                                  &client->accepts_routing_key) < 0 ||
                   transport_flag(transport, "accepts_strict", -1, &client->accepts_strict) < 0 ||
                   transport_flag(transport, "serves_reference", references,
                                  &client->serves_reference) < 0 ||
                   transport_flag(transport, "server_limits", true, &client->server_limits) < 0 ||
                   transport_flag(transport, "owner", true, &client->owner) < 0
               ? -1
               : 0;
}

/* ---- what the config says beside the payload rules
 * ------------------------------------------------ */

static PyObject *
config_member(PyObject *config, const char *first, const char *second, const char *third)
{
    const char *const parts[] = {first, second, third};
    PyObject *node = Py_NewRef(config);

    for (size_t i = 0; node != NULL && i < 3 && parts[i] != NULL; i++) {
        Py_SETREF(node, PyMapping_GetItemString(node, parts[i]));
    }
    return node;
}

static int
config_sum(PyObject *config, const char *section, const char *first, const char *second,
           int64_t *sum_p)
{
    const char *const names[] = {first, second};
    int64_t sum = 0;

    for (size_t i = 0; i < 2; i++) {
        PyObject *value = config_member(config, section, names[i], NULL);
        const int64_t number = value == NULL ? -1 : PyLong_AsLongLong(value);

        Py_XDECREF(value);
        if (number == -1 && PyErr_Occurred()) {
            return -1;
        }
        if (__builtin_add_overflow(sum, number, &sum)) {
            sum = INT64_MAX;
        }
    }
    *sum_p = sum;
    return 0;
}

/* The sampler's max_model_len, as it follows from the config. */
static int
client_read_context(arl_client_t *client)
{
    PyObject *limit =
        config_member(client->config, "actor_rollout_ref", "rollout", "max_model_len");

    if (limit == NULL) {
        return -1;
    }
    if (limit == Py_None) {
        Py_DECREF(limit);
        return config_sum(client->config, "data", "max_prompt_length", "max_response_length",
                          &client->context_limit);
    }
    client->context_limit = PyLong_AsLongLong(limit);
    Py_DECREF(limit);
    return client->context_limit == -1 && PyErr_Occurred() ? -1 : 0;
}

static int
client_read_config(arl_client_t *client, PyObject *config)
{
    client->config = arl_config_normalize(client->state, config);
    if (client->config == NULL ||
        arl_payload_rules_init(client->state, client->config, &client->rules) < 0) {
        return -1;
    }
    client->cuda_ipc = config_member(client->config, "remote_backend", "weight_sync", "cuda_ipc");
    client->low_memory = client->cuda_ipc == NULL ? NULL
                                                  : config_member(client->config, "remote_backend",
                                                                  "weight_sync", "low_memory");
    return client->low_memory == NULL ? -1 : client_read_context(client);
}

/* ---- constructor
 * ---------------------------------------------------------------------------------- */

static int
parse_prompts_as(const char *text, arl_prompts_as_t *prompts_as_p)
{
    static const char *const names[] = {"auto", "ids", "text"};

    for (int i = 0; i < 3; i++) {
        if (strcmp(text, names[i]) == 0) {
            *prompts_as_p = (arl_prompts_as_t)i;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "prompts_as must be 'auto', 'ids' or 'text', not '%s'", text);
    return -1;
}

static int
override_flag(PyObject *value, bool *flag_p) /* None: leave it */
{
    const int truth = value == Py_None ? *flag_p : PyObject_IsTrue(value);

    *flag_p = truth > 0;
    return truth < 0 ? -1 : 0;
}

static int
client_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {
        "transport", "config",        "prompts_as", "tokenizer", "temperature_in_log_prob",
        "owner",     "server_limits", NULL};
    arl_client_t *client = (arl_client_t *)self;
    PyObject *transport, *config, *tokenizer = Py_None, *owner = Py_None, *limits = Py_None;
    const char *prompts_as = "auto";
    int temperature = 0;

    if (client->transport != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "ArcticRLClient.__init__ was called before");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$sOpOO:ArcticRLClient", names, &transport,
                                     &config, &prompts_as, &tokenizer, &temperature, &owner,
                                     &limits) ||
        parse_prompts_as(prompts_as, &client->prompts_as) < 0) {
        return -1;
    }
    if (client_read_config(client, config) < 0 || client_read_transport(client, transport) < 0 ||
        override_flag(owner, &client->owner) < 0 ||
        override_flag(limits, &client->server_limits) < 0) {
        (void)client_clear(self);
        return -1;
    }
    client->temperature_in_log_prob = temperature != 0;
    client->tokenizer = Py_NewRef(tokenizer);
    client->transport = Py_NewRef(transport); /* last: says that all of it is there */
    return 0;
}

/* ---- single calls
 * --------------------------------------------------------------------------------- */

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

PyDoc_STRVAR(sync_weights_doc,
             "sync_weights($self, cuda_ipc=None, low_memory=None)\n"
             "--\n\n"
             "Bring the trainer's weights to the sampler.\n\n"
             "None uses the stored value of remote_backend.weight_sync, True or False overrides\n"
             "it for this call. Awaiting gives the transport's dict. Raises ConfigError where\n"
             "low_memory=True is asked for without cuda_ipc.");

static PyObject *
client_sync_weights(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
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
    return call_new(client, &arl_operation_single, name, method, keywords);
}

PyDoc_STRVAR(save_checkpoint_doc,
             "save_checkpoint($self, path=None, **options)\n"
             "--\n\n"
             "Save the trainer's state on the server. What is given (path, step, checkpoint_id,\n"
             "export_hf, save_total_limit, …) goes to the transport unchanged, and nothing else;\n"
             "awaiting gives its dict.");

static PyObject *
client_save_checkpoint(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    arl_client_t *client = (arl_client_t *)self;

    return checkpoint_call(client, "save_checkpoint", client->state->names.save_checkpoint, args,
                           nargs, kwnames);
}

PyDoc_STRVAR(load_checkpoint_doc,
             "load_checkpoint($self, path=None, **options)\n"
             "--\n\n"
             "Load the trainer's state on the server. What is given (path, step) goes to the\n"
             "transport unchanged; awaiting gives its dict.");

static PyObject *
client_load_checkpoint(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    arl_client_t *client = (arl_client_t *)self;

    return checkpoint_call(client, "load_checkpoint", client->state->names.load_checkpoint, args,
                           nargs, kwnames);
}

PyDoc_STRVAR(wake_up_inference_doc,
             "wake_up_inference($self, tags=None)\n"
             "--\n\n"
             "Wake the sampler: all of it, or the parts named in `tags` (\"weights\",\n"
             "\"kv_cache\"). Awaiting gives the transport's dict.");

static PyObject *
client_wake_up_inference(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"tags"};
    static const arl_signature_t signature = {"wake_up_inference", 1, 1, 0, names};
    arl_client_t *client = (arl_client_t *)self;
    PyObject *tags, *keywords;

    if (arl_args_bind(&signature, args, nargs, kwnames, &tags) < 0 ||
        arl_client_check_open(client, "wake_up_inference") < 0) {
        return NULL;
    }
    if (tags != NULL && tags != Py_None && !PyList_Check(tags) && !PyTuple_Check(tags)) {
        return PyErr_Format(PyExc_TypeError, "wake_up_inference() argument 'tags' must be a list "
                                             "of text or None");
    }
    keywords = PyDict_New();
    if (keywords != NULL &&
        PyDict_SetItem(keywords, client->state->names.tags, tags == NULL ? Py_None : tags) < 0) {
        Py_CLEAR(keywords);
    }
    return call_new(client, &arl_operation_single, "wake_up_inference",
                    client->state->names.wake_inference, keywords);
}

PyDoc_STRVAR(sleep_inference_doc,
             "sleep_inference($self, level=1)\n"
             "--\n\n"
             "Put the sampler to sleep. Level 1 keeps its weights aside, level 2 drops them: a\n"
             "weight sync must follow before it generates again. The level goes to the transport\n"
             "unchanged; awaiting gives its dict.");

static PyObject *
client_sleep_inference(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"level"};
    static const arl_signature_t signature = {"sleep_inference", 1, 1, 0, names};
    arl_client_t *client = (arl_client_t *)self;
    PyObject *bound, *level, *keywords;

    if (arl_args_bind(&signature, args, nargs, kwnames, &bound) < 0 ||
        arl_client_check_open(client, "sleep_inference") < 0) {
        return NULL;
    }
    level = bound == NULL ? PyLong_FromLong(1) : PyNumber_Index(bound);
    keywords = level == NULL ? NULL : PyDict_New();
    if (keywords != NULL && PyDict_SetItem(keywords, client->state->names.level, level) < 0) {
        Py_CLEAR(keywords);
    }
    Py_XDECREF(level);
    return call_new(client, &arl_operation_single, "sleep_inference",
                    client->state->names.sleep_inference, keywords);
}

PyDoc_STRVAR(reset_prefix_cache_doc,
             "reset_prefix_cache($self, /)\n"
             "--\n\n"
             "Forget the prefixes that the sampler has cached. Awaiting gives the transport's\n"
             "answer, or raises TransportUnavailableError where the server refused.");

static PyObject *
client_reset_prefix_cache(PyObject *self, PyObject *ignored)
{
    arl_client_t *client = (arl_client_t *)self;

    (void)ignored;
    if (arl_client_check_open(client, "reset_prefix_cache") < 0) {
        return NULL;
    }
    return call_new(client, &arl_operation_reset_cache, "reset_prefix_cache",
                    client->state->names.reset_prefix_cache, PyDict_New());
}

/* ---- reconnect, destroy
 * ---------------------------------------------------------------------------- */

PyDoc_STRVAR(reconnect_handle_doc,
             "reconnect_handle($self, /)\n"
             "--\n\n"
             "What another process needs to attach to the same server: the transport's own\n"
             "picklable dict, with its name under \"transport\". A client on a transport that was\n"
             "re-attached is not the owner: its destroy() leaves the server's jobs alone.");

static PyObject *
client_reconnect_handle(PyObject *self, PyObject *ignored)
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

PyDoc_STRVAR(destroy_doc,
             "destroy($self, /)\n"
             "--\n\n"
             "End the client: every later operation raises ClosedError. The owner also ends the\n"
             "server's jobs (transport.shutdown()); a client that was re-attached never does, it\n"
             "only lets go of its own connection (transport.detach(), where there is one).\n"
             "Awaiting it gives None; again, at once. Operations under way are the transport's\n"
             "to end; update_actor begins no further mini-batch.");

static PyObject *
client_destroy(PyObject *self, PyObject *ignored)
{
    arl_client_t *client = (arl_client_t *)self;

    (void)ignored;
    return (PyObject *)arl_operation_new(client, &arl_operation_destroy, "destroy");
}

/* ---- the way back
 * ----------------------------------------------------------------------------------- */

PyDoc_STRVAR(log_probs_to_nested_doc,
             "log_probs_to_nested($self, data, dense)\n"
             "--\n\n"
             "Log-probs (or entropy) of compute_log_prob as a nested tensor with the rows of\n"
             "data['input_ids'], predict-next in both generations.\n\n"
             "`dense` [B, P + R] is cut by `attention_mask` and the row lengths. Servers with\n"
             "prompt sharing (zorro_train.enable) answer response-aligned; then all values move\n"
             "one slot to the left. Raises PayloadError, naming the row, where mask and rows\n"
             "disagree.");

static PyObject *
client_log_probs_to_nested(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames)
{
    static const char *const names[] = {"data", "dense"};
    static const arl_signature_t signature = {"log_probs_to_nested", 2, 2, 2, names};
    arl_client_t *client = (arl_client_t *)self;
    arl_state_t *state = client->state;
    PyObject *bound[2], *ids, *mask, *nested = NULL;

    if (arl_args_bind(&signature, args, nargs, kwnames, bound) < 0) {
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

/* ---- type
 * --------------------------------------------------------------------------------------------- */

static PyObject *
client_repr(PyObject *self)
{
    static const char *const phases[] = {"open", "closing", "closed after a failed destroy",
                                         "closed"};
    const arl_client_t *client = (const arl_client_t *)self;

    if (client->transport == NULL) {
        return PyUnicode_FromFormat("<%s, not initialised>", Py_TYPE(self)->tp_name);
    }
    return PyUnicode_FromFormat("<%s of %R, %s generation, %s>", Py_TYPE(self)->tp_name,
                                client->transport, client->rules.final ? "nested" : "flat",
                                phases[client->phase]);
}

static PyObject *
client_get_object(PyObject *self, void *offset)
{
    PyObject *value = *(PyObject **)((char *)self + (size_t)(uintptr_t)offset);

    return Py_NewRef(value == NULL ? Py_None : value);
}

static PyObject *
client_get_closed(PyObject *self, void *ignored)
{
    (void)ignored;
    return PyBool_FromLong(((arl_client_t *)self)->phase != ARL_CLIENT_OPEN);
}

static PyObject *
client_get_owner(PyObject *self, void *ignored)
{
    (void)ignored;
    return PyBool_FromLong(((arl_client_t *)self)->owner);
}

#define CLIENT_OBJECT(name, doc)                                                                   \
    {                                                                                              \
#        name, client_get_object, NULL, doc, (void *)offsetof(arl_client_t, name)                  \
    }

static PyGetSetDef client_getset[] = {
    CLIENT_OBJECT(transport, "The transport that operations go through."),
    CLIENT_OBJECT(config, "The config in its normalised form. It was read once: changing it has no "
                          "effect on the client."),
    CLIENT_OBJECT(tokenizer, "What decodes prompts for a server that takes text only, or None."),
    {"closed", client_get_closed, NULL, "Whether destroy() has begun.", NULL},
    {"owner", client_get_owner, NULL, "Whether destroy() ends the server's jobs.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

#define CLIENT_METHOD(name, function, doc)                                                         \
    {                                                                                              \
        name, (PyCFunction)(void (*)(void))function, METH_FASTCALL | METH_KEYWORDS, doc            \
    }

static PyMethodDef client_methods[] = {
    CLIENT_METHOD("compute_log_prob", arl_client_compute_log_prob, arl_client_compute_log_prob_doc),
    CLIENT_METHOD("update_actor", arl_client_update_actor, arl_client_update_actor_doc),
    CLIENT_METHOD("generate", arl_client_generate, arl_client_generate_doc),
    CLIENT_METHOD("sync_weights", client_sync_weights, sync_weights_doc),
    CLIENT_METHOD("save_checkpoint", client_save_checkpoint, save_checkpoint_doc),
    CLIENT_METHOD("load_checkpoint", client_load_checkpoint, load_checkpoint_doc),
    CLIENT_METHOD("wake_up_inference", client_wake_up_inference, wake_up_inference_doc),
    CLIENT_METHOD("sleep_inference", client_sleep_inference, sleep_inference_doc),
    {"reset_prefix_cache", client_reset_prefix_cache, METH_NOARGS, reset_prefix_cache_doc},
    {"reconnect_handle", client_reconnect_handle, METH_NOARGS, reconnect_handle_doc},
    {"destroy", client_destroy, METH_NOARGS, destroy_doc},
    CLIENT_METHOD("log_probs_to_nested", client_log_probs_to_nested, log_probs_to_nested_doc),
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(
    client_doc,
    "ArcticRLClient(transport, config, *, prompts_as='auto', tokenizer=None,\n"
    "               temperature_in_log_prob=False, owner=None, server_limits=None)\n"
    "--\n\n"
    "The client of an Arctic RL server. May be subclassed.\n\n"
    "Its methods check and build at once and return an Operation, which sends when awaited.\n\n"
    "Parameters\n"
    "----------\n"
    "transport : object\n"
    "    How operations reach the server: coroutine methods fwd_bwd, step, fwd_no_grad,\n"
    "    generate, …, and the flags accepts_token_ids, accepts_routing_key, accepts_strict.\n"
    "config : mapping\n"
    "    The main config, flat or nested; read once.\n"
    "prompts_as : {'auto', 'ids', 'text'}\n"
    "    How generate sends prompts: as token ids where the server takes them, else decoded,\n"
    "    with a warning; as ids or not at all; always decoded.\n"
    "tokenizer : object, optional\n"
    "    Has decode(ids); needed where ids have to become text.\n"
    "temperature_in_log_prob : bool\n"
    "    Ask for log-probs under the temperature, as updates compute them. The recorded\n"
    "    clients do not, so that ratios start away from 1 where the temperature is not 1.\n"
    "owner : bool, optional\n"
    "    Whether destroy() ends the server's jobs. Default: transport.owner, else True.\n"
    "server_limits : bool, optional\n"
    "    Refuse and warn of what the published server cannot do. Default:\n"
    "    transport.server_limits, else True.\n\n"
    "Raises ConfigError for the config, TypeError for an object that is no transport.");

static PyType_Slot client_slots[] = {
    {Py_tp_doc, (void *)client_doc},   {Py_tp_new, client_new},
    {Py_tp_init, client_init},         {Py_tp_dealloc, client_dealloc},
    {Py_tp_traverse, client_traverse}, {Py_tp_clear, client_clear},
    {Py_tp_repr, client_repr},         {Py_tp_methods, client_methods},
    {Py_tp_getset, client_getset},     {0, NULL},
};

static PyType_Spec client_spec = {
    .name = "arctic_rl_c.ArcticRLClient",
    .basicsize = (int)sizeof(arl_client_t),
    .flags =
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = client_slots,
};

PyMethodDef arl_client_methods[] = {{NULL, NULL, 0, NULL}};

int
arl_client_exec(PyObject *module, arl_state_t *state)
{
    return arl_state_add_type(module, &client_spec, &state->client_type);
}
