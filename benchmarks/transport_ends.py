# SPDX-License-Identifier: Apache-2.0
"""The far ends of bench_transport: servers and roles that answer at once, ours and bare ones."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch

WIDTH = 4096
FIELDS = 7
ANSWER_FIELDS = ("logprobs", "entropy")
SOCKET_BYTES = 1 << 20
HEADER = struct.Struct("<QQ")  # bytes that follow, bytes to answer with
IN_MEMORY = 1 << 63  # they do not follow


def payload(nbytes: int) -> dict[str, Any]:
    """Seven int64 fields of [rows, 4096], together about `nbytes`."""
    rows = max(1, nbytes // (FIELDS * WIDTH * 8))
    batch = {f"f{i}": torch.arange(rows * WIDTH).reshape(rows, WIDTH) for i in range(FIELDS)}
    return {"batch": batch, "meta": {"temperature": 0.7}, "processing": {"loss_fn": None}}


def metrics(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a forward-backward answers."""
    return {"metrics": {"loss": float(given["batch"]["f0"][0, 0])}}


def log_probs(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a forward answers: two float32 tensors of the input's shape."""
    answer = torch.empty(given["batch"]["f0"].shape)
    return {"batch": dict.fromkeys(ANSWER_FIELDS, answer), "metrics": {}}


class NullRole:
    """A trainer without a model, for a role's process or actor."""

    OPS = frozenset({"forward_backward", "forward"})
    INTERRUPTIBLE: frozenset[str] = frozenset()

    def forward_backward(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Metrics only."""
        return metrics(payload)

    def forward(self, payload: Mapping[str, Any], reference_model: bool = False) -> dict[str, Any]:
        """Two tensors."""
        return log_probs(payload)

    def close(self) -> None:
        """Nothing to give back."""


def null_role(role: str, options: Mapping[str, Any]) -> NullRole:
    """Stand in for `arctic_rl_c.local.worker.build_role`."""
    return NullRole()


# ---- local: the other end of a socket, with and without shared memory ----------------------------


def receive(sock: socket.socket, size: int) -> np.ndarray[Any, Any]:
    """So many bytes, in memory of their own."""
    data = np.empty(size, dtype=np.uint8)
    view, done = data.data, 0
    while done < size:
        count = sock.recv_into(view[done:])
        if count == 0:
            raise EOFError
        done += count
    return data


def answer_bare(sock: socket.socket, shared: mmap.mmap) -> None:
    """Take bytes from the socket, or from shared memory, and answer; until the other end closes.

    A size with the bit IN_MEMORY is that of bytes in shared memory.
    """
    answers: dict[int, np.ndarray[Any, Any]] = {}
    memory = np.frombuffer(shared, dtype=np.uint8)
    with suppress(EOFError):
        while True:
            size, wanted = HEADER.unpack(receive(sock, HEADER.size).data)
            taken = memory[: size ^ IN_MEMORY].copy() if size & IN_MEMORY else receive(sock, size)
            answer = answers.setdefault(wanted, np.zeros(wanted, dtype=np.uint8))
            sock.sendall(answer.data)
            del taken  # after the answer, as in a role's process


# ---- http: both servers --------------------------------------------------------------------------


class Backend:
    """What the embedded server's HTTP side is put in front of."""

    name = "null"
    accepts_token_ids = accepts_routing_key = accepts_strict = True

    async def fwd_bwd(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Metrics only."""
        return metrics(payload)

    async def fwd_no_grad(self, payload: dict[str, Any], reference: bool) -> dict[str, Any]:
        """Two tensors."""
        return log_probs(payload)


async def serve_http() -> None:
    """Both servers; prints their ports and waits for the end of stdin."""
    from aiohttp import web

    from arctic_rl_c.local.http_server import HttpServer

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


# ---- ray: the bare actors ------------------------------------------------------------------------


class BareActor:
    """Takes a dict of arrays, gives arrays."""

    def take(self, batch: Mapping[str, Any], answer: bool) -> dict[str, Any]:
        """A forward-backward's answer or a forward's, as arrays."""
        first = batch["f0"]
        if not answer:
            return {"loss": float(first[0, 0])}
        values = np.empty(first.shape, dtype=np.float32)
        return dict.fromkeys(ANSWER_FIELDS, values)


class BareFront:
    """An actor in front of the bare one, which passes a reference on unread."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def take(self, reference: list[Any], answer: bool) -> Any:
        """The other actor's answer."""
        return await self._actor.take.remote(reference[0], answer)


def main() -> None:
    """What bench_transport starts: `http`, or `bare SOCKET MEMORY SIZE`."""
    if sys.argv[1] == "http":
        asyncio.run(serve_http())
        return
    descriptor, memory, size = map(int, sys.argv[2:])
    with socket.socket(fileno=descriptor) as sock:
        answer_bare(sock, mmap.mmap(memory, size))
    os.close(memory)


if __name__ == "__main__":
    main()
