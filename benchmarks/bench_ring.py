# SPDX-License-Identifier: Apache-2.0
"""low_memory between a trainer and a sampler process on one GPU, for several sizes of the ring.

Each run is the whole round trip: offer, pipe, pull beside serve, answer. The ceiling is one
device-to-device copy of the same bytes; through a ring every byte is copied twice, so twice that
is what the memory allows. What a GPU costs beside it is the change from one process to the other:
without MPS it runs the work of one at a time, and each slot that is handed over is two changes.

one copy            one device-to-device copy of the same bytes in one process: the ceiling
low_memory          low_memory=True alone: the tensors can be read in place, so no ring is needed
ring N MiB          both sides keep what the next sync can use (keep_mapped=True)
ring, nothing kept  the default size, everything allocated, mapped and freed for each sync
ring, fed           tensors given to serve() one after another, each usable until the next
cuda_ipc, kept      the other way, which maps all of the sender's memory at once

    python benchmarks/bench_ring.py [--model qwen3-0.6b] [--repeats 30]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import bench_cuda_ipc as ipc
import common
import shapes
import torch

import arctic_rl_c

MIB = 1 << 20
SIZES = (16, 64, 128, 256)


class Trainer(ipc.Trainer):
    """The same two processes, with senders that stream."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.rings = {
            size: arctic_rl_c.WeightSender(
                self.params, transport="ring", ring_bytes=size * MIB, keep_mapped=True
            )
            for size in SIZES
        }
        self.low = arctic_rl_c.WeightSender(self.params, low_memory=True)
        self.plain = arctic_rl_c.WeightSender(self.params, transport="ring")
        self.specified = arctic_rl_c.WeightSender(
            {name: (t.dtype, t.shape) for name, t in self.params.items()},
            low_memory=True,
            keep_mapped=True,
        )
        self.extra = 0

    def stream(
        self,
        sender: arctic_rl_c.WeightSender,
        method: str,
        tensors: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Pull there, serve here, both at the same time."""
        self.tell(method, sender.offer())
        stats = sender.serve(tensors)
        self.extra = max(self.extra, stats.extra_bytes)
        done, value, self.came, self.went = self.connection.recv()
        assert done, value

    def ring(self, size: int) -> Callable[[], None]:
        return lambda: self.stream(self.rings[size], "pull_kept")

    def low_memory(self) -> None:
        self.stream(self.low, "pull_kept")

    def ring_plain(self) -> None:
        self.stream(self.plain, "pull")

    def ring_fed(self) -> None:
        self.stream(self.specified, "pull_kept", self.params)

    def close(self) -> None:
        super().close()
        for sender in (*self.rings.values(), self.low, self.plain, self.specified):
            sender.close()


def peak(trainer: Trainer, variant: Callable[[], None]) -> str:
    """What a sync takes beside the weights, as both sides account for it."""
    trainer.extra = 0
    variant()
    return f"{trainer.extra / MIB:.1f} MiB on the sender"


def held(trainer: Trainer) -> str:
    """For how long another thread was kept from running, on both sides of a sync."""
    serve, pull = [], []
    for _ in range(10):
        trainer.tell("gil", trainer.rings[128].offer())
        with common.GilProbe() as probe:
            trainer.rings[128].serve()
        serve.append(probe.longest)
        done, value, *_ = trainer.connection.recv()
        assert done, value
        pull.append(value)
    return f"{common.duration(min(pull))} in a pull, {common.duration(min(serve))} in a serve"


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(shapes.MODELS))
    args: argparse.Namespace = parser.parse_args()
    common.PAUSE = 0.0  # as in bench_cuda_ipc
    trainer = Trainer(args.model)
    ours = {"low_memory": trainer.low_memory}
    ours |= {f"ring {size} MiB": trainer.ring(size) for size in SIZES}
    ours |= {"ring, nothing kept": trainer.ring_plain, "ring, fed": trainer.ring_fed}
    others = {"cuda_ipc, kept": trainer.ours_kept}
    ipc.check(trainer, ours)
    results = common.compare(
        {"one copy": trainer.one_copy, **ours, **others}, args, nbytes=trainer.nbytes
    )
    largest = max(t.nbytes for t in trainer.params.values())
    facts = {f"extra memory, {name}": peak(trainer, variant) for name, variant in ours.items()}
    facts["largest tensor"] = f"{largest / MIB:.1f} MiB"
    facts["longest time without the GIL for others"] = held(trainer)
    facts["phases of ring 128 MiB"] = ipc.phases(trainer, trainer.ring(128), args.repeats)
    title = f"{args.model}: {len(trainer.params)} tensors, {trainer.nbytes / 1e9:.2f} GB"
    section = common.Section(title, results, baseline="one copy", facts=facts)
    common.report("ring", [section], args, gpu=True)
    trainer.close()


if __name__ == "__main__":
    sys.exit(main())
