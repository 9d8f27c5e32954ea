# SPDX-License-Identifier: Apache-2.0
"""A small reader of C source: enough to find includes, functions and macro blocks by text.

It is not a parser. It knows comments, strings, braces and line continuations, which is what the
layering tests and the X-macro lists need.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"

_TOKEN = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""",
    re.DOTALL,
)


def sources(*folders: str, suffixes: tuple[str, ...] = (".c", ".h")) -> list[Path]:
    """All C files below csrc, or below the named folders of it, in a stable order."""
    roots = [CSRC / folder for folder in folders] or [CSRC]
    return sorted(p for root in roots for p in root.rglob("*") if p.suffix in suffixes)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blank(text: str) -> str:
    """Comments and literals replaced by spaces of the same shape: offsets and lines stay true."""

    def spaces(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group())

    return _TOKEN.sub(spaces, text)


def without_comments(text: str) -> str:
    """Only comments blanked; string literals (such as include names) are kept."""

    def spaces(match: re.Match[str]) -> str:
        token = match.group()
        return re.sub(r"[^\n]", " ", token) if token.startswith("/") else token

    return _TOKEN.sub(spaces, text)


def includes(path: Path) -> list[tuple[int, str]]:
    """(line, name with its quotes or angle brackets) of every #include."""
    text = without_comments(path.read_text())
    found = re.finditer(r'^[ \t]*#[ \t]*include[ \t]*(<[^>]+>|"[^"]+")', text, re.MULTILINE)
    return [(text.count("\n", 0, m.start()) + 1, m.group(1)) for m in found]


@dataclass(frozen=True)
class Function:
    """A function definition: its name, the lines it spans, and its text without comments."""

    name: str
    first: int
    last: int
    body: str

    @property
    def length(self) -> int:
        return self.last - self.first + 1


def _without_directives(text: str) -> str:
    """Preprocessor lines blanked, continuations included, so that braces balance."""
    return re.sub(
        r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*",
        lambda m: re.sub(r"[^\n]", " ", m.group()),
        text,
        flags=re.MULTILINE,
    )


def functions(path: Path) -> list[Function]:
    """Every function definition of a file, found by its braces at depth zero."""
    text = _without_directives(blank(path.read_text()))
    found: list[Function] = []
    depth = 0
    start = 0  # where the text of the current top-level construct begins
    opened = 0
    for match in re.finditer(r"[{};]", text):
        at, token = match.start(), match.group()
        if token == "{":
            if depth == 0:
                opened = at
            depth += 1
        elif token == "}":
            depth -= 1
            if depth < 0:
                line = text.count("\n", 0, at) + 1
                raise ValueError(f"{relative(path)}:{line}: brace closes nothing")
            if depth == 0:
                head = text[start:opened].strip()
                name = re.search(r"(\w+)\s*\((?:[^()]|\([^()]*\))*\)\s*$", head)
                if name is not None and "=" not in head:
                    begin = opened - len(text[start:opened].lstrip())
                    found.append(
                        Function(
                            name.group(1),
                            text.count("\n", 0, begin) + 1,
                            text.count("\n", 0, at) + 1,
                            text[opened : at + 1],
                        )
                    )
                    start = at + 1
        elif depth == 0:
            start = at + 1
    if depth != 0:
        raise ValueError(f"{relative(path)}: {depth} brace(s) left open")
    return found


def macro_list(path: Path, name: str) -> list[list[str]]:
    """The rows of an X-macro list `#define name(X) X(a, …) X(b, …)`, split at top commas."""
    text = without_comments(path.read_text())
    match = re.search(rf"#\s*define\s+{name}\(X\)((?:[^\n]*\\\n)*[^\n]*)", text)
    if match is None:
        raise LookupError(f"{relative(path)} defines no list {name}(X)")
    body = match.group(1).replace("\\\n", "\n")
    rows = []
    for row in re.finditer(r"\bX\(", body):
        rows.append(_split_arguments(body, row.end()))
    return rows


def _split_arguments(text: str, start: int) -> list[str]:
    """The arguments of a macro call whose opening parenthesis ends at `start`."""
    arguments, depth, begin = [], 1, start
    visible = blank(text)
    for at in range(start, len(text)):
        char = visible[at]
        depth += {"(": 1, ")": -1}.get(char, 0)
        if (char == "," and depth == 1) or depth == 0:
            arguments.append(text[begin:at].strip())
            begin = at + 1
        if depth == 0:
            return arguments
    raise ValueError("unbalanced parentheses in a macro list")
