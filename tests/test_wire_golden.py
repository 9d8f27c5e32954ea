# SPDX-License-Identifier: Apache-2.0
"""DSSST1 against recorded frames, and against the byte counts of the format's description."""

from __future__ import annotations

import pytest
import torch

import golden
import wire_reference
from arctic_rl_c import wire

FRAMES = golden.wire_frames()


def frame(name: str) -> bytes:
    return FRAMES[name]


NESTED_SHAPES = {
    "input_ids": (torch.int64, (3, 4)),
    "mask": (torch.bool, (3, 4)),
    "lp": (torch.float32, (3, 4)),
}
DTYPES = [
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "bool",
]


def described(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape)


def test_tensor_free_objects() -> None:
    assert wire.loads(frame("empty_dict")) == {}
    scalars = wire.loads(frame("scalars"))
    assert scalars == {"a": 1, "b": None, "c": "é", "d": [1, 2.5, True]}
    assert scalars["d"][2] is True


def test_a_root_tensor() -> None:
    assert described(wire.loads(frame("one_tensor"))) == (torch.int64, (2, 3))


def test_nested_with_metadata() -> None:
    nested = wire.loads(frame("nested"))
    assert {name: described(t) for name, t in nested["batch"].items()} == NESTED_SHAPES
    assert nested["batch"]["mask"].all()
    assert nested["meta"] == {"temperature": 0.7, "n": 4, "flag": False}
    assert wire.read_metadata(frame("nested")) == {"router_replay": 1}


def test_every_dtype() -> None:
    tensors = wire.loads(frame("dtypes"))
    assert list(tensors) == DTYPES
    assert all(described(tensors[name]) == (getattr(torch, name), (2, 2)) for name in DTYPES)


def test_scalars_lists_and_tuples() -> None:
    found = wire.loads(frame("scalar_tensor"))
    wanted = {
        "s": torch.tensor(3.5),
        "l": [torch.tensor([1, 2]), "x"],
        "t": (torch.tensor([7]), 1),
    }
    assert wire_reference.same(found, wanted)


def test_an_empty_tensor() -> None:
    assert described(wire.loads(frame("zero_size"))["z"]) == (torch.float32, (0, 5))


def test_one_tensor_in_two_places() -> None:
    shared = wire.loads(frame("shared"))
    assert torch.equal(shared["a"], torch.arange(6))
    assert torch.equal(shared["b"], torch.arange(6))
    assert shared["a"].data_ptr() != shared["b"].data_ptr()
    same = torch.arange(6)
    assert wire.dumps({"a": same, "b": same}) == frame("shared")


SINGLE = [
    "empty_dict",
    "scalars",
    "one_tensor",
    "nested",
    "dtypes",
    "scalar_tensor",
    "zero_size",
    "shared",
    "chunk_source",
]


def test_all_recorded_frames_are_named_here() -> None:
    assert sorted([*SINGLE, "chunks"]) == sorted(FRAMES)


@pytest.mark.parametrize("name", SINGLE)
def test_encoding_again_gives_the_same_bytes(name: str) -> None:
    recorded = frame(name)
    assert wire.dumps(wire.loads(recorded), wire.read_metadata(recorded)) == recorded


@pytest.mark.parametrize("name", SINGLE)
def test_the_reference_agrees(name: str) -> None:
    recorded = frame(name)
    assert wire_reference.same(wire.loads(recorded), wire_reference.loads(recorded))


def test_chunks_join_in_any_order() -> None:
    chunks = FRAMES["chunks"]
    for order in (chunks, chunks[::-1], chunks[2:] + chunks[:2]):
        assert wire.decode_byte_chunks(order) == frame("chunk_source")


def test_chunks_are_cut_as_recorded() -> None:
    """Equal but for the order of the two metadata keys, which the recording leaves to chance."""
    recorded = FRAMES["chunks"]
    chunks = wire.encode_byte_chunks(
        frame("chunk_source"), 20000, "request", operation="fwd", chunk_group_id="g1"
    )
    assert [wire_reference.split(chunk) for chunk in chunks] == [
        wire_reference.split(chunk) for chunk in recorded
    ]
    assert [wire.read_metadata(chunk) for chunk in chunks] == [
        wire.read_metadata(chunk) for chunk in recorded
    ]
    assert [len(chunk) for chunk in chunks] == [len(chunk) for chunk in recorded]


@pytest.mark.parametrize(
    ("obj", "size", "header", "data"),
    [
        ({"x": torch.tensor([5, 7]), "n": 3}, 192, 168, "05000000000000000700000000000000"),
        ({"prompts": ["hi"], "strict": False}, 185, 176, "00"),
        ({"meta": {"t": torch.tensor(2.0)}}, 212, 200, "00000040"),
    ],
)
def test_byte_counts(obj: object, size: int, header: int, data: str) -> None:
    encoded = wire.dumps(obj)
    assert len(encoded) == size
    assert int.from_bytes(encoded[:8], "little") == header
    assert encoded[8 + header :].hex() == data


def test_the_first_example_in_full() -> None:
    text = (
        '{"__metadata__":{"dss":"{\\"v\\": \\"DSSST1\\", \\"tree\\": [\\"d\\", [[\\"x\\", '
        '[\\"t\\", \\"x\\"]], [\\"n\\", [\\"j\\", 3]]]]}"},"x":{"dtype":"I64","shape":[2],'
        '"data_offsets":[0,16]}} '
    )
    encoded = wire.dumps({"x": torch.tensor([5, 7]), "n": 3})
    assert encoded[8:176] == text.encode()
