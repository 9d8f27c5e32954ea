# SPDX-License-Identifier: Apache-2.0
"""Generated batches for the property tests, and the slow way to do what the kernels do.

An element is a `bytes` of the dtype's size: the kernels must not care what it means. The
references work on lists of elements, one at a time, and share no code with the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

# Every dtype that a tensor may have, by the name both libraries know, where both know it.
DTYPE_NAMES = [
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "complex64",
    "complex128",
]
TORCH_DTYPES = {n: getattr(torch, n) for n in DTYPE_NAMES if hasattr(torch, n)}
NUMPY_DTYPES = {n: np.dtype(n) for n in DTYPE_NAMES if n in np.sctypeDict}

Element = bytes


# ---- elements and tensors -----------------------------------------------------------------------


def elements_of(tensor: Any) -> list[Element]:
    """The elements of a torch tensor or NumPy array in row-major order."""
    if isinstance(tensor, torch.Tensor):
        size = tensor.element_size()
        data = bytes(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())
    else:
        size = tensor.dtype.itemsize
        data = np.ascontiguousarray(tensor).tobytes()
    return [data[i : i + size] for i in range(0, len(data), size)]


def rows_of(tensor: Any) -> list[list[Element]]:
    """The same, row by row, of a matrix."""
    flat = elements_of(tensor)
    rows, width = tensor.shape
    return [flat[i * width : (i + 1) * width] for i in range(rows)]


def torch_from(flat: list[Element], name: str, shape: tuple[int, ...]) -> torch.Tensor:
    data = np.frombuffer(b"".join(flat), np.uint8).copy()
    dtype = TORCH_DTYPES[name]
    if not flat:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(data).view(dtype).reshape(shape)


def numpy_from(flat: list[Element], name: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(b"".join(flat), NUMPY_DTYPES[name]).copy().reshape(shape)


def itemsize(name: str) -> int:
    return TORCH_DTYPES[name].itemsize


class OnlyDLPack:
    """An array that can do nothing but export itself."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **kwargs: Any) -> object:
        return self._array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


# ---- batches ------------------------------------------------------------------------------------


@dataclass
class Rows:
    """A jagged batch in the plainest form there is."""

    name: str  # of the dtype
    rows: list[list[Element]]
    prompts: list[int]
    responses: list[int]

    @property
    def flat(self) -> list[Element]:
        return [element for row in self.rows for element in row]

    @property
    def offsets(self) -> list[int]:
        offsets = [0]
        for row in self.rows:
            offsets.append(offsets[-1] + len(row))
        return offsets


@st.composite
def element(draw: st.DrawFn, name: str) -> Element:
    if name == "bool":  # any other byte is no bool
        return draw(st.sampled_from([b"\0", b"\1"]))
    return draw(st.binary(min_size=itemsize(name), max_size=itemsize(name)))


@st.composite
def rows(draw: st.DrawFn, names: list[str], max_rows: int = 5, max_length: int = 6) -> Rows:
    name = draw(st.sampled_from(names))
    length = st.integers(0, max_length)
    pairs = draw(st.lists(st.tuples(length, length), max_size=max_rows))
    drawn = [draw(st.lists(element(name), min_size=p + r, max_size=p + r)) for p, r in pairs]
    return Rows(name, drawn, [p for p, _ in pairs], [r for _, r in pairs])


# ---- references ---------------------------------------------------------------------------------


def reference_pad(
    batch: Rows, prompt_width: int, response_width: int, fill: Element, truncate: bool = False
) -> list[list[Element]]:
    out = []
    for row, p in zip(batch.rows, batch.prompts, strict=True):
        prompt, response = row[:p], row[p:]
        if truncate:
            while len(prompt) > prompt_width:
                prompt = prompt[1:]
            while len(response) > response_width:
                response = response[:-1]
        while len(prompt) < prompt_width:
            prompt = [fill, *prompt]
        while len(response) < response_width:
            response = [*response, fill]
        out.append(prompt + response)
    return out


def reference_mask(batch: Rows, prompt_width: int, response_width: int) -> list[list[int]]:
    out = []
    for p, r in zip(batch.prompts, batch.responses, strict=True):
        row = [0] * (prompt_width + response_width)
        for column in range(prompt_width - p, prompt_width + r):
            row[column] = 1
        out.append(row)
    return out


def reference_shift(flat: list[Element], size: int) -> list[Element]:
    return [*flat[1:], b"\0" * size] if flat else []
