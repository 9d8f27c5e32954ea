/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The one table of keys. docs/config.md is checked against it, arl_config.c walks it, and
 * overrides and suggestions read it; a key is added here and nowhere else.
 */
#include "core/arl_config.h"

#include <math.h>

#define ANY_MIN (-HUGE_VAL)
#define ANY_MAX HUGE_VAL
#define GPUS_MAX 1e6
#define COUNT_MAX 9007199254740992.0 /* exact in a double */

const arl_field_t arl_config_arctic_fields[] = {
    {"colocate", "colocate", ARL_FIELD_BOOL, 0, "true", NULL, NULL, 0, 0,
     "Training, sampling and log-probs share the same GPUs."},
    {"training_gpus", "training_gpus", ARL_FIELD_INT, 0, NULL, NULL, NULL, 1, GPUS_MAX,
     "Data-parallel training ranks. Default: `trainer.n_gpus_per_node` where that is given, "
     "else 1."},
    {"sampling_gpus", "sampling_gpus", ARL_FIELD_INT, 0, NULL, NULL, NULL, 1, GPUS_MAX,
     "GPUs of the samplers, a multiple of `sampling_tp_size`. Default as for "
     "`training_gpus`."},
    {"log_prob_gpus", "log_prob_gpus", ARL_FIELD_INT, 0, NULL, NULL, NULL, 0, GPUS_MAX,
     "GPUs of the reference engine; 0: none, so no KL terms. Default as for "
     "`training_gpus`."},
    {"sampling_tp_size", "sampling_tp_size", ARL_FIELD_INT, 0, "1", NULL, NULL, 1, GPUS_MAX,
     "Tensor-parallel size of one sampler."},
    {"weight_sync.cuda_ipc", "cuda_ipc_weight_sync", ARL_FIELD_BOOL, 0, "false", NULL, NULL, 0, 0,
     "Sync weights through CUDA IPC. Needs `colocate`."},
    {"weight_sync.low_memory", "low_memory_weight_sync", ARL_FIELD_BOOL, 0, "false", NULL, NULL, 0,
     0, "Sync in bounded memory. Needs `weight_sync.cuda_ipc`."},
    {"train.load_balancer", NULL, ARL_FIELD_BOOL, ARL_FIELD_FINAL_ONLY, "true", NULL, NULL, 0, 0,
     "The server reorders rows across ranks. Flat form: on exactly when ZoRRO is."},
    {"train.zorro_train.enable", "zorro_train.enable", ARL_FIELD_BOOL, 0, "false", NULL, NULL, 0, 0,
     "Forward pass that packs the rollouts of one prompt together (ZoRRO)."},
    {"train.zorro_train.max_rollouts", "zorro_train.max_rollouts", ARL_FIELD_INT, 0, NULL, NULL,
     NULL, 1, COUNT_MAX,
     "Rollouts packed behind one prompt. Default: `actor_rollout_ref.rollout.n`."},
    {"train.logits.optimization", NULL, ARL_FIELD_CHOICE, ARL_FIELD_FINAL_ONLY, "none", NULL,
     "none|memory|compute", 0, 0, "How logits are computed; `memory` needs ZoRRO."},
    {"train.logits.optimization_peak_mem_size_in_gib", NULL, ARL_FIELD_NUMBER, ARL_FIELD_FINAL_ONLY,
     "4", NULL, NULL, 1e-6, 1e6, "Memory for one chunk of logits, in GiB."},
    {"train.logits.compute_in_fp32", NULL, ARL_FIELD_BOOL, ARL_FIELD_FINAL_ONLY, "false", NULL,
     NULL, 0, 0, "Compute with logits in float32."},
    {"train.logits.compute_from_fp32_inputs", NULL, ARL_FIELD_BOOL, ARL_FIELD_FINAL_ONLY, "false",
     NULL, NULL, 0, 0, "Compute logits from float32 inputs. Only with ZoRRO."},
    {"train.logits.tiled_compute", "tiled_logits_compute", ARL_FIELD_BOOL, ARL_FIELD_SEED_ONLY,
     "true", NULL, NULL, 0, 0,
     "ZoRRO computes logits in tiles. The nested form has `train.logits.optimization` "
     "instead."},
    {"train.determinism.full", NULL, ARL_FIELD_BOOL, ARL_FIELD_FINAL_ONLY, "false", NULL, NULL, 0,
     0, "Full determinism on the server."},
    {"train.determinism.seed", NULL, ARL_FIELD_INT, ARL_FIELD_FINAL_ONLY, "42", NULL, NULL, 0,
     COUNT_MAX, "Seed of the server."},
    {"train.deepspeed.zero_optimization.stage", "zero_optimization.stage", ARL_FIELD_INT, 0, "0",
     NULL, NULL, 0, 3, "ZeRO stage."},
    {"train.deepspeed.zero_optimization.offload_optimizer.device",
     "zero_optimization.offload_optimizer.device", ARL_FIELD_CHOICE, 0, "none", NULL,
     "none|cpu|nvme", 0, 0, "Where the optimizer state is offloaded to."},
    {"train.deepspeed.zero_optimization.offload_param.device",
     "zero_optimization.offload_param.device", ARL_FIELD_CHOICE, 0, "none", NULL, "none|cpu|nvme",
     0, 0, "Where the parameters are offloaded to."},
    {"train.deepspeed.log_level", NULL, ARL_FIELD_TEXT, ARL_FIELD_FINAL_ONLY, "INFO", NULL, NULL, 0,
     0, "DeepSpeed's log level."},
    {"rollout.zorro_inference.enable", NULL, ARL_FIELD_BOOL, ARL_FIELD_FINAL_ONLY, "false", NULL,
     NULL, 0, 0, "Forest cascade attention in the sampler."},
    {"rollout.speculative_decoding.model", NULL, ARL_FIELD_TEXT, ARL_FIELD_FINAL_ONLY, "''", NULL,
     NULL, 0, 0, "Draft model; empty: no speculative decoding."},
    {"comms.protocol", "comm_protocol", ARL_FIELD_CHOICE, 0, "ray", NULL, "ray|http", 0, 0,
     "How ops reach the server."},
    {"comms.drop_position_ids", NULL, ARL_FIELD_BOOL, ARL_FIELD_FINAL_ONLY, "true", "false", NULL,
     0, 0,
     "Leave `position_ids` away; the server rebuilds them from the mask. Flat form: always "
     "sent."},
};
const size_t arl_config_arctic_count =
    sizeof(arl_config_arctic_fields) / sizeof(arl_config_arctic_fields[0]);

