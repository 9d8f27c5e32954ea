# SPDX-License-Identifier: Apache-2.0
"""Everything that is wrong with a frame, or with an object to encode, and what is said about it."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import random
import struct
from typing import Any

import numpy as np
import pytest
import safetensors
import torch

import arctic_rl_c._core as core
import residue
import wire_reference as reference
from arctic_rl_c import WireError, wire

DSS = '{"v": "DSSST1", "tree": ["d", [["x", ["t", "x"]], ["y", ["t", "y"]]]]}'
ENTRIES: dict[str, Any] = {
    "x": {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]},
    "y": {"dtype": "F32", "shape": [1, 2], "data_offsets": [16, 24]},
}
DATA = bytes(24)


def frame(header: object = None, data: bytes = DATA, *, dss: object = DSS) -> bytes:
    """A frame around any header: a dict (with the metadata added), or the text itself."""
    if header is None:
        header = ENTRIES
    if isinstance(header, dict):
        header = json.dumps({"__metadata__": {"dss": dss}, **header})
    text = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(text)) + text + data


def entries(**changes: object) -> dict[str, Any]:
    """ENTRIES with fields of x replaced; None takes a field out."""
    x = {**ENTRIES["x"], **changes}
    return {"x": {name: value for name, value in x.items() if value is not None}, "y": ENTRIES["y"]}


def test_the_frame_that_the_cases_break_is_sound() -> None:
    assert sorted(wire.loads(frame())) == ["x", "y"]
    safetensors.deserialize(frame())


# ---- the frame -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, 1, "text", [b"x"], {"x": 1}, object()])
def test_what_is_not_bytes(value: object) -> None:
    with pytest.raises(WireError, match="expected a bytes-like object, got"):
        wire.loads(value)  # type: ignore[arg-type]
    assert wire.read_metadata(value) == {}  # type: ignore[arg-type]


def test_strided_bytes() -> None:
    with pytest.raises(WireError, match="contiguous"):
        wire.loads(memoryview(frame())[::2])


class Trap:
    """Says so if anybody unpickles it."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (pytest.fail, ("a pickle was executed",))


def torch_save(value: object, zip_format: bool) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, _use_new_zipfile_serialization=zip_format)
    return out.getvalue()


@pytest.mark.parametrize("as_", ["auto", "numpy"])
@pytest.mark.parametrize(
    "payload",
    [
        *(pickle.dumps(Trap(), protocol) for protocol in (2, 3, 4, 5)),
        torch_save({"x": torch.zeros(3)}, True),
        torch_save({"x": torch.zeros(3)}, False),
        b"\x80\x02",
        b"\x80\x05",
        b"PK\x03\x04",
    ],
)
def test_pickles_are_refused(payload: bytes, as_: str) -> None:
    wanted = "refusing to deserialize a legacy pickle/torch.save payload"
    with pytest.raises(WireError, match=wanted):
        wire.loads(payload, as_=as_)
    with pytest.raises(WireError, match=wanted):
        wire.decode_byte_chunks([payload])
    assert wire.read_metadata(payload) == {}


def test_a_sound_frame_may_begin_like_a_pickle() -> None:
    """0x0280 bytes of header are written 80 02."""
    padded = json.dumps({"__metadata__": {"dss": DSS}, **ENTRIES}).ljust(0x280)
    assert frame(padded)[:2] == b"\x80\x02"
    assert sorted(wire.loads(frame(padded))) == ["x", "y"]


HEADER_MAX = 64 * 1024 * 1024

BAD_LENGTHS = [
    struct.pack("<Q", 0) + DATA,
    struct.pack("<Q", 25) + DATA,
    struct.pack("<Q", 2**63) + DATA,
    struct.pack("<q", -1) + DATA,
    struct.pack("<q", -8) + DATA,
]


@pytest.mark.parametrize("payload", BAD_LENGTHS)
def test_header_lengths(payload: bytes) -> None:
    with pytest.raises(WireError, match="invalid DSSST1 safetensors header length"):
        wire.loads(payload)


