# SPDX-License-Identifier: Apache-2.0
"""The trainer in the hands of a client, over the double of Ray in `ray_double`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from arctic_rl_c import ClosedError, PeerLostError, PeerTimeoutError, WrongProcessError
from arctic_rl_c.local.options import LocalOptions
from arctic_rl_c.transports import ray as ray_transport
from arctic_rl_c.transports import ray_loan, ray_order, ray_watch
from arctic_rl_c.transports.ray import RayTransport
from arctic_rl_c.transports.ray_loan import Lender, Loan, loan_of
from arctic_rl_c.transports.ray_order import Arrivals
from arctic_rl_c.transports.ray_turn import TrainingTurn
from arctic_rl_c.transports.ray_watch import identify
from ray_doubles import ray
from recording_role import calls_of
from test_golden_transports import RecordingRay

__all__ = ["ray"]

SECONDS = 60.0


@pytest.fixture
def transport(ray: Any) -> Iterator[RayTransport]:
    """Its trainer records the calls that reach it."""
    found = RecordingRay(LocalOptions())
    asyncio.run(found.pids())
    yield found
    until = time.monotonic() + SECONDS
    lent = server_of(ray, found)._lender._lent
    while lent and time.monotonic() < until:  # the last word of it may be on its way
        time.sleep(0.001)
    left = dict(lent)
    asyncio.run(found.shutdown())
    assert left == {}


@pytest.fixture
def reordering(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of the server start in another order than they were made in, as with Ray."""
    monkeypatch.setattr(ray.state, "reorders", True)


def server_of(ray: Any, transport: RayTransport) -> Any:
    return ray.state.actors[transport._server.number].instance


def payload(number: int = 0, rows: int = 2) -> dict[str, Any]:
    ids = torch.full((rows, 1024), number)
    return {"batch": {"input_ids": ids}, "meta": {"number": number}, "processing": {}}


async def numbers(transport: RayTransport) -> list[Any]:
    """Of the payloads that have reached the trainer since this was asked last, None for none."""
    calls = (await calls_of(transport))["trainer"]
    return [given and given["meta"]["number"] for _, given, _ in calls]


async def borrow(transport: RayTransport, op: str = "fwd_bwd") -> tuple[str, dict[str, Any]]:
    """What a client is lent that does no more with it by itself."""
    lend = transport._server.lend
    asked, client = transport._send(lambda client: lend.remote(op, {}, client, SECONDS, True))
    answer: dict[str, Any] = await asked
    return loan_of(client), answer["result"]


def test_a_loan_ends_once() -> None:
    settled: list[Any] = []
    loan = Loan()
    loan.grant("forward", {"reference_model": False}, settled.append)
    assert loan.granted.result(0) == {"op": "forward", "arguments": {"reference_model": False}}
    assert settled == []
    assert loan.end(None) and loan.end(ValueError("later"))
    assert settled == [None]


def test_a_loan_that_is_not_wanted_any_more_frees_the_role_at_its_turn() -> None:
    settled: list[Any] = []
    loan, reason = Loan(), ValueError("cancelled")
    assert not loan.end(reason)
    loan.grant("forward", {}, settled.append)
    assert settled == [reason] and not loan.granted.done()


def test_an_op_that_ends_before_its_turn_is_not_granted_any_more() -> None:
    """Its deadline passes at the very moment when the role gets to it."""
    client = {"id": "a", "number": 1, "identity": identify()}
    settled: list[Any] = []

    async def work() -> None:
        loan, running = Loan(), asyncio.get_running_loop().create_future()
        running.set_result({"error": "late"})
        lender = Lender(lambda _: asyncio.sleep(0, True))
        assert await lender.lend(loan, running, client) == {"error": "late"}
        loan.grant("forward", {}, settled.append)
        assert len(settled) == 1 and not loan.granted.done()

    asyncio.run(work())


def test_payload_and_answer_do_not_pass_the_server(ray: Any, transport: RayTransport) -> None:
    async def work() -> None:
        await calls_of(transport)
        server = server_of(ray, transport)
        seen: list[Any] = []
        lend = server.lend
        server.lend = lambda *given: (seen.append(given), lend(*given))[1]
        await transport.fwd_no_grad(payload(1), reference_model=True)
        await transport.fwd_bwd(payload(2))
        assert [given[:2] for given in seen] == [
            ("fwd_no_grad", {"reference_model": True}),
            ("fwd_bwd", {}),
        ]
        assert [given[-1] for given in seen] == [True, False]  # it is introduced once
        assert await numbers(transport) == [1, 2]

    asyncio.run(work())


