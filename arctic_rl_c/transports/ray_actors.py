# SPDX-License-Identifier: Apache-2.0
"""The embedded server as Ray actors: one for each role, and one in front that orders their ops.

The actor in front is what other processes attach to. It creates the roles and so owns them: they
end with it, and it ends with whoever created it. Ray sees to that, and so do they themselves.
It holds no model and does nothing slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from arctic_rl_c import PeerLostError, PeerTimeoutError
from arctic_rl_c.local.options import ROLE_FACTORY
from arctic_rl_c.local.remote_errors import describe_error, rebuild_error
from arctic_rl_c.local.server import EmbeddedServer, within
from arctic_rl_c.transports.deadline import SERVER_OPS, Wait, late
from arctic_rl_c.transports.http_errors import complete
from arctic_rl_c.transports.ray_data import pack, unpack
from arctic_rl_c.transports.ray_loan import Lender, Loan, loan_of
from arctic_rl_c.transports.ray_order import Arrivals
from arctic_rl_c.transports.ray_turn import TrainingTurn
from arctic_rl_c.transports.ray_watch import Process, identify, leave_with

#: How long a running op may go on after the owner has gone, so that it can clean up.
_GRACE_SECONDS = 2.0
#: What Ray raises when an actor, or what it needs, is no longer there.
_GONE = (
    "RayActorError",
    "ActorPlacementGroupRemoved",
    "ActorUnschedulableError",
    "LocalRayletDiedError",
    "OwnerDiedError",
)
_REMEDY = (
    "No actor is started again, as its weights are gone: end this transport, start a new one in "
    "the process that owns it, and load the last checkpoint"
)


#: Ops with a payload, for which the trainer is lent.
_LENT_FOR = frozenset({"fwd_bwd", "fwd_no_grad"})


class RoleActor:
    """A trainer or sampler in a Ray worker process; see `arctic_rl_c.local.worker`.

    Args:
        role: `trainer` or `sampler`.
        options: `{"model": {...}, "options": {...}}`, see `arctic_rl_c.local.options`.
        owner: Identity of the process that this one ends with.
        factory: `module:function` that builds the role from the first two.
    """

    def __init__(
        self,
        role: str,
        options: Mapping[str, Any],
        owner: Mapping[str, Any],
        factory: str = ROLE_FACTORY,
    ) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models come from disk
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        # Roles take turns on the same cores: threads that spin take the other's time.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        from arctic_rl_c.local.worker import (
            INTERRUPT,
            Interruption,
            load_factory,
            without_collections,
        )

        self._busy = threading.Lock()
        self._role: Any = None
        self._failed: dict[str, Any] | None = None
        self._interruption = Interruption()
        # The loan that was used last, and those that are not to be used: see `ray_loan`.
        self._loan: str | None = None
        self._withdrawn: set[str] = set()
        # Ray runs the ops of an actor like this one on the main thread, where Python runs the
        # handlers of signals.
        self._main = threading.current_thread()
        self._interruptible = self._main is threading.main_thread()
        if self._interruptible:
            signal.signal(INTERRUPT, self._interruption.raise_if_allowed)
        leave_with(owner, self._leave)
        try:
            with without_collections():
                self._role = load_factory(factory)(role, options)
        except Exception as error:
            # An exception here would leave Ray's own text only: keep it for the first op.
            self._failed = describe_error(error)

    def call(
        self, op: str, arguments: Mapping[str, Any], payload: Any = None, loan: str | None = None
    ) -> dict[str, Any]:
        """Run one of the role's ops: `{"result"}` or `{"error"}`.

        Args:
            op: Its name.
            arguments: Its keyword arguments, but for `payload`, which is packed.
            payload: Only with a loan.
            loan: What it is called, when a client asks and not the server. The answer to one that
                comes too late is `{"withdrawn": True}`.
        """
        from arctic_rl_c.local.worker import run_op

        if loan is not None:
            if loan in self._withdrawn:
                return {"withdrawn": True}
            self._loan = loan
        if self._failed is not None:
            return {"error": self._failed}
        try:
            given = (
                dict(arguments) if payload is None else {**arguments, "payload": unpack(payload)}
            )
            with self._busy:
                result = self._interruption.run(
                    op in self._role.INTERRUPTIBLE, partial(run_op, self._role, op, given)
                )
            return {"result": pack(result)}
        except Exception as error:
            return {"error": describe_error(error)}

    def withdraw(self, loan: str) -> bool:
        """Refuse what comes with this loan from now on; whether something has come with it."""
        if self._loan == loan:
            return True
        self._withdrawn.add(loan)
        return False

    def close(self) -> None:
        """Give back what the role holds outside its process."""
        with self._busy:
            if self._role is not None:
                self._role.close()

    def identity(self) -> dict[str, Any]:
        """The process that this is, and whether `RayRole.interrupt` may signal it."""
        return {**identify(), "interruptible": self._interruptible}

    def _leave(self) -> None:
        """End this process, after the role has given back what it holds, if that is soon."""
        from arctic_rl_c.local.worker import INTERRUPT

        timer = threading.Timer(_GRACE_SECONDS, os._exit, (1,))
        timer.daemon = True
        timer.start()
        if self._interruptible and self._main.ident is not None:
            signal.pthread_kill(self._main.ident, INTERRUPT)
        with contextlib.suppress(Exception):
            self.close()
        os._exit(1)


@dataclass
class _Request:
    op: str
    arguments: Mapping[str, Any]
    loan: Loan | None
    outcome: Future[Any] = field(default_factory=Future)


class RayRole:
    """A `Role` (see `arctic_rl_c.local.server`) that is a Ray actor.

    One request is with the actor at a time, so that one that is cancelled before that never runs.

    Args:
        role: Its name in what is said of it: `trainer`, `sampler`, or `sampler-0` and so on.
        actor: Handle of a `RoleActor`.
    """

    def __init__(self, role: str, actor: Any) -> None:
        self.role, self.actor = role, actor
        self.pid: int | None = None
        self._process: Process | None = None
        self._lock = threading.Lock()
        self._queue: deque[_Request] = deque()
        self._current: _Request | None = None
        self._handing = False
        # The first of its calls: known before any op has begun.
        actor.identity.remote().future().add_done_callback(self._identified)

    def submit(self, op: str, **arguments: Any) -> Future[Any]:
        """Ask for an op. Where its `payload` is a `Loan`, a client asks when it is its turn."""
        request = _Request(op, arguments, arguments.pop("payload", None))
        with self._lock:
            self._queue.append(request)
        self._next()
        return request.outcome

    @property
    def current(self) -> str | None:
        """The op that is with the actor; None when it is idle."""
        with self._lock:
            return None if self._current is None else self._current.op

    def _next(self) -> None:
        """Hand the actor the first request that is still wanted, if it is free.

        One caller at a time does so, and looks again: an actor that is dead answers at once.
        """
        with self._lock:
            if self._handing:
                return
            self._handing = True
        while (request := self._take()) is not None:
            if request.loan is not None:
                settle = partial(self._settle, request, result=None)
                request.loan.grant(request.op, request.arguments, settle)
                continue
            try:
                answered = self.actor.call.remote(request.op, request.arguments)
            except Exception as error:  # what cannot be pickled
                self._settle(request, error)
                continue
            answered.future().add_done_callback(partial(self._finish, request))

    def _take(self) -> _Request | None:
        with self._lock:
            while self._current is None and self._queue:
                request = self._queue.popleft()
                if request.outcome.set_running_or_notify_cancel():
                    self._current = request
                    return request
            self._handing = False
            return None

    def interrupt(self, op: str) -> None:
        """Break off `op` if that is what the role waits in, with a signal to its process.

        Both run on one node. Between two PID namespaces nothing is sent, and the op ends by its
        own deadline.
        """
        from arctic_rl_c.local.worker import INTERRUPT

        if self._process is not None:
            self._process.send(INTERRUPT)

    def _identified(self, done: Future[Any]) -> None:
        if done.exception() is None:
            self.pid = done.result().get("pid")
            if done.result()["interruptible"]:
                self._process = Process(done.result())

    def _finish(self, request: _Request, done: Future[Any]) -> None:
        error = failure(self.role, request.op, done)
        self._settle(request, error, None if error is not None else done.result()["result"])

    def _settle(self, request: _Request, error: BaseException | None, result: Any = None) -> None:
        with self._lock:
            self._current = None
        if error is not None:
            request.outcome.set_exception(error)
        else:
            request.outcome.set_result(result)
        self._next()


class ServerActor:
    """The embedded server, in front of its roles.

    Args:
        options: `LocalOptions` as a dict of dicts.
        resources: For each role, the trainer first, what `ray.remote(...).options` is given.
        colocated: Whether the roles use one device.
        owner: Identity of the process that this one ends with.
        factory: What builds a role, see `RoleActor`.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        resources: Sequence[Mapping[str, Any]],
        colocated: bool,
        owner: Mapping[str, Any],
        factory: str = ROLE_FACTORY,
    ) -> None:
        # Its roles end by themselves: there is nothing to give back here.
        leave_with(owner, partial(os._exit, 1))
        self._roles = [
            _start_role(options, resources, index, factory) for index in range(len(resources))
        ]
        self._arrivals = Arrivals()
        self._turn = TrainingTurn()
        self._lender = Lender(self._withdraw)
        self._server = EmbeddedServer(
            self._roles[0],
            self._roles[1:],
            cuda_ipc=options["cuda_ipc"],
            low_memory=options["low_memory"],
            sync_timeout=options["sync_timeout"],
            verify_weights=options["verify_weights"],
            weight_transport=options["weight_transport"],
            colocated=colocated,
            capacity=options["sampler"]["max_num_seqs"],
        )

    async def call(
        self, op: str, arguments: Mapping[str, Any], client: Mapping[str, Any], seconds: float
    ) -> dict[str, Any]:
        """Run one of `SERVER_OPS`: `{"result"}` or `{"error"}`.

        Args:
            op: Its name.
            arguments: Its keyword arguments.
            client: `id` of the transport that asks, `identity` of its process, and the `number`
                of the request among all of this transport.
            seconds: How long it may take.
        """
        await self._come(client)
        self._arrivals.passed(client)
        try:
            if op not in SERVER_OPS or op in _LENT_FOR:
                raise ValueError(f"the embedded server has no op {op!r} to call")
            with self._turn.taken(op, client), within(seconds):
                result = await getattr(self._server, op)(**arguments)
            if op == "load_checkpoint":
                self._turn.loaded(result)
            return {"result": result}
        except Exception as error:
            return {"error": describe_error(error)}

    async def lend(
        self,
        op: str,
        arguments: Mapping[str, Any],
        client: Mapping[str, Any],
        seconds: float,
        introduce: bool,
    ) -> dict[str, Any]:
        """Lend a client the trainer for an op with a payload, when it is its turn.

        Args:
            op: `fwd_bwd` or `fwd_no_grad`.
            arguments: Its keyword arguments, but for `payload`.
            client: As for `call`; `loan_of` it is what the loan is called.
            seconds: How long all of it may take.
            introduce: Whether the client does not know the trainer's actor yet.

        Returns:
            `{"error"}`, or `{"result"}`: the `op` and `arguments` that the trainer is to be asked,
            its `pid`, and to `introduce` it, its `actor`. Once that has answered, or the client
            has given up before it asked, it calls `returned`.
        """
        await self._come(client)
        if self._lender.gave_up(loan_of(client)):
            self._arrivals.passed(client)
            return {"result": None}
        loan = Loan()
        running = asyncio.ensure_future(self._run_lent(loan, op, arguments, client, seconds))
        running.add_done_callback(lambda _: self._arrivals.passed(client))  # cancelled at once
        answer = await self._lender.lend(loan, running, client)
        if answer.get("result") is not None:
            trainer = self._roles[0]
            answer["result"]["pid"] = trainer.pid
            if introduce:
                answer["result"]["actor"] = trainer.actor
        return answer

    async def _run_lent(
        self,
        loan: Loan,
        op: str,
        arguments: Mapping[str, Any],
        client: Mapping[str, Any],
        seconds: float,
    ) -> dict[str, Any]:
        """The op of a loan, from its place in the queue to its end."""
        self._arrivals.passed(client)
        try:
            if op not in _LENT_FOR:
                raise ValueError(f"the trainer is not lent for {op!r}")
            with self._turn.taken(op, client), within(seconds):
                try:
                    await getattr(self._server, op)(payload=loan, **arguments)
                except PeerTimeoutError as error:
                    # Once it was granted the client has the deadline, and knows what became of it.
                    if not (loan.granted.done() or getattr(error, "maybe_applied", False)):
                        raise
                    await asyncio.wrap_future(loan.ended)
            return {"result": None}
        except Exception as error:
            return {"error": describe_error(error)}

    async def _come(self, client: Mapping[str, Any]) -> None:
        await self._arrivals.wait(client)
        await self._lender.ended()

    async def returned(self, loan: str, error: Mapping[str, Any] | None) -> None:
        """A client does not need its loan any more; `error` is how the op failed, if it did."""
        self._lender.returned(loan, error)

    async def _withdraw(self, loan: str) -> bool:
        return bool(await self._roles[0].actor.withdraw.remote(loan))

    async def facts(self, seconds: float) -> dict[str, Any]:
        """Process ids by role, as `call` answers; when all have loaded their models."""
        asked = [asyncio.ensure_future(_got(role.actor.identity.remote())) for role in self._roles]
        await asyncio.wait(asked, timeout=None if seconds == math.inf else seconds)
        try:
            waits = [
                Wait(role.role, role.pid, False, role.current)
                for role, one in zip(self._roles, asked, strict=True)
                if not one.done()
            ]
            if waits:
                raise late("pids", seconds, waits)
            pids = [
                _result("pids", role, one)["pid"]
                for role, one in zip(self._roles, asked, strict=True)
            ]
        except Exception as error:
            return {"error": describe_error(error)}
        finally:
            for one in asked:
                if not one.cancel() and not one.cancelled():
                    one.exception()  # nobody may have looked at it
        names = [role.role for role in self._roles]
        return {"result": {"server": os.getpid(), **dict(zip(names, pids, strict=True))}}

    async def close(self) -> None:
        """Let the roles give back what they hold, and end them."""
        import ray

        await asyncio.to_thread(self._server.close)
        closing = (role.actor.close.remote() for role in self._roles)
        # A role that is dead or stuck does not keep the others from ending.
        await asyncio.wait([asyncio.ensure_future(_settled(ref)) for ref in closing], timeout=5.0)
        for role in self._roles:
            ray.kill(role.actor)


