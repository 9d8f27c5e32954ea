# SPDX-License-Identifier: Apache-2.0
"""The loss against its slow reference, option by option, and the reduction of metrics."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from arctic_rl_c.local.loss import (
    AGG_MODES,
    KL_TYPES,
    LossOptions,
    Normalizer,
    grpo_loss,
    kl_penalty,
    merge_micro_batches,
    merge_ranks,
)
from local_reference import slow_loss

ROWS, WIDTH = 5, 6


def random_case(seed: int, *, kl: bool = False, weights: bool = False) -> dict[str, Any]:
    rng = random.Random(seed)

    def matrix(low: float, high: float) -> list[list[float]]:
        return [[rng.uniform(low, high) for _ in range(WIDTH)] for _ in range(ROWS)]

    mask = [[float(rng.random() < 0.7) for _ in range(WIDTH)] for _ in range(ROWS)]
    mask[0], mask[1] = [0.0] * WIDTH, [1.0] * WIDTH  # a row without a token, and a full one
    batch = {
        "response_mask": mask,
        "old_log_probs": matrix(-3, 0),
        "advantages": matrix(-2, 2),
    }
    if kl:
        batch["ref_log_prob"] = matrix(-3, 0)
    if weights:
        batch["rollout_is_weights"] = matrix(0.5, 2)
    return {"new": matrix(-3, 0), "entropy": matrix(0, 2), "batch": batch}


def compare(case: dict[str, Any], actor: dict[str, Any]) -> dict[str, float]:
    tokens = sum(map(sum, case["batch"]["response_mask"]))
    wanted = slow_loss(case["new"], case["entropy"], case["batch"], actor, tokens, ROWS)
    tensors = {k: torch.tensor(v, dtype=torch.float64) for k, v in case["batch"].items()}
    new = torch.tensor(case["new"], dtype=torch.float64, requires_grad=True)
    entropy = torch.tensor(case["entropy"], dtype=torch.float64)
    options = LossOptions.from_meta(actor, {})
    loss, pairs = grpo_loss(new, entropy, tensors, options, Normalizer(tokens, ROWS, 1, WIDTH))
    assert loss.item() == pytest.approx(wanted["loss"], rel=1e-9, abs=1e-12)
    metrics = merge_ranks([pairs])
    assert metrics["actor/pg_clipfrac"] == pytest.approx(wanted["clipfrac"])
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(wanted["lower"])
    assert metrics["actor/ppo_kl"] == pytest.approx(wanted["kl"])
    if actor.get("loss_agg_mode", "token-mean") == "token-mean":
        assert metrics["loss"] == pytest.approx(wanted["loss"])
        assert metrics["actor/pg_loss"] == pytest.approx(wanted["pg"])
    loss.backward()
    step, i, j = 1e-6, 1, 2  # one gradient entry against a difference quotient
    moved = [row[:] for row in case["new"]]
    moved[i][j] += step
    up = slow_loss(moved, case["entropy"], case["batch"], actor, tokens, ROWS)["loss"]
    moved[i][j] -= 2 * step
    down = slow_loss(moved, case["entropy"], case["batch"], actor, tokens, ROWS)["loss"]
    if not str(actor.get("kl_loss_type", "")).endswith("+"):
        assert new.grad[i, j].item() == pytest.approx((up - down) / (2 * step), rel=1e-4, abs=1e-7)
    assert not new.grad[0].any()  # nothing supervised, nothing learnt
    return metrics


@pytest.mark.parametrize("mode", AGG_MODES)
@pytest.mark.parametrize("seed", range(3))
def test_aggregation(mode: str, seed: int) -> None:
    compare(random_case(seed), {"loss_agg_mode": mode})


def test_sum_norm_takes_the_scale_factor() -> None:
    actor = {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 2.5}
    compare(random_case(3), actor)


@pytest.mark.parametrize(
    "clips",
    [
        {"clip_ratio": 0.05, "clip_ratio_low": None, "clip_ratio_high": None},
        {"clip_ratio_low": 0.01, "clip_ratio_high": 0.6},
        {"clip_ratio_c": 1.05},
    ],
)
def test_clip_ratios_have_an_effect(clips: dict[str, Any]) -> None:
    case = random_case(4)
    clean = {k: v for k, v in clips.items() if v is not None}
    tuned = compare(case, clips)
    assert tuned != compare(case, {}), clean


@pytest.mark.parametrize("kind", [*KL_TYPES, "kl+", "low_var_kl+", "k3+"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_kl(kind: str, mode: str) -> None:
    actor = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": kind, "loss_agg_mode": mode}
    metrics = compare(random_case(5, kl=True), actor)
    assert metrics["kl_coef"] == 0.3 and "kl_loss" in metrics


@pytest.mark.parametrize("kind", ["kl+", "abs+", "k3+"])
def test_plus_takes_the_gradient_of_k2(kind: str) -> None:
    new = torch.tensor([-0.5, -2.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    kl_penalty(new, ref, kind).sum().backward()
    assert new.grad is not None and torch.equal(new.grad, new.detach() - ref)


def test_entropy_and_weights() -> None:
    metrics = compare(random_case(6, weights=True), {"entropy_coeff": 0.2})
    assert metrics["actor/entropy_loss"] > 0


def test_no_supervised_token_gives_zero_not_nan() -> None:
    case = random_case(7)
    tensors = {k: torch.tensor(v) for k, v in case["batch"].items()}
    tensors["response_mask"] = torch.zeros(ROWS, WIDTH)
    for mode in AGG_MODES:
        options = LossOptions.from_meta({"loss_agg_mode": mode}, None)
        loss, pairs = grpo_loss(
            torch.tensor(case["new"], requires_grad=True),
            None,
            tensors,
            options,
            Normalizer(0.0, 0.0, 1, WIDTH),
        )
        assert loss.item() == 0.0
        assert merge_ranks([pairs])["loss"] == 0.0


def test_nan_under_the_mask_does_not_leak() -> None:
    case = random_case(8)
    tensors = {k: torch.tensor(v) for k, v in case["batch"].items()}
    hidden = tensors["response_mask"] == 0
    tensors["advantages"][hidden] = float("nan")
    tensors["old_log_probs"][hidden] = float("nan")
    new = torch.tensor(case["new"], requires_grad=True)
    loss, _ = grpo_loss(
        new, None, tensors, LossOptions.from_meta({}, {}), Normalizer(10.0, ROWS, 1, WIDTH)
    )
    loss.backward()
    assert torch.isfinite(loss) and new.grad is not None and torch.isfinite(new.grad).all()


@pytest.mark.parametrize(
    ("actor", "policy", "message"),
    [
        ({"loss_agg_mode": "mean"}, {}, "loss_agg_mode 'mean' is not one of token-mean"),
        ({"kl_loss_type": "full"}, {}, "kl_loss_type 'full' is not one of kl"),
        ({"clip_ratio_c": 1.0}, {}, "clip_ratio_c must be above 1"),
        ({}, {"loss_mode": "gspo"}, "loss_mode 'gspo' is not implemented"),
    ],
)
def test_what_is_not_implemented_is_refused(
    actor: dict[str, Any], policy: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LossOptions.from_meta(actor, policy)


def test_metrics_over_micro_batches_and_ranks() -> None:
    first = {"loss.sum": 3.0, "loss.tokens": 2.0, "kl_coef": 0.1, "flag": True}
    second = {"loss.sum": 1.0, "loss.tokens": 2.0, "kl_coef": 0.3, "name": "x"}
    rank = merge_micro_batches([first, second])
    assert rank == {
        "loss.sum": 4.0,
        "loss.tokens": 4.0,
        "kl_coef": pytest.approx(0.2),
        "flag": True,
        "name": "x",
    }
    merged = merge_ranks([rank, {"loss.sum": 0.0, "loss.tokens": 0.0}])
    assert merged == {"loss": 1.0, "kl_coef": pytest.approx(0.2), "flag": True, "name": "x"}
    assert merge_ranks([{"loss.sum": 1.0, "loss.tokens": 0.0}]) == {"loss": 0.0}