def test_the_longest_header() -> None:
    """safetensors itself would take more."""
    text = b"{}".ljust(HEADER_MAX)
    with pytest.raises(WireError, match='without "dss"'):
        wire.loads(frame(text, b""))
    with pytest.raises(WireError, match="invalid DSSST1 safetensors header length"):
        wire.loads(frame(text + b" ", b""))


#: What the header says, what the data is, and what must be in the message.
BAD_HEADERS: list[tuple[object, bytes, str]] = [
    (b"\xff{}", b"", "starts with byte 0xff"),
    (b" {}", b"", "starts with byte 0x20"),
    (b"[]", b"", r"starts with byte 0x5b"),
    (b'{"\xc3("', b"", "not valid UTF-8"),
    (b'{"\xed\xa0\x80": 1}', b"", "not valid UTF-8"),
    (b'{"\xc0\x80": 1}', b"", "not valid UTF-8"),
    (b'{"\xf4\x90\x80\x80": 1}', b"", "not valid UTF-8"),
    (b"{", b"", "ends at byte 1 where a key or '}' was expected"),
    (b"{}x", b"", "byte 2: expected the end of the text, found 'x'"),
    (b"{}\0", b"", "found 0x00"),
    (b'{"x" 1}', b"", "expected ':' after a key"),
    (b'{"x": {},}', b"", 'tensor "x": needs dtype, shape and data_offsets'),
    (b'{"__metadata__": {},}', b"", "expected a key, found '}'"),
    (b"{x: 1}", b"", "expected a key or '}', found 'x'"),
    (b'{"x', b"", "the closing quote"),
    (b'{"x\n": 1}', b"", "a control character in a string"),
    (b'{"\\x": 1}', b"", "a valid escape"),
    (b'{"\\u12g4": 1}', b"", "a valid escape"),
    (b'{"\\ud800": {}}', b"", "half of a surrogate pair"),
    (b'{"x": 1}', b"", "a tensor's entry must be an object, found an integer"),
    (b'{"x": NaN}', b"", "expected a value, found 'N'"),
    (b'{"x": {"z": ' + b"[" * 600, b"", "nested deeper than 512 levels"),
    (b'{"__metadata__": []}', b"", '"__metadata__" must be an object'),
    (b'{"__metadata__": {"dss": 1}}', b"", "must be a string, found an integer"),
    (b'{"__metadata__": {"dss": "", "dss": ""}}', b"", 'holds the key "dss" twice'),
    (b'{"__metadata__": {"op": "", "op": ""}}', b"", 'holds the key "op" twice'),
    (b'{"__metadata__": {}, "__metadata__": {}}', b"", 'holds "__metadata__" twice'),
    (entries(dtype=None), DATA, "needs dtype, shape and data_offsets"),
    (entries(shape=None), DATA, "needs dtype, shape and data_offsets"),
    (entries(data_offsets=None), DATA, "needs dtype, shape and data_offsets"),
    (entries(dtype=7), DATA, "dtype must be a string"),
    (entries(dtype="I65"), DATA, 'dtype "I65" is not known'),
    (entries(dtype="C64"), DATA, 'dtype "C64" is not known'),
    (entries(dtype=""), DATA, 'dtype "" is not known'),
    (entries(shape=2), DATA, "shape must be an array"),
    (entries(shape=[-2]), DATA, r"shape\[0\] must be an integer from 0"),
    (entries(shape=[2.0]), DATA, r"shape\[0\] must be an integer from 0"),
    (entries(shape=[1, True]), DATA, r"shape\[1\] must be an integer from 0"),
    (entries(shape=[2**63]), DATA, r"shape\[0\] must be an integer from 0"),
    (entries(shape=[1] * 9), DATA, "shape has more than 8 numbers"),
    (entries(shape=[3]), DATA, r"int64\[3\] needs 24 bytes, its data_offsets span 16"),
    (entries(shape=[]), DATA, r"int64\[\] needs 8 bytes"),
    (entries(shape=[2**61]), DATA, "overflow"),
    (entries(shape=[2**40, 2**40, 2**40]), DATA, "overflow"),
    (entries(shape=[0, 2**62, 2**62]), DATA, "overflow"),
    (entries(data_offsets=[0]), DATA, "data_offsets must be"),
    (entries(data_offsets=[]), DATA, "data_offsets must be"),
    (entries(data_offsets=[0, 16, 16]), DATA, "data_offsets has more than 2 numbers"),
    (entries(data_offsets=[16, 0]), DATA, "begin <= end"),
    (entries(data_offsets=[-16, 0]), DATA, r"data_offsets\[0\] must be an integer from 0"),
    (entries(data_offsets=[8, 24]), DATA, "data begins at byte 8, leaving a hole"),
    (ENTRIES, DATA[:-1], '"y": its data is 8 bytes, the frame holds 7 more'),
    (ENTRIES, DATA + b"\0", "1 bytes follow the last tensor's data"),
    ({}, b"\0", "1 bytes follow"),
    (
        {"x": ENTRIES["x"], "y": {**ENTRIES["y"], "data_offsets": [8, 16]}},
        DATA[:16],
        '"y": its data begins at byte 8, overlapping byte 16',
    ),
    (
        '{"x": {"dtype": "I8", "shape": [1], "shape": [1], "data_offsets": [0, 1]}}',
        b"\0",
        "a field is given twice",
    ),
    (
        '{"x": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]},'
        ' "\\u0078": {"dtype": "I8", "shape": [1], "data_offsets": [1, 2]}}',
        b"\0\0",
        'holds tensor "x" twice',
    ),
]


