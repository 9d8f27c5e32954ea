# SPDX-License-Identifier: Apache-2.0
"""What the embedded trainer and sampler are built from: plain data, no torch.

The options cross the process boundary as dictionaries (`as_dict` / `from_dict`), so that every
way to run the two roles (child processes, actors, an HTTP server) can carry them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from arctic_rl_c import ConfigError

#: What builds a role in its process or actor, as `module:function`.
ROLE_FACTORY = "arctic_rl_c.local.worker:build_role"

#: Presets: arguments of `Qwen3Config`. `qwen3-0.6b` has that model's 310 tensors exactly.
SHAPES: dict[str, dict[str, Any]] = {
    "micro": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 128,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
    },
    "qwen3-0.6b": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
    },
}

#: Presets whose matrices are too small for a second thread to pay.
SMALL_SHAPES = ("micro", "tiny")


@dataclass
class ModelOptions:
    """Which causal LM, where it lives and in which precision.

    Attributes:
        path: A local Hugging Face model directory, or None for a randomly initialised `shape`.
        shape: Name of a preset in `SHAPES`; used when `path` is None.
        seed: Seed of the random initialisation.
        dtype: `float32`, `bfloat16` or `float16`; None means float32 on a CPU and bfloat16 on
            a GPU.
        device: `cpu`, `cuda` or `cuda:N`.
        attn_implementation: Passed to transformers.
        trust_remote_code: Passed to transformers. Never needed for the presets.
        threads: Intra-op threads of the process that holds the model; None keeps torch's own.
    """

    path: str | None = None
    shape: str = "tiny"
    seed: int = 42
    dtype: str | None = None
    device: str = "cpu"
    attn_implementation: str = "sdpa"
    trust_remote_code: bool = False
    threads: int | None = None

    def check(self) -> None:
        """Raise ConfigError for a shape or a kind of device that does not exist."""
        if self.path is None and self.shape not in SHAPES:
            raise ConfigError(f"shape {self.shape!r} is not one of {', '.join(SHAPES)}")
        if re.fullmatch(r"cpu|cuda(:\d+)?", self.device) is None:
            raise ConfigError(f"device {self.device!r} is not one of cpu, cuda, cuda:N")


@dataclass
class TrainerOptions:
    """The trainer's optimizer, schedule, limits and checkpoints.

    Attributes:
        lr, weight_decay, betas, eps: AdamW.
        gradient_clipping: Largest global gradient norm; None or 0 leaves gradients alone.
        scheduler: None for a constant rate, else `{"type": "WarmupLR" | "WarmupCosineLR",
            "params": {...}}` as in a DeepSpeed configuration.
        checkpoint_path: Directory that checkpoints go to when a call names none.
        reference: Keep a frozen copy of the initial weights for `reference_model=True`.
        gradient_checkpointing: Recompute activations in the backward pass.
        max_token_len: Tokens in one micro-batch when the payload's meta gives no limit.
    """

    lr: float = 1e-3
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    gradient_clipping: float | None = 1.0
    scheduler: dict[str, Any] | None = None
    checkpoint_path: str | None = None
    reference: bool = True
    gradient_checkpointing: bool = False
    max_token_len: int = 16384


@dataclass
class SamplerOptions:
    """The sampler's limits.

    Attributes:
        max_model_len: Longest prompt plus response; None takes the model's own limit.
        max_num_seqs: Sequences decoded together; more are done one batch after another.
        prefix_cache_tokens: Tokens of prompts whose keys and values are kept; 0 keeps none.
        load_format: `auto` starts with the model's weights. `dummy` starts with other random
            weights and refuses to generate until the first sync has brought the trainer's.
        seed: Seed of the sampling of requests that carry none.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 256
    prefix_cache_tokens: int = 16384
    load_format: str = "auto"
    seed: int = 0


