# SPDX-License-Identifier: Apache-2.0
"""Loads the recorded cases of `tests/golden` (see its README.md) as torch tensors.

`CASES` is the list, `case(version, name)` picks one. A case's `data` and `results` hold plain
dicts in which every `$tensor` has become a torch tensor, every `$nested` a nested jagged tensor
and every `$config` a `SimpleNamespace`. References to one array within a case give one object.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

with contextlib.suppress(ModuleNotFoundError):  # configurations and frames need none
    import torch

FOLDER = Path(__file__).parent / "golden"
PAD_TOKEN_ID = 11
TEMPERATURE = 0.7


@functools.cache
def _raw() -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    cases = json.loads((FOLDER / "golden.json").read_text())
    with np.load(FOLDER / "golden.npz") as archive:
        arrays = {key: archive[key] for key in archive.files}
    return cases, arrays


class Case:
    """One scenario of one generation. Every `data()` call builds fresh tensors."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw
        self.version: str = raw["version"]
        self.name: str = raw["name"]
        self.config: dict[str, Any] = raw["config"]

    def __repr__(self) -> str:
        return f"{self.version}-{self.name}"

    def array(self, key: str) -> np.ndarray:
        """A copy of the array that the case stores under `key`."""
        return _raw()[1][f"{self.version}:{self.name}:{key}"].copy()

    def decode(self, node: Any, cache: dict[str, Any] | None = None) -> Any:
        """`node` with its references replaced by tensors, lists and dicts copied."""
        if cache is None:
            cache = {}
        if isinstance(node, list):
            return [self.decode(item, cache) for item in node]
        if not isinstance(node, dict):
            return node
        if "$config" in node:
            return SimpleNamespace(**self.decode(node["$config"], cache))
        for tag in ("$tensor", "$nested"):
            if tag in node:
                key = node[tag]
                if key not in cache:
                    cache[key] = self._tensor(tag, key)
                return cache[key]
        return {key: self.decode(value, cache) for key, value in node.items()}

    def _tensor(self, tag: str, key: str) -> torch.Tensor:
        if tag == "$tensor":
            return torch.from_numpy(self.array(key))
        values = torch.from_numpy(self.array(f"{key}#values"))
        offsets = torch.from_numpy(self.array(f"{key}#offsets"))
        return torch.nested.nested_tensor_from_jagged(values, offsets)

    def data(self) -> dict[str, Any]:
        """The incoming batch."""
        return self.decode(self.raw["data"])

    def result(self, name: str) -> Any:
        """What was recorded under `results[name]`; KeyError where the case has none."""
        return self.decode(self.raw["results"][name])

    def has(self, name: str) -> bool:
        """Whether `results[name]` was recorded."""
        return name in self.raw["results"]

    def payloads(self, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """(method, payload) of each recorded call that carried a payload."""
        for method, payload, _ in self.result(name).get("calls", []):
            if isinstance(payload, dict):
                yield method, payload


CASES: list[Case] = [Case(raw) for raw in _raw()[0]]


def case(version: str, name: str) -> Case:
    """The case of that name; `version` is "seed" or "final"."""
    return next(c for c in CASES if (c.version, c.name) == (version, name))


def wire_frames() -> dict[str, Any]:
    """`wire_golden.json` with hex turned to bytes (`chunks` is a list of them)."""
    raw = json.loads((FOLDER / "wire_golden.json").read_text())
    return {
        name: [bytes.fromhex(chunk) for chunk in value]
        if isinstance(value, list)
        else bytes.fromhex(value)
        for name, value in raw.items()
    }