def test_ops_run_in_the_order_of_their_calls(transport: RayTransport, reordering: None) -> None:
    """Whatever the time that their payloads take, and in whatever order Ray starts them."""

    async def work() -> None:
        await calls_of(transport)
        sizes = [4096, 1, 1024, 1]
        ops = [transport.fwd_bwd(payload(n, rows)) for n, rows in enumerate(sizes)]
        await asyncio.gather(*ops, transport.step())
        assert await numbers(transport) == [0, 1, 2, 3, None]

    asyncio.run(work())


def test_a_payload_that_cannot_be_stored(
    ray: Any, transport: RayTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        await calls_of(transport)
        put = ray.put
        with monkeypatch.context() as patch:

            def full(value: Any) -> Any:
                if value["meta"]["number"] == 1:
                    raise MemoryError("the store is full")
                return put(value)

            patch.setattr(ray, "put", full)
            done = await asyncio.gather(
                *(transport.fwd_bwd(payload(n)) for n in range(3)), return_exceptions=True
            )
        assert isinstance(done[1], MemoryError)
        assert await numbers(transport) == [0, 2]
        # It holds no turn either: nothing of it was applied, and the first's were.
        await transport.step()
        await other_client(transport).fwd_bwd(payload(4))
        await calls_of(transport)

    asyncio.run(work())


def other_client(transport: RayTransport) -> RayTransport:
    return RayTransport.from_handle(transport.reconnect_handle())


def test_a_payload_that_cannot_be_stored_is_no_secret_until_its_turn(
    ray: Any, transport: RayTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, put = threading.Event(), ray.put

    def slow_or_full(value: Any) -> Any:
        if value["meta"]["number"] == 2:
            raise MemoryError("the store is full")
        go_on.wait(SECONDS)
        return put(value)

    monkeypatch.setattr(ray, "put", slow_or_full)

    async def work() -> None:
        await calls_of(transport)
        first = asyncio.ensure_future(transport.fwd_bwd(payload(1, rows=4096)))
        with pytest.raises(MemoryError, match="the store is full"):
            await transport.fwd_bwd(payload(2))
        assert not first.done()
        go_on.set()
        await first
        assert await numbers(transport) == [1]

    asyncio.run(work())


def test_a_server_that_does_not_answer(
    transport: RayTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer has not been asked: nothing can have been applied."""
    monkeypatch.setattr(ray_transport, "_GRACE_SECONDS", 0.05)
    limited = RayTransport.from_handle(transport.reconnect_handle(), timeouts={"fwd_bwd": 0.05})
    limited._server = SimpleNamespace(
        lend=SimpleNamespace(remote=lambda *_: SimpleNamespace(future=Future))
    )

    async def work() -> None:
        with pytest.raises(PeerTimeoutError, match="the server gave no answer") as caught:
            await limited.fwd_bwd(payload())
        assert caught.value.maybe_applied is False

    asyncio.run(work())


def test_no_word_is_sent_once_ray_is_shut_down(
    ray: Any, transport: RayTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would start a cluster for it."""
    said: list[Any] = []
    server = SimpleNamespace(returned=SimpleNamespace(remote=lambda *word: said.append(word)))
    with monkeypatch.context() as patch:
        patch.setattr(transport, "_server", server)
        transport._return("a loan", None)
        patch.setattr(ray.state, "initialized", False)
        transport._return("another", None)
    assert said == [("a loan", None)]


def test_a_payload_that_takes_too_long(
    ray: Any, transport: RayTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, put = threading.Event(), ray.put
    monkeypatch.setattr(ray, "put", lambda value: (go_on.wait(SECONDS), put(value))[1])
    limited = RayTransport.from_handle(transport.reconnect_handle(), timeouts={"fwd_bwd": 0.2})

    async def work() -> None:
        await calls_of(transport)
        with pytest.raises(PeerTimeoutError, match=r"the object store gave no answer") as caught:
            await limited.fwd_bwd(payload(1, rows=4096))
        assert caught.value.maybe_applied is False
        assert "had not begun and never will" in str(caught.value)
        go_on.set()
        await transport.fwd_bwd(payload(2))  # the other's turn has ended with it
        assert await numbers(transport) == [2]

    asyncio.run(work())


def test_a_client_that_never_comes(
    ray: Any, transport: RayTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped: the others go on, and what it sends in the end is refused."""
    monkeypatch.setattr(ray_loan, "LOAN_SECONDS", 0.2)
    monkeypatch.setattr(ray_loan, "_ALIVE_SECONDS", 0.01)
    go_on, put = threading.Event(), ray.put
    client = other_client(transport)

    async def work() -> None:
        await calls_of(transport)
        with monkeypatch.context() as patch:
            patch.setattr(ray, "put", lambda value: (go_on.wait(SECONDS), put(value))[1])
            stopped = [
                asyncio.ensure_future(client.fwd_bwd(payload(1, rows=4096))) for _ in range(4)
            ]
            await asyncio.sleep(0.02)
        await asyncio.wait_for(transport.fwd_no_grad(payload(2)), SECONDS)
        await transport.fwd_bwd(payload(3))
        assert server_of(ray, transport)._lender._silent == {client._client["id"]}
        go_on.set()
        for op in stopped:
            with pytest.raises(PeerTimeoutError, match="went on to others; nothing was") as caught:
                await op
            assert caught.value.maybe_applied is False
        assert await numbers(transport) == [2, 3]
        await transport.step()
        await client.fwd_bwd(payload(5))  # it is a client like any other

    asyncio.run(work())


def test_a_client_that_is_gone_takes_all_its_ops_along(
    ray: Any, transport: RayTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_loan, "_ALIVE_SECONDS", 0.01)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    client = other_client(transport)
    client._client["identity"] = {
        **identify(),
        "pid": child.pid,
        "started": ray_watch._started(child.pid),
    }

    async def work() -> None:
        await borrow(client, "fwd_no_grad")
        lend = client._server.lend
        for _ in range(3):
            client._send(lambda client: lend.remote("fwd_no_grad", {}, client, SECONDS, True))
        waiting = asyncio.ensure_future(transport.fwd_no_grad(payload(1)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        child.kill()
        child.wait()
        await asyncio.wait_for(waiting, SECONDS)
        withdrawn = ray.state.actors[transport._server.number + 1].instance._withdrawn
        assert len(withdrawn) == 1  # only what it was lent: the others were never granted

    with child:
        asyncio.run(work())


def test_a_client_that_is_not_heard_of_again(
    transport: RayTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its op has run: the trainer goes on, and what may have been applied keeps its turn."""
    monkeypatch.setattr(ray_loan, "LOAN_SECONDS", 0.05)
    monkeypatch.setattr(ray_loan, "_WORD_SECONDS", 0.05)
    gone = other_client(transport)

    async def work() -> None:
        await calls_of(transport)
        name, loan = await borrow(gone)
        await loan["actor"].call.remote(loan["op"], loan["arguments"], {}, name)
        await asyncio.wait_for(transport.fwd_no_grad(payload(2)), SECONDS)
        with pytest.raises(WrongProcessError):
            await transport.fwd_bwd(payload(3))

    asyncio.run(work())


def test_a_trainer_that_dies_with_a_loan_out(
    ray: Any, transport: RayTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_loan, "LOAN_SECONDS", 0.05)

    async def work() -> None:
        _, loan = await borrow(transport)
        waiting = asyncio.ensure_future(transport.step())
        await asyncio.sleep(0.01)
        ray.kill(loan["actor"])
        for op in (waiting, transport.fwd_bwd(payload())):
            with pytest.raises(PeerLostError, match="the trainer") as caught:
                await asyncio.wait_for(op, SECONDS)
            assert caught.value.role == "trainer"

    asyncio.run(work())


def test_what_is_cancelled_or_closed_gives_its_loan_back(
    ray: Any, transport: RayTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, put = threading.Event(), ray.put
    monkeypatch.setattr(ray, "put", lambda value: (go_on.wait(SECONDS), put(value))[1])
    client = other_client(transport)

    async def work() -> None:
        await calls_of(transport)
        tasks = [asyncio.ensure_future(client.fwd_bwd(payload(n, rows=4096))) for n in (1, 2, 3)]
        await asyncio.sleep(0.1)  # the first was granted, the others wait for it
        tasks[1].cancel()
        await asyncio.wait({tasks[1]})
        await client.detach()
        go_on.set()
        for task in (tasks[0], tasks[2]):
            with pytest.raises(ClosedError, match="fwd_bwd: this transport was shut down"):
                await task
        await transport.step()
        assert await numbers(transport) == [None]

    asyncio.run(work())


@pytest.mark.parametrize("outcomes", [(False,) * 3, (False, True, False), (True, False, False)])
def test_a_turn_ends_with_the_last_batch_that_came_to_nothing(outcomes: tuple[bool, ...]) -> None:
    """Several are under way at once, and end in any order."""
    turn, failure = TrainingTurn(), ValueError("it failed")
    mine, other = ({"id": key, "identity": identify()} for key in ("a", "b"))
    batches = [turn.taken("fwd_bwd", mine) for _ in outcomes]
    for batch in batches:
        batch.__enter__()
    for batch, applied in zip(batches, outcomes, strict=True):
        with pytest.raises(WrongProcessError), turn.taken("fwd_bwd", other):
            pass
        batch.__exit__(*((None,) * 3 if applied else (ValueError, failure, None)))
    refused = pytest.raises(WrongProcessError) if any(outcomes) else contextlib.nullcontext()
    with refused, turn.taken("step", other):
        pass


def test_a_loop_that_ends_with_ops_under_way_gives_their_loans_back(
    ray: Any, transport: RayTransport
) -> None:
    """Cancelled at its end as by asyncio.run, or closed and left behind with all its tasks."""
    holder, client = other_client(transport), other_client(transport)
    name, _ = asyncio.run(borrow(holder, "fwd_no_grad"))
    kept: list[Any] = []

    async def begin() -> None:
        kept.append(asyncio.ensure_future(client.fwd_bwd(payload(1))))
        await asyncio.sleep(0.02)

    asyncio.run(begin())
    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.close()
    kept[1]._log_destroy_pending = False  # or asyncio says so
    kept.clear()
    holder._return(name, None)
    until = time.monotonic() + SECONDS
    while server_of(ray, transport)._lender._lent:  # what is left behind goes with the garbage
        gc.collect()
        assert time.monotonic() < until
    asyncio.run(transport.step())


def test_an_op_that_is_cancelled_at_once(transport: RayTransport, reordering: None) -> None:
    """Word of it may come before the asking, and must not leave the trainer with nobody."""

    async def work() -> None:
        await calls_of(transport)
        for number in range(10):
            cancelled = asyncio.ensure_future(transport.fwd_bwd(payload(number)))
            await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.wait({cancelled})
            await asyncio.wait_for(transport.step(), SECONDS)
        assert await numbers(transport) == [None] * 10

    asyncio.run(work())


def test_what_cannot_be_sent_leaves_no_gap(transport: RayTransport) -> None:
    async def work() -> None:
        await calls_of(transport)
        with pytest.raises((AttributeError, TypeError), match="pickle"):
            await transport.save_checkpoint(path=lambda: None)
        begin = time.monotonic()
        await transport.step()
        assert time.monotonic() - begin < ray_order._LOST_SECONDS
        assert await numbers(transport) == [None]

    asyncio.run(work())


def test_requests_start_in_the_order_of_their_numbers() -> None:
    started: list[tuple[str, int]] = []

    async def request(arrivals: Arrivals, key: str, number: int) -> None:
        client = {"id": key, "number": number}
        await arrivals.wait(client)
        arrivals.passed(client)
        started.append((key, number))
        arrivals.passed(client)

    async def work() -> None:
        arrivals = Arrivals()
        order = [("a", 3), ("b", 2), ("a", 2), ("b", 1), ("a", 4), ("a", 1)]
        await asyncio.gather(*(request(arrivals, *one) for one in order))
        assert [n for key, n in started if key == "a"] == [1, 2, 3, 4]
        assert [n for key, n in started if key == "b"] == [1, 2]

    asyncio.run(work())


def test_a_request_that_is_lost_holds_the_others_up_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_order, "_LOST_SECONDS", 0.05)
    started: list[int] = []

    async def request(arrivals: Arrivals, number: int) -> None:
        client = {"id": "a", "number": number}
        await arrivals.wait(client)
        arrivals.passed(client)
        started.append(number)

    async def work() -> None:
        arrivals = Arrivals()
        await asyncio.wait_for(
            asyncio.gather(*(request(arrivals, number) for number in (4, 3, 6))), SECONDS
        )
        await request(arrivals, 1)  # it comes after all
        assert started == [3, 4, 6, 1]

    asyncio.run(work())
