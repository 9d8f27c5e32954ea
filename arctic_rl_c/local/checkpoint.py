# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the trainer: a directory a step, complete or absent, and a pointer to the last.

```
<root>/step_40/model.safetensors       the model's named parameters
<root>/step_40/optimizer.safetensors   moments and fp32 master weights
<root>/step_40/state.json              counters; written last inside the directory
<root>/step_40/hf/                     with export_hf: a Hugging Face directory
<root>/latest                          the name of the newest complete directory
```

A checkpoint is built under a temporary name and renamed when all of it is on disk, so a crash
leaves the one before. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LATEST = "latest"
STATE = "state.json"
_STEP = re.compile(r"step_(\d+)")


def save(
    root: str | Path,
    step: int,
    model: dict[str, torch.Tensor],
    optimizer: dict[str, torch.Tensor],
    state: dict[str, Any],
    *,
    export_hf: Any = None,
    keep: int | None = None,
) -> Path:
    """Write one checkpoint and point `latest` to it.

    Args:
        root: Directory of all checkpoints; made when missing.
        step: Number in the directory's name. An existing one is replaced.
        model: The parameters by name.
        optimizer: Moments and master weights by name.
        state: JSON-safe counters.
        export_hf: Called with a directory to write a Hugging Face model to; None writes none.
        keep: How many to keep, this one included; None keeps all.

    Returns:
        The checkpoint's directory.
    """
    if step < 0:
        raise ValueError(f"checkpoint step must not be negative, found {step}")
    if keep is not None and keep < 1:
        raise ValueError(f"save_total_limit must be at least 1, found {keep}")
    base = Path(root)
    base.mkdir(parents=True, exist_ok=True)
    final, building = base / f"step_{step}", base / f".building_{step}_{os.getpid()}"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    try:
        _save_tensors(building / "model.safetensors", model)
        _save_tensors(building / "optimizer.safetensors", optimizer)
        if export_hf is not None:
            export_hf(building / "hf")
        _write_text(building / STATE, json.dumps(state, indent=1) + "\n")
        _sync_directory(building)
        _replace_directory(building, final)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    _write_text(base / LATEST, final.name + "\n")
    _sync_directory(base)
    if keep is not None:
        for old in [s for s in steps(base) if s != step][: -(keep - 1) or None]:
            shutil.rmtree(base / f"step_{old}", ignore_errors=True)
    return final


def find(root: str | Path, step: int | None = None) -> Path | None:
    """The directory of a step, or of the last one; None when `root` holds no checkpoint.

    Raises:
        FileNotFoundError: The step asked for, or the one that `latest` names, is not there.
    """
    base = Path(root)
    if step is None:
        pointer = base / LATEST
        if not pointer.is_file():
            return None
        name = pointer.read_text().strip()
        if not _STEP.fullmatch(name):
            raise FileNotFoundError(f"{pointer} names {name!r}, which is no checkpoint")
    else:
        name = f"step_{step}"
    directory = base / name
    if not (directory / STATE).is_file():
        have = ", ".join(str(s) for s in steps(base)) or "none"
        raise FileNotFoundError(f"{directory} holds no complete checkpoint; steps there: {have}")
    return directory


def load(
    directory: Path,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """Read what `save` wrote: model tensors, optimizer tensors, state."""
    state = json.loads((directory / STATE).read_text())
    return (
        load_file(directory / "model.safetensors"),
        load_file(directory / "optimizer.safetensors"),
        state,
    )


def steps(root: str | Path) -> list[int]:
    """The steps of the complete checkpoints under `root`, oldest first."""
    found = []
    for entry in Path(root).iterdir() if Path(root).is_dir() else ():
        match = _STEP.fullmatch(entry.name)
        if match and (entry / STATE).is_file():
            found.append(int(match[1]))
    return sorted(found)


def _save_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    # Contiguous copies on the host: safetensors refuses views that share a storage.
    host = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    save_file(host, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _write_text(path: Path, text: str) -> None:
    """Replace a small file in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _replace_directory(new: Path, final: Path) -> None:
    """Rename over an existing directory, which rename(2) refuses unless it is empty."""
    if not final.exists():
        new.rename(final)
        return
    old = final.with_name(f".replaced_{final.name}_{os.getpid()}")
    shutil.rmtree(old, ignore_errors=True)
    final.rename(old)
    try:
        new.rename(final)
    except OSError:
        old.rename(final)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