#define ACTOR "actor_rollout_ref.actor."
#define MODEL "actor_rollout_ref.model."
#define ROLLOUT "actor_rollout_ref.rollout."

/* The keys of other sections that the client reads. Everything else there passes through. */
const arl_field_t arl_config_verl_fields[] = {
    {MODEL "path", NULL, ARL_FIELD_TEXT, ARL_FIELD_ABSENT, NULL, NULL, NULL, 0, 0,
     "Model of all jobs. Needed for an Arctic server."},
    {MODEL "use_liger", NULL, ARL_FIELD_BOOL, 0, "false", NULL, NULL, 0, 0, "Liger kernels."},
    {MODEL "override_config.attn_implementation", NULL, ARL_FIELD_TEXT,
     ARL_FIELD_ABSENT | ARL_FIELD_NULLABLE, NULL, NULL, NULL, 0, 0,
     "Attention of the training jobs; without it `flash_attention_2`."},
    {MODEL "enable_gradient_checkpointing", NULL, ARL_FIELD_BOOL, 0, "true", NULL, NULL, 0, 0,
     "Gradient checkpointing. Flat form: not sent."},
    {ACTOR "ppo_max_token_len_per_gpu", NULL, ARL_FIELD_INT, 0, "16384", NULL, NULL, 1, COUNT_MAX,
     "Tokens of one packed forward pass."},
    {ACTOR "ppo_micro_batch_size_per_gpu", NULL, ARL_FIELD_INT, ARL_FIELD_NULLABLE, "null", NULL,
     NULL, 1, COUNT_MAX, "Rows of one forward pass; null: 1."},
    {ACTOR "ppo_mini_batch_size", NULL, ARL_FIELD_INT, 0, "256", NULL, NULL, 1, COUNT_MAX,
     "Prompts of one optimizer step. Flat form: not used, one step takes the whole batch."},
    {ACTOR "ppo_epochs", NULL, ARL_FIELD_INT, 0, "1", NULL, NULL, 1, COUNT_MAX,
     "Passes over a batch. Flat form: not used."},
    {ACTOR "fsdp_config.ulysses_sequence_parallel_size", NULL, ARL_FIELD_INT, 0, "1", NULL, NULL, 1,
     GPUS_MAX, "Sequence-parallel size, a divisor of `training_gpus`."},
    {ACTOR "grad_clip", NULL, ARL_FIELD_NUMBER, ARL_FIELD_NULLABLE, "1.0", NULL, NULL, 0, ANY_MAX,
     "Gradient clipping; null or 0: none. `optim.clip_grad` comes first. Flat form: none."},
    {ACTOR "use_kl_loss", NULL, ARL_FIELD_BOOL, 0, "false", NULL, NULL, 0, 0,
     "KL term in the loss. Needs `log_prob_gpus` above 0."},
    {ACTOR "optim.lr", NULL, ARL_FIELD_NUMBER, 0, "1e-6", NULL, NULL, 0, ANY_MAX, "Learning rate."},
    {ACTOR "optim.weight_decay", NULL, ARL_FIELD_NUMBER, 0, "0.01", NULL, NULL, 0, ANY_MAX,
     "Weight decay."},
    {ACTOR "optim.betas", NULL, ARL_FIELD_PAIR, 0, "[0.9, 0.999]", NULL, NULL, 0, 1,
     "AdamW's betas."},
    {ACTOR "optim.lr_warmup_steps_ratio", NULL, ARL_FIELD_NUMBER, 0, "0.0", NULL, NULL, 0, 1,
     "Warm-up as a share of the horizon. Flat form: sent, but the server does not use it."},
    {ACTOR "optim.total_training_steps", NULL, ARL_FIELD_INT, ARL_FIELD_NULLABLE, "-1", NULL, NULL,
     ANY_MIN, COUNT_MAX,
     "Training steps, set by verl's trainer; null or not positive: "
     "`trainer.total_training_steps`. Flat form: not used."},
    {ACTOR "optim.lr_scheduler_type", NULL, ARL_FIELD_TEXT, 0, "constant", NULL, NULL, 0, 0,
     "`cosine`, or anything else for constant. Flat form: not used."},
    {ACTOR "optim.min_lr_ratio", NULL, ARL_FIELD_NUMBER, ARL_FIELD_NULLABLE, "0.0", NULL, NULL, 0,
     1, "Floor of the cosine, as a share of `lr`. Flat form: not used."},
    {ACTOR "optim.clip_grad", NULL, ARL_FIELD_NUMBER, ARL_FIELD_NULLABLE | ARL_FIELD_ABSENT, NULL,
     NULL, NULL, 0, ANY_MAX, "Gradient clipping, before `grad_clip`. Flat form: none."},
    {ROLLOUT "n", NULL, ARL_FIELD_INT, 0, "1", NULL, NULL, 1, COUNT_MAX, "Rollouts per prompt."},
    {ROLLOUT "temperature", NULL, ARL_FIELD_NUMBER, 0, "1.0", NULL, NULL, 0, ANY_MAX,
     "Sampling temperature, above 0."},
    {ROLLOUT "max_num_batched_tokens", NULL, ARL_FIELD_INT, 0, "8192", NULL, NULL, 1, COUNT_MAX,
     "Flat form: tokens of one packed ZoRRO pass. Nested form: not used."},
    {ROLLOUT "gpu_memory_utilization", NULL, ARL_FIELD_NUMBER, 0, "0.5", NULL, NULL, 0, 1,
     "Share of GPU memory for the sampler."},
    {ROLLOUT "max_num_seqs", NULL, ARL_FIELD_INT, 0, "1024", NULL, NULL, 1, COUNT_MAX,
     "Sequences that a sampler runs at once."},
    {ROLLOUT "enforce_eager", NULL, ARL_FIELD_BOOL, 0, "false", NULL, NULL, 0, 0,
     "No CUDA graphs in the sampler."},
    {ROLLOUT "enable_chunked_prefill", NULL, ARL_FIELD_BOOL, 0, "true", NULL, NULL, 0, 0,
     "Chunked prefill in the sampler."},
    {ROLLOUT "max_model_len", NULL, ARL_FIELD_INT, ARL_FIELD_NULLABLE, "null", NULL, NULL, 1,
     COUNT_MAX, "Context of the sampler; null: longest prompt and response."},
    {ROLLOUT "quantization", NULL, ARL_FIELD_TEXT, ARL_FIELD_NULLABLE, "null", NULL, NULL, 0, 0,
     "Quantization of the sampler; null: none."},
    {"algorithm.use_kl_in_reward", NULL, ARL_FIELD_BOOL, 0, "false", NULL, NULL, 0, 0,
     "KL term in the reward. Needs `log_prob_gpus` above 0."},
    {"data.train_batch_size", NULL, ARL_FIELD_INT, 0, "1024", NULL, NULL, 1, COUNT_MAX,
     "Prompts of one training step."},
    {"data.max_prompt_length", NULL, ARL_FIELD_INT, 0, "512", NULL, NULL, 1, COUNT_MAX,
     "Longest prompt, in tokens."},
    {"data.max_response_length", NULL, ARL_FIELD_INT, 0, "512", NULL, NULL, 1, COUNT_MAX,
     "Longest response, in tokens."},
    {"trainer.n_gpus_per_node", NULL, ARL_FIELD_INT, ARL_FIELD_ABSENT, NULL, NULL, NULL, 1,
     GPUS_MAX, "Default of the three GPU counts."},
    {"trainer.total_epochs", NULL, ARL_FIELD_INT, 0, "30", NULL, NULL, 0, COUNT_MAX,
     "Flat form: the training horizon. Nested form: not used."},
    {"trainer.total_training_steps", NULL, ARL_FIELD_INT, ARL_FIELD_NULLABLE, "null", NULL, NULL,
     ANY_MIN, COUNT_MAX, "Training steps, where the optimizer names none. Flat form: not used."},
    {"trainer.default_local_dir", NULL, ARL_FIELD_TEXT, 0, NULL, NULL, NULL, 0, 0,
     "Checkpoint directory. Default: `checkpoints/<trainer.project_name>/"
     "<trainer.experiment_name>`."},
};
const size_t arl_config_verl_count =
    sizeof(arl_config_verl_fields) / sizeof(arl_config_verl_fields[0]);
