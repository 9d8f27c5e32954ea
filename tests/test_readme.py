# SPDX-License-Identifier: Apache-2.0
"""The README's code runs as it stands there, and its numbers are those of the results."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch

import csource

README = (csource.ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_weight_sync_example() -> None:
    torch.manual_seed(0)
    names = {"trainer": torch.nn.Linear(3, 2), "sampler": torch.nn.Linear(3, 2)}
    exec(BLOCKS[0], names)
    assert torch.equal(names["trainer"].weight, names["sampler"].weight)


def test_client_example(tmp_path: Path) -> None:
    script = tmp_path / "example.py"  # spawned processes import the main module again
    script.write_text(BLOCKS[1])
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    assert "token_ids" in run.stdout


def test_ratios_are_those_of_the_results() -> None:
    tool = csource.ROOT / "tools" / "readme_tables.py"
    run = subprocess.run([sys.executable, str(tool), "--check"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