@pytest.mark.parametrize(("header", "data", "said"), BAD_HEADERS)
def test_headers(header: object, data: bytes, said: str) -> None:
    payload = frame(header, data)
    with pytest.raises(WireError, match="not a valid DSSST1 safetensors payload: ") as caught:
        wire.loads(payload)
    assert caught.match(said)
    assert wire.read_metadata(payload) == {}


@pytest.mark.parametrize("payload", [b"", b"\0", bytes(7), b"text", b"\x80", b"PK\3"])
def test_too_short_for_anything(payload: bytes) -> None:
    with pytest.raises(WireError, match="not a valid DSSST1 safetensors payload: "):
        wire.loads(payload)


def test_a_safetensors_file_is_not_yet_a_frame() -> None:
    import safetensors.torch

    with pytest.raises(WireError, match='without "dss"'):
        wire.loads(safetensors.torch.save({"x": torch.zeros(1)}))


# ---- the tree ------------------------------------------------------------------------------------

X = '["t", "x"]'

BAD_TREES: list[tuple[str, str]] = [
    ("", "ends at byte 0"),
    ("[]", "it must be an object"),
    ("{}", 'has no "v"'),
    ('{"v": "DSSST1"}', 'has no "tree"'),
    ('{"tree": ["j", 1]}', 'has no "v"'),
    ('{"v": "DSSST2", "tree": ["j", 1]}', 'unsupported wire version "DSSST2"'),
    ('{"tree": ["j", 1], "v": "DSSST0"}', 'unsupported wire version "DSSST0"'),
    ('{"v": 1, "tree": ["j", 1]}', "the version must be a string"),
    ('{"v": "DSSST1", "v": "DSSST1", "tree": ["j", 1]}', 'key "v" twice'),
    ('{"v": "DSSST1", "tree": ["j", 1], "v": "DSSST1"}', 'key "v" twice'),
    ('{"v": "DSSST1", "tree": ["j", 1], "tree": ["j", 1]}', 'key "tree" twice'),
    ('{"tree": ["j", 1], "tree": ["j", 1], "v": "DSSST1"}', 'key "tree" twice'),
    ('{"v": "DSSST1", "tree": ["j", 1]} 1', "expected the end of the text"),
    ('{"v": "DSSST1", "tree": ["j", 1], "more": }', "expected a value"),
    ('{"v": "DSSST1", "tree": ["j", 1]', "ends at byte"),
]

