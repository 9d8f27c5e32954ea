# SPDX-License-Identifier: Apache-2.0
"""The trainer in the hands of a client, over the double of Ray in `ray_double`."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from arctic_rl_c import ClosedError, PeerLostError, PeerTimeoutError, WrongProcessError
from arctic_rl_c.local.options import LocalOptions
from arctic_rl_c.transports import ray_loan
from arctic_rl_c.transports.ray import RayTransport
from arctic_rl_c.transports.ray_loan import Loan
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


def server_of(ray: Any, transport: RayTransport) -> Any:
    return ray.state.actors[transport._server.number].instance


def payload(number: int = 0, rows: int = 2) -> dict[str, Any]:
    ids = torch.full((rows, 1024), number)
    return {"batch": {"input_ids": ids}, "meta": {"number": number}, "processing": {}}


async def numbers(transport: RayTransport) -> list[Any]:
    """Of the payloads that have reached the trainer since this was asked last, None for none."""
    calls = (await calls_of(transport))["trainer"]
    return [given and given["meta"]["number"] for _, given, _ in calls]


async def borrow(transport: RayTransport, number: str, op: str = "fwd_bwd") -> dict[str, Any]:
    """What a client asks for that then does nothing with it."""
    given = (number, op, {}, transport._client, SECONDS, True)
    answer: dict[str, Any] = await transport._server.lend.remote(*given)
    return answer["result"]


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


def test_payload_and_answer_do_not_pass_the_server(ray: Any, transport: RayTransport) -> None:
    async def work() -> None:
        await calls_of(transport)
        server = server_of(ray, transport)
        seen: list[Any] = []
        lend = server.lend
        server.lend = lambda *given: (seen.append(given), lend(*given))[1]
        await transport.fwd_no_grad(payload(1), reference_model=True)
        await transport.fwd_bwd(payload(2))
        assert [given[1:3] for given in seen] == [
            ("fwd_no_grad", {"reference_model": True}),
            ("fwd_bwd", {}),
        ]
        assert [given[-1] for given in seen] == [True, False]  # it is introduced once
        assert await numbers(transport) == [1, 2]

    asyncio.run(work())


def test_ops_run_in_the_order_of_their_calls(transport: RayTransport) -> None:
    """Whatever the time that their payloads take."""

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
    """It was stopped, or is gone: the others go on, and what it sends in the end is refused."""
    monkeypatch.setattr(ray_loan, "LOAN_SECONDS", 0.05)
    go_on, put = threading.Event(), ray.put
    client = other_client(transport)

    async def work() -> None:
        await calls_of(transport)
        with monkeypatch.context() as patch:
            patch.setattr(ray, "put", lambda value: (go_on.wait(SECONDS), put(value))[1])
            stopped = asyncio.ensure_future(client.fwd_bwd(payload(1, rows=4096)))
            await asyncio.sleep(0.01)
        await asyncio.wait_for(transport.fwd_no_grad(payload(2)), SECONDS)
        await transport.fwd_bwd(payload(3))
        go_on.set()
        with pytest.raises(PeerTimeoutError, match="went on to others; nothing was") as caught:
            await stopped
        assert caught.value.maybe_applied is False
        assert await numbers(transport) == [2, 3]

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
        loan = await borrow(gone, "its loan")
        await loan["actor"].call.remote(loan["op"], loan["arguments"], {}, "its loan")
        await asyncio.wait_for(transport.fwd_no_grad(payload(2)), SECONDS)
        with pytest.raises(WrongProcessError):
            await transport.fwd_bwd(payload(3))

    asyncio.run(work())


def test_a_trainer_that_dies_with_a_loan_out(
    ray: Any, transport: RayTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_loan, "LOAN_SECONDS", 0.05)

    async def work() -> None:
        loan = await borrow(transport, "a loan")
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
