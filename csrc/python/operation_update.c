/* SPDX-License-Identifier: Apache-2.0 */
/*
 * update_actor: for each epoch, for each mini-batch, forward-backward and then the optimizer
 * step; at the end one set of metrics (contract 4.4 and 4.5).
 */
#include "python/operation.h"

#include "python/errors.h"
#include "python/tensor.h"

#include <string.h>

/* ---- calls ----------------------------------------------------------------------------------- */

/* The payload of the next step. One that comes again in a later epoch is copied, because a server
 * in this process writes into what it gets; the last time it is handed over. */
static PyObject *
next_payload(arl_operation_t *op)
{
    const Py_ssize_t index = (Py_ssize_t)(op->steps_done % op->minibatches);
    const bool again = op->steps_done + op->minibatches < op->steps;
    PyObject *payload = PyList_GET_ITEM(op->payload, index); /* borrowed from op->payload */

    if (again) {
        return arl_payload_copy(op->state, payload);
    }
    Py_INCREF(payload);
    if (PyList_SetItem(op->payload, index, Py_NewRef(Py_None)) < 0) {
        Py_DECREF(payload);
        return NULL;
    }
    return payload;
}

static PyObject *
call_forward_backward(arl_operation_t *op)
{
    const arl_client_t *client = (const arl_client_t *)op->client;
    PyObject *payload, *arguments[2], *awaitable;

    if (client->phase != ARL_CLIENT_OPEN) {
        return arl_raise_format(op->state, ARL_ERR_CLOSED, op->name,
                                "%s: the client was destroyed after %lld of %lld optimizer steps",
                                op->name, (long long)op->steps_done, (long long)op->steps);
    }
    payload = next_payload(op);
    if (payload == NULL) {
        return NULL;
    }
    arguments[0] = client->transport;
    arguments[1] = payload;
    awaitable = PyObject_VectorcallMethod(op->state->names.fwd_bwd, arguments,
                                          2 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    Py_DECREF(payload);
    return awaitable;
}

/* ---- reduction ------------------------------------------------------------------------------- */

typedef struct mean {
    double sum;
    int64_t count;
} mean_t;

/* Adds every number in `value`, however deep in lists it lies. 1: it is numbers; 0: it is not; -1
 * error. */
static int
mean_add(arl_state_t *state, mean_t *mean, PyObject *value)
{
    PyObject *items;
    int numeric = 1, torch;

    if (PyFloat_Check(value) || PyLong_Check(value)) {
        const double number = PyFloat_AsDouble(value);

        if (number == -1.0 && PyErr_Occurred()) {
            if (!PyErr_ExceptionMatches(PyExc_OverflowError)) {
                return -1;
            }
            PyErr_Clear(); /* steps that were taken do not fail for a number without a mean */
            return 0;
        }
        mean->sum += number;
        mean->count++;
        return 1;
    }
    if (PyList_Check(value) || PyTuple_Check(value)) {
        if (Py_EnterRecursiveCall(" in nested metrics")) {
            return -1;
        }
        items = PySequence_Tuple(value); /* a snapshot: tolist() may be anybody's code */
        for (Py_ssize_t i = 0; items != NULL && numeric == 1 && i < PyTuple_GET_SIZE(items); i++) {
            numeric = mean_add(state, mean, PyTuple_GET_ITEM(items, i)); /* borrowed from items */
        }
        Py_LeaveRecursiveCall();
        Py_XDECREF(items);
        return items == NULL ? -1 : numeric;
    }
    torch = PyArray_Check(value) || PyArray_IsScalar(value, Number)
                ? 1
                : arl_is_torch_tensor(state, value);
    if (torch <= 0) {
        return torch;
    }
    items = PyObject_CallMethodNoArgs(value, state->names.tolist); /* a number, or lists of them */
    numeric = items == NULL ? -1 : mean_add(state, mean, items);
    Py_XDECREF(items);
    return numeric;
}

/* The first element of a list, at any depth; anything else itself. */
static PyObject *
first_element(PyObject *value)
{
    while ((PyList_Check(value) || PyTuple_Check(value)) && PySequence_Size(value) > 0) {
        /* borrowed from the list around it */
        value = PyList_Check(value) ? PyList_GET_ITEM(value, 0) : PyTuple_GET_ITEM(value, 0);
    }
    return Py_NewRef(value);
}

/* The value of `key` over all steps: the mean of the numbers; of other values the last. */
static PyObject *
reduce_key(arl_operation_t *op, PyObject *key, bool first_only)
{
    mean_t mean = {0.0, 0};
    PyObject *last = NULL; /* strong */
    int numeric = 1;

    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(op->answers); i++) {
        PyObject *answer = PyList_GET_ITEM(op->answers, i), *value; /* borrowed from op->answers */
        const int found = PyDict_GetItemRef(answer, key, &value);

        if (found < 0) {
            Py_XDECREF(last);
            return NULL;
        }
        if (found == 0) {
            continue;
        }
        if (first_only) {
            Py_SETREF(value, first_element(value));
        }
        if (numeric == 1) {
            numeric = mean_add(op->state, &mean, value);
        }
        Py_XSETREF(last, value);
        if (numeric < 0) {
            Py_XDECREF(last);
            return NULL;
        }
    }
    if (numeric == 1 && mean.count > 0) {
        Py_XDECREF(last);
        return PyFloat_FromDouble(mean.sum / (double)mean.count);
    }
    return last; /* never NULL: the key came from one of the answers */
}

