# SPDX-License-Identifier: Apache-2.0
"""Work on tensors that is kept off the event loop when it takes long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_T = TypeVar("_T")

_THREAD_FROM = 4 << 20  # to copy or encode so many bytes takes milliseconds


async def off_loop(work: Callable[[Any], _T], obj: Any) -> _T:
    """`work(obj)`, on a thread when the tensors of `obj` make that long; else at once."""
    if tensor_bytes(obj) < _THREAD_FROM:
        return work(obj)
    return await asyncio.to_thread(work, obj)


def tensor_bytes(value: Any) -> int:
    """About how many bytes the tensors of an object hold."""
    if isinstance(value, Mapping):
        return sum(tensor_bytes(item) for item in value.values())
    if isinstance(value, list | tuple):
        # A list of token ids is long; only its first entries tell whether it holds tensors.
        return sum(tensor_bytes(item) for item in value[:64])
    return int(getattr(value, "nbytes", 0))
