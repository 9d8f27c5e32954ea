# SPDX-License-Identifier: Apache-2.0
"""HttpTransport and HttpServer over real sockets: ops, golden calls, jobs, errors, limits."""

from __future__ import annotations

import asyncio
import json
import math
import pickle
import resource
import socket
import threading
import traceback
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clients
import golden
import golden_calls
import http_servers
from arctic_rl_c import (
    ClosedError,
    ConfigError,
    PayloadError,
    PeerLostError,
    PeerTimeoutError,
    TornWeightsError,
    WireError,
    wire,
)
from arctic_rl_c.transports.base import Transport
from arctic_rl_c.transports.dense import dense_payload
from arctic_rl_c.transports.http import HttpTransport
from arctic_rl_c.transports.http_body import read_body
from arctic_rl_c.transports.http_errors import HttpRequestError

PAYLOAD = {
    "batch": {"input_ids": torch.arange(6).reshape(2, 3), "mask": torch.ones(2, 3)},
    "meta": {"temperature": 0.7, "n": torch.tensor(6)},
    "processing": {"post": ["identity"], "loss_fn": None},
}


def with_transport(url: str, use: Callable[[HttpTransport], Awaitable[Any]], **options: Any) -> Any:
    """Connect, use, shut down, in a loop of its own."""

    async def run() -> Any:
        async with HttpTransport(url, **options) as transport:
            return await use(transport)

    return asyncio.run(run())


# ---- ops -----------------------------------------------------------------------------------------


def test_every_op() -> None:
    backend = clients.Transport()

    async def use(transport: HttpTransport) -> None:
        assert isinstance(transport, Transport)
        clients.same((await transport.fwd_bwd(PAYLOAD))["metrics"]["loss"], 0.5)
        found = await transport.fwd_no_grad(PAYLOAD)
        clients.same(found["batch"]["logprobs"], PAYLOAD["batch"]["input_ids"] * 0.5)
        await transport.fwd_no_grad(PAYLOAD, reference_model=True)
        assert (await transport.step())["metrics"] == {"grad_norm": 1.0, "last_lr": 1e-6}
        results = await transport.generate([[1, 2], "text"], {"n": 1}, ["k", None], True)
        assert results == [{"token_ids": [1]}] * 2
        assert (await transport.sync_weights(cuda_ipc=False))["status"] == "ok"
        assert (await transport.save_checkpoint(path="/x", step=3))["path"] == "/x"
        assert (await transport.load_checkpoint(path="/x"))["global_step"] == 3
        assert (await transport.sleep_inference(2))["status"] == "sleeping"
        assert (await transport.wake_inference(["weights"]))["status"] == "ready"
        assert (await transport.wake_inference())["status"] == "ready"
        assert (await transport.reset_prefix_cache())["status"] == "ok"

    with http_servers.serving(backend) as server:
        with_transport(server.url, use)
    clients.same(
        backend.calls,
        [
            ["fwd_bwd", PAYLOAD, {}],
            ["fwd_no_grad", PAYLOAD, {"reference_model": False}],
            ["fwd_no_grad", PAYLOAD, {"reference_model": True}],
            ["step", None, {}],
            [
                "generate",
                None,
                {
                    "prompts": [[1, 2], "text"],
                    "sampling_params": {"n": 1},
                    "routing_key": ["k", None],
                    "strict": True,
                },
            ],
            ["sync_weights", None, {"cuda_ipc": False}],
            ["save_checkpoint", None, {"path": "/x", "step": 3}],
            ["load_checkpoint", None, {"path": "/x"}],
            ["sleep_inference", None, {"level": 2}],
            ["wake_inference", None, {"tags": ["weights"]}],
            ["wake_inference", None, {"tags": None}],
            ["reset_prefix_cache", None, {}],
        ],
    )


def test_what_the_backend_says_of_itself() -> None:
    backend = clients.Transport()
    backend.accepts_token_ids, backend.accepts_strict = True, False
    with http_servers.serving(backend) as server:
        transport = HttpTransport(server.url)
        assert transport.accepts_token_ids
        assert transport.accepts_routing_key
        assert not transport.accepts_strict
        assert not transport.server_limits
        assert transport.serves_reference
        assert transport.owner
        assert transport.generation == "final"


