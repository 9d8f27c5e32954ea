/* SPDX-License-Identifier: Apache-2.0 */
/* What a normalised configuration may not say. Each refusal spares a run that would have failed
 * later, on the server, in other words. */
#include "core/arl_config.h"

#include <string.h>

#define ACTOR "actor_rollout_ref.actor."

typedef struct checker {
    const arl_tree_t *tree;
    bool seed;
    bool balanced; /* the server reorders rows across ranks */
    bool with_reference;
    int64_t n; /* rollouts per prompt */
    arl_error_t *err;
} checker_t;

static const arl_node_t *
node_at(const checker_t *check, const char *path)
{
    return arl_node_at(check->tree->root, path);
}

static bool
is_true(const checker_t *check, const char *path)
{
    const arl_node_t *node = node_at(check, path);

    return node != NULL && node->kind == ARL_NODE_BOOL && node->as.boolean;
}

static int64_t
integer_at(const checker_t *check, const char *path, int64_t fallback)
{
    const arl_node_t *node = node_at(check, path);

    return node != NULL && node->kind == ARL_NODE_INT ? node->as.integer : fallback;
}

static bool
text_at_is(const checker_t *check, const char *path, const char *text)
{
    const arl_node_t *node = node_at(check, path);

    return node != NULL && node->kind == ARL_NODE_TEXT && strcmp(node->as.text.data, text) == 0;
}

/* ---- switches that exclude each other -----------------------------------------------------------
 */

static arl_status_t
check_switches(const checker_t *check)
{
    const arl_tree_t *tree = check->tree;

    if (is_true(check, "remote_backend.weight_sync.low_memory") &&
        !is_true(check, "remote_backend.weight_sync.cuda_ipc")) {
        return arl_tree_fail_at(tree, node_at(check, "remote_backend.weight_sync.low_memory"),
                                check->err,
                                "low_memory is a way to sync through CUDA IPC, and "
                                "weight_sync.cuda_ipc (cuda_ipc_weight_sync in the flat form) is "
                                "false");
    }
    if (is_true(check, "remote_backend.weight_sync.cuda_ipc") &&
        !is_true(check, "remote_backend.colocate")) {
        return arl_tree_fail_at(tree, node_at(check, "remote_backend.weight_sync.cuda_ipc"),
                                check->err,
                                "CUDA IPC reaches memory of the same GPU only, and colocate is "
                                "false");
    }
    if (text_at_is(check, "remote_backend.train.logits.optimization", "memory") &&
        !is_true(check, "remote_backend.train.zorro_train.enable")) {
        return arl_tree_fail_at(tree, node_at(check, "remote_backend.train.logits.optimization"),
                                check->err,
                                "'memory' works with ZoRRO only, and train.zorro_train.enable is "
                                "false");
    }
    return ARL_OK;
}

static arl_status_t
check_reference(const checker_t *check)
{
    const char *loss = ACTOR "use_kl_loss";

    if (!check->with_reference || integer_at(check, "remote_backend.log_prob_gpus", 0) > 0) {
        return ARL_OK;
    }
    return arl_tree_fail_at(check->tree, node_at(check, "remote_backend.log_prob_gpus"), check->err,
                            "0 means no reference engine, and %s needs one",
                            is_true(check, loss) ? loss : "algorithm.use_kl_in_reward");
}

static arl_status_t
check_temperature(const checker_t *check)
{
    const arl_node_t *node = node_at(check, "actor_rollout_ref.rollout.temperature");
    double value = node->kind == ARL_NODE_INT ? (double)node->as.integer : node->as.real;

    if (value > 0.0) {
        return ARL_OK;
    }
    return arl_tree_fail_at(check->tree, node, check->err,
                            "training divides logits by the temperature, so it cannot be 0");
}

/* ---- numbers that have to divide each other
 * ------------------------------------------------------- */

static arl_status_t
check_multiple(const checker_t *check, const char *whole, const char *part)
{
    int64_t a = integer_at(check, whole, 1), b = integer_at(check, part, 1);

    if (a % b == 0) {
        return ARL_OK;
    }
    return arl_tree_fail_at(check->tree, node_at(check, whole), check->err,
                            "%lld is not a multiple of %s, which is %lld", (long long)a, part,
                            (long long)b);
}

/* One call's rows go to `ranks` engines: equal shares, and whole prompt groups where the server
 * balances. */
