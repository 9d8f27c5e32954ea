# SPDX-License-Identifier: Apache-2.0
"""The reader of offers under sanitizers, against mutated offers; see fuzz/fuzz_offer.c."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

import fuzzing
from arctic_rl_c import WeightSender

CORE = [
    *("offer", "offer_write", "names", "hash", "binding", "overlap"),
    *("plan", "dtype", "status", "threads", "view"),
]
ROUNDS = 60_000

SOURCES = [
    {"w": np.ones((3, 4), dtype=np.float32)},
    {"a.b": np.ones(5), "a.é": np.ones((2, 0, 3)), "c": np.ones((), dtype=np.int8)},
    {f"layers.{i}.weight": np.ones((2, 2, 2, 2)) for i in range(20)},
]


def offers() -> list[bytes]:
    found = []
    for source in SOURCES:
        for verify in (None, "all"):
            with WeightSender({**source, "tied": next(iter(source.values()))}, verify=verify) as it:
                found.append(it.offer())
    return found


def test_mutated_offers(tmp_path: Path) -> None:
    said = fuzzing.run(fuzzing.build(tmp_path, "fuzz_offer", CORE, ["-pthread"]), ROUNDS, offers())
    match = re.fullmatch(r"(\d+) rounds, (\d+) offers accepted, (\d+) plans made\n", said)
    assert match is not None, said
    _, accepted, planned = map(int, match.groups())
    assert accepted >= planned > ROUNDS // 100  # enough of them came that far
