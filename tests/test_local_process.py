# SPDX-License-Identifier: Apache-2.0
"""A role's process: requests, errors, cancellation, and every way to die."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import arctic_rl_c
from arctic_rl_c import PeerLostError, PeerTimeoutError
from arctic_rl_c.local.process import RoleProcess
from arctic_rl_c.local.remote_errors import RemoteTraceback
from arctic_rl_c.local.worker import build_role

WAIT = 60.0


def until(condition: Callable[[], Any], what: str) -> None:
    """Poll for something that another process does; fail after a bound that is never near."""
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, f"waited {WAIT} s for {what}"
        time.sleep(0.005)


@contextlib.contextmanager
def started(**options: Any) -> Iterator[RoleProcess]:
    process = RoleProcess("sampler", options, factory="fake_role:build")
    try:
        yield process
    finally:
        process.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[RoleProcess]:
    with started() as process:
        process.wait_started(WAIT)
        yield process


def ask(process: RoleProcess, op: str, **arguments: Any) -> Any:
    return process.submit(op, **arguments).result(WAIT)


# -- requests ------------------------------------------------------------------------------------


def test_values_come_back(shared: RoleProcess) -> None:
    value = {"t": torch.arange(6).reshape(2, 3), "n": np.ones(3), "p": (1, b"x"), 5: None}
    found = ask(shared, "echo", value=value)
    assert torch.equal(found["t"], value["t"]) and np.array_equal(found["n"], value["n"])
    assert found["p"] == (1, b"x") and found[5] is None


def test_large_messages(shared: RoleProcess) -> None:
    tensors = [torch.full((1 << 12,), i) for i in range(600)]  # more buffers than one call takes
    found = ask(shared, "echo", value=tensors)
    assert all(torch.equal(a, b) for a, b in zip(found, tensors, strict=True))


def test_requests_keep_their_order(shared: RoleProcess) -> None:
    futures = [shared.submit("echo", value=i) for i in range(50)]
    assert [f.result(WAIT) for f in futures] == list(range(50))


def test_the_child_imports_what_its_parent_does(shared: RoleProcess) -> None:
    facts = ask(shared, "environ")
    assert facts["path"] == sys.path and facts["ppid"] == os.getpid()


def test_a_value_without_a_form_harms_nothing(shared: RoleProcess) -> None:
    with pytest.raises(ValueError, match=r"value\.arguments\.value is a builtins\.object"):
        ask(shared, "echo", value=object())
    with pytest.raises(ValueError, match=r"value\.result\.deep is a builtins\.object"):
        ask(shared, "unsendable")
    with pytest.raises(ValueError, match="FakeRole has no op '__init__'"):
        ask(shared, "__init__")
    assert ask(shared, "echo", value=1) == 1


def test_a_cancelled_request_that_waits_never_runs() -> None:
    with started() as process:
        process.wait_started(WAIT)
        os.kill(process.pid or 0, signal.SIGSTOP)
        running = process.submit("echo", value=0)
        until(running.running, "the first request to be sent")
        waiting = process.submit("echo", value=1)
        after = process.submit("count")
        assert waiting.cancel() and not running.cancel()
        os.kill(process.pid or 0, signal.SIGCONT)
        assert after.result(WAIT) == 1


def test_an_op_can_be_broken_off(shared: RoleProcess, tmp_path: Path) -> None:
    shared.interrupt("hold")  # nothing runs: nothing happens
    future = shared.submit("hold", path=str(tmp_path / "mark"))
    until((tmp_path / "mark").exists, "the op to run")
    shared.interrupt("echo")  # another op runs
    assert not future.done()
    shared.interrupt("hold")
    with pytest.raises(arctic_rl_c.WeightSyncError, match="broken off"):
        future.result(WAIT)
    assert ask(shared, "echo", value=1) == 1


# -- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in arctic_rl_c.__all__ if n.endswith("Error")])
def test_own_errors_keep_type_and_attributes(shared: RoleProcess, name: str) -> None:
    with pytest.raises(arctic_rl_c.ArcticError) as caught:
        ask(shared, "fail", kind=name)
    assert type(caught.value) is getattr(arctic_rl_c, name)
    assert str(caught.value) == "as it was" and caught.value.rank == 3
    assert not hasattr(caught.value, "extra")
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "fake_role.py" in str(caught.value.__cause__)


def test_builtin_errors(shared: RoleProcess) -> None:
    with pytest.raises(FileNotFoundError, match="No such file") as caught:
        ask(shared, "fail", kind="os")
    assert caught.value.errno == 2
    with pytest.raises(RuntimeError, match="UnicodeDecodeError: 'utf-8' codec"):
        ask(shared, "fail", kind="unicode")


def test_an_unknown_class_becomes_its_nearest_base(shared: RoleProcess) -> None:
    with pytest.raises(KeyError, match=r"fake_role\.Unheard: 'nobody knows this'"):
        ask(shared, "fail", kind="unheard")


# -- death ---------------------------------------------------------------------------------------


def test_exit_is_told_with_code_and_last_words() -> None:
    with started() as process:
        process.wait_started(WAIT)
        pid = process.pid
        future, waiting = process.submit("leave", code=7), process.submit("echo", value=1)
        with pytest.raises(PeerLostError) as caught:
            future.result(WAIT)
        error: Any = caught.value
        assert f"sampler (pid {pid}) died during 'leave': exit code 7. It is not " in str(error)
        assert "about to leave" in str(error) and "with a last word" in str(error)
        assert (error.role, error.pid, error.exit_code, error.signal) == ("sampler", pid, 7, None)
        assert error.operation == "leave" and error.code == "ARL_ERR_PEER_LOST"
        with pytest.raises(PeerLostError, match="died before 'echo', in 'leave': exit code 7"):
            waiting.result(WAIT)
        with pytest.raises(PeerLostError, match="died before 'count', in 'leave'"):  # later ones
            ask(process, "count")
        assert not process.alive


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_signal_in_the_middle_of_an_op(tmp_path: Path, number: signal.Signals) -> None:
    with started() as process:
        future = process.submit("hold", path=str(tmp_path / "mark"))
        until((tmp_path / "mark").exists, "the op to run")
        os.kill(process.pid or 0, number)
        with pytest.raises(PeerLostError, match=f"during 'hold': killed by {number.name}") as e:
            future.result(WAIT)
        assert e.value.signal == number and e.value.exit_code is None


def test_a_child_that_sends_nonsense_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with started() as process:
        process.wait_started(WAIT)
        monkeypatch.setattr("arctic_rl_c.local.process.frames.decode", lambda *_: 1 / 0)
        with pytest.raises(PeerLostError, match="was given up, its messages make no sense"):
            ask(process, "count")
        assert not psutil.pid_exists(process.pid or 0)


def test_killed_while_it_starts() -> None:
    with started(never=True) as process:
        until(lambda: process.pid, "the process")
        os.kill(process.pid or 0, signal.SIGKILL)
        with pytest.raises(PeerLostError, match="during 'start': killed by SIGKILL"):
            process.wait_started(WAIT)


def test_a_start_that_fails_is_every_requests_error() -> None:
    with started(refuse="no such shape") as process:
        with pytest.raises(ValueError, match="no such shape"):
            process.wait_started(WAIT)
        with pytest.raises(ValueError, match="no such shape"):
            ask(process, "echo", value=1)


def test_a_start_that_takes_too_long() -> None:
    with started(never=True) as process, pytest.raises(PeerTimeoutError, match=r"within 0\.05 s"):
        process.wait_started(0.05)


def test_closing_is_orderly_and_idempotent(tmp_path: Path) -> None:
    with started(farewell=str(tmp_path / "farewell")) as process:
        process.wait_started(WAIT)
        pid = process.pid or 0
        process.close()
        process.close()
        assert not psutil.pid_exists(pid)
        assert (tmp_path / "farewell").read_text() == "closed in order"
        with pytest.raises(PeerLostError, match=f"pid {pid}\\) was shut down before 'count'"):
            ask(process, "count")


def test_closing_in_the_middle_of_an_op(tmp_path: Path) -> None:
    with started() as process:
        future = process.submit("hold", path=str(tmp_path / "mark"))
        until((tmp_path / "mark").exists, "the op to run")
        process.close()
        with pytest.raises(PeerLostError, match="was shut down during 'hold'"):
            future.result(WAIT)


def test_closing_one_that_is_stopped() -> None:
    with started() as process:
        process.wait_started(WAIT)
        os.kill(process.pid or 0, signal.SIGSTOP)
        process.close(timeout=0.1)
        assert not psutil.pid_exists(process.pid or 0)


def test_output_is_gathered(shared: RoleProcess, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", logger="arctic_rl_c.local.sampler"):
        ask(shared, "say", text="hello from the child")
        until(lambda: "hello from the child" in caplog.text, "the child's output")


def test_a_forked_process_is_refused(shared: RoleProcess) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            shared.submit("count")
        except arctic_rl_c.WrongProcessError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        assert "a forked process cannot use it" in file.read()
    os.waitpid(child, 0)
    assert ask(shared, "echo", value=2) == 2


PARENT = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from arctic_rl_c.local.process import RoleProcess

if __name__ == "__main__":
    process = RoleProcess("sampler", {}, factory="fake_role:build")
    process.wait_started(60)
    if sys.argv[2] == "busy":
        process.submit("hold", path=sys.argv[3])
        while not os.path.exists(sys.argv[3]):
            time.sleep(0.005)
    print(process.pid, flush=True)
    if sys.argv[2] != "leave":
        time.sleep(600)
"""


