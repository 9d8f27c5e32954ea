# SPDX-License-Identifier: Apache-2.0
"""The batch kernels against slow references, over all dtypes and ways to pass a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import arctic_rl_c
import batches
from batches import Rows

TORCH = list(batches.TORCH_DTYPES)
NUMPY = list(batches.NUMPY_DTYPES)
CARRIERS = ["nested", "torch pair", "torch strided", "numpy pair", "numpy strided", "dlpack pair"]
MASK_DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"]


# ---- ways to pass the same batch ----------------------------------------------------------------


def strided(array: Any) -> Any:
    """The same values with a hole after each."""
    if isinstance(array, torch.Tensor):
        wide = torch.zeros(2 * array.numel() + 1, dtype=array.dtype)
    else:
        wide = np.zeros(2 * array.size + 1, array.dtype)
    view = wide[1::2]
    if len(array):
        view[:] = array
    return view


def carry(batch: Rows, carrier: str) -> Any:
    if carrier in ("nested", "torch pair", "torch strided"):
        values = batches.torch_from(batch.flat, batch.name, (len(batch.flat),))
        offsets = torch.tensor(batch.offsets)
        if carrier == "nested":
            return torch.nested.nested_tensor_from_jagged(values, offsets)
        return (strided(values) if carrier == "torch strided" else values), offsets
    values = batches.numpy_from(batch.flat, batch.name, (len(batch.flat),))
    offsets = np.array(batch.offsets, np.int32)
    if carrier == "numpy pair":
        return values, offsets
    if carrier == "numpy strided":
        return strided(values), strided(offsets)
    return batches.OnlyDLPack(values), batches.OnlyDLPack(offsets)


def carriers_of(name: str) -> list[str]:
    if name in batches.NUMPY_DTYPES and name in batches.TORCH_DTYPES:
        return CARRIERS
    return [c for c in CARRIERS if c.startswith("torch") or c == "nested"]


def jagged_lengths(lengths: list[int], form: str) -> Any:
    """Row lengths as the argument `prompts` or `responses`."""
    total = sum(lengths)
    offsets = [0, *np.cumsum(lengths)] if lengths else [0]
    return {
        "list": list(lengths),
        "tuple": tuple(lengths) if len(lengths) != 2 else list(lengths),
        "torch": torch.tensor(lengths, dtype=torch.int64),
        "int32": np.array(lengths, np.int32),
        "strided": strided(np.array(lengths, np.int64)),
        "nested": torch.nested.nested_tensor_from_jagged(
            torch.zeros(total), torch.tensor(offsets, dtype=torch.int64)
        ),
        "pair": (np.zeros(total, np.int8), np.array(offsets, np.int64)),
    }[form]


def is_torch(carrier: str) -> bool:
    return "torch" in carrier or carrier == "nested"


def check_matrix(found: Any, wanted: list[list[bytes]], name: str, carrier: str) -> None:
    assert isinstance(found, torch.Tensor if is_torch(carrier) else np.ndarray)
    assert str(found.dtype).removeprefix("torch.") == name
    assert found.shape[0] == len(wanted)
    assert batches.rows_of(found) == wanted
    if isinstance(found, np.ndarray):
        assert found.flags.c_contiguous and found.flags.writeable


def fill_of(name: str) -> tuple[Any, bytes]:
    """A pad value that every dtype holds exactly, and its element."""
    value = 1
    element = torch.full((1,), value).to(batches.TORCH_DTYPES[name])
    return value, batches.elements_of(element)[0]


# ---- padding ------------------------------------------------------------------------------------


@given(
    batches.rows(TORCH),
    st.data(),
    st.integers(0, 2),
    st.integers(0, 2),
    st.sampled_from(["list", "tuple", "torch", "int32", "strided", "nested", "pair"]),
)
def test_pad_by_lengths(batch: Rows, data: st.DataObject, more: int, most: int, form: str) -> None:
    carrier = data.draw(st.sampled_from(carriers_of(batch.name)))
    value, fill = fill_of(batch.name)
    prompt_width = max(batch.prompts, default=0) + more
    response_width = max(batch.responses, default=0) + most
    tensor, *widths = arctic_rl_c.pad_prompt_response(
        carry(batch, carrier),
        jagged_lengths(batch.prompts, form),
        jagged_lengths(batch.responses, form),
        pad_value=value,
        prompt_width=prompt_width if more else None,
        response_width=response_width if most else None,
    )
    assert widths == [prompt_width, response_width]
    assert tuple(tensor.shape) == (len(batch.rows), prompt_width + response_width)
    wanted = batches.reference_pad(batch, prompt_width, response_width, fill)
    check_matrix(tensor, wanted, batch.name, carrier)


@given(
    batches.rows(["int64", "float32"]),
    st.integers(0, 2),
    st.integers(0, 2),
    st.sampled_from(MASK_DTYPES),
    st.sampled_from(["dense", "column slice", "transposed", "reversed"]),
)
def test_pad_by_mask(batch: Rows, more: int, most: int, dtype: str, layout: str) -> None:
    """Dense prompts: lengths from the mask, widths from the tensors."""
    prompt_width = max(batch.prompts, default=0) + more
    response_width = max(batch.responses, default=0) + most
    shape = (len(batch.rows), prompt_width + response_width)
    rows = batches.reference_mask(batch, prompt_width, response_width)
    mask = np.array(rows, dtype).reshape(shape)
    if layout == "column slice":
        wide = np.full((shape[0], shape[1] + 3), 7, dtype)
        wide[:, 2:-1] = mask
        mask = wide[:, 2:-1]
    elif layout == "transposed":
        mask = np.asfortranarray(mask)
    elif layout == "reversed":
        mask = np.ascontiguousarray(mask[::-1, ::-1])[::-1, ::-1]
    tensor, *widths = arctic_rl_c.pad_prompt_response(
        carry(batch, "numpy pair"),
        np.zeros((shape[0], prompt_width)),
        np.zeros((shape[0], response_width)),
        mask,
        pad_value=1,
    )
    assert widths == [prompt_width, response_width]
    fill = fill_of(batch.name)[1]
    wanted = batches.reference_pad(batch, prompt_width, response_width, fill)
    check_matrix(tensor, wanted, batch.name, "numpy pair")


@given(batches.rows(["int32", "bfloat16"]), st.integers(0, 5), st.integers(0, 5))
def test_truncation_when_asked_for(batch: Rows, prompt_width: int, response_width: int) -> None:
    value, fill = fill_of(batch.name)
    tensor, *_ = arctic_rl_c.pad_prompt_response(
        carry(batch, "nested"),
        batch.prompts,
        batch.responses,
        pad_value=value,
        prompt_width=prompt_width,
        response_width=response_width,
        truncate=True,
    )
    wanted = batches.reference_pad(batch, prompt_width, response_width, fill, truncate=True)
    check_matrix(tensor, wanted, batch.name, "nested")


@given(batches.rows(["int64"]))
def test_rows_with_holes_between_them(batch: Rows) -> None:
    """A nested tensor with lengths of its own: the rows do not fill the values."""
    flat, starts = [], []
    for row in batch.rows:
        starts.append(len(flat))
        flat += [*row, b"\7" * 8, b"\7" * 8]
    values = batches.torch_from(flat, "int64", (len(flat),))
    lengths = torch.tensor([len(row) for row in batch.rows], dtype=torch.int64)
    nested = torch.nested.nested_tensor_from_jagged(
        values, torch.tensor([*starts, len(flat)]), lengths
    )
    tensor, *widths = arctic_rl_c.pad_prompt_response(nested, batch.prompts, batch.responses)
    check_matrix(tensor, batches.reference_pad(batch, *widths, b"\0" * 8), "int64", "nested")


@given(batches.rows(["int64"]))
def test_a_mask_beside_lengths_is_checked(batch: Rows) -> None:
    """It may have another width; only its ones count."""
    prompt_width = max(batch.prompts, default=0) + 1
    response_width = max(batch.responses, default=0) + 1
    shape = (len(batch.rows), prompt_width + response_width)
    rows = batches.reference_mask(batch, prompt_width, response_width)
    mask = np.array(rows, bool).reshape(shape)
    arguments = (carry(batch, "numpy pair"), batch.prompts, batch.responses, mask)
    tensor, *widths = arctic_rl_c.pad_prompt_response(*arguments)
    wanted = batches.reference_pad(batch, *widths, b"\0" * 8)
    check_matrix(tensor, wanted, batch.name, "numpy pair")
    if len(batch.rows):
        mask[0, 0] = True
        if batch.prompts[0] + 1 != prompt_width or not batch.rows[0]:
            with pytest.raises(arctic_rl_c.PayloadError, match="attention_mask: row 0"):
                arctic_rl_c.pad_prompt_response(*arguments)


# ---- left padding -------------------------------------------------------------------------------


@st.composite
def matrices(draw: st.DrawFn) -> tuple[str, list[list[bytes]], int]:
    name = draw(st.sampled_from(TORCH))
    width = draw(st.integers(0, 5))
    row = st.lists(batches.element(name), min_size=width, max_size=width)
    return name, draw(st.lists(row, max_size=4)), width


@given(
    matrices(),
    st.integers(1, 4),
    st.data(),
    st.sampled_from(["dense", "columns", "transposed", "rows"]),
)
def test_left_pad(
    matrix: tuple[str, list[list[bytes]], int], more: int, data: st.DataObject, layout: str
) -> None:
    name, rows, width = matrix
    carrier = data.draw(st.sampled_from([c for c in carriers_of(name) if "strided" not in c]))
    shape = (len(rows), width)
    flat = [element for row in rows for element in row]
    if is_torch(carrier):
        tensor = batches.torch_from(flat, name, shape)
    else:
        tensor = batches.numpy_from(flat, name, shape)
    if layout == "columns":
        joined = torch.cat if isinstance(tensor, torch.Tensor) else np.concatenate
        if name not in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"):  # no cat in torch
            tensor = joined([tensor, tensor, tensor], 1)[:, width : 2 * width]
    elif layout == "transposed":
        tensor = (
            tensor.T.contiguous().T
            if isinstance(tensor, torch.Tensor)
            else np.asfortranarray(tensor)
        )
    elif layout == "rows" and isinstance(tensor, np.ndarray):
        tensor = np.ascontiguousarray(tensor[::-1])[::-1]
    given_tensor = batches.OnlyDLPack(tensor) if carrier == "dlpack pair" else tensor
    found = arctic_rl_c.left_pad(given_tensor, width + more)
    zero = b"\0" * batches.itemsize(name)
    check_matrix(found, [[zero] * more + row for row in rows], name, carrier)
    assert tuple(found.shape) == (len(rows), width + more)


def test_left_pad_of_an_expanded_tensor() -> None:
    row = torch.tensor([[1.0, 2.0]]).expand(3, 2)
    assert arctic_rl_c.left_pad(row, 3).tolist() == [[0.0, 1.0, 2.0]] * 3
    column = torch.tensor([[1.0], [2.0]]).expand(2, 3)
    assert arctic_rl_c.left_pad(column, 4).tolist() == [[0, 1, 1, 1], [0, 2, 2, 2]]


@pytest.mark.parametrize("tensor", [torch.ones(2, 3), np.ones((2, 3))], ids=["torch", "numpy"])
def test_left_pad_hands_back_what_is_wide_enough(tensor: Any) -> None:
    assert arctic_rl_c.left_pad(tensor, 3) is tensor
    assert arctic_rl_c.left_pad(tensor, 2, on_wide="keep") is tensor
    with pytest.raises(arctic_rl_c.PayloadError, match=r"tensor: has 3 columns.*width 2"):
        arctic_rl_c.left_pad(tensor, 2)


# ---- the way back -------------------------------------------------------------------------------


@given(
    batches.rows(TORCH),
    st.integers(0, 2),
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from(MASK_DTYPES),
)
def test_make_jagged_undoes_padding(
    batch: Rows, more: int, most: int, as_torch: bool, dtype: str
) -> None:
    if batch.name not in batches.NUMPY_DTYPES:
        as_torch = True
    input = carry(batch, "nested" if as_torch else "numpy pair")
    prompt_width = max(batch.prompts, default=0) + more
    response_width = max(batch.responses, default=0) + most
    dense, *_ = arctic_rl_c.pad_prompt_response(
        input,
        batch.prompts,
        batch.responses,
        pad_value=1,
        prompt_width=prompt_width,
        response_width=response_width,
    )
    shape = (len(batch.rows), prompt_width + response_width)
    rows = batches.reference_mask(batch, prompt_width, response_width)
    mask = np.array(rows, dtype).reshape(shape)
    if as_torch:
        back = arctic_rl_c.make_jagged(dense, torch.from_numpy(mask), input)
        assert back.is_nested and back.dtype == dense.dtype
        assert back.offsets() is input.offsets()
        assert batches.elements_of(back.values()) == batch.flat
    else:
        values, offsets = arctic_rl_c.make_jagged(dense, mask, input)
        assert offsets is input[1]
        assert values.dtype == dense.dtype
        assert batches.elements_of(values) == batch.flat


@given(batches.rows(TORCH), st.data())
def test_shift_predict_next(batch: Rows, data: st.DataObject) -> None:
    carrier = data.draw(st.sampled_from(carriers_of(batch.name)))
    input = carry(batch, carrier)
    wanted = batches.reference_shift(batch.flat, batches.itemsize(batch.name))
    found = arctic_rl_c.shift_predict_next(input)
    if carrier == "nested":
        assert found.offsets() is input.offsets()
        values = found.values()
    elif is_torch(carrier):
        assert found.offsets() is input[1]
        values = found.values()
    else:
        values, offsets = found
        assert offsets is input[1]
    assert batches.elements_of(values) == wanted


def test_an_empty_prompt_reads_nothing_before_its_row() -> None:
    """A response right after another row's last value starts where its own row starts."""
    input = (np.array([9, 9, 5, 6]), np.array([0, 2, 4]))
    tensor, *_ = arctic_rl_c.pad_prompt_response(input, [2, 0], [0, 2], pad_value=0)
    assert tensor.tolist() == [[9, 9, 0, 0], [0, 0, 5, 6]]
    mask = np.array([[1, 1, 0, 0], [0, 0, 1, 1]])
    values, _ = arctic_rl_c.make_jagged(tensor, mask, input)
    assert values.tolist() == [9, 9, 5, 6]


