# SPDX-License-Identifier: Apache-2.0
"""The C half of the wire format under sanitizers, against mutated frames; see fuzz/fuzz_wire.c."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

import csource
import test_wire_errors
from arctic_rl_c import wire

COMPILER = os.environ.get("CC", "cc").split()
CORE = ["json", "text", "sha256", "wire", "wire_write", "wire_chunk", "dtype", "status", "view"]
ROUNDS = 60_000


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fuzz target with a main of its own, every access checked."""
    out = tmp_path_factory.mktemp("fuzz") / "fuzz_wire"
    command = [
        *COMPILER,
        "-std=c11",
        "-O1",
        "-g",
        "-D_GNU_SOURCE",
        "-DARL_FUZZ_STANDALONE",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=undefined",
        f"-I{csource.CSRC}",
        str(Path(__file__).parent / "fuzz" / "fuzz_wire.c"),
        *(str(csource.CSRC / "core" / f"arl_{name}.c") for name in CORE),
        "-o",
        str(out),
    ]
    built = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stderr
    return out


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("seeds")
    whole = wire.dumps(test_wire_errors.SAMPLE, {"op": [1, "é"]})
    frames = [
        whole,
        wire.dumps({"prompts": [[1, -2], [2.5e-3]], "strict": False}),
        *wire.encode_byte_chunks(bytes(900), 850, "request", operation="fwd")[:2],
        *wire.encode_byte_chunks(wire.dumps({"x": torch.arange(2000)}), 14_000, "result"),
        b'{"a": [1, 2.5e+10, "\\u00e9\\ud83d\\ude00", null, true, NaN, -Infinity]}',
        b"",
        *(whole[:length] for length in range(0, len(whole), 7)),
        *(test_wire_errors.frame(header, data) for header, data, _ in test_wire_errors.BAD_HEADERS),
    ]
    paths = []
    for number, frame in enumerate(frames):
        path = folder / str(number)
        path.write_bytes(frame)
        paths.append(str(path))
    return paths


def test_mutated_frames(harness: Path, seeds: list[str]) -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "ASAN_OPTIONS")}
    run = subprocess.run(
        [str(harness), str(ROUNDS), *seeds], capture_output=True, text=True, timeout=280, env=env
    )
    assert run.returncode == 0, run.stderr
    assert f"{ROUNDS} rounds" in run.stdout
