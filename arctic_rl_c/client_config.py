# SPDX-License-Identifier: Apache-2.0
"""What an Arctic client is started with: jobs, DeepSpeed, vLLM and schedules, from a main config.

The result is plain nested dicts with the field names of the Arctic client's own config classes,
flat for the first generation and nested for the final one. Building those classes is left to
whoever has them installed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

from arctic_rl_c._core import ConfigError, normalize_config

HTTP_HOST = "localhost"
HTTP_PORT = 7000

__all__ = ["build_client_config", "visible_devices"]


def build_client_config(
    config: Mapping[str, Any],
    *,
    generation: Literal["seed", "final"] | None = None,
    omit_disabled_rollout: bool = False,
) -> dict[str, Any]:
    """Return the configuration that the Arctic client factory is given.

    `config` is anything that `normalize_config` takes; its generation decides the form, unless
    `generation` asks for the final form of a flat config. With
    `omit_disabled_rollout` a rollout block in which nothing is enabled is left away, which keeps a
    colocated server from switching Arctic Inference on.

    Raises ConfigError for what `normalize_config` refuses, when there is no
    `actor_rollout_ref.model.path`, when the flat form of a nested config is asked for, and when a
    learning-rate schedule is asked for without a number of training steps.
    """
    main = normalize_config(config)
    if "path" not in main["actor_rollout_ref"]["model"]:
        _fail("actor_rollout_ref.model.path: an Arctic server needs a model")
    found = main["remote_backend"]["generation"]
    if found == "final" and generation == "seed":
        _fail("remote_backend: is nested, and a client of the first generation needs it flat")
    if found == "seed" and generation == "final":
        main = _final_form(main)
    elif found == "seed":
        return _seed_config(main)
    return _final_config(main, omit_disabled_rollout)


def visible_devices(config: Mapping[str, Any]) -> str:
    """Return the device list that the recorded adapter put into `CUDA_VISIBLE_DEVICES`.

    One index per GPU of every job, also when they share GPUs. It is never applied here: it would
    discard the user's own choice of devices.
    """
    remote = normalize_config(config)["remote_backend"]
    count = remote["training_gpus"] + remote["sampling_gpus"] + remote["log_prob_gpus"]
    return ",".join(str(index) for index in range(count))


def _fail(message: str) -> NoReturn:
    error = ConfigError(message)
    error.code = "ARL_ERR_CONFIG"
    error.operation = "build_client_config"
    error.rank = None
    error.domain = "none"
    error.foreign = 0
    raise error


def _max_length(main: dict[str, Any]) -> int:
    data = main["data"]
    return int(data["max_prompt_length"] + data["max_response_length"])


def _attention(main: dict[str, Any], default: str) -> str:
    override = main["actor_rollout_ref"]["model"].get("override_config") or {}
    return override.get("attn_implementation") or default


def _batch_keys(main: dict[str, Any], prompts: int, gpus: int) -> dict[str, int]:
    """The four batch keys of a DeepSpeed config, for a step over `prompts` prompts."""
    actor = main["actor_rollout_ref"]["actor"]
    micro = actor["ppo_micro_batch_size_per_gpu"] or 1
    rows = prompts * main["actor_rollout_ref"]["rollout"]["n"]
    return {
        "train_micro_batch_size_per_gpu": micro,
        "train_batch_size": rows,
        "gradient_accumulation_steps": max(1, rows // (micro * gpus)),
        "sequence_parallel_size": actor["fsdp_config"]["ulysses_sequence_parallel_size"],
    }


def _vllm(main: dict[str, Any]) -> dict[str, Any]:
    rollout = main["actor_rollout_ref"]["rollout"]
    vllm = {
        "tensor_parallel_size": main["remote_backend"]["sampling_tp_size"],
        "gpu_memory_utilization": rollout["gpu_memory_utilization"],
        "max_model_len": rollout["max_model_len"] or _max_length(main),
        "max_num_seqs": rollout["max_num_seqs"],
        "enforce_eager": rollout["enforce_eager"],
        "enable_chunked_prefill": rollout["enable_chunked_prefill"],
    }
    if rollout["quantization"]:
        vllm["quantization"] = rollout["quantization"]
    return vllm


def _zorro_worker(main: dict[str, Any], max_token_len: int) -> dict[str, Any]:
    """What both generations tell a worker about ZoRRO."""
    rollout = main["actor_rollout_ref"]["rollout"]
    return {
        "zorro_train_enable": True,
        "response_len": main["data"]["max_response_length"],
        "max_token_len": max_token_len,
        "rollout_n": rollout["n"],
        "temperature": rollout["temperature"],
        "use_unpad": True,
    }


# ---- the first generation ---------------------------------------------------------------------


def _seed_ds_config(main: dict[str, Any], gpus: int) -> dict[str, Any]:
    zero = main["remote_backend"]["train"]["deepspeed"]["zero_optimization"]
    return {
        **_batch_keys(main, main["data"]["train_batch_size"], gpus),
        "zero_optimization": {
            "stage": zero["stage"],
            "offload_optimizer": {"device": zero["offload_optimizer"]["device"]},
            "offload_param": {"device": zero["offload_param"]["device"]},
        },
    }


def _seed_worker(main: dict[str, Any]) -> dict[str, Any]:
    train = main["remote_backend"]["train"]
    worker = {
        "use_liger": main["actor_rollout_ref"]["model"]["use_liger"],
        "attn_implementation": _attention(main, "flash_attention_2"),
    }
    if train["zorro_train"]["enable"]:
        worker |= _zorro_worker(
            main, main["actor_rollout_ref"]["rollout"]["max_num_batched_tokens"]
        )
        worker["tiled_logits_compute"] = train["logits"]["tiled_compute"]
    return worker


def _seed_config(main: dict[str, Any]) -> dict[str, Any]:
    remote = main["remote_backend"]
    optim = main["actor_rollout_ref"]["actor"]["optim"]
    http = remote["comms"]["protocol"] == "http"
    references = remote["log_prob_gpus"]
    return {
        "host": HTTP_HOST if http else None,
        "port": HTTP_PORT if http else None,
        "comm_protocol": remote["comms"]["protocol"],
        "backend": "local",
        "training_gpus": remote["training_gpus"],
        "sampling_gpus": remote["sampling_gpus"],
        "log_prob_gpus": references,
        "colocate": remote["colocate"],
        "log_prob_engine": "deepspeed",
        "model_name": main["actor_rollout_ref"]["model"]["path"],
        "ds_config": _seed_ds_config(main, remote["training_gpus"]),
        "log_prob_ds_config": _seed_ds_config(main, references) if references else None,
        "training_config": {
            "optimizer": {
                "lr": optim["lr"],
                "weight_decay": optim["weight_decay"],
                "betas": optim["betas"],
            },
            "lr_scheduler": {"warmup_ratio": optim["lr_warmup_steps_ratio"]},
            "training_horizon": main["trainer"]["total_epochs"],
            "max_length": _max_length(main),
            "model_config": None,
            "attn_implementation": _attention(main, "eager"),
        },
        "ds_worker_config": _seed_worker(main),
        "vllm_config": _vllm(main),
        "checkpoint_path": main["trainer"]["default_local_dir"],
    }


# ---- the final generation ---------------------------------------------------------------------


def _final_form(main: dict[str, Any]) -> dict[str, Any]:
    """A normalised flat config as one of the final generation."""
    remote, train = main["remote_backend"], main["remote_backend"]["train"]
    # The only key that the flat form alone has.
    logits = {key: value for key, value in train["logits"].items() if key != "tiled_compute"}
    remote = {**remote, "generation": "final", "train": {**train, "logits": logits}}
    return {**main, "remote_backend": remote}


def _horizon(main: dict[str, Any]) -> int:
    """Optimizer steps of the whole run."""
    actor = main["actor_rollout_ref"]["actor"]
    steps = actor["optim"]["total_training_steps"]
    if steps is None or steps <= 0:
        steps = main["trainer"]["total_training_steps"]
    if steps is None or steps <= 0:
        _fail(
            "actor_rollout_ref.actor.optim.total_training_steps: a learning-rate schedule needs "
            "the number of training steps, here or in trainer.total_training_steps"
        )
    mini_batches = main["data"]["train_batch_size"] // actor["ppo_mini_batch_size"]
    return int(steps) * int(actor["ppo_epochs"]) * int(mini_batches)


def _scheduler(main: dict[str, Any]) -> dict[str, Any] | None:
    optim = main["actor_rollout_ref"]["actor"]["optim"]
    cosine = optim["lr_scheduler_type"] == "cosine"
    if not cosine and optim["lr_warmup_steps_ratio"] == 0:
        return None
    horizon = _horizon(main)
    warmup = round(optim["lr_warmup_steps_ratio"] * horizon)  # halves go to the even neighbour
    if cosine:
        return {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": horizon,
                "warmup_num_steps": warmup,
                "warmup_min_ratio": 0.0,
                "cos_min_ratio": optim["min_lr_ratio"] or 0.0,
                "warmup_type": "linear",
            },
        }
    if warmup == 0:
        return None
    return {
        "type": "WarmupLR",
        "params": {
            "warmup_min_lr": 0.0,
            "warmup_max_lr": optim["lr"],
            "warmup_num_steps": warmup,
            "warmup_type": "linear",
        },
    }


def _final_ds_config(main: dict[str, Any], gpus: int) -> dict[str, Any]:
    mini = main["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"]
    base = copy.deepcopy(main["remote_backend"]["train"]["deepspeed"])
    return {**base, **_batch_keys(main, mini, gpus)}


def _final_training_ds_config(main: dict[str, Any]) -> dict[str, Any]:
    actor = main["actor_rollout_ref"]["actor"]
    optim = actor["optim"]
    ds_config = _final_ds_config(main, main["remote_backend"]["training_gpus"])
    ds_config["optimizer"] = {
        "type": "AdamW",
        "params": {
            "lr": optim["lr"],
            "weight_decay": optim["weight_decay"],
            "betas": list(optim["betas"]),
            "eps": 1e-8,
        },
    }
    clip = optim.get("clip_grad")
    if clip is None:
        clip = actor["grad_clip"]
    if clip is not None and clip > 0:
        ds_config["gradient_clipping"] = float(clip)
    scheduler = _scheduler(main)
    if scheduler is not None:
        ds_config["scheduler"] = scheduler
    return ds_config


def _final_worker(main: dict[str, Any]) -> dict[str, Any]:
    model = main["actor_rollout_ref"]["model"]
    train = main["remote_backend"]["train"]
    logits = train["logits"]
    worker = {
        "use_liger": model["use_liger"],
        "enable_gradient_checkpointing": model["enable_gradient_checkpointing"],
        "attn_implementation": _attention(main, "flash_attention_2"),
    }
    if train["zorro_train"]["enable"]:
        worker |= _zorro_worker(
            main, main["actor_rollout_ref"]["actor"]["ppo_max_token_len_per_gpu"]
        )
        worker["logits_optimization"] = logits["optimization"]
        worker["logits_optimization_peak_mem_size_in_gib"] = logits[
            "optimization_peak_mem_size_in_gib"
        ]
        worker["logits_compute_from_fp32_inputs"] = logits["compute_from_fp32_inputs"]
        worker["logits_compute_in_fp32"] = logits["compute_in_fp32"]
    return worker


def _final_backend(remote: dict[str, Any]) -> dict[str, Any]:
    backend = {"protocol": remote["comms"]["protocol"], "colocate": remote["colocate"]}
    if remote["comms"]["protocol"] == "http":
        backend |= {"host": HTTP_HOST, "port": HTTP_PORT, "launch_local_server": True}
    return backend


def _final_config(main: dict[str, Any], omit_disabled_rollout: bool) -> dict[str, Any]:
    remote = main["remote_backend"]
    train = remote["train"]
    references = remote["log_prob_gpus"]
    inference = remote["rollout"]
    enabled = inference["zorro_inference"]["enable"] or inference["speculative_decoding"]["model"]
    return {
        "model_name": main["actor_rollout_ref"]["model"]["path"],
        "seed": train["determinism"]["seed"],
        "max_seq_len": _max_length(main),
        "training_gpus": remote["training_gpus"],
        "sampling_gpus": remote["sampling_gpus"],
        "log_prob_gpus": references,
        "backend": _final_backend(remote),
        "training": {
            "full_determinism": train["determinism"]["full"],
            "checkpoint_path": main["trainer"]["default_local_dir"],
            "ds_config": _final_training_ds_config(main),
            "ds_worker_config": _final_worker(main),
            "cuda_ipc": remote["weight_sync"]["cuda_ipc"],
            "low_memory": remote["weight_sync"]["low_memory"],
        },
        "sampling": {
            "vllm": _vllm(main),
            "arctic_inference_config": (
                None if omit_disabled_rollout and not enabled else inference
            ),
            "log_prob_engine": "deepspeed",
            "log_prob_ds_config": _final_ds_config(main, references) if references else None,
        },
    }
