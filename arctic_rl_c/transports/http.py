# SPDX-License-Identifier: Apache-2.0
"""An Arctic server over HTTP: the embedded one, or a public one of either generation.

Tensors travel as DSSST1 frames, everything else as JSON. Nothing is ever pickled or unpickled,
so the tensor routes of the first generation, which know nothing else, are out of reach and say
so; its other routes work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal
from urllib.parse import quote

from arctic_rl_c import ArcticError, ClosedError, PeerLostError, wire

try:
    from arctic_rl_c.transports import http_body, http_errors
    from arctic_rl_c.transports.http_connection import Connection, Repeat
except ImportError as error:  # pragma: no cover - depends on what is installed
    raise ImportError(
        f"{error}; the HTTP transport needs: pip install 'arctic_rl_c[http]'"
    ) from error
from arctic_rl_c.transports.deadline import TIMEOUT, limits
from arctic_rl_c.transports.dense import dense_payload
from arctic_rl_c.transports.http_jobs import JOB_TYPES, initialize_payloads
from arctic_rl_c.transports.results import with_token_ids

__all__ = ["HttpTransport"]

_log = logging.getLogger(__name__)

_PROBE_DELAY = 0.1
_READY_POLL, _READY_POLL_MAX = 0.05, 2.0

#: What the embedded server says of itself.
_CAPABILITIES = {
    "server_id": str,
    "accepts_token_ids": bool,
    "accepts_routing_key": bool,
    "accepts_strict": bool,
    "server_limits": bool,
    "max_body_bytes": int,
}


class HttpTransport:
    """Ops of an Arctic server over HTTP.

    The constructor asks the server what it is, which takes a moment and waits at most
    `connect_timeout`; `await HttpTransport.connect(…)` does so without blocking the event loop.
    Jobs are created, or looked up, by `start()` or the first op. Methods may be called from
    several event loops.

    Args:
        url: `http://host:port`.
        jobs: Ids of existing jobs by type (`training`, `sampling`, maybe `log_prob`): attach to
            them, and never end them.
        config: A main config to create jobs from; they end with `shutdown()`. Not needed for
            the embedded server, which knows its model.
        generation: `final` or `seed`; `auto` asks the server.
        timeout: Seconds that an op may take, all attempts together.
        timeouts: The same for single methods, e.g. `{"generate": 600}`.
        connect_timeout: Seconds to wait for a server that does not answer yet, and for each
            TCP connection.
        job_ready_timeout: Seconds that the server may take to make its jobs ready.
        max_request_bytes: Frames that are larger go in byte chunks of that size. None takes
            what the embedded server allows; other servers get frames whole.
        max_response_bytes: The largest answer that is read.
        retries: How often a request is sent again after its connection broke. Gradients and
            steps are sent again only to a server that gives the first answer again.
        server_id: Refuse to talk to another instance than this one.

    Raises:
        PeerLostError: Nobody answers.
        TransportUnavailableError: Whoever answers is no Arctic server.

    Example:
        >>> async with HttpTransport("http://127.0.0.1:7000", config=config) as transport:
        ...     client = ArcticRLClient(transport, config)
    """

    name = "http"
    accepts_token_ids: bool
    accepts_routing_key: bool
    accepts_strict: bool

    def __init__(
        self,
        url: str,
        *,
        jobs: Mapping[str, int | str] | None = None,
        config: Mapping[str, Any] | None = None,
        generation: Literal["auto", "final", "seed"] = "auto",
        timeout: float = TIMEOUT,
        timeouts: Mapping[str, float] | None = None,
        connect_timeout: float = 10.0,
        job_ready_timeout: float = TIMEOUT,
        max_request_bytes: int | None = None,
        max_response_bytes: int = 1 << 36,
        retries: int = 4,
        server_id: str | None = None,
    ) -> None:
        if jobs is not None and config is not None:
            raise http_errors.misconfigured(
                "HttpTransport", "give jobs= to attach or config= to create jobs, not both"
            )
        unknown = sorted(set(jobs or {}) - set(JOB_TYPES))
        if unknown:
            raise http_errors.misconfigured(
                "HttpTransport", f"jobs: {unknown[0]!r} is not one of {', '.join(JOB_TYPES)}"
            )
        if generation not in ("auto", "final", "seed"):
            raise http_errors.misconfigured(
                "HttpTransport", f"generation must be auto, final or seed, found {generation!r}"
            )
        self._timeout, self._timeouts = limits(timeout, timeouts)
        self._connection = Connection(
            url,
            connect_timeout=connect_timeout,
            max_response_bytes=max_response_bytes,
            retries=retries,
        )
        self._config = config
        self._jobs: dict[str, int | str] = dict(jobs or {})
        self._created: list[str] = []  # of the jobs, those that are ours to end
        self._attached = jobs is not None
        self._connect_timeout, self._ready_timeout = connect_timeout, job_ready_timeout
        self._lock = threading.Lock()
        self._starting: Future[None] | None = None
        self._closed = False
        self._find_out(generation, server_id, max_request_bytes)

    @classmethod
    async def connect(cls, url: str, **options: Any) -> HttpTransport:
        """Construct, and start, without blocking the event loop."""
        transport = await asyncio.to_thread(lambda: cls(url, **options))
        await transport.start()
        return transport

    @classmethod
    def from_handle(cls, handle: Mapping[str, Any], **options: Any) -> HttpTransport:
        """Attach to what `reconnect_handle` describes, from any process."""
        return cls(
            handle["url"],
            jobs=handle["jobs"],
            generation=handle["generation"],
            server_id=handle["server_id"],
            **options,
        )

    # -- what the server is --------------------------------------------------------------------

    def _find_out(self, generation: str, server_id: str | None, max_request: int | None) -> None:
        connection = self._connection
        self._wait_for_health()
        own = self._capabilities()
        self._own = own is not None
        if own is not None:
            connection.server_id, connection.keyed = str(own["server_id"]), True
            generation = "final"
        if server_id is not None and server_id != connection.server_id:
            raise http_errors.lost(
                "connect", connection.url, "another server answers than the one wanted", False
            )
        self.generation = self._probe_generation() if generation == "auto" else generation
        final = self.generation == "final"
        self.accepts_token_ids = bool(own and own["accepts_token_ids"])
        self.accepts_routing_key = bool(own["accepts_routing_key"]) if own else final
        self.accepts_strict = bool(own["accepts_strict"]) if own else final
        #: Whether the limits of the public server (rows, ranks, ignored options) hold.
        self.server_limits = bool(own["server_limits"]) if own else True
        limit = int(own["max_body_bytes"]) if own else 0
        self._max_request = limit if max_request is None else max_request

    def _wait_for_health(self) -> None:
        deadline = time.monotonic() + self._connect_timeout
        while True:
            try:
                status, _ = self._connection.probe("/health", self._connect_timeout)
            except OSError as error:
                reason = f"no answer to /health: {error}"
            else:
                if status == 200:
                    return
                reason = f"/health answered with status {status}"
            if time.monotonic() + _PROBE_DELAY > deadline:
                raise http_errors.lost("connect", self._connection.url, reason, False)
            time.sleep(_PROBE_DELAY)

    def _probe(self, path: str) -> tuple[int, bytes]:
        try:
            return self._connection.probe(path, self._connect_timeout)
        except OSError as error:
            reason = f"no answer to {path}: {error}"
            raise http_errors.lost("connect", self._connection.url, reason, False) from error

    def _capabilities(self) -> Mapping[str, Any] | None:
        """What the embedded server says of itself; None from any other."""
        status, body = self._probe("/capabilities")
        try:
            found = http_body.from_json(body) if status == 200 else None
        except ValueError:
            return None
        if not isinstance(found, dict) or found.get("server") != "arctic_rl_c":
            return None
        if found.get("protocol") != 1:
            raise http_errors.unavailable(
                "connect",
                f"the server at {self._connection.url} speaks protocol {found.get('protocol')} of "
                "this package, here is 1: use one version on both sides",
            )
        for name, kind in _CAPABILITIES.items():
            if not isinstance(found.get(name), kind):
                raise http_errors.unavailable(
                    "connect",
                    f"the server at {self._connection.url} gives {name}={found.get(name)!r} in "
                    f"/capabilities, wanted {kind.__name__}: something has changed its answer",
                )
        return found

    def _probe_generation(self) -> str:
        """A route that exists answers GET with 405, since it wants POST."""
        for route, generation in (("/forward-backward", "final"), ("/fwd-bwd", "seed")):
            status, _ = self._probe(route)
            if status != 404:
                return generation
        raise http_errors.unavailable(
            "connect",
            f"the server at {self._connection.url} answers /health but has neither "
            "/forward-backward nor /fwd-bwd: it is no Arctic server",
        )

    # -- jobs ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Create or look up the jobs, and wait until they are ready.

        Raises:
            ArcticError: The server refused; jobs that were created already have been ended.
            PeerTimeoutError: A job did not become ready within `job_ready_timeout`.
        """
        with self._lock:
            if self._closed:
                raise http_errors.complete(
                    ClosedError("start: the transport was shut down"), "ARL_ERR_CLOSED", "start"
                )
            first = self._starting is None
            future = self._starting = self._starting or Future()
        if not first:
            await asyncio.shield(asyncio.wrap_future(future))
            return
        try:
            await (self._look_up_jobs() if self._attached else self._create_jobs())
        except BaseException as error:
            with self._lock:
                self._starting = None
            future.set_exception(
                error if isinstance(error, Exception) else PeerLostError("start was cancelled")
            )
            await asyncio.shield(self._end_jobs())
            raise
        future.set_result(None)

    async def _look_up_jobs(self) -> None:
        for job, number in self._jobs.items():
            info = self._object(
                "start",
                await self._connection.get_json(
                    "start", f"/job/{quote(str(number))}", timeout=self._time("start")
                ),
            )
            found = info.get("job_type", job)
            if found != job:
                raise http_errors.misconfigured(
                    "start", f"job {number} is a {found} job, {job} was wanted"
                )

    async def _create_jobs(self) -> None:
        if self.generation == "seed":
            raise self._no_tensors("start", "creating jobs of")
        if self._config is not None:
            payloads = initialize_payloads(self._config)
        elif self._own:
            payloads = {job: {"job_type": job} for job in JOB_TYPES}
        else:
            raise http_errors.misconfigured(
                "start",
                "an Arctic server needs config= to create its jobs from, or jobs= to attach to",
            )
        for job, payload in payloads.items():
            answer = await self._connection.post_json(
                "start", "/initialize", payload, timeout=self._ready_timeout, repeat=Repeat.KEYED
            )
            number = self._member("start", answer, "job_id", int | str)
            self._jobs[job] = number
            self._created.append(job)
            if ignored := answer.get("ignored"):
                _log.warning(
                    "the server at %s ignores what this configuration says of its %s job (%s): "
                    "it was told when it was started",
                    self._connection.url,
                    job,
                    ", ".join(map(str, ignored)),
                )
        deadline = time.monotonic() + self._ready_timeout
        for job in payloads:
            await self._wait_ready(job, deadline)

    async def _wait_ready(self, job: str, deadline: float) -> None:
        delay = _READY_POLL
        path = f"/job/{quote(str(self._jobs[job]))}"
        while True:
            info = self._object(
                "start",
                await self._connection.get_json("start", path, timeout=self._time("start")),
            )
            if info.get("status") == "RUNNING":
                return
            if time.monotonic() + delay > deadline:
                url = self._connection.url
                raise http_errors.timed_out(f"start of {job}", url, self._ready_timeout, False)
            await asyncio.sleep(delay)
            delay = min(2 * delay, _READY_POLL_MAX)

    async def _end_jobs(self) -> None:
        """End the jobs that this transport created; one that is gone is no error."""
        while self._created:
            job = self._created[-1]
            with contextlib.suppress(http_errors.HttpRequestError):
                await self._connection.post_json(
                    "shutdown",
                    f"/destroy?job_id={quote(str(self._jobs[job]))}",
                    {"job_type": job},
                    timeout=self._time("shutdown"),
                    repeat=Repeat.SAFE,
                )
            self._created.pop()
            del self._jobs[job]

    async def shutdown(self) -> None:
        """End the jobs that this transport created, and close the connections. Idempotent."""
        with self._lock:
            self._closed = True
        try:
            await self._end_jobs()
        finally:
            await self._connection.close()

    async def detach(self) -> None:
        """Close the running loop's connections; jobs go on, and ops open new ones."""
        await self._connection.close()

    def reconnect_handle(self) -> dict[str, Any]:
        """What another process needs to attach: see `from_handle`.

        Raises:
            RuntimeError: There are no jobs yet: `await start()` first.
        """
        if not self._jobs:
            raise RuntimeError("reconnect_handle: the jobs do not exist yet; await start() first")
        return {
            "transport": self.name,
            "url": self._connection.url,
            "generation": self.generation,
            "server_id": self._connection.server_id,
            "jobs": dict(self._jobs),
        }

    @property
    def jobs(self) -> dict[str, int | str]:
        """Ids by type, empty before `start()`."""
        return dict(self._jobs)

    @property
    def owner(self) -> bool:
        """Whether `shutdown` ends the jobs."""
        return not self._attached

    @property
    def serves_reference(self) -> bool:
        """Whether there is a job for `reference_model=True`."""
        if self._jobs or self._attached:
            return "log_prob" in self._jobs
        return self._config is None or "log_prob" in initialize_payloads(self._config)

    async def __aenter__(self) -> HttpTransport:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    # -- training --------------------------------------------------------------------------------

    async def fwd_no_grad(
        self, payload: Mapping[str, Any], reference_model: bool = False
    ) -> dict[str, Any]:
        """Log-probs of a payload, of the trained model or of the reference."""
        job = "log_prob" if reference_model else "training"
        return await self._post_payload("fwd_no_grad", "forward", job, payload, Repeat.SAFE)

    async def fwd_bwd(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Add the gradients of a payload's loss.

        Raises:
            PeerLostError: The connection broke; `maybe_applied` says whether the gradients may
                have been added all the same.
        """
        return await self._post_payload(
            "fwd_bwd", "forward-backward", "training", payload, Repeat.KEYED
        )

    async def step(self) -> dict[str, Any]:
        """One optimizer step.

        The embedded server knows each request by a key, so an answer that got lost is asked
        for again, and the step is taken once. Other servers have no such memory.

        Raises:
            PeerLostError, PeerTimeoutError, HttpServerError: `maybe_applied` says whether the
                step may have been taken all the same.
        """
        try:
            return await self._post("step", "step", "training", {"learning_rate": None})
        except http_errors.HttpServerError as error:
            if not self._own:
                http_errors.doubt_step(error)
            raise

    async def save_checkpoint(self, **kwargs: Any) -> dict[str, Any]:
        """Write a checkpoint, where the server keeps them."""
        if self.generation == "seed":
            given = sorted(key for key, value in kwargs.items() if value is not None)
            if given:
                raise http_errors.misconfigured(
                    "save_checkpoint", f"a server of the first generation takes no {given[0]}"
                )
            return await self._post("save_checkpoint", "save-checkpoint", "training", {})
        return await self._post("save_checkpoint", "save", "training", kwargs, Repeat.SAFE)

    async def load_checkpoint(self, **kwargs: Any) -> dict[str, Any]:
        """Resume from a checkpoint; step 0 when there is none."""
        self._need_final("load_checkpoint")
        body = {"path": None, "step": None, **kwargs}
        return await self._post("load_checkpoint", "load-checkpoint", "training", body, Repeat.SAFE)

    # -- sampling --------------------------------------------------------------------------------

    async def generate(
        self,
        prompts: str | Sequence[Any],
        sampling_params: Mapping[str, Any] | None = None,
        routing_key: str | Sequence[str | None] | None = None,
        strict: bool = False,
    ) -> list[dict[str, Any]]:
        """One result item a prompt."""
        body: dict[str, Any] = {"prompts": prompts, "sampling_params": dict(sampling_params or {})}
        if self.generation == "seed":
            answer = await self._post("generate", "generate", "sampling", body, Repeat.SAFE)
        else:
            body.update(routing_key=routing_key, strict=strict)
            answer = await self._post_payload("generate", "generate", "sampling", body, Repeat.SAFE)
        results = self._member("generate", answer, "results", list)
        for item in results:
            if not isinstance(item, dict):
                url = self._connection.url
                raise http_errors.unreadable("generate", url, "an object for each prompt", item)
        return [with_token_ids(item) for item in results]

    async def sleep_inference(self, level: int = 1) -> dict[str, Any]:
        """Give the sampler's memory back."""
        route = f"sleep-inference?level={level}" if self.generation == "seed" else "sleep-inference"
        return await self._post("sleep_inference", route, "sampling", {"level": level}, Repeat.SAFE)

    async def wake_inference(self, tags: Sequence[str] | None = None) -> dict[str, Any]:
        """Take the sampler's memory again."""
        wanted = None if tags is None else list(tags)
        body = wanted if self.generation == "seed" else {"tags": wanted}
        return await self._post("wake_inference", "wake-inference", "sampling", body, Repeat.SAFE)

    async def reset_prefix_cache(self) -> dict[str, Any]:
        """Forget the states of earlier prompts."""
        return await self._post(
            "reset_prefix_cache", "reset-prefix-cache", "sampling", {}, Repeat.SAFE
        )

    # -- weights ---------------------------------------------------------------------------------

    async def sync_weights(
        self, cuda_ipc: bool | None = None, low_memory: bool | None = None
    ) -> dict[str, Any]:
        """Bring the trainer's weights to the sampler.

        The embedded server does all of it. With any other this side wakes the sampler's
        weights before, its cache after, and resets the prefix cache. When such a sync fails
        the sampler stays asleep, since its weights may be a mixture.
        """
        if self._own:
            return await self._weight_sync(cuda_ipc, low_memory)
        await self.wake_inference(["weights"])
        result = await self._weight_sync(cuda_ipc, low_memory)
        await self.wake_inference(["kv_cache"])
        await self.reset_prefix_cache()
        return result

    async def _weight_sync(self, cuda_ipc: bool | None, low_memory: bool | None) -> dict[str, Any]:
        training = await self._job("sync_weights", "training")
        sampling = await self._job("sync_weights", "sampling")
        if self.generation == "seed":
            body: dict[str, Any] = {
                "training_job_id": training,
                "sampling_job_id": sampling,
                "colocate": False,  # or-ed with what the server was started with
                "cuda_ipc": bool(cuda_ipc),
                "low_memory": bool(low_memory),
            }
            return await self._post_json("sync_weights", "/sync-weights", body, Repeat.KEYED)
        flags = {"cuda_ipc": cuda_ipc, "low_memory": low_memory}
        body = {
            "operation_type": "weight-sync",
            "sub_job_id": training,
            "sub_job_type": "training",
            "payload": {
                "source_sub_job_id": training,
                "target_sub_job_ids": [sampling],
                **{key: value for key, value in flags.items() if value is not None},
            },
        }
        return await self._post("sync_weights", "operation", "training", body)

    # -- requests --------------------------------------------------------------------------------

    def _time(self, method: str) -> float:
        return self._timeouts.get(method, self._timeout)

    async def _job(self, method: str, job: str) -> int | str:
        """The id of a job, once there is one."""
        await self.start()
        if job not in self._jobs:
            raise http_errors.complete(
                http_errors.HttpRequestError(f"No {job} job initialized."), "ARL_ERR_VALUE", method
            )
        return self._jobs[job]

    def _no_tensors(self, method: str, what: str) -> ArcticError:
        return http_errors.unavailable(
            method,
            f"{what} the first generation's HTTP server ({self._connection.url}) would need "
            "pickles both ways, and nothing is ever unpickled here. Use a server of the final "
            "generation, or reach this one over its own client (the arctic transport)",
        )

    def _need_final(self, method: str) -> None:
        if self.generation == "seed":
            raise http_errors.unavailable(
                method, f"the server at {self._connection.url} is of the first generation"
            )

    async def _post(
        self, method: str, route: str, job: str, body: Any, repeat: Repeat = Repeat.KEYED
    ) -> dict[str, Any]:
        """A JSON op of one job."""
        number = await self._job(method, job)
        mark = "&" if "?" in route else "?"
        return await self._post_json(
            method, f"/{route}{mark}job_id={quote(str(number))}", body, repeat
        )

    async def _post_json(self, method: str, path: str, body: Any, repeat: Repeat) -> dict[str, Any]:
        answer = await self._connection.post_json(
            method, path, body, timeout=self._time(method), repeat=repeat
        )
        return self._object(method, answer)

    async def _post_payload(
        self, method: str, route: str, job: str, payload: Mapping[str, Any], repeat: Repeat
    ) -> dict[str, Any]:
        """An op with tensors, in frames both ways."""
        if self.generation == "seed":
            raise self._no_tensors(method, f"{method} through")
        number = await self._job(method, job)
        path = f"/{route}?job_id={quote(str(number))}"
        frame = await http_body.encode(dense_payload(payload))
        chunks = wire.encode_byte_chunks(frame, self._max_request, "request", operation=route)
        del frame
        key = self._connection.new_key(method)
        deadline = time.monotonic() + self._time(method)
        for index, chunk in enumerate(chunks):
            status, body = await self._connection.post_frame(
                method,
                path,
                chunk,
                timeout=max(0.0, deadline - time.monotonic()),
                repeat=repeat,
                key=f"{key}/{index}",
            )
        if status == 202:
            raise http_errors.lost(
                method, self._connection.url, "the server lost some of the request's chunks", False
            )
        return self._object(method, wire.loads(body, copy=False))

    def _object(self, method: str, answer: Any) -> dict[str, Any]:
        if not isinstance(answer, dict):
            raise http_errors.unreadable(method, self._connection.url, "an object", answer)
        return answer

    def _member(self, method: str, answer: Any, name: str, kinds: Any) -> Any:
        """A member of an object, of one of the types."""
        found = self._object(method, answer).get(name)
        if not isinstance(found, kinds) or isinstance(found, bool):
            wanted = f"an object with {name}"
            raise http_errors.unreadable(method, self._connection.url, wanted, answer)
        return found
