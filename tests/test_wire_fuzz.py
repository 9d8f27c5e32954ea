# SPDX-License-Identifier: Apache-2.0
"""The C half of the wire format under sanitizers, against mutated frames; see fuzz/fuzz_wire.c."""

from __future__ import annotations

from pathlib import Path

import torch

import fuzzing
import test_wire_errors
from arctic_rl_c import wire

CORE = ["json", "text", "sha256", "wire", "wire_write", "wire_chunk", "dtype", "status", "view"]
ROUNDS = 60_000


def seeds() -> list[bytes]:
    whole = wire.dumps(test_wire_errors.SAMPLE, {"op": [1, "é"]})
    return [
        whole,
        wire.dumps({"prompts": [[1, -2], [2.5e-3]], "strict": False}),
        *wire.encode_byte_chunks(bytes(900), 850, "request", operation="fwd")[:2],
        *wire.encode_byte_chunks(wire.dumps({"x": torch.arange(2000)}), 14_000, "result"),
        b'{"a": [1, 2.5e+10, "\\u00e9\\ud83d\\ude00", null, true, NaN, -Infinity]}',
        b"",
        *(whole[:length] for length in range(0, len(whole), 7)),
        *(test_wire_errors.frame(header, data) for header, data, _ in test_wire_errors.BAD_HEADERS),
    ]


def test_mutated_frames(tmp_path: Path) -> None:
    fuzzing.run(fuzzing.build(tmp_path, "fuzz_wire", CORE), ROUNDS, seeds())
