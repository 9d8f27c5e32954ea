# SPDX-License-Identifier: Apache-2.0
"""Servers for the HTTP tests: ours on a thread, doubles of the public ones, and a bad network."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from aiohttp import web

import clients
from arctic_rl_c import wire
from arctic_rl_c.local.http_server import HttpServer

WAIT = 60.0


@contextlib.contextmanager
def running(
    start: Callable[[], Awaitable[Any]], close: Callable[[], Awaitable[Any]]
) -> Iterator[None]:
    """An event loop on a thread of its own, with something started on it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def call(coroutine: Awaitable[Any]) -> Any:
        async def run() -> Any:
            return await coroutine

        return asyncio.run_coroutine_threadsafe(run(), loop).result(WAIT)

    try:
        call(start())
        yield
    finally:
        call(close())
        call(loop.shutdown_default_executor())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT)
        loop.close()
        assert not thread.is_alive()


@contextlib.contextmanager
def serving(backend: Any = None, **options: Any) -> Iterator[HttpServer]:
    """Our server over `backend`, a recording transport by default."""
    server = HttpServer(clients.Transport() if backend is None else backend, **options)
    with running(server.start, server.close):
        yield server


@contextlib.contextmanager
def application(app: web.Application) -> Iterator[str]:
    """An aiohttp application; gives its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    runner = web.AppRunner(app, shutdown_timeout=1.0)

    async def start() -> None:
        await runner.setup()
        await web.SockSite(runner, listener).start()

    with running(start, runner.cleanup):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


# ---- doubles of the public servers ---------------------------------------------------------------


def detail(status: int, text: Any) -> web.Response:
    return web.json_response({"detail": text}, status=status)


class Public:
    """What both generations have: jobs, and a record of what was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, str], Any]] = []
        self.jobs: dict[int, dict[str, Any]] = {}
        self.polls = 0
        self.answers: dict[str, Callable[[], web.Response]] = {}

    async def body(self, request: web.Request) -> Any:
        raw = await request.read()
        if request.content_type == "application/octet-stream":
            return wire.loads(raw)
        return json.loads(raw) if raw else None

    def route(self, answer: Callable[[Any], Any], framed: bool) -> Any:
        async def handle(request: web.Request) -> web.Response:
            body = await self.body(request)
            self.calls.append((request.path, dict(request.query), body))
            if request.path in self.answers:
                return self.answers[request.path]()
            number = request.query.get("job_id")
            if number is not None and int(number) not in self.jobs:
                return detail(404, f"Job {number} not found")
            found = answer(body)
            if isinstance(found, web.Response):
                return found
            if framed:
                data = wire.dumps(found)
                return web.Response(body=data, content_type="application/octet-stream")
            return web.json_response(found)

        return handle

    def initialize(self, body: Any) -> Any:
        number = len(self.jobs) + 1
        self.jobs[number] = {"job_id": number, "status": "STARTING", **body}
        return {"job_id": number, "job_type": body["job_type"], "running": True}

    def destroy(self, body: Any) -> Any:
        return {"job_id": 1}

    async def job(self, request: web.Request) -> web.Response:
        number = int(request.match_info["id"])
        if number not in self.jobs:
            return detail(404, f"Job {number} not found")
        self.polls += 1
        status = "RUNNING" if self.polls > 3 else "STARTING"
        return web.json_response({**self.jobs[number], "status": status})

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)

        async def health(_: web.Request) -> web.Response:
            return web.json_response({"status": "OK"})

        app.add_routes(
            [
                web.get("/health", health),
                web.get("/job/{id}", self.job),
                web.post("/initialize", self.route(self.initialize, False)),
                web.post("/destroy", self.route(self.destroy, False)),
                *(
                    web.post(f"/{name}", self.route(answer, framed))
                    for name, (answer, framed) in self.routes().items()
                ),
            ]
        )
        return app

    def routes(self) -> dict[str, tuple[Callable[[Any], Any], bool]]:
        raise NotImplementedError