BAD_NODES: list[tuple[str, str]] = [
    ("1", "a node must be an array, found an integer"),
    ("{}", "a node must be an array, found an object"),
    ("[]", "a node's tag must be a string, found the end of an array"),
    ("[1]", "a node's tag must be a string"),
    ('["q", 1]', 'unknown node tag "q"'),
    ('["", 1]', 'unknown node tag ""'),
    ('["tt", "x"]', 'unknown node tag "tt"'),
    ('["j"]', "expected a value, found the end of an array"),
    ('["j", 1, 2]', "the end of a node must be the end of an array"),
    ('["j", {"a": 1, "a": 2}]', 'an object holds the key "a" twice'),
    ('["j", 01]', "a leading zero"),
    ('["j", 1.]', "a digit after the decimal point"),
    ('["j", 1e]', "a digit in the exponent"),
    ('["j", -]', "a digit"),
    ('["j", nul]', "expected a value"),
    ("[\"j\", 'x']", "expected a value"),
    ('["j", ' + "1" * 5000 + "]", "an integer of 5000 digits"),
    ('["j", ' + "[" * 600 + "]" * 600 + "]", "nested deeper than 512"),
    ('["t"]', "a tensor's key must be a string"),
    ('["t", 1]', "a tensor's key must be a string"),
    ('["t", "z"]', 'names tensor "z", which the frame does not hold'),
    ('["t", "\\ud800"]', "which the frame does not hold"),
    ('["t", "x", 1]', "a tensor's node goes on with an integer"),
    ('["t", "x", {}, {}]', "a tensor's node goes on with an object"),
    ('["t", "x", {"scalar": 1}]', '"scalar" must be true or false'),
    ('["t", "x", {"scalar": true}]', "marked as a scalar and holds 16 bytes"),
    (f'["l", [{X}, {X}]]', "collided when the frame was written"),
    ('["l", 1]', "the elements of a node must be an array"),
    ('["l"]', "the elements of a node must be an array"),
    ('["l", [1]]', "a node must be an array"),
    ('["l", [], []]', "the end of a node"),
    ('["u", {}]', "the elements of a node must be an array"),
    ('["d", {}]', "the items of a dict node must be an array"),
    ('["d", [1]]', r"an item of a dict node must be \[name, node\], found an integer"),
    ('["d", [["a"]]]', "a node must be an array"),
    ('["d", [[1, ["j", 1]]]]', "a name in a dict node must be a string"),
    ('["d", [["a", ["j", 1], 2]]]', "the end of a name's pair"),
    ('["d", [["a", ["j", 1]], ["a", ["j", 2]]]]', "a dict node holds one name twice"),
]


@pytest.mark.parametrize(("dss", "said"), BAD_TREES)
def test_trees(dss: str, said: str) -> None:
    with pytest.raises(WireError, match=said):
        wire.loads(frame(dss=dss))


@pytest.mark.parametrize(("node", "said"), BAD_NODES)
def test_nodes(node: str, said: str) -> None:
    for dss in (
        f'{{"v": "DSSST1", "tree": {node}}}',
        f'{{"tree": ["l", [{node}]], "v": "DSSST1"}}',
    ):
        with pytest.raises(WireError, match=said):
            wire.loads(frame(dss=dss))


def test_deep_trees() -> None:
    """As deep as the limit, and one more."""
    for levels, fine in ((255, True), (256, False)):
        node = '["l", [' * levels + "]]" * levels
        payload = frame(dss=f'{{"v": "DSSST1", "tree": {node}}}')
        if fine:
            wire.loads(payload)
        else:
            with pytest.raises(WireError, match="nested deeper than 512 levels"):
                wire.loads(payload)


