# SPDX-License-Identifier: Apache-2.0
"""Rows of a payload: from the padded wire layout to left-aligned tokens and back.

The wire's rows are `[B, S]` with the real tokens in one run under `attention_mask`. A causal
model needs no mask for what follows a row, so rows are moved to the left edge and cut to the
longest of their micro-batch: short batches cost what they hold, not what they are padded to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from arctic_rl_c import PayloadError


@dataclass(frozen=True)
class Rows:
    """A batch's rows, checked.

    Attributes:
        ids: `[B, S]` int64, as sent.
        positions: `[B, S]` int64, as sent or rebuilt.
        start: `[B]`, column of each row's first real token.
        length: `[B]`, number of real tokens.
        prompt_width: Column at which the response window begins.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    start: torch.Tensor
    length: torch.Tensor
    prompt_width: int

    @property
    def width(self) -> int:
        """S."""
        return int(self.ids.shape[1])


def read_rows(batch: Mapping[str, Any], meta: Mapping[str, Any], vocab_size: int) -> Rows:
    """Check a payload's batch and find its rows.

    Raises:
        PayloadError: A key is missing, a shape or dtype is wrong, a mask row has a hole, or an
            id lies outside the vocabulary.
    """
    ids, mask = _matrix(batch, "input_ids"), _matrix(batch, "attention_mask")
    if mask.shape != ids.shape:
        raise PayloadError(
            f"attention_mask has shape {tuple(mask.shape)}, input_ids {tuple(ids.shape)}"
        )
    if ids.dtype not in (torch.int64, torch.int32):
        raise PayloadError(f"input_ids must be int64 or int32, found {ids.dtype}")
    ids, kept = ids.to(torch.int64), mask != 0
    length = kept.sum(1)
    start = kept.to(torch.int8).argmax(1)
    columns = torch.arange(ids.shape[1])
    run = (columns >= start[:, None]) & (columns < (start + length)[:, None])
    broken = (run != kept).any(1)
    if bool(broken.any()):
        raise PayloadError(
            f"attention_mask row {int(broken.int().argmax())} is not one run of ones"
        )
    real = ids[kept]
    if real.numel() and (int(real.min()) < 0 or int(real.max()) >= vocab_size):
        bad = int(real.max()) if int(real.max()) >= vocab_size else int(real.min())
        raise PayloadError(f"input_ids holds {bad}, the model's vocabulary ends at {vocab_size}")
    if "max_prompt_len" not in meta:
        raise PayloadError("meta has no max_prompt_len")
    prompt_width = int(meta["max_prompt_len"])
    if not 0 <= prompt_width <= ids.shape[1]:
        raise PayloadError(
            f"max_prompt_len {prompt_width} lies outside a row of {ids.shape[1]} slots"
        )
    return Rows(ids, _positions(batch, meta, kept), start, length, prompt_width)


def _positions(
    batch: Mapping[str, Any], meta: Mapping[str, Any], kept: torch.Tensor
) -> torch.Tensor:
    if "position_ids" in batch:
        positions = _matrix(batch, "position_ids")
        if positions.shape != kept.shape:
            raise PayloadError(
                f"position_ids has shape {tuple(positions.shape)}, wanted {tuple(kept.shape)}"
            )
        return positions.to(torch.int64)
    if not meta.get("drop_position_ids", False):
        raise PayloadError("the batch has no position_ids and meta does not say they were dropped")
    return (kept.cumsum(1) - 1).clamp(min=0) * kept


def _matrix(batch: Mapping[str, Any], key: str) -> torch.Tensor:
    value = batch.get(key)
    if value is None:
        raise PayloadError(f"the batch has no {key}")
    if not isinstance(value, torch.Tensor) or value.dim() != 2:
        found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise PayloadError(f"{key} must be a matrix [rows, slots], found {found}")
    return value


def response_window(batch: Mapping[str, Any], key: str, rows: Rows) -> torch.Tensor:
    """The response columns `[B, R]` of a left-padded response matrix."""
    value = _matrix(batch, key)
    if tuple(value.shape) != tuple(rows.ids.shape):
        raise PayloadError(
            f"{key} has shape {tuple(value.shape)}, wanted {tuple(rows.ids.shape)} (left-padded)"
        )
    return value[:, rows.prompt_width :]


def split_micro_batches(rows: Rows, max_token_len: int) -> list[torch.Tensor]:
    """Groups of row numbers with at most `max_token_len` slots after padding each group.

    Rows of similar length go together, so little of a group is padding.

    Raises:
        PayloadError: One row alone is longer.
    """
    order = torch.argsort(rows.length, descending=True, stable=True)
    longest = int(rows.length.max()) if len(order) else 0
    if longest > max_token_len:
        raise PayloadError(
            f"row {int(order[0])} has {longest} tokens, max_token_len_per_gpu is {max_token_len}: "
            "raise actor.ppo_max_token_len_per_gpu"
        )
    groups, begin = [], 0
    while begin < len(order):
        size = max(1, max_token_len // max(1, int(rows.length[order[begin]])))
        groups.append(order[begin : begin + size])
        begin += size
    return groups


@dataclass(frozen=True)
class MicroBatch:
    """Left-aligned rows of one group.

    Attributes:
        index: `[b]`, the rows' numbers in the batch.
        ids, positions: `[b, L]`; behind a row's end ids are 0 and positions count on.
        targets: `[b, L]`, the id that follows each slot, 0 at a row's last one.
        columns: `[b, L]`, the wire column of each slot.
        real: `[b, L]` bool, slots that hold a token.
    """

    index: torch.Tensor
    ids: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    columns: torch.Tensor
    real: torch.Tensor


def left_align(rows: Rows, index: torch.Tensor) -> MicroBatch:
    """Move the rows `index` to the left edge."""
    start, length = rows.start[index], rows.length[index]
    slots = torch.arange(max(1, int(length.max())))
    real = slots < length[:, None]
    columns = (start[:, None] + slots).clamp(max=rows.width - 1)
    ids = torch.where(real, rows.ids[index].gather(1, columns), 0)
    positions = rows.positions[index].gather(1, columns)
    # Counting on keeps a row one sequence for models that read boundaries from positions.
    last = positions.gather(1, (length[:, None] - 1).clamp(min=0))
    positions = torch.where(real, positions, last + 1 + slots - length[:, None])
    targets = torch.zeros_like(ids)
    targets[:, :-1] = ids[:, 1:]
    return MicroBatch(index, ids, positions, targets, columns, real)
