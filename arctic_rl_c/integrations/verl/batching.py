# SPDX-License-Identifier: Apache-2.0
"""Requests of one prompt each, sent to the server in groups."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: `generate` of a backend.
Generate = Callable[[Sequence[Any], Mapping[str, Any]], Awaitable[list[dict[str, Any]]]]


@dataclass
class _Request:
    prompt: list[int]
    params: Mapping[str, Any]
    future: asyncio.Future[dict[str, Any]]


class Batcher:
    """Groups prompts that wait, by their sampling parameters.

    An agent loop asks for one response at a time, hundreds side by side. A sampler that runs one
    op after another would decode them one by one. What arrives while a group is decoded becomes
    the next group; nothing is ever held back to wait for more.

    Args:
        generate: Takes a list of prompts.
        together: False sends each request at once, for servers that schedule by themselves.
        largest: Prompts in a group.
    """

    def __init__(self, generate: Generate, *, together: bool, largest: int = 1024) -> None:
        self._generate, self._together, self._largest = generate, together, largest
        self._waiting: list[_Request] = []
        self._open: dict[str, _Request] = {}
        self._task: asyncio.Task[None] | None = None
        self._singles: set[asyncio.Task[None]] = set()

    async def submit(
        self, request_id: str, prompt: list[int], params: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """The result of one prompt; None when it was aborted.

        Raises:
            ValueError: The id is in use.
        """
        if request_id in self._open:
            raise ValueError(f"request {request_id!r} is running already")
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        request = _Request(prompt, params, future)
        self._open[request_id] = request
        try:
            if self._together:
                self._waiting.append(request)
                if self._task is None:
                    self._task = asyncio.create_task(self._work())
            else:
                task = asyncio.create_task(self._run([request]))
                self._singles.add(task)  # the loop itself holds it weakly
                task.add_done_callback(self._singles.discard)
            return await future
        except asyncio.CancelledError:
            if future.cancelled() and request_id not in self._open:
                return None  # aborted, rather than this task cancelled
            raise
        finally:
            self._open.pop(request_id, None)

    def abort(self, request_id: str) -> bool:
        """Let one request end without a result; whether there was such a request."""
        request = self._open.pop(request_id, None)
        if request is None or request.future.done():
            return False
        request.future.cancel()
        return True

    def abort_all(self) -> list[str]:
        """The same for all; their ids."""
        return [name for name in list(self._open) if self.abort(name)]

    async def _work(self) -> None:
        try:
            # A turn of the loop: requests that were made together start together.
            await asyncio.sleep(0)
            while self._waiting:
                first = self._waiting[0].params
                group: list[_Request] = []
                rest: list[_Request] = []
                for request in self._waiting:
                    same = request.params == first and len(group) < self._largest
                    (group if same else rest).append(request)
                self._waiting = rest
                await self._run(group)
        finally:
            self._task = None

    async def _run(self, group: list[_Request]) -> None:
        alive = [request for request in group if not request.future.done()]
        if not alive:
            return
        try:
            items = await self._generate([request.prompt for request in alive], alive[0].params)
            if len(items) != len(alive):
                raise RuntimeError(f"{len(alive)} prompts gave {len(items)} results")
        except Exception as error:
            for request in alive:
                if not request.future.done():
                    request.future.set_exception(error)
            return
        for request, item in zip(alive, items, strict=True):
            if not request.future.done():
                request.future.set_result(item)
