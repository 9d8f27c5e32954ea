# SPDX-License-Identifier: Apache-2.0
"""Other processes that use the fakes, told what to do from a test.

A peer is a process (see nursery.py) that runs statements in a namespace of its own, one after the
other, and sends back what they leave in `result`. It ends with its pipe, so a test that fails
leaves none behind; every wait has a limit.

    with Peer(environment) as peer:
        peer.run("import os; result = os.getpid()")
        waiting = peer.start("receiver.pull(offer)", offer=offer)
        waiting.result()
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import struct
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nursery

SECONDS = 60
TESTS = Path(__file__).resolve().parents[1]

CHILD = """
import os, pickle, struct, sys
sys.path[:0] = {paths!r}
source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(2, 1)
scope = {{"__name__": "peer"}}
while header := source.read(8):
    code, values = pickle.loads(source.read(struct.unpack("<Q", header)[0]))
    scope.update(values)
    scope["result"] = None
    try:
        exec(compile(code, "<peer>", "exec"), scope)
        answer = (True, scope["result"])
        data = pickle.dumps(answer)
    except BaseException as error:
        names = [c.__name__ for c in type(error).__mro__]
        data = pickle.dumps((False, (names, str(error), getattr(error, "code", None))))
    sink.write(struct.pack("<Q", len(data)) + data)
    sink.flush()
"""


class PeerError(Exception):
    """What a statement raised in the peer: the names of its class and bases, and its text."""

    def __init__(self, names: list[str], text: str, code: Any) -> None:
        super().__init__(f"{names[0]}: {text}")
        self.names, self.text, self.code = names, text, code


class PeerDied(Exception):
    """The peer ended before it answered."""


class Pending:
    """A statement that is running."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    def result(self, seconds: float = SECONDS) -> Any:
        """Wait for the statement; return what it left in `result`, or raise PeerError."""
        ok, value = self.peer.receive(seconds)
        if not ok:
            raise PeerError(*value)
        return value


class Peer:
    """Another Python process, one statement at a time."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        paths = [str(TESTS), *(p for p in os.environ.get("PYTHONPATH", "").split(":") if p)]
        self.process = nursery.start(CHILD.format(paths=paths), dict(environment or {}))

    @property
    def pid(self) -> int:
        return self.process.pid

    def start(self, code: str, **values: Any) -> Pending:
        """Begin a statement, with `values` put into the peer's namespace first."""
        data = pickle.dumps((code, values))
        assert self.process.stdin is not None
        self.process.stdin.write(struct.pack("<Q", len(data)) + data)
        return Pending(self)

    def run(self, code: str, **values: Any) -> Any:
        """Run a statement to its end."""
        return self.start(code, **values).result()

    def _read(self, size: int, until: float) -> bytearray:
        assert self.process.stdout is not None
        data = bytearray()  # a pipe gives 64 KiB at a time
        while len(data) < size:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise TimeoutError("the peer does not answer")
            piece = os.read(self.process.stdout.fileno(), size - len(data))
            if not piece:
                raise PeerDied(f"the peer ended with {self.process.wait(SECONDS)}")
            data += piece
        return data

    def receive(self, seconds: float) -> tuple[bool, Any]:
        until = time.monotonic() + seconds
        (size,) = struct.unpack("<Q", self._read(8, until))
        answer: tuple[bool, Any] = pickle.loads(self._read(size, until))
        return answer

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End it from outside, and wait until it is gone."""
        self.process.send_signal(number)
        self.process.wait(SECONDS)

    def leave(self) -> None:
        """Let it end by itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def close(self) -> None:
        """Let it end by itself; kill it if it does not."""
        assert self.process.stdout is not None
        self.leave()
        try:
            self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self.process.stdout.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
