# SPDX-License-Identifier: Apache-2.0
"""The transport over an installed Arctic client: threads, deadlines, ownership, errors."""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
import subprocess
import sys
import threading
import types
from typing import Any

import pytest

import arctic_servers
import http_servers
from arctic_rl_c import (
    ClosedError,
    ConfigError,
    PeerLostError,
    PeerTimeoutError,
    TransportUnavailableError,
)
from arctic_rl_c.transports import arctic, arctic_errors, http_errors, lane
from arctic_rl_c.transports.arctic import ArcticTransport
from arctic_servers import PAYLOAD, both, config, final_client, run, server

__all__ = ["both"]


# ---- threads, deadlines --------------------------------------------------------------------------


class Gate:
    """Blocks the thread that awaits one method, as the clients do, until it is opened."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.entered, self.open = threading.Event(), threading.Event()

    async def __call__(self, method: str, count: int) -> None:
        if method == self.method:
            self.entered.set()
            assert self.open.wait(60)


async def entered(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.entered.wait, 60)


def test_blocking_ops_block_neither_the_loop_nor_sampling(both: None) -> None:
    gate = Gate("fwd_bwd")

    async def use(transport: ArcticTransport) -> None:
        server().backend.before = gate
        update = asyncio.create_task(transport.fwd_bwd(PAYLOAD))
        await entered(gate)
        assert await transport.generate(["a"]) == [{"token_ids": [1]}]
        assert not update.done()
        gate.open.set()
        assert (await update)["metrics"]["loss"] == 0.5

    run(use, config("final"))


def test_deadlines(both: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that began may have been applied; one that never did is never sent."""
    gate, real = Gate("fwd_bwd"), asyncio.wait

    async def wait(waiters: Any, timeout: float | None = None) -> Any:
        """The short deadline passes when the gate is reached, however slow the machine is."""
        if timeout == 0.01:
            await entered(gate)
        return await real(waiters, timeout=timeout)

    monkeypatch.setattr(lane.asyncio, "wait", wait)

    async def use(transport: ArcticTransport) -> None:
        server().backend.before = gate
        with pytest.raises(PeerTimeoutError, match="fwd_bwd: no answer from arctic_pl") as caught:
            await transport.fwd_bwd(PAYLOAD)
        assert caught.value.maybe_applied
        with pytest.raises(PeerTimeoutError, match="nothing was changed by it") as caught:
            await transport.step()
        assert not caught.value.maybe_applied
        gate.open.set()
        transport._timeouts.clear()
        assert (await transport.step())["metrics"]["grad_norm"] == 1.0
        assert server().backend.counts == {"fwd_bwd": 1, "step": 1}

    run(use, config("final"), timeouts={"fwd_bwd": 0.01, "step": 0.01})


def test_cancelling_leaves_the_transport_usable(both: None) -> None:
    gate = Gate("step")

    async def use(transport: ArcticTransport) -> None:
        server().backend.before = gate
        running = asyncio.create_task(transport.step())
        await entered(gate)
        waiting = asyncio.create_task(transport.fwd_bwd(PAYLOAD))
        await asyncio.sleep(0)
        for task in (running, waiting):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        gate.open.set()
        assert (await transport.step())["metrics"]["grad_norm"] == 2.0
        assert server().backend.counts == {"step": 2}

    run(use, config("seed"))


