# SPDX-License-Identifier: Apache-2.0
"""The run-time tables against the real headers, wherever there are any.

Headers are looked for in CUDA_HOME, the usual toolkit folders, the nvidia wheels of this
environment, and the folders named in ARCTIC_RL_C_TEST_HEADERS (separated by colons). A set that
is missing is reported as waived, by name.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HERE = Path(__file__).parent / "headers"
COMPILER = os.environ.get("CC", "cc").split()


def candidates() -> list[Path]:
    folders = [Path(p) for p in os.environ.get("ARCTIC_RL_C_TEST_HEADERS", "").split(":") if p]
    if "CUDA_HOME" in os.environ:
        folders.append(Path(os.environ["CUDA_HOME"]) / "include")
    folders += sorted(Path("/usr/local").glob("cuda*/include"))
    folders.append(Path("/usr/include"))
    for entry in sys.path:
        folders += sorted(Path(entry or ".").glob("nvidia/*/include"))
    return list(dict.fromkeys(f.resolve() for f in folders))


def holding(header: str) -> list[Path]:
    return [folder for folder in candidates() if (folder / header).is_file()]


def compile_check(source: str, includes: list[Path], program: Path | None = None) -> None:
    output = ["-fsyntax-only"] if program is None else ["-o", str(program)]
    command = [
        *COMPILER,
        "-std=c11",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unused",
        *(arg for folder in includes for arg in ("-isystem", str(folder))),
        f"-I{ROOT / 'csrc'}",
        *output,
        str(HERE / source),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr[:3000]


@pytest.fixture(autouse=True)
def need_compiler() -> None:
    if shutil.which(COMPILER[0]) is None:
        pytest.skip(f"waived: no C compiler ({COMPILER[0]})")


@pytest.mark.parametrize("source", ["cuda_layout.c", "cuda_prototypes.c"])
def test_cuda_table_matches_the_real_header(source: str) -> None:
    found = holding("cuda.h")
    if not found:
        pytest.skip("waived: no cuda.h on this machine")
    for folder in found:
        compile_check(source, [folder])


@pytest.mark.parametrize("source", ["nccl_layout.c", "nccl_prototypes.c"])
def test_nccl_table_matches_the_real_header(source: str, tmp_path: Path) -> None:
    found = holding("nccl.h")
    if not found:
        pytest.skip("waived: no nccl.h on this machine")
    for number, folder in enumerate(found):
        program = tmp_path / f"check{number}" if source == "nccl_layout.c" else None
        compile_check(source, [HERE / "stub", folder], program)
        if program is not None:
            assert subprocess.run([program], timeout=60).returncode == 0, "initialiser differs"


def test_the_check_notices_a_wrong_table(tmp_path: Path) -> None:
    """A header in which one prototype and one constant differ must be refused."""
    found = holding("cuda.h")
    if not found:
        pytest.skip("waived: no cuda.h on this machine")
    text = (ROOT / "csrc/transport/cuda_api.h").read_text()
    right, altered = (
        "X(cuStreamQuery, 2000, (arl_cu_stream_t stream))",
        "X(cuStreamQuery, 2000, (int stream))",
    )
    wrong = text.replace(right, altered)
    assert wrong != text
    copy = tmp_path / "transport"
    copy.mkdir()
    (copy / "cuda_api.h").write_text(wrong)
    command = [*COMPILER, "-std=c11", "-fsyntax-only", "-isystem", str(found[0]), f"-I{tmp_path}"]
    command += [f"-I{ROOT / 'csrc'}", str(HERE / "cuda_prototypes.c")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode != 0
    assert "cuStreamQuery" in result.stderr
