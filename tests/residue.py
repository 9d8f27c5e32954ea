# SPDX-License-Identifier: Apache-2.0
"""What a process holds of the system: descriptors, children, shared memory. And its build."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nursery

#: Kinds of descriptor that a leaking transport would leave. Plain files and devices are left
#: out: libraries open those lazily and keep them (fonts, /dev/urandom, tokenizers).
_KINDS = ("socket:", "pipe:", "anon_inode:", "/memfd:", "/dev/shm/")

#: Start of the name of every shared memory file this package makes.
SHM_PREFIX = "arl"


def _long_lived() -> set[int | None]:
    """Descriptors of helpers that live as long as this process: multiprocessing's and ours."""
    found = {nursery.descriptor()}
    for name in ("resource_tracker", "forkserver"):
        module = sys.modules.get(f"multiprocessing.{name}")
        helper = getattr(module, f"_{name}", None)
        for field in ("_fd", "_forkserver_alive_fd"):
            if isinstance(number := getattr(helper, field, None), int):
                found.add(number)
    return found


def _long_lived_pids() -> set[int | None]:
    found = {nursery.pid()}
    for name in ("resource_tracker", "forkserver"):
        module = sys.modules.get(f"multiprocessing.{name}")
        helper = getattr(module, f"_{name}", None)
        for field in ("_pid", "_forkserver_pid"):
            if isinstance(number := getattr(helper, field, None), int):
                found.add(number)
    return found


def descriptors() -> set[str]:
    """Open descriptors of the kinds above, as "fd 7 (socket:[123])"."""
    found = set()
    skip = _long_lived()
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:  # the listing's own descriptor
            continue
        if target.startswith(_KINDS) and int(entry) not in skip:
            found.add(f"fd {entry} ({target})")
    return found


def children() -> set[str]:
    """Direct children, zombies included, as "process 123"."""
    skip = _long_lived_pids()
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except OSError:  # the thread ended meanwhile
            continue
        found |= {f"process {pid}" for pid in pids if int(pid) not in skip}
    return found


def shared_memory() -> set[str]:
    """Files of this package in /dev/shm that belong to this process or to nobody alive.

    The owner's pid is the third part of a name; see csrc/transport/arl_shm.c.
    """
    found = set()
    for entry in Path("/dev/shm").glob(f"{SHM_PREFIX}*"):
        parts = entry.name.split("-")
        owner = int(parts[2], 16) if len(parts) == 5 else os.getpid()
        if owner == os.getpid() or not Path(f"/proc/{owner}").exists():
            found.add(str(entry))
    return found


def snapshot() -> set[str]:
    return descriptors() | children() | shared_memory()


def is_sanitized(path: str) -> bool:
    """Whether a shared object asks for AddressSanitizer's runtime."""
    return b"__asan_init" in Path(path).read_bytes()
