# SPDX-License-Identifier: Apache-2.0
"""The PTX text that ships is what the kernels' source gives, and assembles everywhere."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

KERNELS = Path(__file__).parents[1] / "csrc/transport/kernels"


@pytest.fixture(autouse=True)
def tools_without_sanitizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvcc and ptxas do not run with the sanitizer's library in front of theirs."""
    monkeypatch.delenv("LD_PRELOAD", raising=False)


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_ptx", KERNELS / "make_ptx.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_header_is_old_enough_for_every_driver(maker: ModuleType) -> None:
    text = maker.ptx_of(maker.HEADER.read_text())
    assert text.startswith(f".version {maker.PTX_VERSION} .target {maker.PTX_TARGET} ")
    assert text.count(".visible .entry ") == 3
    assert "used_bytes_mask" not in text


def test_entry_points_are_those_that_the_host_asks_for(maker: ModuleType) -> None:
    text = maker.ptx_of(maker.HEADER.read_text())
    header = (KERNELS.parent / "cuda_kernels.h").read_text()
    asked = re.findall(r'#define ARL_K_\w+ "(\w+)"', header)
    assert sorted(asked) == sorted(re.findall(r"\.visible \.entry (\w+)", text))


def test_the_text_is_made_from_the_source(maker: ModuleType) -> None:
    nvcc = shutil.which("nvcc")
    made_with = re.search(r"with (nvcc [\d.]+)", maker.HEADER.read_text())
    assert made_with is not None
    if nvcc is None:
        pytest.skip("waived: no nvcc here")
    rendered = maker.render(nvcc)
    if made_with.group(1) not in rendered:
        pytest.skip(f"waived: the text was made with {made_with.group(1)}")
    assert rendered == maker.HEADER.read_text(), "run csrc/transport/kernels/make_ptx.py"


def test_it_assembles_for_every_architecture(maker: ModuleType, tmp_path: Path) -> None:
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("waived: no ptxas here")
    text = tmp_path / "kernels.ptx"
    text.write_text(maker.ptx_of(maker.HEADER.read_text()))
    for architecture in maker.ARCHITECTURES:
        command = [ptxas, f"-arch={architecture}", str(text), "-o", str(tmp_path / "out")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
