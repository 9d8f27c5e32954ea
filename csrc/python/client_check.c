/* SPDX-License-Identifier: Apache-2.0 */
/* The small arguments of the client's calls: sampling parameters, sleep, wake, checkpoints. */
#include "python/client_check.h"

#include "python/errors.h"
#include "python/tensor.h"

#include <math.h>

typedef struct arl_value_rule {
    const char *key;
    bool whole;         /* no fraction */
    bool above;         /* `least` itself is too little */
    double least, most; /* NaN is outside of any bounds */
    const char *wanted;
} arl_value_rule_t;

/* Bounds that all servers share. What is narrower on some, or depends on the model, is theirs. */
static const arl_value_rule_t sampling_rules[] = {
    {"temperature", false, false, 0, HUGE_VAL, "a number from 0 on"},
    {"top_p", false, true, 0, 1, "a number above 0 and at most 1"},
    {"min_p", false, false, 0, 1, "a number from 0 to 1"},
    {"top_k", true, false, -1, HUGE_VAL, "a whole number: a limit, or -1 or 0 for none"},
    {"repetition_penalty", false, true, 0, HUGE_VAL, "a number above 0"},
    {"presence_penalty", false, false, -2, 2, "a number from -2 to 2"},
    {"frequency_penalty", false, false, -2, 2, "a number from -2 to 2"},
    {"n", true, false, 1, HUGE_VAL, "a whole number from 1 on"},
    {"max_tokens", true, false, 1, HUGE_VAL, "a whole number from 1 on"},
    {"min_tokens", true, false, 0, HUGE_VAL, "a whole number from 0 on"},
    {"logprobs", true, false, -1, HUGE_VAL, "a whole number, or None for none"},
    {"prompt_logprobs", true, false, -1, HUGE_VAL, "a whole number, or None for none"},
    {"seed", true, false, -HUGE_VAL, HUGE_VAL, "a whole number, or None"},
};

static const arl_value_rule_t checkpoint_rules[] = {
    {"step", true, false, 0, HUGE_VAL, "a whole number from 0 on, or None"},
    {"save_total_limit", true, false, 0, HUGE_VAL, "a whole number from 0 on, or None"},
};

/* A number of any kind as a double; false for everything else. Large ints become infinite. */
static bool
read_number(PyObject *value, double *number_p)
{
    bool found = true;

    if (PyUnicode_Check(value) || PyBytes_Check(value) || PyByteArray_Check(value)) {
        return false;
    }
    *number_p = PyFloat_AsDouble(value);
    if (*number_p == -1.0 && PyErr_Occurred()) {
        found = PyErr_ExceptionMatches(PyExc_OverflowError);
        PyErr_Clear();
        *number_p = HUGE_VAL;
        if (found && PyLong_Check(value)) {
            int overflow;

            (void)PyLong_AsLongAndOverflow(value, &overflow);
            *number_p = overflow < 0 ? -HUGE_VAL : HUGE_VAL;
        }
    }
    return found;
}

static bool
is_within(const arl_value_rule_t *rule, double number)
{
    if (rule->whole && isfinite(number) && floor(number) != number) {
        return false;
    }
    return (rule->above ? number > rule->least : number >= rule->least) && number <= rule->most;
}

/* "generate: sampling_params['n'] is 0; a whole number from 1 on is needed". The value may be
 * borrowed from what its own __repr__ empties. */
static int
refuse(const arl_client_t *client, const char *operation, const char *where, PyObject *value,
       const char *wanted)
{
    PyObject *held = Py_NewRef(value), *repr = PyObject_Repr(held);
    const char *shown = repr == NULL ? NULL : PyUnicode_AsUTF8(repr);

    if (shown == NULL) { /* lone surrogates, or a __repr__ that fails */
        PyErr_Clear();
        shown = "";
    }
    (void)arl_raise_format(client->state, ARL_ERR_PAYLOAD, operation,
                           "%s: %s is %.80s (a %s); %s is needed", operation, where, shown,
                           arl_type_name(held), wanted);
    Py_XDECREF(repr);
    Py_DECREF(held);
    return -1;
}

