# SPDX-License-Identifier: Apache-2.0
"""Messages between the server's own processes: a typed tree, tensors beside it, no pickle.

A frame is a fixed prefix (magic, version, two lengths), a JSON tree, and a body of buffers at
64-byte steps. Unlike a DSSST1 frame, which other programs speak, this one keeps tuples, bytes,
integer keys, NumPy arrays and jagged tensors as they are, sends tensors without a copy into the
frame, and gives them back as views of the received body.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

_PREFIX = struct.Struct("<4sIQQ")
_MAGIC, _VERSION, _ALIGN = b"ARLF", 1, 64
PREFIX_SIZE = _PREFIX.size
_TAG = "$"


class FrameError(ValueError):
    """Bytes that are no frame, or an object that has no form in one."""


def encode(value: Any) -> list[memoryview]:
    """A value as the buffers of one frame, in order; tensors are not copied.

    Args:
        value: None, bool, int, float, str, bytes, list, tuple, dict with such keys, NumPy
            array or scalar, torch tensor, also a jagged one (on a GPU: copied to the host).

    Raises:
        FrameError: Something else was found; says where.
    """
    buffers: list[memoryview] = []
    tree = _encode(value, buffers, "value")
    header = json.dumps(tree, separators=(",", ":")).encode()
    parts, body = [], 0
    for buffer in buffers:
        gap = -body % _ALIGN
        if gap:
            parts.append(memoryview(bytes(gap)))
        parts.append(buffer)
        body += gap + buffer.nbytes
    prefix = _PREFIX.pack(_MAGIC, _VERSION, len(header), body)
    return [memoryview(prefix + header), *parts]


def parse_prefix(data: bytes | bytearray | memoryview) -> tuple[int, int]:
    """Lengths of the header and the body that follow a prefix."""
    magic, version, header, body = _PREFIX.unpack(data)
    if magic != _MAGIC or version != _VERSION:
        raise FrameError(f"not a frame of version {_VERSION}: {bytes(data[:8])!r}")
    return header, body


def decode(header: bytes | bytearray | memoryview, body: np.ndarray[Any, Any]) -> Any:
    """The value of a frame; its tensors are views of `body` (uint8) and keep it alive."""
    return _decode(json.loads(bytes(header)), _Reader(body))


class _Reader:
    """Hands out the buffers of a body in order."""

    def __init__(self, body: np.ndarray[Any, Any]) -> None:
        self._body, self._offset = body, 0

    def take(self, size: int) -> np.ndarray[Any, Any]:
        begin = self._offset + -self._offset % _ALIGN
        if size > len(self._body) - begin:
            raise FrameError(f"a buffer of {size} bytes at {begin} exceeds the frame's body")
        self._offset = begin + size
        return self._body[begin : self._offset]


def _encode(value: Any, buffers: list[memoryview], where: str) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_encode(v, buffers, where) for v in value]
    if isinstance(value, dict):
        if all(type(k) is str and k != _TAG for k in value):
            return {k: _encode(v, buffers, f"{where}.{k}") for k, v in value.items()}
        pairs = [
            [_encode(k, buffers, where), _encode(v, buffers, f"{where}[{k!r}]")]
            for k, v in value.items()
        ]
        return {_TAG: "dict", "items": pairs}
    if isinstance(value, tuple | list):
        items = [_encode(v, buffers, where) for v in value]
        return {_TAG: "tuple", "items": items} if isinstance(value, tuple) else items
    if isinstance(value, bytes | bytearray | memoryview):
        buffers.append(memoryview(value).cast("B"))
        return {_TAG: "bytes", "size": buffers[-1].nbytes}
    if isinstance(value, np.generic):
        return _encode(value.item(), buffers, where)
    if isinstance(value, np.ndarray):
        return _encode_array(value, buffers, where)
    if hasattr(value, "untyped_storage"):
        return _encode_tensor(value, buffers, where)
    if isinstance(value, str):  # subclasses, such as enumerations, by their value
        return str.__str__(value)
    for base in (int, float):
        if isinstance(value, base):
            return base(value)
    raise FrameError(f"{where} is a {kind.__module__}.{kind.__qualname__}, which cannot be sent")


def _encode_array(value: np.ndarray[Any, Any], buffers: list[memoryview], where: str) -> Any:
    if value.dtype.hasobject or value.dtype.names is not None:
        raise FrameError(f"{where} is an array of {value.dtype}, which cannot be sent")
    flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    buffers.append(flat.data)
    return {
        _TAG: "array",
        "dtype": value.dtype.str,
        "shape": list(value.shape),
        "size": flat.nbytes,
    }


def _encode_tensor(value: Any, buffers: list[memoryview], where: str) -> Any:
    import torch

    if value.is_nested and value.layout is torch.jagged and value.is_contiguous():
        return {
            _TAG: "jagged",
            "values": _encode_tensor(value.values(), buffers, where),
            "offsets": _encode_tensor(value.offsets(), buffers, where),
        }
    if value.is_nested or value.is_sparse or value.is_quantized:
        raise FrameError(f"{where} is a tensor of layout {value.layout}, which cannot be sent")
    flat = value.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    buffers.append(flat.numpy().data)
    return {
        _TAG: "tensor",
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "size": flat.numel(),
    }


def _decode(node: Any, reader: _Reader) -> Any:
    if isinstance(node, list):
        return [_decode(v, reader) for v in node]
    if not isinstance(node, dict):
        return node
    tag = node.get(_TAG)
    if tag is None:
        return {k: _decode(v, reader) for k, v in node.items()}
    if tag == "tuple":
        return tuple(_decode(v, reader) for v in node["items"])
    if tag == "dict":
        return {_decode(k, reader): _decode(v, reader) for k, v in node["items"]}
    if tag == "bytes":
        return reader.take(node["size"]).tobytes()
    if tag == "array":
        return reader.take(node["size"]).view(np.dtype(node["dtype"])).reshape(node["shape"])
    if tag == "tensor":
        import torch

        dtype = getattr(torch, node["dtype"])
        return torch.from_numpy(reader.take(node["size"])).view(dtype).reshape(node["shape"])
    if tag == "jagged":
        import torch

        values, offsets = (_decode(node[part], reader) for part in ("values", "offsets"))
        return torch.nested.nested_tensor_from_jagged(values, offsets)
    raise FrameError(f"a frame holds an unknown node {tag!r}")


def total_bytes(buffers: Sequence[memoryview]) -> int:
    """Bytes of an encoded frame."""
    return sum(b.nbytes for b in buffers)
