# SPDX-License-Identifier: Apache-2.0
"""Which Arctic client is installed, and why another one was not taken."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arctic_rl_c.transports import http_errors

#: Modules that an Arctic client may come in, with the generation of its interface.
_KNOWN = {
    "arctic_platform.client": "final",
    "arctic_training.rl": "seed",
    "arctic_platform.rl": "seed",
}
#: What serves a config of each generation, in the order of preference. A flat config can be put
#: in the final form, a nested one says what a first generation's server has no words for.
_ORDER = {
    "final": ("arctic_platform.client",),
    "seed": ("arctic_training.rl", "arctic_platform.client", "arctic_platform.rl"),
}
_FORMS = {"final": "nested", "seed": "flat"}
GENERATIONS = {"final": "final generation", "seed": "first generation"}
_NEEDED_NAMES = ("create_arctic_rl_client", "ArcticRLClientConfig")
_CURE = (
    "install one with pip install 'arctic-platform[rl]' (Python 3.12 or later), or leave "
    "remote_backend.comms.transport away to use a server of this package"
)


@dataclass(frozen=True)
class ArcticPackage:
    """An installed Arctic client.

    Attributes:
        name: The module it comes in, e.g. `arctic_platform.client`.
        generation: `final` or `seed`: of the client's own interface.
        version: Of its distribution.
        module: The module.
        passed_over: The other modules that were looked for, each with the reason why it was
            not taken.
    """

    name: str
    generation: str
    version: str
    module: Any
    passed_over: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} {self.version} ({GENERATIONS[self.generation]})"

    def takes(self, protocol: str, method: str, keyword: str) -> bool | None:
        """Whether a client's method has a keyword; None where the class cannot be looked at."""
        if self.generation == "final":
            cls = getattr(self.module, "ArcticRLClient", None)
        else:
            home = sys.modules.get(self.module.create_arctic_rl_client.__module__)
            name = "ArcticRLHTTPClient" if protocol == "http" else "ArcticRLRayClient"
            cls = getattr(home, name, None)
        function = getattr(cls, method, None)
        return None if function is None else keyword in inspect.signature(function).parameters


def find_client(generation: str, *, name: str | None = None) -> ArcticPackage:
    """The installed Arctic client that serves a config of a generation.

    Args:
        generation: `final` for a nested config, `seed` for a flat one.
        name: Only this module, as a handle from another process names it.

    Raises:
        TransportUnavailableError: None is there; says what was looked for, why each was not
            taken, and what to install.
    """
    wanted = _ORDER[generation] if name is None else tuple(n for n in _KNOWN if n == name)
    reasons: dict[str, str] = {}
    for candidate in wanted:
        module, reason = _load(candidate)
        if module is None:
            reasons[candidate] = reason
            continue
        for other in _KNOWN:
            if other != candidate and other not in reasons:
                reasons[other] = _not_tried(other, candidate, generation)
        return ArcticPackage(
            candidate, _KNOWN[candidate], _version(candidate), module, _listed(reasons)
        )
    for other in _KNOWN:
        if other not in reasons and name is None:
            reasons[other] = (
                f"{_presence(other)}, {GENERATIONS[_KNOWN[other]]}: cannot serve a nested config"
            )
    if name is not None and not wanted:
        reasons[name] = "no module of an Arctic client"
    raise http_errors.unavailable(
        "arctic",
        f"no Arctic client for a {_FORMS[generation]} config was found (looked for "
        f"{'; '.join(_listed(reasons))}): {_CURE}",
    )


def _listed(reasons: Mapping[str, str]) -> tuple[str, ...]:
    order = sorted(reasons, key=[*_KNOWN, *reasons].index)
    return tuple(f"{name}: {reasons[name]}" for name in order)


def _load(name: str) -> tuple[Any, str]:
    """The module, or None and why not."""
    absence = _absence(name)
    if absence is not None:
        return None, absence
    try:
        module = importlib.import_module(name)
    except Exception as error:  # whatever its engines raise when a device or library is missing
        return None, _failed(name, error)
    missing = [needed for needed in _NEEDED_NAMES if not hasattr(module, needed)]
    if missing:
        return None, f"version {_version(name)} has no {missing[0]}"
    return module, ""


def _failed(name: str, error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"importing {name} failed with {type(error).__name__}: {first}"


def _not_tried(name: str, taken: str, generation: str) -> str:
    absence = _absence(name)
    if absence is not None:
        return absence
    if name not in _ORDER[generation]:
        return f"installed, {GENERATIONS[_KNOWN[name]]}: for flat configs"
    return f"installed, {taken} comes first"


def _presence(name: str) -> str:
    return _absence(name) or "installed"


def _absence(name: str) -> str | None:
    """Why a module cannot be imported, told from its package alone; None if it may."""
    if name in sys.modules:
        return None
    package, _, _ = name.partition(".")
    try:
        if importlib.util.find_spec(package) is None:
            return "not installed"
        if importlib.util.find_spec(name) is None:
            return f"{package} {_version(name)} has no such module"
    except Exception as error:  # finding a submodule imports its package
        return _failed(package, error)
    return None


def _version(name: str) -> str:
    package, _, _ = name.partition(".")
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        found = getattr(sys.modules.get(package), "__version__", None)
        return "of unknown version" if found is None else str(found)
