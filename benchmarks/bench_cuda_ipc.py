# SPDX-License-Identifier: Apache-2.0
"""A whole weight sync between a trainer and a sampler process on one GPU.

Each run is the round trip as a training loop sees it: the trainer offers, the offer travels
through a pipe, the sampler copies all weights into its own and answers. Variants, in turns:

one copy            one device-to-device copy of the same bytes in one process: the ceiling
ours, kept          mappings and tables are kept between syncs (keep_mapped=True)
ours                everything is opened and closed for each sync, the default
ours, verified      the same with checksums of a sample of the tensors, on both sides
ours, first         new WeightSender and WeightReceiver for each sync
torch, per tensor   one handle a parameter: torch's reduction, pickle and base64, as adapters do
torch, flat bucket  all parameters into one flat buffer, one handle, copied out by views

    python benchmarks/bench_cuda_ipc.py [--model qwen3-0.6b] [--repeats 30]
"""

from __future__ import annotations

import argparse
import base64
import multiprocessing
import os
import pickle
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import common
import shapes
import torch
from torch.multiprocessing.reductions import reduce_tensor

import arctic_rl_c

Tensors = dict[str, torch.Tensor]
LIMIT = 120.0


def make_model(name: str, seed: int) -> Tensors:
    generator = torch.Generator("cuda").manual_seed(seed)
    return {
        key: torch.randn(shape, device="cuda", generator=generator).to(torch.bfloat16)
        for key, shape in shapes.MODELS[name].parameters().items()
    }


def fingerprint(tensors: Tensors) -> float:
    """Depends on every element and on its place."""
    total = torch.zeros((), dtype=torch.float64, device="cuda")
    for number, tensor in enumerate(tensors.values()):
        flat = tensor.flatten().double()
        total += (number + 1) * (flat * torch.arange(flat.numel(), device="cuda").sin()).sum()
    return float(total)


# ---- the sampler --------------------------------------------------------------------------------


class Sampler:
    """The other process: a model of its own, and one method for each message."""

    def __init__(self, model: str) -> None:
        self.params = make_model(model, seed=2)
        self.kept = arctic_rl_c.WeightReceiver(self.params, keep_mapped=True)
        self.plain = arctic_rl_c.WeightReceiver(self.params)
        self.stats: Any = None
        self.lowest = torch.cuda.mem_get_info()[0]

    def pull_kept(self, offer: bytes) -> None:
        self.stats = self.kept.pull(offer)

    def pull(self, offer: bytes) -> None:
        self.stats = self.plain.pull(offer)

    def pull_verified(self, offer: bytes) -> None:
        self.stats = self.plain.pull(offer, verify="sample")

    def pull_first(self, offer: bytes) -> None:
        with arctic_rl_c.WeightReceiver(self.params) as receiver:
            self.stats = receiver.pull(offer)

    def torch_each(self, text: bytes) -> None:
        for name, (rebuild, args) in pickle.loads(base64.b64decode(text)).items():
            self.params[name].copy_(rebuild(*args))
        torch.cuda.synchronize()

    def torch_flat(self, text: bytes) -> None:
        (rebuild, args), places = pickle.loads(base64.b64decode(text))
        flat = rebuild(*args)
        for name, (offset, count) in places.items():
            param = self.params[name]
            param.copy_(flat[offset : offset + count].view(param.shape))
        torch.cuda.synchronize()

    def phases(self, _: bytes) -> dict[str, float]:
        names = tuple(n for n in dir(self.stats) if n.endswith("_seconds"))
        return {name: getattr(self.stats, name) for name in names}

    def gil(self, offer: bytes) -> float:
        with common.GilProbe() as probe:
            self.kept.pull(offer)
        return probe.longest

    def check(self, _: bytes) -> float:
        return fingerprint(self.params)

    def spoil(self, _: bytes) -> None:
        for param in self.params.values():
            param.zero_()
        torch.cuda.synchronize()

    def mappings(self, _: bytes) -> int:
        return self.kept.live_mappings() + self.plain.live_mappings()


def sampler_main(connection: Connection, model: str) -> None:
    sampler = Sampler(model)
    connection.send("ready")
    while True:
        method, _, data = connection.recv_bytes().partition(b"\0")
        came = time.perf_counter()
        if method == b"end":
            sampler.kept.close()
            return
        try:
            done, value = True, getattr(sampler, method.decode())(data)
        except Exception as error:
            done, value = False, repr(error)
        connection.send((done, value, came, time.perf_counter()))


# ---- the trainer --------------------------------------------------------------------------------


