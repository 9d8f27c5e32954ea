# SPDX-License-Identifier: Apache-2.0
"""Run one leak case in this interpreter: `python leak_measure.py CASE`. Exits 1 when it leaks.

A leak grows in every round of calls; a cache grows in some. So a case passes when every counter
stands still, or turns back, in at least one round: reference counts of the public types, of
common singletons and of the case's own arguments (in either direction), live objects, bytes of
the C heap. And nothing may be left of the system's things: descriptors, shared memory files,
children.
"""

from __future__ import annotations

import array
import ctypes
import gc
import itertools
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import arctic_rl_c._core as core  # noqa: E402
import leak_cases  # noqa: E402
import residue  # noqa: E402

CALLS = 50
ROUNDS = 40  # at most; ends as soon as every counter has stood still once


class _Mallinfo2(ctypes.Structure):  # malloc.h; hblkhd is mapped, uordblks taken from arenas
    _fields_ = [(f"field{i}", ctypes.c_size_t) for i in range(10)]


_mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
if _mallinfo2 is not None:
    _mallinfo2.restype = _Mallinfo2


def heap_bytes() -> int:
    """Bytes that malloc has handed out and not got back, over all its arenas."""
    if _mallinfo2 is None:  # a libc without it; the other measures remain
        return 0
    info = _mallinfo2()
    return int(info.field7 + info.field4)


def tracked(case: leak_cases.Case) -> dict[str, object]:
    named: dict[str, object] = {
        name: value for name, value in vars(core).items() if isinstance(value, type)
    }
    named |= {"None": None, "True": True, "()": (), "0": 0, "int": int, "dict": dict, "str": str}
    return named | {f"argument {index}": value for index, value in enumerate(case.arguments)}


# A type's method cache holds the name of each lookup, one per address that the name came at.
_clear_type_cache = getattr(sys, "_clear_internal_caches", None) or sys._clear_type_cache


class Meter:
    """Reads all counters into memory of its own, so that reading changes none of them."""

    def __init__(self, objects: dict[str, object], *, count_objects: bool = True) -> None:
        if sys.version_info >= (3, 12):  # immortal there
            objects = {k: v for k, v in objects.items() if v not in (None, True, 0, ())}
        self.count_objects = count_objects
        self.objects = list(objects.values())
        self.names = [f"references of {name}" for name in objects] + ["heap bytes", "objects"]
        self.rows = [array.array("q", bytes(8 * len(self.names))) for _ in range(ROUNDS + 1)]

    def read(self, row: int) -> None:
        gc.collect()
        _clear_type_cache()
        values = self.rows[row]
        for index, value in enumerate(self.objects):
            values[index] = sys.getrefcount(value)
        values[-2] = heap_bytes()
        values[-1] = sys.getallocatedblocks() if self.count_objects else 0

    def growth(self, rounds: int) -> dict[str, list[int]]:
        """Of every counter that moved the same way in each round: what each round added."""
        rows = self.rows[: rounds + 1]
        moved = {
            name: [after[i] - before[i] for before, after in itertools.pairwise(rows)]
            for i, name in enumerate(self.names)
        }
        return {
            name: steps
            for name, steps in moved.items()
            if all(step > 0 for step in steps) or all(step < 0 for step in steps)
        }


def main(name: str) -> int:
    case = leak_cases.CASES[name]()
    meter = Meter(tracked(case))
    for _ in range(CALLS):
        case.call()
    held = residue.snapshot()
    meter.read(0)  # allocates what reading needs; the next line reads again
    meter.read(0)
    for row in range(1, ROUNDS + 1):
        for _ in range(CALLS):
            case.call()
        meter.read(row)
        if row >= 3 and not meter.growth(row):
            break
    left = residue.snapshot() - held
    case.close()
    problems = [
        f"{key}: {' '.join(f'{step:+d}' for step in steps[:8])} … in rounds of {CALLS} calls"
        for key, steps in meter.growth(row).items()
    ]
    problems += [f"left behind: {item}" for item in sorted(left)]
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
