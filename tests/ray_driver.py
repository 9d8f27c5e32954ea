# SPDX-License-Identifier: Apache-2.0
"""A driver for `test_ray_cluster.py` to end: `ADDRESS driver|actor`.

It syncs weights again and again, from its own process or from an actor as verl does. Its first line
of output has the process ids of the server. The roles have no language model, which would take
most of the time to load.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import ray

from arctic_rl_c.local.options import LocalOptions
from arctic_rl_c.transports.ray import RayTransport


class WeightsTransport(RayTransport):
    _factory = "fake_role:build_weights"


class Runner:
    """What owns the server."""

    def __init__(self) -> None:
        self._transport = WeightsTransport(LocalOptions(), samplers=2)

    async def pids(self) -> dict[str, int]:
        await self._transport.sync_weights()
        return await self._transport.pids()

    async def sync(self) -> None:
        while True:
            await self._transport.sync_weights()


def main(address: str, owner: str) -> None:
    fresh: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 100_000_000}
    fresh |= {"address": "local", "include_dashboard": False}
    given = {"address": address} if address != "new" else fresh
    workers = {"env_vars": {"PYTHONPATH": ":".join(path for path in sys.path if path)}}
    ray.init(runtime_env=workers, log_to_driver=False, **given)
    if owner == "actor":
        runner = ray.remote(Runner).options(num_cpus=0, max_concurrency=8).remote()
        print(json.dumps(ray.get(runner.pids.remote())), flush=True)
        ray.get(runner.sync.remote())
    else:
        local = Runner()
        print(json.dumps(asyncio.run(local.pids())), flush=True)
        asyncio.run(local.sync())


if __name__ == "__main__":
    main(*sys.argv[1:])
