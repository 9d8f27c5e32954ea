# SPDX-License-Identifier: Apache-2.0
"""The thread pool behind the kernels: counts, forks, several callers, the GIL, the end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import arctic_rl_c

ROOT = Path(__file__).resolve().parent.parent
COMPILER = os.environ.get("CC", "cc").split()

# A batch that is split (some 9 MB of output), its answer, and a function that compares.
PRELUDE = """
import os, signal, sys, threading
import numpy as np
import arctic_rl_c
lengths = np.arange(600) + 200
offsets = np.concatenate([[0], np.cumsum(2 * lengths)])
values = np.arange(offsets[-1])
def pad():
    return arctic_rl_c.pad_prompt_response((values, offsets), lengths, lengths, pad_value=-1)[0]
wanted = pad()
def check():
    assert np.array_equal(pad(), wanted)
"""


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PRELUDE + code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **env},
    )


def fine(run: subprocess.CompletedProcess[str], said: str = "") -> None:
    assert (run.returncode, run.stdout, run.stderr) == (0, said, "")


# ---- in the interpreter -------------------------------------------------------------------------


def test_children_work_after_fork() -> None:
    """A child has none of its parent's threads; it makes its own and ends cleanly."""
    fine(
        python(
            """
for way in (os._exit, sys.exit):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        check()
        way(0)
    assert os.waitpid(child, 0)[1] == 0
check()
""",
            ARCTIC_RL_C_THREADS="4",
        )
    )


def test_children_of_a_busy_parent_work() -> None:
    """Forked while other threads are inside the kernels, with their locks held."""
    fine(
        python(
            """
busy = True
def work():
    while busy:
        check()
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
try:
    for _ in range(8):
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            check()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
finally:
    busy = False
for thread in threads:
    thread.join()
""",
            ARCTIC_RL_C_THREADS="3",
        )
    )


def test_several_callers_at_once() -> None:
    fine(
        python(
            """
wrong = []
def work():
    for _ in range(10):
        if not np.array_equal(pad(), wanted):
            wrong.append(1)
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not wrong
""",
            ARCTIC_RL_C_THREADS="3",
        )
    )


def test_exit_with_a_caller_still_inside() -> None:
    """A daemon thread that is in a kernel while the interpreter ends must not hang or crash."""
    fine(
        python(
            """
inside = threading.Event()
def work():
    while True:
        inside.set()
        pad()
threading.Thread(target=work, daemon=True).start()
inside.wait(60)
""",
            ARCTIC_RL_C_THREADS="2",
        )
    )


def test_the_gil_is_released_while_bytes_move() -> None:
    """With a switch interval of ever, another thread can only run if the kernel lets it."""
    ran, waiting, go = threading.Event(), threading.Event(), threading.Lock()

    def other() -> None:
        waiting.set()
        with go:
            ran.set()

    values = np.zeros((2000, 512))
    interval = sys.getswitchinterval()
    go.acquire()
    thread = threading.Thread(target=other)
    thread.start()
    waiting.wait(60)
    try:
        sys.setswitchinterval(1000.0)
        go.release()
        for _ in range(200):
            arctic_rl_c.left_pad(values, 1024)
            if ran.is_set():
                break
        seen = ran.is_set()
    finally:
        sys.setswitchinterval(interval)
    thread.join(60)
    assert seen


# ---- how many -----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["1", "2", "7", "256"])
def test_the_variable_rules(number: str) -> None:
    code = "check()\nprint(arctic_rl_c.thread_count())"
    fine(python(code, ARCTIC_RL_C_THREADS=number), number + "\n")


@pytest.mark.parametrize("text", ["0", "-1", "257", "two", "2.0", "2 ", "99999999999999999999"])
def test_a_malformed_variable_is_an_error(text: str) -> None:
    """At the first call, not at import; and small batches say so as well as large ones."""
    code = """
import arctic_rl_c
for call in (
    arctic_rl_c.thread_count,
    lambda: arctic_rl_c.pad_prompt_response(([1], [0, 1]), [0], [1]),
    lambda: arctic_rl_c.pad_prompt_response((np.ones(1), np.array([0, 1])), [0], [1]),
    lambda: arctic_rl_c.left_pad(np.ones((1, 1)), 2),
):
    try:
        call()
    except arctic_rl_c.PayloadError:
        print("payload")
    except arctic_rl_c.ConfigError as error:
        print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", "import numpy as np\n" + code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "ARCTIC_RL_C_THREADS": text},
    )
    words = f'ARCTIC_RL_C_THREADS is "{text}"; set a number from 1 to 256, or unset it'
    assert run.stdout.splitlines() == [words, "payload", words, words]
    assert (run.returncode, run.stderr) == (0, "")


def test_no_more_threads_than_cores() -> None:
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, arctic_rl_c\n"
            "os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
            "print(arctic_rl_c.thread_count())",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "ARCTIC_RL_C_THREADS": ""},
    )
    assert (run.stdout, run.stderr) == ("1\n", "")


# ---- the pool alone -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pool and its small main, compiled without Python."""
    if shutil.which(COMPILER[0]) is None:
        pytest.skip(f"waived: no C compiler ({COMPILER[0]})")
    path = tmp_path_factory.mktemp("cunit") / "threads_main"
    sources = ["tests/cunit/threads_main.c", "csrc/core/arl_threads.c", "csrc/core/arl_status.c"]
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]
    command = [*COMPILER, *flags, "-Icsrc", *sources, "-o", str(path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return path


def run_program(program: Path, *args: str, **env: str) -> str:
    run = subprocess.run(
        [str(program), *args],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": os.environ["PATH"], **env},
    )
    assert (run.returncode, run.stderr) == (0, ""), run.stdout
    return run.stdout.strip()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_row_is_done_once(program: Path, threads: int) -> None:
    said = run_program(program, "run", ARCTIC_RL_C_THREADS=str(threads))
    assert said == f"threads {threads} wrong 0"


@pytest.mark.parametrize(
    ("files", "group", "cpus"),
    [
        ({}, "/a/b", 0),
        ({"a/b/cpu.max": "max 100000"}, "/a/b", 0),
        ({"a/b/cpu.max": "150000 100000"}, "/a/b", 2),
        ({"a/b/cpu.max": "400000 100000", "a/cpu.max": "300000 100000"}, "/a/b", 3),
        ({"cpu.max": "50000 100000"}, "/", 1),
        ({"cpu.max": "200000 100000"}, "/a/b", 2),
        ({"cpu.max": "nonsense"}, "/", 0),
        ({"cpu.max": "-1 0"}, "/", 0),
        ({"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, "/", 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "/", 0),
        ({"cpu/cpu.cfs_quota_us": "250000"}, "/", 0),
    ],
)
def test_quotas_of_control_groups(
    program: Path, tmp_path: Path, files: dict[str, str], group: str, cpus: int
) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    membership = tmp_path / "membership"
    membership.write_text(f"4:memory:/x\n0::{group}\n")
    assert run_program(program, "quota", str(tmp_path), str(membership)) == str(cpus)
    missing = str(tmp_path / "none")
    assert run_program(program, "quota", missing, missing) == "0"
