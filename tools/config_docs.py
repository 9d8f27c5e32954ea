# SPDX-License-Identifier: Apache-2.0
"""Write the tables of docs/config.md from the C schema, or check that they are up to date.

python tools/config_docs.py          rewrite them
python tools/config_docs.py --check  fail when that would change something

The installed package is asked, so build it first.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from arctic_rl_c import config_schema

PAGE = Path(__file__).resolve().parent.parent / "docs" / "config.md"
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
KINDS = {
    "bool": "true, false",
    "int": "integer",
    "number": "number",
    "text": "text",
    "pair": "two numbers",
}


def takes(field: dict[str, Any]) -> str:
    """The values of a key, in a few words."""
    words = KINDS.get(field["kind"]) or ", ".join(f"`{c}`" for c in field["choices"].split("|"))
    if field["kind"] in ("int", "number", "pair"):
        low, high = field["min"], field["max"]
        if abs(high) < 1e6:
            words += f", {low:g} to {high:g}"
        elif abs(low) < 1e6:
            words += f", from {low:g}"
    return words + (", null" if field["nullable"] else "")


def default(field: dict[str, Any]) -> str:
    if field["default"] is None:
        return "none" if field["absent"] else "see there"
    text = "`" + ('""' if field["default"] == "''" else field["default"]) + "`"
    return text + (f"; flat: `{field['seed_default']}`" if field["seed_default"] else "")


def row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def arctic_table(fields: list[dict[str, Any]]) -> str:
    lines = [row("nested form", "flat form", "values", "default", "meaning"), row(*["---"] * 5)]
    for field in fields:
        nested = "–" if field["seed_only"] else f"`{field['path']}`"
        flat = "–" if field["flat"] is None else f"`{field['flat']}`"
        lines.append(row(nested, flat, takes(field), default(field), field["doc"]))
    return "".join(lines)


def verl_table(fields: list[dict[str, Any]]) -> str:
    lines = [row("key", "values", "default", "meaning"), row(*["---"] * 4)]
    for field in fields:
        lines.append(row(f"`{field['path']}`", takes(field), default(field), field["doc"]))
    return "".join(lines)


def ignored_table(options: list[dict[str, Any]]) -> str:
    lines = [row("key", "form", "harmless values", "why it has no effect"), row(*["---"] * 4)]
    for option in options:
        form = (
            "both" if option["seed"] and option["final"] else "flat" if option["seed"] else "nested"
        )
        harmless = ", ".join(f"`{word}`" for word in option["harmless"].split()) or "none"
        lines.append(row(f"`{option['path']}`", form, harmless, option["why"]))
    return "".join(lines)


def rendered(text: str) -> str:
    """`text` with every generated block renewed."""
    schema = config_schema()
    tables = {
        "remote_backend": arctic_table(schema["remote_backend"]),
        "verl": verl_table(schema["verl"]),
        "ignored": ignored_table(schema["ignored"]),
    }
    found = []

    def renew(match: re.Match[str]) -> str:
        found.append(match[2])
        return match[1] + tables[match[2]] + match[3]

    text = BLOCK.sub(renew, text)
    if sorted(found) != sorted(tables):
        raise SystemExit(f"{PAGE.name}: has the blocks {found}, needs {sorted(tables)}")
    return text


def main() -> int:
    before = PAGE.read_text()
    after = rendered(before)
    if before == after:
        return 0
    if "--check" in sys.argv[1:]:
        print(f"{PAGE.name} is not what the schema says: run python tools/config_docs.py")
        return 1
    PAGE.write_text(after)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
