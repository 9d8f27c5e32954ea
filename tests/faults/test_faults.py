# SPDX-License-Identifier: Apache-2.0
"""Every leak case again, with each of its allocations and system calls failing in turn."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

import arctic_rl_c._core as core
import leak_cases

pytestmark = pytest.mark.faults


def test_this_build_has_failure_points() -> None:
    assert hasattr(ctypes.CDLL(core.__file__), "arl_faults_call"), "build with ARL_FAULTS=1"


@pytest.mark.parametrize("name", sorted(set(leak_cases.CASES) - leak_cases.NO_FAULTS))
def test_every_call_may_fail(name: str) -> None:
    script = Path(__file__).with_name("fault_sweep.py")
    run = subprocess.run(
        [sys.executable, str(script), name], capture_output=True, text=True, timeout=280
    )
    said = "\n".join(run.stdout.splitlines()[-16:])  # the progress line of a crash is the last
    assert run.returncode == 0, f"exit {run.returncode}\n{said}\n{run.stderr[-3000:]}"
