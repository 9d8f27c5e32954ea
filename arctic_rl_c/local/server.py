# SPDX-License-Identifier: Apache-2.0
"""The embedded server: an Arctic server's ops over one trainer and its samplers.

It knows the roles only as things that take an op's name and give a future, so the same
server runs over child processes, over actors, and behind an HTTP front end.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol

from arctic_rl_c import PeerLostError, WeightSyncError
from arctic_rl_c.local.routing import Router, as_keys, as_prompts, merge_answers, sequences_of
from arctic_rl_c.transports.deadline import TIMEOUT, Wait, late, left, limits

_Asked = Sequence[tuple["Role", Future[Any]]]

#: What the caller of a server that answers for others gave them, instead of the server's own.
_SECONDS: ContextVar[float | None] = ContextVar("arctic_rl_c_seconds", default=None)

#: How long the other side of a failed transfer may take to notice by itself.
_INTERRUPT_SECONDS = 0.25


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Ops that are awaited in this context may take so long, whatever their server allows."""
    token = _SECONDS.set(seconds)
    try:
        yield
    finally:
        _SECONDS.reset(token)


class Role(Protocol):
    """A trainer or sampler that is somewhere."""

    role: str

    @property
    def pid(self) -> int | None:
        """Its process, where that is known."""
        ...

    @property
    def current(self) -> str | None:
        """The op that it is in, None when it is idle."""
        ...

    def submit(self, op: str, **arguments: Any) -> Future[Any]:
        """Ask for one of the role's ops; the future gives its result or its exception.

        While it waits for others to end the future can be cancelled; it is then never run.
        """
        ...

    def interrupt(self, op: str) -> None:
        """Break off `op` if it is what the role waits in; a role that cannot does nothing."""
        ...


