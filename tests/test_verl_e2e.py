# SPDX-License-Identifier: Apache-2.0
"""The tool behind `make verl-e2e`: what it finds missing, and the table that it prints."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("verl_e2e", ROOT / "tools" / "verl_e2e.py")
assert spec is not None and spec.loader is not None
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


def checkout(folder: Path, form: str) -> Path:
    (folder / "verl" / "remote_backend").mkdir(parents=True)
    text = "" if form == "seed" else "    def register_worker(cls): ...\n"
    (folder / "verl" / "remote_backend" / "base.py").write_text(text)
    if form == "v1":
        v1 = folder / "verl" / "trainer" / "ppo" / "v1"
        v1.mkdir(parents=True)
        (v1 / "trainer_remote_backend.py").write_text("")
    return folder


@pytest.mark.parametrize("form", ["seed", "plugin", "v1"])
def test_forms_are_known_by_their_files(tmp_path: Path, form: str) -> None:
    assert tool.form_of(checkout(tmp_path, form)) == form


def test_what_is_missing_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = {"cachetools", "hydra", "transfer_queue"}
    find = lambda name: None if name in gone else object()  # noqa: E731
    monkeypatch.setattr(tool.importlib.util, "find_spec", find)
    assert tool.missing("plugin") == ["cachetools", "hydra-core"]
    source = checkout(tmp_path / "verl", "v1")
    with pytest.raises(SystemExit, match=r"lacks 3 packages: .*install cachetools hydra-core Tran"):
        tool.run(source, tmp_path, 1, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["verl"]


def test_the_page_installs_all_of_it() -> None:
    page = (ROOT / "docs" / "verl.md").read_text()
    commands = page[page.index("pip install torch") : page.index("make verl-e2e VERL_SRC")]
    words = {word.strip("'").split("==")[0] for word in commands.split()}
    for needed in (tool.NEEDS | tool.NEEDS_OF_V1).values():
        assert needed.split("==")[0] in words


def test_steps_of_the_console_become_a_table() -> None:
    lines = [
        "(TaskRunner pid=1) step:1 - actor/loss:0.5 - actor/grad_norm:np.float64(0.25) - x:y",
        "nothing",
        "step:2 - actor/loss:-0.5 - timing_s/step:3.14159",
    ]
    rows: list[Any] = [row for line in lines if (row := tool.metrics(line)) is not None]
    assert rows[0] == {"step": 1.0, "actor/loss": 0.5, "actor/grad_norm": 0.25}
    first, second, third = tool.table(rows).splitlines()
    assert first.split()[:3] == ["step", "actor/loss", "grad_norm"]
    assert second.split()[:3] == ["1", "0.5000", "0.2500"]
    assert third.split()[0] == "2" and third.split()[-1] == "3.14"
