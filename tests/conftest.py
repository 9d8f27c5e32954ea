# SPDX-License-Identifier: Apache-2.0
"""What every test gets: hypothesis profiles, a check for what it left behind, honest GPU tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

import arctic_rl_c._core as core
import residue

# Derandomised, so that a failure is a failure everywhere; `explore` looks for new ones. Deadlines
# would be timing thresholds, and a sanitizer build is several times slower.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile(
    "ci",
    parent=hypothesis.settings.get_profile("default"),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

WAIVED = pytest.StashKey[list[str]]()


def has_gpu() -> bool:
    """Whether the system shows an NVIDIA device. Asks no driver, which would spoil fork."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def pytest_report_header() -> str:
    build = "sanitized" if residue.is_sanitized(core.__file__) else "plain"
    return f"arctic_rl_c._core: {build} build, {core.__file__}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU, take `gpu` tests out and remember their names: waived is not passed."""
    config.stash[WAIVED] = []
    if has_gpu():
        return
    waived = [item for item in items if item.get_closest_marker("gpu") is not None]
    if waived:
        config.stash[WAIVED] = [item.nodeid for item in waived]
        config.hook.pytest_deselected(items=waived)
        items[:] = [item for item in items if item not in waived]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    waived = config.stash.get(WAIVED, [])
    if not waived:
        return
    asked = config.getoption("markexpr") == "gpu"
    if asked:
        for name in waived:
            terminalreporter.write_line(f"waived (no GPU): {name}", yellow=True)
    terminalreporter.write_line(
        f"{len(waived)} waived: no GPU here" + ("" if asked else " (their names: pytest -m gpu)"),
        yellow=True,
    )


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a descriptor, a child process or a shared memory file behind."""
    before = residue.snapshot()
    yield
    left = residue.snapshot() - before
    if left:
        gc.collect()  # a cycle may still hold the owner; that is not a leak
        left = residue.snapshot() - before
    if left:
        pytest.fail("left behind: " + ", ".join(sorted(left)), pytrace=False)
