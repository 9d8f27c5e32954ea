# SPDX-License-Identifier: Apache-2.0
"""What every benchmark shares: the machine's facts, fair timing, tables and JSON.

A benchmark builds `Result` rows through `compare` and ends with `report`:

    args = common.parser(__doc__).parse_args()
    rows = common.compare({"ours": f, "torch rows": g}, args)
    common.report("padding", [common.Section("128 x (512 + 1024)", rows, baseline="ours")], args)

`--json PATH` writes the numbers, `--save` writes table and numbers to benchmarks/results under
a name made of the benchmark, the processor, its cores and the date.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib.metadata
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# Before each timed run, so that it finds the cores free: OpenMP's threads go on spinning for
# some ten milliseconds after their work.
PAUSE = 0.03

# What else the machine was doing when the benchmark began.
LOAD = os.getloadavg()[0]

RESULTS = Path(__file__).resolve().parent / "results"


# ---- the machine --------------------------------------------------------------------------------


def _cpuinfo() -> dict[str, str]:
    facts: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if not line:
                break
            name, _, value = line.partition(":")
            facts.setdefault(name.strip(), value.strip())
    return facts


def _zen(family: int, model: int) -> str:
    """AMD's generation, from what CPUID says."""
    if family == 0x1A:
        return "Zen 5"
    if family == 0x19:
        zen4 = 0x10 <= model <= 0x1F or 0x60 <= model <= 0x7F or 0xA0 <= model <= 0xAF
        return "Zen 4" if zen4 else "Zen 3"
    return "Zen 2 or older"


def cpu_name() -> str:
    """The processor in words, without trademark signs and clock rates."""
    facts = _cpuinfo()
    name = facts.get("model name") or platform.processor() or platform.machine()
    for noise in ("(R)", "(TM)", "Processor", "CPU"):
        name = name.replace(noise, " ")
    name = " ".join(name.split("@")[0].split())
    if facts.get("vendor_id") == "AuthenticAMD":
        name += f" ({_zen(int(facts['cpu family']), int(facts['model']))})"
    return name


