# SPDX-License-Identifier: Apache-2.0
"""Processes that end when their owner or their parent has gone; no Ray is needed for these."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from arctic_rl_c.transports import ray_watch
from arctic_rl_c.transports.ray_watch import Process, identify, leave_with

SLEEPER = "import sys; print('up', flush=True); sys.stdin.read()"
ACTOR = """
import json, os, sys, time
from arctic_rl_c.transports.ray_watch import leave_with
leave_with(json.loads(sys.argv[1]), lambda: os._exit(7))
print(os.getpid(), flush=True)
sys.stdin.read()
"""
#: Starts ACTOR, says its number, and waits for a signal.
PARENT = """
import subprocess, sys
actor = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
print(actor.stdout.readline(), flush=True)
sys.stdin.read()
"""
SECONDS = 60.0


def start(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        text=True,
    )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    with start(SLEEPER) as process:
        assert line_of(process) == "up"
        yield process
        process.kill()


def identity_of(pid: int) -> dict[str, Any]:
    return {**identify(), "pid": pid, "started": ray_watch._started(pid)}


def test_a_process_is_seen_to_end(other: subprocess.Popen[str]) -> None:
    identity = identity_of(other.pid)
    process = Process(identity)
    assert process.visible and not process.is_this and not process.gone()
    assert process.send(0)
    other.kill()
    assert process.gone(int(SECONDS * 1000))
    other.wait()
    assert not process.send(signal.SIGUSR1)
    process.close()
    process.close()
    late = Process(identity)
    assert late.visible and late.gone() and not late.send(0)


def test_a_number_that_was_given_again_is_another_process(other: subprocess.Popen[str]) -> None:
    identity = identity_of(other.pid)
    earlier = Process({**identity, "started": identity["started"] - 1})
    assert earlier.gone() and not earlier.send(signal.SIGKILL)
    assert other.poll() is None


@pytest.mark.parametrize("key", ["machine", "namespace"])
def test_what_cannot_be_seen_is_not_judged(key: str) -> None:
    far = Process({**identify(), key: "elsewhere"})
    assert not far.visible and not far.is_this and not far.gone() and not far.send(0)


def test_this_process_is_not_watched() -> None:
    leave_with(identify(), lambda: pytest.fail("it left"))
    here = Process(identify())
    assert here.is_this
    here.close()


def test_it_leaves_with_its_owner(other: subprocess.Popen[str]) -> None:
    with start(ACTOR, json.dumps(identity_of(other.pid))) as actor:
        assert int(line_of(actor)) == actor.pid
        other.kill()
        assert actor.wait(SECONDS) == 7


@pytest.mark.parametrize("far", [False, True])
def test_it_leaves_with_its_parent(other: subprocess.Popen[str], far: bool) -> None:
    owner = identity_of(other.pid)
    if far:
        owner["machine"] = "elsewhere"
    with start(PARENT, sys.executable, "-c", ACTOR, json.dumps(owner)) as parent:
        actor = Process(identity_of(int(line_of(parent))))
        assert not actor.gone()
        parent.kill()
        assert actor.gone(int(SECONDS * 1000))
        actor.close()


def test_without_descriptors_of_processes_it_is_rays_to_judge(
    monkeypatch: pytest.MonkeyPatch, other: subprocess.Popen[str]
) -> None:
    def refuse(pid: int) -> int:
        raise OSError("not in this kernel")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    process = Process(identity_of(other.pid))
    assert not process.visible and not process.gone() and not process.send(0)


def test_a_machine_without_a_boot_id_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_watch, "_BOOT_ID", ray_watch.Path("/no/such/file"))
    assert identify()["machine"] == socket.gethostname()
