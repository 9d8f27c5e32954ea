# SPDX-License-Identifier: Apache-2.0
"""Check the Markdown: links lead somewhere, every page is reachable, named targets exist.

python tools/check_docs.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
TARGET = re.compile(r"`make ([a-z0-9-]+)")
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The anchors of a page, made from its headings as Markdown hosts do."""
    found = set()
    for heading in re.findall(r"^#+ +(.*)$", CODE.sub("", text), re.MULTILINE):
        plain = re.sub(r"[`*]", "", heading.strip().lower())
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


def pages() -> list[Path]:
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("[a-z]*/README.md")]
    return sorted(found)


def check_links(page: Path) -> tuple[list[str], set[Path]]:
    """What is wrong with the links of a page, and the pages that it leads to."""
    wrong, leads_to = [], set()
    for link in LINK.findall(CODE.sub("", page.read_text())):
        name, _, anchor = link.partition("#")
        if ":" in name:
            continue  # another site: not ours to check
        target = (page.parent / name).resolve() if name else page
        if not target.exists():
            wrong.append(f"{link}: no such file")
        elif anchor and anchor not in anchors(target.read_text()):
            wrong.append(f"{link}: no such heading")
        leads_to.add(target)
    return wrong, leads_to


def main() -> int:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    problems, leads = [], {}
    for page in pages():
        wrong, leads[page] = check_links(page)
        wrong += [
            f"`make {name}`: no such target"
            for name in TARGET.findall(page.read_text())
            if name not in targets
        ]
        problems += [f"{page.relative_to(ROOT)}: {text}" for text in wrong]
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page not in reached:
            reached.add(page)
            todo += [target for target in leads.get(page, ()) if target.suffix == ".md"]
    problems += [
        f"{page.relative_to(ROOT)}: no path of links from README.md leads here"
        for page in pages()
        if page not in reached
    ]
    print("\n".join(problems) or f"{len(leads)} pages, all links lead somewhere")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
