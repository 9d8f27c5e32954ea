# SPDX-License-Identifier: Apache-2.0
"""Ends a process when the one that owns it has gone.

Ray ends the actors of an owner that died, as long as Ray itself is there to do so. It may not
be: a driver that is killed takes the cluster that it started with it, and a worker whose raylet
has died notices only when it becomes a child of process 1, which in a container it may not.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_POLL_MILLISECONDS = 1000
#: Containers share it with their host; their PID namespaces tell them apart.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def identify() -> dict[str, Any]:
    """What tells this process from all others, also from a later one with its number."""
    return {
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "machine": _machine(),
        "namespace": os.stat("/proc/self/ns/pid").st_ino,
    }


def _machine() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # sandboxes may have none
        return socket.gethostname()


def _started(pid: int) -> int:
    """When a process started, in clock ticks since the machine did; -1 when it has gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return -1
    return int(text.rpartition(")")[2].split()[19])  # the name before may hold spaces


class Process:
    """Another process of this machine, or this one.

    Args:
        identity: What `identify` gave there.
    """

    def __init__(self, identity: Mapping[str, Any]) -> None:
        self.pid = int(identity["pid"])
        here = identify()
        #: Whether it can be seen from here at all.
        self.visible = all(identity[key] == here[key] for key in ("machine", "namespace"))
        #: Whether it is the one that asks.
        self.is_this = self.visible and self.pid == os.getpid()
        self._fd = -1
        if self.visible:
            try:
                self._fd = os.pidfd_open(self.pid)
            except ProcessLookupError:
                return
            except OSError:  # not in this kernel, or not allowed
                self.visible = False
                return
            # The descriptor holds the number: what is read now is of what it stands for.
            if _started(self.pid) != identity["started"]:
                self.close()

    def gone(self, milliseconds: int = 0) -> bool:
        """Whether it has ended, waiting for that a while. False where it cannot be seen."""
        if not self.visible:
            return False
        if self._fd < 0:
            return True
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(milliseconds))

    def send(self, number: int) -> bool:
        """Send a signal; False when it is not there to get it."""
        if self._fd < 0:
            return False
        try:
            signal.pidfd_send_signal(self._fd, number)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        """Let go of it. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def leave_with(owner: Mapping[str, Any], leave: Callable[[], None]) -> None:
    """Call `leave`, on a thread of its own, when the owner or this process's parent has gone.

    Args:
        owner: The owner's identity. One on another machine is Ray's to look after.
        leave: Ends this process.
    """
    process = Process(owner)
    if process.is_this:
        process.close()
        return
    parent = os.getppid()

    def watch() -> None:
        pause = threading.Event()
        while os.getppid() == parent:
            if process.visible:
                if process.gone(_POLL_MILLISECONDS):
                    break
            else:
                pause.wait(_POLL_MILLISECONDS / 1000)
        leave()

    threading.Thread(target=watch, name="arctic_rl_c owner", daemon=True).start()