static bool
starts_with(PyObject *key, const char *prefix)
{
    const char *text = PyUnicode_Check(key) ? PyUnicode_AsUTF8(key) : NULL;

    if (text == NULL) {
        PyErr_Clear();
        return false;
    }
    return strncmp(text, prefix, strlen(prefix)) == 0;
}

/* All keys but loss and the learning rate, in the order of their first appearance. */
static int
reduce_rest(arl_operation_t *op, PyObject *metrics)
{
    const arl_state_t *state = op->state;

    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(op->answers); i++) {
        PyObject *answer = PyList_GET_ITEM(op->answers, i); /* borrowed from op->answers */
        PyObject *key, *unused;
        Py_ssize_t place = 0;

        /* borrowed from answer, which is ours alone and does not change */
        while (PyDict_Next(answer, &place, &key, &unused)) {
            PyObject *value;
            int known = PyDict_Contains(metrics, key);

            if (known == 0) {
                known = PyObject_RichCompareBool(key, state->names.loss, Py_EQ);
            }
            if (known == 0) {
                known = PyObject_RichCompareBool(key, state->names.last_lr, Py_EQ);
            }
            if (known != 0) {
                if (known < 0) {
                    return -1;
                }
                continue;
            }
            value = reduce_key(op, key, starts_with(key, "mtp_losses"));
            known = value == NULL ? -1 : PyDict_SetItem(metrics, key, value);
            Py_XDECREF(value);
            if (known < 0) {
                return -1;
            }
        }
    }
    return 0;
}

/* `last_lr` of the last step that has one becomes `lr`, as it is. */
static int
reduce_learning_rate(arl_operation_t *op, PyObject *metrics)
{
    for (Py_ssize_t i = PyList_GET_SIZE(op->answers) - 1; i >= 0; i--) {
        PyObject *answer = PyList_GET_ITEM(op->answers, i), *value; /* borrowed from op->answers */
        const int found = PyDict_GetItemRef(answer, op->state->names.last_lr, &value);
        int status;

        if (found < 0) {
            return -1;
        }
        if (found > 0) {
            status = PyDict_SetItem(metrics, op->state->names.lr, value);
            Py_DECREF(value);
            return status;
        }
    }
    return 0;
}

/* The flat generation makes one step and changes nothing but two names. */
static PyObject *
reduce_flat(arl_operation_t *op, PyObject **loss_p)
{
    /* borrowed from op->answers, to be copied */
    PyObject *metrics = PyDict_Copy(PyList_GET_ITEM(op->answers, 0)), *loss = NULL;
    const arl_state_t *state = op->state;

    if (metrics == NULL) {
        return NULL;
    }
    if (PyDict_GetItemRef(metrics, state->names.loss, &loss) <= 0 || /* checked before */
        PyDict_DelItem(metrics, state->names.loss) < 0 || reduce_learning_rate(op, metrics) < 0 ||
        (PyDict_Contains(metrics, state->names.last_lr) == 1 &&
         PyDict_DelItem(metrics, state->names.last_lr) < 0)) {
        Py_XDECREF(loss);
        Py_DECREF(metrics);
        return NULL;
    }
    *loss_p = loss;
    return metrics;
}

