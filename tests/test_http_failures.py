# SPDX-License-Identifier: Apache-2.0
"""HTTP when things go wrong: lost answers, dead servers, strangers; and the public servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

import clients
import http_servers
from arctic_rl_c import (
    ConfigError,
    PeerLostError,
    PeerTimeoutError,
    TransportUnavailableError,
    wire,
)
from arctic_rl_c.transports import http_connection
from arctic_rl_c.transports.http import HttpTransport
from arctic_rl_c.transports.http_errors import HttpRequestError, HttpServerError
from test_http import PAYLOAD, with_transport

Use = Callable[[HttpTransport], Awaitable[Any]]


# ---- lost answers --------------------------------------------------------------------------------

PATHS = {
    "step": "/step",
    "fwd_bwd": "/forward-backward",
    "sync_weights": "/operation",
    "save_checkpoint": "/save",
    "generate": "/generate",
    "fwd_no_grad": "/forward",
}
CALLS: dict[str, Use] = {
    "step": lambda t: t.step(),
    "fwd_bwd": lambda t: t.fwd_bwd(PAYLOAD),
    "sync_weights": lambda t: t.sync_weights(),
    "save_checkpoint": lambda t: t.save_checkpoint(path="/x"),
    "generate": lambda t: t.generate(["x"]),
    "fwd_no_grad": lambda t: t.fwd_no_grad(PAYLOAD),
}
#: What must happen once however often it is sent.
ONCE = ("step", "fwd_bwd", "sync_weights", "save_checkpoint")


@pytest.mark.parametrize("lost", ["request", "answer", "half"])
@pytest.mark.parametrize("op", CALLS)
def test_a_lost_answer_is_asked_for_again(op: str, lost: str) -> None:
    backend = clients.Transport()
    with (
        http_servers.serving(backend) as server,
        http_servers.losing(server.url, {PATHS[op]: [lost, lost, "pass", lost]}) as proxy,
    ):

        async def use(transport: HttpTransport) -> tuple[Any, Any]:
            return await CALLS[op](transport), await CALLS[op](transport)

        first, second = with_transport(proxy.url, use)
    sent = 1 if op in ONCE or lost == "request" else 3
    assert backend.counts[op] == sent + (1 if op in ONCE or lost == "request" else 2)
    if op == "step":
        assert first["metrics"]["grad_norm"] == 1
        assert second["metrics"]["grad_norm"] == 2


def test_answers_come_back_while_the_op_is_still_running() -> None:
    """The connection breaks long before the step ends: the second attempt waits for the first."""
    entered, released = asyncio.Event(), asyncio.Event()

    async def before(method: str, count: int) -> None:
        if method == "step":
            entered.set()
            await asyncio.wait_for(released.wait(), 60)
        if method == "generate":
            await asyncio.wait_for(entered.wait(), 60)
            released.set()

    backend = clients.Transport(before)
    with http_servers.serving(backend) as server:

        async def use(transport: HttpTransport) -> None:
            connection = transport._connection
            step = asyncio.ensure_future(transport.step())
            while not backend.counts.get("step"):
                await asyncio.sleep(0.01)
            session = await connection._session()
            for protocols in session.connector._acquired:  # type: ignore[union-attr]
                protocols.transport.abort()
            await transport.generate(["x"])
            assert (await step)["metrics"]["grad_norm"] == 1

        with_transport(server.url, use)
    assert backend.counts["step"] == 1


def test_a_job_is_created_once() -> None:
    with (
        http_servers.serving() as server,
        http_servers.losing(server.url, {"/initialize": ["answer", "pass", "half"]}) as proxy,
    ):

        async def use(transport: HttpTransport) -> None:
            assert transport.jobs == {"sampling": 1, "log_prob": 2, "training": 3}

        with_transport(proxy.url, use)


def test_chunked_requests_survive_lost_answers() -> None:
    backend = clients.Transport()
    payload = {"batch": {"x": torch.arange(9000)}, "meta": {}, "processing": {}}
    plan = {"/forward-backward": ["pass", "answer", "pass", "pass", "pass", "half", "pass"] * 2}
    with (
        http_servers.serving(backend) as server,
        http_servers.losing(server.url, plan) as proxy,
    ):
        with_transport(proxy.url, lambda t: t.fwd_bwd(payload), max_request_bytes=20_000)
    assert backend.counts == {"fwd_bwd": 1}
    clients.same(backend.calls[0][1], payload)


def test_an_answer_that_never_gets_through() -> None:
    backend = clients.Transport()
    with (
        http_servers.serving(backend) as server,
        http_servers.losing(server.url, {"/step": ["answer"] * 9}) as proxy,
    ):

        async def use(transport: HttpTransport) -> None:
            with pytest.raises(
                PeerLostError, match=r"step: the connection broke: .* may or may not"
            ) as caught:
                await transport.step()
            assert caught.value.maybe_applied
            assert caught.value.operation == "step"

        with_transport(proxy.url, use, retries=2)
    assert backend.counts == {"step": 1}


# ---- dead servers --------------------------------------------------------------------------------

SERVER = """
import asyncio, sys
sys.path.insert(0, {tests!r})
import clients
from arctic_rl_c.local.http_server import HttpServer