# ---- inputs stay as they are --------------------------------------------------------------------


def test_inputs_are_only_read() -> None:
    """Read-only arrays are welcome, and no byte of any input changes."""
    values = np.arange(10, 19)
    offsets = np.array([0, 4, 9])
    mask = np.array([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0]])
    arrays = [values, offsets, mask]
    before = [array.tobytes() for array in arrays]
    for array in arrays:
        array.flags.writeable = False
    tensor, *_ = arctic_rl_c.pad_prompt_response(
        (values, offsets), np.zeros((2, 3)), np.zeros((2, 3)), mask, pad_value=7
    )
    assert tensor.tolist() == [[7, 10, 11, 12, 13, 7], [14, 15, 16, 17, 18, 7]]
    tensor.flags.writeable = False
    assert arctic_rl_c.left_pad(tensor, 7)[:, 0].tolist() == [0, 0]
    back, _ = arctic_rl_c.make_jagged(tensor, mask, (values, offsets))
    assert back.tolist() == values.tolist()
    arctic_rl_c.shift_predict_next((values, offsets))
    assert [array.tobytes() for array in arrays] == before


def test_ids_that_look_like_padding_survive() -> None:
    """Lengths decide what is padding, never values: the pad id may be a real token."""
    input = (np.array([2, 5, 2, 2]), np.array([0, 2, 4]))
    tensor, *_ = arctic_rl_c.pad_prompt_response(input, [1, 1], [1, 1], pad_value=2)
    assert tensor.tolist() == [[2, 5], [2, 2]]
    mask = np.ones((2, 2), int)
    assert arctic_rl_c.make_jagged(tensor, mask, input)[0].tolist() == [2, 5, 2, 2]


