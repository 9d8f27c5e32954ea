# SPDX-License-Identifier: Apache-2.0
"""The package as it is shipped: every file is in it and nothing else, versions agree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import arctic_rl_c
import csource

TREE = csource.ROOT / "arctic_rl_c"
INSTALLED = Path(arctic_rl_c.__file__).parent


def shipped_files() -> list[str]:
    return sorted(
        path.relative_to(TREE).as_posix()
        for path in TREE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in {".so", ".pyc"}
    )


def test_every_file_of_the_package_is_installed() -> None:
    assert [name for name in shipped_files() if not (INSTALLED / name).exists()] == []


def test_nothing_else_is_installed() -> None:
    """No leftovers of an earlier build, no C sources, no tests."""
    found = {
        path.relative_to(INSTALLED).as_posix()
        for path in INSTALLED.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith("_core.")
    }
    assert found - set(shipped_files()) == set()


def test_versions_agree() -> None:
    project = (csource.ROOT / "pyproject.toml").read_text()
    declared = re.search(r'^version = "([^"]+)"', project, re.MULTILINE)
    assert declared is not None
    assert arctic_rl_c.__version__ == declared.group(1)


def test_every_marker_is_documented() -> None:
    """A marker that keeps tests out of the default run has a Makefile target of its own."""
    project = (csource.ROOT / "pyproject.toml").read_text()
    makefile = (csource.ROOT / "Makefile").read_text()
    for marker in re.findall(r"not (\w+)", project[project.index("addopts") :].split("\n")[0]):
        assert re.search(rf"^{marker}:.*##", makefile, re.MULTILINE), marker


def test_a_source_tree_says_how_to_build(tmp_path: Path) -> None:
    """The mistake that everybody makes once: running from a clone that is not built."""
    copy = tmp_path / "arctic_rl_c"
    copy.mkdir()
    for name in ("__init__.py", "_built.py"):
        (copy / name).write_text((TREE / name).read_text())
    run = subprocess.run(
        [sys.executable, "-c", "import arctic_rl_c"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert run.returncode == 1
    assert f"arctic_rl_c._core is not built in {copy}" in run.stderr
    assert "make build" in run.stderr
