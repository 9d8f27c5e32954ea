# SPDX-License-Identifier: Apache-2.0
"""docs/config.md against the schema: it cannot drift."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from arctic_rl_c import config_schema

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "config.md").read_text()


def test_the_generated_tables_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "tools" / "config_docs.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_key_is_in_the_page() -> None:
    schema = config_schema()
    for field in schema["remote_backend"]:
        row = f"| `{field['path']}` |" if not field["seed_only"] else f"| – | `{field['flat']}` |"
        assert TEXT.count(row) == 1
    for field in [*schema["verl"], *schema["ignored"]]:
        assert f"| `{field['path']}` |" in TEXT


def test_the_limits_are_those_of_the_code() -> None:
    header = (ROOT / "csrc" / "core" / "arl_tree.h").read_text()
    limits = dict(re.findall(r"(ARL_TREE_\w+_MAX) = (\d+)", header))
    assert f"{limits['ARL_TREE_DEPTH_MAX']} levels" in TEXT
    assert f"{int(limits['ARL_TREE_NODES_MAX']):,} values".replace(",", " ") in TEXT
    assert f"{limits['ARL_TREE_KEYS_MAX']} keys in a map" in TEXT


def test_no_key_is_documented_that_is_not_there() -> None:
    known = {f["path"] for section in config_schema().values() for f in section}
    for path in re.findall(r"^\| `([\w.]+)` \|", TEXT, re.MULTILINE):
        assert path in known