@pytest.mark.parametrize(
    "op", ["", "1", "[]", '{"a": 1', '{"a": 1} 2', '{"a": 1, "a": 2}', "nonsense"]
)
def test_a_peek_at_bad_metadata(op: str) -> None:
    payload = reference.image({"x": ("U8", [1], b"\0")}, {"dss": DSS, "op": op})
    assert wire.read_metadata(payload) == {}


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_dtypes_that_numpy_lacks(name: str) -> None:
    payload = wire.dumps({"x": torch.zeros(2, dtype=getattr(torch, name))})
    with pytest.raises(WireError, match=f'tensor "x" is {name}, which NumPy does not have'):
        wire.loads(payload, as_="numpy")


@pytest.mark.parametrize("as_", ["jax", "", 1, None])
def test_other_libraries(as_: object) -> None:
    with pytest.raises(ValueError, match="as_ must be 'auto', 'torch' or 'numpy'"):
        wire.loads(frame(), as_=as_)  # type: ignore[arg-type]


def test_a_damaged_frame_never_shows_its_memory() -> None:
    """The last tensor's node is bad: nothing is returned, not even the ones before it."""
    dss = '{"v": "DSSST1", "tree": ["l", [["t", "x"], ["t", "nothing"]]]}'
    with pytest.raises(WireError):
        wire.loads(frame(dss=dss))


# ---- every length, many bytes --------------------------------------------------------------------

SAMPLE = {
    "batch": {"ids": torch.arange(6).reshape(2, 3), "mask": torch.ones(2, 3, dtype=torch.bool)},
    "meta": {"n": 1, "t": torch.tensor(0.5), "text": "é\n", "list": [1.5, None, (2, "x")]},
}


def test_every_truncation() -> None:
    whole = wire.dumps(SAMPLE, {"op": 1})
    for length in range(len(whole)):
        with pytest.raises(WireError):
            wire.loads(whole[:length])
        assert wire.read_metadata(whole[:length]) == {}


def test_every_byte_changed() -> None:
    """Sound or a WireError, and what safetensors refuses we refuse."""
    whole = wire.dumps(SAMPLE, {"op": 1})
    header = 8 + int.from_bytes(whole[:8], "little")
    rng = random.Random(1)
    for at in range(header):
        changed = bytearray(whole)
        for value in {0, 0x22, 0x5C, 0x7D, 0xFF, changed[at] ^ 1, rng.randrange(256)}:
            changed[at] = value
            check_against_safetensors(bytes(changed))


def check_against_safetensors(payload: bytes) -> None:
    try:
        wire.loads(payload)
        fine = True
    except WireError:
        fine = False
    wire.read_metadata(payload)
    try:
        safetensors.deserialize(payload)
    except safetensors.SafetensorError:
        assert not fine, payload


def test_many_mutations() -> None:
    rng = random.Random(2)
    sources = [
        wire.dumps(SAMPLE),
        wire.dumps({"prompts": [[1, 2], [3]]}),
        frame(),
        *wire.encode_byte_chunks(wire.dumps({"x": torch.arange(200)}), 1200, "request"),
    ]
    for _ in range(4000):
        payload = bytearray(rng.choice(sources))
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(payload))
            match rng.randrange(4):
                case 0:
                    payload[at] = rng.randrange(256)
                case 1:
                    del payload[at : at + rng.randrange(1, 9)]
                case 2:
                    payload[at:at] = rng.choice([b'"', b"{", b"]", b"\\", b"9", b"\0", b", "])
                case 3:
                    other = rng.choice(sources)
                    start = rng.randrange(len(other))
                    payload[at : at + 8] = other[start : start + 8]
            if not payload:
                break
        check_against_safetensors(bytes(payload))
        with contextlib.suppress(WireError):
            wire.decode_byte_chunks([bytes(payload)])


# ---- objects -------------------------------------------------------------------------------------

T = torch.zeros(1)


