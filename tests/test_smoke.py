# SPDX-License-Identifier: Apache-2.0
"""The main job as a user starts it, and how it fails."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import arctic_rl_c
from arctic_rl_c import cli
from test_local_process import until

PACKAGE = str(Path(arctic_rl_c.__file__).parent.parent)
WAIT = 240
LINE = "[weight-sync names validated] context=host_shm sender=24 expected=24"


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "arctic_rl_c", *arguments]


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": PACKAGE}
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=WAIT,
        env=environment,
        cwd=cwd,
        check=False,
    )


@pytest.mark.smoke
@pytest.mark.parametrize("generation", ["flat", "nested"])
def test_smoke(generation: str, tmp_path: Path) -> None:
    done = run(
        "smoke", "--generation", generation, "--steps", "4", "--json", str(tmp_path / "run.json")
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert LINE in lines and "Traceback" not in done.stderr
    head = next(line for line in lines if line.lstrip().startswith("step"))
    assert [
        name
        for name in (
            "actor/loss",
            "grad_norm",
            "MFU",
            "score",
            "update_weights (s)",
            "update_actor (s)",
        )
        if name in head
    ]
    rows = [line.split() for line in lines if line.split()[0].isdigit() and "=" in line.split()]
    assert [row[0] for row in rows] == ["1", "2", "3", "4"]
    assert all(row[-3] == row[-1] for row in rows)
    assert "4 steps, 5 syncs, weights equal after each" in lines[-1]
    report = json.loads((tmp_path / "run.json").read_text())
    steps = report["steps"]
    assert len(steps) == 4 and report["last_sync"]["receiver"]["transport"] == "host_shm"
    for step in steps:
        assert step["trainer_sha256"] == step["sampler_sha256"]
        assert all(math.isfinite(v) for v in step.values() if isinstance(v, int | float))
        assert step["grad_norm"] > 0 and 0 < step["score"] < 1
    assert len({step["trainer_sha256"] for step in steps}) == 4
    assert steps[-1]["score"] > steps[0]["score"]


@pytest.mark.smoke
def test_ctrl_c_leaves_nothing_behind() -> None:
    with subprocess.Popen(
        command("smoke", "--steps", "1000", "--shape", "micro", "--prompts", "16"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": PACKAGE},
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if line.split()[0] == "1":
                break
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 2
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        errors = process.stderr.read()
        assert process.wait(WAIT) == 130
    assert "interrupted" in errors and "Traceback" not in errors
    until(lambda: not any(child.is_running() for child in children), "the children to end")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "vast"], "ConfigError: shape 'vast' is not one of micro, tiny, qwen3-0.6b"),
        (["--model", "/nowhere"], "model path '/nowhere' holds no config.json"),
        (["--device", "abacus"], "ConfigError: device 'abacus' is not one of cpu, cuda, cuda:N"),
        (["--device", "cuda:99"], "cuda:99"),
        (["--json", "/nowhere/run.json"], "--json /nowhere/run.json: there is no such directory"),
    ],
)
def test_errors_are_one_line_and_a_status(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert cli.main(["smoke", *arguments]) == 1
    errors = capsys.readouterr().err.strip()
    assert errors.startswith("error: ") and message in errors.splitlines()[0]


def test_numbers_that_are_not_finite_fail_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from arctic_rl_c.local.grpo import StepReport
    from arctic_rl_c.local.smoke import Smoke, SmokeError, SmokeOptions

    smoke = Smoke(SmokeOptions())
    smoke._peak = 1.0
    cost = {"body": 1.0, "head": 1.0, "attention": 1.0}
    smoke._facts = {"trainer": {"forward_flops": cost}}
    digests = {"trainer": "a", "sampler": "a"}

    def report(**metrics: Any) -> StepReport:
        values = {"loss": 0.1, "grad_norm": 1.0, **metrics}
        return StepReport(values, 0.5, 0.5, 2.0, [4, 6], 0.1, 0.1, 0.5)

    row = smoke._row(1, report(), 0.1, digests, 1.0)
    # Per row n tokens and 1 + ... + n positions, then 2 rows of 2 response tokens; thrice that.
    assert row.mfu_percent == pytest.approx(100 * 3 * ((4 + 10) + (6 + 21) + 4) / 0.5)
    for bad in ({"grad_norm": math.nan}, {"actor/ppo_kl": math.inf}):
        with pytest.raises(SmokeError, match=f"step 2: {next(iter(bad))} is"):
            smoke._row(2, report(**bad), 0.1, digests, 1.0)
    with pytest.raises(SmokeError, match="the optimizer skipped an update"):
        smoke._row(2, report(step_skipped=True), 0.1, digests, 1.0)


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert arctic_rl_c.__version__ in shown and "torch" in shown


def test_a_reader_that_leaves_is_no_error() -> None:
    """As in `doctor | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            command("doctor"),
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=WAIT,
            env={**os.environ, "PYTHONPATH": PACKAGE},
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(("name", "extras"), [("smoke", "local"), ("serve", "local,http")])
def test_what_is_missing_is_said_with_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, extras: str
) -> None:
    monkeypatch.setitem(sys.modules, f"arctic_rl_c.local.{name}", None)
    assert cli.main([name]) == 1
    assert f"{name} needs more than the core package: pip install 'arctic_rl_c[{extras}]'" in (
        capsys.readouterr().err
    )


def test_help_shows_defaults_that_mean_something(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["smoke", "--help"])
    shown = capsys.readouterr().out
    assert "GRPO steps (default: 4)" in shown
    assert "default: None" not in shown and "default: False" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: command"),
        (["dance"], "invalid choice: 'dance'"),
        (["smoke", "--steps", "0"], "must be at least 1, found 0"),
        (["smoke", "--steps", "x"], "must be a whole number, found 'x'"),
        (["serve", "--port", "65536"], "must be 0 to 65535, found 65536"),
        (["serve", "--port", "-1"], "must be 0 to 65535, found -1"),
    ],
)
def test_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_closed_stdout_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["doctor"]) == 0