/* `prefix` and `suffix` are put around the key, where a message names it. */
static int
check_values(const arl_client_t *client, const char *operation, const char *prefix,
             const char *suffix, const arl_value_rule_t *rules, size_t count, PyObject *given)
{
    for (size_t i = 0; i < count; i++) {
        PyObject *key = PyUnicode_FromString(rules[i].key), *value = NULL;
        double number = 0;
        int status = 0;

        /* Its own reference: a number's __float__ may take it out of the dict. */
        if (key == NULL || PyDict_GetItemRef(given, key, &value) < 0) {
            Py_XDECREF(key);
            return -1;
        }
        Py_DECREF(key);
        if (value != NULL && value != Py_None &&
            (!read_number(value, &number) || !is_within(&rules[i], number))) {
            char where[64];

            (void)snprintf(where, sizeof(where), "%s%s%s", prefix, rules[i].key, suffix);
            status = refuse(client, operation, where, value, rules[i].wanted);
        }
        Py_XDECREF(value);
        if (status < 0) {
            return status;
        }
    }
    return 0;
}

int
arl_client_check_sampling(const arl_client_t *client, PyObject *params)
{
    PyObject *key, *value;
    Py_ssize_t place = 0;

    while (PyDict_Next(params, &place, &key, &value)) { /* borrowed from params */
        if (!PyUnicode_Check(key)) {
            return refuse(client, "generate", "a key of sampling_params", key, "text");
        }
    }
    return check_values(client, "generate", "sampling_params['", "']", sampling_rules,
                        sizeof(sampling_rules) / sizeof(sampling_rules[0]), params);
}

PyObject *
arl_client_check_level(const arl_client_t *client, PyObject *level)
{
    PyObject *index;
    long number;

    if (level == NULL) {
        return PyLong_FromLong(1);
    }
    if (PyBool_Check(level) || !PyIndex_Check(level)) {
        return PyErr_Format(PyExc_TypeError,
                            "sleep_inference() argument 'level' must be 1 or 2, not a %s",
                            arl_type_name(level));
    }
    index = PyNumber_Index(level);
    if (index == NULL) {
        return NULL;
    }
    number = PyLong_AsLong(index);
    if (number != 1 && number != 2) {
        PyErr_Clear(); /* a number of too many digits is neither */
        (void)refuse(client, "sleep_inference", "level", index,
                     "1 (keep the weights aside) or 2 (drop them)");
        Py_CLEAR(index);
    }
    return index;
}

int
arl_client_check_tags(const arl_client_t *client, PyObject *tags)
{
    static const char wanted[] = "'weights' or 'kv_cache'";

    if (tags == NULL || tags == Py_None) {
        return 0;
    }
    if (!PyList_Check(tags) && !PyTuple_Check(tags)) {
        PyErr_Format(PyExc_TypeError,
                     "wake_up_inference() argument 'tags' must be a list of text or None, not a "
                     "%s",
                     arl_type_name(tags));
        return -1;
    }
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(tags); i++) {
        PyObject *tag = PySequence_Fast_GET_ITEM(tags, i); /* borrowed, only looked at */
        char where[32];

        if (PyUnicode_Check(tag) && (PyUnicode_CompareWithASCIIString(tag, "weights") == 0 ||
                                     PyUnicode_CompareWithASCIIString(tag, "kv_cache") == 0)) {
            continue;
        }
        (void)snprintf(where, sizeof(where), "tags[%zd]", i);
        return refuse(client, "wake_up_inference", where, tag, wanted);
    }
    if (PySequence_Fast_GET_SIZE(tags) == 0) {
        return refuse(client, "wake_up_inference", "tags", tags,
                      "at least one of 'weights' and 'kv_cache', or None for both,");
    }
    return 0;
}

/* Makes text of a path object. */
static int
check_path(const arl_client_t *client, const char *operation, PyObject *keywords)
{
    PyObject *path = NULL, *text;
    int status = PyDict_GetItemRef(keywords, client->state->names.path, &path);

    if (status <= 0 || path == Py_None) {
        Py_XDECREF(path);
        return status < 0 ? -1 : 0;
    }
    text = PyOS_FSPath(path);
    if (text != NULL && PyUnicode_Check(text)) {
        status = PyDict_SetItem(keywords, client->state->names.path, text);
    }
    else {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError,
                     "%s() argument 'path' must be text, a path object or None, not a %s",
                     operation, arl_type_name(path));
        status = -1;
    }
    Py_XDECREF(text);
    Py_DECREF(path);
    return status < 0 ? -1 : 0;
}

int
arl_client_check_checkpoint(const arl_client_t *client, const char *operation, PyObject *keywords)
{
    if (check_path(client, operation, keywords) < 0) {
        return -1;
    }
    return check_values(client, operation, "", "", checkpoint_rules,
                        sizeof(checkpoint_rules) / sizeof(checkpoint_rules[0]), keywords);
}
