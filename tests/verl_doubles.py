# SPDX-License-Identifier: Apache-2.0
"""verl as the plug-in sees it, in any of its three forms, for as long as a test needs it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

DOUBLE = Path(__file__).parent / "verl_double"
PLUGIN = "arctic_rl_c.integrations.verl"


def forget() -> None:
    """Drop verl and the plug-in from the modules, to meet another form of it."""
    for name in list(sys.modules):
        if name == "verl" or name.startswith(("verl.", PLUGIN)):
            del sys.modules[name]
    package = sys.modules.get("arctic_rl_c.integrations")
    if package is not None:
        vars(package).pop("verl", None)


@contextmanager
def verl(form: str) -> Iterator[Any]:
    """Verl's package, imported with the plug-in's variable set as a user sets it."""
    forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOUBLE)
        patch.setenv("VERL_DOUBLE_FORM", form)
        patch.setenv("VERL_USE_EXTERNAL_MODULES", PLUGIN)
        try:
            yield importlib.import_module("verl")
        finally:
            forget()
