# SPDX-License-Identifier: Apache-2.0
"""Frames between the server's processes: what goes in comes out."""

from __future__ import annotations

import enum
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import clients
from arctic_rl_c.local import frames

T = torch.tensor
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=70)
)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4)
    ),
    max_leaves=20,
)


def round_trip(value: Any) -> Any:
    data = b"".join(frames.encode(value))
    header, body = frames.parse_prefix(data[: frames.PREFIX_SIZE])
    assert len(data) == frames.PREFIX_SIZE + header + body
    text = data[frames.PREFIX_SIZE : frames.PREFIX_SIZE + header]
    raw = np.frombuffer(bytearray(data[frames.PREFIX_SIZE + header :]), dtype=np.uint8)
    return frames.decode(text, raw)


@given(TREES)
def test_trees(value: Any) -> None:
    found = round_trip(value)
    assert found == value and repr(found) == repr(value)  # True is not 1, a tuple no list


def test_floats_that_are_no_numbers() -> None:
    found = round_trip([math.nan, math.inf, -math.inf])
    assert math.isnan(found[0]) and found[1:] == [math.inf, -math.inf]


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
        torch.float8_e4m3fn,
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3)])
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    first, found, last = round_trip([b"odd", value, value])
    for tensor in (found, last):
        assert tensor.dtype == dtype and tensor.shape == value.shape
        assert torch.equal(
            tensor.view(torch.uint8) if shape else tensor,
            value.view(torch.uint8) if shape else value,
        )
    assert first == b"odd"


def test_views_are_sent_by_their_elements() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    value = {"t": base.T[1:3], "n": base.numpy()[::2, ::3], "grad": base.requires_grad_()}
    found = round_trip(value)
    assert torch.equal(found["t"], base.detach().T[1:3])
    assert np.array_equal(found["n"], base.detach().numpy()[::2, ::3])
    assert not found["grad"].requires_grad


@pytest.mark.parametrize("rows", [[[1, 2], [], [3]], [[]]])
def test_jagged_tensors(rows: list[list[int]]) -> None:
    value = clients.nested(rows)
    first, found, last = round_trip([b"odd", {"x": value}, value])
    assert first == b"odd"
    clients.same([found["x"], last], [value, value])


def test_numpy_scalars_and_enumerations_become_plain() -> None:
    class Colour(str, enum.Enum):
        RED = "red"

    found = round_trip({"a": np.float32(0.5), "b": np.int64(3), "c": Colour.RED, "d": np.True_})
    assert found == {"a": 0.5, "b": 3, "c": "red", "d": True}
    assert [type(v) for v in found.values()] == [float, int, str, bool]


def test_keys_that_look_like_tags() -> None:
    value = {"$": "tensor", "x": {"$": 1}, 5: {None: (1,)}}
    assert round_trip(value) == value


def test_sent_without_a_copy() -> None:
    value = torch.arange(1000)
    body = frames.encode({"x": value})[-1]
    value[7] = -1
    assert np.frombuffer(body, dtype=np.int64)[7] == -1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": {"b": [1, object()]}}, r"value.a.b is a builtins.object, which cannot be sent"),
        ({"a": {1, 2}}, "value.a is a builtins.set"),
        ({"a": np.array([object()])}, "value.a is an array of object"),
        (
            [torch.nested.narrow(torch.ones(2, 3), 1, T([0, 1]), T([1, 2]), layout=torch.jagged)],
            "value is a tensor of layout torch.jagged",
        ),
    ],
)
def test_what_has_no_form(value: Any, message: str) -> None:
    with pytest.raises(frames.FrameError, match=message):
        frames.encode(value)


def test_bytes_that_are_no_frame() -> None:
    with pytest.raises(frames.FrameError, match="not a frame of version 1"):
        frames.parse_prefix(b"x" * frames.PREFIX_SIZE)
    empty = np.empty(0, dtype=np.uint8)
    with pytest.raises(frames.FrameError, match="exceeds the frame's body"):
        frames.decode(b'{"$":"bytes","size":9}', empty)
    with pytest.raises(frames.FrameError, match="unknown node 'x'"):
        frames.decode(b'{"$":"x"}', empty)
