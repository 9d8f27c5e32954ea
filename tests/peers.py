# SPDX-License-Identifier: Apache-2.0
"""Other processes for tests: each runs Python statements it is sent, until it is told to stop.

Nothing here sleeps: a peer answers when it is done, and a test that needs a peer to be in the
middle of something asks the control block of the offer, which both sides write to.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nursery

LIMIT = 60.0  # seconds that anything may take before the test is stuck

_LOOP = """
import pickle, sys
import numpy as np
import arctic_rl_c
stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
sys.stdout = sys.stderr
names = {"np": np, "arctic_rl_c": arctic_rl_c}
while True:
    try:
        kind, text, values = pickle.load(stdin)
    except EOFError:
        break
    names.update(values)
    try:
        answer = (True, eval(text, names) if kind == "eval" else exec(text, names))
    except BaseException as error:
        answer = (False, error)
    pickle.dump(answer, stdout)
    stdout.flush()
"""


class Peer:
    """A child process with `np` and `arctic_rl_c` imported."""

    def __init__(self) -> None:
        self.process = nursery.start(_LOOP)
        assert self.eval("1") == 1  # signals from here on reach Python, not its start

    @property
    def pid(self) -> int:
        return self.process.pid

    def start(self, text: str, kind: str = "eval", **values: object) -> None:
        """Send something to run, and do not wait."""
        pickle.dump((kind, text, values), self.process.stdin)
        self.process.stdin.flush()

    def answer(self) -> Any:
        """The result of what was started, or its exception."""
        done, value = pickle.load(self.process.stdout)
        if not done:
            raise value
        return value

    def eval(self, text: str, **values: object) -> Any:
        self.start(text, **values)
        return self.answer()

    def run(self, text: str, **values: object) -> None:
        self.start(text, kind="exec", **values)
        self.answer()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal; SIGKILL also waits for the end."""
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.close()

    def close(self) -> None:
        """End it and let go of its pipes."""
        self.process.stdin.close()
        try:
            self.process.wait(LIMIT)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.process.poll() is None or not self.process.stdout.closed:
            self.close()


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another process does."""
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, "it never happened"
        os.sched_yield()


# ---- what is in shared memory --------------------------------------------------------------------


def shm_files(pid: int | None = None) -> list[Path]:
    """The package's files that a process made; its own by default."""
    wanted = f"{os.getpid() if pid is None else pid:x}"
    return [path for path in Path("/dev/shm").glob("arl-*") if path.name.split("-")[2] == wanted]


class Control:
    """The control block of an offer, as docs/design/weights.md lays it out."""

    FREE, TAKEN, ATTACHED, WRITING, DONE, FAILED = range(6)
    OFFERED, SERVING, SERVED, RELEASED, SENDER_FAILED = range(1, 6)

    def __init__(self, offer: bytes) -> None:
        name = offer[176:240].rstrip(b"\0").decode()
        self.path = Path("/dev/shm") / name.lstrip("/")
        self.file = self.path.open("rb")  # stays readable when the name is gone

    def close(self) -> None:
        self.file.close()

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _number(self, offset: int) -> int:
        return struct.unpack("<I", os.pread(self.file.fileno(), 4, offset))[0]

    @property
    def sender(self) -> int:
        return self._number(64)

    def receiver(self, slot: int) -> int:
        return self._number(704 + 768 * slot)
