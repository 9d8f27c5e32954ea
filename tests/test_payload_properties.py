# SPDX-License-Identifier: Apache-2.0
"""Payloads of random batches against a slow reference; configs against the json module."""

from __future__ import annotations

import enum
import json
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

import arctic_rl_c
import clients

# ---- the reference: lists, one element at a time -------------------------------------------------


class Row(NamedTuple):
    prompt: list[int]
    response: list[int]
    supervised: list[int]  # response mask, as long as the response


class Rows(NamedTuple):
    rows: list[Row]
    wide_p: int
    wide_r: int

    def padded(self, fill: int, what: Any) -> list[list[int]]:
        """Prompt to the left of column `wide_p`, response to the right of it."""
        found = []
        for row in self.rows:
            left, right = what(row)
            found.append(
                [fill] * (self.wide_p - len(left))
                + left
                + right
                + [fill] * (self.wide_r - len(right))
            )
        return found

    def ids(self) -> list[list[int]]:
        return self.padded(clients.PAD, lambda row: (row.prompt, row.response))

    def positions(self) -> list[list[int]]:
        def places(row: Row) -> tuple[list[int], list[int]]:
            p, r = len(row.prompt), len(row.response)
            return list(range(p)), list(range(p, p + r))

        return self.padded(0, places)

    def mask(self) -> list[list[int]]:
        return self.padded(0, lambda row: ([1] * len(row.prompt), [1] * len(row.response)))

    def response_side(self, what: Any) -> list[list[Any]]:
        return [what(row) + [0] * (self.wide_r - len(row.response)) for row in self.rows]

    def left_padded(self, what: Any) -> list[list[Any]]:
        return [[0] * self.wide_p + row for row in self.response_side(what)]


def as_tensor(rows: list[list[Any]], width: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(rows, dtype=dtype).reshape(len(rows), width)


def floats_of(row: Row) -> list[float]:
    """Some numbers that tell rows and places apart."""
    return [-token / 8 for token in row.response]


def data_of(rows: Rows, *, jagged: bool, dtype: torch.dtype, weights: bool) -> dict[str, Any]:
    prompts = [row.prompt for row in rows.rows]
    responses = [row.response for row in rows.rows]
    lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
    numbers = as_tensor(rows.response_side(floats_of), rows.wide_r, torch.float32)
    if jagged:
        sides = [clients.nested(prompts), clients.nested(responses)]
    else:
        dense_p = [[0] * (rows.wide_p - len(p)) + p for p in prompts]
        dense_r = [r + [0] * (rows.wide_r - len(r)) for r in responses]
        sides = [as_tensor(dense_p, rows.wide_p), as_tensor(dense_r, rows.wide_r)]
    data: dict[str, Any] = {
        "input_ids": clients.nested([row.prompt + row.response for row in rows.rows], dtype),
        "position_ids": clients.nested([list(range(length)) for length in lengths]),
        "attention_mask": as_tensor(rows.mask(), rows.wide_p + rows.wide_r),
        "prompts": sides[0],
        "responses": sides[1],
        "response_mask": as_tensor(rows.response_side(lambda row: row.supervised), rows.wide_r),
        "old_log_probs": numbers,
        "advantages": -numbers,
        "temperature": 0.5,
        "global_batch_size": 3 * len(prompts),
        "max_prompt_len": rows.wide_p if jagged else 3,  # counts for nested sides alone
        "max_response_len": rows.wide_r if jagged else 3,
    }
    data["loss_mask"] = data["response_mask"]
    if weights:
        data["rollout_is_weights"] = data["advantages"] * 2
    return data


@st.composite
def batches(draw: st.DrawFn) -> Rows:
    """4 prompts of 2 rollouts: what `clients.config` is for. Empty sides occur."""
    wide_p, wide_r = draw(st.integers(0, 6)), draw(st.integers(0, 6))
    token = st.integers(0, 999)
    rows = []
    for _ in range(4):
        prompt = draw(st.lists(token, max_size=wide_p))
        for _ in range(2):
            response = draw(st.lists(token, max_size=wide_r))
            ones = st.lists(st.integers(0, 1), min_size=len(response), max_size=len(response))
            supervised = draw(ones)
            rows.append(Row(prompt, response, supervised))
    return Rows(rows, wide_p, wide_r)


@given(
    batches(),
    st.sampled_from(["seed", "final"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.int64, torch.int32]),
    st.booleans(),
)
def test_payloads_are_what_the_reference_says(
    rows: Rows, version: str, jagged: bool, drop: bool, dtype: torch.dtype, weights: bool
) -> None:
    paths = {}
    if version == "final":
        paths["remote_backend__comms__drop_position_ids"] = drop
        paths["remote_backend__train__load_balancer"] = False
    config = arctic_rl_c.normalize_config(clients.config(version, **paths))
    data = data_of(rows, jagged=jagged, dtype=dtype, weights=weights)
    width = rows.wide_p + rows.wide_r
    sends_positions = version == "seed" or not drop
    wanted = {
        "input_ids": as_tensor(rows.ids(), width, dtype),
        "position_ids": as_tensor(rows.positions(), width),
        "attention_mask": as_tensor(rows.mask(), width),
    }

    payload = clients.log_prob_payload(data, config, server_limits=False)
    for key in wanted:
        if key != "position_ids" or sends_positions:
            clients.same(payload["batch"][key], wanted[key])
    assert payload["batch"]["prompts"] is data["prompts"]
    assert set(payload["batch"]) == {"input_ids", "attention_mask", "prompts"} | (
        {"position_ids"} if sends_positions else set()
    )
    meta = payload["meta"]
    assert (meta["max_prompt_len"], meta["max_response_len"]) == (rows.wide_p, rows.wide_r)

    payloads = clients.update_payloads(data, config, server_limits=False)
    wanted["response_mask"] = as_tensor(rows.left_padded(lambda row: row.supervised), width)
    wanted["old_log_probs"] = as_tensor(rows.left_padded(floats_of), width, torch.float32)
    wanted["advantages"] = -wanted["old_log_probs"]
    assert len(payloads) == (1 if version == "seed" else 2)
    count = len(rows.rows) // len(payloads)
    for i, payload in enumerate(payloads):
        part = slice(i * count, (i + 1) * count)
        for key, value in wanted.items():
            if key != "position_ids" or sends_positions:
                clients.same(payload["batch"][key], value[part])
        for key in ("prompts", "responses"):
            found = payload["batch"][key]
            if jagged:
                side = [row.prompt if key == "prompts" else row.response for row in rows.rows[part]]
                clients.same(found, clients.nested(side))
            else:
                clients.same(found, data[key][part])
        meta = payload["meta"]
        clients.same(
            meta["batch_num_tokens"],
            torch.tensor(sum(sum(row.supervised) for row in rows.rows[part])),
        )
        assert meta["global_batch_size"] == (24 if version == "seed" else 4)
        if weights:
            clients.same(meta["rollout_is_weights"], data["rollout_is_weights"][part])
        else:
            assert meta["rollout_is_weights"] is None


# ---- strided and read-only inputs ----------------------------------------------------------------


@given(batches(), st.sampled_from(["transposed", "sliced", "flipped", "read-only"]))
def test_layout_of_the_input_does_not_matter(rows: Rows, how: str) -> None:
    config = clients.config(remote_backend__train__load_balancer=False)
    data = data_of(rows, jagged=False, dtype=torch.int64, weights=False)
    wanted = clients.update_payloads(data, config)
    arrays = {
        key: value.numpy() if torch.is_tensor(value) and not value.is_nested else value
        for key, value in data.items()
    }

    def relaid(array: np.ndarray) -> np.ndarray:
        if how == "transposed":
            return np.ascontiguousarray(array.T).T
        if how == "sliced":
            wide = np.full((2 * array.shape[0], 3 * array.shape[1] + 1), 7, array.dtype)
            wide[::2, 1::3] = array
            return wide[::2, 1::3]
        if how == "flipped":
            return np.ascontiguousarray(array[::-1, ::-1])[::-1, ::-1]
        kept = array.copy()
        kept.setflags(write=False)
        return kept

    arrays = {k: relaid(v) if isinstance(v, np.ndarray) else v for k, v in arrays.items()}
    for one, other in zip(clients.update_payloads(arrays, config), wanted, strict=True):
        for key, value in other["batch"].items():
            found = one["batch"][key]
            if isinstance(found, np.ndarray):
                found = torch.from_numpy(found.copy())
            clients.same(found, value)


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=40), st.sampled_from(list("bhilBq?")))
def test_supervised_tokens_are_counted_in_any_integer(values: list[int], code: str) -> None:
    """batch_num_tokens is a sum, as recorded, whatever the mask holds."""
    rows = 8
    mask = np.resize(np.array(values), (rows, 3)).astype(np.abs(values).dtype)
    mask = (mask if code not in "B?" else np.abs(mask)).astype(code)
    data = clients.batch(response_mask=torch.from_numpy(mask))
    payloads = clients.update_payloads(data, clients.config(), server_limits=False)
    for i, payload in enumerate(payloads):
        total = int(mask[i * 4 : i * 4 + 4].astype(np.int64).sum())
        clients.same(payload["meta"]["batch_num_tokens"], torch.tensor(total))


