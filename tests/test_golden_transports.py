# SPDX-License-Identifier: Apache-2.0
"""The golden calls through the transports to the embedded server: child processes, Ray actors.

`test_http.py` and `test_arctic.py` send them through the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

import clients
import golden
import golden_calls
import recording_role
from arctic_rl_c.local.options import LocalOptions
from arctic_rl_c.transports.local import LocalTransport
from arctic_rl_c.transports.ray import RayTransport
from ray_doubles import ray

__all__ = ["ray"]


class RecordingLocal(LocalTransport):
    _factory = "recording_role:build"


class RecordingRay(RayTransport):
    _factory = "recording_role:build"


@pytest.fixture(scope="module", params=[RecordingLocal, RecordingRay], ids=["local", "ray"])
def transport(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param is RecordingRay:
        request.getfixturevalue("ray")
    found = request.param(LocalOptions())
    asyncio.run(found.describe())  # when all is there that stays until the end
    yield found
    asyncio.run(found.shutdown())


@pytest.fixture
def through(transport: Any) -> golden_calls.Through:
    return through_one(transport)


def through_one(transport: Any) -> golden_calls.Through:
    """Let the transport be used: the calls that reach the trainer meanwhile, and the result."""

    def run(use: Callable[[Any], Awaitable[Any]]) -> tuple[list[Any], Any]:
        async def main() -> tuple[list[Any], Any]:
            await recording_role.calls_of(transport)
            result = await use(transport)
            return (await recording_role.calls_of(transport))["trainer"], result

        return asyncio.run(main())

    return run


@pytest.mark.parametrize("name", golden_calls.LOG_PROBS)
@pytest.mark.parametrize("case", golden.CASES, ids=repr)
def test_log_probs(through: golden_calls.Through, case: golden.Case, name: str) -> None:
    golden_calls.check_log_prob(through, case, name)


@pytest.mark.parametrize("case", golden.CASES, ids=repr)
def test_updates(through: golden_calls.Through, case: golden.Case) -> None:
    golden_calls.check_update(through, case)


@pytest.mark.parametrize("case", golden.CASES, ids=repr)
def test_other_calls(transport: Any, case: golden.Case) -> None:
    """The flags of a sync reach the trainer, prompts and parameters the sampler."""

    async def work() -> dict[str, list[Any]]:
        await recording_role.calls_of(transport)
        await golden_calls.sync_and_generate(transport, case)
        return await recording_role.calls_of(transport)

    calls = asyncio.run(work())
    [_, _, flags], [_, _, generate] = case.result("other_calls")
    [[_, _, offer]] = calls["trainer"]
    stored = {"cuda_ipc": False, "low_memory": False}
    clients.same({flag: offer[flag] for flag in stored}, stored | flags)
    generate.pop("routing_key", None)  # of one sampler
    wake, pull, *rest = calls["sampler"]
    clients.same(
        [wake, pull],
        [
            ["wake_inference", None, {"tags": ["weights"]}],
            ["pull_weights", None, {"offer": b"an offer"}],
        ],
    )
    clients.same(
        rest,
        [
            ["wake_inference", None, {"tags": ["kv_cache"]}],
            ["reset_prefix_cache", None, {}],
            ["generate", None, generate],
        ],
    )
