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


def _square_sum(tensor: Any) -> float:
    if hasattr(tensor, "detach"):  # torch
        tensor = tensor.detach()
        norm = float(tensor.flatten().to(_double_of(tensor)).norm())
        return norm * norm
    values = np.asarray(tensor, dtype=np.float64)
    return float(np.vdot(values, values))


def _double_of(tensor: Any) -> Any:
    import torch

    return torch.complex128 if tensor.is_complex() else torch.float64


def weight_norm(params: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> float:
    """Return the global L2 norm of named tensors (torch or NumPy), in double precision.

    Tensors that share their memory, as tied weights do, count once. Two sides of a sync that
    hold the same weights have the same norm up to the order of summation; the checksums of
    `pull(verify=)` compare exactly.
    """
    total = 0.0
    seen = set()
    for _, tensor in params.items() if isinstance(params, Mapping) else params:
        if hasattr(tensor, "data_ptr"):
            key = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
        else:
            key = (tensor.__array_interface__["data"][0], tensor.shape, tensor.strides)
        if key not in seen:
            seen.add(key)
            total += _square_sum(tensor)
    return math.sqrt(total)
