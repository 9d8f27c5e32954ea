# SPDX-License-Identifier: Apache-2.0
"""The child process of a role: reads requests from its socket, runs them, answers.

`RoleProcess` starts it. It ends when its parent closes the socket or dies, whatever it is
doing then.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from arctic_rl_c import WeightSyncError
from arctic_rl_c.local import frames
from arctic_rl_c.local.options import ModelOptions, SamplerOptions, TrainerOptions, from_dict
from arctic_rl_c.local.remote_errors import describe_error

_PR_SET_PDEATHSIG = 1
#: What the parent sends to break off an op.
INTERRUPT = signal.SIGUSR1
#: How long a running op may go on after the parent has gone, so that it can clean up.
_GRACE_SECONDS = 2.0


class Interruption:
    """Lets the parent break off an op that waits for somebody who will not come.

    The parent's signal raises in the main thread, which runs the ops; outside an op that
    allows it, it does nothing.
    """

    def __init__(self) -> None:
        self._allowed = False

    def raise_if_allowed(self, *_: Any) -> None:
        """The signal's handler."""
        if self._allowed:
            self._allowed = False
            raise WeightSyncError("broken off: the other side of the weight sync has failed")

    def run(self, allowed: bool, work: Callable[[], Any]) -> Any:
        """Do some work."""
        try:
            self._allowed = allowed
            return work()
        finally:
            self._allowed = False


def build_role(role: str, options: Mapping[str, Any]) -> Any:
    """The object that serves a role's ops.

    Args:
        role: `trainer` or `sampler`.
        options: `{"model": {...}, "options": {...}}`, see `arctic_rl_c.local.options`.
    """
    model = from_dict(ModelOptions, options["model"])
    if role not in ("trainer", "sampler"):
        raise ValueError(f"role {role!r} is not one of trainer, sampler")
    try:
        # Imported here: each role loads only what it needs, and that takes seconds.
        module = importlib.import_module(f"arctic_rl_c.local.{role}")
    except ImportError as error:
        raise ImportError(
            f"{error}; the embedded {role} needs: pip install 'arctic_rl_c[local]'"
        ) from error
    if role == "trainer":
        return module.Trainer(model, from_dict(TrainerOptions, options["options"]))
    return module.Sampler(model, from_dict(SamplerOptions, options["options"]))


def load_factory(factory: str) -> Callable[[str, Mapping[str, Any]], Any]:
    """The function that `module:name` names."""
    module, _, name = factory.partition(":")
    found: Callable[[str, Mapping[str, Any]], Any] = getattr(importlib.import_module(module), name)
    return found


def run_op(role: Any, op: str, arguments: Mapping[str, Any]) -> Any:
    """Call one of a role's ops by name.

    Raises:
        ValueError: The role has no such op.
    """
    if op not in role.OPS:
        raise ValueError(f"{type(role).__name__} has no op {op!r}")
    return getattr(role, op)(**arguments)


class _Connection:
    """The child's end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.requests: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read_requests(self) -> None:
        """Queue what arrives; None when the parent has closed its end."""
        try:
            while True:
                prefix = self._receive(frames.PREFIX_SIZE)
                header, body = frames.parse_prefix(prefix.data)
                text = self._receive(header)
                self.requests.put(frames.decode(text.data, self._receive(body)))
        except (EOFError, OSError):
            _leave(self.requests)

    def _receive(self, size: int) -> np.ndarray[Any, Any]:
        data = np.empty(size, dtype=np.uint8)
        view, done = data.data, 0
        while done < size:
            count = self._sock.recv_into(view[done:])
            if count == 0:
                raise EOFError
            done += count
        return data

    def send(self, value: Any) -> None:
        """Answer; an answer that has no form in a frame becomes an error."""
        try:
            buffers = frames.encode(value)
        except frames.FrameError as error:
            buffers = frames.encode({"error": describe_error(error)})
        for buffer in buffers:
            self._sock.sendall(buffer)


def _leave(requests: queue.SimpleQueue[Any]) -> None:
    """Let the main thread end in order; end the process if that takes too long."""
    requests.put(None)
    timer = threading.Timer(_GRACE_SECONDS, os._exit, (1,))
    timer.daemon = True
    timer.start()


def _leave_at_sigterm(requests: queue.SimpleQueue[Any]) -> None:
    signal.sigwait({signal.SIGTERM})
    _leave(requests)


def _tie_to_parent(parent: int) -> None:
    """SIGTERM when the thread that started this process ends.

    The closed socket tells the same, unless another child of the parent has inherited its end.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


@contextmanager
def without_collections() -> Iterator[None]:
    """For imports whose modules stay: searching them for garbage takes a sixth of their time.

    What is there at the end is left out of later searches too.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def serve(sock: socket.socket) -> None:
    """Answer requests until the parent has gone. The first one builds the role."""
    connection = _Connection(sock)
    for target in (connection.read_requests, lambda: _leave_at_sigterm(connection.requests)):
        threading.Thread(target=target, daemon=True).start()
    role: Any = None
    request: Any
    work: Any
    answer: Any
    interruption = Interruption()
    signal.signal(INTERRUPT, interruption.raise_if_allowed)
    try:
        while (request := connection.requests.get()) is not None:
            try:
                if role is None:
                    with without_collections():
                        factory = load_factory(request["factory"])
                        role = factory(request["role"], request["options"])
                    answer = {"result": {"pid": os.getpid()}}
                else:
                    work = partial(run_op, role, request["op"], request["arguments"])
                    allowed = request["op"] in role.INTERRUPTIBLE
                    answer = {"result": interruption.run(allowed, work)}
            except Exception as error:
                answer = {"error": describe_error(error)}
            connection.send(answer)
            # Given back now, not when the next request is there too: payloads are large.
            request = work = answer = None
    except OSError:
        pass  # the parent left while it was being answered
    finally:
        if role is not None:
            role.close()


def main(arguments: list[str]) -> None:
    """Entry point of the child process: `FD PARENT_PID`."""
    # Threads started from here on inherit the mask; sigwait then takes SIGTERM. Ctrl-C is the
    # parent's to handle, which closes the socket.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _tie_to_parent(int(arguments[1]))
    with socket.socket(fileno=int(arguments[0])) as sock:
        serve(sock)