async def _got(reference: Any) -> Any:
    return await reference


def _result(op: str, role: RayRole, done: asyncio.Future[Any]) -> Any:
    try:
        return done.result()
    except Exception as error:
        raise lost(role.role, op, error) from error


async def _settled(reference: Any) -> None:
    try:
        await reference
    except Exception:
        return


def _start_role(
    options: Mapping[str, Any], resources: Sequence[Mapping[str, Any]], index: int, factory: str
) -> RayRole:
    """The trainer (index 0) or one of the samplers."""
    import ray

    kind = "trainer" if index == 0 else "sampler"
    own = dict(options[kind])
    if kind == "sampler":
        # Samplers that draw alike would give two halves of a group the same responses.
        own["seed"] += index - 1
    name = kind if index == 0 or len(resources) == 2 else f"sampler-{index - 1}"
    actor = (
        ray.remote(RoleActor)
        .options(**resources[index])
        .remote(kind, {"model": options[f"{kind}_model"], "options": own}, identify(), factory)
    )
    return RayRole(name, actor)


def failure(role: str, op: str, answered: Future[Any]) -> Exception | None:
    """What a call of an actor ended with, as an exception of this package; None for a result."""
    error = answered.exception()
    if error is not None:
        return lost(role, op, error)
    answer = answered.result()
    return rebuild_error(answer["error"]) if "error" in answer else None


def lost(role: str, op: str, error: BaseException) -> Exception:
    """What a failed call of an actor means, as an exception of this package."""
    import ray

    gone = [getattr(ray.exceptions, name, None) for name in _GONE]
    if not isinstance(error, tuple(cls for cls in gone if cls is not None)):
        return error if isinstance(error, Exception) else RuntimeError(repr(error))
    found = PeerLostError(
        f"the {role} (a Ray actor) died during {op!r}: {str(error).strip()}\n{_REMEDY}"
    )
    complete(found, "ARL_ERR_PEER_LOST", op)
    found.role = role  # type: ignore[attr-defined]
    found.__cause__ = error
    return found
