# SPDX-License-Identifier: Apache-2.0
"""HTTP: a round trip of an update payload against a bare aiohttp post of as many bytes.

The server is a process of its own on the loopback interface; it takes the tensors out of the
request and answers at once. `bare post` sends a body of the same size with aiohttp alone, to a
handler that reads it and answers at once. `forward` also brings log-probs and entropy back;
`bare exchange` gets a body of that size. Encoding and decoding are timed alone, to tell which
share of a round trip is ours.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import aiohttp
import common
import torch
from aiohttp import web

from arctic_rl_c import wire
from arctic_rl_c.local.http_server import HttpServer
from arctic_rl_c.transports.http import HttpTransport

WIDTH = 4096
FIELDS = 7
ANSWER_FIELDS = ("logprobs", "entropy")


class Backend:
    """Answers at once; the answer of a forward has the shape of its input."""

    name = "null"
    accepts_token_ids = accepts_routing_key = accepts_strict = True

    async def fwd_bwd(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Metrics only."""
        return {"metrics": {"loss": float(payload["batch"]["f0"][0, 0])}}

    async def fwd_no_grad(self, payload: dict[str, Any], reference: bool) -> dict[str, Any]:
        """Two float32 tensors."""
        answer = torch.empty(payload["batch"]["f0"].shape)
        return {"batch": dict.fromkeys(ANSWER_FIELDS, answer), "metrics": {}}


async def serve() -> None:
    """Both servers; prints their ports and waits for the end of stdin."""

    async def bare(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=bytes(int(request.query["answer"])))

    app = web.Application(client_max_size=1 << 40)
    app.add_routes([web.post("/bare", bare)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    async with HttpServer(Backend()) as server:  # type: ignore[arg-type]
        print(server.port, runner.addresses[0][1], flush=True)
        await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


def payload(nbytes: int) -> dict[str, Any]:
    """Seven int64 fields of [rows, 4096]."""
    rows = max(1, nbytes // (FIELDS * WIDTH * 8))
    batch = {f"f{i}": torch.arange(rows * WIDTH).reshape(rows, WIDTH) for i in range(FIELDS)}
    return {"batch": batch, "meta": {"temperature": 0.7}, "processing": {"loss_fn": None}}


class Client:
    """Coroutines run one by one on one loop, as functions that `common` can time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ports: list[int]) -> None:
        self._run = loop.run_until_complete
        url, self._bare_url = (f"http://127.0.0.1:{port}" for port in ports)
        self.transport = self._run(HttpTransport.connect(url))
        self._session = self._run(self._open())

    async def _open(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession()

    def call(self, make: Callable[[], Any]) -> Callable[[], object]:
        """A function that runs a coroutine to its end."""
        return lambda: self._run(make())

    async def bare(self, body: bytes, answer: int) -> bytes:
        """A post by aiohttp alone."""
        url = f"{self._bare_url}/bare?answer={answer}"
        async with self._session.post(url, data=io.BytesIO(body)) as response:
            return await response.read()

    def close(self) -> None:
        """End the session and the jobs."""
        self._run(self._session.close())
        self._run(self.transport.shutdown())


def section(client: Client, title: str, nbytes: int, args: argparse.Namespace) -> common.Section:
    """One size."""
    obj = payload(nbytes)
    frame = wire.dumps(obj)
    rows = obj["batch"]["f0"].shape[0]
    answer_bytes = len(ANSWER_FIELDS) * rows * WIDTH * 4
    writable = bytearray(frame)
    variants: dict[str, Callable[[], object]] = {
        "bare post": client.call(lambda: client.bare(frame, 16)),
        "forward-backward": client.call(lambda: client.transport.fwd_bwd(obj)),
        "bare exchange": client.call(lambda: client.bare(frame, answer_bytes)),
        "forward": client.call(lambda: client.transport.fwd_no_grad(obj)),
        "encode alone": lambda: wire.dumps(obj),
        "decode alone": lambda: wire.loads(writable, copy=False),
    }
    both = len(frame) + answer_bytes
    moved = {"bare exchange": both, "forward": both, "decode alone": 0}
    sizes = {name: moved.get(name, len(frame)) for name in variants}
    results = common.compare(variants, args, nbytes=sizes)
    by_name = {result.name: result.median for result in results}
    ours = by_name["encode alone"] + by_name["decode alone"]
    facts = {
        "forward / bare exchange": f"{by_name['forward'] / by_name['bare exchange']:.2f}",
        "share of encoding and decoding": f"{ours / by_name['forward-backward']:.0%}",
    }
    return common.Section(title, results, baseline="bare post", facts=facts)


def main() -> None:
    """Run all sizes."""
    parser = common.parser(__doc__)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve())
        return
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        ports = [int(port) for port in server.stdout.readline().split()]
        loop = asyncio.new_event_loop()
        client = Client(loop, ports)
        sizes = {"1 MB": 1 << 20, "64 MB": 64 << 20}
        if args.quick:
            del sizes["64 MB"]
        sections = [section(client, title, nbytes, args) for title, nbytes in sizes.items()]
        client.close()
        loop.close()
        server.communicate()
    common.report("transport http", sections, args)


if __name__ == "__main__":
    main()
