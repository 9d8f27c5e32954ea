# SPDX-License-Identifier: Apache-2.0
"""Install into this interpreter's virtual environment what building and testing need.

    .venv/bin/python tools/setup_env.py local http test

The arguments are extras of pyproject.toml. Versions come from constraints/cpu.txt; pip's own
configuration (PIP_* variables, pip.conf) is respected, so a mirror or an extra index set there
is used. TORCH_SPEC replaces the choice of torch, options included, for example
TORCH_SPEC="torch==2.9.1 --no-deps".

Headers that the compiler lacks (libyaml, Python) are installed with the system's package manager
when that needs no password; otherwise the build says what is missing.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # 3.10
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints" / "cpu.txt"


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def pip_install(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    command.append("--no-compile")  # see compile_all
    return subprocess.run(
        [*command, "-c", str(CONSTRAINTS), *args], stderr=subprocess.PIPE, text=True
    )


def pip_install_or_exit(*args: str) -> None:
    run = pip_install(*args)
    if run.returncode != 0:
        raise SystemExit(f"setup: pip install {shlex.join(args)} failed\n{run.stderr}")


def install_torch() -> None:
    spec = os.environ.get("TORCH_SPEC")
    if spec:
        say(f"installing {spec}, as TORCH_SPEC says")
        pip_install_or_exit(*shlex.split(spec))
        return
    version = next(
        line.removeprefix("torch==").split(";")[0].strip()
        for line in CONSTRAINTS.read_text().splitlines()
        if line.startswith("torch==")
    )
    say(f"installing torch {version}, CPU build")
    if pip_install(f"torch=={version}+cpu").returncode == 0:
        return
    say(
        "the configured package index has no CPU-only build of torch for this Python; taking the "
        "plain one, which may bring CUDA libraries. To avoid the download, point "
        "PIP_EXTRA_INDEX_URL at an index of CPU wheels, or set TORCH_SPEC."
    )
    pip_install_or_exit(f"torch=={version}")


def compile_all() -> None:
    """Write the bytecode of what was installed, on all cores: pip takes a minute on one.

    Files that this Python cannot compile (templates, other versions' syntax) stay as they are.
    """
    libraries = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    command = [sys.executable, "-m", "compileall", "-qq", "-j", "0", *sorted(libraries)]
    subprocess.run(command, check=False)


def compiles(text: str, *flags: str) -> bool:
    compiler = shlex.split(os.environ.get("CC", "cc"))
    command = [*compiler, *flags, "-fsyntax-only", "-x", "c", "-"]
    try:
        return subprocess.run(command, input=text.encode(), capture_output=True).returncode == 0
    except FileNotFoundError:
        raise SystemExit(f"setup: there is no C compiler ({compiler[0]})") from None


def yaml_flags() -> list[str]:
    prefix = os.environ.get("ARL_LIBYAML_DIR")
    if prefix:
        return [f"-I{header.parent}" for header in Path(prefix).rglob("yaml.h")]
    pkg_config = shutil.which("pkg-config")
    if pkg_config is None:
        return []
    run = subprocess.run([pkg_config, "--cflags", "yaml-0.1"], capture_output=True, text=True)
    return shlex.split(run.stdout)


def missing_headers() -> dict[str, str]:
    """Missing headers, as {package for apt-get: package for dnf}."""
    missing = {}
    if not compiles("#include <yaml.h>\n", *yaml_flags()):
        missing["libyaml-dev"] = "libyaml-devel"
    if not compiles("#include <Python.h>\n", f"-I{sysconfig.get_path('include')}"):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        missing[f"python{version}-dev"] = f"python{version}-devel"
    return missing


def install_headers() -> None:
    missing = missing_headers()
    if not missing:
        return
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    for manager, names in (("apt-get", list(missing)), ("dnf", list(missing.values()))):
        if shutil.which(manager) is None or (sudo and not may_sudo()):
            continue
        say(f"installing {' '.join(names)} with {manager}")
        command = [*sudo, "env", "DEBIAN_FRONTEND=noninteractive", manager]
        if manager == "apt-get":
            subprocess.run([*command, "update", "-q"], stdout=subprocess.DEVNULL)
        subprocess.run([*command, "install", "-y", "-q", *names], stdout=subprocess.DEVNULL)
        break
    for name, other in missing_headers().items():
        if name.startswith("python"):  # a missing yaml.h is left to setup.py, which says more
            raise SystemExit(f"setup: no Python.h for {sys.executable}: install {name} or {other}")


def may_sudo() -> bool:
    if shutil.which("sudo") is None:
        return False
    return subprocess.run(["sudo", "-n", "true"], capture_output=True).returncode == 0


def main(extras: list[str]) -> None:
    if sys.prefix == sys.base_prefix:
        raise SystemExit("setup: run this with the Python of a virtual environment")
    install_headers()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    optional = project["project"]["optional-dependencies"]
    needs = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for extra in extras:
        needs += optional[extra]
    if any(need.startswith("torch") for need in needs):
        install_torch()
    say(f"installing what {', '.join(extras)} need")
    pip_install_or_exit(*needs)
    compile_all()


if __name__ == "__main__":
    main(sys.argv[1:])
