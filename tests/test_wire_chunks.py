# SPDX-License-Identifier: Apache-2.0
"""Byte chunks: cut, carried in any order, joined; and every way in which a set can be wrong."""

from __future__ import annotations

import hashlib
import uuid
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import wire_reference as reference
from arctic_rl_c import WireError, wire

FRAME = wire.dumps({"x": torch.arange(5000), "meta": {"n": 1}}, {"op": "fwd"})
HEADROOM = 8192
LIMIT = HEADROOM + 5000  # nine chunks of FRAME


def metadata_of(chunk: bytes) -> dict[str, Any]:
    (fields,) = wire.read_metadata(chunk).values()
    return fields


def payload_sizes(chunks: list[bytes]) -> list[int]:
    return [wire.loads(chunk)["payload"].numel() for chunk in chunks]


def slow_cut(frame: bytes, max_bytes: int, kind: str, group: str) -> list[bytes]:
    """The rule as it is written down, with every chunk built to see whether it fits."""
    size = max(1, max_bytes - HEADROOM)
    while True:
        total = -(-len(frame) // size)
        chunks = []
        for index in range(total):
            fields: dict[str, object] = {
                "chunk_idx": index,
                "total_chunks": total,
                "frame_sha256": hashlib.sha256(frame).hexdigest(),
                "frame_size_bytes": len(frame),
            }
            if kind == "request":
                fields["chunk_group_id"] = group
            piece = np.frombuffer(frame[index * size : (index + 1) * size], np.uint8)
            chunks.append(reference.dumps({"payload": piece}, {f"{kind}_chunk": fields}))
        if max(map(len, chunks)) <= max_bytes:
            return chunks
        assert size > 1
        size //= 2


@given(
    st.binary(max_size=40_000),
    st.integers(HEADROOM + 1000, 20_000),
    st.sampled_from(["request", "result"]),
)
@example(bytes(150), 450, "request")
@example(bytes(20_000), HEADROOM + 300, "result")
def test_chunks_equal_the_reference(frame: bytes, max_bytes: int, kind: str) -> None:
    group = "g" if kind == "request" else None
    chunks = wire.encode_byte_chunks(frame, max_bytes, kind, chunk_group_id=group)
    if len(frame) <= max_bytes:
        assert chunks == [frame]
        return
    assert chunks == slow_cut(frame, max_bytes, kind, "g")
    assert wire.decode_byte_chunks(chunks) == frame


@given(st.permutations(range(8)))
def test_the_order_of_arrival_is_free(order: list[int]) -> None:
    chunks = wire.encode_byte_chunks(FRAME, LIMIT, "request")
    assert len(chunks) == 9
    arrived = [chunks[i] for i in order] + chunks[8:]
    assert wire.decode_byte_chunks(arrived) == FRAME
    assert wire.decode_byte_chunks(iter(arrived)) == FRAME


@pytest.mark.parametrize("max_bytes", [0, -1, len(FRAME), len(FRAME) + 1, 2**62])
def test_what_fits_is_not_cut(max_bytes: int) -> None:
    (only,) = wire.encode_byte_chunks(FRAME, max_bytes, "request")
    assert only is FRAME
    assert wire.decode_byte_chunks([only]) is FRAME


def test_buffers_become_bytes() -> None:
    (only,) = wire.encode_byte_chunks(bytearray(FRAME), 0, "result")
    assert type(only) is bytes
    assert wire.decode_byte_chunks([memoryview(FRAME)]) == FRAME
    chunks = wire.encode_byte_chunks(memoryview(FRAME), LIMIT, "result")
    assert wire.decode_byte_chunks([bytearray(chunk) for chunk in chunks]) == FRAME


def test_the_payload_shrinks_until_it_fits() -> None:
    """8192 bytes of headroom are the first guess; after that halves of it, down to one byte."""
    frame = bytes(100_000)
    assert set(payload_sizes(wire.encode_byte_chunks(frame, 50_000, "result"))[:-1]) == {41_808}
    # 41 % of the limit is headroom here: no halving either.
    assert set(payload_sizes(wire.encode_byte_chunks(frame, 20_000, "result"))[:-1]) == {11_808}
    # An operation name longer than the headroom forces it.
    name = "n" * 9000
    sizes = payload_sizes(wire.encode_byte_chunks(frame, 20_000, "result", operation=name))
    assert set(sizes[:-1]) == {5904}
    # At most 8193 bytes: one byte a chunk from the start.
    assert payload_sizes(wire.encode_byte_chunks(bytes(700), 690, "result")) == [1] * 700


def test_a_limit_below_one_byte_of_payload() -> None:
    with pytest.raises(WireError, match=r"max_bytes=100 is too small: .* single byte"):
        wire.encode_byte_chunks(FRAME, 100, "request")


def test_metadata() -> None:
    chunks = wire.encode_byte_chunks(FRAME, LIMIT, "request", operation="fwd")
    fields = [metadata_of(chunk) for chunk in chunks]
    assert [f["chunk_idx"] for f in fields] == list(range(len(chunks)))
    assert {f["total_chunks"] for f in fields} == {len(chunks)}
    assert {f["frame_sha256"] for f in fields} == {hashlib.sha256(FRAME).hexdigest()}
    assert {f["frame_size_bytes"] for f in fields} == {len(FRAME)}
    assert {f["operation"] for f in fields} == {"fwd"}
    (group,) = {f["chunk_group_id"] for f in fields}
    assert uuid.UUID(group).version == 4
    again = wire.encode_byte_chunks(FRAME, LIMIT, "request")
    assert metadata_of(again[0])["chunk_group_id"] != group
    result = wire.encode_byte_chunks(FRAME, LIMIT, "result", operation='é"\\')
    assert list(wire.read_metadata(result[0])) == ["result_chunk"]
    assert set(metadata_of(result[0])) == {
        "chunk_idx",
        "total_chunks",
        "frame_sha256",
        "frame_size_bytes",
        "operation",
    }
    assert metadata_of(result[0])["operation"] == 'é"\\'


@pytest.mark.parametrize("kind", ["", "requests", "REQUEST", "request_chunk"])
def test_other_kinds(kind: str) -> None:
    for max_bytes in (0, 1000):
        with pytest.raises(WireError, match='kind must be "request" or "result"'):
            wire.encode_byte_chunks(FRAME, max_bytes, kind)


def test_a_result_has_no_group() -> None:
    with pytest.raises(WireError, match="chunk_group_id belongs to requests"):
        wire.encode_byte_chunks(FRAME, 1000, "result", chunk_group_id="g")


def test_only_bytes_can_be_cut() -> None:
    with pytest.raises(WireError, match="expected a bytes-like object, got dict"):
        wire.encode_byte_chunks({}, 1000, "result")  # type: ignore[arg-type]


# ---- sets that are wrong -------------------------------------------------------------------------


def changed(chunk: bytes, **fields: object) -> bytes:
    """A chunk whose metadata differs in `fields`; None takes one out."""
    ((kind, old),) = wire.read_metadata(chunk).items()
    new = {name: value for name, value in {**old, **fields}.items() if value is not None}
    return wire.dumps(wire.loads(chunk), {kind: new})


CHUNKS = wire.encode_byte_chunks(FRAME, LIMIT, "request", operation="fwd", chunk_group_id="g")
RESULTS = wire.encode_byte_chunks(FRAME, LIMIT, "result", operation="fwd")
OTHER = wire.encode_byte_chunks(
    FRAME[:-1] + b"\7", LIMIT, "request", operation="fwd", chunk_group_id="g"
)
LAST = len(CHUNKS) - 1
PAYLOAD = wire.loads(CHUNKS[0])["payload"]


def replaced(index: int, chunk: bytes) -> list[bytes]:
    return [*CHUNKS[:index], chunk, *CHUNKS[index + 1 :]]


WRONG: list[tuple[list[bytes], str]] = [
    ([], "no chunks were given"),
    (CHUNKS[:-1], f"{LAST} of {LAST + 1} chunks were given"),
    ([CHUNKS[1]], f"1 of {LAST + 1} chunks were given"),
    ([*CHUNKS, CHUNKS[0]], "chunk_idx 0 was given twice"),
    (replaced(2, CHUNKS[1]), "chunk_idx 1 was given twice"),
    (replaced(1, FRAME), f"chunk 1 of {LAST + 1}: the frame has no chunk metadata"),
    ([FRAME, FRAME], "chunk 0 of 2: the frame has no chunk metadata"),
    (replaced(1, RESULTS[1]), "chunk 1 .*: its kind differs"),
    (replaced(1, changed(CHUNKS[1], total_chunks=99)), "chunk 1 .*: its total_chunks differs"),
    (replaced(1, OTHER[1]), "chunk 1 .*: its frame_sha256 differs"),
    (
        replaced(1, changed(CHUNKS[1], frame_size_bytes=1)),
        "chunk 1 .*: its frame_size_bytes differs",
    ),
    (replaced(1, changed(CHUNKS[1], chunk_group_id="h")), "chunk 1 .*: its chunk_group_id differs"),
    (
        replaced(1, changed(CHUNKS[1], chunk_group_id=None)),
        "chunk 1 .*: its chunk_group_id differs",
    ),
    (replaced(1, changed(CHUNKS[1], operation="step")), "chunk 1 .*: its operation differs"),
    (replaced(1, changed(CHUNKS[1], operation=None)), "chunk 1 .*: its operation differs"),
    (
        replaced(1, changed(CHUNKS[1], chunk_idx=LAST + 1)),
        r"chunk_idx \d+ is not below total_chunks",
    ),
    (replaced(1, changed(CHUNKS[1], chunk_idx=-1)), "chunk_idx must be at least 0, found -1"),
    (replaced(1, changed(CHUNKS[1], chunk_idx=2**64)), "chunk_idx must be at least 0"),
    (replaced(1, changed(CHUNKS[1], chunk_idx=1.0)), "chunk_idx must be an integer"),
    (replaced(1, changed(CHUNKS[1], chunk_idx=True)), "chunk_idx must be an integer"),
    (replaced(1, changed(CHUNKS[1], total_chunks=0)), "total_chunks must be at least 1"),
    (replaced(1, changed(CHUNKS[1], frame_size_bytes="1")), "frame_size_bytes must be an integer"),
    (replaced(1, changed(CHUNKS[1], frame_sha256="ab")), "64 hexadecimal digits, found 2"),
    (replaced(1, changed(CHUNKS[1], frame_sha256=5)), "frame_sha256 must be a string"),
    (replaced(1, changed(CHUNKS[1], chunk_group_id=5)), "chunk_group_id must be a string"),
    (replaced(1, changed(CHUNKS[1], operation=[])), "operation must be a string"),
    *(
        (replaced(1, changed(CHUNKS[1], **{name: None})), "needs chunk_idx, total_chunks")
        for name in ("chunk_idx", "total_chunks", "frame_sha256", "frame_size_bytes")
    ),
    ([changed(chunk, frame_sha256="0" * 64) for chunk in CHUNKS], "have SHA-256 .* says 000"),
    (
        [changed(chunk, frame_size_bytes=1) for chunk in CHUNKS],
        r"the chunks hold \d+ bytes, .* says 1",
    ),
    ([changed(chunk, frame_size_bytes=2**62) for chunk in CHUNKS], r"the chunks hold \d+ bytes"),
    ([b"nonsense"], "not a valid DSSST1 safetensors payload"),
]


def repacked(payload: object, chunk: bytes = CHUNKS[1]) -> list[bytes]:
    return replaced(1, wire.dumps(payload, wire.read_metadata(chunk)))


WRONG += [
    (repacked({"payload": PAYLOAD.to(torch.int8)}), "1-D uint8 tensor, found int8 of 1"),
    (repacked({"payload": PAYLOAD[None]}), "1-D uint8 tensor, found uint8 of 2"),
    (repacked({"payload": [1, 2]}), 'exactly {"payload": tensor}'),
    (repacked({"payload": [PAYLOAD]}), 'exactly {"payload": tensor}'),
    (repacked({"data": PAYLOAD}), 'exactly {"payload": tensor}'),
    (repacked({"payload": PAYLOAD, "more": 1}), 'exactly {"payload": tensor}'),
    (repacked(PAYLOAD), 'exactly {"payload": tensor}'),
    (repacked({"payload": PAYLOAD[0]}), 'exactly {"payload": tensor}'),
    (repacked({"payload": PAYLOAD[:3]}), r"the chunks hold \d+ bytes"),
]


@pytest.mark.parametrize(("chunks", "said"), WRONG)
def test_sets_that_are_wrong(chunks: list[bytes], said: str) -> None:
    with pytest.raises(WireError, match=said):
        wire.decode_byte_chunks(chunks)


def test_the_cases_start_from_a_sound_set() -> None:
    assert wire.decode_byte_chunks(CHUNKS) == FRAME
    assert wire.decode_byte_chunks(replaced(1, changed(CHUNKS[1]))) == FRAME
    assert wire.decode_byte_chunks([changed(c, more={"a": [1]}) for c in CHUNKS]) == FRAME


@pytest.mark.parametrize(
    ("op", "said"),
    [
        ('{"request_chunk": {}, "result_chunk": {}}', "needs chunk_idx"),
        ('{"request_chunk": 1}', "chunk metadata must be an object"),
        ('{"request_chunk": {"chunk_idx": 1', "ends at byte"),
        ('{"other": {"a": [1]}, ', "ends at byte"),
    ],
)
def test_metadata_that_is_wrong(op: str, said: str) -> None:
    dss = '{"v": "DSSST1", "tree": ["d", [["payload", ["t", "payload"]]]]}'
    chunk = reference.image({"payload": ("U8", [1], b"\0")}, {"dss": dss, "op": op})
    with pytest.raises(WireError, match=said):
        wire.decode_byte_chunks([chunk])


def test_two_kinds_in_one_chunk() -> None:
    fields = metadata_of(CHUNKS[0])
    both = {"request_chunk": fields, "result_chunk": fields}
    with pytest.raises(WireError, match="more than one of request_chunk and result_chunk"):
        wire.decode_byte_chunks([wire.dumps(wire.loads(CHUNKS[0]), both)])


@pytest.mark.parametrize("op", ["1", "[]", "null", '{"other": 1}', '"request_chunk"'])
def test_metadata_without_a_chunk(op: str) -> None:
    frame = reference.image({"x": ("U8", [1], b"\0")}, {"dss": "{}", "op": op})
    assert wire.decode_byte_chunks([frame]) == frame


@pytest.mark.parametrize("chunks", [FRAME, bytearray(FRAME)])
def test_one_frame_is_not_a_list(chunks: object) -> None:
    with pytest.raises(WireError, match=r"expected a list of chunks, got one byte(s|array)"):
        wire.decode_byte_chunks(chunks)  # type: ignore[arg-type]


def test_what_is_not_a_list() -> None:
    with pytest.raises(TypeError):
        wire.decode_byte_chunks(5)  # type: ignore[arg-type]
    with pytest.raises(WireError, match="expected a bytes-like object, got str"):
        wire.decode_byte_chunks(["x"])  # type: ignore[list-item]


def test_large_frames() -> None:
    """Split over threads, hashed by the processor's own instructions where it has them."""
    frame = wire.dumps({"x": torch.arange(1_000_003)})
    chunks = wire.encode_byte_chunks(frame, 3_000_000, "result")
    assert [len(chunk) <= 3_000_000 for chunk in chunks] == [True] * 3
    assert wire.decode_byte_chunks(chunks[::-1]) == frame
    assert metadata_of(chunks[0])["frame_sha256"] == hashlib.sha256(frame).hexdigest()


@pytest.mark.parametrize("size", [55, 56, 63, 64, 65, 119, 120, 127, 128, 1000])
def test_digests_at_block_boundaries(size: int) -> None:
    """Any bytes can be cut; these are just longer than the limit lets pass."""
    limit = 400
    frame = bytes(range(256)) * 4
    frame = frame[:size] + bytes(448)
    chunks = wire.encode_byte_chunks(frame, limit, "result")
    assert metadata_of(chunks[0])["frame_sha256"] == hashlib.sha256(frame).hexdigest()
