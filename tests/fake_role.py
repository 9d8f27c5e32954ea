# SPDX-License-Identifier: Apache-2.0
"""A role without a model, to try the process plumbing with."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

import arctic_rl_c


class Unheard(KeyError):
    """An exception class that the parent does not have."""


class FakeRole:
    OPS = frozenset({"echo", "fail", "leave", "say", "unsendable", "hold", "count", "environ"})

    def __init__(self, options: Mapping[str, Any]) -> None:
        if "refuse" in options:
            raise ValueError(options["refuse"])
        if "never" in options:
            time.sleep(600)
        self._options, self._calls = options, 0

    def echo(self, value: Any) -> Any:
        self._calls += 1
        return value

    def count(self) -> int:
        return self._calls

    def fail(self, kind: str) -> None:
        if kind == "unheard":
            raise Unheard("nobody knows this")
        if kind == "os":
            raise FileNotFoundError(2, "No such file", "/nowhere")
        if kind == "unicode":
            b"\xff".decode()
        error = getattr(arctic_rl_c, kind)("as it was")
        error.rank, error.extra = 3, [object()]
        raise error

    def leave(self, code: int) -> None:
        print("about to leave", flush=True)
        sys.stderr.write("with a last word\n")
        sys.stderr.flush()
        os._exit(code)

    def say(self, text: str) -> None:
        print(text, flush=True)

    def unsendable(self) -> Any:
        return {"deep": [object()]}

    def hold(self, path: str) -> None:
        """Show that it runs, then wait to be killed (for at most ten minutes)."""
        with open(path, "w") as file:
            file.write("running")
        time.sleep(600)

    def environ(self) -> dict[str, Any]:
        return {"path": sys.path, "ppid": os.getppid(), "dtype": np.dtype("int8").name}

    def close(self) -> None:
        if "farewell" in self._options:
            with open(self._options["farewell"], "w") as file:
                file.write("closed in order")


def build(role: str, options: Mapping[str, Any]) -> FakeRole:
    assert role
    return FakeRole(options)
