# SPDX-License-Identifier: Apache-2.0
"""A whole weight sync from a trainer on one GPU to a sampler on another, over NCCL.

Each run is the round trip as a training loop sees it: the trainer starts the sampler's part
through a pipe, does its own, and waits for the answer. Variants, in turns:

one flat send       all bytes in one buffer, one ncclSend and ncclRecv: what NCCL gives
one peer copy       all bytes in one buffer, one copy of the driver's: what the link gives
ours                offer, pull beside serve; the communicator is kept between syncs
ours, cuda_ipc      the receiver's GPU reads the sender's memory itself (peer access)
ours, first         new WeightSender and WeightReceiver, and so a new communicator, each time
torch, grouped      one send a parameter, all in one NCCL group (batch_isend_irecv)
torch, broadcast    one torch.distributed broadcast a parameter, as adapters do

    python benchmarks/bench_nccl.py [--model qwen3-0.6b] [--repeats 30]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import common
import shapes
import torch
import torch.distributed as dist

import arctic_rl_c

LIMIT = 120.0


def make_model(name: str, seed: int, device: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator(f"cuda:{device}").manual_seed(seed)
    return {
        key: torch.randn(shape, device=f"cuda:{device}", generator=generator).to(torch.bfloat16)
        for key, shape in shapes.MODELS[name].parameters().items()
    }


def fingerprint(tensors: dict[str, torch.Tensor]) -> list[int]:
    """One number a tensor, which every element changes."""
    return [int(t.flatten().view(torch.int16).to(torch.int64).sum()) for t in tensors.values()]


def join(rank: int, port: int, world: int = 2) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=world, device_id=device)


class End:
    """What both ends do: `rank` 0 sends, 1 receives."""

    def __init__(self, model: str, rank: int) -> None:
        self.rank = rank
        self.params = make_model(model, seed=rank, device=rank)
        self.nbytes = sum(t.nbytes for t in self.params.values())
        self.flat = torch.empty(self.nbytes // 2, dtype=torch.bfloat16, device=f"cuda:{rank}")

    def one_peer_copy(self) -> None:
        if self.rank == 0:
            self.there.copy_(self.flat)
            torch.cuda.synchronize()

    def one_flat(self) -> None:
        (dist.send if self.rank == 0 else dist.recv)(self.flat, 1 - self.rank)
        torch.cuda.synchronize()

    def grouped(self) -> None:
        op = dist.isend if self.rank == 0 else dist.irecv
        ops = [dist.P2POp(op, tensor, 1 - self.rank) for tensor in self.params.values()]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        torch.cuda.synchronize()

    def broadcast(self) -> None:
        for tensor in self.params.values():
            dist.broadcast(tensor, 0)
        torch.cuda.synchronize()


class Sampler(End):
    """The receiving process, one method a message."""

    def __init__(self, model: str) -> None:
        super().__init__(model, 1)
        self.receiver = arctic_rl_c.WeightReceiver(self.params, keep_mapped=True)
        self.kept_ipc = arctic_rl_c.WeightReceiver(self.params, keep_mapped=True)

    def call(self, method: str, data: bytes) -> Any:
        if method == "pull":
            came = time.perf_counter()
            stats = self.receiver.pull(data)
            return came, time.perf_counter(), stats.as_dict()
        if method == "pull_ipc":
            self.kept_ipc.pull(data)
            return None
        if method == "pull_first":
            with arctic_rl_c.WeightReceiver(self.params) as receiver:
                receiver.pull(data)
            return None
        if method == "pull_watched":
            with common.GilProbe() as probe:
                self.receiver.pull(data)
            return probe.longest
        if method == "check":
            return fingerprint(self.params)
        if method == "spoil":
            for tensor in self.params.values():
                tensor.zero_()
            torch.cuda.synchronize()
            return None
        return getattr(self, method)()


def sampler_main(connection: Connection, model: str, port: int) -> None:
    join(1, port)
    sampler = Sampler(model)
    connection.send("ready")
    while True:
        method, data = connection.recv()
        if method == "end":
            sampler.receiver.close()
            sampler.kept_ipc.close()
            dist.destroy_process_group()
            return
        try:
            connection.send((True, sampler.call(method, data)))
        except Exception as error:
            connection.send((False, repr(error)))


class Trainer(End):
    """The sending process."""

    def __init__(self, model: str) -> None:
        with socket.socket() as listener:  # torch's store takes a number, not a socket
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=sampler_main, args=(theirs, model, port), daemon=True)
        self.process.start()
        theirs.close()
        join(0, port)
        super().__init__(model, 0)
        assert self.connection.poll(LIMIT), "the sampler does not start"
        self.connection.recv()
        self.there = torch.empty_like(self.flat, device="cuda:1")
        self.sender = self.new_sender(keep=True)
        self.ipc_sender = arctic_rl_c.WeightSender(self.params, cuda_ipc=True, keep_mapped=True)
        #: Seconds of each part of a round trip of ours, of all of them; and what it took beside.
        self.extra: dict[str, int] = {}
        self.legs: dict[str, list[float]] = {}

    def new_sender(self, keep: bool) -> arctic_rl_c.WeightSender:
        return arctic_rl_c.WeightSender(self.params, transport="nccl", keep_mapped=keep)

    def start(self, method: str, data: bytes = b"") -> None:
        self.connection.send((method, data))

    def answer(self, method: str) -> Any:
        assert self.connection.poll(LIMIT), f"no answer to {method}"
        done, value = self.connection.recv()
        assert done, f"{method}: {value}"
        return value

    def ask(self, method: str) -> Any:
        self.start(method)
        return self.answer(method)

    def both(self, method: str) -> Callable[[], None]:
        def run() -> None:
            self.start(method)
            getattr(self, method)()
            self.answer(method)

        return run

    def ours(self) -> None:
        stamps = [time.perf_counter()]
        offer = self.sender.offer()
        stamps.append(time.perf_counter())
        self.start("pull", offer)
        sent = self.sender.serve()
        stamps.append(time.perf_counter())
        came, went, got = self.answer("pull")
        stamps.append(time.perf_counter())
        self.extra = {"sender": sent.extra_bytes, "receiver": got["extra_bytes"]}
        for name, seconds in {
            "offer": stamps[1] - stamps[0],
            "there": came - stamps[1],
            "serve": stamps[2] - stamps[1],
            "serve, from the meeting": sent.copy_seconds,
            "pull": went - came,
            "pull, validate": got["validate_seconds"],
            "pull, open and meet": got["open_seconds"],
            "pull, transfer": got["copy_seconds"],
            "back": stamps[3] - went,
        }.items():
            self.legs.setdefault(name, []).append(seconds)

    def ours_watched(self) -> tuple[float, float]:
        """For how long another thread was kept from running, in pull and in serve."""
        self.start("pull_watched", self.sender.offer())
        with common.GilProbe() as probe:
            self.sender.serve()
        return self.answer("pull_watched"), probe.longest

    def ours_cuda_ipc(self) -> None:
        self.start("pull_ipc", self.ipc_sender.offer())
        self.answer("pull_ipc")

    def ours_first(self) -> None:
        with self.new_sender(keep=False) as sender:
            self.start("pull_first", sender.offer())
            sender.serve()
            self.answer("pull_first")

    def close(self) -> None:
        self.start("end")
        self.sender.close()
        self.ipc_sender.close()
        dist.destroy_process_group()
        self.process.join(LIMIT)


def legs(trainer: Trainer) -> str:
    """Medians of the parts since the last call; both processes read the same clock."""
    parts = [f"{k} {common.duration(statistics.median(v))}" for k, v in trainer.legs.items()]
    trainer.legs.clear()
    return ", ".join(parts)


def held(trainer: Trainer) -> str:
    """The smallest of ten tell of the calls, the others of the system."""
    watched = [trainer.ours_watched() for _ in range(10)]
    pull, serve = (min(times) for times in zip(*watched, strict=True))
    return f"{common.duration(pull)} in a pull, {common.duration(serve)} in a serve"


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(shapes.MODELS))
    args: argparse.Namespace = parser.parse_args()
    if torch.cuda.device_count() < 2:
        sys.exit("bench_nccl needs two GPUs")
    common.PAUSE = 0.0  # pauses let both processors and the GPUs doze off: no sync comes then
    trainer = Trainer(args.model)
    flat = {
        "one flat send": trainer.both("one_flat"),
        "one peer copy": trainer.one_peer_copy,
    }
    ours = {
        "ours": trainer.ours,
        "ours, cuda_ipc": trainer.ours_cuda_ipc,
        "ours, first": trainer.ours_first,
    }
    theirs = {
        "torch, grouped": trainer.both("grouped"),
        "torch, broadcast": trainer.both("broadcast"),
    }
    wanted = fingerprint(trainer.params)
    for name, variant in {**ours, **theirs}.items():
        trainer.ask("spoil")
        variant()
        assert trainer.ask("check") == wanted, f"{name}: the weights differ"
    trainer.legs.clear()
    results = common.compare({**flat, **ours, **theirs}, args, nbytes=trainer.nbytes)
    in_turns = legs(trainer)
    for _ in range(args.repeats):
        trainer.ours()
    found = arctic_rl_c.show_config(as_dict=True)
    assert found is not None
    facts = {
        "parts of ours, in turns": in_turns,
        "parts of ours, one after another": legs(trainer),
        "extra memory": ", ".join(
            f"{size / 2**20:.1f} MiB on the {side}" for side, size in trainer.extra.items()
        ),
        "longest time without the GIL for others": held(trainer),
        "nccl": "{version}, {found}".format(**found["nccl"]),
    }
    title = f"{args.model}: {len(trainer.params)} tensors, {trainer.nbytes / 1e9:.2f} GB"
    section = common.Section(title, results, baseline="one flat send", facts=facts)
    common.report("nccl", [section], args, gpu=True)
    trainer.close()


if __name__ == "__main__":
    sys.exit(main())
