# SPDX-License-Identifier: Apache-2.0
"""The embedded server on a Ray cluster, for as many processes as attach to it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from arctic_rl_c import ClosedError, ConfigError, PeerLostError, TransportUnavailableError
from arctic_rl_c.local.options import ROLE_FACTORY, LocalOptions, as_dict
from arctic_rl_c.local.remote_errors import describe_error
from arctic_rl_c.transports.deadline import TIMEOUT, Wait, late, left, limits
from arctic_rl_c.transports.http_errors import complete
from arctic_rl_c.transports.off_loop import off_loop
from arctic_rl_c.transports.ray_actors import ServerActor, failure
from arctic_rl_c.transports.ray_data import pack, unpack
from arctic_rl_c.transports.ray_loan import loan_of, too_late
from arctic_rl_c.transports.ray_watch import identify

#: Ops of the server that may wait side by side.
_CONCURRENCY = 1 << 16
_CLOSE_SECONDS = 15.0
#: How much later than its deadline the server's word of it may come.
_GRACE_SECONDS = 5.0


class RayTransport:
    """A trainer and its samplers as Ray actors.

    Who constructs it owns the actors: they end with `shutdown()`, and with the process (driver or
    actor) that constructed it, however that ends. `from_handle` attaches from any other process
    of the cluster.

    The roles use no CPU slots of the cluster, so they never wait for a placement that the
    trainer in front of them holds. Where the cluster has GPUs they take theirs: one together when
    colocated, else one each.

    Args:
        options: A `LocalOptions`, or a normalised main config to derive them from.
        colocate: Both roles on one GPU; None takes the config's, else True.
        samplers: How many samplers share the prompts; None takes the config's
            `remote_backend.sampling_gpus`, else 1.
        timeout: Seconds that an op may take, with all that it waits for; `math.inf` for ever.
        timeouts: The same for single methods, e.g. `{"generate": 600}`.

    Raises:
        TransportUnavailableError: Ray is not installed, or no cluster is connected.
        ConfigError: An option is wrong.
    """

    name = "ray"
    accepts_token_ids = True
    accepts_routing_key = True
    accepts_strict = True
    #: Every option of the contract that a server may ignore has its effect here.
    server_limits = False
    #: What builds a role in its process; tests have others.
    _factory = ROLE_FACTORY

    def __init__(
        self,
        options: LocalOptions | Mapping[str, Any],
        *,
        colocate: bool | None = None,
        samplers: int | None = None,
        timeout: float = TIMEOUT,
        timeouts: Mapping[str, float] | None = None,
    ) -> None:
        self._set_up(timeout, timeouts)
        ray = _connected_ray()
        gpus = ray.cluster_resources().get("GPU", 0)
        if not isinstance(options, LocalOptions):
            backend = options.get("remote_backend") or {}
            if colocate is None:
                colocate = bool(backend.get("colocate", True))
            _check_counts(backend)
            if samplers is None:
                samplers = int(backend.get("sampling_gpus") or 1)
            options = LocalOptions.from_config(options, device="cuda" if gpus else "cpu")
        for model in (options.trainer_model, options.sampler_model):
            model.check()
        samplers = 1 if samplers is None else samplers
        if samplers < 1:
            raise ConfigError(f"samplers must be at least 1, found {samplers}")
        colocated = True if colocate is None else colocate
        on_gpu = options.trainer_model.device.startswith("cuda")
        resources, self._placement = _resources(ray, colocated, samplers, gpus if on_gpu else 0)
        self.owner = True
        self.serves_reference = options.trainer.reference
        self._closed = False
        remote = ray.remote(ServerActor)
        # On the node of its roles, so that it can signal them.
        here = resources[0]["scheduling_strategy"]
        self._server = remote.options(
            num_cpus=0, max_concurrency=_CONCURRENCY, scheduling_strategy=here
        ).remote(as_dict(options), resources, colocated, identify(), self._factory)

    @classmethod
    def from_handle(
        cls,
        handle: Mapping[str, Any],
        *,
        timeout: float = TIMEOUT,
        timeouts: Mapping[str, float] | None = None,
    ) -> RayTransport:
        """Attach to what `reconnect_handle` describes. What is attached never ends the server."""
        if handle.get("transport") != cls.name or "server" not in handle:
            raise ConfigError(f"this is no handle of a {cls.__name__}: {sorted(handle)}")
        found = _cluster(_connected_ray())
        if handle["cluster"] != found:
            error = PeerLostError(
                f"this handle is of the Ray cluster {handle['cluster']}, and this process is in "
                f"{found}: its server ended with its cluster. Take the handle of one that runs"
            )
            raise complete(error, "ARL_ERR_PEER_LOST", "from_handle")
        self = cls.__new__(cls)
        self.owner = False
        self.serves_reference = bool(handle["serves_reference"])
        self._server, self._closed, self._placement = handle["server"], False, None
        self._set_up(timeout, timeouts)
        return self

    def _set_up(self, timeout: float, timeouts: Mapping[str, float] | None) -> None:
        self._client = {"id": uuid.uuid4().hex, "identity": identify()}
        self._timeout, self._timeouts = limits(timeout, timeouts)
        self._lock = threading.Lock()
        self._number = 0  # of the last request
        self._trainer: Any = None  # its actor, once it has been lent

    # -- ops -----------------------------------------------------------------------------------

    async def fwd_no_grad(
        self, payload: Mapping[str, Any], reference_model: bool = False
    ) -> dict[str, Any]:
        """See `Trainer.forward`."""
        result: dict[str, Any] = await self._call_trainer(
            "fwd_no_grad", payload, reference_model=reference_model
        )
        return result

    async def fwd_bwd(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """See `Trainer.forward_backward`."""
        result: dict[str, Any] = await self._call_trainer("fwd_bwd", payload)
        return result

    async def step(self) -> dict[str, Any]:
        """See `Trainer.step`."""
        result: dict[str, Any] = await self._call("step")
        return result

    async def generate(
        self,
        prompts: Sequence[Any],
        sampling_params: Mapping[str, Any] | None = None,
        routing_key: str | Sequence[str | None] | None = None,
        strict: bool = False,
    ) -> list[dict[str, Any]]:
        """See `EmbeddedServer.generate`."""
        result: list[dict[str, Any]] = await self._call(
            "generate",
            prompts=prompts,
            sampling_params=sampling_params,
            routing_key=routing_key,
            strict=strict,
        )
        return result

    async def sync_weights(
        self, cuda_ipc: bool | None = None, low_memory: bool | None = None
    ) -> dict[str, Any]:
        """See `EmbeddedServer.sync_weights`."""
        result: dict[str, Any] = await self._call(
            "sync_weights", cuda_ipc=cuda_ipc, low_memory=low_memory
        )
        return result

    async def save_checkpoint(self, **kwargs: Any) -> dict[str, Any]:
        """See `Trainer.save_checkpoint`."""
        result: dict[str, Any] = await self._call("save_checkpoint", **kwargs)
        return result

    async def load_checkpoint(self, **kwargs: Any) -> dict[str, Any]:
        """See `Trainer.load_checkpoint`."""
        result: dict[str, Any] = await self._call("load_checkpoint", **kwargs)
        return result

    async def sleep_inference(self, level: int = 1) -> dict[str, Any]:
        """See `Sampler.sleep`."""
        result: dict[str, Any] = await self._call("sleep_inference", level=level)
        return result

    async def wake_inference(self, tags: Sequence[str] | None = None) -> dict[str, Any]:
        """See `Sampler.wake`."""
        result: dict[str, Any] = await self._call("wake_inference", tags=tags)
        return result

    async def reset_prefix_cache(self) -> dict[str, Any]:
        """Forget the states of earlier prompts."""
        result: dict[str, Any] = await self._call("reset_prefix_cache")
        return result

    async def weights_digests(self) -> dict[str, str]:
        """SHA-256 over all weights, of both roles."""
        result: dict[str, str] = await self._call("weights_digests")
        return result

    async def describe(self) -> dict[str, Any]:
        """Facts about both roles."""
        result: dict[str, Any] = await self._call("describe")
        return result

    async def pids(self) -> dict[str, int]:
        """Process ids of `server`, `trainer` and `sampler`, once all have loaded their models.

        Several samplers are `sampler-0`, `sampler-1` and so on.
        """
        seconds = self._seconds("pids")
        facts = self._server.facts.remote(seconds)
        result: dict[str, int] = await self._answer_of_server("pids", facts, seconds)
        return result

    # -- life ----------------------------------------------------------------------------------

    async def shutdown(self) -> None:
        """End the actors; by one that is attached, let go of them. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self.owner:
            await asyncio.to_thread(self._end)

    async def detach(self) -> None:
        """Let go of the server, which goes on. Idempotent."""
        self._closed = True

    def reconnect_handle(self) -> dict[str, Any]:
        """What `from_handle` takes, in any process of the cluster. Ray pickles it."""
        return {
            "transport": self.name,
            "server": self._server,
            "cluster": _cluster(_connected_ray()),
            "serves_reference": self.serves_reference,
        }

    def __reduce__(self) -> Any:
        return _attach, (self.reconnect_handle(), self._timeout, self._timeouts)

    def _end(self) -> None:
        import ray

        with contextlib.suppress(Exception):  # dead or stuck: what follows ends it all the same
            ray.get(self._server.close.remote(), timeout=_CLOSE_SECONDS)
        ray.kill(self._server)
        if self._placement is not None:
            ray.util.remove_placement_group(self._placement)

    async def _call(self, op: str, **arguments: Any) -> Any:
        """Have the server run an op."""
        self._check_open(op)
        seconds = self._seconds(op)
        asked, _ = self._send(
            lambda client: self._server.call.remote(op, arguments, client, seconds)
        )
        return await self._answer_of_server(op, asked, seconds)

    def _send(self, send: Callable[[dict[str, Any]], Any]) -> tuple[Any, dict[str, Any]]:
        """Ask the server for an op: its answer's reference, and what `send` was given.

        Nothing is awaited before an op is sent: those of one loop are numbered in the order of
        their calls, and that is the order in which the server starts them.
        """
        with self._lock:
            client = {**self._client, "number": self._number + 1}
            asked = send(client)
            self._number += 1  # not if it could not be sent: no number is left out
        return asked, client

    async def _call_trainer(self, op: str, payload: Mapping[str, Any], **arguments: Any) -> Any:
        """Run an op on a payload, with a loan of the trainer: see `ray_loan`."""
        self._check_open(op)
        seconds = self._seconds(op)
        until = time.monotonic() + seconds
        asked, client = self._send(
            lambda client: self._server.lend.remote(
                op, arguments, client, seconds, self._trainer is None
            )
        )
        borrowed = loan_of(client)
        storing = asyncio.ensure_future(off_loop(_put, payload))
        lending = asyncio.ensure_future(self._answer_of_server(op, asked, seconds, begun=False))
        for task in (storing, lending):  # one may fail while the other is looked at
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            both = {storing, lending}
            await asyncio.wait(both, timeout=left(until), return_when=asyncio.FIRST_EXCEPTION)
            if storing.done():
                storing.result()
            loan = await lending
            if not storing.done():
                raise late(op, seconds, [Wait("object store", None, begun=False)])
            if left(until) == 0:
                raise late(op, seconds, [Wait("trainer", loan["pid"], begun=False)])
            self._trainer = loan.get("actor", self._trainer)
            self._check_open(op)
            called = self._trainer.call.remote(
                loan["op"], loan["arguments"], storing.result(), borrowed
            )
        except BaseException as error:
            self._return(borrowed, error)
            with contextlib.suppress(RuntimeError):  # the loop was closed: this was left behind
                storing.cancel()
                lending.cancel()
            raise
        answered = called.future()
        asked_of = "trainer", loan["op"]
        answered.add_done_callback(lambda done: self._return(borrowed, failure(*asked_of, done)))
        waits = [Wait("trainer", loan["pid"], begun=True)]
        answer = await _answer(answered, until, *asked_of, partial(late, op, seconds, waits))
        if "withdrawn" in answer:
            raise too_late()
        return unpack(answer["result"])

    def _return(self, borrowed: str, error: BaseException | None) -> None:
        """Tell the server that the trainer has done what it was lent for, or will not be asked."""
        if error is not None and not isinstance(error, Exception):
            error = RuntimeError(repr(error))  # cancelled
        described = None if error is None else describe_error(error)
        # A server that has died needs not know, and at the end of Python nothing is there any more.
        with contextlib.suppress(Exception):
            import ray

            if ray.is_initialized():  # else it would start a cluster, for an actor of another
                self._server.returned.remote(borrowed, described)

    async def _answer_of_server(
        self, op: str, asked: Any, seconds: float, begun: bool = True
    ) -> Any:
        """What the server answers, which has the deadline, and knows best who is late.

        `begun`: whether the op may have, should the server itself be late.
        """
        until = time.monotonic() + seconds + _GRACE_SECONDS
        waits = [Wait("server", None, begun)]
        answer = await _answer(
            asked.future(), until, "server", op, partial(late, op, seconds, waits)
        )
        return unpack(answer["result"])

    def _seconds(self, op: str) -> float:
        return self._timeouts.get(op, self._timeout)

    def _check_open(self, op: str) -> None:
        if self._closed:
            raise ClosedError(f"{op}: this transport was shut down")


