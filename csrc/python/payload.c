/* SPDX-License-Identifier: Apache-2.0 */
/* The payload builders as Python functions: synchronous and pure. */
#include "python/payload.h"

#include "python/args.h"
#include "python/config.h"
#include "python/errors.h"

#include <string.h>

/* A config as it comes, or already normalised: then nothing is done to it. */
static int
rules_from_config(arl_state_t *state, PyObject *config, arl_payload_rules_t *rules)
{
    PyObject *backend, *normal;
    int status;

    if (PyDict_CheckExact(config)) {
        backend = PyDict_GetItemWithError(config, state->names.remote_backend); /* borrowed */
        if (backend != NULL && PyDict_CheckExact(backend) &&
            PyDict_Contains(backend, state->names.generation) == 1) {
            return arl_payload_rules_init(state, config, rules);
        }
    }
    PyErr_Clear(); /* unhashable keys and the like: normalising says it better */
    normal = arl_config_normalize(state, config);
    if (normal == NULL) {
        return -1;
    }
    status = arl_payload_rules_init(state, normal, rules);
    Py_DECREF(normal);
    return status;
}

#define DATA_DOC                                                                                   \
    "data : mapping (dict, TensorDict)\n"                                                          \
    "    The incoming batch of B rows. `input_ids` and `position_ids` nested jagged, int64 or\n"   \
    "    int32; `prompts` [B, P] and `responses` [B, R] dense or nested; `attention_mask`\n"       \
    "    [B, P + R]; `temperature` a number. Tensors as torch, NumPy or DLPack; nested ones as\n"  \
    "    torch tensors or (values, offsets). Non-tensor wrappers are unwrapped. Nothing in it\n"   \
    "    is written to; dense entries that travel as they are travel as the same objects.\n"

#define CONFIG_DOC                                                                                 \
    "config : mapping\n"                                                                           \
    "    The main config, flat or nested, as load_config or normalize_config return it "           \
    "(fastest)\n"                                                                                  \
    "    or as it comes.\n"

static const char *const log_prob_names[] = {
    "data",
    "config",
    "pad_token_id",
    "rollout_n",
    "calculate_entropy",
    "ref",
    "temperature_in_log_prob",
    "server_limits",
};
enum {
    LOG_PROB_DATA,
    LOG_PROB_CONFIG,
    LOG_PROB_PAD,
    LOG_PROB_ROLLOUT_N,
    LOG_PROB_ENTROPY,
    LOG_PROB_REF,
    LOG_PROB_TEMPERATURE,
    LOG_PROB_LIMITS,
    LOG_PROB_COUNT,
};
static const arl_signature_t log_prob_signature = {"build_log_prob_payload", LOG_PROB_COUNT, 2, 5,
                                                   log_prob_names};

PyDoc_STRVAR(
    log_prob_doc,
    "build_log_prob_payload(data, config, *, pad_token_id, rollout_n, calculate_entropy,\n"
    "                       ref=False, temperature_in_log_prob=False, server_limits=True)\n"
    "--\n\n"
    "The payload of one compute_log_prob call.\n\n"
    "Parameters\n"
    "----------\n" DATA_DOC CONFIG_DOC "pad_token_id : int\n"
    "    Fills input_ids; position ids are filled with 0.\n"
    "rollout_n : int\n"
    "    Rollouts per prompt, which lie side by side.\n"
    "calculate_entropy : bool\n"
    "    Ask for the entropy too.\n"
    "ref : bool\n"
    "    The payload is for the reference engine (which ranks it is checked against).\n"
    "temperature_in_log_prob : bool\n"
    "    Also apply the temperature to log-probs, as updates do.\n"
    "server_limits : bool\n"
    "    Check for what the published server cannot do (ranks, micro-batches, balancer).\n\n"
    "Returns\n"
    "-------\n"
    "{\"batch\": dict of tensors, \"meta\": dict, \"processing\": dict}\n"
    "    input_ids and position_ids as [B, P + R], prompts right-aligned before column P,\n"
    "    responses left-aligned after it.\n\n"
    "Raises PayloadError naming the entry, the row and the numbers; ConfigError for the config.");

