# SPDX-License-Identifier: Apache-2.0
"""Recording roles whose ops hang for as long as a file of their name is there."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import recording_role

#: The environment variable that names the folder of the files.
FOLDER = "ARL_TEST_HANGING"


def build(role: str, options: Mapping[str, Any]) -> Any:
    """The factory that tests name."""
    folder = Path(os.environ[FOLDER])
    found = recording_role.build(role, options)
    for op in found.OPS:
        setattr(found, op, partial(_once_let, folder / op, getattr(found, op)))
    return found


def _once_let(path: Path, work: Any, /, **arguments: Any) -> Any:
    while path.exists():
        time.sleep(0.002)
    return work(**arguments)
