# SPDX-License-Identifier: Apache-2.0
"""Make the n-th fallible call of a leak case fail, for every n: `python fault_sweep.py CASE`.

A failure must come out as MemoryError, OSError or an error of the package, or be survived; the
same call must work again at once; and after a whole sweep nothing may have leaked. The last line
printed before a crash names the n.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "leaks"), str(HERE.parent)]

import arctic_rl_c._core as core  # noqa: E402
import leak_cases  # noqa: E402
import leak_measure  # noqa: E402

SYSTEM, PYTHON = 1, 2
SWEEPS = 8
LIMIT = 20_000

faults = ctypes.PyDLL(core.__file__)
faults.arl_faults_call.argtypes = (ctypes.py_object, ctypes.c_int, ctypes.c_long)
faults.arl_faults_call.restype = ctypes.py_object


def sweep(name: str, case: leak_cases.Case, kinds: int) -> int:
    """Every n until the case runs through; returns how many there were."""
    for n in range(1, LIMIT):
        print(f"{name}: call {n} fails", end="\r", flush=True)
        with contextlib.suppress(MemoryError, OSError, core.ArcticError):
            faults.arl_faults_call(case.call, kinds, n)
        hit = faults.arl_faults_fired()
        case.call()
        if not hit:
            return n - 1
    raise AssertionError(f"{name} still fails after {LIMIT} calls")


def main(name: str) -> int:
    case = leak_cases.CASES[name]()
    # torch aborts when an allocation of its bindings fails, and its free lists hide small leaks.
    with_torch = "torch" in sys.modules
    kinds = SYSTEM if with_torch else SYSTEM | PYTHON
    case.call()
    count = sweep(name, case, kinds)
    meter = leak_measure.Meter(leak_measure.tracked(case), count_objects=not with_torch)
    meter.read(0)
    meter.read(0)
    for row in range(1, SWEEPS + 1):
        sweep(name, case, kinds)
        meter.read(row)
        problems = meter.growth(row)
        if not problems:
            break
    case.close()
    print(f"{name}: {count} calls made to fail, one at a time")
    for key, steps in problems.items():
        print(f"{key}: {steps} in sweeps of {count} failures")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
