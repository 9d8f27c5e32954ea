# SPDX-License-Identifier: Apache-2.0
"""Every key of the schema does something: to what a client is started with, to what it sends, to
another default, or by being refused. A key without effect would be a promise not kept."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch  # noqa: F401 - the recorded batches are made of its tensors

import golden
from arctic_rl_c import (
    ConfigError,
    build_log_prob_payload,
    build_update_payloads,
    config_schema,
    normalize_config,
)
from arctic_rl_c.client_config import build_client_config

#: Another value of each key than the default and the recorded one, where its kind leaves a choice.
OTHER: dict[str, Any] = {
    "training_gpus": 2, "sampling_gpus": 4, "log_prob_gpus": 2, "sampling_tp_size": 2,
    "train.zorro_train.max_rollouts": 7, "train.logits.optimization": "compute",
    "train.logits.optimization_peak_mem_size_in_gib": 9, "train.determinism.seed": 7,
    "train.deepspeed.zero_optimization.stage": 3, "train.deepspeed.log_level": "DEBUG",
    "train.deepspeed.zero_optimization.offload_optimizer.device": "cpu",
    "train.deepspeed.zero_optimization.offload_param.device": "cpu",
    "rollout.speculative_decoding.model": "draft", "comms.protocol": "http",
    "path": "other/model", "attn_implementation": "eager", "ppo_max_token_len_per_gpu": 77,
    "ppo_micro_batch_size_per_gpu": 4, "ppo_mini_batch_size": 4, "ppo_epochs": 3,
    "ulysses_sequence_parallel_size": 1, "grad_clip": 0.5, "lr": 0.5, "weight_decay": 0.5,
    "betas": [0.5, 0.6], "lr_warmup_steps_ratio": 0.5, "total_training_steps": 99,
    "lr_scheduler_type": "constant", "min_lr_ratio": 0.5, "clip_grad": 0.25, "n": 4,
    "temperature": 0.3, "max_num_batched_tokens": 99, "gpu_memory_utilization": 0.25,
    "max_num_seqs": 99, "max_model_len": 99, "quantization": "int4", "train_batch_size": 8,
    "max_prompt_length": 99, "max_response_length": 99, "n_gpus_per_node": 2, "total_epochs": 99,
    "default_local_dir": "elsewhere",
}  # fmt: skip


def base(generation: str, path: str) -> dict[str, Any]:
    """A recorded config on which the key can act."""
    config = copy.deepcopy(golden.case(generation, "zorro").config)
    config["actor_rollout_ref"]["actor"]["optim"]["lr_scheduler_type"] = "cosine"
    if path.endswith("sampling_tp_size"):
        config["remote_backend"]["sampling_gpus"] = 2
    if path.endswith("ulysses_sequence_parallel_size"):
        config["remote_backend"]["training_gpus"] = 2
        config["actor_rollout_ref"]["actor"]["fsdp_config"]["ulysses_sequence_parallel_size"] = 2
    if path == "trainer.n_gpus_per_node":
        for name in ("training_gpus", "sampling_gpus", "log_prob_gpus"):
            del config["remote_backend"][name]
    if path == "trainer.total_training_steps":
        config["actor_rollout_ref"]["actor"]["optim"]["total_training_steps"] = -1
    if path.endswith(("use_kl_loss", "use_kl_in_reward")):
        config["remote_backend"]["log_prob_gpus"] = 0
    if path.endswith("colocate"):  # it is what CUDA IPC needs, so that has to go
        sync = config["remote_backend"].get("weight_sync", config["remote_backend"])
        sync |= dict.fromkeys(sync.keys() & {"cuda_ipc", "cuda_ipc_weight_sync"}, False)
        sync |= dict.fromkeys(sync.keys() & {"low_memory", "low_memory_weight_sync"}, False)
    return config


def outcome(config: dict[str, Any], generation: str) -> Any:
    """All that the configuration leads to; the text of the error where it is refused."""
    case = golden.case(generation, "zorro")
    options: dict[str, Any] = {"pad_token_id": 11, "rollout_n": 2}
    actor = {"use_kl_loss": False, "calculate_entropy": False, "rollout_n": 2, "policy_loss": None}
    try:
        client = build_client_config(config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            payload = build_log_prob_payload(
                case.data(), config, calculate_entropy=False, server_limits=False, **options
            )
            updates = build_update_payloads(
                case.data(), config, actor_config=actor, server_limits=False, **options
            )
    except ConfigError as error:
        return str(error)
    sync = normalize_config(config)["remote_backend"]["weight_sync"]  # what sync_weights passes
    return client, payload["meta"], sorted(payload["batch"]), len(list(updates)), sync


def cases() -> list[Any]:
    found = []
    for section in ("remote_backend", "verl"):
        for field in config_schema()[section]:
            for generation in ("seed", "final"):
                arctic = section == "remote_backend"
                path = field["flat"] if arctic and generation == "seed" else field["path"]
                if path is None or (generation == "final" and field["seed_only"]):
                    continue
                where = f"remote_backend.{path}" if arctic else path
                found.append(pytest.param(generation, where, field, id=f"{generation}-{where}"))
    return found


#: Said in the schema's own words.
WITHOUT = {"seed": ("Flat form: not", "Flat form: none"), "final": ("Nested form: not used",)}


@pytest.mark.parametrize(("generation", "path", "field"), cases())
def test_every_key_has_an_effect(generation: str, path: str, field: dict[str, Any]) -> None:
    config = base(generation, path)
    before = outcome(config, generation)
    *groups, leaf = path.split(".")
    node = config
    for group in groups:
        node = node.setdefault(group, {})
    if field["kind"] == "bool":
        found = normalize_config(config)
        for step in (f"remote_backend.{field['path']}" if field["flat"] else path).split("."):
            found = found[step]
        node[leaf] = not found
    else:
        node[leaf] = OTHER.get(field["path"], OTHER.get(field["path"].rpartition(".")[2]))
    assert node[leaf] is not None
    after = outcome(config, generation)
    no_effect = any(words in field["doc"] for words in WITHOUT[generation])
    sent_in_vain = "but the server does not use it" in field["doc"]
    assert (after != before) is not no_effect or sent_in_vain, (before, after)
