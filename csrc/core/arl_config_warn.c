/* SPDX-License-Identifier: Apache-2.0 */
/* What a normalised configuration says in vain: options that a user may expect to act, and that
 * the client or the server does not read. */
#include "core/arl_config.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define ACTOR "actor_rollout_ref.actor."
#define REF "actor_rollout_ref.ref."
#define ROLLOUT "actor_rollout_ref.rollout."
#define MODEL "actor_rollout_ref.model."
#define DEEPSPEED "remote_backend.train.deepspeed."

enum { SEED = ARL_CONFIG_SEED, FINAL = ARL_CONFIG_FINAL, BOTH = SEED | FINAL };

const arl_config_ignored_t arl_config_ignored[] = {
    {ACTOR "clip_ratio", BOTH, "0.2 null", "the server always clips at 0.2"},
    {ACTOR "clip_ratio_low", BOTH, "0.2 null", "the server always clips at 0.2"},
    {ACTOR "clip_ratio_high", BOTH, "0.2 null", "the server always clips at 0.2"},
    {ACTOR "clip_ratio_c", BOTH, "3.0 3 null", "the server always uses 3.0"},
    {ACTOR "policy_loss.loss_mode", BOTH, "'vanilla' null", "the server always uses vanilla"},
    {ACTOR "loss_scale_factor", BOTH, "null", "the server does not read it"},
    {ACTOR "shuffle", BOTH, "false null", "mini-batches are taken in order of arrival"},
    {ACTOR "data_loader_seed", BOTH, "null 42", "mini-batches are taken in order of arrival"},
    {ACTOR "use_dynamic_bsz", BOTH, "false null",
     "micro-batches follow ppo_micro_batch_size_per_gpu"},
    {ACTOR "ppo_micro_batch_size", BOTH, "null", "only ppo_micro_batch_size_per_gpu is read"},
    {ACTOR "strategy", BOTH, "'fsdp' 'fsdp2' null", "the trainer is the server's"},
    {ACTOR "ulysses_sequence_parallel_size", BOTH, "1 null",
     "only actor.fsdp_config.ulysses_sequence_parallel_size is read"},
    {ACTOR "fsdp_config.param_offload", BOTH, "false null",
     "that is remote_backend.train.deepspeed.zero_optimization.offload_param"},
    {ACTOR "fsdp_config.optimizer_offload", BOTH, "false null",
     "that is remote_backend.train.deepspeed.zero_optimization.offload_optimizer"},
    {ACTOR "fsdp_config.fsdp_size", BOTH, "-1 null",
     "ranks are remote_backend.training_gpus, sharding is train.deepspeed.zero_optimization"},
    {ACTOR "fsdp_config.model_dtype", BOTH, "'fp32' 'float32' null", "the server's own is taken"},
    {ACTOR "fsdp_config.dtype", BOTH, "'bfloat16' 'bf16' null", "the server's own is taken"},
    {ACTOR "fsdp_config.seed", BOTH, "42 null", "only remote_backend.train.determinism is read"},
    {ACTOR "fsdp_config.full_determinism", BOTH, "false null",
     "only remote_backend.train.determinism is read"},
    {ACTOR "freeze_vision_tower", BOTH, "false null", "not sent to the server"},
    {ACTOR "use_prefix_grouper", BOTH, "false null",
     "prompts are shared by remote_backend.train.zorro_train"},
    {ACTOR "calculate_sum_pi_squared", BOTH, "false null", "the server does not compute it"},
    {ACTOR "entropy_from_logits_with_chunking", BOTH, "false null",
     "that is remote_backend.train.logits"},
    {ACTOR "entropy_checkpointing", BOTH, "false null", "that is remote_backend.train.logits"},
    {ACTOR "router_replay.mode", BOTH, "'disabled' null", "routes are not sent to the server"},
    {ACTOR "checkpoint.async_save", BOTH, "false null",
     "the server has written when save returns; verl then does not note the step to resume from"},
    {ACTOR "optim.lr_warmup_steps", BOTH, "-1 0 null", "only lr_warmup_steps_ratio is read"},
    {ACTOR "optim.warmup_style", BOTH, "null", "only lr_scheduler_type is read"},
    {ACTOR "optim.optimizer", BOTH, "'AdamW' null", "the server's is AdamW"},
    {ACTOR "optim.optimizer_impl", BOTH, "'torch.optim' null", "the server's is AdamW"},
    {ACTOR "optim.override_optimizer_config", BOTH, "null", "the server's is AdamW"},
    {ACTOR "optim.num_cycles", BOTH, "0.5 null", "the server's cosine has half a cycle"},
    {REF "log_prob_micro_batch_size", BOTH, "null", "not sent to the server"},
    {REF "log_prob_micro_batch_size_per_gpu", BOTH, "null", "not sent to the server"},
    {REF "log_prob_use_dynamic_bsz", BOTH, "false null", "not sent to the server"},
    {REF "fsdp_config.param_offload", BOTH, "false null",
     "that is remote_backend.train.deepspeed.zero_optimization.offload_param"},
    {ROLLOUT "top_p", BOTH, "1.0 1 null",
     "no part of the sampler's set-up; it acts only where a generate call passes it on"},
    {ROLLOUT "top_k", BOTH, "-1 0 null",
     "no part of the sampler's set-up; it acts only where a generate call passes it on"},
    {ROLLOUT "max_num_batched_tokens", FINAL, "8192", "not sent to the sampler"},
    {ROLLOUT "log_prob_micro_batch_size", BOTH, "null", "not sent to the server"},
    {ROLLOUT "log_prob_micro_batch_size_per_gpu", BOTH, "null", "not sent to the server"},
    {ROLLOUT "tensor_model_parallel_size", BOTH, "1 2 null",
     "that is remote_backend.sampling_tp_size"},
    {ROLLOUT "data_parallel_size", BOTH, "1 null", "that is remote_backend.sampling_gpus"},
    {ROLLOUT "expert_parallel_size", BOTH, "1 null", "not sent to the sampler"},
    {ROLLOUT "pipeline_model_parallel_size", BOTH, "1 null", "not sent to the sampler"},
    {ROLLOUT "dtype", BOTH, "'bfloat16' 'auto' null", "the server's own is taken"},
    {ROLLOUT "seed", BOTH, "0 42 null", "not sent to the sampler"},
    {ROLLOUT "full_determinism", BOTH, "false null",
     "only remote_backend.train.determinism is read"},
    {ROLLOUT "ignore_eos", BOTH, "false null", "not sent to the sampler"},
    {ROLLOUT "enable_prefix_caching", BOTH, "true null", "not sent to the sampler"},
    {ROLLOUT "scheduling_policy", BOTH, "'fcfs' null", "not sent to the sampler"},
    {ROLLOUT "cudagraph_capture_sizes", BOTH, "null", "not sent to the sampler"},
    {ROLLOUT "quantization_config_file", BOTH, "null", "not sent to the sampler"},
    {ROLLOUT "over_sample_rate", BOTH, "0 0.0 null", "not sent to the sampler"},
    {ROLLOUT "multi_stage_wake_up", BOTH, "false null",
     "a weight sync wakes the sampler in its own order"},
    {ROLLOUT "enable_rollout_routing_replay", BOTH, "false null", "the sampler gives no routes"},
    {ROLLOUT "checkpoint_engine.backend", BOTH, "'naive' 'remote_backend' null",
     "the server moves the weights itself"},
    {ROLLOUT "disaggregation.enabled", BOTH, "false null", "not sent to the sampler"},
    {MODEL "trust_remote_code", BOTH, "false null", "not sent to the server"},
    {MODEL "lora_rank", BOTH, "0 null", "the server trains all weights"},
    {MODEL "lora.rank", BOTH, "0 null", "the server trains all weights"},
    {MODEL "lora_adapter_path", BOTH, "null", "the server starts from model.path alone"},
    {MODEL "lora.adapter_path", BOTH, "null", "the server starts from model.path alone"},
    {MODEL "hf_config_path", BOTH, "null", "the server reads model.path"},
    {MODEL "use_fused_kernels", BOTH, "false null", "not sent to the server"},
    {MODEL "enable_activation_offload", BOTH, "false null", "not sent to the server"},
    {MODEL "tiled_mlp.enabled", BOTH, "false null", "not sent to the server"},
    {MODEL "mtp.enable", BOTH, "false null", "not sent to the server"},
    {"algorithm.rollout_is", BOTH, "false null",
     "its weights travel beside the batch, and the server does not line them up with the tokens"},
    {"algorithm.rollout_correction.rollout_is", BOTH, "null",
     "its weights travel beside the batch, and the server does not line them up with the tokens"},
    {DEEPSPEED "train_batch_size", FINAL, "", "replaced by ppo_mini_batch_size * rollout.n"},
    {DEEPSPEED "train_micro_batch_size_per_gpu", FINAL, "",
     "replaced by actor.ppo_micro_batch_size_per_gpu"},
    {DEEPSPEED "gradient_accumulation_steps", FINAL, "", "replaced by what the batch sizes give"},
    {DEEPSPEED "sequence_parallel_size", FINAL, "",
     "replaced by actor.fsdp_config.ulysses_sequence_parallel_size"},
    {DEEPSPEED "optimizer", FINAL, "", "replaced by actor.optim"},
    {ACTOR "ppo_epochs", SEED, "1", "the flat form takes one step over the whole batch"},
    {ACTOR "grad_clip", SEED, "1.0 1 0 0.0 null", "the flat form has no gradient clipping"},
    {ACTOR "optim.clip_grad", SEED, "1.0 1 0 0.0 null", "the flat form has no gradient clipping"},
    {ACTOR "optim.lr_scheduler_type", SEED, "'constant'",
     "the server of the flat form has no scheduler"},
    {ACTOR "optim.lr_warmup_steps_ratio", SEED, "0 0.0",
     "the server of the flat form has no scheduler"},
    {MODEL "enable_gradient_checkpointing", SEED, "true", "the flat form does not send it"},
};
const size_t arl_config_ignored_count = sizeof(arl_config_ignored) / sizeof(arl_config_ignored[0]);

