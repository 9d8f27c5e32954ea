/* SPDX-License-Identifier: Apache-2.0 */
/* compute_log_prob: one call, and the answer in the shape that trainers read. */
#include "python/operation.h"

#include "python/errors.h"
#include "python/tensor.h"

/* ---- answers, for all kinds ------------------------------------------------------------------ */

/* What may be asked for a key: whatever has items, but sequences, whose places are numbers. */
static bool
has_keys(PyObject *object)
{
    return PyMapping_Check(object) && !PyList_Check(object) && !PyTuple_Check(object) &&
           !PyUnicode_Check(object) && !PyBytes_Check(object) && !PyByteArray_Check(object);
}

PyObject *
arl_operation_member(arl_operation_t *op, PyObject *answer, PyObject *name, const char *method)
{
    PyObject *member = NULL;

    if (has_keys(answer)) {
        member = PyObject_GetItem(answer, name);
        if (member != NULL || !PyErr_ExceptionMatches(PyExc_LookupError)) {
            return member;
        }
        PyErr_Clear();
    }
    return arl_raise_format(op->state, ARL_ERR_PAYLOAD, op->name,
                            "%s: the server's answer to %s (a %s) has no '%s'", op->name, method,
                            arl_type_name(answer), PyUnicode_AsUTF8(name));
}

PyObject *
arl_operation_metrics(arl_operation_t *op, PyObject *answer, const char *method)
{
    PyObject *member = arl_operation_member(op, answer, op->state->names.metrics, method);
    PyObject *metrics = NULL;

    if (member == NULL) {
        return NULL;
    }
    if (!has_keys(member)) {
        (void)arl_raise_format(
            op->state, ARL_ERR_PAYLOAD, op->name,
            "%s: metrics in the server's answer to %s are a %s, a dict is needed", op->name, method,
            arl_type_name(member));
    }
    else {
        metrics = PyDict_New();
        if (metrics != NULL && PyDict_Update(metrics, member) < 0) {
            Py_CLEAR(metrics);
        }
    }
    Py_DECREF(member);
    return metrics;
}

/* ---- log-probs ------------------------------------------------------------------------------- */

/* One value a slot of the padded batch, or the answer is for another batch. */
static int
check_shape(arl_operation_t *op, PyObject *object, PyObject *name)
{
    arl_tensor_t tensor = {0};
    char text[96];
    bool fits;

    if (arl_tensor_import(op->state, object, PyUnicode_AsUTF8(name), 0, ARL_ERR_PAYLOAD, &tensor) <
        0) {
        return -1;
    }
    fits = tensor.view.ndim == 2 && tensor.view.shape[0] == op->rows &&
           tensor.view.shape[1] == op->width;
    if (!fits) {
        arl_view_describe(&tensor.view, text, sizeof(text));
        (void)arl_raise_format(op->state, ARL_ERR_PAYLOAD, op->name,
                               "%s: the server's %s are %s, [%lld, %lld] is needed", op->name,
                               PyUnicode_AsUTF8(name), text, (long long)op->rows,
                               (long long)op->width);
    }
    arl_tensor_release(&tensor);
    return fits ? 0 : -1;
}

/* {"log_probs": …[, "entropy": …]} */
static PyObject *
shape_model_output(arl_operation_t *op, PyObject *batch)
{
    arl_state_t *state = op->state;
    PyObject *output = PyDict_New(), *log_probs, *entropy = NULL;

    log_probs = output == NULL
                    ? NULL
                    : arl_operation_member(op, batch, state->names.logprobs, "fwd_no_grad");
    if (log_probs == NULL || check_shape(op, log_probs, state->names.logprobs) < 0 ||
        PyDict_SetItem(output, state->names.log_probs, log_probs) < 0) {
        goto release_output;
    }
    if (op->wants_entropy) {
        const int found = arl_payload_data_get(state, batch, state->names.entropy, &entropy);

        if (found < 0 ||
            (found > 0 && (check_shape(op, entropy, state->names.entropy) < 0 ||
                           PyDict_SetItem(output, state->names.entropy, entropy) < 0))) {
            goto release_output;
        }
    }
    Py_XDECREF(entropy);
    Py_DECREF(log_probs);
    return output;
release_output:
    Py_XDECREF(entropy);
    Py_XDECREF(log_probs);
    Py_XDECREF(output);
    return NULL;
}

static PyObject *
shape_log_prob(arl_operation_t *op, PyObject *answer)
{
    arl_state_t *state = op->state;
    PyObject *batch = arl_operation_member(op, answer, state->names.batch, "fwd_no_grad");
    PyObject *output = batch == NULL ? NULL : shape_model_output(op, batch);
    PyObject *metrics = output == NULL ? NULL : arl_operation_metrics(op, answer, "fwd_no_grad");
    PyObject *result = metrics == NULL ? NULL : PyDict_New();

    if (result != NULL && (PyDict_SetItem(result, state->names.model_output, output) < 0 ||
                           PyDict_SetItem(result, state->names.metrics, metrics) < 0)) {
        Py_CLEAR(result);
    }
    Py_XDECREF(metrics);
    Py_XDECREF(output);
    Py_XDECREF(batch);
    return result;
}

static int
log_prob_advance(arl_operation_t *op, PyObject *answer, PyObject **next_p)
{
    const arl_client_t *client = (const arl_client_t *)op->client;
    PyObject *arguments[3], *keywords;

    if (answer != NULL) {
        *next_p = shape_log_prob(op, answer);
        return *next_p == NULL ? -1 : 0;
    }
    if (arl_client_check_open(client, op->name) < 0) {
        return -1;
    }
    keywords = PyTuple_Pack(1, op->state->names.reference_model);
    if (keywords == NULL) {
        return -1;
    }
    arguments[0] = client->transport;
    arguments[1] = op->payload;
    arguments[2] = op->reference ? Py_True : Py_False;
    *next_p = PyObject_VectorcallMethod(op->state->names.fwd_no_grad, arguments,
                                        2 | PY_VECTORCALL_ARGUMENTS_OFFSET, keywords);
    Py_DECREF(keywords);
    Py_CLEAR(op->payload); /* the call has it now, and lets go of it when it can */
    return *next_p == NULL ? -1 : 1;
}

static void
log_prob_describe(const arl_operation_t *op, char *text, size_t size)
{
    (void)snprintf(text, size, "failed in fwd_no_grad(reference_model=%s) of %lld rows",
                   op->reference ? "True" : "False", (long long)op->rows);
}

const arl_operation_kind_t arl_operation_log_prob = {log_prob_advance, log_prob_describe, NULL};
