# SPDX-License-Identifier: Apache-2.0
"""The `verl_grpo` loss: clipped policy gradient, KL and entropy terms, and their aggregation.

Every option of the actor config that the loss reads has an effect here, the clip ratios and
`loss_mode` included. All matrices are `[rows, R]`, response-aligned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

AGG_MODES = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)
KL_TYPES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
LOSS_MODES = ("vanilla",)


@dataclass(frozen=True)
class LossOptions:
    """The loss options of one update, validated."""

    agg_mode: str
    clip_low: float
    clip_high: float
    clip_c: float
    use_kl: bool
    kl_coef: float
    kl_type: str
    entropy_coeff: float
    scale_factor: float | None

    @classmethod
    def from_meta(
        cls, actor: Mapping[str, Any] | None, policy: Mapping[str, Any] | None
    ) -> LossOptions:
        """Read `actor_config` and `policy_loss_config` of a payload's meta.

        Raises:
            ValueError: An option has a value that this loss does not implement.
        """
        actor, policy = actor or {}, policy or {}
        mode = _default(policy, "loss_mode", "vanilla")
        if mode not in LOSS_MODES:
            raise ValueError(
                f"policy_loss.loss_mode {mode!r} is not implemented by the embedded server: "
                f"use {', '.join(LOSS_MODES)}"
            )
        agg_mode = _default(actor, "loss_agg_mode", "token-mean")
        if agg_mode not in AGG_MODES:
            raise ValueError(f"loss_agg_mode {agg_mode!r} is not one of {', '.join(AGG_MODES)}")
        kl_type = _default(actor, "kl_loss_type", "low_var_kl")
        if kl_type.removesuffix("+") not in KL_TYPES:
            raise ValueError(f"kl_loss_type {kl_type!r} is not one of {', '.join(KL_TYPES)}")
        clip = float(_default(actor, "clip_ratio", 0.2))
        clip_c = float(_default(actor, "clip_ratio_c", 3.0))
        if clip_c <= 1.0:
            raise ValueError(f"clip_ratio_c must be above 1, found {clip_c}")
        factor = actor.get("loss_scale_factor")
        return cls(
            agg_mode=agg_mode,
            clip_low=float(_default(actor, "clip_ratio_low", clip)),
            clip_high=float(_default(actor, "clip_ratio_high", clip)),
            clip_c=clip_c,
            use_kl=bool(_default(actor, "use_kl_loss", False)),
            kl_coef=float(_default(actor, "kl_loss_coef", 0.001)),
            kl_type=kl_type,
            entropy_coeff=float(_default(actor, "entropy_coeff", 0.0)),
            scale_factor=None if factor is None else float(factor),
        )


@dataclass(frozen=True)
class Normalizer:
    """What one update's sums are divided by; the same for all its micro-batches.

    Attributes:
        batch_num_tokens: Supervised tokens of the whole update.
        global_batch_size: Rows of the whole update.
        dp_size: Data-parallel ranks whose gradients are averaged.
        response_len: Width of the response window.
    """

    batch_num_tokens: float
    global_batch_size: float
    dp_size: int
    response_len: int


def _default(values: Mapping[str, Any], key: str, default: Any) -> Any:
    value = values.get(key)
    return default if value is None else value


def kl_penalty(log_probs: torch.Tensor, ref: torch.Tensor, kind: str) -> torch.Tensor:
    """Per-token KL estimate; a kind that ends in `+` takes the gradient of `k2`."""
    name = kind.removesuffix("+")
    difference = log_probs - ref
    if name in ("kl", "k1"):
        value = difference
    elif name == "abs":
        value = difference.abs()
    elif name in ("mse", "k2"):
        value = 0.5 * difference.square()
    else:
        gap = (-difference).clamp(-20.0, 20.0)
        value = (gap.exp() - gap - 1.0).clamp(-10.0, 10.0)
    if kind.endswith("+") and name not in ("mse", "k2"):
        gradient = 0.5 * difference.square()
        return gradient - gradient.detach() + value.detach()
    return value


def aggregate(
    values: torch.Tensor, mask: torch.Tensor, options: LossOptions, normalizer: Normalizer
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Reduce a per-token matrix to its share of the update's loss.

    Returns:
        `(share, total, count)`: the share that is differentiated, scaled by `dp_size`; and the
        pair that is reported, of which `total / count` is the mean over this micro-batch.
    """
    if options.agg_mode == "token-mean":
        total, count = (values * mask).sum(), float(mask.sum())
        denominator = normalizer.batch_num_tokens
    else:
        tokens = mask.sum(-1)
        per_row = (values * mask).sum(-1)
        if options.agg_mode == "seq-mean-token-mean":
            per_row = per_row / tokens.clamp(min=1.0)
        elif options.agg_mode == "seq-mean-token-sum-norm":
            factor = options.scale_factor
            per_row = per_row / (normalizer.response_len if factor is None else factor)
        total, count = per_row.sum(), float((tokens > 0).sum())
        denominator = normalizer.global_batch_size
    # A batch without any supervised token has the loss 0, not 0/0.
    share = total * (normalizer.dp_size / denominator) if denominator > 0 else total * 0.0
    return share, total.detach(), count


