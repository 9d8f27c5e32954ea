# SPDX-License-Identifier: Apache-2.0
"""Roles without a language model, to try the plumbing with."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import arctic_rl_c


class Unheard(KeyError):
    """An exception class that the parent does not have."""


class FakeRole:
    OPS = frozenset(
        {
            "echo",
            "fail",
            "leave",
            "say",
            "unsendable",
            "hold",
            "count",
            "environ",
            "watch",
        }
    )

    INTERRUPTIBLE = frozenset({"hold"})

    def __init__(self, options: Mapping[str, Any]) -> None:
        if "refuse" in options:
            raise ValueError(options["refuse"])
        if "never" in options:
            time.sleep(600)
        self._options, self._calls = options, 0

    def echo(self, value: Any) -> Any:
        self._calls += 1
        return value

    def watch(self, value: np.ndarray[Any, Any], path: str) -> None:
        """Make a file when the value is given back."""
        weakref.finalize(value, Path(path).touch)

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


class WeightRole:
    """Either end of a real weight sync, over a layer instead of a language model."""

    OPS = frozenset(
        {
            "offer_weights",
            "serve_weights",
            "release_weights",
            "weights_digest",
            "wake",
            "pull_weights",
            "reset_prefix_cache",
            "mark_torn",
            "generate",
        }
    )

    INTERRUPTIBLE = frozenset({"serve_weights", "pull_weights"})

    def __init__(self, role: str, seed: int) -> None:
        import torch

        from arctic_rl_c.local.weights import WeightSink, WeightSource

        torch.manual_seed(seed)
        self._model = torch.nn.Linear(256, 256)
        self._end: Any = (WeightSource if role == "trainer" else WeightSink)(self._model)

    def offer_weights(self, **arguments: Any) -> dict[str, Any]:
        return {"offer": self._end.offer(**arguments), "version": self._end.version}

    def serve_weights(self, timeout: float) -> Any:
        return self._end.serve(timeout=timeout)

    def release_weights(self) -> dict[str, Any]:
        self._end.release()
        return {}

    def pull_weights(self, offer: bytes, timeout: float) -> Any:
        return self._end.pull(offer, timeout=timeout)

    def weights_digest(self) -> dict[str, Any]:
        return {"digest": weights_digest(self._model)}

    def wake(self, tags: Any = None) -> dict[str, Any]:
        return {"tags": tags}

    def reset_prefix_cache(self) -> dict[str, Any]:
        return {}

    def generate(self, **_: Any) -> dict[str, Any]:
        self._end.check()
        return {"results": [{"version": self._end.version}]}

    def close(self) -> None:
        self._end.close()


def weights_digest(model: Any) -> str:
    return str(float(sum(p.double().sum() for p in model.parameters())))


def build_weights(role: str, options: Mapping[str, Any]) -> Any:
    """A factory of roles with weights to sync, whatever the options: trainer and sampler differ."""
    return WeightRole(role, 1 if role == "trainer" else 2)


def build(role: str, options: Mapping[str, Any]) -> Any:
    """The factory that the tests name."""
    return WeightRole(role, options["seed"]) if "seed" in options else FakeRole(options)