@pytest.mark.parametrize("key", [1, None, (1, 2), b"x", 1.5])
def test_keys_of_a_dict_with_tensors(key: object) -> None:
    with pytest.raises(WireError, match=rf"\['a'\]: .* has a key of type {type(key).__name__}"):
        wire.dumps({"a": {key: T}})
    with pytest.raises(WireError, match="the object: "):
        wire.dumps({"a": T, key: 1})


def test_a_key_with_half_a_surrogate_pair() -> None:
    with pytest.raises(WireError, match="half of a surrogate pair"):
        wire.dumps({"\ud800": T})


@pytest.mark.parametrize(
    ("obj", "first", "second", "key"),
    [
        ({"a.b": T, "a": {"b": T}}, "['a.b']", "['a']['b']", "a.b"),
        ({"a": {"b": T}, "a.b": T}, "['a']['b']", "['a.b']", "a.b"),
        ({"l": [T], "l.0": T}, "['l'][0]", "['l.0']", "l.0"),
        ({"a": {"0": T}, "a.0": torch.zeros(1, dtype=torch.int64)}, "['a']['0']", "['a.0']", "a.0"),
        ([{"1": T}, {"0.1": T}, {"1": T, "": {"x": 1}}], None, None, None),
        ({"": {"": T}, ".": T}, "['']['']", "['.']", "."),
        (
            {"__metadata__": T, "__metadata__~": T},
            "['__metadata__']",
            "['__metadata__~']",
            "__metadata__~",
        ),
    ],
)
def test_keys_that_collide(
    obj: object, first: str | None, second: str | None, key: str | None
) -> None:
    if first is None:
        wire.dumps(obj)
        return
    with pytest.raises(WireError) as caught:
        wire.dumps(obj)
    said = str(caught.value)
    assert first in said
    assert second in said  # type: ignore[operator]
    assert f'would both be stored as "{key}"' in said


@pytest.mark.parametrize("value", [object(), np.int64(1), {1, 2}, b"x", 1j, {"a": np.bool_(True)}])
@pytest.mark.parametrize("around", [lambda v: v, lambda v: {"a": [v]}, lambda v: {"a": v, "t": T}])
def test_values_without_a_json_form(value: object, around: Any) -> None:
    """The json module's own error, as it is no fault of the format."""
    with pytest.raises(TypeError, match="is not JSON serializable"):
        wire.dumps(around(value))


def test_keys_without_a_json_form() -> None:
    with pytest.raises(TypeError, match="keys must be str, int"):
        wire.dumps({(1, 2): 3})


@pytest.mark.parametrize(
    ("tensor", "error", "said"),
    [
        (
            torch.zeros(1, dtype=torch.complex64),
            WireError,
            "dtype complex64 has no name in the wire",
        ),
        (torch.zeros(2, 2).to_sparse(), WireError, "dense"),
        (
            torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged),
            WireError,
            "layout is torch.jagged",
        ),
        (torch.zeros(1, device="meta"), NotImplementedError, "meta"),
        (torch.zeros([1] * 9), WireError, "has 9 dimensions, at most 8"),
        (np.zeros(1, "O"), TypeError, "dtype object is not supported"),
        (np.zeros(1, ">i4"), TypeError, "dtype >i4 is not supported"),
        (np.zeros(1, "M8[s]"), TypeError, "not supported"),
        (torch.zeros(2, dtype=torch.complex64).conj().imag, WireError, "resolve_neg"),
    ],
)
def test_tensors_that_cannot_travel(tensor: object, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said) as caught:
        wire.dumps({"batch": {"x": tensor}})
    if error is not NotImplementedError:
        assert "['batch']['x']" in str(caught.value)


def test_cycles_and_depth() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(WireError, match="contains itself"):
        wire.dumps(loop)
    loop.append(T)
    with pytest.raises(WireError, match="contains itself"):
        wire.dumps(loop)
    itself: dict[str, object] = {}
    itself["x"] = (itself, T)
    with pytest.raises(WireError, match="contains itself"):
        wire.dumps(itself)


