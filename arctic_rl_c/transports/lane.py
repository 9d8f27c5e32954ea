# SPDX-License-Identifier: Apache-2.0
"""An event loop on a thread of its own, for code that blocks whoever awaits it."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_JOIN_SECONDS = 5.0


class LaneTimeoutError(Exception):
    """No answer in time; `started` says whether the work had begun."""

    def __init__(self, started: bool) -> None:
        super().__init__(started)
        self.started = started


class Lane:
    """Runs work in the order of arrival, next to its callers' event loops.

    Work that blocks holds up its own lane alone. Work whose caller has gone away before it began
    is never run; once begun it runs to its end.

    The thread begins with the first work.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, work: Callable[[], Any], timeout: float | None = None) -> Any:
        """The result of `work()`, awaited there if it is awaitable.

        Raises:
            LaneTimeoutError: `timeout` seconds passed.
        """
        job = _Job(work)
        self._post(job)
        return await wait_for(job.answer, timeout, job.abandon)

    def post(self, work: Callable[[], Any]) -> None:
        """Run `work()` for whom it tells its result itself."""
        self._post(_Job(work))

    def _post(self, job: _Job) -> None:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name=self._name, daemon=True
                )
                self._thread.start()
            self._loop.call_soon_threadsafe(self._begin, self._loop, job)

    def _begin(self, loop: asyncio.AbstractEventLoop, job: _Job) -> None:
        if job.start():
            task = loop.create_task(job.run())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """End the thread, unless something blocks it; that ends with the process. Idempotent."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        loop.call_soon_threadsafe(self._stop, loop)
        thread.join(_JOIN_SECONDS)
        if not thread.is_alive():
            loop.close()

    def _stop(self, loop: asyncio.AbstractEventLoop) -> None:
        for task in self._tasks:
            task.cancel()
        # A task hears of its cancellation in the next turn.
        loop.call_soon(lambda: loop.call_soon(loop.stop))


async def wait_for(
    answer: Future[Any], timeout: float | None, abandon: Callable[[], bool] = lambda: True
) -> Any:
    """The result of a running future, which goes on when the wait ends early.

    Raises:
        LaneTimeoutError: `timeout` seconds passed; `abandon()` told whether it had begun.
    """
    waiter = asyncio.wrap_future(answer)
    try:
        await asyncio.wait({waiter}, timeout=timeout)
        if not waiter.done():
            raise LaneTimeoutError(abandon())
    except asyncio.CancelledError:
        abandon()
        raise
    finally:
        if not waiter.done():
            waiter.cancel()  # `answer` is running, so it does not hear of it
        elif not waiter.cancelled():
            waiter.exception()  # nobody may be left to look at it
    return waiter.result()


class _Job:
    """One piece of work, and who waits for it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._started = self._abandoned = False
        self.answer: Future[Any] = Future()
        self.answer.set_running_or_notify_cancel()

    def start(self) -> bool:
        """Whether anybody still waits for it, from then on it is started."""
        with self._lock:
            self._started = not self._abandoned
            return self._started

    def abandon(self) -> bool:
        """Whether it was started; else it never will be."""
        with self._lock:
            self._abandoned = True
            return self._started

    async def run(self) -> None:
        try:
            result = self._work()
            if inspect.isawaitable(result):
                result = await result
        except asyncio.CancelledError:
            self.answer.set_exception(RuntimeError("the lane was closed"))
            raise
        except BaseException as error:
            self.answer.set_exception(error)
        else:
            self.answer.set_result(result)
