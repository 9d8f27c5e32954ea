/* SPDX-License-Identifier: Apache-2.0 */
/* generate: prompts in whatever form they come, to the form that the server takes. */
#include "python/client.h"

#include "python/args.h"
#include "python/client_check.h"
#include "python/errors.h"
#include "python/operation.h"
#include "python/tensor.h"

static const char *const operation = "generate";

/* ---- token ids ------------------------------------------------------------------------------- */

/* A token id, as it will be sent: ints untouched, NumPy integers as int. */
static PyObject *
token_id(const arl_client_t *client, PyObject *item, Py_ssize_t prompt, Py_ssize_t place)
{
    PyObject *id = NULL;
    int overflow = 0;

    if (PyLong_CheckExact(item)) {
        id = Py_NewRef(item);
    }
    else if (!PyBool_Check(item) && PyIndex_Check(item)) {
        id = PyNumber_Index(item);
    }
    if (id == NULL || PyLong_AsLongLongAndOverflow(id, &overflow) < 0 || overflow != 0) {
        PyErr_Clear();
        Py_XDECREF(id);
        return arl_raise_format(client->state, ARL_ERR_PAYLOAD, operation,
                                "generate: prompt %zd holds, at place %zd, what is no token id "
                                "(a %s); ints from 0 on are needed",
                                prompt, place, arl_type_name(item));
    }
    return id;
}

static PyObject *
ids_from_sequence(const arl_client_t *client, PyObject *sequence, Py_ssize_t prompt)
{
    PyObject *items = PySequence_Tuple(sequence), *ids; /* a snapshot: the caller's may change */

    ids = items == NULL ? NULL : PyList_New(PyTuple_GET_SIZE(items));
    for (Py_ssize_t i = 0; ids != NULL && i < PyTuple_GET_SIZE(items); i++) {
        PyObject *item = PyTuple_GET_ITEM(items, i); /* borrowed from items */
        PyObject *id = token_id(client, item, prompt, i);

        if (id == NULL) {
            Py_CLEAR(ids);
            break;
        }
        PyList_SET_ITEM(ids, i, id);
    }
    Py_XDECREF(items);
    return ids;
}

/* A 1-D tensor or array of int32 or int64. */
static PyObject *
ids_from_tensor(const arl_client_t *client, PyObject *object)
{
    int64_t *values, count;
    PyObject *ids;

    if (arl_tensor_read_int64(client->state, object, "prompt_ids", ARL_ERR_PAYLOAD, &values,
                              &count) < 0) {
        return NULL;
    }
    ids = PyList_New((Py_ssize_t)count);
    for (int64_t i = 0; ids != NULL && i < count; i++) {
        PyObject *id = PyLong_FromLongLong(values[i]);

        if (id == NULL) {
            Py_CLEAR(ids);
            break;
        }
        PyList_SET_ITEM(ids, (Py_ssize_t)i, id);
    }
    PyMem_Free(values);
    return ids;
}

/* The sampler's own words for a prompt that fills its context speak of max_tokens. */
static int
check_length(const arl_client_t *client, Py_ssize_t prompt, Py_ssize_t length)
{
    if (length == 0) {
        (void)arl_raise_format(client->state, ARL_ERR_PAYLOAD, operation,
                               "generate: prompt %zd is empty", prompt);
        return -1;
    }
    if (length >= client->context_limit) {
        (void)arl_raise_format(client->state, ARL_ERR_PAYLOAD, operation,
                               "generate: prompt %zd has %zd tokens, which leaves no room for an "
                               "answer in the sampler's %lld (rollout.max_model_len, else "
                               "data.max_prompt_length + max_response_length)",
                               prompt, length, (long long)client->context_limit);
        return -1;
    }
    return 0;
}