class Trainer:
    """The process that was started: the weights, and the sampler at the other end of a pipe."""

    def __init__(self, model: str) -> None:
        self.params = make_model(model, seed=1)
        self.nbytes = sum(t.nbytes for t in self.params.values())
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.came = self.went = 0.0  # when the sampler had the last message, and was done
        self.process = context.Process(target=sampler_main, args=(theirs, model), daemon=True)
        self.process.start()
        theirs.close()
        assert self.connection.poll(LIMIT), "the sampler does not start"
        self.connection.recv()
        self.sender = arctic_rl_c.WeightSender(self.params, cuda_ipc=True)
        self.checked = arctic_rl_c.WeightSender(self.params, cuda_ipc=True, verify="sample")
        self.flat = torch.empty(self.nbytes // 2, dtype=torch.bfloat16, device="cuda")
        self.copy = torch.empty_like(self.flat)

    def tell(self, method: str, data: bytes = b"") -> None:
        self.connection.send_bytes(b"\0".join((method.encode(), data)))

    def ask(self, method: str, data: bytes = b"") -> Any:
        self.tell(method, data)
        done, value, self.came, self.went = self.connection.recv()
        assert done, f"{method}: {value}"
        return value

    def one_copy(self) -> None:
        self.copy.copy_(self.flat)
        torch.cuda.synchronize()

    def ours_kept(self) -> None:
        self.ask("pull_kept", self.sender.offer())

    def ours(self) -> None:
        self.ask("pull", self.sender.offer())

    def ours_verified(self) -> None:
        self.ask("pull_verified", self.checked.offer())

    def ours_first(self) -> None:
        with arctic_rl_c.WeightSender(self.params, cuda_ipc=True) as sender:
            self.ask("pull_first", sender.offer())

    def torch_each(self) -> None:
        payload = {name: reduce_tensor(tensor) for name, tensor in self.params.items()}
        self.ask("torch_each", base64.b64encode(pickle.dumps(payload)))

    def torch_flat(self) -> None:
        places, at = {}, 0
        for name, tensor in self.params.items():
            places[name] = (at, tensor.numel())
            self.flat[at : at + tensor.numel()].copy_(tensor.flatten())
            at += tensor.numel()
        torch.cuda.synchronize()
        payload = reduce_tensor(self.flat), places
        self.ask("torch_flat", base64.b64encode(pickle.dumps(payload)))

    def close(self) -> None:
        self.tell("end")
        self.process.join(LIMIT)
        self.sender.close()
        self.checked.close()


def check(trainer: Trainer, variants: dict[str, Callable[[], None]]) -> None:
    """Every variant brings every element to its place."""
    wanted = fingerprint(trainer.params)
    for name, variant in variants.items():
        trainer.ask("spoil")
        variant()
        assert trainer.ask("check") == wanted, f"{name}: the weights differ"


def phases(trainer: Trainer, variant: Callable[[], None], rounds: int) -> str:
    """Medians of the receiver's own times, and of the sender's offer."""
    seen = []
    for _ in range(rounds):
        variant()
        seen.append(trainer.ask("phases"))
    parts = [
        f"{key.removesuffix('_seconds')} {common.duration(statistics.median(s[key] for s in seen))}"
        for key in seen[0]
    ]
    return ", ".join(parts)


def round_trip(trainer: Trainer, rounds: int) -> str:
    """Where the time of one goes; both processes read the same clock."""
    legs: dict[str, list[float]] = {"offer": [], "there": [], "pull": [], "back": []}
    for _ in range(rounds):
        begin = time.perf_counter()
        offer = trainer.sender.offer()
        offered = time.perf_counter()
        trainer.ask("pull_kept", offer)
        end = time.perf_counter()
        stamps = (begin, offered, trainer.came, trainer.went, end)
        for leg, before, after in zip(legs.values(), stamps, stamps[1:], strict=False):
            leg.append(after - before)
    return ", ".join(f"{k} {common.duration(statistics.median(v))}" for k, v in legs.items())


def offer_time(trainer: Trainer, rounds: int) -> str:
    times = []
    for _ in range(rounds):
        before = time.perf_counter()
        trainer.sender.offer()
        times.append(time.perf_counter() - before)
    size = len(trainer.sender.offer())
    return f"{common.duration(statistics.median(times))}, {size} bytes"


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(shapes.MODELS))
    args: argparse.Namespace = parser.parse_args()
    common.PAUSE = 0.0  # pauses let both processors and the GPU doze off: no sync comes then
    trainer = Trainer(args.model)
    ours = {
        "ours, kept": trainer.ours_kept,
        "ours": trainer.ours,
        "ours, verified": trainer.ours_verified,
        "ours, first": trainer.ours_first,
    }
    theirs = {"torch, per tensor": trainer.torch_each, "torch, flat bucket": trainer.torch_flat}
    check(trainer, {**ours, **theirs})
    results = common.compare(
        {"one copy": trainer.one_copy, **ours, **theirs}, args, nbytes=trainer.nbytes
    )
    free = torch.cuda.mem_get_info()[0]
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        trainer.ours()
    facts = {
        "round trip of ours, kept": round_trip(trainer, args.repeats),
        "phases of ours, kept": phases(trainer, trainer.ours_kept, args.repeats),
        "phases of ours": phases(trainer, trainer.ours, args.repeats),
        "offer": offer_time(trainer, args.repeats),
        "longest time without the GIL for others, in a pull": common.duration(
            min(trainer.ask("gil", trainer.sender.offer()) for _ in range(10))
        ),
        "growth over 100 syncs": f"{free - torch.cuda.mem_get_info()[0]} bytes of GPU memory, "
        f"{len(os.listdir('/proc/self/fd')) - descriptors} descriptors",
        "mappings kept": trainer.ask("mappings"),
    }
    title = f"{args.model}: {len(trainer.params)} tensors, {trainer.nbytes / 1e9:.2f} GB"
    section = common.Section(title, results, baseline="one copy", facts=facts)
    common.report("cuda_ipc", [section], args, gpu=True)
    trainer.close()


if __name__ == "__main__":
    sys.exit(main())