def cpu_count() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def _cache(level: int) -> str:
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        with contextlib.suppress(OSError):
            kind = (index / "type").read_text().strip()
            if int((index / "level").read_text()) == level and kind != "Instruction":
                return (index / "size").read_text().strip()
    return "?"


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _commit() -> str:
    command = ["git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "?"
    return "?"


def machine(gpu: bool = True) -> dict[str, Any]:
    """Everything that a number depends on and that can be asked; of the GPU where it matters."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    huge = "?"
    with contextlib.suppress(OSError):
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        huge = text[text.index("[") + 1 : text.index("]")]
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "cpu": cpu_name(),
        "cores": cpu_count(),
        "load_before": round(LOAD, 1),
        "l2": _cache(2),
        "l3": _cache(3),
        "memory_gib": round(memory),
        "huge_pages": huge,
        "commit": _commit(),
        "python": platform.python_version(),
        "numpy": _version("numpy"),
        "torch": _version("torch"),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        facts["torch_threads"] = torch.get_num_threads()
        if gpu and torch.cuda.is_available():
            facts["gpu"] = torch.cuda.get_device_name()
            facts["gpus"] = torch.cuda.device_count()
            facts["cuda"] = torch.version.cuda
    core = sys.modules.get("arctic_rl_c._core")
    if core is not None:
        facts["our_threads"] = core.thread_count()
    return facts


# ---- timing -------------------------------------------------------------------------------------


@dataclass
class Result:
    """Times of one variant in seconds, and what it moved."""

    name: str
    seconds: list[float]
    nbytes: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """The middle run: what to quote."""
        return statistics.median(self.seconds)

    def percentile(self, share: float) -> float:
        """The time that `share` of the runs stayed under."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def as_json(self) -> dict[str, Any]:
        """Plain data: the median, the spread and every run."""
        return {
            **asdict(self),
            "seconds": [round(second, 9) for second in self.seconds],
            "median": self.median,
            "p10": self.percentile(0.1),
            "p90": self.percentile(0.9),
        }


def compare(
    variants: Mapping[str, Callable[[], object]],
    args: argparse.Namespace,
    *,
    nbytes: Mapping[str, int] | int = 0,
    skip_after: float = 10.0,
) -> list[Result]:
    """Time the variants in turns, so that whatever else the machine does hits all of them alike.

    Each variant runs once untimed, then `args.repeats` times. What it returns is dropped outside
    the timed part. One that has used `skip_after` seconds stops early, after three runs at least.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    for function in variants.values():
        function()
    gc.collect()
    gc.disable()
    try:
        for _ in range(args.repeats):
            for name, function in variants.items():
                if len(times[name]) >= 3 and sum(times[name]) > skip_after:
                    continue
                time.sleep(PAUSE)
                start = time.perf_counter()
                kept = function()
                times[name].append(time.perf_counter() - start)
                del kept
    finally:
        gc.enable()
    sizes = nbytes if isinstance(nbytes, Mapping) else dict.fromkeys(variants, nbytes)
    return [Result(name, seconds, sizes.get(name, 0)) for name, seconds in times.items()]


def repeated(function: Callable[[], object], count: int) -> Callable[[], object]:
    """`count` calls as one run, for what is too short to time alone; see `per_call`."""

    def run() -> None:
        for _ in range(count):
            function()

    return run


def per_call(results: list[Result], count: int) -> list[Result]:
    """Results of `repeated` runs, as times of one call."""
    return [
        Result(r.name, [s / count for s in r.seconds], r.nbytes, {**r.extra, "calls": count})
        for r in results
    ]


# ---- the GIL -------------------------------------------------------------------------------------


class GilProbe:
    """A thread that notices for how long it was kept from running, while a call is made.

    `longest` is in seconds, and holds what the system kept it from running too: the smallest of
    several calls tells of the call.
    """

    def __init__(self) -> None:
        self.longest = 0.0
        self._stop = False
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        before = time.perf_counter()
        while not self._stop:
            time.sleep(0)
            now = time.perf_counter()
            self.longest = max(self.longest, now - before)
            before = now

    def __enter__(self) -> GilProbe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()


# ---- reports ------------------------------------------------------------------------------------


@dataclass
class Section:
    """One question: the variants that answer it, compared with `baseline`."""

    title: str
    results: list[Result]
    baseline: str
    facts: dict[str, Any] = field(default_factory=dict)

    def ratio(self, name: str) -> float:
        """How many times the baseline's median `name` takes."""
        by_name = {result.name: result for result in self.results}
        return by_name[name].median / by_name[self.baseline].median


def duration(seconds: float) -> str:
    """Three digits and a fitting unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def table(rows: Iterable[Iterable[str]], indent: str = "  ") -> str:
    """Columns of equal width; the first one left-aligned, the others right-aligned."""
    cells = [list(row) for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = []
    for row in cells:
        first, *rest = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append((indent + "  ".join([first, *rest])).rstrip())
    return "\n".join(lines)


def _section_text(section: Section) -> str:
    rows = [["", "median", "p10", "p90", "GB/s", f"x {section.baseline}"]]
    for result in section.results:
        rate = f"{result.nbytes / result.median / 1e9:.1f}" if result.nbytes else ""
        rows.append(
            [
                result.name,
                duration(result.median),
                duration(result.percentile(0.1)),
                duration(result.percentile(0.9)),
                rate,
                f"{section.ratio(result.name):.2f}",
            ]
        )
    text = f"{section.title}\n{table(rows)}"
    for key, value in section.facts.items():
        text += f"\n  {key}: {value}"
    return text


def slug(text: str) -> str:
    """Lower case, digits and dashes."""
    kept = "".join(c.lower() if c.isalnum() else "-" for c in text)
    return "-".join(part for part in kept.split("-") if part)


def report(
    name: str, sections: list[Section], args: argparse.Namespace, *, gpu: bool = False
) -> None:
    """Print the tables; write what `--json` and `--save` ask for. `gpu`: the GPU is measured."""
    facts = machine(gpu=gpu)
    out = io.StringIO()
    print(f"benchmark: {name}", file=out)
    for key, value in facts.items():
        print(f"  {key:<14}{value}", file=out)
    print(f"\n{args.repeats} runs of each, taken in turns\n", file=out)
    print("\n\n".join(_section_text(section) for section in sections), file=out)
    text = out.getvalue()
    print(text, end="")
    data = {
        "benchmark": name,
        "machine": facts,
        "repeats": args.repeats,
        "sections": [
            {
                "title": section.title,
                "baseline": section.baseline,
                "facts": section.facts,
                "results": [
                    {**result.as_json(), "ratio": section.ratio(result.name)}
                    for result in section.results
                ],
            }
            for section in sections
        ],
    }
    written = json.dumps(data, indent=1) + "\n"
    if args.json:
        Path(args.json).write_text(written)
    if args.save:
        RESULTS.mkdir(exist_ok=True)
        where = facts["gpu"] if gpu else facts["cpu"]
        count = f"{facts['gpus']}gpus" if gpu else f"{facts['cores']}cores"
        stem = f"{slug(name)}-{slug(where)}-{count}-{facts['date']}"
        (RESULTS / f"{stem}.json").write_text(written)
        (RESULTS / f"{stem}.txt").write_text(text)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options that every benchmark has; add your own before parsing."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--repeats", type=int, default=15, help="timed runs of each variant")
    made.add_argument("--json", metavar="PATH", help="write the numbers there")
    made.add_argument(
        "--save", action="store_true", help="write table and numbers to benchmarks/results"
    )
    made.add_argument("--quick", action="store_true", help="small sizes only, to try it out")
    return made