def test_settings_that_the_server_was_not_told_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def use(transport: HttpTransport) -> None:
        await transport.step()

    with http_servers.serving() as server:
        with_transport(server.url, use)
        assert caplog.messages == []
        with_transport(server.url, use, config=clients.config())
        assert [text.partition("says of its ")[2].split()[0] for text in caplog.messages] == [
            "sampling", "log_prob", "training"
        ]  # fmt: skip
        assert f"the server at {server.url} ignores" in caplog.messages[2]
        assert "ds_config" in caplog.messages[2] and "told when" in caplog.messages[2]


def test_torch_is_not_needed_to_send() -> None:
    backend = clients.Transport()
    payload = {"batch": {"input_ids": np.arange(6).reshape(2, 3)}, "meta": {}, "processing": {}}
    with http_servers.serving(backend) as server:
        with_transport(server.url, lambda t: t.fwd_bwd(payload))
    assert torch.equal(backend.calls[0][1]["batch"]["input_ids"], torch.arange(6).reshape(2, 3))


def test_large_batches_both_ways() -> None:
    """Longer than a socket's buffers, streamed in pieces."""
    ids = torch.randint(0, 1000, (512, 4096))
    payload = {"batch": {"input_ids": ids}, "meta": {}, "processing": {}}
    with http_servers.serving() as server:
        found = with_transport(server.url, lambda t: t.fwd_no_grad(payload))
    assert torch.equal(found["batch"]["entropy"], ids * 0.25)


def test_metrics_that_are_not_finite_arrive() -> None:
    class Backend(clients.Transport):
        async def step(self) -> dict[str, Any]:
            return {"metrics": {"grad_norm": math.nan, "last_lr": np.float32(0.5), "x": -math.inf}}

        async def fwd_bwd(self, payload: Any) -> dict[str, Any]:
            return {"metrics": {"loss": math.inf}}

    async def use(transport: HttpTransport) -> None:
        metrics = (await transport.step())["metrics"]
        assert math.isnan(metrics["grad_norm"])
        assert metrics["last_lr"] == 0.5
        assert metrics["x"] == -math.inf
        assert (await transport.fwd_bwd(PAYLOAD))["metrics"]["loss"] == math.inf

    with http_servers.serving(Backend()) as server:
        with_transport(server.url, use)


def test_token_ids_of_log_probs_stay_numbers() -> None:
    logprobs = [{17: {"logprob": -0.5, "rank": 1}}, None]

    class Backend(clients.Transport):
        async def generate(self, **keywords: Any) -> list[dict[str, Any]]:
            item = {"logprobs": logprobs, "prompt_logprobs": logprobs}
            return [{**item, "samples": [dict(item)]}]

    with http_servers.serving(Backend()) as server:
        (item,) = with_transport(server.url, lambda t: t.generate(["x"]))
    for found in (item, item["samples"][0]):
        assert found["logprobs"] == found["prompt_logprobs"] == logprobs


def test_ops_overlap() -> None:
    """Thirty calls are with the server before the first is answered."""
    together = asyncio.Event()
    arrived = 0

    async def before(method: str, count: int) -> None:
        nonlocal arrived
        arrived += 1
        if arrived == 30:
            together.set()
        await asyncio.wait_for(together.wait(), 60)

    async def use(transport: HttpTransport) -> None:
        await asyncio.gather(*(transport.generate(["x"]) for _ in range(30)))

    with http_servers.serving(clients.Transport(before)) as server:
        with_transport(server.url, use)


