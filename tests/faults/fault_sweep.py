# SPDX-License-Identifier: Apache-2.0
"""Make the n-th fallible call of a leak case fail, for every n: `python fault_sweep.py CASE`.

A failure must come out as MemoryError, OSError or an error of the package, or be survived; the
same call must work again at once; and failing the same call again and again must leak nothing.
The last line printed before a crash names the n.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "leaks"), str(HERE.parent)]

import arctic_rl_c._core as core  # noqa: E402
import leak_cases  # noqa: E402
import leak_measure  # noqa: E402

SYSTEM, PYTHON = 1, 2
REPEATS = 6
LOOKS = 10
WARM_UP = 600
CHUNK = 32  # bytes: the least that malloc hands out
LIMIT = 20_000

faults = ctypes.PyDLL(core.__file__)
faults.arl_faults_call.argtypes = (ctypes.py_object, ctypes.c_int, ctypes.c_long)
faults.arl_faults_call.restype = ctypes.py_object


def fail_call(case: leak_cases.Case, kinds: int, n: int) -> bool:
    """Run the case with its n-th call failing; False when it has fewer calls than that."""
    try:
        faults.arl_faults_call(case.call, kinds, n)
    except (MemoryError, OSError, core.ArcticError):
        pass
    except SystemError as error:
        if not is_the_interpreters(error):
            raise
    return bool(faults.arl_faults_fired())


def is_the_interpreters(error: SystemError) -> bool:
    """CPython, too, loses an exception here and there: making a frame, encoding JSON."""
    frames = traceback.extract_tb(error.__traceback__)
    stdlib = sysconfig.get_path("stdlib")
    return str(error).startswith("<function ") or frames[-1].filename.startswith(stdlib)


def growth(case: leak_cases.Case, meter: leak_measure.Meter, kinds: int, n: int) -> dict[str, int]:
    """Counters that grow, or shrink, each time that the n-th call fails."""
    fail_call(case, kinds, n)
    meter.read(0)
    meter.read(0)
    for _ in range(REPEATS):
        fail_call(case, kinds, n)
    meter.read(1)
    steps = {name: values[0] for name, values in meter.growth(1).items()}
    return {
        k: s for k, s in steps.items() if abs(s) >= REPEATS * (CHUNK if k == "heap bytes" else 1)
    }


def main(name: str) -> int:
    case = leak_cases.CASES[name]()
    # torch aborts when an allocation of its bindings fails, and its free lists hide small leaks.
    with_torch = "torch" in sys.modules
    kinds = SYSTEM if with_torch else SYSTEM | PYTHON
    meter = leak_measure.Meter(leak_measure.tracked(case), count_objects=not with_torch)
    for _ in range(WARM_UP):
        fail_call(case, kinds, 1)
    case.call()
    leaks = []
    for n in range(1, LIMIT):
        print(f"{name}: call {n} fails", flush=True)
        if not fail_call(case, kinds, n):
            break
        case.call()
        # What grows at first may be a cache or a free list; a leak grows at every look.
        grown = growth(case, meter, kinds, n)
        for _ in range(LOOKS if grown else 0):
            again = growth(case, meter, kinds, n)
            grown = {name: again[name] for name in grown if name in again}
            if not grown:
                break
        if grown:
            leaks.append(f"call {n}: {grown} in {REPEATS} failures")
    else:
        raise AssertionError(f"{name} still fails after {LIMIT} calls")
    case.close()
    print(f"{name}: {n - 1} calls made to fail, one at a time")
    print("\n".join(leaks))
    return 1 if leaks else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
