# SPDX-License-Identifier: Apache-2.0
"""Weight sync: what is said in Python beside `WeightSender` and `WeightReceiver`."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np


class Binding(NamedTuple):
    """Where a part of one of the sender's tensors goes.

    `tensor` receives `source.narrow(dim, start, tensor.shape[dim])` of a source that has `full`
    elements in dimension `dim` and the tensor's own sizes in the others.

        Binding(shard, dim=0, start=rank * rows, full=world * rows)     a tensor-parallel shard
        Binding(embedding, dim=0, start=0, full=151936)                 the source is padded

    A destination that is itself part of a larger tensor needs no Binding: a slice of the fused
    or padded parameter is a tensor like any other.
    """

    tensor: Any
    dim: int
    start: int
    full: int


def _square_sum(name: str, tensor: Any) -> tuple[Any, float]:
    """What tells the memory of a tensor from all other, and the sum of its squares."""
    if isinstance(tensor, np.ndarray):
        try:  # also what ml_dtypes adds, which NumPy calls void
            if tensor.dtype.kind in "SUOMm":
                raise TypeError
            values = np.asarray(tensor, "c16" if tensor.dtype.kind == "c" else "f8")
        except (TypeError, ValueError):
            raise TypeError(
                f"weight_norm: {name!r} is an array of {tensor.dtype}, not of numbers"
            ) from None
        key = (tensor.__array_interface__["data"][0], tensor.dtype, tensor.shape, tensor.strides)
        return key, float(np.vdot(values, values).real)
    if not hasattr(tensor, "data_ptr"):
        raise TypeError(
            f"weight_norm: {name!r} is {_of_type(tensor)}, wanted a torch tensor or a NumPy array"
        )
    import torch

    tensor = tensor.detach()
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise ValueError(
            f"weight_norm: {name!r} has the layout {tensor.layout} on device {tensor.device}, "
            "wanted a strided tensor with values"
        )
    double = torch.complex128 if tensor.is_complex() else torch.float64
    norm = float(tensor.flatten().to(double).norm())
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()), norm * norm


def _of_type(value: Any) -> str:
    return f"of type {type(value).__name__}"


def weight_norm(params: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> float:
    """Return the global L2 norm of named tensors (torch or NumPy), in double precision.

    Tensors that share their memory, as tied weights do, count once. Two sides of a sync that
    hold the same weights have the same norm up to the order of summation; the checksums of
    `pull(verify=)` compare exactly.

    Raises:
        TypeError: `params` are no names and tensors, or a tensor holds no numbers.
        ValueError: A tensor has no values (`meta`), or is sparse.
    """
    if not isinstance(params, Iterable):
        raise TypeError(
            f"weight_norm: params is {_of_type(params)}, wanted a mapping of names to tensors, "
            "or pairs of them"
        )
    squares = {}
    for item in params.items() if isinstance(params, Mapping) else params:
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise TypeError(
                f"weight_norm: an item of params is {_of_type(item)}, wanted pairs of a name and a "
                "tensor"
            )
        key, square = _square_sum(*item)
        squares[key] = square
    return math.sqrt(math.fsum(squares.values()))
