# SPDX-License-Identifier: Apache-2.0
"""A weight sync over shared memory between two processes, against a file and against memcpy.

The whole round trip as the trainer sees it: make the offer, send it through a pipe, the sampler
pulls, the trainer hears of it and gives the memory back. Competitor: the CPU path of the server
that this replaces, torch.save of a list to a file in /dev/shm, torch.load in the sampler, one
copy_ for each parameter, and removing the file. Ceiling: two copies of the same bytes between
memory that is mapped already, by all threads; the least that two processes without shared
parameters can do.

A second section has the same 310 tensors with one element each: what everything but the bytes
costs.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing as mp
import os
from collections.abc import Callable
from multiprocessing.connection import Connection

import common
import torch
from shapes import MODELS

import arctic_rl_c

Tensors = dict[str, torch.Tensor]
FILE = f"/dev/shm/bench-host-shm-{os.getpid()}.pt"


def make(model: str, full: bool, value: float) -> Tensors:
    shapes = MODELS[model].parameters()
    return {
        name: torch.full(shape if full else (1,) * len(shape), value, dtype=torch.bfloat16)
        for name, shape in shapes.items()
    }


# ---- the sampler ---------------------------------------------------------------------------------


def sampler(pipe: Connection, model: str, full: bool) -> None:
    """Answer each request: an offer to pull (kept or not), a file to load, or the end."""
    target = make(model, full, 0)
    receivers = {
        keep: arctic_rl_c.WeightReceiver(target, keep_mapped=keep) for keep in (False, True)
    }
    while (request := pipe.recv()) is not None:
        kind, value = request
        if kind == "file":
            for name, tensor in torch.load(value, weights_only=True):
                target[name].copy_(tensor)
        elif kind == "sum":
            pipe.send(float(sum(t.sum(dtype=torch.float64) for t in target.values())))
            continue
        else:
            receivers[kind == "kept"].pull(value)
        pipe.send(None)


# ---- the trainer ---------------------------------------------------------------------------------


def ours(sender: arctic_rl_c.WeightSender, pipe: Connection, kind: str) -> None:
    pipe.send((kind, sender.offer()))
    sender.serve()
    pipe.recv()
    sender.release()


def through_file(source: Tensors, pipe: Connection) -> None:
    torch.save(list(source.items()), FILE)
    pipe.send(("file", FILE))
    pipe.recv()
    os.unlink(FILE)


def two_copies(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    b.copy_(a)
    c.copy_(b)


def section(args: argparse.Namespace, full: bool) -> common.Section:
    context = mp.get_context("spawn")
    pipe, theirs = context.Pipe()
    child = context.Process(target=sampler, args=(theirs, args.model, full), daemon=True)
    child.start()
    source = make(args.model, full, 1)
    size = sum(tensor.nbytes for tensor in source.values())
    flat = [torch.ones(size, dtype=torch.uint8) for _ in range(3)]
    with (
        arctic_rl_c.WeightSender(source) as fresh,
        arctic_rl_c.WeightSender(source, keep_mapped=True) as kept,
        arctic_rl_c.WeightSender(source, verify="all") as checked,
    ):
        variants: dict[str, Callable[[], object]] = {
            "ours, kept": functools.partial(ours, kept, pipe, "kept"),
            "ours, new each time": functools.partial(ours, fresh, pipe, "fresh"),
            "ours, new, all checksums offered": functools.partial(ours, checked, pipe, "fresh"),
            "torch.save and load": functools.partial(through_file, source, pipe),
            "two copies, warm": functools.partial(two_copies, *flat),
        }
        results = common.compare(variants, args, nbytes=size)
    pipe.send(("sum", None))
    arrived = pipe.recv() == sum(tensor.numel() for tensor in source.values())
    pipe.send(None)
    child.join()
    medians = {result.name: result.median for result in results}
    title = f"{len(source)} tensors, {size / 1e9:.2f} GB" if full else f"{len(source)} x 1 element"
    found = common.Section(title, results, baseline="ours, kept")
    found.facts["weights arrived"] = arrived
    for name in ("ours, kept", "ours, new each time"):
        found.facts[f"torch.save and load / {name}"] = (
            f"{medians['torch.save and load'] / medians[name]:.1f}"
        )
    found.facts["ours, kept / two copies"] = (
        f"{medians['ours, kept'] / medians['two copies, warm']:.2f}"
    )
    return found


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3-0.6b")
    args = parser.parse_args()
    common.report("host_shm", [section(args, full) for full in (True, False)], args)


if __name__ == "__main__":
    main()