def test_gradients_are_left_behind() -> None:
    dense = torch.ones(2, 2, requires_grad=True)
    assert not arctic_rl_c.left_pad(dense, 3).requires_grad


def test_large_batches_are_split_and_equal() -> None:
    """Past the threshold where threads take part, rows of all lengths, odd widths."""
    random = np.random.default_rng(7)
    rows = 701
    prompts = random.integers(0, 500, rows)
    responses = random.integers(0, 700, rows)
    offsets = np.concatenate([[0], np.cumsum(prompts + responses)])
    values = random.integers(0, 2**62, offsets[-1])
    tensor, prompt_width, response_width = arctic_rl_c.pad_prompt_response(
        (values, offsets), prompts, responses, pad_value=-5
    )
    columns = np.arange(prompt_width + response_width)
    first, last = (prompt_width - prompts)[:, None], (prompt_width + responses)[:, None]
    mask = (columns >= first) & (columns < last)
    wanted = np.full(mask.shape, -5)
    wanted[mask] = values
    assert np.array_equal(tensor, wanted)
    assert np.array_equal(arctic_rl_c.make_jagged(tensor, mask, (values, offsets))[0], values)
    shifted, _ = arctic_rl_c.shift_predict_next((values, offsets))
    assert np.array_equal(shifted, np.append(values[1:], 0))
    padded = arctic_rl_c.left_pad(tensor, tensor.shape[1] + 33)
    assert np.array_equal(padded, np.pad(tensor, ((0, 0), (33, 0))))