def test_from_several_loops(both: None) -> None:
    transport = ArcticTransport(config("final"))
    for _ in range(3):
        asyncio.run(transport.step())
    threads = [threading.Thread(target=lambda: asyncio.run(transport.step())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(arctic_servers.SERVERS) == 1 and server().backend.counts == {"step": 7}
    asyncio.run(transport.shutdown())


# ---- life ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "protocol"),
    [("final", "ray"), ("final", "http"), ("seed", "ray"), ("seed", "http")],
)
def test_one_that_attached_ends_nothing(both: None, version: str, protocol: str) -> None:
    async def main() -> None:
        if protocol == "http":
            arctic_servers.Server()
        url = "http://127.0.0.1:1" if protocol == "http" else None
        owner = await ArcticTransport.connect(config(version, protocol), url=url)
        handle = pickle.loads(pickle.dumps(owner.reconnect_handle()))
        assert handle["transport"] == "arctic" and (handle["server_state"] is None) == bool(url)
        attached = ArcticTransport.from_handle(handle, timeout=60.0)
        assert not attached.owner and attached.serves_reference
        await attached.start()
        assert attached.jobs == owner.jobs and len(server().payloads) == 3
        if (version, protocol) != ("final", "http"):
            await attached.step()
        again = ArcticTransport.from_handle(attached.reconnect_handle())
        await again.start()
        for transport in (again, attached):
            await transport.detach()
            await transport.shutdown()
            with pytest.raises(ClosedError, match="step: the transport was shut down"):
                await transport.step()
        assert server().ended == []
        await owner.detach()
        assert server().ended == []
        await owner.shutdown()
        await owner.shutdown()
        assert server().ended == ["training", "sampling", "log_prob"]

    asyncio.run(main())


def test_handles_that_cannot_be(both: None) -> None:
    async def handle_of(transport: ArcticTransport) -> Any:
        return transport.reconnect_handle()

    handle = run(handle_of, config("final"))
    with pytest.raises(ConfigError, match="no handle of an ArcticTransport"):
        ArcticTransport.from_handle({"transport": "ray"})
    with pytest.raises(ConfigError, match="over Ray has no server_state"):
        ArcticTransport.from_handle({**handle, "server_state": None})
    with pytest.raises(TransportUnavailableError, match="os: no module of an Arctic client"):
        ArcticTransport.from_handle({**handle, "module": "os"})
    with pytest.raises(RuntimeError, match="jobs do not exist yet"):
        ArcticTransport(config("final")).reconnect_handle()

    async def stale() -> None:
        transport = ArcticTransport.from_handle(handle)
        try:
            with pytest.raises(ValueError, match=r"^Job 3 not found"):
                await transport.step()
        finally:
            await transport.shutdown()

    asyncio.run(stale())


def test_a_stranger_is_not_taken_for_the_launched_server(both: None) -> None:
    async def main(version: str) -> None:
        transport = ArcticTransport(config(version, "http"))
        where = transport._fields["backend"] if version == "final" else transport._fields
        where["host"], where["port"] = listener.getsockname()
        with pytest.raises(TransportUnavailableError, match=r"listens on 127.0.0.1:\d+ already"):
            await transport.start()
        await transport.shutdown()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        for version in ("final", "seed"):
            asyncio.run(main(version))


def test_a_launched_server_ends_with_the_transport(
    both: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(arctic.socket, "create_connection", refused)
    arctic_servers.Server()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setattr(final_client().HttpTransport, "proc", child, raising=False)
    original = final_client().HttpTransport.__init__

    def launch(self: Any, given: Any) -> None:
        original(self, given)
        self.proc = child

    monkeypatch.setattr(final_client().HttpTransport, "__init__", launch)

    async def main() -> None:
        async with ArcticTransport(config("final", "http")):
            assert child.poll() is None

    with child:
        asyncio.run(main())
        assert child.poll() is not None
        arctic._end_process(child)
    assert "CUDA_VISIBLE_DEVICES is set and empty" in caplog.text


def refused(*_: Any, **__: Any) -> Any:
    raise ConnectionRefusedError


def test_a_start_that_fails_is_tried_again(both: None, monkeypatch: pytest.MonkeyPatch) -> None:
    module = final_client()
    monkeypatch.setattr(module, "create_arctic_rl_client", failing(module.create_arctic_rl_client))

    async def main() -> None:
        transport = ArcticTransport(config("final"))
        with pytest.raises(RuntimeError, match=r"^/initialize failed \(422\): no such model"):
            await transport.start()
        await transport.start()
        assert transport.jobs
        await transport.shutdown()

    asyncio.run(main())


def test_what_a_failed_start_made_is_ended(both: None, monkeypatch: pytest.MonkeyPatch) -> None:
    async def leave(inner: Any) -> None:
        raise SystemExit("a client that exits")

    monkeypatch.setattr(arctic.InnerClient, "keep_error_bodies", leave)

    async def main() -> None:
        transport = ArcticTransport(config("final"))
        with pytest.raises(SystemExit, match="a client that exits"):
            await transport.start()
        assert server().ended == ["training", "sampling", "log_prob"]
        await transport.shutdown()

    asyncio.run(main())


def failing(create: Any) -> Any:
    told = []

    def once(*args: Any, **keywords: Any) -> Any:
        if not told:
            told.append(1)
            raise RuntimeError("/initialize failed (422): no such model")
        return create(*args, **keywords)

    return once


def test_a_start_that_takes_too_long(both: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who shuts down meanwhile leaves no jobs behind."""
    module, gate = final_client(), threading.Event()
    create = module.create_arctic_rl_client

    def slow(*args: Any, **keywords: Any) -> Any:
        assert gate.wait(60)
        return create(*args, **keywords)

    monkeypatch.setattr(module, "create_arctic_rl_client", slow)

    async def main() -> None:
        transport = ArcticTransport(config("final"), start_timeout=0.01)
        for _ in range(2):
            with pytest.raises(PeerTimeoutError, match=r"was not ready within .* s; it goes on"):
                await transport.start()
        await transport.shutdown()
        gate.set()
        await transport._training.run(lambda: None)  # after what blocks that thread
        await asyncio.to_thread(transport._close_lanes)
        assert server().ended == ["training", "sampling", "log_prob"]

    asyncio.run(asyncio.wait_for(main(), 60))


def test_jobs_that_cannot_be_ended(both: None, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        transport = await ArcticTransport.connect(config("seed"))
        jobs, server().jobs = server().jobs, {}
        with pytest.raises(ValueError, match="Job 1 not found"):
            await transport.shutdown()
        server().jobs = jobs
        await transport.shutdown()
        assert server().jobs == {}

    with caplog.at_level(logging.INFO, "arctic_rl_c.transports.arctic"):
        asyncio.run(main())
    assert "passed over: arctic_platform.client: installed, arctic_training.rl comes" in caplog.text


def test_jobs_of_a_server_that_is_gone(
    both: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What ended the run is what its user sees."""

    def gone(self: Any, number: int) -> None:
        raise PeerLostError("the actor died")

    monkeypatch.setattr(arctic_servers.Server, "destroy", gone)

    async def main(version: str) -> None:
        with pytest.raises(ZeroDivisionError):
            async with ArcticTransport(config(version)):
                raise ZeroDivisionError

    for version in ("final", "seed"):
        asyncio.run(main(version))
    assert [record.message for record in caplog.records] == ["the actor died"] * 2


# ---- errors --------------------------------------------------------------------------------------


def told(error: Exception, op: str = "fwd_bwd", harmless: bool = False) -> Any:
    return arctic_errors.translate(op, "the client", error, harmless)


def test_errors_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    class RayActorError(Exception):
        pass

    class RayTaskError(Exception):
        cause: Exception | None = None

    exceptions = types.ModuleType("ray.exceptions")
    vars(exceptions).update(RayActorError=RayActorError, RayTaskError=RayTaskError)
    monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)
    found = told(RayActorError("The actor died\nbecause it was killed"))
    assert isinstance(found, PeerLostError) and found.maybe_applied
    assert str(found).startswith("fwd_bwd: The actor died because it was killed (the client); ")
    task = RayTaskError("Traceback ...")
    task.cause = RayActorError("gone")
    assert str(told(task)).startswith("fwd_bwd: gone (the client)")
    # What the server raised has its own type and that side's traceback.
    task.cause = ValueError("Job 3 not found")
    assert told(task) is None
    assert told(ValueError("x")) is None
    assert told(PeerLostError("x")) is None


def test_errors_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    class HTTPError(OSError):
        response: Any = None

    class Timeout(OSError):
        pass

    class Refused(OSError):
        pass

    class ConnectTimeout(Timeout):
        pass

    requests = types.ModuleType("requests")
    vars(requests).update(
        HTTPError=HTTPError, Timeout=Timeout, ConnectionError=Refused, ConnectTimeout=ConnectTimeout
    )
    monkeypatch.setitem(sys.modules, "requests", requests)
    error = HTTPError("500 Server Error")
    error.response = types.SimpleNamespace(status_code=500, content=b"worker 3 ran out of memory")
    found = told(error, "step")
    assert isinstance(found, http_errors.HttpServerError) and found.maybe_applied
    assert "step: worker 3 ran out of memory (status 500 from the client)" in str(found)
    assert isinstance(told(Timeout("read timed out")), PeerTimeoutError)
    assert told(Timeout("read timed out")).maybe_applied
    assert not told(ConnectTimeout("x")).maybe_applied
    assert isinstance(told(Refused("refused"), harmless=True), PeerLostError)


def test_errors_of_aiohttp() -> None:
    import aiohttp

    info: Any = types.SimpleNamespace(real_url="http://x")
    found = told(aiohttp.ClientResponseError(info, (), status=404, message="Not here"))
    assert isinstance(found, http_errors.HttpRequestError)
    assert "Not here (the Arctic client does not keep the server's own words)" in str(found)
    assert told(aiohttp.ServerDisconnectedError()).maybe_applied
    key: Any = types.SimpleNamespace(host="x", port=1, ssl=None)
    assert not told(aiohttp.ClientConnectorError(key, OSError("refused"))).maybe_applied
    late = told(asyncio.TimeoutError())
    assert isinstance(late, PeerTimeoutError)
    assert str(late) == "fwd_bwd: TimeoutError (the client)"


def test_nobody_answers(both: None) -> None:
    arctic_servers.Server()

    async def use(transport: ArcticTransport) -> None:
        with pytest.raises(PeerLostError, match="step: Cannot connect to host") as caught:
            await transport.step()
        assert not caught.value.maybe_applied

    run(use, config("final", "http"), url="http://127.0.0.1:1")


def test_a_client_whose_session_is_its_own(both: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another release may keep its connections elsewhere; all that is lost is the server's text."""
    arctic_servers.Server()
    double = http_servers.FinalServer()
    for _ in range(3):
        double.initialize({"job_type": "any"})
    double.answers["/operation"] = lambda: http_servers.detail(400, "why it is so")
    monkeypatch.setattr(
        "arctic_rl_c.transports.arctic_clients.InnerClient.keep_error_bodies", nothing
    )

    async def use(transport: ArcticTransport) -> None:
        with pytest.raises(http_errors.HttpRequestError, match="does not keep the server's own"):
            await transport.reset_prefix_cache()

    with http_servers.application(double.app()) as url:
        run(use, config("final", "http"), url=url)


async def nothing(_: Any) -> None:
    pass
