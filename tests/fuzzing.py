# SPDX-License-Identifier: Apache-2.0
"""Builds the fuzz targets with a main of their own (fuzz/mutate.h) and runs them, sanitized."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterable
from pathlib import Path

import csource

COMPILER = os.environ.get("CC", "cc").split()


def build(folder: Path, name: str, core: Iterable[str], flags: Iterable[str] = ()) -> Path:
    """Compile `fuzz/<name>.c` and `core/arl_<...>.c`, with every access checked."""
    out = folder / name
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
        str(Path(__file__).parent / "fuzz" / f"{name}.c"),
        *(str(csource.CSRC / "core" / f"arl_{part}.c") for part in core),
        *flags,
        "-o",
        str(out),
    ]
    built = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stderr
    return out


def run(target: Path, rounds: int, inputs: Iterable[bytes]) -> str:
    """Write the inputs beside the target and mutate them, the same way every time.

    Returns what it printed, which begins with the number of rounds.
    """
    folder = target.parent / f"{target.name}-inputs"
    folder.mkdir()
    paths = []
    for number, data in enumerate(inputs):
        path = folder / str(number)
        path.write_bytes(data)
        paths.append(str(path))
    env = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "ASAN_OPTIONS")}
    done = subprocess.run(
        [str(target), str(rounds), *paths], capture_output=True, text=True, timeout=280, env=env
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{rounds} rounds"), done.stdout
    return done.stdout


def libyaml_flags() -> list[str]:
    """As setup.py finds them, static or shared."""
    prefix = os.environ.get("ARL_LIBYAML_DIR")
    if prefix:
        root = Path(prefix).resolve()
        library = next(p for p in sorted(root.rglob("libyaml.*")) if p.suffix in (".a", ".so"))
        header = next(iter(root.rglob("yaml.h")))
        return [f"-I{header.parent}", str(library), f"-Wl,-rpath,{library.parent}"]
    try:
        flags = subprocess.run(
            ["pkg-config", "--cflags", "--libs", "yaml-0.1"], capture_output=True, text=True
        )
    except FileNotFoundError:
        return ["-lyaml"]
    return shlex.split(flags.stdout) if flags.returncode == 0 else ["-lyaml"]