def test_from_several_loops() -> None:
    """As verl does: built in one place, used in loops that come and go."""
    backend = clients.Transport()
    with http_servers.serving(backend) as server:
        transport = HttpTransport(server.url)
        for _ in range(3):
            asyncio.run(transport.step())
        threads = [threading.Thread(target=lambda: asyncio.run(transport.step())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        asyncio.run(transport.shutdown())
        asyncio.run(transport.shutdown())
    assert backend.counts["step"] == 7


# ---- golden calls --------------------------------------------------------------------------------


@pytest.fixture
def through() -> Iterator[golden_calls.Through]:
    """Let a transport be used: the calls that reach the server's backend, and the result."""
    backend = clients.Transport()
    with http_servers.serving(backend) as server:
        yield lambda use: (backend.calls, with_transport(server.url, use))


@pytest.mark.parametrize("name", golden_calls.LOG_PROBS)
@pytest.mark.parametrize("case", golden.CASES, ids=repr)
def test_golden_log_probs(through: golden_calls.Through, case: golden.Case, name: str) -> None:
    golden_calls.check_log_prob(through, case, name, golden_calls.dense)


@pytest.mark.parametrize("case", golden.CASES, ids=repr)
def test_golden_updates(through: golden_calls.Through, case: golden.Case) -> None:
    golden_calls.check_update(through, case, golden_calls.dense)


# ---- jagged payloads -----------------------------------------------------------------------------


def test_jagged_prompts_are_padded() -> None:
    prompts = clients.nested([[1, 2], [3]])
    responses = clients.nested([[4], [5, 6, 7]])
    meta = {"max_prompt_len": 3, "max_response_len": 4, "pad_token_id": 9}
    payload = {"batch": {"prompts": prompts, "responses": responses, "x": T}, "meta": meta}
    dense = dense_payload(payload)
    assert dense["batch"]["prompts"].tolist() == [[9, 1, 2], [9, 9, 3]]
    assert dense["batch"]["responses"].tolist() == [[4, 9, 9, 9], [5, 6, 7, 9]]
    assert dense["batch"]["x"] is T
    assert dense["meta"] is meta
    assert payload["batch"]["prompts"] is prompts
    pair = (np.array([1, 2, 3]), np.array([0, 2, 3]))
    dense = dense_payload({"batch": {"prompts": pair}, "meta": meta})
    assert dense["batch"]["prompts"].tolist() == [[9, 1, 2], [9, 9, 3]]


T = torch.zeros(1)


@pytest.mark.parametrize(
    ("batch", "meta", "said"),
    [
        ({"input_ids": clients.nested([[1]])}, {}, "input_ids: is jagged, and this wire carries"),
        ({"prompts": clients.nested([[1]])}, {}, "prompts: is jagged, and meta has no max_prompt"),
        (
            {"responses": clients.nested([[1]])},
            {"max_response_len": 1},
            "responses: is jagged, and meta has no pad_token_id",
        ),
    ],
)
def test_jagged_tensors_that_cannot_travel(batch: Any, meta: Any, said: str) -> None:
    with pytest.raises(PayloadError, match=said):
        dense_payload({"batch": batch, "meta": meta})


# ---- jobs ----------------------------------------------------------------------------------------


def test_jobs_begin_and_end_with_the_owner() -> None:
    with http_servers.serving() as server:

        async def use(transport: HttpTransport) -> dict[str, Any]:
            assert transport.jobs == {"sampling": 1, "log_prob": 2, "training": 3}
            return transport.reconnect_handle()

        handle = with_transport(server.url, use)
        assert pickle.loads(pickle.dumps(handle)) == handle
        assert handle["server_id"] == server.server_id
        with pytest.raises(HttpRequestError, match="start: Job 1 not found"):
            asyncio.run(HttpTransport.from_handle(handle).start())
        with_transport(server.url, lambda t: t.step())  # others may follow, with new numbers


def test_attaching_ends_nothing() -> None:
    backend = clients.Transport()
    with http_servers.serving(backend) as server:

        async def use(owner: HttpTransport) -> None:
            handle = owner.reconnect_handle()
            for _ in range(2):
                other = await asyncio.to_thread(HttpTransport.from_handle, handle)
                assert not other.owner
                await other.step()
                await other.shutdown()
                with pytest.raises(ClosedError, match="start: the transport was shut down"):
                    await other.step()
            await owner.step()
            await owner.detach()
            await owner.step()

        with_transport(server.url, use)
    assert backend.counts == {"step": 4}


def test_a_second_owner_is_refused() -> None:
    with http_servers.serving() as server:

        async def use(_: HttpTransport) -> None:
            second = await asyncio.to_thread(HttpTransport, server.url)
            with pytest.raises(
                HttpRequestError, match="a sampling job is already running"
            ) as caught:
                await second.step()
            assert caught.value.status == 409
            assert second.jobs == {}
            await second.shutdown()

        with_transport(server.url, use)


def test_a_failed_start_leaves_no_job() -> None:
    """The second of three jobs is refused: the first is ended again."""
    with http_servers.serving() as server:
        post(server.url, "/initialize", {"job_type": "log_prob"})
        transport = HttpTransport(server.url)
        for _ in range(2):
            with pytest.raises(HttpRequestError, match="a log_prob job is already running"):
                asyncio.run(transport.step())
        assert [job["job_type"] for job in get(server.url, "/status")["jobs"]] == ["log_prob"]
        asyncio.run(transport.shutdown())


def test_no_handle_before_there_are_jobs() -> None:
    with http_servers.serving() as server:
        transport = HttpTransport(server.url)
        with pytest.raises(RuntimeError, match="await start"):
            transport.reconnect_handle()


def test_a_job_of_another_type() -> None:
    with http_servers.serving() as server:

        async def use(owner: HttpTransport) -> None:
            jobs = {"training": owner.jobs["sampling"]}
            wrong = await asyncio.to_thread(lambda: HttpTransport(server.url, jobs=jobs))
            with pytest.raises(ConfigError, match="job 1 is a sampling job, training was wanted"):
                await wrong.start()
            assert not wrong.serves_reference
            await wrong.shutdown()

        with_transport(server.url, use)


def test_no_such_job() -> None:
    with http_servers.serving() as server:

        async def use(owner: HttpTransport) -> None:
            jobs = {"sampling": owner.jobs["sampling"]}
            other = await asyncio.to_thread(lambda: HttpTransport(server.url, jobs=jobs))
            with pytest.raises(ValueError, match="No training job initialized"):
                await other.step()
            with pytest.raises(ValueError, match="No log_prob job initialized"):
                await other.fwd_no_grad(PAYLOAD, reference_model=True)
            await other.shutdown()

        with_transport(server.url, use)


def test_config_creates_jobs() -> None:
    config = clients.config()
    with http_servers.serving() as server:

        async def use(transport: HttpTransport) -> list[dict[str, Any]]:
            assert transport.serves_reference
            return await asyncio.to_thread(lambda: get(server.url, "/status")["jobs"])

        jobs = with_transport(server.url, use, config=config)
    assert [job["job_type"] for job in jobs] == ["sampling", "log_prob", "training"]
    assert {job["model_name"] for job in jobs} == {config["actor_rollout_ref"]["model"]["path"]}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"jobs": {}, "config": {}}, "not both"),
        ({"jobs": {"trainer": 1}}, "'trainer' is not one of"),
        ({"generation": "third"}, "auto, final or seed"),
    ],
)
def test_options_that_contradict(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        HttpTransport("http://127.0.0.1:1", **options)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:7000", "ftp://x", "http://", "http://x?y=1", "http://x#y"]
)
def test_urls(url: str) -> None:
    with pytest.raises(ValueError, match="url must"):
        HttpTransport(url)


