/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ArcticRLClient: a transport, a config, and what follows from the two. Methods build what is to
 * be sent at once, so that a bad batch is refused where it was passed in, and return operations
 * that send it when awaited. Here is its life; its methods are in client_*.c.
 */
#include "python/client.h"

#include "python/config.h"
#include "python/errors.h"

#include <string.h>

/* ---- life ------------------------------------------------------------------------------------ */

/* A subclass may have its own __init__ and forget ours. */
int
arl_client_check_ready(const arl_client_t *client, const char *operation)
{
    if (client->transport == NULL) {
        PyErr_Format(PyExc_RuntimeError, "%s: ArcticRLClient.__init__ has not been called",
                     operation);
        return -1;
    }
    return 0;
}

int
arl_client_check_open(const arl_client_t *client, const char *operation)
{
    if (arl_client_check_ready(client, operation) < 0) {
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

/* ---- what the transport says of itself ------------------------------------------------------- */

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

/* ---- what the config says beside the payload rules ------------------------------------------- */

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

/* ---- constructor ----------------------------------------------------------------------------- */

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

/* ---- type ------------------------------------------------------------------------------------ */

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

static PyMethodDef client_methods[] = {
#define CLIENT_METHOD(name)                                                                        \
    {#name, (PyCFunction)(void (*)(void))arl_client_##name, METH_FASTCALL | METH_KEYWORDS,         \
     arl_client_##name##_doc},
    ARL_CLIENT_METHODS(CLIENT_METHOD)
#undef CLIENT_METHOD
#define CLIENT_METHOD(name) {#name, arl_client_##name, METH_NOARGS, arl_client_##name##_doc},
        ARL_CLIENT_METHODS_NOARGS(CLIENT_METHOD)
#undef CLIENT_METHOD
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
