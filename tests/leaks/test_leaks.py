# SPDX-License-Identifier: Apache-2.0
"""Every public callable and type, enumerated from the module, called until a leak would show."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import arctic_rl_c._core as core
import leak_cases


def public_names() -> list[str]:
    names = []
    for name, value in vars(core).items():
        if name.startswith("_"):
            continue
        names.append(name)
        if isinstance(value, type) and not issubclass(value, BaseException):
            names += [f"{name}.{member}" for member in vars(value) if not member.startswith("_")]
        elif not isinstance(value, type) and not inspect.isbuiltin(value):
            names.remove(name)  # a constant
    return names


def test_every_public_name_has_a_case() -> None:
    """In the default suite: a new name without a leak case fails at once."""
    names = public_names()
    assert sorted(set(names) - set(leak_cases.COVERED)) == [], "these have no case in leak_cases.py"
    assert sorted(set(leak_cases.COVERED) - set(names)) == [], "these cases cover nothing public"


def measure(name: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).with_name("leak_measure.py")
    return subprocess.run(
        [sys.executable, str(script), name], capture_output=True, text=True, timeout=240, **kwargs
    )


@pytest.mark.leaks
@pytest.mark.parametrize("name", leak_cases.CASES)
def test_nothing_leaks(name: str) -> None:
    run = measure(name)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.leaks
@pytest.mark.parametrize(
    ("leak", "said"),
    [
        ("ctypes.pythonapi.Py_IncRef(ctypes.py_object(arctic_rl_c.ArcticError))", "ArcticError"),
        ("kept.append(object())", "objects"),
        ("ctypes.CDLL(None).malloc(24)", "heap bytes"),
        ("os.dup(pipe)", "left behind: fd"),
    ],
)
def test_a_planted_leak_is_found(leak: str, said: str, tmp_path: Path) -> None:
    """The measure measures: each kind of leak, one per call, is reported by name."""
    here = Path(__file__).parent
    script = tmp_path / "planted.py"
    script.write_text(
        f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]\n"
        "import ctypes, os, arctic_rl_c, leak_cases, leak_measure\n"
        "kept, (pipe, _) = [], os.pipe()\n"
        f"leak_cases.CASES['planted'] = lambda: leak_cases.Case(lambda: {leak})\n"
        "sys.exit(leak_measure.main('planted'))\n"
    )
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 1, run.stderr
    assert said in run.stdout