def policy_gradient(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    options: LossOptions,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Dual-clip PPO: the per-token loss, and what it clipped."""
    log_ratio = (log_probs - old_log_probs).clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    upper = torch.maximum(plain, clipped)
    bound = -advantages * options.clip_c
    negative = advantages < 0
    losses = torch.where(negative, torch.minimum(upper, bound), upper)
    statistics = {
        "actor/pg_clipfrac": (clipped > plain).float(),
        "actor/pg_clipfrac_lower": ((upper > bound) & negative).float(),
        "actor/ppo_kl": -log_ratio.detach(),
    }
    return losses, statistics


def grpo_loss(
    log_probs: torch.Tensor,
    entropy: torch.Tensor | None,
    batch: Mapping[str, torch.Tensor],
    options: LossOptions,
    normalizer: Normalizer,
) -> tuple[torch.Tensor, dict[str, float]]:
    """One micro-batch's share of the loss, and its metrics.

    Args:
        log_probs: New log-probs `[rows, R]`, with gradient.
        entropy: Entropy `[rows, R]`, with gradient; needed when `entropy_coeff` is not 0.
        batch: `old_log_probs`, `advantages`, `response_mask` (`[rows, R]`), `ref_log_prob`
            with `use_kl`, and optionally `rollout_is_weights`.
        options: The options.
        normalizer: What the whole update's sums are divided by.

    Returns:
        `(loss, metrics)`, the metrics as pairs `NAME.sum`, `NAME.tokens` and plain numbers.
    """
    mask = batch["response_mask"].to(log_probs.dtype)
    # NaN under the mask must not leak through a product with 0.
    kept = {
        key: torch.where(mask > 0, value.to(log_probs.dtype), 0.0)
        for key, value in batch.items()
        if key != "response_mask"
    }
    log_probs = torch.where(mask > 0, log_probs, 0.0)
    losses, statistics = policy_gradient(
        log_probs, kept["old_log_probs"], kept["advantages"], options
    )
    if "rollout_is_weights" in kept:
        losses = losses * kept["rollout_is_weights"]
    loss, total, count = aggregate(losses, mask, options, normalizer)
    metrics: dict[str, float] = {}
    _put_pair(metrics, "actor/pg_loss", float(total), count)
    tokens = float(mask.sum())
    for name, value in statistics.items():
        _put_pair(metrics, name, float((value * mask).sum()), tokens)
    if options.entropy_coeff != 0.0 and entropy is not None:
        share, part, count = aggregate(
            torch.where(mask > 0, entropy, 0.0), mask, options, normalizer
        )
        _put_pair(metrics, "actor/entropy_loss", float(part), count)
        loss, total = loss - options.entropy_coeff * share, total - options.entropy_coeff * part
    if options.use_kl:
        penalty = kl_penalty(log_probs, kept["ref_log_prob"], options.kl_type)
        share, part, count = aggregate(penalty, mask, options, normalizer)
        _put_pair(metrics, "kl_loss", float(part), count)
        metrics["kl_coef"] = options.kl_coef
        loss, total = loss + options.kl_coef * share, total + options.kl_coef * part
    _put_pair(metrics, "loss", float(total), count)
    return loss, metrics


def _put_pair(metrics: dict[str, float], name: str, total: float, count: float) -> None:
    metrics[f"{name}.sum"], metrics[f"{name}.tokens"] = total, count


def merge_micro_batches(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Metrics of a rank over its micro-batches: pairs are summed, other numbers averaged."""
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part[name] for part in parts if name in part]
        if not all(_is_number(v) for v in values):
            merged[name] = values[0]
        elif name.endswith((".sum", ".tokens")):
            merged[name] = sum(values)
        else:
            merged[name] = sum(values) / len(values)
    return merged


def merge_ranks(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Metrics over ranks: a pair becomes its token mean, other numbers are averaged."""
    summed = merge_micro_batches(ranks)
    merged: dict[str, Any] = {}
    for name, value in summed.items():
        if name.endswith(".sum"):
            stem = name.removesuffix(".sum")
            tokens = summed.get(f"{stem}.tokens", 0.0)
            merged[stem] = value / tokens if tokens > 0 else 0.0
        elif not name.endswith(".tokens"):
            merged[name] = value
    return merged


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
