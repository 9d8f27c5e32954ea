/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What would go wrong on the server, said here, where the batch and the setting can be named
 * (contract 3.7 and 9). Errors for what cannot work, warnings for what the server ignores.
 */
#include "python/payload_rows.h"

#include "core/arl_rows.h"
#include "python/errors.h"

#define LL(value) ((long long)(value))

static int
refuse(arl_state_t *state, const arl_error_t *err)
{
    (void)arl_raise(state, err);
    return -1;
}

/* ---- ranks, micro-batches, balancer ---------------------------------------------------------- */

/* Rows are cut into equal shards, one a rank, and those into equal micro-batches. */
static arl_status_t
check_shards(const arl_payload_request_t *request, int64_t batch_rows, int64_t ranks,
             int64_t pieces, arl_error_t *err)
{
    const char *setting =
        request->reference ? "remote_backend.log_prob_gpus" : "remote_backend.training_gpus";

    if (batch_rows % ranks != 0 || batch_rows < ranks) {
        return arl_error_set(err, ARL_ERR_PAYLOAD, request->operation,
                             "%s: %lld rows cannot be shared evenly by the %lld ranks of %s",
                             request->operation, LL(batch_rows), LL(ranks), setting);
    }
    if (batch_rows / ranks % pieces != 0) {
        return arl_error_set(err, ARL_ERR_PAYLOAD, request->operation,
                             "%s: the %lld rows of a rank cannot be cut into the %lld equal "
                             "micro-batches that follow from ppo_mini_batch_size, rollout.n and "
                             "ppo_micro_batch_size_per_gpu (%lld rows, %lld ranks)",
                             request->operation, LL(batch_rows / ranks), LL(pieces), LL(batch_rows),
                             LL(ranks));
    }
    return ARL_OK;
}

/* The balancer packs whole prompt groups (cut at max_rollouts) into ranks of equal row counts. */
static arl_status_t
check_balancer(const arl_payload_request_t *request, const arl_payload_rows_t *rows,
               int64_t batch_rows, int64_t ranks, int64_t rollout_n, arl_error_t *err)
{
    const arl_payload_rules_t *rules = request->rules;
    const char *setting =
        rules->final ? "remote_backend.train.load_balancer" : "remote_backend.zorro_train.enable";
    const int64_t per_rank = batch_rows / ranks;
    const bool cut = rules->max_rollouts > 0 && rules->max_rollouts < rollout_n;
    const int64_t group = cut ? rules->max_rollouts : rollout_n;
    int64_t longest;

    if (batch_rows <= ranks) {
        return arl_error_set(err, ARL_ERR_PAYLOAD, request->operation,
                             "%s: the server's load balancer fails on %lld rows for %lld ranks, it "
                             "needs more rows than ranks; set %s=false",
                             request->operation, LL(batch_rows), LL(ranks), setting);
    }
    if (group > per_rank || ((!cut || rollout_n % group == 0) && per_rank % group != 0)) {
        return arl_error_set(
            err, ARL_ERR_PAYLOAD, request->operation,
            "%s: the server's load balancer cannot pack prompt groups of %lld rows "
            "into ranks of %lld rows (%lld rows, %lld ranks); change the batch "
            "size, zorro_train.max_rollouts, or set %s=false",
            request->operation, LL(group), LL(per_rank), LL(batch_rows), LL(ranks), setting);
    }
    if (rules->max_rollouts > 0 &&
        (__builtin_mul_overflow(rows->layout.response_width, rules->max_rollouts, &longest) ||
         __builtin_add_overflow(longest, rows->layout.prompt_width, &longest) ||
         longest > rules->max_token_len)) {
        return arl_error_set(err, ARL_ERR_PAYLOAD, request->operation,
                             "%s: a prompt of %lld tokens with %lld responses of %lld exceeds "
                             "actor_rollout_ref.actor.ppo_max_token_len_per_gpu %lld, which the "
                             "server's load balancer refuses; raise it, lower "
                             "zorro_train.max_rollouts, or set %s=false",
                             request->operation, LL(rows->layout.prompt_width),
                             LL(rules->max_rollouts), LL(rows->layout.response_width),
                             LL(rules->max_token_len), setting);
    }
    return ARL_OK;
}

