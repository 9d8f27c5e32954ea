# SPDX-License-Identifier: Apache-2.0
"""Check that every source file names its licence in its first lines.

python tools/check_license.py [FILE...]       without files: every file git knows
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINE = "SPDX-License-Identifier: Apache-2.0"
SUFFIXES = {".c", ".h", ".cu", ".py", ".pyi", ".sh", ".mk"}
NAMES = {"Makefile", "run"}


def tracked() -> list[str]:
    run = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.splitlines()


def lacks_line(path: Path) -> bool:
    if path.suffix not in SUFFIXES and path.name not in NAMES:
        return False
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open(encoding="utf-8") as file:
        return not any(LINE in next(file, "") for _ in range(3))


def main(names: list[str]) -> int:
    wrong = [name for name in names or tracked() if lacks_line(ROOT / name)]
    for name in wrong:
        print(f"{name}: its first three lines lack '{LINE}'")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