class EmbeddedServer:
    """Ops over a trainer and one sampler, or several.

    Ops of different roles run at the same time; those of one role one after another. No
    method blocks the event loop, and methods may be called from several loops.

    Args:
        trainer, sampler: The roles; of several samplers, which have a `role` each of their own,
            a sequence.
        cuda_ipc, low_memory: What `sync_weights` does when a call does not say.
        sync_timeout: Seconds for each phase of a sync.
        verify_weights: Compare a digest of all weights on both sides after each sync.
        weight_transport: One transport by name, instead of choosing by the flags.
        colocated: Whether both roles use one device; None lets the sender find out.
        capacity: Sequences that one of several samplers decodes together; a routing key is
            bound to its sampler while that has fewer in hand.
        timeout: Seconds that an op may take, with all that it waits for.
        timeouts: The same for single methods, e.g. `{"generate": 600}`.
    """

    def __init__(
        self,
        trainer: Role,
        sampler: Role | Sequence[Role],
        *,
        cuda_ipc: bool = False,
        low_memory: bool = False,
        sync_timeout: float = 60.0,
        verify_weights: bool = True,
        weight_transport: str | None = None,
        colocated: bool | None = None,
        capacity: int = 256,
        timeout: float = TIMEOUT,
        timeouts: Mapping[str, float] | None = None,
    ) -> None:
        self._timeout, self._timeouts = limits(timeout, timeouts)
        self._trainer = trainer
        self._samplers = tuple(sampler) if isinstance(sampler, Sequence) else (sampler,)
        self._router = Router(len(self._samplers), capacity)
        self._cuda_ipc, self._low_memory = cuda_ipc, low_memory
        self._sync_timeout, self._verify = sync_timeout, verify_weights
        self._weight_transport, self._colocated = weight_transport, colocated
        # A sync is a sequence over both roles that must reach its end even when its caller is
        # cancelled or its loop closed: it runs on a thread. One at a time.
        self._sync_thread = ThreadPoolExecutor(1, thread_name_prefix="arctic_rl_c sync")
        self._lock = threading.Lock()
        # One for each sync that has not ended, done when it has. Never an exception in these:
        # whoever waits for a sync to end does not ask how.
        self._syncs: set[Future[None]] = set()
        # What the sync that is running has asked last, and of whom.
        self._sync_asks: _Asked = ()
        self._closed = False

    # -- trainer -----------------------------------------------------------------------------

    async def fwd_no_grad(
        self, payload: Mapping[str, Any], reference_model: bool = False
    ) -> dict[str, Any]:
        """See `Trainer.forward`."""
        return await self._ask_trainer(
            "fwd_no_grad", "forward", payload=payload, reference_model=reference_model
        )

    async def fwd_bwd(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """See `Trainer.forward_backward`."""
        return await self._ask_trainer("fwd_bwd", "forward_backward", payload=payload)

    async def step(self) -> dict[str, Any]:
        """See `Trainer.step`."""
        return await self._ask_trainer("step", "step")

    async def save_checkpoint(self, **kwargs: Any) -> dict[str, Any]:
        """See `Trainer.save_checkpoint`."""
        return await self._ask_trainer("save_checkpoint", "save_checkpoint", **kwargs)

    async def load_checkpoint(self, **kwargs: Any) -> dict[str, Any]:
        """See `Trainer.load_checkpoint`."""
        return await self._ask_trainer("load_checkpoint", "load_checkpoint", **kwargs)

    # -- sampler -----------------------------------------------------------------------------

    async def generate(
        self,
        prompts: str | Sequence[Any],
        sampling_params: Mapping[str, Any] | None = None,
        routing_key: str | Sequence[str | None] | None = None,
        strict: bool = False,
    ) -> list[dict[str, Any]]:
        """See `Sampler.generate`.

        Args:
            prompts: As there.
            sampling_params: As there.
            routing_key: Which sampler serves a prompt: one key for all or one a prompt. Equal
                keys go to one sampler; prompts without a key where the least is in hand.
            strict: Wait for the key's sampler, also when it has its fill and another has not.
        """
        if len(self._samplers) > 1:
            return await self._generate_spread(prompts, sampling_params, routing_key, strict)
        if routing_key is not None:
            as_keys(routing_key, len(as_prompts(prompts)))
        asked = {"prompts": prompts, "sampling_params": sampling_params}
        [answer] = await self._ask("generate", self._samplers, "generate", **asked)
        results: list[dict[str, Any]] = answer["results"]
        return results

    async def _generate_spread(
        self,
        prompts: str | Sequence[Any],
        sampling_params: Mapping[str, Any] | None,
        routing_key: str | Sequence[str | None] | None,
        strict: bool,
    ) -> list[dict[str, Any]]:
        """Give each sampler its share, and put their answers into the order of the prompts."""
        listed = as_prompts(prompts)
        keys, sequences = as_keys(routing_key, len(listed)), sequences_of(sampling_params)

        shares: list[list[int]] = []

        def ask() -> _Asked:
            places = self._router.place(keys, sequences, strict)
            asked = []
            # Nothing to generate is still asked for: the parameters are checked, and the state.
            for index in sorted(set(places)) or [0]:
                numbers = [number for number, place in enumerate(places) if place == index]
                future = self._samplers[index].submit(
                    "generate",
                    prompts=[listed[number] for number in numbers],
                    sampling_params=sampling_params,
                    numbers=numbers,
                )
                counted = len(numbers) * sequences
                future.add_done_callback(partial(self._router.done, index, counted))
                shares.append(numbers)
                asked.append((self._samplers[index], future))
            return asked

        answers = await self._answers("generate", ask)
        results: list[dict[str, Any]] = [{}] * len(listed)
        for numbers, answer in zip(shares, answers, strict=True):
            for number, result in zip(numbers, answer["results"], strict=True):
                results[number] = result
        return results

    async def sleep_inference(self, level: int = 1) -> dict[str, Any]:
        """See `Sampler.sleep`."""
        return {"sampling": await self._ask_samplers("sleep_inference", "sleep", level=level)}

    async def wake_inference(self, tags: Sequence[str] | None = None) -> dict[str, Any]:
        """See `Sampler.wake`."""
        listed = isinstance(tags, Sequence) and not isinstance(tags, str)
        if tags is not None and not (listed and all(isinstance(tag, str) for tag in tags)):
            raise TypeError(f"wake_inference: tags is a list of text or None, found {tags!r}")
        wanted = None if tags is None else list(tags)
        return {"sampling": await self._ask_samplers("wake_inference", "wake", tags=wanted)}

    async def reset_prefix_cache(self) -> dict[str, Any]:
        """Forget the states of earlier prompts, once running requests have ended."""
        return await self._ask_samplers("reset_prefix_cache", "reset_prefix_cache")

    # -- both --------------------------------------------------------------------------------

    async def sync_weights(
        self, cuda_ipc: bool | None = None, low_memory: bool | None = None
    ) -> dict[str, Any]:
        """Bring the trainer's weights to the sampler.

        The sampler's weights are woken, the offer is served and pulled at the same time, the
        result verified, the offer released, and only then the rest of the sampler woken and
        its prefix cache emptied. Whatever fails, the offer is released and the sampler woken;
        it generates again unless its weights were left torn, which it then says.

        Several samplers pull from one offer. When only some of them got the weights, none
        generates until a sync has succeeded, and each says why.

        Other ops wait for a running sync. A caller that is cancelled, or whose deadline has
        passed, stops waiting; a sync that has begun goes on to its end.

        Args:
            cuda_ipc: None takes the stored flag.
            low_memory: None takes the stored flag.

        Returns:
            `{"status": "ok", "version", "seconds", "verify_seconds", "digest"?, "sender",
            "receiver"}`, the last two being each side's statistics; with several samplers
            also `receivers`, of all of them. `seconds` leaves out the verification.
        """
        ipc = self._cuda_ipc if cuda_ipc is None else cuda_ipc
        # The stored low_memory belongs to the stored cuda_ipc: a call without it has neither.
        low = (self._low_memory and ipc) if low_memory is None else low_memory
        if low and not ipc:
            raise ValueError("low_memory applies to cuda_ipc only: set both, or neither")
        with self._lock:
            if self._closed:
                raise PeerLostError("the embedded server was shut down")
            ended: Future[None] = Future()
            ended.set_running_or_notify_cancel()  # a waiter that is cancelled cannot cancel it
            self._syncs.add(ended)
            future = self._sync_thread.submit(self._sync, ipc, low)

        def end(_: Future[Any]) -> None:
            """Let those go on that wait for the sync to end."""
            with self._lock:
                self._syncs.discard(ended)
            ended.set_result(None)

        future.add_done_callback(end)
        waiting = asyncio.wrap_future(future)
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
        seconds = self._seconds("sync_weights")
        await asyncio.wait({waiting}, timeout=left(time.monotonic() + seconds))
        if not waiting.done():
            begun = not future.cancel()
            raise late("sync_weights", seconds, self._waits_of_sync(begun))
        return waiting.result()

    async def weights_digests(self) -> dict[str, str]:
        """SHA-256 over all weights, by role: `trainer` and `sampler`, or each sampler's own."""
        answers = await self._ask("weights_digests", self._everyone(), "weights_digest")
        return {n: str(a["digest"]) for n, a in zip(self._names(), answers, strict=True)}

    async def describe(self) -> dict[str, Any]:
        """Facts about each role, by the names that `weights_digests` has."""
        answers = await self._ask("describe", self._everyone(), "describe")
        return dict(zip(self._names(), answers, strict=True))

    async def measure_peak_flops(self) -> float:
        """See `Trainer.measure_peak_flops`."""
        op = "measure_peak_flops"
        return float((await self._ask_trainer(op, op))["flops"])

    def close(self) -> None:
        """End the sync thread, after a sync that is running. The roles are their owner's."""
        with self._lock:
            self._closed = True
        self._sync_thread.shutdown()

    def _everyone(self) -> tuple[Role, ...]:
        return (self._trainer, *self._samplers)

    def _names(self) -> list[str]:
        several = len(self._samplers) > 1
        return ["trainer", *(s.role if several else "sampler" for s in self._samplers)]

    async def _ask_trainer(self, op: str, name: str, **arguments: Any) -> dict[str, Any]:
        answers = await self._ask(op, (self._trainer,), name, **arguments)
        result: dict[str, Any] = answers[0]
        return result

    async def _ask_samplers(self, op: str, name: str, **arguments: Any) -> dict[str, Any]:
        """An op that concerns every sampler. It has ended on all of them when this returns."""
        return merge_answers(await self._ask(op, self._samplers, name, **arguments))

    async def _ask(self, op: str, roles: Sequence[Role], name: str, **arguments: Any) -> list[Any]:
        """What these roles answer to `name`, which `op` of this server asks them."""
        return await self._answers(
            op, lambda: [(role, role.submit(name, **arguments)) for role in roles]
        )

    async def _answers(self, op: str, ask: Callable[[], _Asked]) -> list[Any]:
        """The answers of all, when all have ended; raises what the first of them raised.

        Args:
            op: Of this server.
            ask: Asks the roles, once no sync is in the way.

        Raises:
            PeerTimeoutError: The op took too long; says who it waits for.
        """
        seconds = self._seconds(op)
        until = time.monotonic() + seconds
        asked = await self._after_syncs(op, ask, seconds, until)
        waiting = [asyncio.wrap_future(future) for _, future in asked]
        try:
            _, pending = await asyncio.wait(waiting, timeout=left(until))
            if pending:
                waits = [
                    _wait_for(role, begun=not future.cancel())  # taken back if not
                    for (role, future), waiter in zip(asked, waiting, strict=True)
                    if waiter in pending
                ]
                raise late(op, seconds, waits)
        finally:
            for waiter in waiting:
                # What has not begun is not wanted any more; what has does not hear of it.
                if not waiter.cancel() and not waiter.cancelled():
                    waiter.exception()  # nobody may be left to look at it
        failed = [error for waiter in waiting if (error := waiter.exception()) is not None]
        if failed:
            raise failed[0]
        return [waiter.result() for waiter in waiting]

    async def _after_syncs(
        self, op: str, ask: Callable[[], _Asked], seconds: float, until: float
    ) -> _Asked:
        # Between its steps a sync has the sampler half awake and the weights on offer. What is
        # handed to a role before a sync begins is done before the sync's own first step.
        while True:
            with self._lock:
                sync = next(iter(self._syncs), None)
                if sync is None:
                    return ask()
            waiter = asyncio.wrap_future(sync)
            await asyncio.wait({waiter}, timeout=left(until))
            if not waiter.done():
                raise late(op, seconds, self._waits_of_sync(begun=False))

    def _seconds(self, op: str) -> float:
        given = _SECONDS.get()
        return self._timeouts.get(op, self._timeout) if given is None else given

    def _waits_of_sync(self, begun: bool) -> list[Wait]:
        """Who the sync that is running waits for."""
        roles = [role for role, future in self._sync_asks if not future.done()]
        return [_wait_for(role, begun) for role in roles] or [Wait("weight sync", None, begun)]

    def _sync(self, cuda_ipc: bool, low_memory: bool) -> dict[str, Any]:
        """The sequence of a sync, on its own thread."""
        try:
            result = self._transfer(cuda_ipc, low_memory)
        except BaseException:
            self._recover()
            raise
        begin = time.perf_counter()
        self._do([self._trainer], "release_weights")
        self._do(self._samplers, "wake", tags=["kv_cache"])
        self._do(self._samplers, "reset_prefix_cache")
        result["seconds"] += time.perf_counter() - begin
        return result

    def _transfer(self, cuda_ipc: bool, low_memory: bool) -> dict[str, Any]:
        begin, timeout = time.perf_counter(), self._sync_timeout
        self._do(self._samplers, "wake", tags=["weights"])
        several = {"receivers": len(self._samplers)} if len(self._samplers) > 1 else {}
        [offer] = self._do(
            [self._trainer],
            "offer_weights",
            cuda_ipc=cuda_ipc,
            low_memory=low_memory,
            transport=self._weight_transport,
            colocated=self._colocated,
            timeout=timeout,
            **several,
        )
        serving = self._trainer.submit("serve_weights", timeout=timeout)
        pulls = [
            sampler.submit("pull_weights", offer=offer["offer"], timeout=timeout)
            for sampler in self._samplers
        ]
        first = self._finish(serving, pulls)
        if first is not None:
            self._refuse_mixture(pulls, offer["version"])
            raise first
        result = {
            "status": "ok",
            "version": offer["version"],
            "seconds": time.perf_counter() - begin,
            "verify_seconds": 0.0,
            "sender": serving.result(),
            "receiver": pulls[0].result(),
        }
        if several:
            result["receivers"] = [pulling.result() for pulling in pulls]
        if self._verify:
            begin = time.perf_counter()
            result["digest"] = self._verify_digests()
            result["verify_seconds"] = time.perf_counter() - begin
        return result

    def _finish(self, serving: Future[Any], pulls: Sequence[Future[Any]]) -> BaseException | None:
        """Wait for both sides of a transfer to end; what broke it, if anything did."""
        every = (serving, *pulls)
        self._sync_asks = list(zip(self._everyone(), every, strict=True))
        done, _ = wait(every, return_when=FIRST_EXCEPTION)
        failed = [future for future in every if future in done and future.exception() is not None]
        if not failed:
            return None
        # The side that failed first knows why. The others may wait for it to the deadline,
        # or not have begun to: then they have to be told again.
        while pending := wait(every, timeout=_INTERRUPT_SECONDS).not_done:
            if serving in pending:
                self._trainer.interrupt("serve_weights")
            for sampler, pulling in zip(self._samplers, pulls, strict=True):
                if pulling in pending:
                    sampler.interrupt("pull_weights")
        # But where a role's process is gone, that is the reason, and all else its consequence.
        errors = [future.exception() for future in every]
        gone = next((error for error in errors if hasattr(error, "role")), None)
        return failed[0].exception() if gone is None else gone

    def _refuse_mixture(self, pulls: Sequence[Future[Any]], version: int) -> None:
        """When some samplers have the new weights and some have not, let none generate."""
        whole = {s.role: p.exception() is None for s, p in zip(self._samplers, pulls, strict=True)}
        if len(set(whole.values())) == 1:
            return
        having, lacking = ([r for r, had in whole.items() if had is kind] for kind in (True, False))
        reason = (
            f"the weight sync to version {version} reached {', '.join(having)} and not "
            f"{', '.join(lacking)}"
        )
        wait([sampler.submit("mark_torn", reason=reason) for sampler in self._samplers])

    def _verify_digests(self) -> str:
        futures = [role.submit("weights_digest") for role in self._everyone()]
        wanted, *found = (str(future.result()["digest"]) for future in futures)
        for sampler, digest in zip(self._samplers, found, strict=True):
            if wanted != digest:
                reason = (
                    f"after a sync the {sampler.role}'s weights have the digest {digest[:16]}, "
                    f"the trainer's {wanted[:16]}"
                )
                self._do(self._samplers, "mark_torn", reason=reason)
                raise WeightSyncError(reason)
        return wanted

    def _recover(self) -> None:
        """After a failed sync: nothing stays on offer, nothing asleep.

        A role that is gone cannot be helped; the error on its way says so.
        """
        for roles, op in (
            ((self._trainer,), "release_weights"),
            (self._samplers, "wake"),
            (self._samplers, "reset_prefix_cache"),
        ):
            wait([role.submit(op) for role in roles])  # the first error wins

    def _do(self, roles: Sequence[Role], op: str, **arguments: Any) -> list[Any]:
        """Have all these roles do it; raises what the first of them raised, when all ended."""
        self._sync_asks = [(role, role.submit(op, **arguments)) for role in roles]
        futures = [future for _, future in self._sync_asks]
        wait(futures)
        return [future.result() for future in futures]


def _wait_for(role: Role, begun: bool) -> Wait:
    return Wait(role.role, role.pid, begun, role.current)
