# SPDX-License-Identifier: Apache-2.0
"""Exceptions that cross a process boundary as data, and come out with their type."""

from __future__ import annotations

import builtins
import traceback
from collections.abc import Mapping
from typing import Any

import arctic_rl_c

_PLAIN = (str, int, float, bool, type(None))


class RemoteTraceback(Exception):
    """The other process's traceback, as the `__cause__` of what it raised."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


def describe_error(error: BaseException) -> dict[str, Any]:
    """An exception as plain data."""
    plain = all(isinstance(a, _PLAIN) for a in error.args)
    return {
        # The nearest class that both sides know stands in for one that only this side has.
        "types": [_type_name(c) for c in type(error).__mro__],
        "args": list(error.args) if plain else [str(error)],
        "text": str(error),
        "attributes": {k: v for k, v in vars(error).items() if isinstance(v, _PLAIN)},
        "traceback": "".join(traceback.format_exception(error)),
    }


def rebuild_error(data: Mapping[str, Any]) -> Exception:
    """The exception that `describe_error` described.

    A type of this package or of Python is rebuilt as itself, with its attributes; one that is
    neither becomes its nearest such base, with the type's name in front of the text.
    """
    names = [str(name) for name in data["types"]]
    own = next((i for i, name in enumerate(names) if _find(name) is not None), None)
    cls = Exception if own is None else _find(names[own])
    assert cls is not None
    args = list(data["args"]) if own == 0 else [f"{names[0]}: {data['text']}"]
    try:
        error = cls(*args)
    except TypeError:  # a constructor with requirements of its own
        error = RuntimeError(f"{names[0]}: {data['text']}")
    for name, value in dict(data["attributes"]).items():
        try:
            setattr(error, name, value)
        except AttributeError:
            continue  # a read-only slot, which the constructor has filled
    error.__cause__ = RemoteTraceback(data["traceback"])
    return error


def _type_name(cls: type[BaseException]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _find(name: str) -> type[Exception] | None:
    module, _, attribute = name.rpartition(".")
    home = {"builtins": builtins, "arctic_rl_c": arctic_rl_c}.get(module)
    found = getattr(home, attribute, None) if home is not None else None
    if isinstance(found, type) and issubclass(found, Exception):
        return found
    return None
