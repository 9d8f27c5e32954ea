# SPDX-License-Identifier: Apache-2.0
"""derive_bindings: a sync into an engine's layout equals what the engine's own loader makes."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arctic_rl_c import (
    Binding,
    Rules,
    WeightMismatchError,
    WeightReceiver,
    WeightSender,
    coverage,
    derive_bindings,
    expected_names,
)
from arctic_rl_c.bindings import NON_SYNCED
from engine import Linear, Ranks, Sizes, engine_model, load, trainer_weights

DENSE = Sizes()
MIXTURE = Sizes(experts=6)


def addresses(model: torch.nn.Module) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def assert_same(model: torch.nn.Module, reference: torch.nn.Module) -> None:
    wanted = dict(reference.named_parameters())
    found = dict(model.named_parameters())
    assert found.keys() == wanted.keys()
    for name, parameter in found.items():
        assert torch.equal(parameter, wanted[name]), name


def pull(bindings: dict[str, object], *weights: dict[str, torch.Tensor], **options: object) -> None:
    """One sync after another into the same bindings."""
    for full in weights:
        with (
            WeightSender(full, verify="all") as sender,
            WeightReceiver(bindings, **options) as receiver,
        ):
            receiver.pull(sender.offer(), verify="all")
            assert not receiver.torn


def check(sizes: Sizes, ranks: Ranks, **options: object) -> None:
    """Two syncs with different values, each compared with the engine's own loader."""
    model = engine_model(sizes, ranks)
    bindings = derive_bindings(model, **options)
    before = addresses(model)
    receiver = WeightReceiver(bindings)
    for seed in (1, 2):
        full = trainer_weights(sizes, seed)
        with WeightSender(full, verify="all") as sender:
            receiver.pull(sender.offer(), verify="all")
        assert_same(model, load(engine_model(sizes, ranks), full))
    assert addresses(model) == before
    assert coverage(bindings, model).untouched == padding(model)


def padding(model: torch.nn.Module) -> tuple[str, ...]:
    """Names of what a rank has nothing of but padding."""
    heads = {"model.embed_tokens": model.model.embed_tokens, "lm_head": model.lm_head}
    if model.lm_head.weight is model.model.embed_tokens.weight:
        del heads["lm_head"]
    rows = {name: vars(head.shard_indices).values() for name, head in heads.items()}
    return tuple(sorted(f"{name}.weight" for name, (start, end) in rows.items() if start == end))


# ---- a sync equals the engine's loader -----------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sizes", [DENSE, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), *((r, 4) for r in range(4))])
def test_every_rank_gets_its_own(sizes: Sizes, rank: int, size: int, tied: bool) -> None:
    check(dataclasses.replace(sizes, tied=tied), Ranks(rank, size), tp_rank=rank, tp_size=size)


@pytest.mark.parametrize("rank", [0, 1])
def test_experts_may_be_shared_out_whole(rank: int) -> None:
    ranks = Ranks(rank, 2, expert_parallel=True)
    check(MIXTURE, ranks, tp_rank=rank, tp_size=2)


@st.composite
def _models(draw: st.DrawFn) -> tuple[Sizes, Ranks]:
    size = draw(st.sampled_from([1, 2, 4]))
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    sizes = Sizes(
        layers=1,
        hidden=draw(st.integers(1, 6)),
        kv_heads=kv_heads,
        heads=max(kv_heads, size) * draw(st.sampled_from([1, 2])),
        head=draw(st.integers(1, 3)),
        v_head=draw(st.integers(1, 3)),
        inner=size * draw(st.integers(1, 3)),
        vocab=draw(st.integers(1, 40)),
        experts=draw(st.integers(0, 4)),
        expert_inner=size * draw(st.integers(1, 3)),
        bias=draw(st.booleans()),
        tied=draw(st.booleans()),
        pad=draw(st.sampled_from([1, 4, 16])),
    )
    parallel = size > 1 and sizes.experts >= size and draw(st.booleans())
    return sizes, Ranks(draw(st.integers(0, size - 1)), size, parallel)


@settings(deadline=None, max_examples=60)
@given(_models())
def test_any_sizes(drawn: tuple[Sizes, Ranks]) -> None:
    sizes, ranks = drawn
    check(sizes, ranks, tp_rank=ranks.rank, tp_size=ranks.size)