static arl_status_t
check_shares(const checker_t *check, int64_t rows, const char *rows_name, int64_t ranks,
             const char *ranks_path)
{
    const arl_node_t *node = node_at(check, ranks_path);

    if (rows % ranks != 0) {
        return arl_tree_fail_at(check->tree, node, check->err,
                                "%s is %lld rows, which %lld ranks cannot share equally", rows_name,
                                (long long)rows, (long long)ranks);
    }
    if (!check->balanced) {
        return ARL_OK;
    }
    if (rows <= ranks) {
        return arl_tree_fail_at(check->tree, node, check->err,
                                "%s is %lld rows for %lld ranks: the server's load balancer needs "
                                "more rows than ranks (%s)",
                                rows_name, (long long)rows, (long long)ranks,
                                check->seed ? "it is on with ZoRRO"
                                            : "or train.load_balancer=false");
    }
    if (rows / ranks % check->n != 0) {
        return arl_tree_fail_at(check->tree, node, check->err,
                                "%s is %lld rows, %lld for each of %lld ranks: the server's load "
                                "balancer keeps the %lld rollouts of a prompt together, and they "
                                "do not fit (%s)",
                                rows_name, (long long)rows, (long long)(rows / ranks),
                                (long long)ranks, (long long)check->n,
                                check->seed ? "it is on with ZoRRO"
                                            : "or train.load_balancer=false");
    }
    return ARL_OK;
}

/* Each rank cuts its share into `gas` micro-batches, and gas comes from a division that rounds. */
static arl_status_t
check_accumulation(const checker_t *check, int64_t rows, const char *rows_name, int64_t ranks)
{
    int64_t micro = integer_at(check, ACTOR "ppo_micro_batch_size_per_gpu", 1), together, gas;

    if (__builtin_mul_overflow(micro, ranks, &together)) {
        together = INT64_MAX;
    }
    gas = rows / together > 1 ? rows / together : 1;
    if (rows / ranks % gas == 0) {
        return ARL_OK;
    }
    return arl_tree_fail_at(
        check->tree, node_at(check, ACTOR "ppo_micro_batch_size_per_gpu"), check->err,
        "%s is %lld rows, %lld for a rank, which do not split into the %lld "
        "micro-batches that a size of %lld asks for",
        rows_name, (long long)rows, (long long)(rows / ranks), (long long)gas, (long long)micro);
}

static arl_status_t
check_batches(const checker_t *check)
{
    int64_t train = integer_at(check, "data.train_batch_size", 1);
    int64_t mini = integer_at(check, ACTOR "ppo_mini_batch_size", 1);
    int64_t ranks = integer_at(check, "remote_backend.training_gpus", 1);
    const char *step_name =
        check->seed ? "data.train_batch_size * rollout.n" : "actor.ppo_mini_batch_size * rollout.n";
    int64_t rows, all_rows;
    arl_status_t status;

    if (!check->seed && (train < mini || train % mini != 0)) {
        return arl_tree_fail_at(check->tree, node_at(check, "data.train_batch_size"), check->err,
                                "%lld prompts do not split into mini-batches of "
                                "actor_rollout_ref.actor.ppo_mini_batch_size, which is %lld "
                                "(both count prompts, before rollout.n)",
                                (long long)train, (long long)mini);
    }
    if (__builtin_mul_overflow(check->seed ? train : mini, check->n, &rows) ||
        __builtin_mul_overflow(train, check->n, &all_rows)) {
        return arl_tree_fail_at(check->tree, node_at(check, "data.train_batch_size"), check->err,
                                "times rollout.n it is more rows than can be counted");
    }
    ARL_CHECK_GOTO(
        status, check_shares(check, rows, step_name, ranks, "remote_backend.training_gpus"), out);
    ARL_CHECK_GOTO(status, check_accumulation(check, rows, step_name, ranks), out);
    if (check->with_reference) {
        ARL_CHECK_GOTO(status,
                       check_shares(check, all_rows, "data.train_batch_size * rollout.n",
                                    integer_at(check, "remote_backend.log_prob_gpus", 1),
                                    "remote_backend.log_prob_gpus"),
                       out);
    }
out:
    return status;
}

arl_status_t
arl_config_tree_check(const arl_tree_t *tree, arl_error_t *err)
{
    checker_t check = {.tree = tree, .err = err};
    arl_status_t status;

    check.seed = text_at_is(&check, "remote_backend.generation", "seed");
    check.balanced = is_true(&check, "remote_backend.train.load_balancer");
    check.with_reference =
        is_true(&check, ACTOR "use_kl_loss") || is_true(&check, "algorithm.use_kl_in_reward");
    check.n = integer_at(&check, "actor_rollout_ref.rollout.n", 1);
    ARL_CHECK_GOTO(status, check_switches(&check), out);
    ARL_CHECK_GOTO(status, check_reference(&check), out);
    ARL_CHECK_GOTO(status, check_temperature(&check), out);
    ARL_CHECK_GOTO(
        status,
        check_multiple(&check, "remote_backend.sampling_gpus", "remote_backend.sampling_tp_size"),
        out);
    ARL_CHECK_GOTO(status,
                   check_multiple(&check, "remote_backend.training_gpus",
                                  ACTOR "fsdp_config.ulysses_sequence_parallel_size"),
                   out);
    status = check_batches(&check);
out:
    return status;
}
