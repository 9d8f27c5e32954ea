# SPDX-License-Identifier: Apache-2.0
"""What this installation is made of, and what it finds on this machine."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys
from typing import Any

from arctic_rl_c._core import _native_config

#: Packages whose versions decide what works with what; none of them is imported.
_PACKAGES = (
    "numpy",
    "torch",
    "transformers",
    "omegaconf",
    "ray",
    "aiohttp",
    "verl",
    "vllm",
    "arctic-platform",
    "arctic-training",
)

#: Variables that change what is found or how it behaves.
_VARIABLES = (
    "ARCTIC_RL_C_CUDA_DRIVER",
    "ARCTIC_RL_C_NCCL",
    "ARCTIC_RL_C_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "NCCL_CUMEM_ENABLE",
    "NCCL_DEBUG",
    "NCCL_SOCKET_IFNAME",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)

_COLUMN = max(map(len, _PACKAGES))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _collect(devices: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "arctic_rl_c": importlib.import_module("arctic_rl_c").__version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }
    return found | _native_config(devices=devices)


def _line(name: str, text: str) -> str:
    return f"{name:<{_COLUMN}} {text}"


def _library(name: str, facts: dict[str, Any]) -> list[str]:
    if not facts["available"]:
        first, *rest = facts["reason"].splitlines()
        return [_line(name, f"not available: {first}"), *(_line("", line) for line in rest)]
    return [_line(name, f"{facts['version']}  {facts['path']}  ({facts['found']})")]


def _device(facts: dict[str, Any]) -> list[str]:
    peers = ", ".join(map(str, facts["peers"])) or "none"
    ipc = "yes" if facts["cuda_ipc"] else f"no: {facts['cuda_ipc_reason']}"
    return [
        _line(f"device {facts['index']}", f"{facts['name']}  {facts['uuid']}"),
        _line(
            "",
            f"compute capability {facts['compute_capability']}, "
            f"{facts['multiprocessors']} multiprocessors, {facts['memory'] / 2**30:.1f} GiB",
        ),
        _line("", f"cuda_ipc: {ipc}; reads the memory of devices: {peers}"),
    ]


def _render(found: dict[str, Any]) -> str:
    build = found["build"]
    kinds = [kind for kind in ("debug", "sanitized", "faults") if build[kind]] or ["release"]
    made = f"({' '.join(kinds)} build, {build['compiler']}, {found['threads']} threads)"
    lines = [
        _line("arctic_rl_c", f"{found['arctic_rl_c']}  {made}"),
        _line("python", found["python"]),
        _line("system", found["system"]),
    ]
    lines += [
        _line(name, version or "not installed") for name, version in found["packages"].items()
    ]
    lines += [f"{name}={value}" for name, value in found["environment"].items()]
    lines += _library("CUDA driver", found["cuda"])
    if found["cuda"]["available"]:
        lines += _library("NCCL", found["nccl"])
    else:
        lines.append(_line("NCCL", "not looked for: it needs the CUDA driver"))
    for device in found.get("devices", []):
        lines += _device(device)
    return "\n".join(lines)


def show_config(*, as_dict: bool = False, devices: bool = True) -> dict[str, Any] | None:
    """Print versions, libraries with path and how they were found, and GPUs.

    With `as_dict=True` return the same as a dict instead. A library that is not usable comes
    with the reason: every path that was tried, what was found, and what to install.

    This starts the CUDA driver in this process, so do not fork workers that use CUDA after it.
    `devices=True` also opens each GPU for a moment, to see whether CUDA IPC works there;
    `devices=False` does not.
    """
    found = _collect(devices)
    if as_dict:
        return found
    print(_render(found))
    return None