typedef struct warner {
    arl_tree_t *tree;
    arl_node_t *list;
    bool seed;
    bool zorro;
    arl_error_t *err;
} warner_t;

static const arl_node_t *
node_at(const warner_t *warn, const char *path)
{
    return arl_node_at(warn->tree->root, path);
}

static double
number_at(const warner_t *warn, const char *path, double fallback)
{
    const arl_node_t *node = node_at(warn, path);

    if (node != NULL && node->kind == ARL_NODE_INT) {
        return (double)node->as.integer;
    }
    return node != NULL && node->kind == ARL_NODE_FLOAT ? node->as.real : fallback;
}

static bool
is_true(const warner_t *warn, const char *path)
{
    const arl_node_t *node = node_at(warn, path);

    return node != NULL && node->kind == ARL_NODE_BOOL && node->as.boolean;
}

static bool
text_is(const warner_t *warn, const char *path, const char *text)
{
    const arl_node_t *node = node_at(warn, path);

    return node != NULL && node->kind == ARL_NODE_TEXT && strcmp(node->as.text.data, text) == 0;
}

static arl_status_t add(const warner_t *warn, const char *path, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* "path=value: text" */
static arl_status_t
add(const warner_t *warn, const char *path, const char *format, ...)
{
    char shown[128], why[512], text[800];
    const arl_node_t *node = node_at(warn, path);
    arl_status_t status;
    arl_node_t *item;
    va_list args;

    va_start(args, format);
    (void)vsnprintf(why, sizeof(why), format, args);
    va_end(args);
    if (node == NULL) {
        (void)snprintf(text, sizeof(text), "%s: %s", path, why);
    }
    else {
        arl_node_show(node, shown, sizeof(shown));
        (void)snprintf(text, sizeof(text), "%s=%s: %s", path, shown, why);
    }
    status = arl_node_new_text(warn->tree, text, strlen(text), NULL, &item, warn->err);
    return status == ARL_OK ? arl_list_append(warn->tree, warn->list, item, warn->err) : status;
}

static bool
is_harmless(const arl_node_t *node, const char *harmless)
{
    char shown[128];
    size_t length;

    arl_node_show(node, shown, sizeof(shown));
    length = strlen(shown);
    while (*harmless != '\0') {
        size_t size = strcspn(harmless, " ");

        if (size == length && memcmp(harmless, shown, size) == 0) {
            return true;
        }
        harmless += size + (harmless[size] == ' ');
    }
    return false;
}

static arl_status_t
warn_ignored(const warner_t *warn)
{
    for (size_t i = 0; i < arl_config_ignored_count; i++) {
        const arl_config_ignored_t *option = &arl_config_ignored[i];
        const arl_node_t *node = node_at(warn, option->path);
        arl_status_t status = ARL_OK;

        if (node != NULL && (option->generations & (warn->seed ? SEED : FINAL)) != 0 &&
            !is_harmless(node, option->harmless)) {
            status = add(warn, option->path, "no effect: %s", option->why);
        }
        if (status != ARL_OK) {
            return status;
        }
    }
    return ARL_OK;
}

/* Containers without anything in them, and null. */
static bool
is_empty(const arl_node_t *node)
{
    return node->kind == ARL_NODE_NULL || (node->kind == ARL_NODE_MAP && node->as.map.count == 0) ||
           (node->kind == ARL_NODE_LIST && node->as.list.count == 0);
}

/* Whether a list, where there is one, lacks a part of a whole checkpoint. */
static bool
is_partial(const arl_node_t *list)
{
    static const char *const parts[] = {"model", "optimizer", "extra"};
    size_t found = 0;

    if (list == NULL || list->kind != ARL_NODE_LIST) {
        return false;
    }
    for (size_t part = 0; part < sizeof(parts) / sizeof(parts[0]); part++) {
        for (size_t i = 0; i < list->as.list.count; i++) {
            const arl_node_t *item = list->as.list.items[i];

            if (item->kind == ARL_NODE_TEXT && strcmp(item->as.text.data, parts[part]) == 0) {
                found++;
                break;
            }
        }
    }
    return found < sizeof(parts) / sizeof(parts[0]);
}

/* Checkpoints are whole, both ways. */
static arl_status_t
warn_checkpoint(const warner_t *warn)
{
    arl_status_t status = ARL_OK;

    if (is_partial(node_at(warn, ACTOR "checkpoint.save_contents"))) {
        ARL_CHECK_GOTO(status,
                       add(warn, ACTOR "checkpoint.save_contents",
                           "no effect on what it leaves out: the server writes model, optimizer "
                           "and schedule"),
                       out);
    }
    if (is_partial(node_at(warn, ACTOR "checkpoint.load_contents"))) {
        status = add(warn, ACTOR "checkpoint.load_contents",
                     "no effect on what it leaves out: the server loads model, optimizer and "
                     "schedule");
    }
out:
    return status;
}

/* Blocks of which one key, or none, is read. */
static arl_status_t
warn_blocks(const warner_t *warn)
{
    static const char *const engines[] = {ROLLOUT "engine_kwargs.vllm",
                                          ROLLOUT "engine_kwargs.sglang",
                                          ROLLOUT "engine_kwargs.trtllm"};
    const arl_node_t *block = node_at(warn, MODEL "override_config");
    arl_status_t status = ARL_OK;

    for (size_t i = 0; i < sizeof(engines) / sizeof(engines[0]); i++) {
        const arl_node_t *engine = node_at(warn, engines[i]);

        if (engine != NULL && !is_empty(engine)) {
            ARL_CHECK_GOTO(status, add(warn, engines[i], "no effect: not sent to the sampler"),
                           out);
        }
    }
    for (size_t i = 0; block != NULL && block->kind == ARL_NODE_MAP && i < block->as.map.count;
         i++) {
        const arl_pair_t *pair = &block->as.map.pairs[i];
        char path[192];

        if (pair->key->kind == ARL_NODE_TEXT && !is_empty(pair->value) &&
            strcmp(pair->key->as.text.data, "attn_implementation") != 0) {
            (void)snprintf(path, sizeof(path), MODEL "override_config.%.128s",
                           pair->key->as.text.data);
            ARL_CHECK_GOTO(
                status,
                add(warn, path, "no effect: of override_config only attn_implementation is read"),
                out);
        }
    }
out:
    return status;
}

/* What acts, but not as its name says. */
static arl_status_t
warn_distorted(const warner_t *warn)
{
    double rows = number_at(warn, "data.train_batch_size", 1) * number_at(warn, ROLLOUT "n", 1);
    double engines = number_at(warn, "remote_backend.log_prob_gpus", 0);
    double micro = number_at(warn, ACTOR "ppo_micro_batch_size_per_gpu", 1);
    arl_status_t status = ARL_OK;

    if (number_at(warn, ROLLOUT "temperature", 1) != 1.0 && !warn->zorro) {
        ARL_CHECK_GOTO(status,
                       add(warn, ROLLOUT "temperature",
                           "log-probs are computed without it and the update with it, so the "
                           "first ratio is not 1 (temperature_in_log_prob=True on the client, "
                           "with verl remote_backend.temperature_in_log_prob, mends that)"),
                       out);
    }
    if (number_at(warn, ACTOR "entropy_coeff", 0) != 0.0 && !warn->zorro) {
        ARL_CHECK_GOTO(status,
                       add(warn, ACTOR "entropy_coeff",
                           "without ZoRRO the server's entropy loss is one token off its mask"),
                       out);
    }
    if ((is_true(warn, ACTOR "use_kl_loss") || is_true(warn, "algorithm.use_kl_in_reward")) &&
        engines > 0 && rows / engines > micro) {
        ARL_CHECK_GOTO(status,
                       add(warn, "remote_backend.log_prob_gpus",
                           "the reference engine takes its whole share of a batch, %.0f rows, in "
                           "one forward pass",
                           ceil(rows / engines)),
                       out);
    }
    if (is_true(warn, "remote_backend.train.logits.compute_from_fp32_inputs") && !warn->zorro) {
        status = add(warn, "remote_backend.train.logits.compute_from_fp32_inputs",
                     "no effect: it works with ZoRRO only");
    }
out:
    return status;
}

static double
gradient_clip(const warner_t *warn)
{
    const arl_node_t *first = node_at(warn, ACTOR "optim.clip_grad");

    return first != NULL && first->kind != ARL_NODE_NULL
               ? number_at(warn, ACTOR "optim.clip_grad", 0)
               : number_at(warn, ACTOR "grad_clip", 0);
}

/* Schedule and clipping of the nested form. */
static arl_status_t
warn_schedule(const warner_t *warn)
{
    bool cosine = text_is(warn, ACTOR "optim.lr_scheduler_type", "cosine");
    double ratio = number_at(warn, ACTOR "optim.lr_warmup_steps_ratio", 0);
    double steps = number_at(warn, ACTOR "optim.total_training_steps", -1);
    double clip = gradient_clip(warn), horizon;
    arl_status_t status = ARL_OK;

    if (!cosine && !text_is(warn, ACTOR "optim.lr_scheduler_type", "constant")) {
        ARL_CHECK_GOTO(status,
                       add(warn, ACTOR "optim.lr_scheduler_type",
                           "means 'constant': the server knows that and 'cosine'"),
                       out);
    }
    if (steps <= 0) {
        steps = number_at(warn, "trainer.total_training_steps", -1);
    }
    horizon = steps * number_at(warn, ACTOR "ppo_epochs", 1) *
              floor(number_at(warn, "data.train_batch_size", 1) /
                    number_at(warn, ACTOR "ppo_mini_batch_size", 1));
    if (ratio > 0 && horizon > 0 && rint(ratio * horizon) == 0) {
        ARL_CHECK_GOTO(status,
                       add(warn, ACTOR "optim.lr_warmup_steps_ratio",
                           "no effect: of %.0f optimizer steps it rounds to no step", horizon),
                       out);
    }
    if (node_at(warn, ACTOR "optim.clip_grad") != NULL &&
        clip != number_at(warn, ACTOR "grad_clip", 0)) {
        ARL_CHECK_GOTO(
            status,
            add(warn, ACTOR "grad_clip", "no effect: optim.clip_grad comes first, %g", clip), out);
    }
    if (node_at(warn, DEEPSPEED "gradient_clipping") != NULL && clip > 0) {
        ARL_CHECK_GOTO(status,
                       add(warn, DEEPSPEED "gradient_clipping",
                           "no effect: replaced by the actor's gradient clipping, %g", clip),
                       out);
    }
    if (node_at(warn, DEEPSPEED "scheduler") != NULL && (cosine || ratio > 0)) {
        status = add(warn, DEEPSPEED "scheduler", "no effect: replaced by actor.optim");
    }
out:
    return status;
}

static arl_status_t
warn_seed(const warner_t *warn)
{
    const arl_node_t *betas = node_at(warn, ACTOR "optim.betas");
    arl_status_t status = ARL_OK;

    if (number_at(warn, ACTOR "ppo_mini_batch_size", 1) !=
        number_at(warn, "data.train_batch_size", 1)) {
        ARL_CHECK_GOTO(status,
                       add(warn, ACTOR "ppo_mini_batch_size",
                           "no effect on the steps: the flat form takes one over the whole "
                           "batch"),
                       out);
    }
    for (size_t i = 0; i < 2; i++) {
        const arl_node_t *beta = betas->as.list.items[i];
        double value = beta->kind == ARL_NODE_INT ? (double)beta->as.integer : beta->as.real;

        if (value != (i == 0 ? 0.9 : 0.999)) {
            return add(warn, ACTOR "optim.betas",
                       "no effect: the server of the flat form always uses 0.9 and 0.999");
        }
    }
out:
    return status;
}

/* The server takes a block that is there for a block that is on. */
static arl_status_t
warn_inference(const warner_t *warn)
{
    if (!is_true(warn, "remote_backend.colocate") ||
        is_true(warn, "remote_backend.rollout.zorro_inference.enable") ||
        !text_is(warn, "remote_backend.rollout.speculative_decoding.model", "")) {
        return ARL_OK;
    }
    return add(
        warn, "remote_backend.rollout",
        "nothing in it is enabled, but a colocated Arctic server takes it as Arctic "
        "Inference on (build_client_config(..., omit_disabled_rollout=True) leaves it away)");
}

arl_status_t
arl_config_tree_warnings(arl_tree_t *tree, arl_node_t *list, arl_error_t *err)
{
    warner_t warn = {.tree = tree, .list = list, .err = err};
    arl_status_t status;

    warn.seed = text_is(&warn, "remote_backend.generation", "seed");
    warn.zorro = is_true(&warn, "remote_backend.train.zorro_train.enable");
    ARL_CHECK_GOTO(status, warn_ignored(&warn), out);
    ARL_CHECK_GOTO(status, warn_blocks(&warn), out);
    ARL_CHECK_GOTO(status, warn_checkpoint(&warn), out);
    ARL_CHECK_GOTO(status, warn_distorted(&warn), out);
    if (warn.seed) {
        status = warn_seed(&warn);
    }
    else {
        ARL_CHECK_GOTO(status, warn_schedule(&warn), out);
        status = warn_inference(&warn);
    }
out:
    return status;
}