static PyObject *
decode(arl_client_t *client, PyObject *ids)
{
    PyObject *text;

    if (client->tokenizer == Py_None) {
        return arl_raise_format(client->state, ARL_ERR_CONFIG, operation,
                                "generate: prompts have to be sent as text%s, for which "
                                "ArcticRLClient needs a tokenizer",
                                client->accepts_token_ids ? ""
                                                          : " (the server takes nothing else)");
    }
    if (client->prompts_as == ARL_PROMPTS_AUTO &&
        arl_payload_warn(&client->warned, ARL_WARN_DECODES,
                         "generate: the server takes text only, so that token ids are decoded and "
                         "encoded again; the sampler may see other ids than the trainer") < 0) {
        return NULL;
    }
    text = PyObject_CallMethodOneArg(client->tokenizer, client->state->names.decode, ids);
    if (text != NULL && !PyUnicode_Check(text)) {
        PyErr_Format(PyExc_TypeError, "generate: the tokenizer's decode() returned a %s, not text",
                     arl_type_name(text));
        Py_CLEAR(text);
    }
    return text;
}

/* ---- one prompt ------------------------------------------------------------------------------ */

static PyObject *
prompt_from_text(const arl_client_t *client, PyObject *text, Py_ssize_t prompt)
{
    if (client->prompts_as == ARL_PROMPTS_IDS) {
        return arl_raise_format(client->state, ARL_ERR_PAYLOAD, operation,
                                "generate: prompt %zd is text, but prompts_as is 'ids'", prompt);
    }
    return Py_NewRef(text);
}

static PyObject *
prompt_convert(arl_client_t *client, PyObject *object, Py_ssize_t prompt)
{
    const bool as_ids = client->prompts_as == ARL_PROMPTS_IDS ||
                        (client->prompts_as == ARL_PROMPTS_AUTO && client->accepts_token_ids);
    PyObject *ids;

    if (PyUnicode_Check(object)) {
        return prompt_from_text(client, object, prompt);
    }
    ids = PyList_Check(object) || PyTuple_Check(object) ? ids_from_sequence(client, object, prompt)
                                                        : ids_from_tensor(client, object);
    if (ids != NULL && check_length(client, prompt, PyList_GET_SIZE(ids)) < 0) {
        Py_CLEAR(ids);
    }
    if (ids != NULL && !as_ids) {
        Py_SETREF(ids, decode(client, ids));
    }
    return ids;
}

/* A list of prompts, as opposed to one prompt that is a list of ids. */
static bool
is_batch(PyObject *prompts)
{
    PyObject *first;

    if ((!PyList_Check(prompts) && !PyTuple_Check(prompts)) || PySequence_Size(prompts) == 0) {
        return false;
    }
    /* borrowed from prompts, only looked at */
    first = PyList_Check(prompts) ? PyList_GET_ITEM(prompts, 0) : PyTuple_GET_ITEM(prompts, 0);
    if (PyLong_Check(first)) {
        return false;
    }
    if (PyObject_Size(first) < 0) { /* a number of some other kind, or a tensor without axes */
        PyErr_Clear();
        return false;
    }
    return true;
}

static PyObject *
prompts_convert(arl_client_t *client, PyObject *prompts)
{
    PyObject *items, *list;

    if (!client->accepts_token_ids && client->prompts_as == ARL_PROMPTS_IDS) {
        return arl_raise_format(client->state, ARL_ERR_CONFIG, operation,
                                "generate: prompts_as is 'ids', but the server takes text only");
    }
    if ((PyList_Check(prompts) || PyTuple_Check(prompts)) && PySequence_Size(prompts) == 0) {
        return arl_raise_format(client->state, ARL_ERR_PAYLOAD, operation,
                                "generate: there is no prompt: prompt_ids is an empty %s",
                                arl_type_name(prompts));
    }
    items = is_batch(prompts) ? PySequence_Tuple(prompts) : PyTuple_Pack(1, prompts);
    list = items == NULL ? NULL : PyList_New(PyTuple_GET_SIZE(items));
    for (Py_ssize_t i = 0; list != NULL && i < PyTuple_GET_SIZE(items); i++) {
        PyObject *item = PyTuple_GET_ITEM(items, i); /* borrowed from items */
        PyObject *prompt = prompt_convert(client, item, i);

        if (prompt == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, i, prompt);
    }
    Py_XDECREF(items);
    return list;
}