@pytest.mark.parametrize(
    ("mode", "number"),
    [("idle", signal.SIGKILL), ("busy", signal.SIGKILL), ("busy", signal.SIGINT), ("leave", None)],
)
def test_children_do_not_outlive_their_parent(
    tmp_path: Path, mode: str, number: signal.Signals | None
) -> None:
    tests = str(Path(__file__).parent)
    package = str(Path(arctic_rl_c.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": package}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, tests, mode, str(tmp_path / "mark")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        if number is not None:
            parent.send_signal(number)
        parent.wait(WAIT)
        with contextlib.suppress(psutil.NoSuchProcess):
            child.wait(WAIT)
        assert not child.is_running()


def test_a_payload_is_given_back_before_the_next_arrives(
    shared: RoleProcess, tmp_path: Path
) -> None:
    path = tmp_path / "given back"
    shared.submit("watch", value=np.ones(1 << 16), path=str(path)).result(WAIT)
    until(path.exists, "the payload to be given back")


# -- event loops ---------------------------------------------------------------------------------


def test_several_event_loops(shared: RoleProcess) -> None:
    async def main(value: int) -> list[int]:
        futures = [shared.submit("echo", value=value + i) for i in range(5)]
        return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(asyncio.run, main(100 * i)) for i in range(4)]
        assert [r.result(WAIT) for r in runs] == [[100 * i + j for j in range(5)] for i in range(4)]


@pytest.mark.parametrize("role", ["trainer", "sampler"])
def test_a_role_without_its_packages_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    monkeypatch.setitem(sys.modules, f"arctic_rl_c.local.{role}", None)
    with pytest.raises(ImportError) as caught:
        build_role(role, {"model": {}, "options": {}})
    needed = f"; the embedded {role} needs: pip install 'arctic_rl_c[local]'"
    assert str(caught.value).endswith(needed)


def test_there_are_two_roles() -> None:
    with pytest.raises(ValueError, match="role 'critic' is not one of trainer, sampler"):
        build_role("critic", {"model": {}, "options": {}})
