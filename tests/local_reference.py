# SPDX-License-Identifier: Apache-2.0
"""The GRPO loss and a batch, written slowly in float64: what the embedded trainer is held to."""

from __future__ import annotations

import math
from typing import Any

import torch

PAD = 0


def kl_value(new: float, ref: float, kind: str) -> float:
    d = new - ref
    if kind in ("kl", "k1"):
        return d
    if kind == "abs":
        return abs(d)
    if kind in ("mse", "k2"):
        return 0.5 * d * d
    g = min(max(-d, -20.0), 20.0)
    return min(max(math.exp(g) - g - 1.0, -10.0), 10.0)


def reduce_rows(
    rows: list[list[float]],
    mode: str,
    tokens: float,
    size: float,
    width: int,
    factor: float | None = None,
) -> float:
    """The loss over whole rows (each the list of its supervised tokens' values)."""
    if mode == "token-mean":
        return sum(sum(row) for row in rows) / tokens
    total = 0.0
    for row in rows:
        if not row:
            continue
        value = sum(row)
        if mode == "seq-mean-token-mean":
            value /= len(row)
        if mode == "seq-mean-token-sum-norm":
            value /= width if factor is None else factor
        total += value
    return total / size


def slow_loss(
    new: list[list[float]],
    entropy: list[list[float]],
    batch: dict[str, list[list[float]]],
    actor: dict[str, Any],
    tokens: float,
    size: float,
) -> dict[str, float]:
    """Loss and metrics, token by token, over matrices `[rows][R]`."""
    low = actor.get("clip_ratio_low") or actor.get("clip_ratio", 0.2)
    high = actor.get("clip_ratio_high") or actor.get("clip_ratio", 0.2)
    c = actor.get("clip_ratio_c", 3.0)
    policy, kl, ent = [], [], []
    clipped = lower = shift = count = 0.0
    for i, mask in enumerate(batch["response_mask"]):
        row_policy, row_kl, row_ent = [], [], []
        for j, kept in enumerate(mask):
            if not kept:
                continue
            count += 1
            a = batch["advantages"][i][j]
            log_ratio = min(max(new[i][j] - batch["old_log_probs"][i][j], -20.0), 20.0)
            ratio = math.exp(log_ratio)
            shift -= log_ratio
            first, second = -a * ratio, -a * min(max(ratio, 1 - low), 1 + high)
            clipped += second > first
            value = max(first, second)
            if a < 0:
                lower += value > -a * c
                value = min(value, -a * c)
            if "rollout_is_weights" in batch:
                value *= batch["rollout_is_weights"][i][j]
            row_policy.append(value)
            row_ent.append(entropy[i][j])
            if "ref_log_prob" in batch:
                kind = actor.get("kl_loss_type", "low_var_kl").removesuffix("+")
                row_kl.append(kl_value(new[i][j], batch["ref_log_prob"][i][j], kind))
        policy.append(row_policy)
        kl.append(row_kl)
        ent.append(row_ent)
    mode = actor.get("loss_agg_mode", "token-mean")
    arguments = (mode, tokens, size, len(batch["response_mask"][0]), actor.get("loss_scale_factor"))
    loss = reduce_rows(policy, *arguments)
    out = {"pg": loss, "clipfrac": clipped / count, "lower": lower / count, "kl": shift / count}
    if actor.get("entropy_coeff", 0.0):
        loss -= actor["entropy_coeff"] * reduce_rows(ent, *arguments)
    if actor.get("use_kl_loss"):
        loss += actor.get("kl_loss_coef", 0.001) * reduce_rows(kl, *arguments)
    out["loss"] = loss
    return out


def make_batch(
    prompts: list[list[int]], responses: list[list[int]], *, prompt_width: int, response_width: int
) -> dict[str, torch.Tensor]:
    """The wire's `[B, P + R]` arrays of some rows, without position ids."""
    rows, width = len(prompts), prompt_width + response_width
    ids = torch.full((rows, width), PAD, dtype=torch.int64)
    mask = torch.zeros(rows, width, dtype=torch.int64)
    supervised = torch.zeros(rows, width, dtype=torch.int64)
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        begin, end = prompt_width - len(prompt), prompt_width + len(response)
        ids[i, begin:end] = torch.tensor(prompt + response)
        mask[i, begin:end] = 1
        supervised[i, prompt_width:end] = 1
    return {"input_ids": ids, "attention_mask": mask, "response_mask": supervised}
