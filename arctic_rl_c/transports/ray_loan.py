# SPDX-License-Identifier: Apache-2.0
"""Lends a role to a client for one op, so that payload and answer need not pass the server.

Each actor that a call passes through costs about as much as the bare call of the role. So a client
asks the server for the role while it still copies its payload, and calls the role itself once the
server says that it is its turn:

    client    lend ──▶ server                               returned ──▶ server
              copies the payload      ◀── granted
                                      call ──▶ role ──▶ answer

The server keeps the order, the turns of clients, and what was not granted can be taken back as
ever. A loan whose client is gone, or not heard of for `LOAN_SECONDS`, ends by itself: the role is
told to refuse it, so it can never run out of order.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from arctic_rl_c import PeerLostError, PeerTimeoutError
from arctic_rl_c.local.remote_errors import rebuild_error
from arctic_rl_c.transports.http_errors import complete
from arctic_rl_c.transports.ray_watch import Process

#: After so long the server asks the role whether a client has come with what it was lent it for.
#: To copy a payload takes a second or two where it is many GB.
LOAN_SECONDS = 60.0
#: How often it looks whether the client's process is there, where it can be seen.
_ALIVE_SECONDS = 1.0
#: How much later than the answer itself a client's word of it may come.
_WORD_SECONDS = 5.0


class Loan:
    """A role for one op of a client. Stands where its payload would be, until the role has it."""

    def __init__(self) -> None:
        #: What the role is to be asked, once it is the client's turn.
        self.granted: Future[dict[str, Any]] = Future()
        #: How the op has ended.
        self.ended: Future[None] = Future()
        self._lock = threading.Lock()
        self._settle: Callable[[BaseException | None], None] | None = None

    def grant(
        self, op: str, arguments: Mapping[str, Any], settle: Callable[[BaseException | None], None]
    ) -> None:
        """It is the client's turn; `settle` frees the role, and is told how the op ended."""
        with self._lock:
            self._settle = settle
            wanted = not self.ended.done()
        if wanted:
            self.granted.set_result({"op": op, "arguments": arguments})
        else:
            settle(self.ended.exception())

    def end(self, error: BaseException | None) -> bool:
        """Free the role, the op having ended so. False when it was never granted."""
        with self._lock:
            first, settle = not self.ended.done(), self._settle
            if first and error is not None:
                self.ended.set_exception(error)
            elif first:
                self.ended.set_result(None)
        if first and settle is not None:
            settle(error)
        return settle is not None


@dataclass
class _Lent:
    loan: Loan
    running: asyncio.Future[dict[str, Any]]
    client: Mapping[str, Any]
    timer: asyncio.TimerHandle | None = None


class Lender:
    """The server's side: which loans there are, by their numbers.

    Args:
        withdraw: Asks the role to refuse what comes for a number from now on; gives whether
            something has come for it.
    """

    def __init__(self, withdraw: Callable[[str], Awaitable[bool]]) -> None:
        self._withdraw = withdraw
        self._lent: dict[str, _Lent] = {}
        self._looking: set[asyncio.Task[None]] = set()

    async def lend(
        self,
        number: str,
        loan: Loan,
        running: asyncio.Future[dict[str, Any]],
        client: Mapping[str, Any],
    ) -> dict[str, Any]:
        """What the loan grants, as `{"result"}`; or what `running`, its op, ends with instead."""
        lent = self._lent[number] = _Lent(loan, running, client)
        granted = asyncio.wrap_future(loan.granted)
        await asyncio.wait({running, granted}, return_when=asyncio.FIRST_COMPLETED)
        if not loan.granted.done():
            self._lent.pop(number, None)
            return {"result": None} if running.cancelled() else running.result()
        if number in self._lent:
            self._wait(lent, number, time.monotonic() + LOAN_SECONDS)
        return {"result": loan.granted.result()}

    def returned(self, number: str, error: Mapping[str, Any] | None) -> None:
        """The client does not need the role any more; `error` is how its op failed, if it did."""
        self._end(number, None if error is None else rebuild_error(error))

    def _end(self, number: str, error: Exception | None) -> None:
        lent = self._lent.pop(number, None)
        if lent is None:
            return
        if lent.timer is not None:
            lent.timer.cancel()
        if not lent.loan.end(error):
            lent.running.cancel()

    def _wait(self, lent: _Lent, number: str, until: float) -> None:
        left = max(0.0, until - time.monotonic())
        loop = asyncio.get_running_loop()
        lent.timer = loop.call_later(min(left, _ALIVE_SECONDS), self._look, lent, number, until)

    def _look(self, lent: _Lent, number: str, until: float) -> None:
        client = Process(lent.client["identity"])
        gone = client.gone()
        client.close()
        if not gone and time.monotonic() < until:
            self._wait(lent, number, until)
            return
        task = asyncio.ensure_future(self._look_for(lent, number))
        self._looking.add(task)
        task.add_done_callback(self._looking.discard)

    async def _look_for(self, lent: _Lent, number: str) -> None:
        """End a loan, used or not. While its op runs the role does not answer."""
        try:
            used = await self._withdraw(number)
        except Exception as error:  # it has died
            self._end(number, error)
            return
        if used:
            await asyncio.sleep(_WORD_SECONDS)
        self._end(number, _unheard(lent.client, used))


def _unheard(client: Mapping[str, Any], used: bool) -> Exception:
    pid = client["identity"]["pid"]
    error = PeerLostError(f"process {pid}, which was lent the trainer, was not heard of again")
    return complete(error, "ARL_ERR_PEER_LOST", "lend", maybe_applied=used)


def too_late(op: str) -> Exception:
    """The error of a client whose loan was taken back before it came."""
    error = PeerTimeoutError(
        f"{op}: the trainer waited {LOAN_SECONDS:g} s for this payload and went on to others; "
        f"nothing was changed by it. Was this process stopped, or is Ray's object store full?"
    )
    return complete(error, "ARL_ERR_TIMEOUT", op, maybe_applied=False)
