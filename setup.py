# SPDX-License-Identifier: Apache-2.0
"""Build of the one extension module, `arctic_rl_c._core`.

Switches, all read from the environment:

ARL_LIBYAML_DIR   prefix with include/yaml.h and lib/libyaml.{so,a}, used instead of pkg-config
ARL_WERROR=1      warnings are errors (what CI does)
ARL_DEBUG=1       -O0 -g3 with the executable invariants (arl_*_check_consistent) on
ARL_SANITIZE=1    AddressSanitizer and UndefinedBehaviorSanitizer
ARL_FAULTS=1      allocations and system calls can be made to fail (tests/faults)

Each combination of switches has its own objects below build/, so changing one rebuilds what it
must and changing back rebuilds nothing. Objects are compiled in parallel.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

LIBYAML_HELP = """
arctic_rl_c needs the libyaml headers to build, and did not find yaml.h.
    Debian, Ubuntu   apt-get install libyaml-dev
    Fedora, RHEL     dnf install libyaml-devel
    conda            conda install -c conda-forge yaml pkg-config
    elsewhere        ARL_LIBYAML_DIR=<prefix holding include/yaml.h and lib/libyaml.*>
"""


def switch(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


def pkg_config(*args: str) -> list[str] | None:
    try:
        out = subprocess.run(
            ["pkg-config", *args, "yaml-0.1"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return shlex.split(out.stdout)


def libyaml_flags() -> tuple[list[str], list[str]]:
    """Return (compile flags, link flags) of libyaml, without checking that they work."""
    prefix = os.environ.get("ARL_LIBYAML_DIR")
    if prefix:
        root = Path(prefix).resolve()
        include = next((p.parent for p in sorted(root.rglob("yaml.h"))), None)
        static = next(iter(sorted(root.rglob("libyaml.a"))), None)
        shared = next(iter(sorted(root.rglob("libyaml.so*"))), None)
        if include is None or (static or shared) is None:
            raise SystemExit(
                f"ARL_LIBYAML_DIR={prefix} holds no yaml.h and libyaml.*{LIBYAML_HELP}"
            )
        link = [str(static)] if static else ["-L" + str(shared.parent), "-lyaml"]  # type: ignore[union-attr]
        return ["-I" + str(include)], link
    cflags, libs = pkg_config("--cflags"), pkg_config("--libs")
    if cflags is not None and libs is not None:
        return cflags, libs
    return [], ["-lyaml"]  # pkg-config is optional: the header check below decides


class BuildExt(build_ext):
    """Checks for libyaml first, and compiles only what is stale, several files at once."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.force = True  # every object is judged on its own, see below; linking is cheap

    def build_extension(self, ext: Extension) -> None:
        self.require_yaml_header(ext)
        flags = [*self.compiler.compiler_so, *ext.extra_compile_args, *ext.include_dirs]
        digest = hashlib.sha256("\0".join(flags).encode()).hexdigest()[:12]
        self.build_temp = os.path.join(self.build_temp, digest)
        self.compiler.compile = self.compile_stale(self.compiler.compile, ext)
        super().build_extension(ext)

    def compile_stale(
        self, compile_all: Callable[..., list[str]], ext: Extension
    ) -> Callable[..., list[str]]:
        """Wrap the compiler's compile(): skip fresh objects, run the others in parallel."""
        newest_header = max(os.path.getmtime(path) for path in [__file__, *ext.depends])

        def compile_one(source: str, options: dict[str, object]) -> list[str]:
            objects: list[str] = self.compiler.object_filenames(
                [source], output_dir=options["output_dir"]
            )
            newest = max(newest_header, os.path.getmtime(source))
            if all(os.path.exists(o) and os.path.getmtime(o) > newest for o in objects):
                return objects
            return compile_all([source], **options)

        def compile(sources: list[str], **options: object) -> list[str]:
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                parts = pool.map(lambda source: compile_one(source, options), sources)
                return [name for part in parts for name in part]

        return compile

    def require_yaml_header(self, ext: Extension) -> None:
        probe = Path(self.build_temp) / "probe_yaml.c"
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_text("#include <yaml.h>\nint main(void) { return 0; }\n")
        compiler = shlex.split(os.environ.get("CC", "")) or list(self.compiler.compiler_so)[:1]
        command = [*compiler, *ext.extra_compile_args, "-fsyntax-only", str(probe)]
        if subprocess.run(command, capture_output=True).returncode != 0:
            raise SystemExit(LIBYAML_HELP)


yaml_cflags, yaml_libs = libyaml_flags()
cflags = [
    "-std=c11",
    "-D_GNU_SOURCE",
    "-fvisibility=hidden",
    "-pthread",
    "-Icsrc",
    "-Wall",
    "-Wextra",
    "-Wconversion",
    "-Wshadow",
    "-Wstrict-prototypes",
    "-Wmissing-prototypes",
    "-Wpointer-arith",
    "-Wformat=2",
    "-Wvla",
    *yaml_cflags,
]
ldflags = [*yaml_libs, "-pthread", "-ldl", "-lrt", "-lm"]
if switch("ARL_WERROR"):
    cflags += ["-Werror"]
if switch("ARL_DEBUG"):
    cflags += ["-O0", "-g3", "-UNDEBUG", "-DARL_DEBUG=1"]
else:
    cflags += ["-O3", "-g1", "-DNDEBUG"]
if switch("ARL_SANITIZE"):
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    cflags += [*sanitize, "-fno-omit-frame-pointer", "-O1", "-g", "-UNDEBUG", "-DARL_DEBUG=1"]
    ldflags += sanitize
sources = sorted(str(p) for p in Path("csrc").rglob("*.c"))
if switch("ARL_FAULTS"):
    faults = Path("tests/faults/arl_faults.c")
    sources.append(str(faults))
    wrapped = re.findall(r"^(?:WRAP\([^,]+, |int __wrap_)(\w+)", faults.read_text(), re.MULTILINE)
    ldflags += [f"-Wl,--wrap={name}" for name in sorted(set(wrapped))]

setup(
    ext_modules=[
        Extension(
            "arctic_rl_c._core",
            sources=sources,
            depends=sorted(str(p) for p in Path("csrc").rglob("*.h")),
            include_dirs=[numpy.get_include()],
            define_macros=[("PY_SSIZE_T_CLEAN", "1")],
            extra_compile_args=cflags,
            extra_link_args=ldflags,
            language="c",
        )
    ],
    cmdclass={"build_ext": BuildExt},
)
