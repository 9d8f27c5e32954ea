# SPDX-License-Identifier: Apache-2.0
"""Turn arl_kernels.cu into ../cuda_kernels_ptx.h. Run by hand after a change of the kernels.

    python csrc/transport/kernels/make_ptx.py [--nvcc nvcc] [--check]

nvcc compiles for the oldest architecture that it still knows. The code uses nothing newer than
sm_70 and PTX 6.3, so the header of the text is lowered to these, and one hint that a newer
version brought is dropped; ptxas (or the driver, at run time) is the judge of whether that
holds. `--check` changes nothing and fails when the file is not what this compiler gives.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "arl_kernels.cu"
HEADER = HERE.parent / "cuda_kernels_ptx.h"

PTX_VERSION = "6.3"
PTX_TARGET = "sm_70"

#: Where the text must also assemble: every architecture that CUDA 13 knows of.
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

TEMPLATE = """\
/* SPDX-License-Identifier: Apache-2.0 */
/* Made from kernels/arl_kernels.cu by kernels/make_ptx.py with {compiler}; not edited. */
#ifndef ARL_TRANSPORT_CUDA_KERNELS_PTX_H
#define ARL_TRANSPORT_CUDA_KERNELS_PTX_H

/* clang-format off */
static const char kernels_ptx[] =
{lines};
/* clang-format on */

#endif
"""


def compile_ptx(nvcc: str) -> str:
    """Return the PTX text of the kernels, lowered to PTX_VERSION and PTX_TARGET."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kernels.ptx"
        command = [nvcc, "-ptx", "-arch=compute_75", "-O3", "-o", str(out), str(SOURCE)]
        subprocess.run(command, check=True)
        text = out.read_text()
    text = re.sub(r"//.*", "", text)
    text = re.sub(r"^\.version .*", f".version {PTX_VERSION}", text, flags=re.MULTILINE)
    text = re.sub(r"^\.target .*", f".target {PTX_TARGET}", text, flags=re.MULTILINE)
    return re.sub(r'^\s*\.pragma "used_bytes_mask.*\n', "", text, flags=re.MULTILINE)


def pack(text: str, width: int = 92) -> list[str]:
    """Lay the text out in lines of about `width` columns. PTX does not care for white space."""
    lines, current = [], ""
    for statement in (" ".join(line.split()) for line in text.splitlines()):
        if not statement:
            continue
        if current and len(current) + 1 + len(statement) > width:
            lines.append(current)
            current = ""
        current = f"{current} {statement}" if current else statement
    return [*lines, current]


def render(nvcc: str) -> str:
    """Return the whole header."""
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release ([\d.]+)", version)
    compiler = f"nvcc {release.group(1) if release else '?'}"
    quoted = []
    for line in pack(compile_ptx(nvcc)):
        escaped = line.replace("\\", "\\\\").replace('"', '\\"')
        quoted.append(f'    "{escaped}\\n"')
    return TEMPLATE.format(compiler=compiler, lines="\n".join(quoted))


def ptx_of(header: str) -> str:
    """Return the PTX text that a rendered header holds."""
    lines = re.findall(r'^    "(.*)\\n"', header, flags=re.MULTILINE)
    return "\n".join(line.replace('\\"', '"').replace("\\\\", "\\") for line in lines) + "\n"


def main() -> int:
    """Write or check the header."""
    parser = argparse.ArgumentParser(description="Make cuda_kernels_ptx.h")
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    text = render(options.nvcc)
    if not options.check:
        HEADER.write_text(text)
        return 0
    if not HEADER.exists() or HEADER.read_text() != text:
        print(f"{HEADER.name} is not what {options.nvcc} makes of {SOURCE.name}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
