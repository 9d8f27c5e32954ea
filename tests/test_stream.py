# SPDX-License-Identifier: Apache-2.0
"""Weights as a stream of chunks: what one side packs, the other side unpacks, byte for byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import native

ALIGN = 256
DTYPES = {np.dtype("uint8"): 2, np.dtype("int16"): 5, np.dtype("float32"): 12, np.dtype("f8"): 13}


def view_of(array: np.ndarray[Any, Any]) -> native.View:
    return native.make_view(array.ctypes.data, array.itemsize, array.shape, array.strides)


def dense_strides(array: np.ndarray[Any, Any]) -> list[int]:
    steps, step = [], array.itemsize
    for size in reversed(array.shape):
        steps.append(step)
        step *= size
    return steps[::-1]


def box_copy(
    tensor: int, box: tuple[slice, ...], source: np.ndarray[Any, Any], out: np.ndarray[Any, Any]
) -> native.Copy | None:
    """The copy of a plan that takes `box` of a dense `source` into `out` (any strides)."""
    steps = dense_strides(source)
    offset = sum(part.start * step for part, step in zip(box, steps, strict=True))
    copy = native.make_copy(
        source.itemsize, out.shape, (0, offset, steps), (out.ctypes.data, out.strides)
    )
    if copy is not None:
        copy.tensor = tensor
    return copy


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """An array of random bytes, often a transposed or sliced view of a larger one."""
    dtype = draw(st.sampled_from(list(DTYPES)))
    shape = draw(st.lists(st.integers(0, 9), max_size=4))
    steps = [draw(st.integers(1, 2)) for _ in shape]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    order = draw(st.permutations(range(len(shape))))
    full = [shape[i] * steps[i] for i in order]
    raw = rng.integers(0, 256, size=int(np.prod(full)) * dtype.itemsize, dtype=np.uint8)
    array = raw.view(dtype).reshape(full)
    back = [order.index(i) for i in range(len(shape))]
    view = array.transpose(back)[tuple(slice(None, None, s) for s in steps)]
    return np.asarray(view[(*(slice(0, n) for n in shape), ...)])


def send(
    sources: list[np.ndarray[Any, Any]], alias_of: list[int], chunk: int, copies: list[native.Copy]
) -> tuple[int, int]:
    """Pack, carry and unpack every chunk; return (chunks, bytes carried)."""
    tensors = [(DTYPES[a.dtype], a.shape, t) for a, t in zip(sources, alias_of, strict=True)]
    carried = 0
    with native.Stream(tensors, chunk) as stream:
        for k in range(stream.chunks):
            fill = stream.fill(k)
            assert 0 < fill <= chunk
            sender, receiver = np.full(chunk, 0xEE, np.uint8), np.full(chunk, 0xDD, np.uint8)
            stream.pack(k, [view_of(a) for a in sources], sender.ctypes.data)
            assert (sender[fill:] == 0xEE).all(), "wrote past the chunk's fill"
            receiver[:fill] = sender[:fill]
            stream.unpack(k, copies, receiver.ctypes.data)
            carried += fill
        return stream.chunks, carried


@settings(max_examples=150, deadline=None)
@given(st.lists(arrays(), max_size=6), st.sampled_from([256, 512, 1024]), st.data())
def test_whatever_is_packed_is_unpacked(
    sources: list[np.ndarray[Any, Any]], chunk: int, data: st.DataObject
) -> None:
    outs, copies = [], []
    for i, source in enumerate(sources):
        box = []
        for size in source.shape:  # a shard or the whole
            start = data.draw(st.integers(0, size))
            box.append(slice(start, data.draw(st.integers(start, size))))
        wanted = source[(*box, ...)]
        if data.draw(st.booleans()):
            out = np.zeros(wanted.shape[::-1], source.dtype).T
        else:
            out = np.zeros(wanted.shape, source.dtype)
        copy = box_copy(i, tuple(box), source, out)
        copies += [copy] if copy is not None else []
        outs.append((wanted, out))
    send(sources, list(range(len(sources))), chunk, copies)
    for wanted, out in outs:
        assert out.tobytes() == wanted.tobytes()


def test_an_alias_is_carried_once_and_arrives_under_both_names() -> None:
    head = np.arange(1000, dtype=np.float32)
    body = np.arange(77, dtype=np.int16)
    outs = [np.zeros_like(head), np.zeros_like(body), np.zeros_like(head)]
    sources = [head, body, head]
    copies = [
        box_copy(i, (slice(0, len(a)),), a, out)
        for i, (a, out) in enumerate(zip(sources, outs, strict=True))
    ]
    _, carried = send(sources, [0, 1, 0], 512, [c for c in copies if c is not None])
    for source, out in zip(sources, outs, strict=True):
        assert (source == out).all()
    assert carried < head.nbytes + body.nbytes + 2 * ALIGN


def test_a_tensor_larger_than_a_chunk_is_cut() -> None:
    big = np.random.default_rng(0).integers(0, 256, 10_000, dtype=np.uint8)
    out = np.zeros_like(big)
    copy = box_copy(0, (slice(0, 10_000),), big, out)
    assert copy is not None
    chunks, carried = send([big], [0], 1024, [copy])
    assert (chunks, carried) == (10, 10_000)
    assert (out == big).all()


def test_tensors_begin_aligned_and_a_chunk_is_as_large_as_what_is_in_it() -> None:
    with native.Stream([(2, (200,), 0), (2, (300,), 1)], 512) as stream:
        assert [stream.fill(k) for k in range(stream.chunks)] == [512, 44]


def test_nothing_to_send_is_no_chunk() -> None:
    with native.Stream([], 512) as stream:
        assert stream.chunks == 0
    with native.Stream([(2, (0, 5), 0)], 512) as stream:
        assert stream.chunks == 0


@pytest.mark.parametrize("chunk", [0, -256, 255, 300])
def test_a_chunk_size_that_would_split_elements_is_refused(chunk: int) -> None:
    with pytest.raises(native.NativeError, match="positive multiple of 256"):
        native.Stream([(2, (5,), 0)], chunk)
