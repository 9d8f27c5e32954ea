# SPDX-License-Identifier: Apache-2.0
"""Keys and values of prompts seen before, for prompts that begin the same way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

#: Keys and values of one sequence, a pair of `[heads, tokens, channels]` for each layer.
LayerStates = list[tuple[torch.Tensor, torch.Tensor]]

_BLOCK = 8


class PrefixCache:
    """Least-recently-used store of prompt states, bounded by tokens.

    A prompt is found again whole, or by its longest common beginning in steps of a block.
    Entries hold for one set of weights only: whoever changes the weights calls `reset`.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[tuple[int, ...], LayerStates] = OrderedDict()
        self._owner: dict[int, tuple[int, ...]] = {}
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def tokens(self) -> int:
        """Prompt tokens held."""
        return self._tokens

    def find(self, prompt: Sequence[int]) -> tuple[int, LayerStates]:
        """The longest known beginning of a prompt that leaves a token to compute.

        Returns:
            `(length, states)`; length 0 and no states when nothing is known.
        """
        keys = _prefix_keys(prompt)
        for length, key in reversed(keys):
            owner = self._owner.get(key)
            if owner is None or owner[:length] != tuple(prompt[:length]):
                continue
            self._entries.move_to_end(owner)
            usable = min(length, len(prompt) - 1)
            return usable, [
                (k[:, :usable], v[:, :usable]) for k, v in self._entries[owner]
            ] if usable else []
        return 0, []

    def add(self, prompt: Sequence[int], states: LayerStates) -> None:
        """Keep a prompt's states, dropping the least recently used for room."""
        ids = tuple(prompt)
        if len(ids) > self._capacity or ids in self._entries:
            return
        while self._tokens + len(ids) > self._capacity:
            old, _ = self._entries.popitem(last=False)
            self._tokens -= len(old)
            for _, key in _prefix_keys(old):
                if self._owner.get(key) == old:
                    del self._owner[key]
        self._entries[ids] = states
        self._tokens += len(ids)
        for _, key in _prefix_keys(ids):
            self._owner[key] = ids

    def reset(self) -> int:
        """Forget everything; the number of entries that were held."""
        held = len(self._entries)
        self._entries.clear()
        self._owner.clear()
        self._tokens = 0
        return held


def _prefix_keys(prompt: Sequence[int]) -> list[tuple[int, int]]:
    """`(length, key)` of every whole block's end and of the prompt's own."""
    keys, key = [], 0
    for begin in range(0, len(prompt), _BLOCK):
        end = min(begin + _BLOCK, len(prompt))
        key = hash((key, *prompt[begin:end]))
        keys.append((end, key))
    return keys
