# SPDX-License-Identifier: Apache-2.0
"""A verl as the plug-in sees it: registries, decorators, a few helpers. Not verl's code.

`VERL_DOUBLE_FORM` chooses among the three forms: seed, plugin, v1. Like verl it imports the
modules that `VERL_USE_EXTERNAL_MODULES` names, from inside its own import.
"""

import importlib
import os
from pathlib import Path

FORM = os.environ.get("VERL_DOUBLE_FORM", "plugin")
__version__ = f"0.0-{FORM}"
if FORM == "v1":
    __path__.append(str(Path(__file__).parent.parent / "v1"))

for _name in filter(None, os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")):
    importlib.import_module(_name)
