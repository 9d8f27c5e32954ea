# SPDX-License-Identifier: Apache-2.0
"""Imported first, to say what to do when the C half is missing: in a fresh clone it is."""

import importlib.util
from pathlib import Path

if importlib.util.find_spec("arctic_rl_c._core") is None:
    raise ImportError(
        f"arctic_rl_c._core is not built in {Path(__file__).parent}. If that is a source tree: "
        "`make smoke` and `make test` install the package and run it, `make build` builds in "
        "place, and an installed package is found from any other folder, or from here with "
        "`python -I -m arctic_rl_c`."
    )
