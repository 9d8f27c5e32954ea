# SPDX-License-Identifier: Apache-2.0
"""Transports: a round trip of an update payload against the bare way of as many bytes.

`forward-backward` goes through the transport to a role or server that answers at once with a
metric; `forward` also brings log-probs and entropy back. Beside them, with as many bytes:

local  `bare socket`: one buffer through a socket pair to another process, which receives it into
       memory of its own. `bare shared memory`: copied into memory that both have mapped, and out
       of it. `bare exchange`: the socket, with an answer of the forward's size.
ray    `bare put and get`: the tensors as arrays through `ray.put` to an actor. `bare, two actors`:
       with another in front, which passes the reference on. `bare exchange`: to the one actor,
       with arrays as the answer; `bare exchange, two`: with the other in front.
http   `bare post`: a body to a handler that reads it, by aiohttp alone. `bare exchange`: likewise.

Encoding and decoding are timed alone too, to tell which share of a round trip is ours. Ray is
measured where it is installed.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import io
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common
import numpy as np
import transport_ends as ends

from arctic_rl_c import wire
from arctic_rl_c.local import frames
from arctic_rl_c.local.options import LocalOptions, as_dict
from arctic_rl_c.local.process import RoleProcess
from arctic_rl_c.local.server import EmbeddedServer

ENDS = str(Path(ends.__file__).resolve())
Variants = dict[str, Callable[[], object]]


def tensor_bytes(obj: dict[str, Any]) -> int:
    """Bytes of a payload's tensors."""
    return sum(tensor.nbytes for tensor in obj["batch"].values())


def answer_bytes(obj: dict[str, Any]) -> int:
    """Bytes of a forward's answer."""
    return len(ends.ANSWER_FIELDS) * obj["batch"]["f0"].numel() * 4


def ours(run: Callable[[Any], Any], transport: Any, obj: dict[str, Any]) -> Variants:
    """The two ops, whatever the transport."""
    return {
        "forward-backward": lambda: run(transport.fwd_bwd(obj)),
        "forward": lambda: run(transport.fwd_no_grad(obj)),
    }


def section(
    title: str, obj: dict[str, Any], variants: Variants, args: argparse.Namespace
) -> common.Section:
    """Time the variants; the first one is the bare way."""
    baseline = next(iter(variants))
    sent, both = tensor_bytes(obj), tensor_bytes(obj) + answer_bytes(obj)
    moved = {"bare exchange": both, "bare exchange, two": both, "forward": both}
    moved |= {"encode alone": 0, "decode alone": 0}
    sizes = {name: moved.get(name, sent) for name in variants}
    results = common.compare(variants, args, nbytes=sizes)
    median = {result.name: result.median for result in results}
    coding = median["encode alone"] + median["decode alone"]
    pairs = [
        ("forward-backward", baseline),
        ("forward-backward", "bare, two actors"),
        ("forward", "bare exchange"),
        ("forward", "bare exchange, two"),
    ]
    facts = {
        f"{op} / {bare}": f"{median[op] / median[bare]:.2f}" for op, bare in pairs if bare in median
    }
    facts["share of encoding and decoding"] = f"{coding / median['forward-backward']:.1%}"
    return common.Section(title, results, baseline=baseline, facts=facts)


# ---- local ---------------------------------------------------------------------------------------


class BareSocket:
    """A child process at the other end of a socket pair, and memory that both have mapped."""

    def __init__(self, size: int) -> None:
        descriptor = os.memfd_create("bench_transport")
        os.ftruncate(descriptor, size)
        self._memory = np.frombuffer(mmap.mmap(descriptor, size), dtype=np.uint8)
        self._socket, theirs = socket.socketpair()
        for end in (self._socket, theirs):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                end.setsockopt(socket.SOL_SOCKET, option, ends.SOCKET_BYTES)
        handles = (theirs.fileno(), descriptor)
        command = [sys.executable, ENDS, "bare", *map(str, handles), str(size)]
        self._child = subprocess.Popen(command, pass_fds=handles)
        theirs.close()
        os.close(descriptor)

    def exchange(self, data: np.ndarray[Any, Any], answer: int) -> object:
        """Send through the socket."""
        self._socket.sendall(ends.HEADER.pack(data.nbytes, answer))
        self._socket.sendall(data.data)
        return ends.receive(self._socket, answer)

    def share(self, data: np.ndarray[Any, Any], answer: int) -> object:
        """Send through the shared memory."""
        self._memory[: data.nbytes] = data
        self._socket.sendall(ends.HEADER.pack(data.nbytes | ends.IN_MEMORY, answer))
        return ends.receive(self._socket, answer)

    def close(self) -> None:
        """End the child."""
        self._socket.close()
        self._child.wait()


@contextmanager
def local(run: Callable[[Any], Any]) -> Iterator[Callable[[dict[str, Any]], Variants]]:
    """The embedded server's own processes, as `LocalTransport` has them, without models."""
    roles = [
        RoleProcess(role, {}, factory="transport_ends:null_role") for role in ("trainer", "sampler")
    ]
    for role in roles:
        role.wait_started(60)
    server = EmbeddedServer(*roles)
    bare = BareSocket(128 << 20)

    def variants(obj: dict[str, Any]) -> Variants:
        # Written to: pages of zeros that never were are one page, which the cache has.
        data = np.ones(tensor_bytes(obj), dtype=np.uint8)
        answer = answer_bytes(obj)
        message = {"op": "forward_backward", "arguments": {"payload": obj}}
        frame = b"".join(frames.encode(message))
        begin = frames.PREFIX_SIZE
        end = begin + frames.parse_prefix(frame[:begin])[0]
        header, body = frame[begin:end], np.frombuffer(bytearray(frame[end:]), dtype=np.uint8)
        return {
            "bare socket": lambda: bare.exchange(data, 16),
            "bare shared memory": lambda: bare.share(data, 16),
            "bare exchange": lambda: bare.exchange(data, answer),
            **ours(run, server, obj),
            "encode alone": lambda: frames.encode(message),
            "decode alone": lambda: frames.decode(header, body),
        }

    try:
        yield variants
    finally:
        bare.close()
        server.close()
        for role in roles:
            role.close()