# ---- actor_config against json -------------------------------------------------------------------


class Text(str, enum.Enum):
    ONE = "one"


class Number(enum.IntEnum):
    TWO = 2


class Plain(enum.Enum):
    THREE = 3


class Pair(NamedTuple):
    left: Any
    right: Any


class Table(dict[Any, Any]):
    pass


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.sampled_from([Text.ONE, Number.TWO, Plain.THREE, np.float64(0.5), np.float32(0.5)]),
    st.sampled_from([np.int64(3), object(), SimpleNamespace(a=1), {1, 2}, b"bytes", Plain, 1j]),
)
KEYS = st.one_of(
    st.text(max_size=4),
    st.integers(-3, 3),
    st.booleans(),
    st.none(),
    st.sampled_from([0.5, 1.0, math.inf, -math.inf, math.nan, 1e300, Text.ONE, Number.TWO]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(Table),
    ),
    max_leaves=12,
)


def same_plain(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key in wanted:
            assert type(key) is str
            same_plain(found[key], wanted[key])
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            same_plain(one, other)
    elif isinstance(wanted, float) and math.isnan(wanted):
        assert math.isnan(found)
    else:
        assert found == wanted
        assert math.copysign(1, found) == math.copysign(1, wanted) if wanted == 0 else True


DATA = clients.batch()
CONFIG = arctic_rl_c.normalize_config(clients.config())


@given(st.dictionaries(st.text(min_size=1, max_size=6), VALUES, max_size=6), st.booleans())
def test_configs_are_what_json_makes_of_them(options: dict[str, Any], attributes: bool) -> None:
    options = {k: v for k, v in options.items() if k not in ("_metadata", "__dict__")}
    config = SimpleNamespace(**options) if attributes else options
    payload = clients.update_payloads(DATA, CONFIG, actor_config=config, server_limits=False)[0]
    wanted = json.loads(json.dumps(options, default=lambda value: None))
    same_plain(payload["meta"]["actor_config"], wanted)
