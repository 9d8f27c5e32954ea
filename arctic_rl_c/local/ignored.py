# SPDX-License-Identifier: Apache-2.0
"""Which warnings about a configuration hold with the embedded server: not those of others alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from arctic_rl_c import config_warnings

#: What `config_warnings` says of other servers: how its text begins, and what is in it.
_OF_OTHERS = (
    ("actor_rollout_ref.actor.clip_ratio", ""),
    ("actor_rollout_ref.actor.policy_loss", ""),  # other modes are an error here
    ("actor_rollout_ref.actor.loss_scale_factor", ""),
    ("actor_rollout_ref.actor.entropy_coeff", ""),
    ("actor_rollout_ref.actor.use_dynamic_bsz", ""),  # micro-batches are by tokens in any case
    ("actor_rollout_ref.actor.", "the flat form has no gradient clipping"),
    ("actor_rollout_ref.actor.", "the server of the flat form"),
    ("actor_rollout_ref.model.enable_gradient_checkpointing", ""),
    ("algorithm.rollout_is", ""),
    ("algorithm.rollout_correction.rollout_is", ""),
    ("remote_backend.log_prob_gpus", ""),
    ("remote_backend.rollout", "nothing in it is enabled"),
)

_DEEPSPEED = "remote_backend.train.deepspeed."
_ROLLOUT = "actor_rollout_ref.rollout."

#: Keys that every configuration has, in two blocks that are handed to DeepSpeed whole.
_OF_DEEPSPEED = ("zero_optimization", "log_level")
_OF_SHARDING = ("stage", "offload_optimizer", "offload_param")

#: Key, values that change nothing, and why other values do not act.
_IGNORED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    (
        "remote_backend.train.zorro_train.enable",
        (False,),
        "acts on the form of the log-probs alone: the embedded trainer computes each row by "
        "itself, so sharing prompts saves neither time nor memory",
    ),
    (
        "remote_backend.train.logits.optimization",
        ("none",),
        "no effect: the embedded trainer always computes logits in pieces",
    ),
    (
        "remote_backend.train.logits.compute_in_fp32",
        (False,),
        "no effect: the embedded trainer always takes logits in float32",
    ),
    (
        "remote_backend.train.logits.compute_from_fp32_inputs",
        (False,),
        "no effect: the embedded trainer does not know it",
    ),
    (
        "remote_backend.train.determinism.full",
        (False,),
        "no effect: the embedded server does not know it",
    ),
    (_DEEPSPEED + "zero_optimization.stage", (0,), "no effect: the embedded trainer is one rank"),
    (
        _DEEPSPEED + "zero_optimization.offload_optimizer.device",
        ("none",),
        "no effect: the embedded trainer offloads nothing",
    ),
    (
        _DEEPSPEED + "zero_optimization.offload_param.device",
        ("none",),
        "no effect: the embedded trainer offloads nothing",
    ),
    (
        "remote_backend.rollout.zorro_inference.enable",
        (False,),
        "no effect: the embedded sampler does not know it",
    ),
    (
        "remote_backend.rollout.speculative_decoding.model",
        ("",),
        "no effect: the embedded sampler does not know it",
    ),
    (
        "actor_rollout_ref.model.use_liger",
        (False,),
        "no effect: the embedded server runs the model as it is",
    ),
    (
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        (None,),
        "no effect: micro-batches of the embedded trainer follow ppo_max_token_len_per_gpu",
    ),
    (
        _ROLLOUT + "gpu_memory_utilization",
        (0.5,),
        "no effect: the embedded sampler takes memory as it needs it",
    ),
    (
        _ROLLOUT + "enable_chunked_prefill",
        (True,),
        "no effect: the embedded sampler has no chunks of a prompt",
    ),
    (
        _ROLLOUT + "quantization",
        (None,),
        "no effect: the embedded sampler runs the weights as they are",
    ),
)


def embedded_warnings(config: Mapping[str, Any]) -> list[str]:
    """What of a normalised configuration has no effect with the embedded server, once each.

    Args:
        config: As for `config_warnings`.
    """
    texts = [
        text
        for text in config_warnings(config)
        if not any(text.startswith(head) and part in text for head, part in _OF_OTHERS)
    ]
    named = {text.partition("=")[0] for text in texts}
    for path, harmless, why in _IGNORED:
        value = _value(config, path)
        if path not in named and not any(value is h or value == h for h in harmless):
            texts.append(f"{path}={_shown(value)}: {why}")
    deepspeed = _value(config, _DEEPSPEED.removesuffix(".")) or {}
    sharding = deepspeed.get("zero_optimization") or {}
    others = [
        *((_DEEPSPEED + key, deepspeed[key]) for key in deepspeed if key not in _OF_DEEPSPEED),
        *(
            (f"{_DEEPSPEED}zero_optimization.{key}", sharding[key])
            for key in sharding
            if key not in _OF_SHARDING
        ),
    ]
    for path, value in others:
        if path not in named:
            texts.append(
                f"{path}={_shown(value)}: no effect: the embedded trainer has no DeepSpeed"
            )
    return texts


def _value(config: Mapping[str, Any], path: str) -> Any:
    value: Any = config
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
