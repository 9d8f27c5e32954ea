/* SPDX-License-Identifier: Apache-2.0 */
/* The client's methods that send batches. */
#include "python/client.h"

#include "python/args.h"
#include "python/errors.h"
#include "python/operation.h"

static PyObject *
none_to_null(PyObject *value) /* borrowed */
{
    return value == Py_None ? NULL : value;
}

static arl_payload_request_t
request_new(arl_client_t *client, const char *operation)
{
    return (arl_payload_request_t){.operation = operation,
                                   .rules = &client->rules,
                                   .temperature_in_log_prob = client->temperature_in_log_prob,
                                   .server_limits = client->server_limits,
                                   .warned = &client->warned};
}

/* ---- compute_log_prob ------------------------------------------------------------------------ */

const char arl_client_compute_log_prob_doc[] =
    "compute_log_prob($self, data, *, pad_token_id, ref=False, calculate_entropy=False,\n"
    "                 rollout_n=None, temperature=None)\n"
    "--\n\n"
    "Log-probs (and entropy) of a batch under the trained or the reference model.\n\n"
    "Parameters\n"
    "----------\n"
    "data : mapping\n"
    "    The batch of B rows; see build_log_prob_payload.\n"
    "pad_token_id : int\n"
    "ref : bool\n"
    "    Ask the reference engine. ConfigError where the server has none.\n"
    "calculate_entropy : bool\n"
    "rollout_n : int, optional\n"
    "    Rollouts per prompt. Default: actor_rollout_ref.rollout.n.\n"
    "temperature : float, optional\n"
    "    For a batch that has no entry `temperature`; PayloadError where the two differ.\n\n"
    "Awaiting gives {\"model_output\": {\"log_probs\": [B, P + R] float tensor, \"entropy\": the\n"
    "same, where asked for and answered}, \"metrics\": dict}, as the server aligns it: see\n"
    "log_probs_to_nested.";

PyObject *
arl_client_compute_log_prob(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *kwnames)
{
    static const char *const names[] = {"data",      "pad_token_id", "ref", "calculate_entropy",
                                        "rollout_n", "temperature"};
    static const arl_signature_t signature = {"compute_log_prob", 6, 1, 2, names};
    arl_client_t *client = (arl_client_t *)self;
    arl_payload_request_t request = request_new(client, "compute_log_prob");
    arl_payload_facts_t facts;
    arl_operation_t *op;
    PyObject *bound[6], *payload;

    if (arl_args_bind(&signature, args, nargs, kwnames, bound) < 0 ||
        arl_args_flag(bound[2], false, &request.reference) < 0 ||
        arl_args_flag(bound[3], false, &request.calculate_entropy) < 0 ||
        arl_client_check_open(client, request.operation) < 0) {
        return NULL;
    }
    if (request.reference && !client->serves_reference) {
        return arl_raise_format(client->state, ARL_ERR_CONFIG, request.operation,
                                "compute_log_prob(ref=True): there is no reference engine; set "
                                "remote_backend.log_prob_gpus to 1 or more");
    }
    request.data = bound[0];
    request.pad_token_id = bound[1];
    request.rollout_n = none_to_null(bound[4]);
    request.temperature = none_to_null(bound[5]);
    payload = arl_payload_log_prob(client->state, &request, &facts);
    op = payload == NULL ? NULL
                         : arl_operation_new(client, &arl_operation_log_prob, request.operation);
    if (op == NULL) {
        Py_XDECREF(payload);
        return NULL;
    }
    op->payload = payload;
    op->wants_entropy = request.calculate_entropy;
    op->reference = request.reference;
    op->rows = facts.rows;
    op->width = facts.width;
    return (PyObject *)op;
}

/* ---- update_actor ---------------------------------------------------------------------------- */

const char arl_client_update_actor_doc[] =
    "update_actor($self, data, *, actor_config, pad_token_id, rollout_n=None, temperature=None)\n"
    "--\n\n"
    "One update of the trained model on a batch.\n\n"
    "The flat generation takes one optimizer step on the whole batch; the nested one a step for\n"
    "each mini-batch, in order, in each of ppo_epochs epochs. A mini-batch whose call fails ends\n"
    "the update; the note on the exception says how many steps were taken.\n\n"
    "Parameters\n"
    "----------\n"
    "data : mapping\n"
    "    The batch of B rows; see build_update_payloads.\n"
    "actor_config : object or dict\n"
    "    Travels with the batch; see build_update_payloads.\n"
    "pad_token_id, rollout_n, temperature\n"
    "    As in compute_log_prob.\n\n"
    "Awaiting gives {\"loss\": number, \"metrics\": dict, \"global_token_num\": list of the B row\n"
    "lengths}. Flat: the metrics as the server gave them. Nested: means over the steps, as\n"
    "floats; values that are not numbers, of the last step. The learning rate is `lr`, of the\n"
    "last step.";

PyObject *
arl_client_update_actor(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"data", "actor_config", "pad_token_id", "rollout_n",
                                        "temperature"};
    static const arl_signature_t signature = {"update_actor", 5, 1, 3, names};
    arl_client_t *client = (arl_client_t *)self;
    arl_payload_request_t request = request_new(client, "update_actor");
    PyObject *bound[5], *payloads, *lengths = NULL;
    arl_operation_t *op;

    if (arl_args_bind(&signature, args, nargs, kwnames, bound) < 0 ||
        arl_client_check_open(client, request.operation) < 0) {
        return NULL;
    }
    request.data = bound[0];
    request.actor_config = bound[1];
    request.pad_token_id = bound[2];
    request.rollout_n = none_to_null(bound[3]);
    request.temperature = none_to_null(bound[4]);
    payloads = arl_payload_update(client->state, &request, &lengths);
    op = payloads == NULL ? NULL
                          : arl_operation_new(client, &arl_operation_update, request.operation);
    if (op == NULL) {
        Py_XDECREF(payloads);
        Py_XDECREF(lengths);
        return NULL;
    }
    op->payload = payloads;
    op->lengths = lengths;
    op->minibatches = PyList_GET_SIZE(payloads);
    op->steps = client->rules.final ? op->minibatches * client->rules.epochs : 1;
    op->answers = PyList_New(0);
    if (op->answers == NULL) {
        Py_DECREF(op);
        return NULL;
    }
    return (PyObject *)op;
}
