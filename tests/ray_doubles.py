# SPDX-License-Identifier: Apache-2.0
"""The double of Ray in `ray_double`, in place of Ray for the tests of a module."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DOUBLE = Path(__file__).parent / "ray_double"


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    saved = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_ray(name)}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOUBLE)
        try:
            yield importlib.import_module("ray")
        finally:
            for name in [name for name in sys.modules if _is_ray(name)]:
                del sys.modules[name]
            sys.modules.update(saved)


def _is_ray(name: str) -> bool:
    return name == "ray" or name.startswith("ray.")