# ---- errors --------------------------------------------------------------------------------------


class Custom(Exception):
    pass


@pytest.mark.parametrize(
    ("raised", "wanted", "said"),
    [
        (PayloadError("input_ids: row 3 is too long"), PayloadError, "row 3 is too long"),
        (TornWeightsError("a mixture"), TornWeightsError, "a mixture"),
        (PeerTimeoutError("too late"), PeerTimeoutError, "too late"),
        (PeerLostError("gone"), PeerLostError, "gone"),
        (ValueError("bad"), ValueError, "bad"),
        (KeyError("loss"), KeyError, "loss"),
        (RuntimeError("Model is sleeping"), RuntimeError, "Model is sleeping"),
        (Custom("mine"), Exception, "Custom: mine"),
    ],
)
def test_errors_come_back_as_they_were_raised(
    raised: Exception, wanted: type[Exception], said: str
) -> None:
    async def before(method: str, count: int) -> None:
        raise raised

    async def use(transport: HttpTransport) -> None:
        for call in (
            lambda: transport.fwd_bwd(PAYLOAD),
            transport.step,
            lambda: transport.generate(["x"]),
        ):
            with pytest.raises(wanted, match=said) as caught:
                await call()
            assert type(caught.value) is wanted
            assert "Traceback" in str(caught.value.__cause__)

    with http_servers.serving(clients.Transport(before)) as server:
        with_transport(server.url, use)


