# SPDX-License-Identifier: Apache-2.0
"""What the batch kernels refuse: class, and that the message names argument, row and numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import arctic_rl_c
import residue
from arctic_rl_c import PayloadError, left_pad, make_jagged, pad_prompt_response, shift_predict_next

# Two rows: prompt 1 + response 2, prompt 2 + response 1.
VALUES = np.arange(10, 16)
OFFSETS = np.array([0, 3, 6])
INPUT = (VALUES, OFFSETS)
PROMPTS, RESPONSES = [1, 2], [2, 1]
MASK = np.array([[0, 1, 1, 1], [1, 1, 1, 0]])
DENSE = np.arange(8.0).reshape(2, 4)


def nested(values: Any, offsets: Any, **kwargs: Any) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(
        torch.as_tensor(values), torch.as_tensor(offsets), **kwargs
    )


def strided_nested() -> torch.Tensor:
    with pytest.warns(UserWarning, match="nested"):
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.strided)


def pad(*args: Any, **kwargs: Any) -> Callable[[], object]:
    return lambda: pad_prompt_response(*args, **kwargs)


def refused(call: Callable[[], object], *parts: str, error: type[Exception] = PayloadError) -> None:
    with pytest.raises(error) as caught:
        call()
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in {caught.value}"
    if error is PayloadError:
        assert isinstance(caught.value, ValueError)
        assert caught.value.code == "ARL_ERR_PAYLOAD"
        assert caught.value.operation


# ---- lengths ------------------------------------------------------------------------------------


def test_lengths_that_do_not_add_up() -> None:
    refused(pad(INPUT, [1, 2], [2, 2]), "input: row 1 has 3 elements", "2", "add up")
    refused(pad(INPUT, [4, 2], [2, 1]), "input: row 0", "prompt has 4")


def test_values_that_the_offsets_do_not_cover() -> None:
    refused(pad((VALUES, np.array([0, 3, 5])), [1, 1], [2, 1]), "input", "from 0 to 5", "6 values")
    refused(pad((VALUES, np.array([1, 3, 6])), [1, 1], [2, 1]), "input", "from 1 to 6")


def test_offsets_that_run_backwards_or_out() -> None:
    refused(pad((VALUES, np.array([0, 7, 6])), [7, -1], [0, 0]), "input: row 0 spans [0, +7) of 6")
    refused(pad((VALUES, np.array([0, 5, 3, 6])), [5, 1, 3], [0, 0, 0]), "input: row 1", "-2")
    refused(pad((VALUES, np.array([], int)), [], []), "input", "rows + 1")
    extreme = np.array([0, -(2**63), 6])
    refused(pad((VALUES, extreme), [0, 0], [0, 0]), "input: row 0")


def test_negative_lengths() -> None:
    refused(pad(INPUT, [-1, 2], [4, 1]), "row 0 has a negative length (prompt -1, response 4)")
    refused(pad(INPUT, [1, 4], [2, -1]), "row 1 has a negative length (prompt 4, response -1)")


def test_rows_that_differ_in_number() -> None:
    refused(pad(INPUT, [1, 2, 3], [2, 1]), "prompts have 3 rows, responses 2")
    refused(pad(INPUT, [1], [2]), "input: has 2 rows, prompts and responses have 1")


def test_lengths_of_the_wrong_kind() -> None:
    refused(pad(INPUT, [1, 2.0], RESPONSES), "prompts: entry 1 is a float")
    refused(pad(INPUT, PROMPTS, [2, "1"]), "responses: entry 1 is a str")
    refused(pad(INPUT, [1, 2**70], RESPONSES), "prompts: entry 1 does not fit in 64 bits")
    refused(pad(INPUT, np.array([1.0, 2.0]), RESPONSES), "prompts: is float64[2]", "int32 or int64")
    refused(pad(INPUT, np.array([1, 2], np.int16), RESPONSES), "prompts: is int16[2]")
    refused(pad(INPUT, None, RESPONSES), "prompts: expected a torch tensor", "NoneType")
    refused(pad(INPUT, np.zeros((2, 2, 2)), RESPONSES), "prompts: is float64[2, 2, 2]")


def test_lengths_that_change_while_they_are_read() -> None:
    lengths: list[Any] = [1, 2]

    class Clears:
        def __index__(self) -> int:
            lengths.clear()
            return 1

    lengths[0] = Clears()
    tensor, *_ = pad_prompt_response(INPUT, lengths, RESPONSES)
    assert tensor.tolist() == [[0, 10, 11, 12], [13, 14, 15, 0]]


@pytest.mark.parametrize("part", ["prompt", "response"])
def test_parts_longer_than_their_width(part: str) -> None:
    """Row and both lengths are named, and nothing is cut."""
    refused(
        pad(INPUT, PROMPTS, RESPONSES, **{f"{part}_width": 1}),
        f"row {1 if part == 'prompt' else 0}",
        f"a {part} of length 2, longer than the {part} width 1",
        "truncat",
    )


def test_declared_maximum_of_nested_prompts() -> None:
    prompts = nested([1, 2, 3, 4], [0, 4])
    responses = nested([5], [0, 1])
    refused(
        pad(nested([1, 2, 3, 4, 5], [0, 5]), prompts, responses, prompt_width=3),
        "row 0 has a prompt of length 4",
        "width 3",
    )


# ---- forms --------------------------------------------------------------------------------------


def test_mixed_forms() -> None:
    dense = np.zeros((2, 2))
    pair = (np.zeros(3), np.array([0, 1, 3]))
    for prompts, responses, words in [
        (dense, [2, 1], "prompts are a dense tensor, responses are a list of lengths"),
        (pair, dense, "prompts are nested, responses are a dense tensor"),
        ([1, 2], pair, "prompts are a list of lengths, responses are nested"),
    ]:
        refused(pad(INPUT, prompts, responses, MASK), words, "one form")


def test_dense_prompts_need_a_dense_mask() -> None:
    dense = np.zeros((2, 2))
    refused(pad(INPUT, dense, dense), "attention_mask is needed")
    refused(
        pad(INPUT, dense, dense, (MASK.ravel(), np.array([0, 4, 8]))), "attention_mask: is nest"
    )
    jagged = nested(MASK.ravel(), [0, 4, 8])
    refused(pad(INPUT, dense, dense, jagged), "attention_mask: is nested")
    refused(pad(INPUT, dense, dense, MASK[:, :3]), "attention_mask: is int64[2, 3], [2, 4] is need")
    refused(pad(INPUT, dense, dense, MASK[:1]), "attention_mask: is int64[1, 4]")
    refused(pad(INPUT, dense, dense, MASK.ravel()), "attention_mask: is int64[8]")
    refused(
        pad(INPUT, dense, dense, MASK.astype(float)), "attention_mask: is float64[2, 4]", "bool"
    )
    refused(pad(INPUT, dense, dense, "mask"), "attention_mask: expected a torch tensor", "str")


def test_masks_with_gaps() -> None:
    mask = np.array([[0, 1, 1, 1], [1, 0, 1, 1]])
    dense = np.zeros((2, 2))
    words = "attention_mask: row 1 has zeros between ones (0 at column 1, 1 again at column 2)"
    refused(pad(INPUT, dense, dense, mask), words)
    refused(lambda: make_jagged(DENSE, mask, INPUT), words)


def test_masks_of_other_numbers() -> None:
    mask = MASK * 2
    words = "attention_mask: row 0, column 1 is neither 0 nor 1"
    refused(lambda: make_jagged(DENSE, mask, INPUT), words)
    refused(lambda: make_jagged(DENSE, -MASK.astype(np.int8), INPUT), words)


def test_masks_that_are_not_laid_out_as_the_wire_is() -> None:
    dense = np.zeros((2, 2))
    left = np.array([[1, 0, 0, 0], [1, 1, 1, 0]])
    refused(pad(INPUT, dense, dense, left), "row 0 has its ones in columns [0, 1)", "at column 2")
    right = np.array([[0, 1, 1, 0], [0, 0, 0, 1]])
    refused(pad(INPUT, dense, dense, right), "row 1 has its ones in columns [3, 4)", "at column 2")


def test_a_mask_that_contradicts_the_lengths() -> None:
    refused(
        pad(INPUT, PROMPTS, RESPONSES, np.ones((2, 4), bool)),
        "attention_mask: row 0 has 4 ones, but its prompt has 1 elements and its response 2",
    )
    refused(pad(INPUT, PROMPTS, RESPONSES, MASK[:1]), "attention_mask: is int64[1, 4]", "2 rows")


def test_large_masks_name_the_first_bad_row() -> None:
    """The rows are split over threads; the message does not depend on which one saw it."""
    mask = np.ones((3000, 512), np.int64)
    mask[[700, 2900], 100] = 0
    like = (np.zeros(mask.size), np.arange(3001) * 512)
    words = "row 700 has zeros between ones (0 at column 100, 1 again at column 101)"
    refused(lambda: make_jagged(np.zeros(mask.shape), mask, like), words)


@pytest.mark.parametrize("equal", [True, False], ids=["equal rows", "one row"])
def test_rows_of_several_components(equal: bool) -> None:
    """mrope: [4, total] position ids, where nothing may guess the ragged axis from sizes."""
    offsets = [0, 5, 10] if equal else [0, 4]
    values = torch.zeros(4, offsets[-1], dtype=torch.int64)
    words = "input: its jagged values are int64[4, "
    lengths = [5, 5] if equal else [4]
    for input in (nested(values, offsets, jagged_dim=2), (values, torch.tensor(offsets))):
        refused(pad(input, lengths, [0] * len(lengths)), words, "mrope")
    features = nested(values.T.contiguous(), offsets)
    refused(pad(features, lengths, [0] * len(lengths)), "input: its jagged values are int64[")


def test_what_is_not_jagged() -> None:
    refused(pad(np.zeros((2, 3)), PROMPTS, RESPONSES), "input: expected a nested jagged", "ndarray")
    refused(pad(torch.zeros(2, 3), PROMPTS, RESPONSES), "input: expected a nested jagged", "Tensor")
    refused(pad(None, PROMPTS, RESPONSES), "input", "NoneType")
    refused(pad((VALUES, OFFSETS, 1), PROMPTS, RESPONSES), "input", "tuple")
    refused(lambda: shift_predict_next(DENSE), "nested: expected a nested jagged")
    refused(pad((VALUES, OFFSETS.astype(float)), [1, 2], [2, 1]), "input offsets: is float64[3]")
    refused(pad((None, OFFSETS), [1, 2], [2, 1]), "input: expected a torch tensor", "NoneType")


def test_nested_tensors_of_strided_layout() -> None:
    old = strided_nested()
    refused(pad(old, PROMPTS, RESPONSES), "input: is a nested tensor of strided layout", "jagged")
    refused(pad(INPUT, old, RESPONSES), "prompts: is a nested tensor of strided layout")


# ---- padding values -----------------------------------------------------------------------------


def test_no_pad_token() -> None:
    refused(pad(INPUT, PROMPTS, RESPONSES, pad_value=None), "pad_value is None", "eos_token_id")


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("uint8", 256),
        ("uint8", -1),
        ("int8", 128),
        ("int8", -129),
        ("int16", 2**15),
        ("uint16", 2**16),
        ("int32", 151643 * 2**20),
        ("uint32", 2**32),
        ("int64", 2**63),
        ("int64", -(2**63) - 1),
        ("uint64", 2**64),
        ("uint64", -1),
        ("bool", 2),
        ("bool", -1),
        ("int64", 0.5),
        ("int64", 1.0),
        ("int64", float("nan")),
        ("int64", "0"),
        ("int64", 1j),
        ("float32", 1e39),
        ("float16", 65520.0),
        ("bfloat16", 3.4e38),
        ("float32", 1j),
        ("float32", "x"),
        ("float32", 10**400),
        ("int64", torch.tensor([1, 2])),
        ("int64", torch.tensor(0.5)),
        ("float8_e4m3fn", 465.0),
        ("float8_e4m3fn", float("inf")),
        ("float8_e5m2", 61440.0),
        ("float8_e8m0fnu", 0),
        ("float8_e8m0fnu", 3.0),
        ("float8_e8m0fnu", -2.0),
        ("float8_e8m0fnu", 2.0**128),
        ("complex64", 1e39 * 1j),
    ],
)
def test_pad_values_that_do_not_fit(dtype: str, value: Any) -> None:
    values = torch.zeros(3, dtype=torch.uint8).to(getattr(torch, dtype))
    input = (values, torch.tensor([0, 3]))
    refused(pad(input, [1], [2], pad_value=value), "input: pad_value", "does not fit", dtype)


@pytest.mark.parametrize(
    ("dtype", "value", "wanted"),
    [
        ("int64", -(2**63), -(2**63)),
        ("int64", 2**63 - 1, 2**63 - 1),
        ("uint64", 2**64 - 1, 2**64 - 1),
        ("int8", -128, -128),
        ("uint16", 65535, 65535),
        ("bool", True, True),
        ("bool", np.True_, True),
        ("int64", np.int32(7), 7),
        ("int64", np.array(7), 7),
        ("int64", torch.tensor(7), 7),
        ("float32", torch.tensor(0.5), 0.5),
        ("float32", np.float64(0.5), 0.5),
        ("float32", 2**70, 2.0**70),
        ("float64", -0.0, -0.0),
        ("complex64", 1 - 2j, 1 - 2j),
        ("complex128", 3, 3),
    ],
)
def test_pad_values_that_fit(dtype: str, value: Any, wanted: Any) -> None:
    input = (np.zeros(0, dtype), np.zeros(2, np.int64))
    tensor, *_ = pad_prompt_response(input, [0], [0], pad_value=value, prompt_width=1)
    assert tensor.tobytes() == np.array(wanted, dtype).tobytes()


FLOATS = {
    "float16": 65504.0,
    "bfloat16": float(torch.finfo(torch.bfloat16).max),
    "float8_e5m2": 57344.0,
    "float8_e4m3fn": 448.0,
    "float32": float(torch.finfo(torch.float32).max),
}


@pytest.mark.parametrize("dtype", FLOATS)
def test_float_pad_values_round_as_torch_does(dtype: str) -> None:
    """To nearest even, subnormals included; from single precision, as torch goes through it."""
    largest = FLOATS[dtype]
    random = np.random.default_rng(1)
    exponents = random.integers(-30, 17, 300)
    candidates = (random.uniform(-2, 2, 300) * 2.0**exponents).astype(np.float32).astype(float)
    ties = [(i + 0.5) * 2.0**e for i in (4, 5, 1024, 1025, 128, 129) for e in (-24, -12, -9, -3)]
    special = [0.0, -0.0, largest, -largest, float("nan")]
    target = getattr(torch, dtype)
    for value in [*candidates, *ties, *special]:
        value = float(value)
        if abs(value) > largest:
            continue
        input = (torch.zeros(0, dtype=target), torch.tensor([0, 0]))
        found = pad_prompt_response(input, [0], [0], pad_value=value, prompt_width=1)[0]
        wanted = torch.tensor([value], dtype=torch.float32).to(target)
        bits, expected = found.view(torch.uint8).tolist(), wanted.view(torch.uint8).tolist()
        if value != value:
            assert found.float().isnan().all()
        else:
            assert bits == [expected], value


@pytest.mark.parametrize("exponent", [-127, -126, -1, 0, 5, 127])
def test_powers_of_two_for_scale_factors(exponent: int) -> None:
    input = (torch.zeros(0, dtype=torch.float8_e8m0fnu), torch.tensor([0, 0]))
    found = pad_prompt_response(input, [0], [0], pad_value=2.0**exponent, prompt_width=1)[0]
    assert found.view(torch.uint8).tolist() == [[exponent + 127]]


def test_infinities_where_there_are_some() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float32, torch.float64):
        input = (torch.zeros(0, dtype=dtype), torch.tensor([0, 0]))
        for value in (float("inf"), float("-inf")):
            found = pad_prompt_response(input, [0], [0], pad_value=value, prompt_width=1)[0]
            assert found.float().tolist() == [[value]]


# ---- sizes --------------------------------------------------------------------------------------


def test_sizes_that_overflow() -> None:
    refused(
        pad(INPUT, PROMPTS, RESPONSES, prompt_width=2**62, response_width=2**62),
        "input: widths 4611686018427387904 + 4611686018427387904 for 2 rows",
    )
    refused(pad(INPUT, PROMPTS, RESPONSES, prompt_width=2**60), "for 2 rows", "overflow")
    wide = torch.zeros(1, 1, dtype=torch.int8).expand(1, 2**62)
    refused(pad(INPUT, wide, wide, MASK), "widths 4611686018427387904", "overflow")


@pytest.mark.skipif(
    residue.is_sanitized(arctic_rl_c._core.__file__),
    reason="waived: the sanitizer's allocator aborts on such a size instead of failing",
)
def test_sizes_beyond_memory() -> None:
    with pytest.raises(MemoryError):
        pad_prompt_response(INPUT, PROMPTS, RESPONSES, prompt_width=2**55)


def test_sizes_that_are_no_sizes() -> None:
    for name in ("prompt_width", "response_width"):
        refused(
            pad(INPUT, PROMPTS, RESPONSES, **{name: -1}),
            f"'{name}' must not be negative",
            error=ValueError,
        )
        refused(pad(INPUT, PROMPTS, RESPONSES, **{name: 2.0}), "float", error=TypeError)
        refused(pad(INPUT, PROMPTS, RESPONSES, **{name: 2**64}), error=OverflowError)
    refused(lambda: left_pad(DENSE, -1), "'width' must not be negative", error=ValueError)
    refused(
        pad(INPUT, PROMPTS, RESPONSES, prompt_width="8"),
        "pad_prompt_response() argument 'prompt_width' must be an integer, not str",
        error=TypeError,
    )
    refused(lambda: left_pad(DENSE, None), "'width' must be an integer", error=TypeError)
    refused(lambda: left_pad(DENSE, 2**61), "does not fit", error=OverflowError)


# ---- the other kernels --------------------------------------------------------------------------


def test_left_pad_refuses() -> None:
    refused(lambda: left_pad(np.zeros(3), 4), "tensor: is float64[3]", "[rows, width]")
    refused(lambda: left_pad(DENSE, 9, on_wide="crop"), "'error' or 'keep'", error=ValueError)
    refused(lambda: left_pad(DENSE, 9, on_wide=None), "'error' or 'keep'", error=ValueError)


def test_make_jagged_refuses() -> None:
    refused(lambda: make_jagged(DENSE[:1], MASK, INPUT), "dense: has 1 rows, like has 2")
    refused(lambda: make_jagged(DENSE, MASK[:, :3], INPUT), "attention_mask: is int64[2, 3]")
    refused(
        lambda: make_jagged(DENSE, np.ones((2, 4), int), INPUT),
        "attention_mask: row 0 has 4 ones, but its jagged row has 3 elements",
    )
    refused(lambda: make_jagged(torch.from_numpy(DENSE), MASK, INPUT), "one is a torch tensor")
    like = nested(VALUES, OFFSETS)
    refused(lambda: make_jagged(DENSE, MASK, like), "one is a torch tensor")
    refused(lambda: make_jagged(DENSE.ravel(), MASK, INPUT), "dense: is float64[8]")
    refused(lambda: make_jagged(DENSE, None, INPUT), "attention_mask: expected", "NoneType")
    refused(lambda: make_jagged(DENSE, MASK, DENSE), "like: expected a nested jagged")


def test_nested_tensors_with_holes_cannot_lend_their_offsets() -> None:
    holes = nested(np.arange(8.0), [0, 4, 8], lengths=torch.tensor([3, 3]))
    dense = torch.from_numpy(DENSE)
    refused(
        lambda: make_jagged(dense, torch.from_numpy(MASK), holes),
        "like: row 0 has 3 elements in room for 4",
        "contiguous",
    )
    refused(lambda: shift_predict_next(holes), "nested: row 0 has 3 elements in room for 4")


# ---- calls --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pad_prompt_response(), "missing required argument 'input' (pos 1)"),
        (lambda: pad_prompt_response(INPUT, PROMPTS), "missing required argument 'responses'"),
        (lambda: pad_prompt_response(INPUT, PROMPTS, RESPONSES, MASK, 0), "at most 4 positional"),
        (lambda: pad_prompt_response(INPUT, prompts=PROMPTS, padding=1), "keyword argument 'padd"),
        (lambda: left_pad(DENSE, 3, tensor=DENSE), "multiple values for argument 'tensor'"),
        (lambda: make_jagged(DENSE, MASK), "missing required argument 'like' (pos 3)"),
        (lambda: shift_predict_next(), "exactly one argument"),
        (lambda: arctic_rl_c.thread_count(1), "takes no arguments"),
    ],
)
def test_calls_with_the_wrong_arguments(call: Callable[[], object], words: str) -> None:
    with pytest.raises(TypeError, match=re.escape(words)):
        call()


def test_truth_of_truncate_may_fail() -> None:
    with pytest.raises(ValueError, match="ambiguous"):
        pad_prompt_response(INPUT, PROMPTS, RESPONSES, truncate=np.zeros(2))


# ---- shapes that look odd and are fine ----------------------------------------------------------


def test_no_rows() -> None:
    empty = (np.zeros(0, np.int64), np.zeros(1, np.int64))
    tensor, *widths = pad_prompt_response(empty, [], [], prompt_width=4)
    assert tensor.shape == (0, 4) and widths == [4, 0]
    assert left_pad(np.zeros((0, 2)), 5).shape == (0, 5)
    values, _ = make_jagged(np.zeros((0, 4)), np.zeros((0, 4), int), empty)
    assert values.shape == (0,)
    assert shift_predict_next(empty)[0].shape == (0,)


def test_rows_of_nothing() -> None:
    """Aborted requests: no tokens at all, the width stays as configured."""
    empty = (np.zeros(0, np.int64), np.zeros(3, np.int64))
    tensor, *widths = pad_prompt_response(
        empty, [0, 0], [0, 0], pad_value=9, prompt_width=1, response_width=2
    )
    assert tensor.tolist() == [[9, 9, 9]] * 2 and widths == [1, 2]
    values, _ = make_jagged(tensor, np.zeros((2, 3), int), empty)
    assert values.shape == (0,)
    dense = np.zeros((2, 3))
    tensor, *_ = pad_prompt_response(
        empty, dense[:, :1], dense[:, 1:], np.zeros((2, 3), bool), pad_value=9
    )
    assert tensor.tolist() == [[9, 9, 9]] * 2


def test_the_cached_longest_row_is_not_trusted() -> None:
    """A rebuilt nested tensor may know no longest row: offsets decide."""
    input = nested([1, 2, 3, 4], [0, 1, 4])
    tensor, *widths = pad_prompt_response(
        input, nested([1, 2], [0, 1, 2]), nested([3, 4], [0, 0, 2])
    )
    assert widths == [1, 2]
    assert tensor.tolist() == [[1, 0, 0], [2, 3, 4]]
