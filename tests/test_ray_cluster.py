# SPDX-License-Identifier: Apache-2.0
"""The ray transport on a real cluster of this machine: `pytest -m ray`, with Ray installed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from arctic_rl_c import PeerLostError
from arctic_rl_c.local.options import LocalOptions, ModelOptions
from arctic_rl_c.transports.ray import RayTransport
from test_local_trainer import update_payload

pytestmark = [
    pytest.mark.ray,
    # Ray's own code, and its sockets at exit.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    import ray

    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init(num_cpus=4, object_store_memory=100_000_000, include_dashboard=False)
    yield ray
    ray.shutdown()


@pytest.fixture
def nothing_left_behind() -> None:
    """A cluster keeps its own sockets open; the driver's end with `ray.shutdown`."""


def options() -> LocalOptions:
    model = ModelOptions(shape="micro", threads=1)
    return LocalOptions(model, model)


def test_another_actor_attaches_and_the_owner_ends_it(ray: Any) -> None:
    transport = RayTransport(options())

    @ray.remote
    class Forwarder:
        def __init__(self, handle: dict[str, Any]) -> None:
            self.transport = RayTransport.from_handle(handle)

        async def work(self) -> dict[str, Any]:
            await self.transport.fwd_bwd(update_payload())
            await self.transport.step()
            synced = await self.transport.sync_weights()
            await self.transport.shutdown()
            return synced

    async def work() -> None:
        forwarders = [Forwarder.remote(transport.reconnect_handle()) for _ in range(2)]
        for forwarder in forwarders:
            synced = await forwarder.work.remote()
            digests = await transport.weights_digests()
            assert digests["trainer"] == digests["sampler"] == synced["digest"]
        for forwarder in forwarders:  # its end is not the server's
            ray.kill(forwarder)
        [item] = await transport.generate([[4, 13]], {"max_tokens": 2})
        assert item["weight_version_end"] == 2
        handle = transport.reconnect_handle()
        await transport.shutdown()
        with pytest.raises(PeerLostError, match="the server"):
            await RayTransport.from_handle(handle).step()

    asyncio.run(work())


@pytest.mark.parametrize("role", ["trainer", "sampler"])
def test_a_killed_role_is_named_and_the_rest_can_be_ended(ray: Any, role: str) -> None:
    transport = RayTransport(options())

    async def work() -> None:
        pids = await transport.pids()
        os.kill(pids[role], signal.SIGKILL)
        with pytest.raises(PeerLostError, match=f"the {role}"):
            await transport.sync_weights()
        await transport.shutdown()

    asyncio.run(work())
