# SPDX-License-Identifier: Apache-2.0
"""Starts the requests of a client in the order in which it made them.

Ray does not: of calls that a process makes one after another, an async actor starts any first (of
eight in a row most bursts come out otherwise).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

#: After so long what has not come is taken for lost. It was sent before what waits for it.
_LOST_SECONDS = 5.0


class Arrivals:
    """Which request of each client is the next one.

    A client gives its `id` and the `number` of the request, from 1 on and without gaps.
    """

    def __init__(self) -> None:
        self._next: dict[str, int] = {}
        self._waiting: dict[str, dict[int, asyncio.Future[None]]] = {}

    async def wait(self, client: Mapping[str, Any]) -> None:
        """Until all that this client asked before has passed."""
        key, number = client["id"], client["number"]
        waiting = self._waiting.setdefault(key, {})
        while number > (now := self._next.setdefault(key, 1)):
            come = waiting[number] = asyncio.get_running_loop().create_future()
            await asyncio.wait({come}, timeout=_LOST_SECONDS)
            if not come.done() and self._next[key] == now:
                self._advance(key, min(waiting))

    def passed(self, client: Mapping[str, Any]) -> None:
        """Let the next one start, later than what follows here without an `await`. Idempotent."""
        if self._next.get(client["id"]) == client["number"]:
            self._advance(client["id"], client["number"] + 1)

    def _advance(self, key: str, number: int) -> None:
        self._next[key] = number
        waiting = self._waiting[key]
        for ready in [other for other in waiting if other <= number]:
            waiting.pop(ready).set_result(None)
