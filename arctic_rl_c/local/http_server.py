# SPDX-License-Identifier: Apache-2.0
"""An HTTP front end with an Arctic server's routes, over the embedded server or any transport.

It serves `HttpTransport`, and speaks the final generation's wire, so that generation's own HTTP
client can use it too. There is no authentication: it listens on the loopback interface unless
told otherwise, and whoever reaches it can use it. Nothing that arrives is ever unpickled.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from arctic_rl_c import (
    PeerLostError,
    PeerTimeoutError,
    TransportUnavailableError,
    wire,
)
from arctic_rl_c.local.http_chunks import ChunkStore
from arctic_rl_c.local.http_jobs import JobError, JobTable
from arctic_rl_c.local.remote_errors import describe_error
from arctic_rl_c.transports.base import Transport
from arctic_rl_c.transports.http_body import (
    FRAME_TYPE,
    JSON_TYPE,
    KEY_HEADER,
    SERVER_HEADER,
    BodyTooLargeError,
    encode,
    pieces,
    read_body,
)

__all__ = ["HttpServer", "listen"]

_log = logging.getLogger(__name__)

_REMEMBERED = 256  # answers that can be asked for again
_STREAM_FROM = 1 << 20
_BACKLOG = 512
_SHUTDOWN_SECONDS = 2.0  # what running requests get when the server closes

_Answer = Callable[[], Awaitable[Any]]

#: Routes of Arctic servers that the embedded one has nothing behind.
_NOT_SERVED = (
    "log-probs",
    "sleep-training",
    "wake-training",
    "empty-training-cache",
    "sleep-log-prob",
    "wake-log-prob",
    "weight-norm",
)
#: Tensor routes of the first generation, which carry pickles.
_PICKLED = ("fwd-bwd", "fwd-no-grad")


class HttpServer:
    """Serves a transport's ops over HTTP.

    The constructor binds the socket and keeps it, so `port` is the real one and nobody else can
    take it before `start()`.

    Args:
        backend: Who runs the ops; usually a `LocalTransport`. It stays its owner's.
        host: Address to listen on.
        port: 0 picks a free one.
        listener: A socket from `listen` instead of host and port; closed with the server.
        max_body_bytes: The largest request body; larger ones come in byte chunks.
        max_pending_bytes: How much of unfinished chunked requests is kept.

    Raises:
        OSError: The port is taken; says which.

    Example:
        >>> async with LocalTransport(options) as backend, HttpServer(backend) as server:
        ...     print(server.url)
    """

    def __init__(
        self,
        backend: Transport,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        listener: socket.socket | None = None,
        max_body_bytes: int = 4 << 30,
        max_pending_bytes: int = 16 << 30,
    ) -> None:
        self._backend = backend
        self._max_body = max_body_bytes
        self._socket = listen(host, port) if listener is None else listener
        self.host, self.port = self._socket.getsockname()[:2]
        self.server_id = uuid.uuid4().hex
        self._jobs = JobTable(_model_name(backend))
        self._chunks = ChunkStore(max_pending_bytes)
        self._answers: OrderedDict[str, asyncio.Task[web.Response]] = OrderedDict()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Where clients find it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def start(self) -> None:
        """Begin to answer."""
        app = web.Application(middlewares=[_errors], client_max_size=self._max_body)
        app.add_routes(self._routes())
        # A client that goes away does not cancel its op: the next attempt wants the answer.
        self._runner = web.AppRunner(
            app,
            handler_cancellation=False,
            access_log=None,
            shutdown_timeout=_SHUTDOWN_SECONDS,
        )
        await self._runner.setup()
        await web.SockSite(self._runner, self._socket, backlog=_BACKLOG).start()

    async def close(self) -> None:
        """Stop listening, and end the requests that are running. Idempotent."""
        runner, self._runner = self._runner, None
        for task in self._answers.values():
            task.cancel()
        if runner is not None:
            await runner.cleanup()
        self._socket.close()

    async def __aenter__(self) -> HttpServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- routes ------------------------------------------------------------------------------

    def _routes(self) -> list[web.RouteDef]:
        training, sampling = ("training",), ("sampling",)
        posts = {
            "initialize": self._handler(self._initialize, once=True),
            "destroy": self._handler(self._destroy),
            "forward": self._handler(self._forward, ("training", "log_prob")),
            "forward-backward": self._handler(self._forward_backward, training, once=True),
            "step": self._handler(self._step, training, once=True),
            "save": self._handler(self._save, training, once=True),
            "save-checkpoint": self._handler(self._save, training, once=True),
            "load-checkpoint": self._handler(self._load, training, once=True),
            "generate": self._handler(self._generate, sampling),
            "operation": self._handler(self._operation, ("training", "sampling"), once=True),
            "weight-sync": self._handler(self._weight_sync, training, once=True),
            "sync-weights": self._handler(self._weight_sync, None, once=True),
            "sleep-inference": self._handler(self._sleep, sampling),
            "wake-inference": self._handler(self._wake, sampling),
            "reset-prefix-cache": self._handler(self._reset, sampling),
        }
        return [
            web.get("/health", self._health),
            web.get("/capabilities", self._capabilities),
            web.get("/status", self._status),
            web.get("/job/{id}", self._job),
            *(web.post(f"/{name}", handler) for name, handler in posts.items()),
            *(web.post(f"/{name}", _not_served) for name in _NOT_SERVED),
            *(web.post(f"/{name}", _pickled) for name in _PICKLED),
        ]

    async def _health(self, _: web.Request) -> web.Response:
        return _json({"status": "OK"})

    async def _capabilities(self, _: web.Request) -> web.Response:
        backend = self._backend
        return _json(
            {
                "server": "arctic_rl_c",
                "protocol": 1,
                "server_id": self.server_id,
                "accepts_token_ids": backend.accepts_token_ids,
                "accepts_routing_key": backend.accepts_routing_key,
                "accepts_strict": backend.accepts_strict,
                "server_limits": bool(getattr(backend, "server_limits", False)),
                "max_body_bytes": self._max_body,
            }
        )

    async def _status(self, _: web.Request) -> web.Response:
        return _json({"jobs": self._jobs.all()})

    async def _job(self, request: web.Request) -> web.Response:
        return _json(self._jobs.find(request.match_info["id"]))

    # -- requests ----------------------------------------------------------------------------

    def _handler(
        self,
        op: Callable[[_Call], Awaitable[Any]],
        jobs: tuple[str, ...] | None = None,
        *,
        once: bool = False,
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """A route: read the body, check the job, run the op, answer in the body's own form.

        Args:
            op: What it does.
            jobs: Types that its `job_id` may have; None when it has none.
            once: A request with a key that was seen gets the answer that was given then.
        """

        async def handle(request: web.Request) -> web.StreamResponse:
            wanted = request.headers.get(SERVER_HEADER)
            if wanted is not None and wanted != self.server_id:
                raise PeerLostError(
                    "the server was restarted since this client attached: its jobs are gone"
                )
            key = request.headers.get(KEY_HEADER) if once else None
            body: bytes | bytearray = await read_body(
                request.content, request.content_length, self._max_body
            )
            if key is not None and key in self._answers:
                return await self._send(request, await asyncio.shield(self._answers[key]))
            call = _Call(request, body)
            if call.framed:
                progress = self._chunks.add(body)
                if isinstance(progress, dict):
                    return _json(progress, status=202)
                call.body = progress
            if jobs is not None:
                call.job = self._jobs.require(request.query.get("job_id"), jobs)
            return await self._send(request, await self._answer(key, op, call))

        return handle

    async def _answer(
        self, key: str | None, op: Callable[[_Call], Awaitable[Any]], call: _Call
    ) -> web.Response:
        async def run() -> web.Response:
            return await call.respond(await op(call))

        if key is None:
            return await run()
        task = asyncio.ensure_future(run())
        # Nobody may come to ask for it; then its failure was told to nobody, which is no news.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._answers[key] = task
        while len(self._answers) > _REMEMBERED:
            oldest = next(iter(self._answers))
            if not self._answers[oldest].done():
                break
            del self._answers[oldest]
        return await asyncio.shield(task)

    async def _send(self, request: web.Request, answer: web.Response) -> web.StreamResponse:
        """A response object can be sent once; an answer, as often as it is asked for."""
        body = answer.body
        assert isinstance(body, bytes)
        headers = {"Content-Type": answer.headers["Content-Type"], "Content-Length": str(len(body))}
        if len(body) < _STREAM_FROM:
            return web.Response(body=body, status=answer.status, headers=headers)
        response = web.StreamResponse(status=answer.status, headers=headers)
        await response.prepare(request)
        async for piece in pieces(body):
            await response.write(piece)
        await response.write_eof()
        return response

    # -- ops: training -------------------------------------------------------------------------

    async def _forward(self, call: _Call) -> dict[str, Any]:
        reference = call.job["job_type"] == "log_prob"
        result = await self._backend.fwd_no_grad(call.payload(), reference)
        return {"job_id": call.job["job_id"], "metrics": {}, **result}

    async def _forward_backward(self, call: _Call) -> dict[str, Any]:
        return {"job_id": call.job["job_id"], **await self._backend.fwd_bwd(call.payload())}

    async def _step(self, call: _Call) -> dict[str, Any]:
        rate = call.json_dict().get("learning_rate")
        if rate is not None:
            raise ValueError("learning_rate is set by the schedule and cannot be given to step")
        return {"job_id": call.job["job_id"], "batch": {}, **await self._backend.step()}

    async def _save(self, call: _Call) -> dict[str, Any]:
        given = {name: value for name, value in call.json_dict().items() if value is not None}
        return {"job_id": call.job["job_id"], **await self._backend.save_checkpoint(**given)}

    async def _load(self, call: _Call) -> dict[str, Any]:
        given = {name: value for name, value in call.json_dict().items() if value is not None}
        return {"job_id": call.job["job_id"], **await self._backend.load_checkpoint(**given)}

    # -- ops: sampling -------------------------------------------------------------------------

    async def _generate(self, call: _Call) -> dict[str, Any]:
        body = call.payload() if call.framed else call.json_dict()
        if "prompts" not in body:
            raise ValueError("generate: the body has no prompts")
        options = {
            name: body[name]
            for name in ("sampling_params", "routing_key", "strict")
            if body.get(name) is not None
        }
        results = await self._backend.generate(prompts=body["prompts"], **options)
        return {"job_id": call.job["job_id"], "results": results}

    async def _sleep(self, call: _Call) -> dict[str, Any]:
        level = call.json_dict().get("level", call.query.get("level", 1))
        return {
            "job_id": call.job["job_id"],
            **await self._backend.sleep_inference(_integer("level", level)),
        }

    async def _wake(self, call: _Call) -> dict[str, Any]:
        body = call.json()
        tags = body.get("tags") if isinstance(body, Mapping) else body
        return {"job_id": call.job["job_id"], **await self._backend.wake_inference(tags)}

    async def _reset(self, call: _Call) -> dict[str, Any]:
        return {"job_id": call.job["job_id"], **await self._backend.reset_prefix_cache()}

    # -- ops: both -----------------------------------------------------------------------------

    async def _weight_sync(self, call: _Call) -> dict[str, Any]:
        body = call.json_dict()
        flags = {
            name: body[name] for name in ("cuda_ipc", "low_memory") if body.get(name) is not None
        }
        source = body.get("source_sub_job_id", body.get("training_job_id"))
        targets = body.get("target_sub_job_ids", [body.get("sampling_job_id")])
        if not isinstance(targets, list):
            raise JobError(400, f"target_sub_job_ids must be a list of job ids, found {targets!r}")
        self._jobs.require(source, ("training",))
        for target in targets:
            self._jobs.require(target, ("sampling",))
        return await self._backend.sync_weights(**flags)

    async def _operation(self, call: _Call) -> dict[str, Any]:
        body = call.json_dict()
        kind, payload = body.get("operation_type"), body.get("payload") or {}
        if not isinstance(payload, dict):
            raise JobError(400, f"payload must be an object, found {type(payload).__name__}")
        inner = call.with_json(payload)
        if kind == "weight-sync":
            return await self._weight_sync(inner)
        if kind not in ("reset-prefix-cache", "sleep-inference", "wake-inference"):
            raise JobError(400, f"unknown operation_type {kind!r}")
        inner.job = self._jobs.require(body.get("sub_job_id") or call.job["job_id"], ("sampling",))
        ops = {
            "reset-prefix-cache": self._reset,
            "sleep-inference": self._sleep,
            "wake-inference": self._wake,
        }
        return await ops[kind](inner)

    # -- jobs ----------------------------------------------------------------------------------

    async def _initialize(self, call: _Call) -> dict[str, Any]:
        return self._jobs.create(call.json_dict())

    async def _destroy(self, call: _Call) -> dict[str, Any]:
        return self._jobs.destroy(call.query.get("job_id"), call.json_dict().get("job_type"))


class _Call:
    """One request while it is served: its body, its job, and the form of its answer."""

    def __init__(self, request: web.Request, body: bytes | bytearray) -> None:
        self.query: Mapping[str, str] = request.query
        self.framed = request.content_type == FRAME_TYPE
        self.body = body
        self.job: dict[str, Any] = {}
        self._parsed: Any = None

    def with_json(self, value: Any) -> _Call:
        """The same request with another body."""
        copy = object.__new__(_Call)
        copy.query, copy.framed, copy.body, copy.job = self.query, False, b"", self.job
        copy._parsed = value
        return copy

    def payload(self) -> dict[str, Any]:
        """The body as a frame. Tensors are torch tensors over the body."""
        writable = self.body if isinstance(self.body, bytearray) else bytearray(self.body)
        found = wire.loads(writable, as_="torch", copy=False)
        if not isinstance(found, dict):
            raise ValueError(f"the body must hold a dict, found {type(found).__name__}")
        return found

    def json(self) -> Any:
        """The body as JSON; None when it is empty."""
        if self._parsed is None and self.body:
            try:
                self._parsed = json.loads(bytes(self.body))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"the body is no JSON: {error}") from None
        return self._parsed

    def json_dict(self) -> dict[str, Any]:
        """The body as a JSON object; empty when there is none."""
        found = self.json()
        if found is None:
            return {}
        if not isinstance(found, dict):
            raise ValueError(f"the body must be a JSON object, found {type(found).__name__}")
        return found

    async def respond(self, result: Any) -> web.Response:
        """The answer, in the form of the request."""
        if self.framed:
            return web.Response(body=await encode(result), headers={"Content-Type": FRAME_TYPE})
        return _json(result)


# ---- answers ---------------------------------------------------------------------------------


def _json(value: Any, status: int = 200) -> web.Response:
    """JSON; NaN and infinities are literals, so that no answer is lost to a metric."""
    text = json.dumps(value, default=_plain)
    return web.Response(body=text.encode(), status=status, headers={"Content-Type": JSON_TYPE})


def _plain(value: Any) -> Any:
    """What json.dumps asks for: scalars of array libraries as numbers, anything else as text."""
    for method in ("item", "tolist"):
        if hasattr(value, method) and getattr(value, "size", 1) != 0:
            try:
                return getattr(value, method)()
            except (ValueError, RuntimeError):
                continue
    return repr(value)


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Every failure as JSON: `detail` for people, `error` for `HttpTransport` to rebuild."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _json({"detail": error.reason}, status=error.status)
    except JobError as error:
        return _json({"detail": str(error)}, status=error.status)
    except Exception as error:
        status = _status_of(error)
        if status >= 500:
            _log.warning("%s failed: %s: %s", request.path, type(error).__name__, error)
        return _json({"detail": str(error), "error": describe_error(error)}, status=status)


def _status_of(error: Exception) -> int:
    if isinstance(error, BodyTooLargeError):
        return 413
    if isinstance(error, PeerTimeoutError):
        return 504
    if isinstance(error, PeerLostError):
        return 503
    if isinstance(error, TransportUnavailableError):
        return 501
    return 400 if isinstance(error, ValueError | TypeError | LookupError) else 500


async def _not_served(request: web.Request) -> web.StreamResponse:
    raise TransportUnavailableError(f"{request.path} is not served by the embedded server")


async def _pickled(request: web.Request) -> web.StreamResponse:
    raise TransportUnavailableError(
        f"{request.path} carries pickles, which are refused here: use /forward and "
        "/forward-backward, whose tensors travel as DSSST1 frames"
    )


def _integer(name: str, value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be an integer, found {value!r}") from None


def _model_name(backend: Transport) -> str | None:
    """The model that a backend serves, as far as it says."""
    model = getattr(getattr(backend, "options", None), "trainer_model", None)
    if model is None:
        return None
    return model.path or f"random:{model.shape}"


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. It stays open from here on, so its port cannot go to anybody else.

    Raises:
        OSError: The port is taken, or the address is not this machine's; says which.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    return sock
