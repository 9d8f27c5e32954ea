#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# GRPO on GSM8K with verl and this library; run_gsm8k_grpo_arl_zorro_no.sh is the same run without
# prompt sharing. Run it where verl can be imported; further arguments are Hydra overrides.
#
#   DATA_DIR=~/gsm8k MODEL=~/Qwen3-0.6B  examples/run_gsm8k_grpo_arl_zorro_yes.sh
#
# DATA_DIR holds verl's GSM8K train.parquet and test.parquet. Without it the run takes generated
# sums in the same form and a model of 0.1 M parameters, which need neither a download nor a GPU.
# The run, its logs and its checkpoints are in WORK_DIR (gsm8k or arithmetic, in this folder).

set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
zorro=${ZORRO:-True}

# In a folder of its own: beside the sources of this project Python, and each worker of Ray, would
# take them for the installed package.
if [[ -n ${DATA_DIR:-} ]]; then
  data=$(cd "$DATA_DIR" >/dev/null && pwd)
  model=$(cd "${MODEL:?MODEL must be a local model directory when DATA_DIR is given}" >/dev/null && pwd)
  work=${WORK_DIR:-$PWD/gsm8k}
else
  work=${WORK_DIR:-$PWD/arithmetic}
fi
mkdir -p "$work" && cd "$work" && work=$PWD

python3 -c 'import arctic_rl_c, verl' || {
  echo "python3 ($(command -v python3)) needs verl and this library: see docs/verl.md" >&2
  exit 1
}

export PYTHONUNBUFFERED=1 HYDRA_FULL_ERROR=1
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
export VERL_USE_EXTERNAL_MODULES=arctic_rl_c.integrations.verl

if [[ -n ${DATA_DIR:-} ]]; then
  batch=16 samples=5 prompt=512 response=1024 lr=1e-6
  task=()
else
  data=$work
  python3 "$here/verl_arithmetic.py" "$data"
  # Last, so that what is installed comes first.
  export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$data/stand_in
  model=$data/model
  batch=32 samples=8 prompt=8 response=4 lr=4e-3
  # A Ray cluster of its own, also where another one runs on this machine. Many small processes on
  # few cores: num_cpus are slots, not cores.
  task=(reward.custom_reward_function.path="$here/verl_arithmetic.py"
    reward.custom_reward_function.name=compute_score
    +ray_kwargs.ray_init.address=local
    ray_kwargs.ray_init.num_cpus=16
    data.dataloader_num_workers=0)
fi

# The older trainer has to be told to use the new worker implementation; V1 has no such switch.
trainer=()
if python3 -c 'import sys; import arctic_rl_c.integrations.verl as p; sys.exit(p.registration.form == "v1")'; then
  trainer=(trainer.remote_backend=arctic trainer.use_legacy_worker_impl=disable)
fi

exec python3 -m verl.trainer.main_ppo \
  hydra.searchpath='[pkg://arctic_rl_c.integrations.verl.config]' \
  remote_backend=arctic \
  remote_backend.colocate=True \
  remote_backend.log_prob_gpus=0 \
  remote_backend.train.zorro_train.enable="$zorro" \
  algorithm.adv_estimator=grpo \
  algorithm.use_kl_in_reward=False \
  data.train_files="$data/train.parquet" \
  data.val_files="$data/test.parquet" \
  data.train_batch_size=$batch \
  data.max_prompt_length=$prompt \
  data.max_response_length=$response \
  data.shuffle=False \
  actor_rollout_ref.model.path="$model" \
  +actor_rollout_ref.model.override_config.attn_implementation=sdpa \
  actor_rollout_ref.actor.optim.lr=$lr \
  actor_rollout_ref.actor.ppo_mini_batch_size=$batch \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
  actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.actor.entropy_coeff=0 \
  actor_rollout_ref.rollout.name=arctic \
  actor_rollout_ref.rollout.n=$samples \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 \
  actor_rollout_ref.rollout.agent.num_workers=1 \
  reward.num_workers=1 \
  trainer.n_gpus_per_node=1 \
  trainer.nnodes=1 \
  trainer.logger='[console]' \
  trainer.val_before_train=False \
  trainer.test_freq=-1 \
  trainer.save_freq=-1 \
  trainer.total_training_steps="${STEPS:-80}" \
  trainer.total_epochs=15 \
  "${trainer[@]}" "${task[@]}" "$@"
