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
SWEEPS = 40
LIMIT = 20_000

faults = ctypes.PyDLL(core.__file__)
faults.arl_faults_call.argtypes = (ctypes.py_object, ctypes.c_int, ctypes.c_long)
faults.arl_faults_call.restype = ctypes.py_object


def fail_call(case: leak_cases.Case, kinds: int, n: int) -> bool:
    """Run the case with its n-th call failing; False when it has fewer calls than that."""
    with contextlib.suppress(MemoryError, OSError, core.ArcticError):
        faults.arl_faults_call(case.call, kinds, n)
    return bool(faults.arl_faults_fired())


def sweep(name: str, case: leak_cases.Case, kinds: int) -> int:
    """Every n until the case runs through; returns how many there were."""
    for n in range(1, LIMIT):
        print(f"{name}: call {n} fails", flush=True)
        hit = fail_call(case, kinds, n)
        case.call()
        if not hit:
            return n - 1
    raise AssertionError(f"{name} still fails after {LIMIT} calls")


def locate(case: leak_cases.Case, kinds: int, count: int, repeats: int = 20) -> list[str]:
    """Which n leak: those that grow some counter by one or more each time."""
    meter = leak_measure.Meter(leak_measure.tracked(case))
    found = []
    for n in range(1, count + 1):
        fail_call(case, kinds, n)
        meter.read(0)
        meter.read(0)
        for _ in range(repeats):
            fail_call(case, kinds, n)
        meter.read(1)
        grown = {name: steps[0] for name, steps in meter.growth(1).items()}
        grown = {name: step for name, step in grown.items() if abs(step) >= repeats}
        if grown:
            found.append(f"call {n}: {grown} in {repeats} failures")
    return found


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
    print(f"{name}: {count} calls made to fail, one at a time")
    for key, steps in problems.items():
        print(f"{key}: {steps[-8:]} in sweeps of {count} failures")
    if problems:
        print("\n".join(locate(case, kinds, count)))
    case.close()
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