@pytest.mark.parametrize("leaf", [T, 1, "x", [], {"a": T}])
@pytest.mark.parametrize("wrap", [lambda v: {"k": v}, lambda v: [v], lambda v: (v,)])
def test_whatever_can_be_written_can_be_read(leaf: object, wrap: Any) -> None:
    """The deepest object that dumps takes is one that loads takes."""
    obj, written = leaf, 0
    for _ in range(600):
        obj = wrap(obj)
        try:
            payload = wire.dumps(obj)
        except WireError:
            break
        written += 1
        wire.loads(payload)
    assert 100 < written < 600


def test_a_header_that_nobody_would_read() -> None:
    with pytest.raises(WireError, match="readers accept 67108864"):
        wire.dumps({"text": "x" * HEADER_MAX})


@pytest.mark.parametrize("metadata", [1, "x", [1]])
def test_metadata_is_a_dict(metadata: object) -> None:
    with pytest.raises(TypeError, match="metadata must be a dict"):
        wire.dumps({}, metadata)  # type: ignore[arg-type]


def test_metadata_must_have_a_json_form() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        wire.dumps({}, {"a": object()})


def test_an_object_that_changes_while_it_is_written() -> None:
    """Code that runs in the middle may do anything to the containers, but not break us."""

    class Tensor:
        def __init__(self, change: Any) -> None:
            self.change = change

        def __dlpack__(self, **kwargs: Any) -> object:
            self.change()
            return np.zeros(1).__dlpack__()

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

    items: list[object] = []
    items += [Tensor(items.clear), [1, 2], "x"]
    found = wire.loads(wire.dumps(items), as_="numpy")
    assert found[1:] == [[1, 2], "x"]
    names: dict[str, object] = {}
    names.update(a=Tensor(names.clear), b={"c": 1}, d="x")
    assert list(wire.loads(wire.dumps(names))) == ["a", "b", "d"]


def test_a_dict_whose_items_are_none() -> None:
    class Odd(dict[str, object]):
        def items(self) -> Any:
            return [1, 2]

    with pytest.raises(TypeError, match=r"the object: items\(\) must give pairs, not int"):
        wire.dumps(Odd(a=T))


def test_errors_carry_the_operation() -> None:
    for payload, operation in ((b"", "wire.loads"), (frame(dss='{"v": "DSSST1"'), "read JSON")):
        with pytest.raises(WireError) as caught:
            wire.loads(payload)
        assert caught.value.code == "ARL_ERR_WIRE"
        assert caught.value.operation == operation
        assert caught.value.rank is None
        assert isinstance(caught.value, ValueError)


@pytest.mark.skipif(
    residue.is_sanitized(core.__file__),
    reason="waived: the sanitizer's allocator aborts on such a size instead of failing",
)
def test_out_of_memory_is_a_memory_error() -> None:
    huge = torch.zeros(1).expand(2**40)
    with pytest.raises(MemoryError):
        wire.dumps({"x": huge})


@pytest.mark.parametrize(
    "call",
    [
        lambda: wire.dumps(),  # type: ignore[call-arg]
        lambda: wire.dumps(1, 2, 3),  # type: ignore[call-arg]
        lambda: wire.dumps(1, nonsense=2),  # type: ignore[call-arg]
        lambda: wire.loads(),  # type: ignore[call-arg]
        lambda: wire.loads(frame(), "numpy"),  # type: ignore[misc]
        lambda: wire.encode_byte_chunks(b"x", 1),  # type: ignore[call-arg]
        lambda: wire.encode_byte_chunks(b"x", "1", "request"),  # type: ignore[arg-type]
        lambda: wire.encode_byte_chunks(b"x", 1, 1),  # type: ignore[arg-type]
        lambda: wire.encode_byte_chunks(b"x", 1, "request", operation=1),  # type: ignore[arg-type]
    ],
)
def test_wrong_calls(call: Any) -> None:
    with pytest.raises(TypeError):
        call()
