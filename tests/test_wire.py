# SPDX-License-Identifier: Apache-2.0
"""DSSST1 round trips: against a slow reference, against safetensors, and what is promised."""

from __future__ import annotations

import collections
import enum
import gc
import itertools
import json
import math
import mmap
import subprocess
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import arctic_rl_c._core as core
import wire_reference as reference
from arctic_rl_c import wire

# ---- generated trees -----------------------------------------------------------------------------

TORCH_DTYPES = [getattr(torch, name) for name in reference.DTYPES.values()]
NUMPY_DTYPES = [name for name in reference.DTYPES.values() if hasattr(np, name)] + ["bool"]


@st.composite
def torch_tensors(draw: st.DrawFn) -> torch.Tensor:
    """Of every dtype and of many layouts: sliced, transposed, expanded, empty, 0-d."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = draw(st.sampled_from(TORCH_DTYPES))
    count = math.prod(shape)
    size = dtype.itemsize
    start = draw(st.integers(0, 255))
    raw = bytearray((start + i) % 256 for i in range(max(1, count) * size))
    if dtype is torch.bool:
        raw = bytearray(value % 2 for value in raw)
    tensor = torch.frombuffer(raw, dtype=dtype)[:count].reshape(shape)
    how = draw(st.sampled_from(["dense", "transposed", "sliced", "expanded", "grad"]))
    if how == "transposed" and tensor.ndim >= 2:
        return tensor.transpose(0, -1)
    if how == "sliced" and tensor.ndim >= 1:
        return tensor[::2]
    if how == "expanded":
        return tensor[None].expand(3, *tensor.shape)
    if how == "grad" and dtype.is_floating_point and size > 1:
        return tensor.clone().requires_grad_()
    return tensor


@st.composite
def numpy_arrays(draw: st.DrawFn) -> np.ndarray:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = np.dtype(draw(st.sampled_from(NUMPY_DTYPES)))
    array = (np.arange(math.prod(shape)) + draw(st.integers(0, 9))).astype(dtype).reshape(shape)
    how = draw(st.sampled_from(["dense", "fortran", "reversed", "readonly"]))
    if how == "fortran":
        return np.asfortranarray(array)
    if how == "reversed" and array.ndim >= 1:
        return array[::-1]
    if how == "readonly":
        array.flags.writeable = False
    return array


#: Half surrogates too: Python strings hold them, and its json lets them pass.
text = st.text(st.characters(codec=None), max_size=5)
utf8_text = st.text(st.characters(codec="utf-8"), max_size=3)
plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([0, -1, 2**63 - 1, -(2**63), 2**63, 10**400, -0.0, 1e-6, 1e300, 5e-324])
    | text
)
json_values = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)
trees = st.recursive(
    json_values | torch_tensors() | numpy_arrays(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(utf8_text, inner, max_size=4)
    ),
    max_leaves=16,
)


def encoded(encode: Any, error: type[Exception], *args: Any) -> bytes | type[Exception]:
    try:
        return encode(*args)
    except error:
        return Exception


@given(trees, st.dictionaries(text, json_values, max_size=2) | st.none())
@example({"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}, None)
@example({"": {"": torch.zeros(1)}, ".": 1}, None)
@example([(), [], {}, ({},), [torch.tensor(1)]], None)
def test_frames_equal_the_reference(obj: Any, metadata: dict[str, Any] | None) -> None:
    ours = encoded(wire.dumps, wire.WireError, obj, metadata)
    theirs = encoded(reference.dumps, reference.ReferenceError, obj, metadata)
    assert ours == theirs
    if isinstance(ours, bytes):
        assert reference.same(wire.loads(ours), reference.loads(ours))
        assert reference.same(wire.read_metadata(ours), json.loads(json.dumps(metadata or {})))


@given(trees)
def test_safetensors_reads_our_frames(obj: Any) -> None:
    ours = encoded(wire.dumps, wire.WireError, obj)
    if not isinstance(ours, bytes):
        return
    header, _ = reference.split(ours)
    names = [name for name in header if name != "__metadata__"]
    tensors = safetensors.torch.load(ours)
    assert sorted(tensors) == sorted(names)
    decoded = wire.loads(ours)
    by_bytes = sorted(reference.tensor_parts(t)[2] for t in leaves(decoded))
    if names != [reference.EMPTY]:
        assert by_bytes == sorted(reference.tensor_parts(t)[2] for t in tensors.values())


def leaves(value: Any) -> list[Any]:
    if reference.is_tensor(value):
        return [value]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return []


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter(
            lambda name: name != "__metadata__"
        ),
        torch_tensors(),
        min_size=1,
        max_size=6,
    )
)
def test_the_data_is_what_safetensors_writes(tensors: dict[str, torch.Tensor]) -> None:
    """Same order, offsets and bytes; only the metadata is ours."""
    if "__dss_empty__" in tensors:
        return
    dense = {
        name: t.detach().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()
    }
    theirs = reference.split(
        safetensors.torch.save({n: t.reshape(t.shape or (1,)) for n, t in dense.items()})
    )
    ours = reference.split(wire.dumps(tensors))
    del ours[0]["__metadata__"]
    assert list(ours[0].items()) == list(theirs[0].items())
    assert ours[1] == theirs[1]


@given(json_values)
def test_values_equal_the_json_module(value: Any) -> None:
    frame = wire.dumps([value])
    inner = json.loads(reference.split(frame)[0]["__metadata__"]["dss"])
    assert reference.same(inner["tree"], ["j", json.loads(json.dumps([value]))])
    assert reference.split(frame)[0]["__metadata__"]["dss"] == json.dumps(
        {"v": "DSSST1", "tree": ["j", [value]]}
    )
    assert reference.same(wire.loads(frame), json.loads(json.dumps([value])))


# ---- what travels as JSON ------------------------------------------------------------------------


class Color(enum.IntEnum):
    RED = 1


class Name(str):
    __slots__ = ()


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [
        {2: "a", 2.5: "b", True: "c", None: "d"},
        Color.RED,
        {"a": Color.RED, Name("b"): Name("c")},
        collections.OrderedDict([("b", 1), ("a", 2)]),
        np.float64(1.5),
        {"x": [np.float64(math.inf)]},
        [Point(1, 2)],
        (1, [2, (3,)]),
        {"del": "\x7f", "\x7f": '\x00\x1f"\\/'},
        "\ud800",
        "\U0001f600é",
    ],
)
def test_whatever_json_takes(value: Any) -> None:
    found = wire.loads(wire.dumps({"v": value}))
    assert reference.same(found, json.loads(json.dumps({"v": value})))
    assert (
        reference.split(wire.dumps({"v": value}))[0]
        == reference.split(reference.dumps({"v": value}))[0]
    )


def test_an_ordered_dict_keeps_its_own_order() -> None:
    ordered = collections.OrderedDict(a=torch.tensor(1), b=2)
    ordered.move_to_end("a")
    assert list(wire.loads(wire.dumps(ordered))) == ["b", "a"]
    assert list(wire.loads(wire.dumps(collections.OrderedDict(ordered, a=0)))) == ["b", "a"]


def test_tuples_stay_tuples_only_where_the_walk_comes() -> None:
    obj = {"t": (torch.tensor(1), (1, 2)), "j": {"t": (1, 2)}, "u": (1, 2)}
    found = wire.loads(wire.dumps(obj))
    assert found["t"][1] == (1, 2)
    assert found["u"] == (1, 2)
    assert found["j"] == {"t": [1, 2]}
    assert wire.loads(wire.dumps((1, (2,)))) == (1, (2,))


def test_equal_keys_share_one_object() -> None:
    found = wire.loads(wire.dumps([{"token_ids": 1}, {"token_ids": 2}]))
    first, second = (next(iter(item)) for item in found)
    assert first is second


def test_nothing_is_written_into_the_object() -> None:
    obj = {"batch": {"x": torch.arange(3)}, "meta": [1, (2, 3)]}
    wire.dumps(obj, {"a": 1})
    assert reference.same(obj, {"batch": {"x": torch.arange(3)}, "meta": [1, (2, 3)]})


# ---- tensors -------------------------------------------------------------------------------------


def test_reserved_names_are_stored_under_another() -> None:
    """Readers take these two for the metadata and for the placeholder."""
    obj = {
        "__metadata__": torch.tensor([1]),
        "__dss_empty__": torch.tensor([2]),
        "__root__": torch.tensor([3]),
    }
    frame = wire.dumps(obj)
    assert reference.same(wire.loads(frame), obj)
    header, _ = reference.split(frame)
    assert sorted(header) == ["__dss_empty__~", "__metadata__", "__metadata__~", "__root__"]
    assert set(header["__metadata__"]) == {"dss"}
    safetensors.torch.load(frame)


def test_overlapping_views_are_stored_in_full() -> None:
    base = torch.arange(10)
    obj = {"a": base[:6], "b": base[2:], "c": base}
    assert reference.same(wire.loads(wire.dumps(obj)), obj)


def test_large_tensors_of_every_layout() -> None:
    """Large enough to be split over threads, in pieces that end inside rows."""
    base = torch.arange(3 * 700 * 1001, dtype=torch.int32).reshape(3, 700, 1001)
    obj = {
        "dense": base,
        "transposed": base.transpose(0, 2),
        "columns": base[:, :, ::3],
        "reversed": base.numpy()[::-1, :, ::-1],
        "expanded": base[0, :, :1].expand(700, 2000),
        "small": torch.arange(5, dtype=torch.int16),
    }
    frame = wire.dumps(obj)
    found = wire.loads(frame)
    for name, tensor in obj.items():
        assert np.array_equal(found[name].numpy(), np.asarray(tensor)), name
    assert frame == reference.dumps(obj)


def test_torch_and_numpy_give_the_same_frame() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    assert wire.dumps({"x": array}) == wire.dumps({"x": torch.from_numpy(array)})


def test_anything_with_dlpack() -> None:
    class Wrapped:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def __dlpack__(self, **kwargs: Any) -> object:
            return self.array.__dlpack__(**kwargs)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.array.__dlpack_device__()

    array = np.arange(6).reshape(2, 3)
    assert wire.dumps([Wrapped(array)]) == wire.dumps([array])


def test_as_numpy_and_as_torch() -> None:
    frame = wire.dumps({"x": torch.arange(4), "s": torch.tensor(1.5)})
    arrays = wire.loads(frame, as_="numpy")
    assert isinstance(arrays["x"], np.ndarray)
    assert arrays["s"].shape == ()
    assert arrays["s"] == 1.5
    assert isinstance(wire.loads(frame, as_="torch")["x"], torch.Tensor)
    assert isinstance(wire.loads(frame)["x"], torch.Tensor)


@pytest.mark.parametrize(("as_", "library"), [("auto", "numpy"), ("torch", "torch")])
def test_without_torch_in_the_process(as_: str, library: str) -> None:
    code = (
        "import sys, arctic_rl_c.wire as wire, numpy as np\n"
        "assert 'torch' not in sys.modules\n"
        f"x = wire.loads(wire.dumps({{'x': np.arange(3)}}), as_={as_!r})['x']\n"
        "print(type(x).__module__, x.sum())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout.split()[:2] == [library, "3" if library == "numpy" else "tensor(3)"], (
        run.stderr
    )


def test_tensors_own_their_memory() -> None:
    frame = bytearray(wire.dumps({"x": torch.arange(4)}))
    found = wire.loads(frame)["x"]
    frame[-32:] = bytes(32)
    assert torch.equal(found, torch.arange(4))
    found += 1


# ---- views ---------------------------------------------------------------------------------------


def test_views_of_a_writable_buffer() -> None:
    frame = bytearray(wire.dumps({"x": torch.arange(4), "b": torch.ones(2, dtype=torch.bfloat16)}))
    found = wire.loads(frame, copy=False)
    frame[-36:-28] = (7).to_bytes(8, "little")
    assert found["x"].tolist() == [7, 1, 2, 3]
    assert found["b"].tolist() == [1, 1]
    with pytest.raises(BufferError):
        frame.append(0)
    del found
    frame.append(0)


def test_views_of_bytes_are_read_only() -> None:
    frame = wire.dumps({"x": np.arange(4), "s": np.array(2, np.float32)})
    found = wire.loads(frame, as_="numpy", copy=False)
    assert found["x"].tolist() == [0, 1, 2, 3]
    assert found["s"].shape == ()
    assert not found["x"].flags.writeable
    assert found["x"].flags.aligned
    with pytest.raises(ValueError, match="read-only"):
        found["x"][0] = 1


def test_views_keep_the_frame_alive() -> None:
    class Frame(bytearray):
        pass

    frame = Frame(wire.dumps({"x": np.arange(4)}))
    gone = weakref.ref(frame)
    found = wire.loads(frame, as_="numpy", copy=False)
    del frame
    gc.collect()
    assert gone() is not None
    assert found["x"].sum() == 6
    del found
    gc.collect()
    assert gone() is None


def test_a_view_that_would_not_be_aligned_is_a_copy() -> None:
    source = wire.dumps({"x": np.arange(4), "b": np.arange(3, dtype=np.uint8)})
    shifted = bytearray(b"?" + source)
    view = memoryview(shifted)[1:]
    found = wire.loads(view, as_="numpy", copy=False)
    assert found["x"].flags.aligned
    assert found["x"].tolist() == [0, 1, 2, 3]
    shifted[-3] = 9
    assert found["b"].tolist() == [9, 1, 2]


def test_torch_views_of_read_only_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="writable buffer for torch"):
        wire.loads(wire.dumps({"x": torch.arange(4)}), copy=False)


def test_any_contiguous_buffer_will_do(tmp_path: Any) -> None:
    frame = wire.dumps({"x": np.arange(4)})
    path = tmp_path / "frame"
    path.write_bytes(frame)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for source in (bytearray(frame), memoryview(frame), np.frombuffer(frame, np.uint8), mapped):
            assert wire.loads(source, as_="numpy")["x"].tolist() == [0, 1, 2, 3]


# ---- tolerance -----------------------------------------------------------------------------------


def rewritten(header: dict[str, Any], data: bytes, **how: Any) -> bytes:
    text = json.dumps(header, **how).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize("order", list(itertools.permutations(["__metadata__", "a", "b"])))
def test_the_order_of_the_header_does_not_matter(order: tuple[str, ...]) -> None:
    obj = {"a": torch.tensor([1, 2]), "b": torch.tensor([3.5])}
    header, data = reference.split(wire.dumps(obj))
    entries = {
        name: dict(reversed(header[name].items())) if name != "__metadata__" else header[name]
        for name in order
    }
    for how in ({}, {"indent": 2}, {"separators": (" , ", " : ")}):
        assert reference.same(wire.loads(rewritten(entries, data, **how)), obj)


def test_the_order_of_the_data_does_not_matter() -> None:
    obj = {"a": torch.tensor([1, 2]), "b": torch.tensor([3.5])}
    header, data = reference.split(wire.dumps(obj))
    header["b"]["data_offsets"], header["a"]["data_offsets"] = [0, 4], [4, 20]
    assert reference.same(wire.loads(rewritten(header, data[16:] + data[:16])), obj)


@pytest.mark.parametrize(
    "dss",
    [
        '{"tree": ["d", [["x", ["t", "x"]]]], "v": "DSSST1"}',
        '\n{ "v" :"DSSST1",\t"tree":["d",[["x",["t","x"]]]] }\n',
        '{"v": "DSSST1", "new": {"tree": [1, {"v": 2}]}, "tree": ["d", [["x", ["t", "x"]]]]}',
        '{"v": "DSSST1", "tree": ["d", [["x", ["t", "x"]]]], "new": [{}]}',
        '{"new": 1, "tree": ["d", [["x", ["t", "x"]]]], "new": 2, "v": "DSSST1"}',
        '{"\\u0076": "DSSST\\u0031", "tree": ["\\u0064", [["\\u0078", ["\\u0074", "\\u0078"]]]]}',
        '{"v": "DSSST1", "tree": ["d", [["x", ["t", "x", {}]]]]}',
        '{"v": "DSSST1", "tree": ["d", [["x", ["t", "x", {"new": [1], "scalar": false}]]]]}',
    ],
)
def test_the_tree_may_be_written_in_many_ways(dss: str) -> None:
    frame = reference.image({"x": ("I64", [2], bytes(16))}, {"other": "text", "dss": dss})
    assert reference.same(wire.loads(frame), {"x": torch.zeros(2, dtype=torch.int64)})


def test_entries_may_have_fields_of_the_future() -> None:
    header, data = reference.split(wire.dumps({"x": torch.zeros(2)}))
    header["x"]["checksum"] = {"algorithm": ["crc", 32]}
    assert torch.equal(wire.loads(rewritten(header, data))["x"], torch.zeros(2))


def test_tensors_that_the_tree_does_not_name_are_left_out() -> None:
    frame = reference.image(
        {"x": ("I64", [1], bytes(8)), "y": ("U8", [3], b"abc")},
        {"dss": '{"v": "DSSST1", "tree": ["t", "x"]}'},
    )
    assert wire.loads(frame).tolist() == [0]


def test_a_placeholder_that_is_named_is_a_tensor() -> None:
    frame = reference.image(
        {reference.EMPTY: ("U8", [2], b"\5\6")},
        {"dss": '{"v": "DSSST1", "tree": ["d", [["__dss_empty__", ["t", "__dss_empty__"]]]]}'},
    )
    assert wire.loads(frame)["__dss_empty__"].tolist() == [5, 6]


# ---- threads -------------------------------------------------------------------------------------


def test_calls_from_many_threads_at_once() -> None:
    obj = {"x": torch.arange(400_000), "meta": {"n": [1, 2, 3]}}
    frame = wire.dumps(obj)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(10):
                assert wire.dumps(obj) == frame
                assert torch.equal(wire.loads(frame)["x"], obj["x"])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


def test_the_module_and_the_functions_are_one() -> None:
    for name in wire.__all__:
        if name != "WireError":
            assert getattr(wire, name) is getattr(core, f"wire_{name}")
