# SPDX-License-Identifier: Apache-2.0
"""DSSST1 written slowly and plainly with json and struct, as the measure for the real codec.

Tensors are torch tensors or NumPy arrays; `loads` gives torch tensors. Frames are equal byte for
byte to what `arctic_rl_c.wire` writes, since both follow one order.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np
import torch

#: Name in the format, torch name. In the format's order, which puts the last ones first.
DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
RANK = {name: rank for rank, name in enumerate(DTYPES)}
WIRE_NAME = {torch_name: name for name, torch_name in DTYPES.items()}
EMPTY = "__dss_empty__"


class ReferenceError(ValueError):
    """What the real codec calls WireError."""


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def has_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(has_tensor(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(has_tensor(item) for item in value)
    return is_tensor(value)


def tensor_parts(tensor: Any) -> tuple[str, list[int], bytes]:
    """(dtype, shape, bytes) of a tensor of either library."""
    if isinstance(tensor, np.ndarray):
        return WIRE_NAME[tensor.dtype.name], list(tensor.shape), tensor.tobytes()
    dense = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    raw = dense.view(torch.uint8).numpy().tobytes() if dense.numel() else b""
    return WIRE_NAME[str(tensor.dtype).removeprefix("torch.")], list(tensor.shape), raw


def dumps(obj: Any, metadata: dict[str, Any] | None = None) -> bytes:
    tensors: dict[str, tuple[str, list[int], bytes]] = {}

    def node(value: Any, path: tuple[str, ...]) -> list[Any]:
        if is_tensor(value):
            key = ".".join(path) if path else "__root__"
            key += "~" if key in ("__metadata__", EMPTY) else ""
            if key in tensors:
                raise ReferenceError(f"{key} twice")
            dtype, shape, raw = tensor_parts(value)
            tensors[key] = (dtype, shape or [1], raw)
            return ["t", key] if shape else ["t", key, {"scalar": True}]
        if isinstance(value, dict) and has_tensor(value):
            if not all(isinstance(name, str) for name in value):
                raise ReferenceError("keys must be strings")
            return ["d", [[name, node(item, (*path, name))] for name, item in value.items()]]
        if isinstance(value, tuple) or (isinstance(value, list) and has_tensor(value)):
            tag = "u" if isinstance(value, tuple) else "l"
            return [tag, [node(item, (*path, str(i))) for i, item in enumerate(value)]]
        return ["j", value]

    tree = node(obj, ())
    extra = {"dss": json.dumps({"v": "DSSST1", "tree": tree})}
    if metadata:
        extra["op"] = json.dumps(metadata)
    return image(tensors or {EMPTY: ("U8", [1], b"\0")}, extra)


def image(tensors: dict[str, tuple[str, list[int], bytes]], metadata: dict[str, str]) -> bytes:
    """A safetensors file image."""
    header: dict[str, Any] = {"__metadata__": metadata}
    data = b""
    order = sorted(tensors, key=lambda name: (-RANK[tensors[name][0]], name.encode()))
    for name in order:
        dtype, shape, raw = tensors[name]
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def split(frame: bytes) -> tuple[dict[str, Any], bytes]:
    """(header, data) of a frame that is taken to be sound."""
    (length,) = struct.unpack_from("<Q", frame)
    return json.loads(frame[8 : 8 + length]), frame[8 + length :]


def loads(frame: bytes) -> Any:
    header, data = split(frame)
    dss = json.loads(header["__metadata__"]["dss"])
    assert dss["v"] == "DSSST1"

    def tensor(key: str, scalar: bool) -> torch.Tensor:
        entry = header[key]
        begin, end = entry["data_offsets"]
        dtype = getattr(torch, DTYPES[entry["dtype"]])
        shape = [] if scalar else entry["shape"]
        if not math.prod(shape):
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(data[begin:end]), dtype=dtype).reshape(shape)

    def build(node: list[Any]) -> Any:
        match node:
            case ["t", key]:
                return tensor(key, False)
            case ["t", key, {"scalar": True}]:
                return tensor(key, True)
            case ["d", items]:
                return {name: build(item) for name, item in items}
            case ["l", items]:
                return [build(item) for item in items]
            case ["u", items]:
                return tuple(build(item) for item in items)
            case ["j", value]:
                return value
        raise ReferenceError(f"node {node}")

    return build(dss["tree"])


def same(a: Any, b: Any) -> bool:
    """Equal in type, structure, dtype, shape and bytes; NaN equals NaN."""
    if is_tensor(a) or is_tensor(b):
        return is_tensor(a) and is_tensor(b) and tensor_parts(a) == tensor_parts(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b or (a != a and b != b)
