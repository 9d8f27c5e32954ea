# SPDX-License-Identifier: Apache-2.0
"""Build and test with every other supported Python that this machine has, without torch.

    python tools/test_pythons.py [3.12 ...]

Looks on PATH and among pyenv's versions. The extension is built against NumPy 2 headers; where
NumPy 1.26 has wheels (up to 3.12) the tests run with it, elsewhere with the newest. A version
that is absent is named, never passed over silently.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "pythons"
SUPPORTED = ("3.10", "3.11", "3.12", "3.13", "3.14")
LAST_WITH_NUMPY_1 = (3, 12)
#: Programs without Python, transports that are C below the types, and what looks at sources. They
#: take minutes, and `make test` and `make asan` run them.
SAME_EVERYWHERE = (
    *("*_fuzz", "nccl*", "ring*", "host_shm_cuda", "cuda_copy", "loader", "fakes"),
    *("compile", "headers", "ptx", "layering", "project"),
)
NEEDS = (
    *("setuptools>=77", "pytest>=8", "pytest-timeout", "hypothesis", "psutil"),
    *("omegaconf>=2.3", "hydra-core>=1.3"),
)


def find(version: str) -> str | None:
    """An interpreter of this version that starts, or None."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(f"python{version}")]
    candidates += [str(path / "bin" / "python") for path in sorted(pyenv.glob(f"{version}.*"))]
    for candidate in candidates:
        if candidate is not None:
            run = subprocess.run(
                [candidate, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"],
                capture_output=True,
                text=True,
            )
            if run.returncode == 0 and run.stdout.strip() == version:
                return candidate
    return None


def run(*command: str, cwd: Path = ROOT) -> None:
    environment = {**os.environ, "ARL_EXPECT": "installed"}
    subprocess.run(command, cwd=cwd, env=environment, check=True, stdin=subprocess.DEVNULL)


def check(version: str, interpreter: str) -> None:
    place = CACHE / version
    python = str(place / "bin" / "python")
    if not Path(python).exists():
        run(interpreter, "-m", "venv", str(place))
    pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    run(*pip, *NEEDS, "numpy>=2")
    for stale in ROOT.glob("build/lib*"):
        shutil.rmtree(stale)
    run(*pip, "--no-build-isolation", "--no-deps", "--force-reinstall", "--no-cache-dir", ".")
    if tuple(map(int, version.split("."))) <= LAST_WITH_NUMPY_1:
        run(*pip, "numpy==1.26.4")
    pytest = str(place / "bin" / "pytest")
    run(pytest, "-q", "-c", "../pyproject.toml", "--rootdir=..", "-p", "no:cacheprovider",
        "-k", "not call_of_the", *(f"--ignore-glob=test_{name}.py" for name in SAME_EVERYWHERE),
        cwd=ROOT / "tests")  # fmt: skip


def main(wanted: list[str]) -> int:
    current = "{}.{}".format(*sys.version_info[:2])
    results = {}
    for version in wanted or SUPPORTED:
        if version == current and not wanted:
            continue  # `make test` covers it, with torch
        interpreter = find(version)
        if interpreter is None:
            results[version] = "absent, not tested"
            continue
        print(f"---- Python {version}: {interpreter}", flush=True)
        try:
            check(version, interpreter)
        except subprocess.CalledProcessError as error:
            results[version] = f"FAILED ({' '.join(map(str, error.cmd[:4]))} …)"
        else:
            results[version] = "passed"
    for version, result in results.items():
        print(f"Python {version}: {result}")
    return 1 if any(result.startswith("FAILED") for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
