# SPDX-License-Identifier: Apache-2.0
"""An Arctic server through an installed Arctic client, of either generation."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import logging
import os
import socket
import subprocess
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

from arctic_rl_c import (
    ClosedError,
    ConfigError,
    PayloadError,
    PeerLostError,
    PeerTimeoutError,
    normalize_config,
)
from arctic_rl_c.client_config import build_client_config
from arctic_rl_c.transports import arctic_clients, arctic_errors, http_errors
from arctic_rl_c.transports.arctic_clients import InnerClient
from arctic_rl_c.transports.arctic_package import ArcticPackage, find_client
from arctic_rl_c.transports.deadline import TIMEOUT, limits
from arctic_rl_c.transports.dense import dense_payload
from arctic_rl_c.transports.lane import Lane, LaneTimeoutError, wait_for
from arctic_rl_c.transports.results import with_token_ids

__all__ = ["ArcticTransport"]

_log = logging.getLogger("arctic_rl_c.transports.arctic")
_END_SECONDS = 10.0


class ArcticTransport:
    """Ops of an Arctic server through `arctic_platform.client` or `arctic_training.rl`.

    The constructor looks for an installed client and translates the config, which imports that
    client; the server and its jobs are made by `start()` or the first op. The client's methods
    block whoever awaits them, so they run on threads of this transport: the caller's loop stays
    free, and sampling does not wait for training.

    Who constructs it owns the jobs: `shutdown()` ends them. `from_handle` attaches from another
    process and never ends any.

    Args:
        config: A main config, in any form that `normalize_config` takes. A nested one needs a
            client of the final generation; a flat one takes either.
        url: With `comms.protocol=http`, a server that runs already: jobs are made there, and no
            server is launched.
        timeout: Seconds that an op may take. The client itself has no deadline over Ray.
        timeouts: The same for single methods, e.g. `{"generate": 600}`.
        start_timeout: Seconds until server and jobs are ready.

    Raises:
        TransportUnavailableError: No client is installed that can serve this config.
        ConfigError: The config is wrong, or the client refuses what it translates to.

    Example:
        >>> async with ArcticTransport(config) as transport:
        ...     client = ArcticRLClient(transport, config, tokenizer=tokenizer)
    """

    name = "arctic"
    #: The public server's request model holds text.
    accepts_token_ids = False
    accepts_routing_key: bool
    accepts_strict: bool
    #: It reads and drops what `docs/client.md` lists.
    server_limits = True

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        url: str | None = None,
        timeout: float = TIMEOUT,
        timeouts: Mapping[str, float] | None = None,
        start_timeout: float = 2400.0,
    ) -> None:
        main = normalize_config(config)
        remote = main["remote_backend"]
        package = find_client(remote["generation"])
        final = package.generation == "final"
        fields = build_client_config(main, generation="final" if final else None)
        if url is not None:
            arctic_clients.point_at(fields, package.generation, *_host_and_port(url, remote))
        longest = max([timeout, *(timeouts or {}).values()])
        if final and longest > TIMEOUT:
            fields["request_timeout"] = longest  # the client's own, which would come first
        self._set_up(package, fields, timeout, timeouts, start_timeout)
        self.owner = True
        wanted = [job for job in arctic_clients.JOB_TYPES if fields[f"{job}_gpus"] > 0]
        self._jobs: dict[str, int | str | None] = dict.fromkeys(wanted)
        self._flags = dict(remote["weight_sync"])

    def _set_up(
        self,
        package: ArcticPackage,
        fields: dict[str, Any],
        timeout: float,
        timeouts: Mapping[str, float] | None,
        start_timeout: float,
    ) -> None:
        self.package = package
        self._fields = fields
        self._state: Any = None
        self._inner_config = arctic_clients.make_config(package, fields)
        self.protocol = arctic_clients.protocol_of(fields, package.generation)
        final = package.generation == "final"
        routes = package.takes(self.protocol, "generate", "routing_key")
        self.accepts_routing_key = (final or self.protocol == "ray") if routes is None else routes
        self.accepts_strict = bool(package.takes(self.protocol, "generate", "strict") or False)
        self._timeout, self._timeouts = limits(timeout, timeouts)
        self._start_timeout = start_timeout
        self._lock = threading.Lock()
        self._training = Lane("arctic_rl_c arctic training")
        # An aiohttp session, which the final generation keeps, belongs to one loop.
        one = final and self.protocol == "http"
        self._sampling = self._training if one else Lane("arctic_rl_c arctic sampling")
        self._creation: Future[InnerClient] | None = None
        self._end_at_exit: Callable[[], None] | None = None
        self._closed = self._ended = self._told_of_routing = False
        _log.info("%s; passed over: %s", self.description, "; ".join(package.passed_over))

    @classmethod
    async def connect(cls, config: Mapping[str, Any], **options: Any) -> ArcticTransport:
        """Construct, and start, without blocking the event loop."""
        transport = await asyncio.to_thread(lambda: cls(config, **options))
        await transport.start()
        return transport

    @classmethod
    def from_handle(
        cls,
        handle: Mapping[str, Any],
        *,
        timeout: float = TIMEOUT,
        timeouts: Mapping[str, float] | None = None,
        start_timeout: float = 2400.0,
    ) -> ArcticTransport:
        """Attach to what `reconnect_handle` describes, from any process.

        Raises:
            TransportUnavailableError: This process has not the client that the handle is of.
            ConfigError: It is no handle, or one without the server that its jobs are on.
        """
        wanted = {"module", "generation", "config", "jobs", "server_state", "weight_sync"}
        if handle.get("transport") != cls.name or not wanted <= set(handle):
            raise ConfigError(f"this is no handle of an {cls.__name__}: {sorted(handle)}")
        fields = dict(handle["config"])
        protocol = arctic_clients.protocol_of(fields, handle["generation"])
        if protocol == "ray" and handle["server_state"] is None:
            # The client would start a second, empty server, and fail later.
            raise ConfigError("this handle of a server over Ray has no server_state")
        self = cls.__new__(cls)
        package = find_client(handle["generation"], name=handle["module"])
        self._set_up(package, fields, timeout, timeouts, start_timeout)
        self.owner = False
        self._state = handle["server_state"]
        self._jobs, self._flags = dict(handle["jobs"]), dict(handle["weight_sync"])
        return self

    # -- life ------------------------------------------------------------------------------------

    @property
    def description(self) -> str:
        """The client, its version and its protocol, for messages."""
        return f"{self.package} over {self.protocol}"

    @property
    def serves_reference(self) -> bool:
        """Whether there is a job for `reference_model=True`."""
        return "log_prob" in self._jobs

    @property
    def jobs(self) -> dict[str, int | str]:
        """Ids by type, empty before `start()`."""
        return {job: number for job, number in self._jobs.items() if number is not None}

    async def start(self) -> None:
        """Make the server and its jobs, or attach to them.

        A start that took too long, or whose caller went away, goes on; the next one waits for it.

        Raises:
            PeerTimeoutError: `start_timeout` passed.
            TransportUnavailableError: Where the client would launch its server another one
                listens.
        """
        await self._started("start")

    async def _started(self, op: str) -> InnerClient:
        """The inner client, once there is one."""
        with self._lock:
            if self._closed:
                raise http_errors.complete(
                    ClosedError(f"{op}: the transport was shut down"), "ARL_ERR_CLOSED", op
                )
            creation = self._creation
            if creation is not None and creation.done() and creation.exception() is not None:
                creation = None  # what failed is tried again
            first = creation is None
            if creation is None:
                creation = self._creation = Future()
                creation.set_running_or_notify_cancel()
        if first:
            self._training.post(lambda: self._create(creation))
        try:
            inner: InnerClient = await wait_for(creation, self._start_timeout)
        except LaneTimeoutError:
            late = PeerTimeoutError(
                f"start: {self.description} was not ready within {self._start_timeout:g} s; it "
                "goes on, and the next start() waits for it: start_timeout= says how long"
            )
            raise http_errors.complete(late, "ARL_ERR_TIMEOUT", "start") from None
        return inner

    async def _create(self, creation: Future[InnerClient]) -> None:
        """Make the inner client; on its lane, since the constructor blocks for minutes."""
        inner: InnerClient | None = None
        try:
            if self.owner:
                self._check_launch()
            inner = InnerClient(self.package, self._inner_config, self._state)
            self._jobs = {job: number for job, number in inner.jobs().items() if number is not None}
            await inner.keep_error_bodies()
        except BaseException as error:  # a client may even exit; whoever waits must hear of it
            if inner is not None:
                await self._end(inner)
            told = None
            if isinstance(error, Exception):
                told = arctic_errors.translate("start", self.description, error, True)
            if told is not None:
                told.__cause__ = error
            creation.set_exception(told or error)
            return
        process = inner.server_process if self.owner else None
        if process is not None:
            self._end_at_exit = functools.partial(_end_process, process)
            atexit.register(self._end_at_exit)
        with self._lock:
            orphaned = self._closed
            creation.set_result(inner)
        if orphaned:  # shut down while it was being made
            await self._end(inner)

    def _check_launch(self) -> None:
        """Refuse to have a server launched where it would not be the one that answers."""
        address = arctic_clients.launch_address(self._fields, self.package.generation)
        if address is None:
            return
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=1.0):
            raise http_errors.unavailable(
                "start",
                f"something listens on {address[0]}:{address[1]} already, and {self.package} "
                "would take it for the server that it launches there: end it, or name it by "
                "remote_backend.comms.url to use it",
            )
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            _log.warning(
                "CUDA_VISIBLE_DEVICES is set and empty: the server that the Arctic client launches "
                "inherits that and sees no GPU. Start it by hand, and set remote_backend.comms.url"
            )

    async def _end(self, inner: InnerClient) -> None:
        """End one that nobody will use."""
        try:
            await inner.close_session()
            await inner.end(owner=self.owner)
        except Exception:
            _log.exception("ending the jobs of %s failed; they may still run", self.description)

    async def shutdown(self) -> None:
        """End the jobs and the server that this transport made, or let go of others'. Idempotent.

        A server that is gone already is logged, not raised.

        Raises:
            PeerTimeoutError: The server did not end its jobs in time.
        """
        with self._lock:
            self._closed = True
            if self._ended:
                return
            self._ended = True
            creation = self._creation
            if creation is not None and not creation.done():
                return  # _create ends what it makes
        try:
            if creation is not None and creation.exception() is None:
                await self._shut_down(creation.result())
        except BaseException:
            self._ended = False  # it may be called again
            raise
        await asyncio.to_thread(self._close_lanes)

    async def _shut_down(self, inner: InnerClient) -> None:
        # The session is closed where it was opened. Where an op hangs, its lane is no use for more.
        with contextlib.suppress(Exception):
            await self._training.run(inner.close_session, _END_SECONDS)
        ending = Lane("arctic_rl_c arctic end")
        try:
            await self._on(ending, "shutdown", lambda: inner.end(owner=self.owner))
        except PeerLostError as error:
            # Jobs end with their server. Raised, it would hide what ended this run.
            _log.warning("%s", error)
            with contextlib.suppress(Exception):
                await ending.run(lambda: inner.end(owner=False), _END_SECONDS)
        finally:
            ending.close()
        if self._end_at_exit is not None:
            atexit.unregister(self._end_at_exit)
            await asyncio.to_thread(self._end_at_exit)

    async def detach(self) -> None:
        """Let go of the server; by the owner, nothing: its jobs are still to be ended."""
        if not self.owner:
            await self.shutdown()

    def _close_lanes(self) -> None:
        for lane in {self._training, self._sampling}:
            lane.close()

    def reconnect_handle(self) -> dict[str, Any]:
        """What another process needs to attach: see `from_handle`.

        Over Ray it holds the handle of an actor, so only Ray can pickle it.

        Raises:
            RuntimeError: There are no jobs yet: `await start()` first.
        """
        creation = self._creation
        if creation is None or not creation.done():
            raise RuntimeError("reconnect_handle: the jobs do not exist yet; await start() first")
        inner = creation.result()
        return {
            "transport": self.name,
            "module": self.package.name,
            "generation": self.package.generation,
            "config": inner.reconnect_fields(),
            "jobs": dict(self._jobs),
            "server_state": inner.server_state() if self.protocol == "ray" else None,
            "weight_sync": dict(self._flags),
        }

    async def __aenter__(self) -> ArcticTransport:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    # -- training --------------------------------------------------------------------------------

    async def fwd_no_grad(
        self, payload: Mapping[str, Any], reference_model: bool = False
    ) -> dict[str, Any]:
        """Log-probs of a payload, of the trained model or of the reference.

        Raises:
            ConfigError: There is no reference job.
        """
        if reference_model and not self.serves_reference:
            raise http_errors.misconfigured(
                "fwd_no_grad", "there is no log_prob job: set remote_backend.log_prob_gpus"
            )
        batch = dense_payload(payload)
        return await self._call(
            self._training,
            "fwd_no_grad",
            lambda inner: inner.client.fwd_no_grad(batch, reference_model=reference_model),
            harmless=True,
        )

    async def fwd_bwd(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Add the gradients of a payload's loss."""
        batch = dense_payload(payload)
        return await self._call(
            self._training, "fwd_bwd", lambda inner: inner.client.fwd_bwd(batch)
        )

    async def step(self) -> dict[str, Any]:
        """One optimizer step."""
        return await self._call(self._training, "step", lambda inner: inner.client.step())

    async def save_checkpoint(self, **kwargs: Any) -> dict[str, Any]:
        """Write a checkpoint, where the server keeps them.

        Raises:
            ConfigError: The client has no such option; that of the first generation has none.
        """
        given = {key: value for key, value in kwargs.items() if value is not None}
        self._check_options("save_checkpoint", given)
        return await self._call(
            self._training,
            "save_checkpoint",
            lambda inner: inner.client.save_checkpoint(**given),
            harmless=True,
        )

    async def load_checkpoint(self, **kwargs: Any) -> dict[str, Any]:
        """Resume from a checkpoint; step 0 when there is none.

        Raises:
            TransportUnavailableError: The first generation cannot.
        """
        if self.package.generation == "seed":
            raise http_errors.unavailable("load_checkpoint", f"{self.package} has no such op")
        given = {key: value for key, value in kwargs.items() if value is not None}
        self._check_options("load_checkpoint", given)
        return await self._call(
            self._training,
            "load_checkpoint",
            lambda inner: inner.client.load_checkpoint(**given),
            harmless=True,
        )

    def _check_options(self, method: str, given: Mapping[str, Any]) -> None:
        for key in sorted(given):
            if self.package.takes(self.protocol, method, key) is False:
                raise http_errors.misconfigured(method, f"{self.package} takes no {key}")

    # -- sampling --------------------------------------------------------------------------------

    async def generate(
        self,
        prompts: str | Sequence[Any],
        sampling_params: Mapping[str, Any] | None = None,
        routing_key: str | Sequence[str | None] | None = None,
        strict: bool = False,
    ) -> list[dict[str, Any]]:
        """One result item a prompt, each given as text.

        A routing key goes on where the client has the keyword. The final generation's public
        server accepts one and ignores it, which a warning says once.

        Raises:
            PayloadError: A prompt is not text.
        """
        keywords: dict[str, Any] = {
            "prompts": _as_texts(prompts, self.package),
            "sampling_params": dict(sampling_params or {}),
        }
        final = self.package.generation == "final"
        if self.accepts_routing_key and (routing_key is not None or not final):
            keywords["routing_key"] = routing_key
        if self.accepts_strict and strict:
            keywords["strict"] = True
        if routing_key is not None:
            self._tell_of_routing()
        inner = await self._started("generate")
        results: list[dict[str, Any]] = await self._on(
            self._sampling, "generate", lambda: inner.client.generate(**keywords), harmless=True
        )
        # JSON, and a frame's tree, have text for keys.
        return [with_token_ids(item) for item in results] if self.protocol == "http" else results

    def _tell_of_routing(self) -> None:
        honoured = self.package.generation == "seed" and self.accepts_routing_key
        if honoured or self._told_of_routing:
            return
        self._told_of_routing = True
        fate = (
            "sent, and the public server ignores it: prompts are routed by their own text"
            if self.accepts_routing_key
            else "left out: this client has no such keyword"
        )
        warnings.warn(f"generate: routing_key is {fate} ({self.description})", stacklevel=3)

    async def sleep_inference(self, level: int = 1) -> dict[str, Any]:
        """Give the sampler's memory back."""
        return await self._call(
            self._sampling,
            "sleep_inference",
            lambda inner: inner.client.sleep_inference(level),
            harmless=True,
        )

    async def wake_inference(self, tags: Sequence[str] | None = None) -> dict[str, Any]:
        """Take the sampler's memory again."""
        wanted = None if tags is None else list(tags)
        return await self._call(
            self._sampling,
            "wake_inference",
            lambda inner: inner.client.wake_inference(wanted),
            harmless=True,
        )

    async def reset_prefix_cache(self) -> dict[str, Any]:
        """Forget the states of earlier prompts."""
        return await self._call(
            self._sampling,
            "reset_prefix_cache",
            lambda inner: inner.client.reset_prefix_cache(),
            harmless=True,
        )

    # -- weights ---------------------------------------------------------------------------------

    async def sync_weights(
        self, cuda_ipc: bool | None = None, low_memory: bool | None = None
    ) -> dict[str, Any]:
        """Bring the trainer's weights to the sampler.

        Waking the sampler around it, in the order that each generation needs, is the client's
        or its server's own. When a sync fails the sampler stays asleep, since its weights may
        be a mixture.
        """
        flags = {"cuda_ipc": cuda_ipc, "low_memory": low_memory}
        if self.package.generation == "final":
            # None: what the training job was made with.
            given = {key: value for key, value in flags.items() if value is not None}
        else:
            given = {k: bool(self._flags[k] if v is None else v) for k, v in flags.items()}
        return await self._call(
            self._training, "sync_weights", lambda inner: inner.client.sync_weights(**given)
        )

    # -- calls -----------------------------------------------------------------------------------

    async def _call(
        self,
        lane: Lane,
        op: str,
        work: Callable[[InnerClient], Any],
        *,
        harmless: bool = False,
    ) -> dict[str, Any]:
        """What a call of the inner client gives."""
        inner = await self._started(op)
        answer: dict[str, Any] = await self._on(lane, op, lambda: work(inner), harmless)
        return answer

    async def _on(
        self, lane: Lane, op: str, work: Callable[[], Any], harmless: bool = False
    ) -> Any:
        seconds = self._timeouts.get(op, self._timeout)
        try:
            return await lane.run(work, seconds)
        except LaneTimeoutError as late:
            applied = late.started and not harmless
            raise http_errors.timed_out(op, self.description, seconds, applied) from None
        except Exception as error:
            told = arctic_errors.translate(op, self.description, error, harmless)
            if told is None:
                raise
            raise told from error


def _host_and_port(url: str, remote: Mapping[str, Any]) -> tuple[str, int]:
    if remote["comms"]["protocol"] != "http":
        raise http_errors.misconfigured(
            "arctic", f"remote_backend.comms.url is {url!r} and comms.protocol is not http"
        )
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if parts.scheme != "http" or host is None or parts.path.strip("/"):
        raise http_errors.misconfigured("arctic", f"{url!r} is not of the form http://host:port")
    return host, 80 if port is None else port


def _as_texts(prompts: str | Sequence[Any], package: ArcticPackage) -> list[str]:
    if isinstance(prompts, str):
        return [prompts]
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            raise http_errors.complete(
                PayloadError(
                    f"generate: prompts[{index}] is of type {type(prompt).__name__}, and the "
                    f"server of {package} takes text only: decode token ids first, as "
                    "ArcticRLClient does when it has a tokenizer"
                ),
                "ARL_ERR_PAYLOAD",
                "generate",
            )
    return list(prompts)


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """End a server that the client launched, and that nobody else ends with this process."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
