# SPDX-License-Identifier: Apache-2.0
"""The embedded server: an Arctic server's ops over one trainer and one sampler.

It knows the two roles only as things that take an op's name and give a future, so the same
server runs over child processes, over actors, and behind an HTTP front end.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

from arctic_rl_c import PeerLostError, WeightSyncError

#: How long the other side of a failed transfer may take to notice by itself.
_INTERRUPT_SECONDS = 0.25


class Role(Protocol):
    """A trainer or sampler that is somewhere."""

    role: str

    def submit(self, op: str, **arguments: Any) -> Future[Any]:
        """Ask for one of the role's ops; the future gives its result or its exception."""
        ...

    def interrupt(self, op: str) -> None:
        """Break off `op` if it is what the role waits in; a role that cannot does nothing."""
        ...


class EmbeddedServer:
    """Ops over a trainer and a sampler.

    Ops of different roles run at the same time; those of one role one after another. No
    method blocks the event loop, and methods may be called from several loops.

    Args:
        trainer, sampler: The roles.
        cuda_ipc, low_memory: What `sync_weights` does when a call does not say.
        sync_timeout: Seconds for each phase of a sync.
        verify_weights: Compare a digest of all weights on both sides after each sync.
        weight_transport: One transport by name, instead of choosing by the flags.
        colocated: Whether both roles use one device; None lets the sender find out.
    """

    def __init__(
        self,
        trainer: Role,
        sampler: Role,
        *,
        cuda_ipc: bool = False,
        low_memory: bool = False,
        sync_timeout: float = 60.0,
        verify_weights: bool = True,
        weight_transport: str | None = None,
        colocated: bool | None = None,
    ) -> None:
        self._trainer, self._sampler = trainer, sampler
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
        self._closed = False

    # -- trainer -----------------------------------------------------------------------------

    async def fwd_no_grad(
        self, payload: Mapping[str, Any], reference_model: bool = False
    ) -> dict[str, Any]:
        """See `Trainer.forward`."""
        return await self._ask(
            self._trainer, "forward", payload=payload, reference_model=reference_model
        )

    async def fwd_bwd(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """See `Trainer.forward_backward`."""
        return await self._ask(self._trainer, "forward_backward", payload=payload)

    async def step(self) -> dict[str, Any]:
        """See `Trainer.step`."""
        return await self._ask(self._trainer, "step")

    async def save_checkpoint(self, **kwargs: Any) -> dict[str, Any]:
        """See `Trainer.save_checkpoint`."""
        return await self._ask(self._trainer, "save_checkpoint", **kwargs)

    async def load_checkpoint(self, **kwargs: Any) -> dict[str, Any]:
        """See `Trainer.load_checkpoint`."""
        return await self._ask(self._trainer, "load_checkpoint", **kwargs)

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
            routing_key: Which replica serves a prompt: one key for all or one a prompt. There
                is one replica, which serves every key.
            strict: Wait for the key's replica rather than use another; so always granted.
        """
        if routing_key is not None and not isinstance(routing_key, str):
            count = len(prompts) if not _is_one_prompt(prompts) else 1
            if len(routing_key) != count:
                raise ValueError(f"{len(routing_key)} routing keys for {count} prompts")
        answer = await self._ask(
            self._sampler, "generate", prompts=prompts, sampling_params=sampling_params
        )
        results: list[dict[str, Any]] = answer["results"]
        return results

    async def sleep_inference(self, level: int = 1) -> dict[str, Any]:
        """See `Sampler.sleep`."""
        return {"sampling": await self._ask(self._sampler, "sleep", level=level)}

    async def wake_inference(self, tags: Sequence[str] | None = None) -> dict[str, Any]:
        """See `Sampler.wake`."""
        wanted = None if tags is None else list(tags)
        return {"sampling": await self._ask(self._sampler, "wake", tags=wanted)}

    async def reset_prefix_cache(self) -> dict[str, Any]:
        """Forget the states of earlier prompts, once running requests have ended."""
        return await self._ask(self._sampler, "reset_prefix_cache")

    # -- both --------------------------------------------------------------------------------

    async def sync_weights(
        self, cuda_ipc: bool | None = None, low_memory: bool | None = None
    ) -> dict[str, Any]:
        """Bring the trainer's weights to the sampler.

        The sampler's weights are woken, the offer is served and pulled at the same time, the
        result verified, the offer released, and only then the rest of the sampler woken and
        its prefix cache emptied. Whatever fails, the offer is released and the sampler woken;
        it generates again unless its weights were left torn, which it then says.

        Other ops wait for a running sync. A caller that is cancelled stops waiting; the sync
        goes on to its end.

        Args:
            cuda_ipc: None takes the stored flag.
            low_memory: None takes the stored flag.

        Returns:
            `{"status": "ok", "version", "seconds", "verify_seconds", "digest"?, "sender",
            "receiver"}`, the last two being each side's statistics. `seconds` leaves out the
            verification.
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
        # Shielded: a cancelled waiter would otherwise cancel a sync that has not begun.
        waiting = asyncio.wrap_future(future)
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
        result: dict[str, Any] = await asyncio.shield(waiting)
        return result

    async def weights_digests(self) -> dict[str, str]:
        """SHA-256 over all weights, of both roles."""
        trainer, sampler = await asyncio.gather(
            self._ask(self._trainer, "weights_digest"), self._ask(self._sampler, "weights_digest")
        )
        return {"trainer": trainer["digest"], "sampler": sampler["digest"]}

    async def describe(self) -> dict[str, Any]:
        """Facts about both roles."""
        trainer, sampler = await asyncio.gather(
            self._ask(self._trainer, "describe"), self._ask(self._sampler, "describe")
        )
        return {"trainer": trainer, "sampler": sampler}

    async def measure_peak_flops(self) -> float:
        """See `Trainer.measure_peak_flops`."""
        return float((await self._ask(self._trainer, "measure_peak_flops"))["flops"])

    def close(self) -> None:
        """End the sync thread, after a sync that is running. The roles are their owner's."""
        with self._lock:
            self._closed = True
        self._sync_thread.shutdown()

    async def _ask(self, role: Role, op: str, **arguments: Any) -> dict[str, Any]:
        # Between its steps a sync has the sampler half awake and the weights on offer. What is
        # handed to a role before a sync begins is done before the sync's own first step.
        while True:
            with self._lock:
                sync = next(iter(self._syncs), None)
                if sync is None:
                    future = role.submit(op, **arguments)
                    break
            await asyncio.wrap_future(sync)
        result: dict[str, Any] = await asyncio.wrap_future(future)
        return result

    def _sync(self, cuda_ipc: bool, low_memory: bool) -> dict[str, Any]:
        """The sequence of a sync, on its own thread."""
        try:
            result = self._transfer(cuda_ipc, low_memory)
        except BaseException:
            self._recover()
            raise
        begin = time.perf_counter()
        self._do(self._trainer, "release_weights")
        self._do(self._sampler, "wake", tags=["kv_cache"])
        self._do(self._sampler, "reset_prefix_cache")
        result["seconds"] += time.perf_counter() - begin
        return result

    def _transfer(self, cuda_ipc: bool, low_memory: bool) -> dict[str, Any]:
        begin, timeout = time.perf_counter(), self._sync_timeout
        self._do(self._sampler, "wake", tags=["weights"])
        offer = self._do(
            self._trainer,
            "offer_weights",
            cuda_ipc=cuda_ipc,
            low_memory=low_memory,
            transport=self._weight_transport,
            colocated=self._colocated,
            timeout=timeout,
        )
        serving = self._trainer.submit("serve_weights", timeout=timeout)
        pulling = self._sampler.submit("pull_weights", offer=offer["offer"], timeout=timeout)
        done, _ = wait((serving, pulling), return_when=FIRST_EXCEPTION)
        failed = [f for f in done if f.exception() is not None]
        if failed:
            # The side that failed first knows why. The other may wait for it to the deadline,
            # or not have begun to: then it has to be told again.
            while wait((serving, pulling), timeout=_INTERRUPT_SECONDS).not_done:
                self._trainer.interrupt("serve_weights")
                self._sampler.interrupt("pull_weights")
            raise failed[0].exception()  # type: ignore[misc]
        result = {
            "status": "ok",
            "version": offer["version"],
            "seconds": time.perf_counter() - begin,
            "verify_seconds": 0.0,
            "sender": serving.result(),
            "receiver": pulling.result(),
        }
        if self._verify:
            begin = time.perf_counter()
            result["digest"] = self._verify_digests()
            result["verify_seconds"] = time.perf_counter() - begin
        return result

    def _verify_digests(self) -> str:
        futures = [role.submit("weights_digest") for role in (self._trainer, self._sampler)]
        wanted, found = (str(f.result()["digest"]) for f in futures)
        if wanted != found:
            reason = (
                f"after a sync the sampler's weights have the digest {found[:16]}, the "
                f"trainer's {wanted[:16]}"
            )
            self._do(self._sampler, "mark_torn", reason=reason)
            raise WeightSyncError(reason)
        return wanted

    def _recover(self) -> None:
        """After a failed sync: nothing stays on offer, nothing asleep.

        A role that is gone cannot be helped; the error on its way says so.
        """
        for role, op in (
            (self._trainer, "release_weights"),
            (self._sampler, "wake"),
            (self._sampler, "reset_prefix_cache"),
        ):
            role.submit(op).exception()  # waits; the first error wins

    def _do(self, role: Role, op: str, **arguments: Any) -> Any:
        return role.submit(op, **arguments).result()


def _is_one_prompt(prompts: Any) -> bool:
    return isinstance(prompts, str) or (
        len(prompts) > 0 and all(isinstance(p, int) for p in prompts)
    )
