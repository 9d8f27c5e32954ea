# SPDX-License-Identifier: Apache-2.0
"""What every test gets: hypothesis profiles, a check for what it left behind, honest GPU tests."""

from __future__ import annotations

import ast
import functools
import gc
import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

import arctic_rl_c._core as core
import fakes
import nursery
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

# A shell ignores SIGINT in what it starts with `&`, and children inherit that; tests send it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

WITHOUT_TORCH = importlib.util.find_spec("torch") is None
WAIVED = pytest.StashKey[list[str]]()
WAIVED_FILES = pytest.StashKey[list[str]]()


def has_gpu() -> bool:
    """Whether the system shows an NVIDIA device. Asks no driver, which would spoil fork."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Modules that a test file imports, anywhere in it and through helpers beside it.

    What it tries to import, and can do without, is left out.
    """
    names: set[str] = set()
    tree = ast.parse(path.read_text())
    optional = {
        part
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        and ast.unparse(node.items[0]) == "contextlib.suppress(ModuleNotFoundError)"
        for part in node.body
    }
    for node in ast.walk(tree):
        if node in optional:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    for name in tuple(names):
        helper = path.with_name(f"{name}.py")
        if helper.exists() and helper != path:
            names |= imports(helper)
    return frozenset(names)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without torch (the other Pythons of `make pythons`), leave out the files that import it."""
    if WITHOUT_TORCH and collection_path.name.startswith("test_"):
        missing = {
            name
            for name in imports(collection_path) & {"torch", "transformers", "hydra", "omegaconf"}
            if importlib.util.find_spec(name) is None
        }
        if missing:
            config.stash.setdefault(WAIVED_FILES, []).append(
                f"{collection_path.name} (imports {', '.join(sorted(missing))})"
            )
            return True
    return None


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


def pytest_collection_finish() -> None:
    """What is loaded now stays: a hundred tests collect garbage, and need not search it."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    nursery.stop()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for name in config.stash.get(WAIVED_FILES, []):
        terminalreporter.write_line(f"not collected here: {name}", yellow=True)
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


@pytest.fixture(scope="session", autouse=True)
def contexts(request: pytest.FixtureRequest) -> None:
    """Open each GPU before a test looks at what it leaves: a context holds descriptors for good."""
    if any(item.get_closest_marker("gpu") for item in request.session.items):
        import torch

        for number in range(torch.cuda.device_count()):
            torch.zeros(1, device=f"cuda:{number}")


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a descriptor, a child process or a shared memory file behind."""
    before = residue.snapshot()
    yield
    left = residue.snapshot() - before
    if left:
        gc.collect()  # a cycle may still hold the owner; that is not a leak
        left = residue.snapshot() - before
    # A server on a thread closes its end of a connection when it has seen ours closed.
    until = time.monotonic() + 5
    while left and time.monotonic() < until:
        time.sleep(0.01)
        left = residue.snapshot() - before
    if left:
        pytest.fail("left behind: " + ", ".join(sorted(left)), pytrace=False)


@pytest.fixture
def driver() -> Iterator[fakes.Driver]:
    """The fake driver of this process, which nothing misused."""
    found = fakes.driver()
    yield found
    found.reset()
    assert fakes.misuse(found.session) is None
    fakes.clean(found.session)