/* The reference engine makes one micro-batch of all the rows of a rank. */
static int
warn_reference_size(const arl_payload_request_t *request, const arl_payload_rows_t *rows,
                    int64_t batch_rows, int64_t ranks)
{
    const int64_t budget = request->rules->max_token_len;
    int64_t tokens;

    if (__builtin_mul_overflow(batch_rows / ranks, rows->width, &tokens) || tokens > budget) {
        return arl_payload_warn(
            request->warned, ARL_WARN_REFERENCE_SIZE,
            "%s: the reference engine runs all %lld rows of a rank (%lld padded "
            "tokens each) in one forward pass, more than "
            "ppo_max_token_len_per_gpu %lld; log_prob_gpus divides it",
            request->operation, LL(batch_rows / ranks), LL(rows->width), LL(budget));
    }
    return 0;
}

int
arl_payload_check_limits(arl_state_t *state, const arl_payload_request_t *request,
                         const arl_payload_rows_t *rows, int64_t batch_rows)
{
    const arl_payload_rules_t *rules = request->rules;
    const int64_t ranks = request->reference ? rules->reference_ranks : rules->training_ranks;
    arl_error_t err = ARL_ERROR_INIT;
    int64_t rollout_n;

    if (!request->server_limits || ranks < 1) {
        return 0;
    }
    if (arl_payload_rollout_n(state, request, &rollout_n) < 0) {
        return -1;
    }
    if (check_shards(request, batch_rows, ranks, request->reference ? 1 : rules->accumulation,
                     &err) != ARL_OK) {
        return refuse(state, &err);
    }
    if (rules->balances) {
        if (check_balancer(request, rows, batch_rows, ranks, rollout_n, &err) != ARL_OK) {
            return refuse(state, &err);
        }
        if (rows->jagged &&
            arl_payload_warn(request->warned, ARL_WARN_JAGGED_BALANCER,
                             "%s: prompts are nested, and the server's load balancer picks rows "
                             "from every tensor by a list of indices, which nested tensors do not "
                             "allow; pass padded prompts and responses",
                             request->operation) < 0) {
            return -1;
        }
    }
    return request->reference ? warn_reference_size(request, rows, batch_rows, ranks) : 0;
}

/* ---- groups ---------------------------------------------------------------------------------- */

int
arl_payload_check_groups(arl_state_t *state, const arl_payload_request_t *request,
                         const arl_payload_rows_t *rows, int64_t rollout_n, int64_t batch_rows)
{
    const arl_jagged_t ids = arl_batch_jagged(&rows->input_ids);
    const arl_rows_groups_t job = {.ids = &ids,
                                   .prompt_lengths = rows->layout.prompt_lengths,
                                   .group = rollout_n,
                                   .batch_rows = batch_rows,
                                   .regrouped = request->rules->balances};
    arl_error_t err = ARL_ERROR_INIT;
    PyThreadState *saved;
    arl_status_t status;

    if (batch_rows % rollout_n != 0) {
        (void)arl_raise_format(state, ARL_ERR_PAYLOAD, request->operation,
                               "%s: %lld rows%s are not a multiple of rollout_n %lld, so that the "
                               "rollouts of a prompt would be parted",
                               request->operation, LL(batch_rows),
                               batch_rows == rows->layout.rows ? "" : " of a mini-batch",
                               LL(rollout_n));
        return -1;
    }
    if (!request->rules->zorro || rollout_n == 1) {
        return 0;
    }
    if (arl_batch_begin(state, arl_view_nbytes(&rows->input_ids.values.view), &saved) < 0) {
        return -1;
    }
    status = arl_rows_check_groups(&job, &err);
    arl_batch_end(saved);
    return status == ARL_OK ? 0 : refuse(state, &err);
}

/* ---- positions ------------------------------------------------------------------------------- */

int
arl_payload_check_positions(arl_state_t *state, const arl_payload_request_t *request,
                            const arl_payload_rows_t *rows)
{
    arl_error_t err = ARL_ERROR_INIT;
    arl_nested_t positions = {0};
    PyObject *object;
    PyThreadState *saved;
    arl_jagged_t jagged;
    int status;

    status = arl_payload_data_get(state, request->data, state->names.position_ids, &object);
    if (status <= 0) { /* nothing to lose */
        return status;
    }
    status = arl_payload_positions_import(state, request, object, rows, &positions);
    Py_DECREF(object);
    if (status < 0) {
        return -1;
    }
    jagged = arl_batch_jagged(&positions);
    status = arl_batch_begin(state, arl_view_nbytes(&positions.values.view), &saved);
    if (status == 0) {
        (void)arl_rows_check_counting(&jagged, "position_ids", &err);
        arl_batch_end(saved);
        status = err.code == ARL_OK ? 0 : refuse(state, &err);
    }
    arl_nested_release(&positions);
    return status;
}

/* ---- mask ------------------------------------------------------------------------------------ */

