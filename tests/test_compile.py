# SPDX-License-Identifier: Apache-2.0
"""What only a compiler can tell about the layers: headers stand alone, the core needs no Python."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

import csource

PLAIN = csource.sources("core", "transport")


@pytest.mark.parametrize("path", PLAIN, ids=csource.relative)
def test_compiles_without_python(path: Path) -> None:
    """Each file alone, and no Python, NumPy or CUDA folder among the include paths."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    flags = ["-std=c11", "-D_GNU_SOURCE", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    run = subprocess.run(
        [*compiler, *flags, f"-I{csource.CSRC}", "-x", "c", "-include", str(path), "-"],
        input="typedef int arl_nothing_t;\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
