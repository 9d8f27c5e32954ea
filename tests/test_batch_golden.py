# SPDX-License-Identifier: Apache-2.0
"""The batch kernels against the recorded answers of both adapter generations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import arctic_rl_c
import golden

LEFT_PADDED = ("response_mask", "old_log_probs", "advantages", "ref_log_prob", "loss_mask")


def case_id(case: golden.Case) -> str:
    return repr(case)


def widths(data: dict[str, Any]) -> dict[str, Any]:
    """The declared maxima count for nested prompts only."""
    if not data["prompts"].is_nested:
        return {}
    return {
        "prompt_width": data.get("max_prompt_len"),
        "response_width": data.get("max_response_len"),
    }


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert torch.equal(found, wanted)


def same_nested(found: torch.Tensor, wanted: torch.Tensor) -> None:
    same(found.values(), wanted.values())
    same(found.offsets(), wanted.offsets())


@pytest.mark.parametrize("case", golden.CASES, ids=case_id)
@pytest.mark.parametrize("call", ["log_prob", "ref_log_prob"])
def test_padded_ids_and_positions(case: golden.Case, call: str) -> None:
    data = case.data()
    (_, payload), *_ = case.payloads(call)
    for key, pad_value in (("input_ids", golden.PAD_TOKEN_ID), ("position_ids", 0)):
        if key not in payload["batch"]:
            continue
        tensor, prompt_width, response_width = arctic_rl_c.pad_prompt_response(
            data[key],
            data["prompts"],
            data["responses"],
            data["attention_mask"],
            pad_value=pad_value,
            **widths(data),
        )
        same(tensor, payload["batch"][key])
        assert prompt_width == payload["meta"]["max_prompt_len"]
        assert response_width == payload["meta"]["max_response_len"]


@pytest.mark.parametrize("case", golden.CASES, ids=case_id)
def test_left_padded_fields(case: golden.Case) -> None:
    """Of every recorded mini-batch: its rows follow each other, epoch after epoch."""
    data = case.data()
    row = 0
    for method, payload in case.payloads("update_actor"):
        if method != "fwd_bwd":
            continue
        rows, width = payload["batch"]["input_ids"].shape
        for key in LEFT_PADDED:
            if key in payload["batch"]:
                padded = arctic_rl_c.left_pad(data[key][row : row + rows], width)
                same(padded, payload["batch"][key])
        row = (row + rows) % data["attention_mask"].shape[0]


@pytest.mark.parametrize("case", [c for c in golden.CASES if c.has("make_njt")], ids=case_id)
def test_the_way_back(case: golden.Case) -> None:
    data = case.data()
    wanted = case.result("make_njt")
    nested = arctic_rl_c.make_jagged(wanted["dense"], data["attention_mask"], data["input_ids"])
    same_nested(nested, wanted["nested"])
    assert nested.offsets() is data["input_ids"].offsets()
    shifted = arctic_rl_c.shift_predict_next(nested)
    same_nested(shifted, wanted["shifted"])
    assert shifted.offsets() is data["input_ids"].offsets()
