# SPDX-License-Identifier: Apache-2.0
"""Renew the table of ratios in README.md from benchmarks/results, or check it with --check.

Of each benchmark the newest result with the most cores is taken.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BEGIN, END = "<!-- ratios: tools/readme_tables.py -->\n", "<!-- end of ratios -->"

#: Sections of the padding benchmark that the README shows.
ROWS = [
    "pad_prompt_response 128 x (512 + 1024) int64",
    "pad_prompt_response 1024 x (1024 + 3072) int64",
    "pad_prompt_response 4096 x (1024 + 3072) int64",
    "pad_prompt_response 4096 x (1024 + 3072) float32",
    "make_jagged 4096 x (1024 + 3072) int64",
]


def newest(benchmark: str) -> dict[str, Any]:
    results = [
        json.loads(path.read_text())
        for path in (ROOT / "benchmarks" / "results").glob(f"{benchmark}-*.json")
    ]
    return max(results, key=lambda r: (r["machine"]["cores"], r["machine"]["date"]))


def table() -> str:
    result = newest("padding")
    machine = result["machine"]
    lines = [
        f"{machine['cores']} cores ({machine['cpu']}), {machine['date']}, medians of one run:",
        "",
        "| call | row by row in torch | a copy to fresh memory |",
        "| --- | --- | --- |",
    ]
    for title in ROWS:
        section = next(
            s for s in result["sections"] if re.match(re.escape(title) + ", output", s["title"])
        )
        facts = section["facts"]
        rows = float(facts["row by row / ours"])
        copy = float(next(v for k, v in facts.items() if k.startswith("ours / ")))
        call, size = title.replace(" x ", " × ").split(" ", 1)
        times = f"{rows:.0f} × our time | ours takes {copy:.2f} × that"
        lines.append(f"| `{call}`, {size} | {times} |")
    return "\n".join([*lines, "", payload_line()]) + "\n"


def payload_line() -> str:
    result = newest("payload")
    machine = result["machine"]
    facts = {s["title"]: s["facts"] for s in result["sections"]}
    large = next(f for t, f in facts.items() if t.startswith("log-prob payload, 128 x"))
    small = next(f for t, f in facts.items() if t.startswith("log-prob payload, 32 x"))
    return (
        f"A log-prob payload of 128 × (512 + 1024) is built {float(large['python / ours']):.0f} × "
        "faster than in Python, and costs "
        f"{small['a payload apart from its tensors (p10)'].replace('us', 'µs')} apart from its "
        f"tensors ({machine['cores']} cores, {machine['cpu']}, {machine['date']})."
    )


def main(arguments: list[str]) -> int:
    text = README.read_text()
    before, rest = text.split(BEGIN)
    old, after = rest.split(END)
    if old == table():
        return 0
    if "--check" in arguments:
        print("README.md: its ratios are not those of benchmarks/results; run", __file__)
        return 1
    README.write_text(before + BEGIN + table() + END + after)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