# ---- ray -----------------------------------------------------------------------------------------


@contextmanager
def ray(run: Callable[[Any], Any]) -> Iterator[Callable[[dict[str, Any]], Variants]]:
    """A cluster of this machine's own, the transport's actors and a bare one."""
    import ray

    from arctic_rl_c.transports import ray_data
    from arctic_rl_c.transports.ray import RayTransport
    from arctic_rl_c.transports.ray_actors import ServerActor
    from arctic_rl_c.transports.ray_watch import identify

    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    # Its workers look for modules where it is started: not in the source tree, which may hold the
    # package without what is built.
    started = os.getcwd()
    os.chdir(os.path.dirname(os.path.abspath(__file__)))
    ray.init(
        address="local",
        num_cpus=1,
        object_store_memory=1 << 30,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}},
    )
    os.chdir(started)
    actor = ray.remote(ends.BareActor).options(num_cpus=0).remote()
    front = ray.remote(ends.BareFront).options(num_cpus=0).remote(actor)
    server = ray.remote(ServerActor).options(num_cpus=0, max_concurrency=64)
    roles = ([{"num_cpus": 0}] * 2, True, identify(), "transport_ends:null_role")
    cluster = ray.get_runtime_context().get_session_name()
    handle = {"transport": "ray", "serves_reference": False, "cluster": cluster}
    transport = RayTransport.from_handle(
        {**handle, "server": server.remote(as_dict(LocalOptions()), *roles)}
    )

    def variants(obj: dict[str, Any]) -> Variants:
        arrays = {name: tensor.numpy() for name, tensor in obj["batch"].items()}
        packed = ray_data.pack(obj)

        def bare(answer: bool) -> object:
            return ray.get(actor.take.remote(ray.put(arrays), answer))

        def bare_two(answer: bool) -> object:
            return ray.get(front.take.remote([ray.put(arrays)], answer))

        return {
            "bare put and get": lambda: bare(False),
            "bare, two actors": lambda: bare_two(False),
            "bare exchange": lambda: bare(True),
            "bare exchange, two": lambda: bare_two(True),
            **ours(run, transport, obj),
            "encode alone": lambda: ray_data.pack(obj),
            "decode alone": lambda: ray_data.unpack(packed),
        }

    try:
        yield variants
    finally:
        ray.shutdown()


# ---- http ----------------------------------------------------------------------------------------


@contextmanager
def http(run: Callable[[Any], Any]) -> Iterator[Callable[[dict[str, Any]], Variants]]:
    """Both servers in one process on the loopback interface."""
    import aiohttp

    from arctic_rl_c.transports.http import HttpTransport

    async def opened() -> aiohttp.ClientSession:
        return aiohttp.ClientSession()

    command = [sys.executable, ENDS, "http"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        urls = [f"http://127.0.0.1:{port}" for port in server.stdout.readline().split()]
        transport = run(HttpTransport.connect(urls[0]))
        session = run(opened())

        async def bare(body: bytes, answer: int) -> bytes:
            url = f"{urls[1]}/bare?answer={answer}"
            async with session.post(url, data=io.BytesIO(body)) as response:
                return await response.read()

        def variants(obj: dict[str, Any]) -> Variants:
            frame = wire.dumps(obj)
            writable = bytearray(frame)
            return {
                "bare post": lambda: run(bare(frame, 16)),
                "bare exchange": lambda: run(bare(frame, answer_bytes(obj))),
                **ours(run, transport, obj),
                "encode alone": lambda: wire.dumps(obj),
                "decode alone": lambda: wire.loads(writable, copy=False),
            }

        try:
            yield variants
        finally:
            run(session.close())
            run(transport.shutdown())
            server.communicate()


TRANSPORTS = {"local": local, "ray": ray, "http": http}
NEEDS = {"ray": "ray", "http": "aiohttp"}


def main() -> None:
    """Run all transports and sizes."""
    parser = common.parser(__doc__)
    parser.add_argument("--only", choices=TRANSPORTS, help="one transport")
    args = parser.parse_args()
    sizes = {"1 MB": 1 << 20, "64 MB": 64 << 20}
    if args.quick:
        del sizes["64 MB"]
    sections = []
    loop = asyncio.new_event_loop()
    for name in [args.only] if args.only else TRANSPORTS:
        needed = NEEDS.get(name)
        if needed is not None and importlib.util.find_spec(needed) is None:
            print(f"{name}: not measured, {needed} is not installed for {sys.executable}")
            continue
        with TRANSPORTS[name](loop.run_until_complete) as variants:
            for size, nbytes in sizes.items():
                obj = ends.payload(nbytes)
                sections.append(section(f"{name}, {size}", obj, variants(obj), args))
    loop.close()
    common.report("transport", sections, args)


if __name__ == "__main__":
    main()