static PyObject *
reduce_steps(arl_operation_t *op, PyObject **loss_p)
{
    PyObject *metrics = PyDict_New(), *loss;

    if (metrics == NULL) {
        return NULL;
    }
    loss = reduce_key(op, op->state->names.loss, false);
    if (loss == NULL || reduce_rest(op, metrics) < 0 || reduce_learning_rate(op, metrics) < 0) {
        Py_XDECREF(loss);
        Py_DECREF(metrics);
        return NULL;
    }
    *loss_p = loss;
    return metrics;
}

static PyObject *
update_result(arl_operation_t *op)
{
    const arl_client_t *client = (const arl_client_t *)op->client;
    const arl_state_t *state = op->state;
    PyObject *loss = NULL, *result = NULL;
    PyObject *metrics = client->rules.final ? reduce_steps(op, &loss) : reduce_flat(op, &loss);

    if (metrics != NULL) {
        result = PyDict_New();
    }
    if (result != NULL &&
        (PyDict_SetItem(result, state->names.loss, loss) < 0 ||
         PyDict_SetItem(result, state->names.metrics, metrics) < 0 ||
         PyDict_SetItem(result, state->names.global_token_num, op->lengths) < 0)) {
        Py_CLEAR(result);
    }
    Py_XDECREF(metrics);
    Py_XDECREF(loss);
    return result;
}

/* ---- the machine ----------------------------------------------------------------------------- */

static int
take_forward_backward(arl_operation_t *op, PyObject *answer)
{
    PyObject *metrics = arl_operation_metrics(op, answer, "fwd_bwd");
    int found;

    if (metrics == NULL) {
        return -1;
    }
    found = PyDict_Contains(metrics, op->state->names.loss);
    if (found <= 0) {
        if (found == 0) {
            (void)arl_raise_format(op->state, ARL_ERR_PAYLOAD, op->name,
                                   "%s: metrics in the server's answer to fwd_bwd have no 'loss'",
                                   op->name);
        }
        Py_DECREF(metrics);
        return -1;
    }
    Py_XSETREF(op->partial, metrics);
    return 0;
}

/* The step's metrics, overridden by those of its forward-backward. */
static int
take_step(arl_operation_t *op, PyObject *answer)
{
    PyObject *metrics = arl_operation_metrics(op, answer, "step");
    int status = -1;

    if (metrics != NULL && PyDict_Update(metrics, op->partial) == 0) {
        status = PyList_Append(op->answers, metrics);
    }
    Py_XDECREF(metrics);
    return status;
}

static int
update_advance(arl_operation_t *op, PyObject *answer, PyObject **next_p)
{
    const arl_client_t *client = (const arl_client_t *)op->client;

    if (answer == NULL) {
        if (arl_client_check_open(client, op->name) < 0) {
            return -1;
        }
    }
    else if (!op->stepping) {
        if (take_forward_backward(op, answer) < 0) {
            return -1;
        }
        op->stepping = true;
        *next_p = PyObject_CallMethodNoArgs(client->transport, op->state->names.step);
        return *next_p == NULL ? -1 : 1;
    }
    else {
        op->steps_done++; /* it was taken, whatever its answer looks like */
        if (take_step(op, answer) < 0) {
            return -1;
        }
        op->stepping = false;
        if (op->steps_done == op->steps) {
            *next_p = update_result(op);
            return *next_p == NULL ? -1 : 0;
        }
    }
    *next_p = call_forward_backward(op);
    return *next_p == NULL ? -1 : 1;
}

static void
update_describe(const arl_operation_t *op, char *text, size_t size)
{
    const long long epochs = (long long)(op->steps / op->minibatches);
    /* A step whose answer was refused has been counted, but is still the one meant. */
    const int64_t index = op->steps_done - (op->stepping && op->steps_done > 0 &&
                                            PyList_GET_SIZE(op->answers) < op->steps_done);

    if (index == op->steps) {
        (void)snprintf(text, size,
                       "failed in making one of the metrics, after all %lld optimizer "
                       "steps",
                       (long long)op->steps);
        return;
    }
    (void)snprintf(text, size,
                   "failed in %s of mini-batch %lld of %lld (epoch %lld of %lld), after %lld of "
                   "%lld optimizer steps",
                   op->stepping ? "step" : "fwd_bwd", (long long)(index % op->minibatches) + 1,
                   (long long)op->minibatches, (long long)(index / op->minibatches) + 1, epochs,
                   (long long)op->steps_done, (long long)op->steps);
}

const arl_operation_kind_t arl_operation_update = {update_advance, update_describe, NULL};