def test_attributes_of_errors_survive() -> None:
    error = PeerLostError("gone")
    error.rank, error.operation = 3, "pull"

    async def before(method: str, count: int) -> None:
        raise error

    async def use(transport: HttpTransport) -> None:
        with pytest.raises(PeerLostError) as caught:
            await transport.sync_weights()
        assert (caught.value.rank, caught.value.operation) == (3, "pull")

    with http_servers.serving(clients.Transport(before)) as server:
        with_transport(server.url, use)


def test_cancelling_a_call_leaves_the_transport_usable() -> None:
    entered, released = threading.Event(), threading.Event()

    async def before(method: str, count: int) -> None:
        if count == 1:
            entered.set()
            await asyncio.to_thread(released.wait, 60)

    async def use(transport: HttpTransport) -> None:
        task = asyncio.ensure_future(transport.generate(["x"]))
        await asyncio.to_thread(entered.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        released.set()
        assert await transport.generate(["y"]) == [{"token_ids": [1]}]

    with http_servers.serving(clients.Transport(before)) as server:
        with_transport(server.url, use)


def test_a_call_that_takes_too_long() -> None:
    released = threading.Event()

    async def before(method: str, count: int) -> None:
        await asyncio.to_thread(released.wait, 60)

    async def use(transport: HttpTransport) -> None:
        with pytest.raises(
            PeerTimeoutError, match=r"step: no answer from .* within 0\.2 s; the step may"
        ) as caught:
            await transport.step()
        assert caught.value.maybe_applied
        with pytest.raises(PeerTimeoutError, match="nothing was changed") as caught:
            await transport.generate(["x"])
        assert not caught.value.maybe_applied
        assert isinstance(caught.value, TimeoutError)
        released.set()

    with http_servers.serving(clients.Transport(before)) as server:
        with_transport(server.url, use, timeouts={"step": 0.2, "generate": 0.2})


# ---- byte chunks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"max_request_bytes": 20_000}, {}])
def test_large_requests_go_in_chunks(options: dict[str, Any]) -> None:
    backend = clients.Transport()
    ids = torch.arange(20_000).reshape(4, 5000)
    payload = {"batch": {"input_ids": ids}, "meta": {}, "processing": {}}

    async def use(transport: HttpTransport) -> None:
        for _ in range(2):
            await transport.fwd_bwd(payload)

    limits = {} if options else {"max_body_bytes": 30_000}
    with http_servers.serving(backend, **limits) as server:
        with_transport(server.url, use, **options)
    assert backend.counts == {"fwd_bwd": 2}
    clients.same(backend.calls[1][1], payload)


def test_chunks_that_nobody_finishes_are_bounded() -> None:
    frame = wire.dumps({"batch": {"x": torch.arange(4000)}, "meta": {}})
    groups = [wire.encode_byte_chunks(frame, 20_000, "request") for _ in range(5)]
    with http_servers.serving(max_pending_bytes=60_000) as server:
        jobs = jobs_of(server.url)
        route = f"/forward-backward?job_id={jobs['training']}"
        for chunks in groups:  # the first one goes when the fourth comes
            status, body = send(server.url, route, chunks[0], FRAME)
            assert status == 202
            assert json.loads(body)["received"] == 1
        for chunk in groups[0][1:]:
            assert send(server.url, route, chunk, FRAME)[0] == 202
        for chunk in groups[4][1:-1]:
            assert send(server.url, route, chunk, FRAME)[0] == 202
        assert send(server.url, route, groups[4][-1], FRAME)[0] == 200


def test_a_server_that_lost_chunks() -> None:
    payload = {"batch": {"x": torch.arange(9000)}, "meta": {}, "processing": {}}
    with http_servers.serving(max_pending_bytes=40_000) as server:

        async def use(transport: HttpTransport) -> None:
            with pytest.raises(WireError, match="would exceed 40000 bytes"):
                await transport.fwd_bwd(payload)

        with_transport(server.url, use, max_request_bytes=20_000)


# ---- the server alone ----------------------------------------------------------------------------

FRAME, JSON = "application/octet-stream", "application/json"


def send(url: str, path: str, body: bytes, kind: str, **headers: str) -> tuple[int, bytes]:
    """A plain POST: status and body."""
    request = urllib.request.Request(url + path, body, {"Content-Type": kind, **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def post(url: str, path: str, body: Any = None) -> Any:
    status, answer = send(url, path, b"" if body is None else json.dumps(body).encode(), JSON)
    assert status == 200, answer
    return json.loads(answer)


def get(url: str, path: str) -> Any:
    with urllib.request.urlopen(url + path, timeout=60) as response:
        return json.loads(response.read())


def jobs_of(url: str) -> dict[str, int]:
    kinds = ("sampling", "log_prob", "training")
    return {kind: post(url, "/initialize", {"job_type": kind})["job_id"] for kind in kinds}


def test_the_public_routes() -> None:
    """As the public client of the final generation, and the one before it, call them."""
    backend = clients.Transport()
    with http_servers.serving(backend) as server:
        assert get(server.url, "/health") == {"status": "OK"}
        made = post(
            server.url,
            "/initialize",
            {"model_name": "m", "job_type": "training", "seed": 1, "checkpoint_path": "/c"},
        )
        assert made == {
            "job_id": 1,
            "job_type": "training",
            "running": True,
            "ignored": ["checkpoint_path", "seed"],
        }
        assert get(server.url, "/job/1")["status"] == "RUNNING"
        post(server.url, "/initialize", {"job_type": "sampling"})
        frame = wire.dumps(PAYLOAD)
        status, body = send(server.url, "/forward-backward?job_id=1", frame, FRAME)
        assert status == 200
        assert set(wire.loads(body)) == {"job_id", "metrics"}
        step = post(server.url, "/step?job_id=1")
        assert set(step) == {"job_id", "metrics", "batch"}
        for body, path in (
            ({"tags": ["weights"]}, "/wake-inference?job_id=2"),
            (["weights"], "/wake-inference?job_id=2"),
            (None, "/wake-inference?job_id=2"),
            (None, "/sleep-inference?job_id=2&level=2"),
            ({"level": 2}, "/sleep-inference?job_id=2"),
            (
                {"operation_type": "sleep-inference", "sub_job_id": 2, "payload": {"level": 2}},
                "/operation?job_id=2",
            ),
            (
                {"operation_type": "reset-prefix-cache", "payload": {"drain": True}},
                "/operation?job_id=2",
            ),
            (
                {
                    "operation_type": "weight-sync",
                    "payload": {"source_sub_job_id": 1, "target_sub_job_ids": [2]},
                },
                "/operation?job_id=1",
            ),
            (
                {"training_job_id": 1, "sampling_job_id": 2, "cuda_ipc": True, "low_memory": None},
                "/sync-weights",
            ),
            ({"prompts": ["x"], "sampling_params": {"n": 1}}, "/generate?job_id=2"),
        ):
            post(server.url, path, body)
        assert post(server.url, "/destroy?job_id=1", {"job_type": "training"}) == {"job_id": 1}
        assert [job["job_id"] for job in get(server.url, "/status")["jobs"]] == [2]
    assert [call[0] for call in backend.calls] == [
        "fwd_bwd",
        "step",
        *["wake_inference"] * 3,
        *["sleep_inference"] * 3,
        "reset_prefix_cache",
        *["sync_weights"] * 2,
        "generate",
    ]
    assert [call[2] for call in backend.calls[2:8]] == [
        {"tags": ["weights"]},
        {"tags": ["weights"]},
        {"tags": None},
        *[{"level": 2}] * 3,
    ]
    assert backend.calls[10][2] == {"cuda_ipc": True}


GARBAGE: list[tuple[str, bytes, str, int, str]] = [
    ("/step?job_id=9", b"", JSON, 404, "Job 9 not found"),
    ("/step?job_id=x", b"", JSON, 404, "Job x not found"),
    ("/step", b"", JSON, 404, "Job None not found"),
    ("/step?job_id=1", b"", JSON, 400, "Job 1 is not a training job"),
    ("/step?job_id=3", b"{", JSON, 400, "the body is no JSON"),
    ("/step?job_id=3", b"[1]", JSON, 400, "the body must be a JSON object, found list"),
    ("/step?job_id=3", b"[" * 50_000, JSON, 400, "the body is no JSON"),
    ("/step?job_id=3", b'{"learning_rate": 1}', JSON, 400, "set by the schedule"),
    ("/sleep-inference?job_id=1&level=deep", b"", JSON, 400, "level must be an integer"),
    (
        "/operation?job_id=1",
        b'{"operation_type": "wake-inference", "payload": [[]]}',
        JSON,
        400,
        "payload must be an object, found list",
    ),
    ("/sleep-inference?job_id=1", b'{"level": 1e400}', JSON, 400, "an integer, found inf"),
    (
        "/sync-weights",
        b'{"source_sub_job_id": Infinity, "target_sub_job_ids": [1]}',
        JSON,
        404,
        "Job inf not found",
    ),
    (
        "/sync-weights",
        b'{"source_sub_job_id": 3, "target_sub_job_ids": 1}',
        JSON,
        400,
        "target_sub_job_ids must be a list of job ids, found 1",
    ),
    ("/generate?job_id=1", b"{}", JSON, 400, "the body has no prompts"),
    ("/forward?job_id=3", b"nonsense", FRAME, 400, "not a valid DSSST1"),
    ("/forward?job_id=3", wire.dumps([1]), FRAME, 400, "the body must hold a dict, found list"),
    ("/forward?job_id=3", pickle.dumps({"x": 1}), FRAME, 400, "refusing to deserialize a legacy"),
    ("/generate?job_id=1", pickle.dumps({"x": 1}), FRAME, 400, "refusing to deserialize"),
    ("/fwd-bwd?job_id=3", pickle.dumps({"x": 1}), FRAME, 501, "carries pickles, which are refused"),
    ("/fwd-no-grad?job_id=3", b"", FRAME, 501, "carries pickles"),
    ("/weight-norm", b"{}", JSON, 501, "/weight-norm is not served by the embedded server"),
    ("/sleep-training?job_id=3", b"{}", JSON, 501, "is not served"),
    ("/nowhere", b"{}", JSON, 404, "Not Found"),
    ("/health", b"{}", JSON, 405, "Method Not Allowed"),
    ("/initialize", b'{"job_type": "reward"}', JSON, 400, "unknown job_type 'reward'"),
    ("/initialize", b'{"job_type": "training"}', JSON, 409, "already running"),
    ("/destroy?job_id=3", b'{"job_type": "sampling"}', JSON, 400, "Job 3 is not a sampling job"),
    (
        "/operation?job_id=3",
        b'{"operation_type": "dance"}',
        JSON,
        400,
        "unknown operation_type 'dance'",
    ),
    ("/operation?job_id=3", b'{"operation_type": "wake-inference"}', JSON, 400, "not a sampling"),
    (
        "/sync-weights",
        b'{"training_job_id": 3, "sampling_job_id": 7}',
        JSON,
        404,
        "Job 7 not found",
    ),
    ("/sync-weights", b"{}", JSON, 404, "Job None not found"),
    ("/forward?job_id=3", bytes(70_000), FRAME, 413, "at most 65536 are read"),
    (
        "/forward?job_id=3",
        wire.dumps({"payload": 1}, {"request_chunk": {"chunk_group_id": 1}}),
        FRAME,
        400,
        "needs chunk_group_id",
    ),
]


def test_garbage() -> None:
    backend = clients.Transport()
    with http_servers.serving(backend, max_body_bytes=1 << 16) as server:
        jobs_of(server.url)
        for path, body, kind, status, said in GARBAGE:
            found, answer = send(server.url, path, body, kind)
            assert (found, said in json.loads(answer)["detail"]) == (status, True), (path, answer)
        assert post(server.url, "/step?job_id=3")["job_id"] == 3
    assert [call[0] for call in backend.calls] == ["step"]


def test_bytes_that_are_no_http() -> None:
    with http_servers.serving() as server:
        for garbage in (b"\0" * 100, b"GET", b"POST /step HTTP/1.1\r\nContent-Length: -5\r\n\r\n"):
            with socket.create_connection((server.host, server.port), timeout=60) as sock:
                sock.sendall(garbage)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass
        assert get(server.url, "/health") == {"status": "OK"}


def test_a_body_that_is_longer_than_announced_memory() -> None:
    """A length alone makes the server keep nothing."""
    with (
        http_servers.serving(max_body_bytes=1000) as server,
        socket.create_connection((server.host, server.port), timeout=60) as sock,
    ):
        sock.sendall(b"POST /step HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        assert b" 413 " in sock.recv(4096)


def test_an_announced_length_takes_no_memory() -> None:
    """Neither while the body is waited for, nor after its sender has gone."""
    length = 1 << 28

    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    with http_servers.serving() as server:
        before = resident()
        head = f"POST /step HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
        socks = [socket.create_connection((server.host, server.port)) for _ in range(4)]
        for sock in socks:
            sock.sendall(head.encode() + b"begun")
        assert get(server.url, "/health") == {"status": "OK"}  # all of them have been looked at
        assert resident() - before < length // 2
        for sock in socks:
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):  # until the server has given it up
                pass
            sock.close()


def test_what_came_of_a_body_is_given_back_when_its_sender_goes() -> None:
    """Also while the garbage collector does not come by."""

    class Stream:
        """As aiohttp's, it keeps the error that it raises."""

        failure = ConnectionResetError("gone")

        async def iter_any(self) -> AsyncIterator[bytes]:
            yield bytes(1000)
            raise self.failure

    stream: Any = Stream()
    with pytest.raises(ConnectionResetError, match="gone"):
        asyncio.run(read_body(stream, 2000, 4000))
    frames = [frame for frame, _ in traceback.walk_tb(stream.failure.__traceback__)]
    bodies = [frame.f_locals["body"] for frame in frames if "body" in frame.f_locals]
    assert bodies == [bytearray()]


def test_the_port_is_taken_from_choice_to_use() -> None:
    """Between binding and serving nobody else can have it."""
    server = http_servers.HttpServer(clients.Transport())
    try:
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{server.port}"):
            http_servers.HttpServer(clients.Transport(), port=server.port)
        with http_servers.running(server.start, server.close):
            assert get(server.url, "/health") == {"status": "OK"}
    finally:
        asyncio.run(server.close())


def test_another_model_is_refused() -> None:
    backend = clients.Transport()
    backend.options = type(
        "Options", (), {"trainer_model": type("M", (), {"path": None, "shape": "tiny"})}
    )
    with http_servers.serving(backend) as server:
        post(server.url, "/initialize", {"job_type": "training", "model_name": "random:tiny"})
        status, answer = send(
            server.url, "/initialize", b'{"job_type": "sampling", "model_name": "other"}', JSON
        )
    assert status == 400
    assert "this server serves 'random:tiny', not 'other'" in json.loads(answer)["detail"]


def test_requests_for_another_instance() -> None:
    with http_servers.serving() as server:
        headers = {"X-Arctic-Server": "another"}
        status, answer = send(server.url, "/step?job_id=1", b"", JSON, **headers)
    assert status == 503
    assert "the server was restarted" in json.loads(answer)["detail"]