class FinalServer(Public):
    """The final generation, as far as a client sees it."""

    def generate(self, body: Any) -> Any:
        if not all(isinstance(prompt, str) for prompt in body["prompts"]):
            return web.Response(status=500, text="Internal Server Error")
        logprobs = [{5: {"logprob": -0.5, "rank": 1}}, None]
        return {
            "job_id": 1,
            "results": [{"text": "x", "logprobs": logprobs} for _ in body["prompts"]],
        }

    def routes(self) -> dict[str, tuple[Callable[[Any], Any], bool]]:
        metrics = {"loss": 0.5, "bad": float("nan")}
        return {
            "forward-backward": (lambda body: {"job_id": 3, "metrics": metrics}, True),
            "forward": (lambda body: {"job_id": 3, "batch": {}, "metrics": {}}, True),
            "step": (lambda body: {"job_id": 3, "metrics": {"last_lr": [1e-6]}}, False),
            "save": (lambda body: {"job_id": 3, "path": body["path"], "global_step": 7}, False),
            "load-checkpoint": (lambda body: {"job_id": 3, "global_step": 0}, False),
            "generate": (self.generate, True),
            "operation": (lambda body: {"status": "ok"}, False),
            "sleep-inference": (lambda body: {"job_id": 1, "sampling": {}}, False),
            "wake-inference": (lambda body: {"job_id": 1, "sampling": {}}, False),
            "reset-prefix-cache": (lambda body: {"job_id": 1}, False),
        }


class SeedServer(Public):
    """The first generation: JSON, and pickles for what holds tensors."""

    def routes(self) -> dict[str, tuple[Callable[[Any], Any], bool]]:
        return {
            "fwd-bwd": (lambda body: detail(500, "a pickle was wanted"), False),
            "fwd-no-grad": (lambda body: detail(500, "a pickle was wanted"), False),
            "step": (lambda body: {"job_id": 3, "metrics": {"last_lr": 1e-6}}, False),
            "save-checkpoint": (lambda body: {"job_id": 3, "path": "/x"}, False),
            "generate": (lambda body: {"results": [{"text": p} for p in body["prompts"]]}, False),
            "sync-weights": (lambda body: {"status": "ok"}, False),
            "sleep-inference": (lambda body: {"status": "sleeping"}, False),
            "wake-inference": (lambda body: {"status": "ready"}, False),
            "reset-prefix-cache": (lambda body: {"status": "ok"}, False),
        }


# ---- a bad network -------------------------------------------------------------------------------


class Proxy:
    """Stands between client and server and loses what it is told to lose.

    `plan` maps a path to what happens to what is posted there, one entry a request: `pass`,
    `request` (never reaches the server), `answer` (the server answers, the client hears nothing)
    or `half` (half of the answer arrives). When the list is used up, all pass.
    """

    def __init__(self, upstream: str, plan: dict[str, list[str]]) -> None:
        self.upstream, self.plan = upstream, {path: list(steps) for path, steps in plan.items()}
        self.seen: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, sock=self._listener)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        request = await read_message(reader)
        method, target, _ = request.decode("latin-1").split(" ", 2)
        path = target.split("?")[0]
        steps = self.plan.get(path) if method == "POST" else None
        step = steps.pop(0) if steps else "pass"
        self.seen.append(f"{path} {step}")
        if step == "request":
            return False
        host, port = self.upstream.removeprefix("http://").split(":")
        up_reader, up_writer = await asyncio.open_connection(host, int(port))
        try:
            up_writer.write(request)
            answer = await read_message(up_reader)
        finally:
            up_writer.close()
        if step == "answer":
            return False
        if step == "half":
            answer = answer[: len(answer) // 2]
        writer.write(answer)
        await writer.drain()
        return step == "pass"


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """One request or answer with a Content-Length."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    return head + await reader.readexactly(length)


@contextlib.contextmanager
def losing(upstream: str, plan: dict[str, list[str]]) -> Iterator[Proxy]:
    proxy = Proxy(upstream, plan)
    with running(proxy.start, proxy.close):
        yield proxy
