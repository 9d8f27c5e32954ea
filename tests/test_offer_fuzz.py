# SPDX-License-Identifier: Apache-2.0
"""The reader of offers under sanitizers, against mutated offers; see fuzz/fuzz_offer.c."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import numpy as np

import csource
from arctic_rl_c import WeightSender

COMPILER = os.environ.get("CC", "cc").split()
CORE = [
    *("offer", "names", "hash", "binding", "overlap"),
    *("plan", "dtype", "status", "threads", "view"),
]
ROUNDS = 60_000

SOURCES = [
    {"w": np.ones((3, 4), dtype=np.float32)},
    {"a.b": np.ones(5), "a.é": np.ones((2, 0, 3)), "c": np.ones((), dtype=np.int8)},
    {f"layers.{i}.weight": np.ones((2, 2, 2, 2)) for i in range(20)},
]


def build(folder: Path) -> Path:
    """The fuzz target with a main of its own, every access checked."""
    out = folder / "fuzz_offer"
    command = [
        *COMPILER,
        *["-std=c11", "-O1", "-g", "-pthread", "-D_GNU_SOURCE", "-DARL_FUZZ_STANDALONE"],
        *["-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined"],
        "-fno-sanitize-recover=undefined",
        f"-I{csource.CSRC}",
        str(Path(__file__).parent / "fuzz" / "fuzz_offer.c"),
        *(str(csource.CSRC / "core" / f"arl_{name}.c") for name in CORE),
        "-o",
        str(out),
    ]
    built = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stderr
    return out


def test_mutated_offers(tmp_path: Path) -> None:
    seeds = []
    for number, source in enumerate(SOURCES):
        for verify in (None, "all"):
            with WeightSender({**source, "tied": next(iter(source.values()))}, verify=verify) as it:
                path = tmp_path / f"{number}-{verify}"
                path.write_bytes(it.offer())
            seeds.append(str(path))
    env = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "ASAN_OPTIONS")}
    run = subprocess.run(
        [str(build(tmp_path)), str(ROUNDS), *seeds],
        capture_output=True,
        text=True,
        timeout=280,
        env=env,
    )
    assert run.returncode == 0, run.stderr
    said = re.fullmatch(r"(\d+) rounds, (\d+) offers accepted, (\d+) plans made\n", run.stdout)
    assert said is not None, run.stdout
    rounds, accepted, planned = map(int, said.groups())
    assert rounds == ROUNDS
    assert accepted >= planned > ROUNDS // 100  # enough of them came that far
