# SPDX-License-Identifier: Apache-2.0
"""The device copy engine on a real GPU: facts it relies on, correctness, and speed.

Needs a GPU, torch with CUDA, and a C compiler (it reaches the engine through tests/native). The
comparison is one `cudaMemcpyAsync`, device to device, of the same number of bytes: what the
hardware gives to a copy that knows no tensors. Launch configurations are tried beside each other,
in turns, so that a change of clocks meets all of them.

    python benchmarks/gpu_copy_probe.py [--model qwen3-0.6b] [--rounds 30] [--quick]
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

import common  # noqa: E402
import shapes  # noqa: E402

import native  # noqa: E402

DEVICE = torch.device("cuda", 0)
MASK = (1 << 64) - 1


def say(text: str) -> None:
    print(text, flush=True)


# ---- facts --------------------------------------------------------------------------------------


def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def address_range(address: int) -> tuple[int, int]:
    """What cuMemGetAddressRange says, with torch's context current."""
    base, size = ctypes.c_size_t(), ctypes.c_size_t()
    torch.cuda.current_stream().synchronize()
    code = driver().cuMemGetAddressRange_v2(
        ctypes.byref(base), ctypes.byref(size), ctypes.c_size_t(address)
    )
    assert code == 0, f"cuMemGetAddressRange: {code}"
    return base.value, size.value


def fact(text: str, holds: bool) -> None:
    say(f"  {'yes' if holds else 'NO '}  {text}")


EXPANDABLE = """
import sys; sys.path[:0] = {path!r}
import native, torch
t = torch.zeros(1 << 22, device="cuda")
p = native.pointer(t.data_ptr())
print(p.legacy_ipc, p.base <= t.data_ptr() < p.base + p.size)
"""