def _put(payload: Mapping[str, Any]) -> Any:
    import ray

    return ray.put(pack(dict(payload)))


async def _answer(
    answered: Future[dict[str, Any]],
    until: float,
    role: str,
    op: str,
    late: Callable[[], Exception],
) -> dict[str, Any]:
    """What an actor answers.

    Args:
        answered: Ray's own future of it, which nothing here cancels.
        until: The deadline, by `time.monotonic`.
        role: Whose death it is when the actor dies.
        op: What it was asked.
        late: Makes the error of the deadline.
    """
    loop = asyncio.get_running_loop()
    come: asyncio.Future[None] = loop.create_future()

    def wake(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(come.set_result, None)

    answered.add_done_callback(wake)
    await asyncio.wait({come}, timeout=left(until))
    if not come.done():
        raise late()
    failed = failure(role, op, answered)
    if failed is not None:
        raise failed
    answer: dict[str, Any] = answered.result()
    return answer


def _connected_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise TransportUnavailableError(
            "the ray transport needs Ray: pip install 'arctic_rl_c[ray]'"
        ) from None
    if not ray.is_initialized():
        raise TransportUnavailableError(
            "the ray transport needs a cluster: call ray.init() first, or run inside a Ray task"
        )
    return ray


def _check_counts(backend: Mapping[str, Any]) -> None:
    for key in ("training_gpus", "sampling_tp_size"):
        count = int(backend.get(key) or 1)
        if count > 1:
            raise ConfigError(
                f"remote_backend.{key} is {count}: the embedded server has one trainer, and each "
                "of its samplers is on one device; set it to 1, or use a full server through "
                "remote_backend.comms.protocol=http"
            )


def _cluster(ray: Any) -> str:
    """What tells this cluster from all others, also from a later one at the same address."""
    return str(ray.get_runtime_context().get_session_name())


def _attach(
    handle: Mapping[str, Any], timeout: float, timeouts: Mapping[str, float]
) -> RayTransport:
    return RayTransport.from_handle(handle, timeout=timeout, timeouts=timeouts)


def _same_node(ray: Any) -> dict[str, Any]:
    """On this node: weights and model files are shared through it."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = ray.get_runtime_context().get_node_id()
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node, soft=False)}


def _resources(
    ray: Any, colocated: bool, samplers: int, gpus: float
) -> tuple[list[dict[str, Any]], Any | None]:
    """Options of the trainer's actor and each sampler's, and their placement group, if any."""
    if not gpus:
        return [{"num_cpus": 0, **_same_node(ray)}] * (1 + samplers), None
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    if colocated and samplers > 1:
        # One GPU is what colocated roles share; weights reach no others without NCCL, which
        # cannot place two ranks on that one.
        raise ConfigError(
            f"{samplers} samplers on GPUs need one each, and one for the trainer: set "
            "remote_backend.colocate=False, or remote_backend.sampling_gpus=1"
        )
    count = 1 if colocated else 1 + samplers
    if gpus < count:
        raise ConfigError(
            f"the cluster has {gpus:g} GPU and remote_backend.colocate={colocated} with "
            f"{samplers} sampler(s) needs {count}"
        )
    group = ray.util.placement_group([{"GPU": 1}] * count, strategy="STRICT_PACK")
    options = []
    for index in range(1 + samplers):
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=0 if colocated else index
        )
        options.append(
            {
                "num_cpus": 0,
                "num_gpus": 0.5 if colocated else 1,
                "scheduling_strategy": strategy,
            }
        )
    return options, group