/* ---- sampling parameters, routing ------------------------------------------------------------ */

/* The recorded defaults, under what is given. */
static PyObject *
sampling_merge(const arl_client_t *client, PyObject *given)
{
    PyObject *merged = Py_BuildValue("{s:d,s:d,s:i,s:i}", "temperature", 0.0, "top_p", 1.0, "top_k",
                                     0, "max_tokens", 1024);
    PyObject *budget;

    if (merged == NULL) {
        return NULL;
    }
    if (given != NULL && given != Py_None) {
        if (!PyMapping_Check(given) || PyUnicode_Check(given) || PyList_Check(given)) {
            PyErr_Format(PyExc_TypeError,
                         "generate() argument 'sampling_params' must be a mapping, not %s",
                         arl_type_name(given));
            goto release_merged;
        }
        if (PyDict_Update(merged, given) < 0) {
            goto release_merged;
        }
    }
    /* borrowed from merged */
    budget = PyDict_GetItemWithError(merged, client->state->names.max_tokens);
    if (budget != NULL && PyLong_Check(budget)) {
        int overflow; /* of a number of many digits: its sign */
        const long long tokens = PyLong_AsLongLongAndOverflow(budget, &overflow);

        if (overflow < 0 || (overflow == 0 && tokens < 1)) {
            (void)arl_raise_format(client->state, ARL_ERR_PAYLOAD, operation,
                                   "generate: max_tokens leaves no room for an answer, at least 1 "
                                   "is needed");
            goto release_merged;
        }
    }
    if (arl_client_check_sampling(client, merged) < 0) {
        goto release_merged;
    }
    return merged;
release_merged:
    Py_DECREF(merged);
    return NULL;
}

static int
check_routing_key(const arl_client_t *client, PyObject *key, Py_ssize_t prompts)
{
    if (PyList_Check(key) && PyList_GET_SIZE(key) != prompts) {
        (void)arl_raise_format(client->state, ARL_ERR_PAYLOAD, operation,
                               "generate: %zd routing keys for %zd prompts", PyList_GET_SIZE(key),
                               prompts);
        return -1;
    }
    return 0;
}

/*
 * The flat generation's call always names the key where the server knows keys, the nested one
 * only names what is given. What the server does not know is left out, not without a word.
 */
static int
routing_add(arl_client_t *client, PyObject *keywords, PyObject *key, PyObject *strict,
            Py_ssize_t prompts)
{
    const arl_state_t *state = client->state;
    const bool has_key = key != NULL && key != Py_None;

    if (has_key && check_routing_key(client, key, prompts) < 0) {
        return -1;
    }
    if (client->accepts_routing_key) {
        if ((has_key || !client->rules.final) &&
            PyDict_SetItem(keywords, state->names.routing_key, has_key ? key : Py_None) < 0) {
            return -1;
        }
    }
    else if (has_key && arl_payload_warn(&client->warned, ARL_WARN_ROUTING_KEY,
                                         "generate: the server takes no routing_key; it is left "
                                         "out and prompts go where the server sends them") < 0) {
        return -1;
    }
    if (strict == NULL || strict == Py_None) {
        return 0;
    }
    if (client->accepts_strict) {
        return PyDict_SetItem(keywords, state->names.strict, strict);
    }
    if (strict != Py_True) {
        return 0; /* not strict is what a server without the option is */
    }
    return arl_payload_warn(&client->warned, ARL_WARN_STRICT,
                            "generate: the server takes no strict; routing is a preference there");
}

/* ---- answers --------------------------------------------------------------------------------- */

