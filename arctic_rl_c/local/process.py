# SPDX-License-Identifier: Apache-2.0
"""A role in a process of its own, and the thread of this process that looks after it.

The thread starts the child, carries requests and answers over a socket pair, gathers what the
child prints, and notices its end at once. Callers get `concurrent.futures.Future` objects, so
plain threads and any event loop can wait for the same role.

One request is with the child at a time. A request that is cancelled before it was sent never
runs; one that was sent runs to its end, and its answer is dropped.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from arctic_rl_c import PeerLostError, PeerTimeoutError, WrongProcessError
from arctic_rl_c.local import frames
from arctic_rl_c.local.options import ROLE_FACTORY
from arctic_rl_c.local.remote_errors import rebuild_error
from arctic_rl_c.local.worker import INTERRUPT

_TAIL_BYTES = 16384
_SOCKET_BYTES = 1 << 20
_MAX_BUFFERS = 256  # well below IOV_MAX
_POLL_SECONDS = 1.0
_REMEDY = (
    "It is not started again, as its weights are gone: shut this down, start a new one, and load "
    "the last checkpoint"
)
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from arctic_rl_c.local.worker import main; main(sys.argv[2:])"
)

_live: weakref.WeakSet[RoleProcess] = weakref.WeakSet()


@dataclass
class _Request:
    op: str
    message: Any
    future: Future[Any] = field(default_factory=Future)


class RoleProcess:
    """A trainer or sampler in a child process.

    Args:
        role: `trainer` or `sampler`.
        options: `{"model": {...}, "options": {...}}`, see `arctic_rl_c.local.options`.
        factory: `module:function` that builds the role from these two in the child.
    """

    def __init__(
        self,
        role: str,
        options: Mapping[str, Any],
        *,
        factory: str = ROLE_FACTORY,
    ) -> None:
        self.role = role
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._queue: deque[_Request] = deque()
        self._current: _Request | None = None
        self._closing = False
        self._lost: str | None = None
        self._lost_in: str | None = None
        self._start_error: Exception | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._tail = bytearray()
        self._outgoing: deque[memoryview] = deque()
        self._incoming = _FrameReader()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._log = logging.getLogger(f"arctic_rl_c.local.{role}")
        self._started = _Request(
            "start", {"role": role, "options": dict(options), "factory": factory}
        )
        self._queue.append(self._started)
        # The thread that starts the child must live as long as the child: the kernel tells a
        # child of its parent's death when the starting thread ends.
        self._thread = threading.Thread(target=self._run, name=f"arctic_rl_c {role}", daemon=True)
        self._thread.start()
        _live.add(self)

    @property
    def pid(self) -> int | None:
        """The child's process id; None before it was started."""
        return None if self._process is None else self._process.pid

    @property
    def current(self) -> str | None:
        """The op that is with the child, `start` until it has built its role; None when idle."""
        with self._lock:
            return None if self._current is None else self._current.op

    @property
    def alive(self) -> bool:
        """Whether the child can be asked."""
        return self._lost is None and not self._closing

    def wait_started(self, timeout: float) -> dict[str, Any]:
        """Wait until the role's model is loaded.

        Raises:
            PeerTimeoutError: That took longer than `timeout` seconds.
            PeerLostError: The child died.
        """
        try:
            return dict(self._started.future.result(timeout))
        except (TimeoutError, FutureTimeoutError):  # one class from Python 3.11 on
            if self._started.future.done():
                raise  # the role's own
            raise PeerTimeoutError(
                f"{self.role} did not load its model within {timeout:g} s"
            ) from None

    def submit(self, op: str, **arguments: Any) -> Future[Any]:
        """Ask for an op.

        Args:
            op: One of the role's `OPS`.
            arguments: Its keyword arguments.

        Returns:
            A future with the op's result, what the op raised, or PeerLostError when the child
            is not there to answer.
        """
        if os.getpid() != self._owner:
            raise WrongProcessError(
                f"the {self.role} belongs to process {self._owner}; a forked process cannot use it"
            )
        request = _Request(op, {"op": op, "arguments": arguments})
        with self._lock:
            if self._lost is None and not self._closing:
                self._queue.append(request)
                os.eventfd_write(self._wake, 1)
                return request.future
        request.future.set_exception(self._lost_error(op, begun=False))
        return request.future

    def interrupt(self, op: str) -> None:
        """Break off an op that is with the child, if the role allows that; its future fails.

        Does nothing when another op runs, or none.
        """
        with self._lock:
            if self._current is not None and self._current.op == op and self._process is not None:
                self._process.send_signal(INTERRUPT)  # which knows when the child is gone

    def close(self, timeout: float = 5.0) -> None:
        """End the child and wait for it: in order when it is idle, by force after `timeout`.

        Requests that are still open fail with PeerLostError. Idempotent.
        """
        if os.getpid() != self._owner:
            return
        self.request_close()
        self._thread.join(timeout)
        if self._thread.is_alive() and self._process is not None:
            self._process.kill()
            self._thread.join()
        with self._lock:
            if self._wake >= 0:
                os.close(self._wake)
                self._wake = -1
        _live.discard(self)

    def request_close(self) -> None:
        """Let the child leave, without waiting for it."""
        with self._lock:
            if not self._closing and self._wake >= 0:
                os.eventfd_write(self._wake, 1)
            self._closing = True

    # -- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        ours, theirs = socket.socketpair()
        with ours:
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                ours.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
                theirs.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
            try:
                with theirs:
                    self._process = _start_child(theirs.fileno())
            except OSError as error:
                self._end(f"could not be started: {error}")
                return
            ours.setblocking(False)
            assert self._process.stdout is not None
            with self._process.stdout as output:
                os.set_blocking(output.fileno(), False)
                try:
                    reason = self._exchange(ours, output.fileno())
                except Exception as error:  # whatever it is, nobody may wait for ever
                    reason = f"was given up, its messages make no sense ({error!r})"
                # Closing the socket is what tells the child to leave.
                ours.close()
                self._reap()
                self._read_output(output.fileno())
        self._end(reason)

    def _exchange(self, sock: socket.socket, output: int) -> str:
        """Carry requests and answers until the child or the owner wants to end; says why."""
        with selectors.DefaultSelector() as selector:
            selector.register(sock, selectors.EVENT_READ)
            selector.register(output, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while True:
                if self._closing:
                    return "was shut down"
                if self._start_error is not None:
                    return "could not start"
                self._next_request()
                try:
                    self._write(sock)
                    interest = selectors.EVENT_READ
                    if self._outgoing:
                        interest |= selectors.EVENT_WRITE
                    selector.modify(sock, interest)
                    ready = {key.fileobj for key, _ in selector.select(_POLL_SECONDS)}
                    if output in ready and not self._read_output(output):
                        selector.unregister(output)
                    if self._wake in ready:
                        os.eventfd_read(self._wake)
                    if sock in ready:
                        for answer in self._incoming.read(sock):
                            self._answer(answer)
                except (EOFError, OSError):
                    return "died"
                assert self._process is not None
                if not ready and self._process.poll() is not None:
                    return "died"

    def _next_request(self) -> None:
        """Encode the next request that is still wanted, if the child is free."""
        while self._current is None:
            with self._lock:
                if not self._queue:
                    return
                request = self._queue.popleft()
            if not request.future.set_running_or_notify_cancel():
                continue
            try:
                self._outgoing.extend(frames.encode(request.message))
            except Exception as error:
                request.future.set_exception(error)
                continue
            self._current = request

    def _write(self, sock: socket.socket) -> None:
        while self._outgoing:
            batch = [self._outgoing[i] for i in range(min(_MAX_BUFFERS, len(self._outgoing)))]
            try:
                sent = sock.sendmsg(batch)
            except BlockingIOError:
                return
            while self._outgoing and sent >= self._outgoing[0].nbytes:
                sent -= self._outgoing.popleft().nbytes
            if sent:
                self._outgoing[0] = self._outgoing[0][sent:]

    def _answer(self, answer: dict[str, Any]) -> None:
        with self._lock:
            request, self._current = self._current, None
        assert request is not None
        if "error" in answer:
            error = rebuild_error(answer["error"])
            if request is self._started:
                self._start_error = error
            request.future.set_exception(error)
        else:
            request.future.set_result(answer["result"])

    def _read_output(self, output: int) -> bool:
        """Gather what the child has printed; False at its end."""
        while True:
            try:
                data = os.read(output, 65536)
            except BlockingIOError:
                return True
            if not data:
                return False
            for line in data.decode(errors="replace").splitlines():
                self._log.debug("%s", line)
            self._tail += data
            del self._tail[:-_TAIL_BYTES]

    def _reap(self) -> None:
        assert self._process is not None
        try:
            self._process.wait(4.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _end(self, reason: str) -> None:
        """Fail what is open; later requests fail the same way."""
        with self._lock:
            self._lost = reason
            current = self._current
            self._lost_in = None if current is None else current.op
            pending = [current] if current is not None else []
            pending += list(self._queue)
            self._queue.clear()
            self._current = None
        for request in pending:
            error = self._lost_error(request.op, begun=request is current)
            if request.future.running() or request.future.set_running_or_notify_cancel():
                request.future.set_exception(error)

    def _lost_error(self, op: str, *, begun: bool) -> Exception:
        """What a request gets when the child is not there to answer.

        That is what kept the role from starting, or a PeerLostError that names the role, its
        process, how it ended, the op, and whether the child had that or ended before.
        """
        if self._start_error is not None:
            return self._start_error
        code = None if self._process is None else self._process.returncode
        reason = self._lost or "was shut down"
        text = f"{self.role} (pid {self.pid}) {reason} {'during' if begun else 'before'} {op!r}"
        if not begun and self._lost_in is not None:
            text += f", in {self._lost_in!r}"
        number = -code if code is not None and code < 0 else None
        if number is not None:
            text += f": killed by {signal.Signals(number).name}"
        elif code is not None and reason == "died":
            text += f": exit code {code}"
        if reason == "died":
            text += f". {_REMEDY}"
        tail = self._tail.decode(errors="replace").strip()
        if tail and reason != "was shut down":
            text += "\nits last output:\n" + tail[-2000:]
        error = PeerLostError(text)
        for name, value in (
            ("code", "ARL_ERR_PEER_LOST"),
            ("operation", op),
            ("rank", None),
            ("domain", "none"),
            ("foreign", 0),
            ("role", self.role),
            ("pid", self.pid),
            ("exit_code", code if code is not None and code >= 0 else None),
            ("signal", number),
        ):
            setattr(error, name, value)
        return error


class _FrameReader:
    """Frames from a non-blocking socket, read straight into the memory they stay in."""

    def __init__(self) -> None:
        self._stage = 0
        self._parts: list[np.ndarray[Any, Any]] = []
        self._expect(frames.PREFIX_SIZE)

    def _expect(self, size: int) -> None:
        self._data = np.empty(size, dtype=np.uint8)
        self._done = 0

    def read(self, sock: socket.socket) -> list[Any]:
        """The values of all frames that are complete.

        Raises:
            EOFError: The other side closed the socket.
        """
        values: list[Any] = []
        while True:
            while self._done < len(self._data):
                try:
                    count = sock.recv_into(self._data.data[self._done :])
                except BlockingIOError:
                    return values
                if count == 0:
                    raise EOFError
                self._done += count
            if self._stage == 0:
                self._sizes = frames.parse_prefix(self._data.data)
            else:
                self._parts.append(self._data)
            if self._stage == 2:
                values.append(frames.decode(self._parts[0].data, self._parts[1]))
                self._parts = []
            self._stage = (self._stage + 1) % 3
            self._expect(frames.PREFIX_SIZE if self._stage == 0 else self._sizes[self._stage - 1])


def _start_child(descriptor: int) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    environment.setdefault("HF_HUB_OFFLINE", "1")  # models come from disk; never wait for a network
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    # The roles take turns on the same cores: threads that spin while they wait take the other's.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return subprocess.Popen(
        # The child imports exactly what its parent would.
        [sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path), str(descriptor), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(descriptor,),
        env=environment,
    )


@atexit.register
def _close_all() -> None:
    """Leave no child behind, also when nobody called `close`."""
    for process in list(_live):
        with contextlib.suppress(Exception):
            process.close(timeout=1.0)