static PyObject *
payload_build_log_prob(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    arl_state_t *state = arl_state_from_module(module);
    arl_payload_rules_t rules = {0};
    PyObject *bound[LOG_PROB_COUNT], *payload;
    arl_payload_request_t request = {.operation = "build_log_prob_payload", .rules = &rules};

    if (arl_args_bind(&log_prob_signature, args, nargs, kwnames, bound) < 0 ||
        arl_args_flag(bound[LOG_PROB_ENTROPY], false, &request.calculate_entropy) < 0 ||
        arl_args_flag(bound[LOG_PROB_REF], false, &request.reference) < 0 ||
        arl_args_flag(bound[LOG_PROB_TEMPERATURE], false, &request.temperature_in_log_prob) < 0 ||
        arl_args_flag(bound[LOG_PROB_LIMITS], true, &request.server_limits) < 0 ||
        rules_from_config(state, bound[LOG_PROB_CONFIG], &rules) < 0) {
        return NULL;
    }
    request.data = bound[LOG_PROB_DATA];
    request.pad_token_id = bound[LOG_PROB_PAD];
    request.rollout_n = bound[LOG_PROB_ROLLOUT_N];
    payload = arl_payload_log_prob(state, &request, NULL);
    arl_payload_rules_clear(&rules);
    return payload;
}

static const char *const update_names[] = {
    "data", "config", "actor_config", "pad_token_id", "rollout_n", "server_limits",
};
enum {
    UPDATE_DATA,
    UPDATE_CONFIG,
    UPDATE_ACTOR_CONFIG,
    UPDATE_PAD,
    UPDATE_ROLLOUT_N,
    UPDATE_LIMITS,
    UPDATE_COUNT,
};
static const arl_signature_t update_signature = {"build_update_payloads", UPDATE_COUNT, 2, 5,
                                                 update_names};

PyDoc_STRVAR(
    update_doc,
    "build_update_payloads(data, config, *, actor_config, pad_token_id, rollout_n,\n"
    "                      server_limits=True)\n"
    "--\n\n"
    "The payloads of one epoch of update_actor, one for each optimizer step.\n\n"
    "The flat generation makes one step of the whole batch; the nested one as many as\n"
    "data.train_batch_size holds ppo_mini_batch_size, of contiguous rows in order. The tensors\n"
    "of mini-batches are views of the whole; dicts and lists are each payload's own.\n\n"
    "Parameters\n"
    "----------\n" DATA_DOC
    "    Also `response_mask` [B, R] of bool or integers, `old_log_probs` and `advantages`\n"
    "    [B, R] of a float type, `ref_log_prob` the same where actor_config.use_kl_loss is\n"
    "    true, `rollout_is_weights` [B, R] optionally; for the flat generation `loss_mask`\n"
    "    and `global_batch_size`.\n" CONFIG_DOC "actor_config : object or dict\n"
    "    Its attributes travel as JSON would carry them; what has no JSON form becomes None.\n"
    "    use_kl_loss, calculate_entropy and policy_loss are read.\n"
    "pad_token_id, rollout_n, server_limits\n"
    "    As in build_log_prob_payload.\n\n"
    "Returns a list of payload dicts. Raises PayloadError naming the entry, the row and the\n"
    "numbers; ConfigError for the config.");

static PyObject *
payload_build_update(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    arl_state_t *state = arl_state_from_module(module);
    arl_payload_rules_t rules = {0};
    PyObject *bound[UPDATE_COUNT], *payloads;
    arl_payload_request_t request = {.operation = "build_update_payloads", .rules = &rules};

    if (arl_args_bind(&update_signature, args, nargs, kwnames, bound) < 0 ||
        arl_args_flag(bound[UPDATE_LIMITS], true, &request.server_limits) < 0 ||
        rules_from_config(state, bound[UPDATE_CONFIG], &rules) < 0) {
        return NULL;
    }
    request.data = bound[UPDATE_DATA];
    request.actor_config = bound[UPDATE_ACTOR_CONFIG];
    request.pad_token_id = bound[UPDATE_PAD];
    request.rollout_n = bound[UPDATE_ROLLOUT_N];
    payloads = arl_payload_update(state, &request, NULL);
    arl_payload_rules_clear(&rules);
    return payloads;
}

PyMethodDef arl_payload_methods[] = {
    {"build_log_prob_payload", (PyCFunction)(void (*)(void))payload_build_log_prob,
     METH_FASTCALL | METH_KEYWORDS, log_prob_doc},
    {"build_update_payloads", (PyCFunction)(void (*)(void))payload_build_update,
     METH_FASTCALL | METH_KEYWORDS, update_doc},
    {NULL, NULL, 0, NULL},
};

int
arl_payload_exec(PyObject *module, arl_state_t *state)
{
    (void)module;
    (void)state;
    return 0;
}