@dataclass
class LocalOptions:
    """Everything the embedded server is started from.

    Attributes:
        trainer_model, sampler_model: The same model, on one device or on two.
        trainer, sampler: What each role does with it.
        cuda_ipc, low_memory: Stored weight-sync flags; a call's own flags override them.
        sync_timeout: Seconds that each phase of a weight sync may take.
        start_timeout: Seconds that both processes may take to load their model.
        weight_transport: One weight transport by name; None chooses by the two flags.
        verify_weights: After each sync compare a digest of all weights on both sides.
    """

    trainer_model: ModelOptions = field(default_factory=ModelOptions)
    sampler_model: ModelOptions = field(default_factory=ModelOptions)
    trainer: TrainerOptions = field(default_factory=TrainerOptions)
    sampler: SamplerOptions = field(default_factory=SamplerOptions)
    cuda_ipc: bool = False
    low_memory: bool = False
    weight_transport: str | None = None
    sync_timeout: float = 60.0
    start_timeout: float = 300.0
    verify_weights: bool = True

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, device: str = "cpu") -> LocalOptions:
        """Derive the options from a normalised main config (see `load_config`).

        Args:
            config: The main config in its normalised (nested) form.
            device: Where both models live.

        Raises:
            ConfigError: A key that is needed is missing, or its value cannot be served.
        """
        backend = _mapping(config, "remote_backend")
        role = _mapping(config, "actor_rollout_ref")
        actor, rollout, model = (_mapping(role, k) for k in ("actor", "rollout", "model"))
        data, trainer = _mapping(config, "data"), _mapping(config, "trainer")
        sync = _mapping(backend, "weight_sync")
        path = model.get("path")
        if not isinstance(path, str) or not path:
            raise ConfigError(
                "actor_rollout_ref.model.path is missing: give a local model "
                "directory or random:<shape>"
            )
        override = model.get("override_config") or {}
        shared = ModelOptions(
            attn_implementation=str(override.get("attn_implementation", "sdpa")),
            seed=int(_get(backend, "train.determinism.seed", 42)),
            device=device,
        )
        # flash_attention_2 is a package of its own and has no CPU form; sdpa gives the same
        # numbers up to rounding.
        if device == "cpu" and shared.attn_implementation.startswith("flash_attention"):
            shared.attn_implementation = "sdpa"
        if path.startswith("random:"):
            shared.shape = path.removeprefix("random:")
        else:
            shared.path = path
        if device == "cpu" and shared.path is None and shared.shape in SMALL_SHAPES:
            shared.threads = 1
        length = int(data.get("max_prompt_length", 512)) + int(data.get("max_response_length", 512))
        return cls(
            trainer_model=shared,
            sampler_model=dataclasses.replace(shared),
            trainer=_trainer_options(backend, actor, data, trainer, model),
            sampler=SamplerOptions(
                max_model_len=int(rollout.get("max_model_len") or length),
                max_num_seqs=int(rollout.get("max_num_seqs") or 256),
                seed=int(_get(backend, "train.determinism.seed", 42)),
            ),
            cuda_ipc=bool(sync.get("cuda_ipc", False)),
            low_memory=bool(sync.get("low_memory", False)),
        )


def _trainer_options(
    backend: Mapping[str, Any],
    actor: Mapping[str, Any],
    data: Mapping[str, Any],
    trainer: Mapping[str, Any],
    model: Mapping[str, Any],
) -> TrainerOptions:
    """Optimizer and schedule as the adapter derives them for a DeepSpeed trainer."""
    optim = _mapping(actor, "optim")
    lr = float(optim.get("lr", 1e-6))
    beta1, beta2 = optim.get("betas", (0.9, 0.999))
    clip = optim.get("clip_grad")
    if clip is None:
        clip = actor.get("grad_clip", 1.0)
    return TrainerOptions(
        lr=lr,
        weight_decay=float(optim.get("weight_decay", 0.01)),
        betas=(float(beta1), float(beta2)),
        gradient_clipping=float(clip) if clip is not None and float(clip) > 0 else None,
        scheduler=_scheduler(
            optim, actor, data, trainer, lr, str(backend.get("generation", "final"))
        ),
        checkpoint_path=trainer.get("default_local_dir"),
        reference=int(backend.get("log_prob_gpus", 1) or 0) > 0,
        # Recomputing costs a third more time and pays only where memory is short.
        gradient_checkpointing=bool(model.get("enable_gradient_checkpointing", False)),
        max_token_len=int(actor.get("ppo_max_token_len_per_gpu", 16384)),
    )


def _scheduler(
    optim: Mapping[str, Any],
    actor: Mapping[str, Any],
    data: Mapping[str, Any],
    trainer: Mapping[str, Any],
    lr: float,
    generation: str,
) -> dict[str, Any] | None:
    steps = optim.get("total_training_steps") or 0
    steps = int(steps) if int(steps) > 0 else int(trainer.get("total_training_steps") or 0)
    cosine = optim.get("lr_scheduler_type", "constant") == "cosine"
    ratio = float(optim.get("lr_warmup_steps_ratio", 0.0) or 0.0)
    if steps <= 0:
        if cosine or ratio > 0:
            raise ConfigError(
                "actor.optim asks for a schedule but its horizon is unknown: set "
                "actor_rollout_ref.actor.optim.total_training_steps or "
                "trainer.total_training_steps"
            )
        return None
    horizon = steps
    if generation != "seed":  # whose client takes one optimizer step for each batch
        mini = int(actor.get("ppo_mini_batch_size", 256))
        minibatches = max(1, int(data.get("train_batch_size", mini)) // mini)
        horizon *= int(actor.get("ppo_epochs", 1)) * minibatches
    warmup = round(ratio * horizon)
    if cosine:
        return {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": horizon,
                "warmup_num_steps": warmup,
                "warmup_min_ratio": 0.0,
                "cos_min_ratio": float(optim.get("min_lr_ratio") or 0.0),
                "warmup_type": "linear",
            },
        }
    if warmup > 0:
        return {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": 0.0,
                "warmup_max_lr": lr,
                "warmup_num_steps": warmup,
                "warmup_type": "linear",
            },
        }
    return None


def as_dict(options: Any) -> dict[str, Any]:
    """A dataclass of this module as plain dictionaries and lists."""
    return dataclasses.asdict(options)


def from_dict(cls: type[Any], values: Mapping[str, Any]) -> Any:
    """The reverse of `as_dict`, for one of the flat dataclasses of this module."""
    known = {f.name for f in dataclasses.fields(cls)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(f"{cls.__name__} has no field {unknown[0]!r}")
    return cls(**values)


def _mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} must be a mapping, found {type(value).__name__}")
    return value


def _get(config: Mapping[str, Any], path: str, default: Any) -> Any:
    value: Any = config
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return default if value is None else value
