# SPDX-License-Identifier: Apache-2.0
"""Which of several samplers serves a prompt."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class Router:
    """Places prompts on samplers and keeps count of what each has in hand.

    A prompt with a key goes to the sampler of that key, the same one in every process and run,
    where the states of earlier prompts of the key are. While that one has its fill and another
    has not, a key is only a preference, unless the caller is strict. A prompt without a key goes
    where the least is in hand; equals take turns.

    Args:
        count: How many samplers there are.
        capacity: Sequences that one of them decodes together.
    """

    def __init__(self, count: int, capacity: int) -> None:
        self._capacity = capacity
        self._load = [0] * count
        self._turn = 0
        self._lock = threading.Lock()

    def place(self, keys: Sequence[str | None], sequences: int, strict: bool) -> list[int]:
        """A sampler for each prompt; `done` takes what this has counted off again.

        Args:
            keys: One a prompt, None where it has none.
            sequences: How many sequences each prompt makes.
            strict: Never let a key go to another sampler than its own.
        """
        places = []
        with self._lock:
            for key in keys:
                index = self._least() if key is None else self._preferred(key, strict)
                self._load[index] += sequences
                places.append(index)
        return places

    def done(self, index: int, sequences: int, _: object = None) -> None:
        """A sampler has answered, or failed, for that many sequences. Also a future's callback."""
        with self._lock:
            self._load[index] -= sequences

    def loads(self) -> list[int]:
        """Sequences in hand, by sampler."""
        with self._lock:
            return list(self._load)

    def _least(self) -> int:
        count = len(self._load)
        order = [(self._turn + step) % count for step in range(count)]
        index = min(order, key=self._load.__getitem__)
        self._turn = (index + 1) % count
        return index

    def _preferred(self, key: str, strict: bool) -> int:
        # Not hash(), which differs from process to process.
        digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        index = int.from_bytes(digest, "little") % len(self._load)
        if strict or self._load[index] < self._capacity or min(self._load) >= self._capacity:
            return index
        return self._least()


def as_prompts(prompts: Any) -> list[Any]:
    """One prompt or several (texts, or lists of token ids), as a list of prompts.

    Raises:
        TypeError: It is nothing that holds prompts.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | bytearray | Mapping):
        raise TypeError(
            "generate: prompts is a text, a list of token ids, or a list of these, found "
            f"{type(prompts).__name__}"
        )
    listed = list(prompts)
    if listed and all(isinstance(item, int) for item in listed):
        return [listed]
    return listed


def as_keys(routing_key: str | Sequence[str | None] | None, count: int) -> list[str | None]:
    """One key a prompt.

    Raises:
        TypeError: A key is neither a str nor None.
        ValueError: There are not as many as prompts.
    """
    if routing_key is None or isinstance(routing_key, str):
        return [routing_key] * count
    keys = list(routing_key)
    if len(keys) != count:
        raise ValueError(f"{len(keys)} routing keys for {count} prompts")
    for number, key in enumerate(keys):
        if key is not None and not isinstance(key, str):
            raise TypeError(
                f"routing key {number} is a {type(key).__name__}; keys are str, or None for none"
            )
    return keys


def sequences_of(sampling_params: Mapping[str, Any] | None) -> int:
    """How many sequences each prompt makes; 1 where the sampler will refuse the number."""
    count = (sampling_params or {}).get("n", 1)
    return count if isinstance(count, int) and count > 0 else 1


def merge_answers(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The answers of all samplers to one op, as the answer of the pool.

    Counts are added up; of different states, the one that changed speaks for all.
    """
    merged = dict(answers[0])
    if len(answers) == 1:
        return merged
    for key in ("workers", "entries"):
        if key in merged:
            merged[key] = sum(int(answer[key]) for answer in answers)
    states = [str(answer["status"]) for answer in answers if "status" in answer]
    if states:
        merged["status"] = min(states, key=lambda state: state.startswith("already_"))
    return merged