async def before(method, count):
    if method == "step":
        print("stepping", flush=True)
        await asyncio.sleep(600)

async def main():
    async with HttpServer(clients.Transport(before), port={port}) as server:
        print(server.port, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@contextlib.contextmanager
def server_process(port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    code = SERVER.format(tests=str(Path(__file__).parent), port=port)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate(timeout=60)


def test_a_server_that_is_killed_in_the_middle() -> None:
    with server_process() as (process, url):

        async def use(transport: HttpTransport) -> None:
            step = asyncio.ensure_future(transport.step())
            assert process.stdout is not None
            assert await asyncio.to_thread(process.stdout.readline) == "stepping\n"
            process.send_signal(signal.SIGKILL)
            with pytest.raises(
                PeerLostError, match=r"step: cannot connect: .* may or may not have"
            ) as caught:
                await step
            assert caught.value.maybe_applied
            with pytest.raises(PeerLostError, match="nothing was changed") as caught:
                await transport.step()
            assert not caught.value.maybe_applied

        async def run() -> None:
            transport = await HttpTransport.connect(url, retries=1)
            await use(transport)
            with pytest.raises(PeerLostError, match="shutdown: cannot connect"):
                await transport.shutdown()

        asyncio.run(run())


def test_a_server_that_was_restarted() -> None:
    """It has the same address and other jobs: nothing may be done to it by mistake."""
    with http_servers.serving() as first:
        transport = asyncio.run(HttpTransport.connect(first.url))
        handle = transport.reconnect_handle()
        port = first.port
    with http_servers.serving(port=port) as second:
        with pytest.raises(PeerLostError, match="the server was restarted since this client"):
            asyncio.run(transport.step())
        with pytest.raises(PeerLostError, match="another server answers than the one wanted"):
            HttpTransport.from_handle(handle)
        assert second._backend.calls == []


def test_nobody_answers() -> None:
    server = http_servers.HttpServer(clients.Transport())  # bound, but not serving
    try:
        said = r"connect: no answer to /health: .* nothing was changed"
        with pytest.raises(PeerLostError, match=said):
            HttpTransport(server.url, connect_timeout=0.05)
    finally:
        asyncio.run(server.close())
    with pytest.raises(PeerLostError, match="Connection refused"):
        HttpTransport(server.url, connect_timeout=0.05)


def test_a_server_that_comes_up_late() -> None:
    server = http_servers.HttpServer(clients.Transport())

    async def run() -> None:
        connecting = asyncio.ensure_future(HttpTransport.connect(server.url, connect_timeout=60.0))
        await asyncio.sleep(0)
        async with server:
            transport = await connecting
            await transport.step()
            await transport.shutdown()

    asyncio.run(run())


# ---- strangers -----------------------------------------------------------------------------------


def answering(routes: dict[str, Callable[[], web.Response]]) -> web.Application:
    app = web.Application()

    def handler(answer: Callable[[], web.Response]) -> Any:
        async def handle(_: web.Request) -> web.Response:
            return answer()

        return handle

    for path, answer in routes.items():
        app.router.add_route("*", path, handler(answer))
    return app


def ok() -> web.Response:
    return web.json_response({"status": "OK"})


STRANGERS = [
    ({"/health": ok}, TransportUnavailableError, "it is no Arctic server"),
    (
        {"/health": lambda: web.Response(status=503)},
        PeerLostError,
        "/health answered with status 503",
    ),
    (
        {"/health": ok, "/capabilities": lambda: web.Response(text="{")},
        TransportUnavailableError,
        "no Arctic",
    ),
    (
        {"/health": ok, "/capabilities": lambda: web.json_response([])},
        TransportUnavailableError,
        "no Arctic",
    ),
    (
        {
            "/health": ok,
            "/capabilities": lambda: web.json_response({"server": "arctic_rl_c", "protocol": 2}),
        },
        TransportUnavailableError,
        "speaks protocol 2 of this package, here is 1",
    ),
    (
        {
            "/health": ok,
            "/capabilities": lambda: web.json_response({"server": "arctic_rl_c", "protocol": 1}),
        },
        TransportUnavailableError,
        "gives server_id=None in /capabilities, wanted str",
    ),
    (
        {"/health": ok, "/capabilities": lambda: web.Response(text="[" * 60_000)},
        TransportUnavailableError,
        "no Arctic",
    ),
]


@pytest.mark.parametrize(("routes", "error", "said"), STRANGERS)
def test_strangers(routes: Any, error: type[Exception], said: str) -> None:
    with (
        http_servers.application(answering(routes)) as url,
        pytest.raises(error, match=said),
    ):
        HttpTransport(url, connect_timeout=0.2)


def test_a_server_that_speaks_no_http() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail ready\r\n")
        writer.close()

    server: asyncio.Server | None = None
    url = ""

    async def start() -> None:
        nonlocal server, url
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def close() -> None:
        assert server is not None
        server.close()

    with (
        http_servers.running(start, close),
        pytest.raises(PeerLostError, match="no answer to /health: not an HTTP server"),
    ):
        HttpTransport(url, connect_timeout=0.2)


@contextlib.contextmanager
def raw_server(answers: dict[str, list[bytes]]) -> Iterator[str]:
    """Answers GETs with bytes as they are: the parts of an answer come one at a time."""
    listener = socket.create_server(("127.0.0.1", 0))
    more = threading.Event()

    def serve() -> None:
        while not more.is_set():
            with contextlib.suppress(OSError):
                sock, _ = listener.accept()
                with sock:
                    path = sock.recv(4096).split(b" ")[1].decode()
                    for part in answers[path]:
                        sock.sendall(part)
                        more.wait(0.05)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        more.set()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()


HEALTHY = [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"]


@pytest.mark.parametrize(
    "slowly",
    [
        [b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n", *[b" "] * 5000],
        [b"HTTP/1.1 200 OK\r\nX: ", *[b"y"] * 5000],
        [b"H"] * 5000,
    ],
    ids=["body", "header", "status"],
)
def test_a_server_that_answers_byte_by_byte(slowly: list[bytes]) -> None:
    """The time limit is for the answer, not for each byte of it."""
    with (
        raw_server({"/health": HEALTHY, "/capabilities": slowly}) as url,
        pytest.raises(PeerLostError, match="no answer to /capabilities: timed out"),
    ):
        HttpTransport(url, connect_timeout=0.3)


def test_an_answer_that_is_cut_is_late_however_its_socket_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reset: the server sent a byte between the cut and the read that the cut ends."""
    late = threading.Event()
    cut = http_connection._cut

    def cut_and_tell(*arguments: Any) -> None:
        cut(*arguments)
        late.set()

    def read(*_: object) -> bytes:
        assert late.wait(60)
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr(http_connection, "_cut", cut_and_tell)
    monkeypatch.setattr("http.client.HTTPResponse.read", read)
    with (
        raw_server({"/health": HEALTHY}) as url,
        pytest.raises(PeerLostError, match="no answer to /health: timed out"),
    ):
        HttpTransport(url, connect_timeout=0.2)


def test_a_server_whose_first_words_break_off() -> None:
    """Half of the embedded server's answer is not an answer of some other server."""
    broken = [b'HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{"server": "arctic_rl_c", ']
    with (
        raw_server({"/health": HEALTHY, "/capabilities": broken}) as url,
        pytest.raises(PeerLostError, match="the answer broke off after 26 bytes"),
    ):
        HttpTransport(url, connect_timeout=0.3)


ANSWERS = [None, [], "x", 5, {}, {"job_id": None}, {"job_id": True}, {"results": None}]


@pytest.mark.parametrize("path", ["/initialize", "/job/{id}", "/generate"])
def test_answers_of_another_form(path: str) -> None:
    """Whatever a success holds, the error says which op, what was found, and what was wanted."""
    server = http_servers.FinalServer()
    wanted = {"/initialize": "an object with job_id", "/generate": "an object with results"}
    op = "generate" if path == "/generate" else "start"
    answer: Any = None

    async def job(_: web.Request) -> web.Response:
        return web.json_response(answer)

    if path == "/job/{id}":
        server.job = job  # type: ignore[method-assign]
    else:
        server.answers[path] = lambda: web.Response(
            body=wire.dumps(answer) if path == "/generate" else json.dumps(answer).encode()
        )

    async def use(url: str) -> None:
        transport = HttpTransport(url, config=clients.config())
        form = wanted[path] if isinstance(answer, dict) else "an object"
        said = f"^{op}: .*answered with {type(answer).__name__}, not with {form}"
        try:
            with pytest.raises(HttpServerError, match=said) as caught:
                await transport.generate(["x"])
            assert caught.value.operation == op
        finally:
            await transport.shutdown()

    with http_servers.application(server.app()) as url:
        for answer in ANSWERS:
            # A job whose status is not RUNNING is waited for.
            if path != "/job/{id}" or not isinstance(answer, dict):
                asyncio.run(use(url))


def test_results_that_are_no_objects() -> None:
    server = http_servers.FinalServer()
    items: list[Any] = []
    server.answers["/generate"] = lambda: web.Response(body=wire.dumps({"results": items}))

    async def use(transport: HttpTransport) -> None:
        nonlocal items
        for items in ([1], [None], [{}, []]):
            with pytest.raises(HttpServerError, match="not with an object for each prompt"):
                await transport.generate(["x"] * len(items))

    with http_servers.application(server.app()) as url:
        with_transport(url, use, config=clients.config())


def test_answers_nested_too_deep() -> None:
    server = http_servers.FinalServer()
    ops = ("step", "sync_weights", "save_checkpoint")
    for op in ops:
        server.answers[PATHS[op]] = lambda: web.Response(text="[" * 60_000)

    async def use(transport: HttpTransport) -> None:
        for op in ops:
            with pytest.raises(HttpServerError, match=f"^{op}: .* is no JSON: maximum recursion"):
                await CALLS[op](transport)

    with http_servers.application(server.app()) as url:
        with_transport(url, use, config=clients.config())


def test_redirects_are_not_taken_for_answers() -> None:
    """Followed, a POST would become a GET of something else, whose answer looks like success."""
    server = http_servers.FinalServer()
    status = 0
    for path in PATHS.values():
        server.answers[path] = lambda: web.Response(
            status=status, headers={"Location": "/elsewhere"}
        )
    app = server.app()

    async def elsewhere(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "metrics": {}, "results": []})

    app.router.add_route("*", "/elsewhere", elsewhere)

    async def use(transport: HttpTransport) -> None:
        nonlocal status
        for status in (301, 302, 303, 307, 308):
            for op, call in CALLS.items():
                said = rf"^{op}: .* redirects to /elsewhere \(status {status}\), which is not"
                with pytest.raises(HttpServerError, match=said) as caught:
                    await call(transport)
                assert caught.value.status == status

    with http_servers.application(app) as url:
        with_transport(url, use, config=clients.config())


def hostile(error: Any) -> Callable[[], web.Response]:
    return lambda: web.json_response({"detail": "mine", "error": error}, status=500)


@pytest.mark.parametrize(
    "error",
    [
        1,
        {"types": ["builtins.ValueError"]},
        {"types": [], "args": []},
        {"types": ["builtins.eval"], "args": ["1"]},
        {"types": ["os.system", "builtins.BaseException"], "args": ["x"], "text": "t"},
        {"types": ["builtins.SystemExit"], "args": ["x"]},
        {"types": ["builtins.ValueError"], "args": [[1]]},
        {"types": ["builtins.ValueError"], "args": ["x"], "attributes": {"__class__": "x"}},
        {"types": ["builtins.UnicodeDecodeError"], "args": ["x"], "attributes": [1]},
    ],
)
def test_a_server_that_invents_errors(error: Any) -> None:
    """Whatever it claims, what is raised is an exception of ours or of Python's, as data."""
    server = http_servers.FinalServer()
    server.answers["/generate"] = hostile(error)

    async def use(transport: HttpTransport) -> None:
        with pytest.raises(Exception) as caught:
            await transport.generate(["x"])
        assert type(caught.value).__module__ in (
            "builtins",
            "arctic_rl_c",
            "arctic_rl_c.transports.http_errors",
        )
        assert (
            isinstance(caught.value, ValueError | RuntimeError) or type(caught.value) is Exception
        )

    with http_servers.application(server.app()) as url:
        with_transport(url, use, config=clients.config())


# ---- the public server of the final generation ---------------------------------------------------


def test_the_final_generation() -> None:
    server = http_servers.FinalServer()

    async def use(transport: HttpTransport) -> None:
        assert transport.generation == "final"
        assert not transport.accepts_token_ids
        assert transport.accepts_routing_key
        assert transport.server_limits
        await transport.fwd_bwd(PAYLOAD)
        await transport.fwd_no_grad(PAYLOAD, reference_model=True)
        assert (await transport.step())["metrics"] == {"last_lr": [1e-6]}
        (item,) = await transport.generate(["hi"], {"n": 1}, routing_key="k")
        assert item["logprobs"] == [{5: {"logprob": -0.5, "rank": 1}}, None]
        await transport.sync_weights(cuda_ipc=True)
        assert (await transport.save_checkpoint(path="/p", step=7))["global_step"] == 7
        await transport.load_checkpoint(path="/p")
        await transport.sleep_inference(2)

    with http_servers.application(server.app()) as url:
        with_transport(url, use, config=clients.config())
    paths = [path for path, _, _ in server.calls]
    assert paths == [
        *["/initialize"] * 3,
        "/forward-backward",
        "/forward",
        "/step",
        "/generate",
        "/wake-inference",
        "/operation",
        "/wake-inference",
        "/reset-prefix-cache",
        "/save",
        "/load-checkpoint",
        "/sleep-inference",
        *["/destroy"] * 3,
    ]
    bodies = {path: (query, body) for path, query, body in server.calls}
    assert bodies["/forward-backward"][0] == {"job_id": "3"}
    clients.same(bodies["/forward-backward"][1], PAYLOAD)
    assert bodies["/forward"][0] == {"job_id": "2"}
    assert bodies["/step"] == ({"job_id": "3"}, {"learning_rate": None})
    assert bodies["/generate"] == (
        {"job_id": "1"},
        {"prompts": ["hi"], "sampling_params": {"n": 1}, "routing_key": "k", "strict": False},
    )
    assert bodies["/operation"] == (
        {"job_id": "3"},
        {
            "operation_type": "weight-sync",
            "sub_job_id": 3,
            "sub_job_type": "training",
            "payload": {"source_sub_job_id": 3, "target_sub_job_ids": [1], "cuda_ipc": True},
        },
    )
    assert [body for path, _, body in server.calls if path == "/wake-inference"] == [
        {"tags": ["weights"]},
        {"tags": ["kv_cache"]},
    ]
    assert [query["job_id"] for path, query, _ in server.calls if path == "/destroy"] == [
        "3",
        "2",
        "1",
    ]
    assert bodies["/sleep-inference"] == ({"job_id": "1"}, {"level": 2})


@pytest.mark.parametrize("version", ["final", "seed"])
def test_what_jobs_are_created_from(version: str) -> None:
    server = http_servers.FinalServer()
    config = clients.config(version)

    async def use(transport: HttpTransport) -> None:
        pass

    with http_servers.application(server.app()) as url:
        with_transport(url, use, config=config)
    sampling, log_prob, training = (body for path, _, body in server.calls if path == "/initialize")
    model = config["actor_rollout_ref"]["model"]["path"]
    for body, kind in ((sampling, "sampling"), (log_prob, "log_prob"), (training, "training")):
        assert (body["job_type"], body["model_name"]) == (kind, model)
    assert sampling["vllm_config"]["max_model_len"] > 0
    assert training["checkpoint_path"] == config["trainer"]["default_local_dir"]
    assert training["ds_config"]["optimizer"]["type"] == "AdamW"
    assert log_prob["ds_config"] == training["ds_config"]
    assert set(log_prob["log_prob_config"]) >= {"train_batch_size", "zero_optimization"}
    assert {"cuda_ipc", "low_memory", "full_determinism"} <= set(training)


def test_without_a_reference_job() -> None:
    config = clients.config(remote_backend__log_prob_gpus=0)
    server = http_servers.FinalServer()

    async def use(transport: HttpTransport) -> None:
        assert not transport.serves_reference
        assert set(transport.jobs) == {"sampling", "training"}
        with pytest.raises(ValueError, match="No log_prob job initialized"):
            await transport.fwd_no_grad(PAYLOAD, reference_model=True)

    with http_servers.application(server.app()) as url:
        assert not HttpTransport(url, config=config).serves_reference
        with_transport(url, use, config=config)


def test_jobs_need_a_config() -> None:
    with http_servers.application(http_servers.FinalServer().app()) as url:
        transport = HttpTransport(url)
        with pytest.raises(ConfigError, match="needs config= to create its jobs from, or jobs="):
            asyncio.run(transport.step())


def test_jobs_that_do_not_get_ready() -> None:
    server = http_servers.FinalServer()
    server.polls = -(10**9)
    with http_servers.application(server.app()) as url:
        transport = HttpTransport(url, config=clients.config(), job_ready_timeout=0.2)
        with pytest.raises(
            PeerTimeoutError, match=r"start of sampling: no answer from .* within 0.2 s"
        ):
            asyncio.run(transport.start())
    assert [path for path, _, _ in server.calls[-3:]] == ["/destroy"] * 3


FASTAPI_ERRORS: list[tuple[Callable[[], web.Response], type[Exception], str]] = [
    (lambda: http_servers.detail(404, "Job 7 not found"), HttpRequestError, "Job 7 not found"),
    (
        lambda: http_servers.detail(400, "Job 1 is not a training job"),
        ValueError,
        "is not a training",
    ),
    (
        lambda: http_servers.detail(
            422, [{"loc": ["body", "prompts", 0], "msg": "str type expected"}, "else"]
        ),
        HttpRequestError,
        r"body.prompts.0: str type expected; else \(status 422",
    ),
    (
        lambda: web.Response(status=500, text="CUDA error: boom"),
        HttpServerError,
        "CUDA error: boom",
    ),
    (lambda: web.Response(status=500), HttpServerError, "no reason given"),
    (lambda: http_servers.detail(404, "Not Found"), TransportUnavailableError, "has no such route"),
    (lambda: web.Response(status=405), TransportUnavailableError, "has no such route"),
    (lambda: web.Response(text="<html>"), HttpServerError, "is no JSON"),
    (lambda: web.json_response([1]), HttpServerError, "answered with list, not with an object"),
]


@pytest.mark.parametrize(("answer", "error", "said"), FASTAPI_ERRORS)
def test_the_servers_words_are_kept(
    answer: Callable[[], web.Response], error: type[Exception], said: str
) -> None:
    server = http_servers.FinalServer()
    server.answers["/save"] = answer

    async def use(transport: HttpTransport) -> None:
        with pytest.raises(error, match=said) as caught:
            await transport.save_checkpoint()
        assert caught.value.operation == "save_checkpoint"  # type: ignore[attr-defined]

    with http_servers.application(server.app()) as url:
        with_transport(url, use, config=clients.config())


def test_a_step_that_fails_may_have_been_taken() -> None:
    """That server answers 500 when a metric is not finite, after the optimizer has stepped."""
    server = http_servers.FinalServer()
    server.answers["/step"] = lambda: web.Response(status=500, text="Internal Server Error")

    async def use(transport: HttpTransport) -> None:
        with pytest.raises(
            HttpServerError, match="the step may or may not have been applied"
        ) as caught:
            await transport.step()
        assert caught.value.maybe_applied  # type: ignore[attr-defined]

    with http_servers.application(server.app()) as url:
        with_transport(url, use, config=clients.config())
    assert [path for path, _, _ in server.calls].count("/step") == 1


@pytest.mark.parametrize("op", ["step", "fwd_bwd", "sync_weights"])
@pytest.mark.parametrize("lost", ["request", "answer", "half"])
def test_such_a_server_is_not_asked_twice(op: str, lost: str) -> None:
    """It has no memory of requests: what may have been applied is not sent again."""
    server = http_servers.FinalServer()
    with (
        http_servers.application(server.app()) as upstream,
        http_servers.losing(upstream, {PATHS[op]: [lost]}) as proxy,
    ):

        async def use(transport: HttpTransport) -> None:
            with pytest.raises(
                PeerLostError, match=f"the {op} may or may not have been applied"
            ) as caught:
                await CALLS[op](transport)
            assert caught.value.maybe_applied
            await CALLS[op](transport)

        with_transport(proxy.url, use, config=clients.config())
    assert proxy.seen.count(f"{PATHS[op]} {lost}") == 1


def test_harmless_ops_are_sent_again_to_anybody() -> None:
    server = http_servers.FinalServer()
    plan = {"/generate": ["answer", "request"], "/forward": ["half"]}
    with (
        http_servers.application(server.app()) as upstream,
        http_servers.losing(upstream, plan) as proxy,
    ):

        async def use(transport: HttpTransport) -> None:
            await transport.generate(["x"])
            await transport.fwd_no_grad(PAYLOAD)

        with_transport(proxy.url, use, config=clients.config())


def test_a_sync_that_fails_leaves_the_sampler_asleep() -> None:
    server = http_servers.FinalServer()
    server.answers["/operation"] = lambda: web.Response(status=500, text="sync broke")

    async def use(transport: HttpTransport) -> None:
        with pytest.raises(HttpServerError, match="sync broke"):
            await transport.sync_weights()

    with http_servers.application(server.app()) as url:
        with_transport(url, use, config=clients.config())
    assert [body for path, _, body in server.calls if path == "/wake-inference"] == [
        {"tags": ["weights"]}
    ]


def test_answers_larger_than_the_limit() -> None:
    server = http_servers.FinalServer()
    server.answers["/generate"] = lambda: web.Response(body=bytes(5000))

    async def use(transport: HttpTransport) -> None:
        with pytest.raises(HttpServerError, match="at most 2000 are read; see max_response_bytes"):
            await transport.generate(["x"])

    with http_servers.application(server.app()) as url:
        with_transport(url, use, config=clients.config(), max_response_bytes=2000)


def test_an_answer_that_is_a_pickle() -> None:
    import pickle

    server = http_servers.FinalServer()
    server.answers["/generate"] = lambda: web.Response(body=pickle.dumps({"results": []}))

    async def use(transport: HttpTransport) -> None:
        with pytest.raises(ValueError, match="refusing to deserialize a legacy pickle"):
            await transport.generate(["x"])

    with http_servers.application(server.app()) as url:
        with_transport(url, use, config=clients.config())


# ---- the public server of the first generation ---------------------------------------------------

JOBS = {"training": 3, "sampling": 1}


def seed_server() -> http_servers.SeedServer:
    server = http_servers.SeedServer()
    server.polls = 100
    server.jobs = {
        3: {"job_id": 3, "job_type": "training"},
        1: {"job_id": 1, "job_type": "sampling"},
    }
    return server


def test_the_first_generation() -> None:
    server = seed_server()

    async def use(transport: HttpTransport) -> None:
        assert transport.generation == "seed"
        assert not transport.accepts_routing_key
        await transport.step()
        assert await transport.generate(["a", "b"], {"n": 1}) == [{"text": "a"}, {"text": "b"}]
        await transport.sync_weights(low_memory=True, cuda_ipc=True)
        assert (await transport.save_checkpoint(path=None))["path"] == "/x"
        await transport.sleep_inference(2)
        await transport.wake_inference()

    with http_servers.application(server.app()) as url:
        with_transport(url, use, jobs=JOBS)
    assert server.calls == [
        ("/step", {"job_id": "3"}, {"learning_rate": None}),
        ("/generate", {"job_id": "1"}, {"prompts": ["a", "b"], "sampling_params": {"n": 1}}),
        ("/wake-inference", {"job_id": "1"}, ["weights"]),
        (
            "/sync-weights",
            {},
            {
                "training_job_id": 3,
                "sampling_job_id": 1,
                "colocate": False,
                "cuda_ipc": True,
                "low_memory": True,
            },
        ),
        ("/wake-inference", {"job_id": "1"}, ["kv_cache"]),
        ("/reset-prefix-cache", {"job_id": "1"}, {}),
        ("/save-checkpoint", {"job_id": "3"}, {}),
        ("/sleep-inference", {"level": "2", "job_id": "1"}, {"level": 2}),
        ("/wake-inference", {"job_id": "1"}, None),
    ]


def test_what_the_first_generation_cannot_do() -> None:
    server = seed_server()

    async def use(transport: HttpTransport) -> None:
        for call in (transport.fwd_bwd, transport.fwd_no_grad):
            with pytest.raises(TransportUnavailableError, match="nothing is ever unpickled here"):
                await call(PAYLOAD)
        with pytest.raises(TransportUnavailableError, match="is of the first generation"):
            await transport.load_checkpoint(path="/x")
        with pytest.raises(ConfigError, match="takes no path"):
            await transport.save_checkpoint(path="/x")

    with http_servers.application(server.app()) as url:
        with_transport(url, use, jobs=JOBS)
        transport = HttpTransport(url, config=clients.config("seed"))
        with pytest.raises(TransportUnavailableError, match="start: creating jobs of the first"):
            asyncio.run(transport.start())
    assert json.dumps(server.calls) == "[]"