def facts() -> None:
    say(f"facts: {torch.cuda.get_device_name()}, torch {torch.__version__}")
    native.load_cuda()
    say(f"  driver {native.found()}")
    ranges, legacy = True, True
    sizes = (1, 999, 1 << 20, 77 << 20)
    tensors = [torch.zeros(n, device=DEVICE, dtype=torch.uint8) for n in sizes]
    for tensor in tensors:
        info = native.pointer(tensor.data_ptr())
        ranges &= (info.base, info.size) == address_range(tensor.data_ptr())
        legacy &= bool(info.legacy_ipc) and not info.managed and info.ordinal == 0
    fact("the range attributes equal cuMemGetAddressRange, for small and large blocks", ranges)
    fact("memory of torch's caching allocator has legacy handles", legacy)
    found: list[bool] = []

    def without_context() -> None:
        found.append(native.pointer(tensors[0].data_ptr()).size > 0)

    thread = threading.Thread(target=without_context)
    thread.start()
    thread.join()
    fact("a thread without a current context can query a pointer", found == [True])
    code = EXPANDABLE.format(path=[str(HERE.parent / "tests")])
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    env["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )
    holds = done.stdout.split() == ["False", "True"]
    fact(f"expandable segments are seen to have none {done.stderr[-200:]}", holds)


# ---- correctness --------------------------------------------------------------------------------


def copy_of(source: torch.Tensor, target: torch.Tensor, bases: list[int]) -> native.Copy | None:
    """The copy of one torch view over another; finds or adds the source's allocation."""
    base = native.pointer(source.data_ptr()).base
    if base not in bases:
        bases.append(base)
    item = source.element_size()
    return native.make_copy(
        item,
        source.shape,
        (bases.index(base), source.data_ptr() - base, [s * item for s in source.stride()]),
        (target.data_ptr(), [s * item for s in target.stride()]),
    )


def random_bytes(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, device=DEVICE)


def random_view(
    memory: torch.Tensor, itemsize: int, shape: Sequence[int], rng: random.Random
) -> torch.Tensor:
    """A view of `shape` somewhere in `memory`, with random steps and order of axes."""
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    order = list(range(len(shape)))
    if rng.random() < 0.6:
        rng.shuffle(order)
    room = memory.numel() // itemsize - 40
    strides, extent = [0] * len(shape), 1
    left = torch.Size(shape).numel()
    for axis in reversed(order):
        step, gap = rng.choice([1, 1, 1, 2, 3]), rng.choice([0, 0, 1, 5])
        left //= shape[axis]
        if (extent * shape[axis] * step + gap) * left > room:
            step, gap = 1, 0
        strides[axis] = extent * step
        extent = extent * shape[axis] * step + gap
    offset = rng.randrange(0, 40)
    typed = memory[: memory.numel() // 16 * 16].view(dtype[itemsize])
    return typed.as_strided(shape, strides, offset)


def check_copies(engine: native.Engine, cases: int) -> None:
    rng = random.Random(1)
    source, target = random_bytes(64 << 20), random_bytes(64 << 20)
    for case in range(cases):
        itemsize = rng.choice([1, 2, 2, 4, 8, 16])
        shape = [rng.choice([1, 2, 3, 7, 16, 33, 64, 129, 300]) for _ in range(rng.randint(1, 4))]
        while torch.Size(shape).numel() > 200_000:
            shape[shape.index(max(shape))] //= 3
        from_view = random_view(source, itemsize, shape, rng)
        before = target.clone()
        seed = rng.random()
        to_view = random_view(target, itemsize, shape, random.Random(seed))
        random_view(before, itemsize, shape, random.Random(seed)).copy_(from_view)
        bases: list[int] = []
        copy = copy_of(from_view, to_view, bases)
        assert copy is not None
        torch.cuda.synchronize()
        with engine.plan([copy], len(bases)) as plan:
            plan.run(bases)
            engine.wait()
            assert torch.equal(target, before), f"case {case}: {itemsize} {shape} {plan.kind}"


def check_alignments(engine: native.Engine) -> None:
    source, target = random_bytes(1 << 20), random_bytes(1 << 20)
    rng = random.Random(2)
    copies, bases = [], []
    expected = target.clone()
    at = 0
    for number in range(2000):
        length = rng.choice([1, 2, 3, 15, 16, 17, 100, 511, 4096, 65535, 65536, 65537])
        if at + length + 32 > target.numel():
            break
        src = rng.randrange(0, source.numel() - length)
        at += rng.randrange(0, 17)
        copy = copy_of(source[src : src + length], target[at : at + length], bases)
        assert copy is not None
        copies.append(copy)
        expected[at : at + length] = source[src : src + length]
        at += length
        _ = number
    torch.cuda.synchronize()
    with engine.plan(copies, len(bases)) as plan:
        plan.run(bases)
        engine.wait()
    assert torch.equal(target, expected)


def mix(x: torch.Tensor) -> torch.Tensor:
    """arl_hash_mix on int64 tensors, whose arithmetic wraps; >> is made logical by a mask."""

    def shift(value: torch.Tensor, bits: int) -> torch.Tensor:
        return (value >> bits) & ((1 << (64 - bits)) - 1)

    x = (x ^ shift(x, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ shift(x, 27)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ shift(x, 31)


def checksum(tensor: torch.Tensor) -> int:
    """The definition in core/arl_hash.h, computed with torch on the CPU."""
    data = tensor.contiguous().cpu().reshape(-1).view(torch.uint8)
    words = torch.cat([data, torch.zeros(-data.numel() % 8, dtype=torch.uint8)]).view(torch.int64)
    index = torch.arange(1, words.numel() + 1, dtype=torch.int64) * (0x9E3779B97F4A7C15 - (1 << 64))
    total = int(mix(words ^ index).sum().item()) + data.numel()
    wrapped = (total + (1 << 63)) % (1 << 64) - (1 << 63)
    return int(mix(torch.tensor([wrapped], dtype=torch.int64)).item()) & MASK


def view_of(tensor: torch.Tensor) -> native.View:
    item = tensor.element_size()
    strides = [s * item for s in tensor.stride()]
    return native.make_view(tensor.data_ptr(), item, tensor.shape, strides)


def check_checksums(engine: native.Engine) -> None:
    memory = random_bytes(8 << 20)
    words = memory.view(torch.int16)
    square = words[: 1000 * 2000].view(1000, 2000)
    tensors = [
        *(memory[a : a + n] for a in (0, 1, 8) for n in (1, 7, 8, 9, 1000, 65536, 1 << 22)),
        *(
            square,
            square.T,
            square[:, 3:700],
            square[::3, ::2],
            words[: 1 << 21].view(128, 64, 256),
        ),
    ]
    torch.cuda.synchronize()
    found = engine.checksums([view_of(t) for t in tensors])
    assert found == [checksum(t) for t in tensors]


def correctness(quick: bool) -> None:
    say("correctness")
    for threads, blocks in [(512, 2), (256, 4), (1024, 1)]:
        with native.Engine(threads=threads, blocks_per_sm=blocks) as engine:
            assert engine.fallback == "", engine.fallback
            check_alignments(engine)
            check_copies(engine, 40 if quick else 200)
            check_checksums(engine)
            if threads == 512:
                engine.drop_kernels()
                check_copies(engine, 10 if quick else 40)
                check_checksums(engine)
        say(f"  ok: {threads} threads, {blocks} blocks a multiprocessor")


# ---- speed --------------------------------------------------------------------------------------


def make_model(model: str) -> list[torch.Tensor]:
    wanted = shapes.MODELS[model].parameters().values()
    return [torch.randn(shape, device=DEVICE).to(torch.bfloat16) for shape in wanted]


def timed(stream: torch.cuda.Stream, enqueue: Callable[[], None]) -> tuple[float, float]:
    """Seconds on the device, and seconds until the call returned."""
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record(stream)
    before = time.perf_counter()
    enqueue()
    host = time.perf_counter() - before
    end.record(stream)
    end.synchronize()
    return begin.elapsed_time(end) / 1e3, host


class Contest:
    """Ways to do the same thing, run in turns; prints medians beside the first."""

    def __init__(self, title: str, nbytes: int, rounds: int) -> None:
        self.title, self.nbytes, self.rounds = title, nbytes, rounds
        self.ways: dict[str, Callable[[], tuple[float, float]]] = {}

    def add(self, name: str, stream: torch.cuda.Stream, enqueue: Callable[[], None]) -> None:
        """Add a way; `enqueue` puts the work on `stream`."""
        self.ways[name] = lambda: timed(stream, enqueue)

    def run(self) -> dict[str, float]:
        """Run all in turns, print the table, return the medians in seconds."""
        seen: dict[str, list[tuple[float, float]]] = {name: [] for name in self.ways}
        for turn in range(self.rounds + 3):
            for name, way in self.ways.items():
                result = way()
                if turn >= 3:
                    seen[name].append(result)
        rows = [["", "median", "best", "p90", "TB/s moved", "ratio", "host"]]
        medians: dict[str, float] = {}
        for name, results in seen.items():
            times = sorted(r[0] for r in results)
            medians[name] = statistics.median(times)
            first = medians[next(iter(medians))]
            rows.append(
                [
                    name,
                    common.duration(medians[name]),
                    common.duration(times[0]),
                    common.duration(times[int(len(times) * 0.9)]),
                    f"{2 * self.nbytes / medians[name] / 1e12:.2f}",
                    f"{medians[name] / first:.3f}",
                    common.duration(statistics.median(r[1] for r in results)),
                ]
            )
        say(f"{self.title}: {self.nbytes / 1e9:.3f} GB")
        say(common.table(rows))
        return medians


CONFIGS = [(t, b) for t in (256, 512, 1024) for b in (1, 2, 3, 4, 6, 8) if t * b <= 2048]


def speed_model(model: str, rounds: int, quick: bool) -> None:
    sources = make_model(model)
    targets = [torch.empty_like(t) for t in sources]
    nbytes = sum(t.nbytes for t in sources)
    bases: list[int] = []
    copies = [copy_of(s, t, bases) for s, t in zip(sources, targets, strict=True)]
    flat_source = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    flat_target = torch.empty_like(flat_source)
    contest = Contest(f"{model}, {len(sources)} tensors, {len(bases)} allocations", nbytes, rounds)
    side = torch.cuda.Stream()

    def flat() -> None:
        with torch.cuda.stream(side):
            flat_target.copy_(flat_source)

    def foreach() -> None:
        with torch.cuda.stream(side):
            torch._foreach_copy_(targets, sources)

    contest.add("one cudaMemcpyAsync", side, flat)
    contest.add("torch._foreach_copy_", side, foreach)
    kept: list[native.Plan | native.Engine] = []
    torch.cuda.synchronize()
    for threads, blocks in CONFIGS[::3] if quick else CONFIGS:
        engine = native.Engine(threads=threads, blocks_per_sm=blocks)
        before = time.perf_counter()
        plan = engine.plan([c for c in copies if c is not None], len(bases))
        prepare = time.perf_counter() - before
        stream = torch.cuda.ExternalStream(engine.stream)
        contest.add(f"segments {threads} x {blocks}", stream, lambda plan=plan: plan.run(bases))
        kept += [plan, engine]
    say(f"tables {plan.table_bytes / 1e3:.0f} kB, prepared in {common.duration(prepare)}")
    engine = native.Engine()
    engine.drop_kernels()
    graph = engine.plan([c for c in copies if c is not None], len(bases))
    contest.add("graph", torch.cuda.ExternalStream(engine.stream), lambda: graph.run(bases))
    kept += [graph, engine]
    contest.run()
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source, target)
    for item in kept:
        item.close()


def speed_strided(rounds: int) -> None:
    side = torch.cuda.Stream()
    rows, columns = 8192, 8192
    source = torch.randn(rows, columns, device=DEVICE).to(torch.bfloat16)
    target = torch.empty(rows, 3 * columns, dtype=torch.bfloat16, device=DEVICE)
    flat = target.reshape(-1)
    half = columns // 2
    pairs = {
        "columns of a fused parameter": (source, target[:, columns : 2 * columns]),
        "a column shard": (source[:, :half], flat[: rows * half].view(rows, half)),
        "64 columns": (source.reshape(-1, 64), target.reshape(-1, 192)[:, 64:128]),
        "transposed": (source, flat[: rows * columns].view(columns, rows).T),
        "transposed source": (source.T, flat[: rows * columns].view(columns, rows)),
    }
    for title, (from_view, to_view) in pairs.items():
        nbytes = from_view.numel() * 2
        contest = Contest(title, nbytes, rounds)

        def by_torch(to_view: torch.Tensor = to_view, from_view: torch.Tensor = from_view) -> None:
            with torch.cuda.stream(side):
                to_view.copy_(from_view)

        contest.add("torch copy_", side, by_torch)
        bases: list[int] = []
        copy = copy_of(from_view, to_view, bases)
        assert copy is not None
        torch.cuda.synchronize()
        with native.Engine() as engine, engine.plan([copy], len(bases)) as plan:
            stream = torch.cuda.ExternalStream(engine.stream)
            contest.add(plan.kind, stream, lambda plan=plan, bases=bases: plan.run(bases))
            contest.run()
            torch.cuda.synchronize()
            assert torch.equal(from_view, to_view)


def speed_checksum(model: str, rounds: int) -> None:
    tensors = make_model(model)
    views = [view_of(t) for t in tensors]
    nbytes = sum(t.nbytes for t in tensors)
    torch.cuda.synchronize()
    with native.Engine() as engine:
        times = []
        for _ in range(rounds):
            before = time.perf_counter()
            engine.checksums(views)
            times.append(time.perf_counter() - before)
    median = statistics.median(times)
    rate = nbytes / median / 1e12
    say(f"checksums of {model}: {common.duration(median)} in all, {rate:.2f} TB/s read")


def main() -> None:
    formatter = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(shapes.MODELS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--no-facts", action="store_true", help="nothing about the driver")
    parser.add_argument("--no-timing", action="store_true", help="no speed")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.no_facts:
        native.load_cuda()
    else:
        facts()
    correctness(options.quick)
    if options.no_timing:
        return
    speed_model(options.model, options.rounds, options.quick)
    speed_strided(options.rounds)
    speed_checksum(options.model, options.rounds)


if __name__ == "__main__":
    main()