/* A caller pairs answers with prompts by their place: one too few, and all behind it are wrong. */
static int
check_answer(const arl_operation_t *op, PyObject *answer)
{
    if (!PyList_Check(answer)) {
        (void)arl_raise_format(op->state, ARL_ERR_PAYLOAD, operation,
                               "generate: the transport's answer is a %s, a list with a dict for "
                               "each prompt is needed",
                               arl_type_name(answer));
        return -1;
    }
    if (PyList_GET_SIZE(answer) != op->rows) {
        (void)arl_raise_format(op->state, ARL_ERR_PAYLOAD, operation,
                               "generate: the transport gave %zd answers to %lld prompts",
                               PyList_GET_SIZE(answer), (long long)op->rows);
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(answer); i++) {
        PyObject *item = PyList_GET_ITEM(answer, i); /* borrowed, only looked at */

        if (!PyMapping_Check(item) || PySequence_Check(item)) {
            (void)arl_raise_format(op->state, ARL_ERR_PAYLOAD, operation,
                                   "generate: the transport's answer to prompt %zd is a %s, a "
                                   "dict is needed",
                                   i, arl_type_name(item));
            return -1;
        }
    }
    return 0;
}

static int
generate_advance(arl_operation_t *op, PyObject *answer, PyObject **next_p)
{
    if (answer != NULL && check_answer(op, answer) < 0) {
        return -1;
    }
    return arl_operation_single.advance(op, answer, next_p);
}

static void
generate_describe(const arl_operation_t *op, char *text, size_t size)
{
    arl_operation_single.describe(op, text, size);
}

const arl_operation_kind_t arl_operation_generate = {generate_advance, generate_describe, NULL};

const char arl_client_generate_doc[] =
    "generate($self, prompt_ids, sampling_params=None, routing_key=None, *, strict=None)\n"
    "--\n\n"
    "Sample answers to one prompt or to a batch of them.\n\n"
    "Parameters\n"
    "----------\n"
    "prompt_ids : list of int, str, or list of either\n"
    "    Token ids (a list, tuple, or 1-D array or tensor of int32 or int64) or text. Ids go to\n"
    "    the server untouched where it takes ids; see prompts_as of ArcticRLClient.\n"
    "sampling_params : mapping, optional\n"
    "    Over the defaults temperature 0.0, top_p 1.0, top_k 0, max_tokens 1024. Names that\n"
    "    are not known here go on to the server.\n"
    "routing_key : str, or list of str or None, optional\n"
    "    Prompts of one key prefer one replica; a list has one entry a prompt. Passed on\n"
    "    unchanged where the server takes it, left out with a warning where not.\n"
    "strict : bool, optional\n"
    "    Wait for that replica rather than use another. Passed on likewise.\n\n"
    "Awaiting gives the transport's list, one dict a prompt. Raises PayloadError for what is no\n"
    "prompt, an empty one, one that fills the sampler's context, a sampling parameter that no\n"
    "server takes (n=0, a NaN), or an answer that is not one dict for each prompt;\n"
    "ConfigError where the prompts cannot be brought to a form that the server takes.";

PyObject *
arl_client_generate(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"prompt_ids", "sampling_params", "routing_key", "strict"};
    static const arl_signature_t signature = {"generate", 4, 3, 1, names};
    arl_client_t *client = (arl_client_t *)self;
    PyObject *bound[4], *prompts, *sampling = NULL, *keywords = NULL;
    arl_operation_t *op = NULL;

    if (arl_args_bind(&signature, args, nargs, kwnames, bound) < 0 ||
        arl_client_check_open(client, operation) < 0) {
        return NULL;
    }
    prompts = prompts_convert(client, bound[0]);
    sampling = prompts == NULL ? NULL : sampling_merge(client, bound[1]);
    keywords = sampling == NULL ? NULL : PyDict_New();
    if (keywords != NULL && PyDict_SetItem(keywords, client->state->names.prompts, prompts) == 0 &&
        PyDict_SetItem(keywords, client->state->names.sampling_params, sampling) == 0 &&
        routing_add(client, keywords, bound[2], bound[3], PyList_GET_SIZE(prompts)) == 0) {
        op = arl_operation_new(client, &arl_operation_generate, operation);
    }
    if (op != NULL) {
        op->method = Py_NewRef(client->state->names.generate);
        op->payload = Py_NewRef(keywords);
        op->rows = PyList_GET_SIZE(prompts);
    }
    Py_XDECREF(keywords);
    Py_XDECREF(sampling);
    Py_XDECREF(prompts);
    return (PyObject *)op;
}
