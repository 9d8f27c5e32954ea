# SPDX-License-Identifier: Apache-2.0
"""How tensors are read, seen through `left_pad`: every dtype by name, views, DLPack as it is."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from arctic_rl_c import PayloadError, left_pad

# ---- a DLPack producer that can be told to do anything -------------------------------------------


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Managed(ctypes.Structure):
    _fields_ = [("tensor", DLTensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    ]


capsule_new = ctypes.pythonapi.PyCapsule_New
capsule_new.restype = ctypes.py_object
capsule_new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Producer:
    """Exports `array` with some fields of the DLPack struct replaced."""

    def __init__(
        self,
        array: np.ndarray,
        *,
        version: tuple[int, int] | None = None,
        strides: bool = True,
        flags: int = 0,
        **fields: int,
    ) -> None:
        self.array = array
        shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        steps = [s // array.itemsize for s in array.strides]
        code = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}[array.dtype.kind]
        tensor = DLTensor(
            data=array.ctypes.data,
            device_type=1,
            ndim=array.ndim,
            code=code,
            bits=8 * array.itemsize,
            lanes=1,
            shape=shape,
            strides=(ctypes.c_int64 * array.ndim)(*steps) if strides else None,
        )
        for name, value in fields.items():
            setattr(tensor, name, value)
        self.kept = shape
        if version is None:
            self.name, self.managed = b"dltensor", Managed(tensor=tensor)
        else:
            self.name = b"dltensor_versioned"
            self.managed = ManagedVersioned(
                major=version[0], minor=version[1], flags=flags, tensor=tensor
            )

    def __dlpack__(self, **kwargs: Any) -> object:
        return capsule_new(ctypes.addressof(self.managed), self.name, None)


ARRAY = np.arange(12.0).reshape(3, 4)


def one_column_more(tensor: Any, width: int) -> np.ndarray:
    return np.asarray(left_pad(tensor, width + 1))[:, 1:]


# ---- DLPack --------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [None, (1, 0), (1, 3)], ids=str)
def test_byte_offsets_count(version: tuple[int, int] | None) -> None:
    """The first element is data plus byte_offset, whichever of the two a producer uses."""
    block = np.arange(40.0)
    view = block[8:20].reshape(3, 4)
    producer = Producer(view, version=version, data=block.ctypes.data, byte_offset=64)
    assert np.array_equal(one_column_more(producer, 4), view)


def test_missing_strides_mean_dense() -> None:
    assert np.array_equal(one_column_more(Producer(ARRAY, strides=False), 4), ARRAY)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_sliced_views_from_real_producers(library: str) -> None:
    whole = np.arange(60).reshape(6, 10)
    source = whole if library == "numpy" else torch.from_numpy(whole.copy())

    class Export:
        def __dlpack__(self, **kwargs: Any) -> object:
            return source[2:5, 3:7].__dlpack__(**kwargs)

    assert np.array_equal(one_column_more(Export(), 4), whole[2:5, 3:7])


def test_a_producer_older_than_versions() -> None:
    class Old:
        def __dlpack__(self, stream: object = None) -> object:
            return ARRAY.__dlpack__()

    assert np.array_equal(one_column_more(Old(), 4), ARRAY)


def test_read_only_exports_are_read() -> None:
    assert np.array_equal(one_column_more(Producer(ARRAY, version=(1, 0), flags=1), 4), ARRAY)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"version": (2, 0)}, "DLPack version 2.0, only 1.x"),
        ({"code": 3}, r"DLPack dtype \(code 3, 64 bits, 1 lanes\) is not supported"),
        ({"lanes": 4}, r"\(code 2, 64 bits, 4 lanes\)"),
        ({"bits": 80}, "80 bits"),
        ({"ndim": 9}, "9 dimensions, at most 8"),
        ({"ndim": -1}, "-1 dimensions"),
        ({"device_type": 10}, "another device"),
        ({"device_type": 2, "device_id": 3}, "a CUDA device 3"),
        ({"data": 0}, "without memory behind it"),
    ],
)
def test_exports_that_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(PayloadError, match=f"tensor: .*{words}"):
        left_pad(Producer(ARRAY, **fields), 5)


def test_negative_sizes_are_refused() -> None:
    producer = Producer(ARRAY)
    producer.kept[0] = -1
    with pytest.raises(PayloadError, match="tensor: its sizes are negative"):
        left_pad(producer, 5)


@pytest.mark.parametrize("stride", [2**60, -(2**60), 2**61, 2**63 - 1, -(2**63)])
def test_strides_that_no_memory_could_hold(stride: int) -> None:
    producer = Producer(ARRAY)
    producer.managed.tensor.strides[0] = stride
    with pytest.raises(PayloadError, match="tensor: its DLPack strides reach beyond the address"):
        left_pad(producer, 5)


@pytest.mark.parametrize("stride", [2**63 - 1, -(2**63)])
def test_the_stride_of_one_row_means_nothing(stride: int) -> None:
    producer = Producer(ARRAY[:1])
    producer.managed.tensor.strides[0] = stride
    assert np.array_equal(one_column_more(producer, 4), ARRAY[:1])


def test_dense_sizes_that_overflow() -> None:
    producer = Producer(ARRAY, strides=False)
    producer.kept[0], producer.kept[1] = 2**62, 2**62
    with pytest.raises(PayloadError, match="tensor: its sizes are negative or their product"):
        left_pad(producer, 5)


def test_what_is_no_capsule() -> None:
    class Wrong:
        def __dlpack__(self, **kwargs: Any) -> object:
            return 5

    with pytest.raises(PayloadError, match=r"tensor: Wrong.__dlpack__ returned no DLPack capsule"):
        left_pad(Wrong(), 5)


def test_errors_of_the_producer_pass_through() -> None:
    class Broken:
        def __dlpack__(self, **kwargs: Any) -> object:
            raise BufferError("no export today")

    with pytest.raises(BufferError, match="no export today"):
        left_pad(Broken(), 5)


def test_no_bfloat16_in_numpy() -> None:
    """DLPack in means NumPy out, which has no such dtype: said, not guessed."""

    class Export:
        def __dlpack__(self, **kwargs: Any) -> object:
            return torch.ones(2, 2, dtype=torch.bfloat16).__dlpack__(**kwargs)

    with pytest.raises(TypeError, match="NumPy has no bfloat16; pass torch tensors"):
        left_pad(Export(), 3)
    assert left_pad(torch.ones(2, 2, dtype=torch.bfloat16), 3).dtype == torch.bfloat16


# ---- dtypes by name ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "name"),
    [
        (np.zeros((2, 2), "datetime64[s]"), r"datetime64\[s\]"),
        (np.zeros((2, 2), object), "object"),
        (np.zeros((2, 2), "U3"), "<U3"),
        (np.zeros((2, 2), np.longdouble), "float128|longdouble"),
        (np.zeros((2, 2), ">i8"), ">i8"),
        (np.zeros((2, 2), [("a", int)]), "a"),
    ],
    ids=["datetime", "object", "text", "long double", "big endian", "record"],
)
def test_numpy_dtypes_that_are_refused(array: np.ndarray, name: str) -> None:
    with pytest.raises(PayloadError, match=f"tensor: dtype .*({name}).* is not supported"):
        left_pad(array, 3)


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
def test_torch_dtypes_that_are_refused() -> None:
    tensor = torch.zeros(2, 2, dtype=torch.complex32)
    with pytest.raises(PayloadError, match=r"tensor: dtype torch.complex32 is not supported"):
        left_pad(tensor, 3)


# ---- torch ---------------------------------------------------------------------------------------


def test_lazy_views_are_refused() -> None:
    """Their memory holds the values before conj() or negation."""
    tensor = torch.tensor([[1 + 2j]])
    for lazy, cure in [(tensor.conj(), "resolve_conj"), (tensor.conj().imag, "resolve_neg")]:
        with pytest.raises(PayloadError, match=rf"tensor: is a lazy view.*{cure}\(\)"):
            left_pad(lazy, 2)
        resolved = getattr(lazy, cure)()
        assert left_pad(resolved, 2)[0, 1] == resolved[0, 0]


def test_tensors_that_are_not_here() -> None:
    with pytest.raises(PayloadError, match=r"tensor: is on another device 0; move it to the CPU"):
        left_pad(torch.zeros(2, 2, device="meta"), 3)


def test_layouts_that_are_not_dense() -> None:
    nested = torch.nested.nested_tensor_from_jagged(torch.ones(2), torch.tensor([0, 2]))
    with pytest.raises(PayloadError, match=r"tensor: layout is torch.jagged"):
        left_pad(nested, 3)
    with pytest.raises(PayloadError, match=r"tensor: layout is torch.sparse_coo"):
        left_pad(torch.ones(2, 2).to_sparse(), 3)


def test_subclasses_and_parameters() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    assert left_pad(parameter, 3).tolist() == [[0, 1, 1]] * 2
    array = np.ones((2, 2)).view(type("Mine", (np.ndarray,), {}))
    assert left_pad(array, 3).tolist() == [[0, 1, 1]] * 2


def test_a_tensor_without_storage() -> None:
    class Empty(torch.Tensor):
        @staticmethod
        def __new__(cls) -> Empty:
            return torch.Tensor._make_wrapper_subclass(cls, (2, 2))

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            raise NotImplementedError(func)

    with pytest.raises((PayloadError, RuntimeError), match=r"without memory|data_ptr|storage"):
        left_pad(Empty(), 3)


# ---- things that are no tensors ------------------------------------------------------------------


@pytest.mark.parametrize("thing", [[[1, 2]], None, 5, "x", {"a": 1}, b"abc"], ids=repr)
def test_things_that_are_no_tensors(thing: object) -> None:
    with pytest.raises(
        PayloadError, match=rf"tensor: expected a torch .* got {type(thing).__name__}"
    ):
        left_pad(thing, 3)


def test_too_many_dimensions() -> None:
    for tensor in (np.zeros((1,) * 9), torch.zeros((1,) * 9)):
        with pytest.raises(PayloadError, match="tensor: has 9 dimensions, at most 8"):
            left_pad(tensor, 3)
