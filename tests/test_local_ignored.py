# SPDX-License-Identifier: Apache-2.0
"""Which options are said to have no effect with the embedded server."""

from __future__ import annotations

from typing import Any

import pytest

import clients
from arctic_rl_c import config_schema, config_warnings, normalize_config
from arctic_rl_c.local import ignored
from arctic_rl_c.local.ignored import embedded_warnings

HARMFUL: dict[str, Any] = {
    "remote_backend.train.zorro_train.enable": True,
    "remote_backend.train.logits.optimization": "compute",
    "remote_backend.train.logits.compute_in_fp32": True,
    "remote_backend.train.logits.compute_from_fp32_inputs": True,
    "remote_backend.train.determinism.full": True,
    "remote_backend.train.deepspeed.zero_optimization.stage": 3,
    "remote_backend.train.deepspeed.zero_optimization.offload_optimizer.device": "cpu",
    "remote_backend.train.deepspeed.zero_optimization.offload_param.device": "cpu",
    "remote_backend.rollout.zorro_inference.enable": True,
    "remote_backend.rollout.speculative_decoding.model": "draft",
    "actor_rollout_ref.model.use_liger": True,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 2,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.9,
    "actor_rollout_ref.rollout.enable_chunked_prefill": False,
    "actor_rollout_ref.rollout.quantization": "fp8",
}


def config(path: str | None = None, value: Any = None, **flat: Any) -> dict[str, Any]:
    block = flat or {"train": {}}
    tree: dict[str, Any] = {"remote_backend": {"log_prob_gpus": 1, **block}}
    if path is not None:
        tree = clients.changed(tree, **{path.replace(".", "__"): value})
    return normalize_config(tree)


def test_defaults_bring_no_warnings() -> None:
    assert embedded_warnings(config()) == []
    assert embedded_warnings(config(comm_protocol="ray")) == [
        "actor_rollout_ref.actor.ppo_mini_batch_size=256: no effect on the steps: the flat form "
        "takes one over the whole batch"
    ]


@pytest.mark.parametrize("path", [path for path, _, _ in ignored._IGNORED])
def test_every_option_is_named_once(path: str) -> None:
    texts = embedded_warnings(config(path, HARMFUL[path]))
    assert len([text for text in texts if text.startswith(path + "=")]) == 1 == len(texts)


def test_there_are_such_keys() -> None:
    schema = config_schema()
    known = {f"remote_backend.{field['path']}" for field in schema["remote_backend"]}
    known |= {field["path"] for field in schema["verl"]}
    assert {path for path, _, _ in ignored._IGNORED} <= known


def test_what_only_other_servers_ignore_is_not_named() -> None:
    honoured = {
        "actor_rollout_ref.actor.clip_ratio": 0.3,
        "actor_rollout_ref.actor.loss_scale_factor": 5,
        "actor_rollout_ref.actor.entropy_coeff": 0.01,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "algorithm.rollout_correction.rollout_is": "token",
    }
    for path, value in honoured.items():
        assert len(config_warnings(config(path, value))) == 2, path
        assert embedded_warnings(config(path, value)) == [], path
    flat = normalize_config(
        {
            "remote_backend": {"comm_protocol": "ray"},
            "actor_rollout_ref": {
                "actor": {"grad_clip": 0.5, "optim": {"betas": [0.9, 0.95]}},
                "model": {"enable_gradient_checkpointing": False},
            },
            "data": {"train_batch_size": 256},
        }
    )
    assert len(config_warnings(flat)) == 3 and embedded_warnings(flat) == []
    both = config("actor_rollout_ref.actor.optim.lr_scheduler_type", "linear")
    assert len(embedded_warnings(both)) == 1


def test_deepspeed_settings_are_named() -> None:
    found = embedded_warnings(
        config(
            "remote_backend.train.deepspeed",
            {
                "bf16": {"enabled": True},
                "train_batch_size": 8,
                "log_level": "DEBUG",
                "zero_optimization": {"overlap_comm": True},
            },
        )
    )
    prefix = "remote_backend.train.deepspeed."
    assert [text.split("=")[0].removeprefix(prefix) for text in found] == [
        "train_batch_size",  # replaced by what the batch sizes give, and named for that
        "bf16",
        "zero_optimization.overlap_comm",
    ]
