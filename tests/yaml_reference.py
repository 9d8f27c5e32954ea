# SPDX-License-Identifier: Apache-2.0
"""What OmegaConf makes of the same text, and a comparison that tells 1 from 1.0 and from True."""

from __future__ import annotations

import math
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

#: Everything that the reference raises on text that it refuses.
REFUSALS = (YAMLError, OmegaConfBaseException, ValueError, TypeError, KeyError, AssertionError)


def omegaconf(text: str, *, resolve: bool = True) -> Any:
    """The document as plain data, or an exception of `REFUSALS`."""
    return OmegaConf.to_container(OmegaConf.create(text), resolve=resolve)


def same(found: Any, wanted: Any) -> bool:
    """Equal in value, type and order, at every level; NaN equals NaN."""
    if type(found) is not type(wanted):
        return False
    if isinstance(found, float):
        return found == wanted or (math.isnan(found) and math.isnan(wanted))
    if isinstance(found, dict):
        return (
            len(found) == len(wanted)
            and all(map(same, found.keys(), wanted.keys()))
            and all(map(same, found.values(), wanted.values()))
        )
    if isinstance(found, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return bool(found == wanted)


def assert_same(found: Any, wanted: Any) -> None:
    assert same(found, wanted), f"found {found!r}, wanted {wanted!r}"
