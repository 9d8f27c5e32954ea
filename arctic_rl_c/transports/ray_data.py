# SPDX-License-Identifier: Apache-2.0
"""Payloads and answers in a form that Ray's object store takes without copying them twice.

Ray moves NumPy arrays out of band: one copy into shared memory, none out of it. Torch tensors it
pickles byte by byte. So tensors travel as arrays, and come out as tensors over the shared memory,
which are only to be read.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np


class PackedTensor:
    """A torch tensor, dense or jagged, as arrays."""

    __slots__ = ("array", "dtype", "offsets")

    def __init__(self, array: np.ndarray[Any, Any], dtype: str, offsets: Any = None) -> None:
        self.array, self.dtype, self.offsets = array, dtype, offsets

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return int(self.array.nbytes)

    def __reduce__(self) -> Any:
        return PackedTensor, (self.array, self.dtype, self.offsets)


def pack(value: Any) -> Any:
    """Replace every torch tensor in nested dicts, lists and tuples.

    Tensors on a GPU are copied to the host. A tensor that occurs twice is packed once.
    """
    return _pack(value, {})


def unpack(value: Any) -> Any:
    """The reverse of `pack`: tensors that view the arrays."""
    with warnings.catch_warnings():
        # What comes out of the object store is read-only, and torch warns of that.
        warnings.simplefilter("ignore", UserWarning)
        return _unpack(value, {})


def _pack(value: Any, done: dict[int, Any]) -> Any:
    if isinstance(value, dict):
        return {key: _pack(item, done) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_pack(item, done) for item in value)
    if not _is_tensor(value):
        return value
    known = done.get(id(value))
    if known is None:
        if value.is_nested:
            known = _pack_dense(value.values())
            known.offsets = value.offsets().detach().cpu().numpy()
        else:
            known = _pack_dense(value)
        done[id(value)] = known
    return known


def _pack_dense(tensor: Any) -> PackedTensor:
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    host = tensor.detach().cpu().contiguous()
    try:
        return PackedTensor(host.numpy(), dtype)
    except TypeError:  # bfloat16 and the like: NumPy has no such type, the bytes do as well
        raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        return PackedTensor(host.view(raw[host.element_size()]).numpy(), dtype)


def _unpack(value: Any, done: dict[int, Any]) -> Any:
    if isinstance(value, dict):
        return {key: _unpack(item, done) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_unpack(item, done) for item in value)
    if not isinstance(value, PackedTensor):
        return value
    known = done.get(id(value))
    if known is None:
        import torch

        known = torch.from_numpy(value.array)
        wanted = getattr(torch, value.dtype)
        if known.dtype != wanted:
            known = known.view(wanted)
        if value.offsets is not None:
            offsets = torch.from_numpy(value.offsets)
            known = torch.nested.nested_tensor_from_jagged(known, offsets)
        done[id(value)] = known
    return known


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "is_nested") and hasattr(value, "detach")