static bool
mask_is_one(const arl_view_t *mask, int64_t row, int64_t column)
{
    const char *item =
        (const char *)mask->data + row * mask->strides[0] + column * mask->strides[1];
    bool one = false;

    for (size_t i = 0; i < mask->itemsize; i++) {
        one = one || item[i] != 0;
    }
    return one;
}

/*
 * A jagged batch says how long its rows are, and the mask agrees on that (it was checked with the
 * layout). Whether its ones also lie where the padded rows lie is seen by their first and last.
 */
int
arl_payload_check_mask(arl_state_t *state, const arl_payload_request_t *request,
                       const arl_payload_rows_t *rows)
{
    const arl_batch_layout_t *layout = &rows->layout;
    arl_tensor_t mask = {0};
    int64_t row = 0;

    if (!rows->jagged) {
        return 0;
    }
    if (arl_tensor_import(state, rows->attention_mask, "attention_mask", ARL_TENSOR_CPU_ONLY,
                          ARL_ERR_PAYLOAD, &mask) < 0) {
        return -1;
    }
    if (mask.view.shape[1] == rows->width) {
        for (; row < layout->rows; row++) {
            const int64_t first = layout->prompt_width - layout->prompt_lengths[row];
            const int64_t last = layout->prompt_width + layout->response_lengths[row] - 1;

            if (last >= first &&
                (!mask_is_one(&mask.view, row, first) || !mask_is_one(&mask.view, row, last))) {
                break;
            }
        }
    }
    arl_tensor_release(&mask);
    if (row == layout->rows) {
        return 0;
    }
    return arl_payload_warn(
        request->warned, ARL_WARN_MASK_LAYOUT,
        "%s: attention_mask is not laid out as the padded rows are ([%lld, %lld], prompts end at "
        "column %lld; row %lld differs), so that the server reads other tokens; leave it out of "
        "the batch and it is made from the row lengths",
        request->operation, LL(layout->rows), LL(rows->width), LL(layout->prompt_width), LL(row));
}

/* ---- loss options ---------------------------------------------------------------------------- */

/* Whether `options[name]` is there, a number, and not `constant`. */
static bool
differs(PyObject *options, PyObject *name, double constant)
{
    PyObject *value = PyDict_GetItemWithError(options, name); /* borrowed, used at once */
    double number;

    if (value == NULL || PyBool_Check(value) || (!PyFloat_Check(value) && !PyLong_Check(value))) {
        return false;
    }
    number = PyFloat_AsDouble(value);
    return number != constant; /* also a number too large for a double */
}

static bool
is_other_text(PyObject *options, PyObject *name, const char *constant)
{
    PyObject *value = PyDict_GetItemWithError(options, name); /* borrowed, used at once */

    return value != NULL && PyUnicode_Check(value) &&
           PyUnicode_CompareWithASCIIString(value, constant) != 0;
}

int
arl_payload_check_loss(arl_state_t *state, const arl_payload_request_t *request, PyObject *actor,
                       PyObject *policy)
{
    PyObject *scale = NULL;
    const char *option = NULL;

    if (!request->server_limits) {
        return 0;
    }
    /* borrowed from actor */
    scale = PyDict_GetItemWithError(actor, state->names.loss_scale_factor);
    option = differs(actor, state->names.clip_ratio, 0.2)               ? "clip_ratio"
             : differs(actor, state->names.clip_ratio_low, 0.2)         ? "clip_ratio_low"
             : differs(actor, state->names.clip_ratio_high, 0.2)        ? "clip_ratio_high"
             : differs(actor, state->names.clip_ratio_c, 3.0)           ? "clip_ratio_c"
             : is_other_text(policy, state->names.loss_mode, "vanilla") ? "policy_loss.loss_mode"
             : scale != NULL && scale != Py_None                        ? "loss_scale_factor"
                                                                        : NULL;
    PyErr_Clear(); /* a number too large for a double */
    if (option != NULL &&
        arl_payload_warn(request->warned, ARL_WARN_LOSS_OPTIONS,
                         "%s: actor_config.%s has no effect: the server's loss always uses clip "
                         "ratios 0.2, 0.2, 0.2 and 3.0, the vanilla mode and no scale factor",
                         request->operation, option) < 0) {
        return -1;
    }
    if (!request->rules->zorro && differs(actor, state->names.entropy_coeff, 0.0)) {
        return arl_payload_warn(request->warned, ARL_WARN_ENTROPY_SLOT,
                                "%s: without prompt sharing the server's entropy loss is one slot "
                                "off its mask (entropy_coeff is not 0)",
                                request->operation);
    }
    return 0;
}
