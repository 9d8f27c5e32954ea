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
from arctic_rl_c.local.remote_errors import describe_error, rebuild_error
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


def loan_of(client: Mapping[str, Any]) -> str:
    """What the loan is called that a client asks for in this request, on all sides."""
    return f"{client['id']} {client['number']}"


@dataclass
class _Lent:
    loan: Loan
    running: asyncio.Future[dict[str, Any]]
    client: Mapping[str, Any]
    timer: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        return loan_of(self.client)


class Lender:
    """The server's side: which loans there are, by what they are called.

    Args:
        withdraw: Asks the role to refuse what comes with a loan from now on; gives whether
            something has come with it.
    """

    def __init__(self, withdraw: Callable[[str], Awaitable[bool]]) -> None:
        self._withdraw = withdraw
        self._lent: dict[str, _Lent] = {}
        self._given_up: set[str] = set()
        #: Clients that did not come for a loan, and have not been heard of since.
        self._silent: set[str] = set()
        self._ending: set[asyncio.Future[dict[str, Any]]] = set()
        self._looking: set[asyncio.Task[None]] = set()

    async def lend(
        self,
        loan: Loan,
        running: asyncio.Future[dict[str, Any]],
        client: Mapping[str, Any],
    ) -> dict[str, Any]:
        """What the loan grants, as `{"result"}`; or `{"error"}`, what `running`, its op, ends with.

        An op that has ended so is never granted.
        """
        self._silent.discard(client["id"])
        lent = _Lent(loan, running, client)
        self._lent[lent.name] = lent
        granted = asyncio.wrap_future(loan.granted)
        await asyncio.wait({running, granted}, return_when=asyncio.FIRST_COMPLETED)
        if not loan.granted.done():
            self._lent.pop(lent.name, None)
            error = too_late()
            loan.end(error)  # should it be the role's turn at this very moment
            return {"error": describe_error(error)} if running.cancelled() else running.result()
        if lent.name in self._lent:
            silent = client["id"] in self._silent
            self._wait(lent, time.monotonic() + (_ALIVE_SECONDS if silent else LOAN_SECONDS))
        return {"result": loan.granted.result()}

    def returned(self, name: str, error: Mapping[str, Any] | None) -> None:
        """The client does not need the role any more; `error` is how its op failed, if it did."""
        self._silent.discard(name.partition(" ")[0])
        if name in self._lent:
            self._end(name, None if error is None else rebuild_error(error))
        else:  # it is over, or has overtaken the asking for it
            self._given_up.add(name)
            loop = asyncio.get_running_loop()
            loop.call_later(LOAN_SECONDS, self._given_up.discard, name)

    async def ended(self) -> None:
        """What was returned so far has its effect: on whose turn it is, for one."""
        while self._ending:
            await asyncio.wait(self._ending)

    def gave_up(self, name: str) -> bool:
        """Whether the client has returned already what it is about to be lent."""
        known = name in self._given_up
        self._given_up.discard(name)
        return known

    def _end(self, name: str, error: Exception | None) -> None:
        lent = self._lent.pop(name, None)
        if lent is None:
            return
        if lent.timer is not None:
            lent.timer.cancel()
        self._ending.add(lent.running)
        lent.running.add_done_callback(self._ending.discard)
        if not lent.loan.end(error):
            lent.running.cancel()

    def _wait(self, lent: _Lent, until: float) -> None:
        pause = min(max(0.0, until - time.monotonic()), _ALIVE_SECONDS)
        lent.timer = asyncio.get_running_loop().call_later(pause, self._look, lent, until)

    def _look(self, lent: _Lent, until: float) -> None:
        client = Process(lent.client["identity"])
        gone = client.gone()
        client.close()
        if not gone and time.monotonic() < until:
            self._wait(lent, until)
            return
        task = asyncio.ensure_future(self._end_unheard(lent, gone))
        self._looking.add(task)
        task.add_done_callback(self._looking.discard)

    async def _end_unheard(self, lent: _Lent, gone: bool) -> None:
        """End a loan, used or not, and see that its client's next ones cost others no such time."""
        if gone:
            for one in list(self._lent.values()):
                if one.client["identity"] == lent.client["identity"] and one is not lent:
                    self._end(one.name, _unheard(one.client, False))
        else:
            self._silent.add(lent.client["id"])
        try:
            used = await self._withdraw(lent.name)  # which the role answers when its op has ended
        except Exception as error:  # it has died
            self._end(lent.name, error)
            return
        if used and not gone:
            await asyncio.sleep(_WORD_SECONDS)
        self._end(lent.name, _unheard(lent.client, used))


def _unheard(client: Mapping[str, Any], used: bool) -> Exception:
    pid = client["identity"]["pid"]
    error = PeerLostError(f"process {pid}, which was lent the trainer, was not heard of again")
    return complete(error, "ARL_ERR_PEER_LOST", "lend", maybe_applied=used)


def too_late() -> Exception:
    """The error of a client whose loan was taken back before it came."""
    error = PeerTimeoutError(
        "the trainer waited for this payload, was not asked in time and went on to others; nothing "
        "was changed by it. Was this process stopped, or is Ray's object store full?"
    )
    return complete(error, "ARL_ERR_TIMEOUT", "lend", maybe_applied=False)
