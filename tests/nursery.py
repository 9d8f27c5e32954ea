# SPDX-License-Identifier: Apache-2.0
"""Python processes that need not import NumPy and the package anew.

Hundreds of tests start two or three processes each, and a fresh interpreter that imports both
takes 0.4 s, twice that under the sanitizers: minutes of a run. So one process imports them once,
and a child is its fork: as new as a fresh one in all that is per process, since importing reads
no environment variable, opens no library of the GPU and starts no thread. A child whose
environment differs in what only a start can apply (LD_PRELOAD, PYTHONPATH) is a fresh one.
"""

from __future__ import annotations

import io
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

#: `make asan` lets Python take each object from malloc. This process and the children here do so;
#: other programs, which load torch and need twice as long for it that way, are started without.
_MALLOC = {name: os.environ.pop(name) for name in ("PYTHONMALLOC",) if name in os.environ}

_AT_START = ("LD_", "PYTHON", "ASAN_", "UBSAN_", "ARL_", "MALLOC_", "GLIBC_")

_NURSERY = """
import atexit, gc, os, pickle, socket, sys
link = socket.socket(fileno=int(sys.argv[1]))
sys.path.insert(0, sys.argv[2])
import arctic_rl_c, fakes, numpy
gc.freeze()
while True:
    data, descriptors, _, _ = socket.recv_fds(link, 1 << 20, 3)
    if not data:
        sys.exit()
    request = pickle.loads(data)
    if isinstance(request, int):
        link.send(pickle.dumps(os.waitstatus_to_exitcode(os.waitpid(request, 0)[1])))
        continue
    child = os.fork()
    if child == 0:
        break
    for descriptor in descriptors:
        os.close(descriptor)
    link.send(pickle.dumps(child))
link.close()
for number, descriptor in enumerate(descriptors):
    os.dup2(descriptor, number)
    os.close(descriptor)
code, environment, directory = request
os.chdir(directory)
for name in set(os.environ) - set(environment):
    del os.environ[name]
os.environ.update(environment)
sys.argv[:] = ["-c"]
sys.path.remove(sys.path[0])
names = {"__name__": "__main__"}
exec(compile(code, "<string>", "exec"), names)
# The end of an interpreter, but for the modules' own: that takes a fork 0.1 s.
names.clear()
gc.collect()
atexit._run_exitfuncs()
sys.stderr.flush()
os._exit(0)
"""


class _Nursery:
    """The process that forks."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _NURSERY, str(theirs.fileno()), str(Path(__file__).parent)],
                stdin=subprocess.DEVNULL,
                # One thread of BLAS is none besides the one that forks.
                env={**os.environ, **_MALLOC, "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
            )
        self.environment = _applied_at_start(os.environ)

    def ask(self, request: object, *descriptors: int) -> int:
        with self.lock:
            socket.send_fds(self.link, [pickle.dumps(request)], descriptors)
            answer = self.link.recv(1 << 10)
        if not answer:
            raise RuntimeError(f"the nursery ended with {self.process.wait()}")
        number: int = pickle.loads(answer)
        return number


class Child:
    """A forked process, with the part of `subprocess.Popen` that tests use.

    Args:
        code: What it runs, as `python -c` would.
        environment: All of its environment variables.
    """

    returncode: int | None = None

    def __init__(self, nursery: _Nursery, code: str, environment: dict[str, str]) -> None:
        self._nursery = nursery
        read, stdin = os.pipe()
        stdout, write = os.pipe()
        try:
            request = (code, environment, os.getcwd())
            self.pid = nursery.ask(request, read, write, 2)
        except BaseException:
            os.close(stdin)
            os.close(stdout)
            raise
        finally:
            os.close(read)
            os.close(write)
        self.stdin = os.fdopen(stdin, "wb", buffering=0)  # what the child did not take is not kept
        self.stdout: BinaryIO = os.fdopen(stdout, "rb")
        # The nursery, its parent, reaps it when asked to: until then the pid is nobody else's.
        self._pidfd = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a child of the nursery", timeout or 0)
            self.returncode = self._nursery.ask(self.pid)
            os.close(self._pidfd)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_nursery: _Nursery | None = None


def pid() -> int | None:
    """The nursery's own process, which lives as long as this one."""
    return None if _nursery is None else _nursery.process.pid


def descriptor() -> int | None:
    """The socket to it."""
    return None if _nursery is None else _nursery.link.fileno()


def stop() -> None:
    """Let it end, with the tests."""
    global _nursery
    if _nursery is not None:
        _nursery.link.close()
        _nursery.process.wait()
        _nursery = None


def _applied_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_AT_START)}


def start(code: str, environment: dict[str, str] | None = None) -> Child | subprocess.Popen[bytes]:
    """Run code in another process, with pipes to its standard input and output.

    Args:
        code: As for `python -c`.
        environment: Variables besides those of this process.
    """
    global _nursery
    complete = {**os.environ, **(environment or {})}
    if _nursery is None or _nursery.process.poll() is not None:
        _nursery = _Nursery()
    if _applied_at_start(complete) == _nursery.environment:
        return Child(_nursery, code, complete)
    fresh = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=complete,
        bufsize=0,
    )
    fresh.stdout = io.BufferedReader(fresh.stdout)
    return fresh
