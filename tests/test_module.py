# SPDX-License-Identifier: Apache-2.0
"""The running module against its sources: nothing missing, nothing undocumented, nothing shared.

The lists compared here are the X-macros of csrc/python/state.h; no name is repeated by hand.
"""

from __future__ import annotations

import ast
import gc
import inspect
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import arctic_rl_c
import arctic_rl_c._core as core
import csource

STATE_H = csource.CSRC / "python" / "state.h"

TPFLAGS_DISALLOW_INSTANTIATION = 1 << 7
TPFLAGS_IMMUTABLETYPE = 1 << 8
TPFLAGS_HEAPTYPE = 1 << 9
TPFLAGS_HAVE_GC = 1 << 14

MEMBERS = {name: value for name, value in vars(core).items() if not name.startswith("__")}
EXCEPTIONS = [v for v in MEMBERS.values() if isinstance(v, type) and issubclass(v, BaseException)]
TYPES = [v for v in MEMBERS.values() if isinstance(v, type) and not issubclass(v, BaseException)]
FUNCTIONS = [v for v in MEMBERS.values() if inspect.isbuiltin(v)]
METHODS = [
    (cls, name, value)
    for cls in TYPES
    for name, value in vars(cls).items()
    if not name.startswith("_")
]


def name_of(value: object) -> str:
    if isinstance(value, tuple):
        return f"{value[0].__name__}.{value[1]}"
    return getattr(value, "__name__", str(value))


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **env},
    )


# ---- lists ---------------------------------------------------------------------------------------


def test_every_exception_of_the_list_is_in_the_module() -> None:
    listed = {
        ast.literal_eval(row[1]): row for row in csource.macro_list(STATE_H, "ARL_STATE_ERRORS")
    }
    assert {cls.__name__ for cls in EXCEPTIONS} == set(listed)
    fields = {row[0]: ast.literal_eval(row[1]) for row in listed.values()}
    for name, (_, _, base, builtin, *_) in listed.items():
        bases = {cls.__name__ for cls in getattr(core, name).__mro__}
        if base != "NULL":
            assert fields[base] in bases
        if builtin != "NULL":
            assert builtin.removeprefix("PyExc_") in bases


def test_every_type_of_the_list_is_made_once() -> None:
    fields = [row[0] for row in csource.macro_list(STATE_H, "ARL_STATE_TYPES")]
    made = []
    for path in csource.sources("python", suffixes=(".c",)):
        text = csource.without_comments(path.read_text())
        made += re.findall(r"arl_state_add_type\([^;]*?&state->(\w+)", text)
    assert sorted(made) == sorted(fields)
    assert len(TYPES) == len(fields)


def test_the_module_visits_all_it_owns() -> None:
    visited = {id(value) for value in gc.get_referents(core)}
    missing = [cls.__name__ for cls in TYPES + EXCEPTIONS if id(cls) not in visited]
    assert not missing


def test_the_package_exports_the_module() -> None:
    exported = {
        name: value
        for name, value in vars(arctic_rl_c).items()
        if MEMBERS.get(name, arctic_rl_c) is value
    }
    public = {name for name in MEMBERS if not name.startswith("_")}
    assert public - set(exported) == set(), "in _core, not in arctic_rl_c"
    assert arctic_rl_c.__all__ == sorted(arctic_rl_c.__all__)
    assert public <= set(arctic_rl_c.__all__)
    assert all(hasattr(arctic_rl_c, name) for name in arctic_rl_c.__all__)


def test_the_stub_names_the_module() -> None:
    """Names only; `make lint` runs stubtest, which compares the signatures too."""
    stub = Path(arctic_rl_c.__file__).with_name("_core.pyi")
    tree = ast.parse(stub.read_text())
    named = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert {name for name in MEMBERS if not name.startswith("_")} <= named


# ---- types ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", TYPES, ids=name_of)
def test_types_are_immutable_heap_types_with_gc(cls: type) -> None:
    assert cls.__flags__ & TPFLAGS_HEAPTYPE
    assert cls.__flags__ & TPFLAGS_IMMUTABLETYPE
    assert cls.__flags__ & TPFLAGS_HAVE_GC
    assert cls.__module__ == "arctic_rl_c"
    with pytest.raises(TypeError, match="immutable"):
        cls.anything = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("cls", TYPES, ids=name_of)
def test_types_without_a_constructor_say_so(cls: type) -> None:
    if cls.__flags__ & TPFLAGS_DISALLOW_INSTANTIATION:
        with pytest.raises(TypeError, match="cannot create"):
            cls()


# ---- docstrings and signatures ------------------------------------------------------------------


@pytest.mark.parametrize("value", FUNCTIONS + TYPES + EXCEPTIONS, ids=name_of)
def test_public_names_are_documented(value: object) -> None:
    assert value.__doc__ and len(value.__doc__.split()) >= 3


@pytest.mark.parametrize("member", METHODS, ids=name_of)
def test_public_members_are_documented(member: tuple[type, str, object]) -> None:
    assert inspect.getdoc(member[2]), f"{name_of(member)} has no docstring"


@pytest.mark.parametrize(
    "value",
    [
        *FUNCTIONS,
        *(cls for cls in TYPES if not cls.__flags__ & TPFLAGS_DISALLOW_INSTANTIATION),
        *(member for member in METHODS if callable(member[2])),
    ],
    ids=name_of,
)
def test_signatures_can_be_inspected(value: object) -> None:
    target = value[2] if isinstance(value, tuple) else value
    inspect.signature(target)  # type: ignore[arg-type]


# ---- exceptions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", EXCEPTIONS, ids=name_of)
def test_exceptions_travel(cls: type[BaseException]) -> None:
    """They cross process boundaries by pickle, with what they say about the failure."""
    error = cls("rank 3 is gone")
    error.code, error.operation, error.rank = "ARL_ERR_PEER_LOST", "pull", 3  # type: ignore[attr-defined]
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == "rank 3 is gone"
    assert vars(copy) == vars(error)
    assert cls.__module__ == "arctic_rl_c"
    assert isinstance(copy, core.ArcticError)


# ---- import --------------------------------------------------------------------------------------


def test_import_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "blocked = ('torch', 'transformers', 'ray', 'aiohttp', 'omegaconf', 'verl', 'tqdm')\n"
        "for name in blocked: sys.modules[name] = None\n"
        "import arctic_rl_c\n"
        "for name in arctic_rl_c.__all__: getattr(arctic_rl_c, name)\n"
        "print('fine')\n"
    )
    run = run_python(code)
    assert (run.returncode, run.stdout, run.stderr) == (0, "fine\n", "")


def test_import_brings_no_torch_in() -> None:
    code = (
        "import sys, arctic_rl_c\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & "
        "{'torch', 'transformers', 'ray', 'aiohttp', 'omegaconf', 'verl', 'asyncio', 'tqdm'}))\n"
    )
    run = run_python(code)
    assert (run.returncode, run.stdout, run.stderr) == (0, "[]\n", "")


@pytest.mark.parametrize("name", ["KeyboardInterrupt", "RuntimeError"])
def test_what_ends_the_import_of_numpy_is_not_replaced(name: str, tmp_path: Path) -> None:
    """Ctrl-C among them. NumPy's own C macro makes an ImportError of all that is raised."""
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text(f"raise {name}('while NumPy was imported')\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"try:\n    import arctic_rl_c\nexcept {name} as error:\n    print(error)\n"
    )
    run = run_python(code)
    assert run.stdout == "while NumPy was imported\n", run.stderr


def test_importing_again_makes_a_second_module() -> None:
    """Multi-phase init: each module object has its own types, and the first one can die."""
    code = (
        "import gc, sys, weakref\n"
        "import arctic_rl_c._core as first\n"
        "types = [v for v in vars(first).values() if isinstance(v, type)]\n"
        "sys.modules.pop('arctic_rl_c._core')\n"
        "import arctic_rl_c\n"
        "del arctic_rl_c._core\n"
        "import importlib\n"
        "second = importlib.import_module('arctic_rl_c._core')\n"
        "assert second is not first\n"
        "assert second.ArcticError is not first.ArcticError\n"
        "assert not any(getattr(second, t.__name__, None) is t for t in types)\n"
        "for name in [n for n in sys.modules if 'arctic_rl_c' in n]: del sys.modules[name]\n"
        "gone = weakref.ref(first)\n"
        "del first, types, arctic_rl_c\n"
        "gc.collect()\n"
        "print(gone() is None)\n"
    )
    run = run_python(code)
    assert (run.returncode, run.stdout, run.stderr) == (0, "True\n", "")


def test_reloading_is_harmless() -> None:
    code = (
        "import importlib, arctic_rl_c._core as core\n"
        "before = core.ArcticError\n"
        "assert importlib.reload(core).ArcticError is before\n"
    )
    run = run_python(code)
    assert (run.returncode, run.stderr) == (0, "")


if sys.version_info >= (3, 12):  # earlier interpreters have no way to refuse

    def test_subinterpreters_are_refused() -> None:
        """NumPy's table is one per process, so a second interpreter must not get in."""
        module = "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
        inside = (
            "import importlib.util as util\n"
            f"spec = util.spec_from_file_location('arctic_rl_c._core', {core.__file__!r})\n"
            "try:\n    util.module_from_spec(spec)\n"
            "except ImportError as error:\n    print(error)\n"
        )
        code = (
            f"import {module} as interpreters\n"
            "number = interpreters.create()\n"
            f"interpreters.run_string(number, {inside!r})\n"
            "interpreters.destroy(number)\n"
        )
        run = run_python(code)
        assert run.returncode == 0, run.stderr
        assert "does not support loading in subinterpreters" in run.stdout


# ---- what is being tested ------------------------------------------------------------------------


def test_the_build_is_the_one_that_was_meant() -> None:
    """ARL_EXPECT names what the run is about, so that no other build can pass for it."""
    import residue

    expected = os.environ.get("ARL_EXPECT", "").split(",")
    inside_tree = csource.ROOT / "arctic_rl_c" in Path(core.__file__).parents
    if "installed" in expected:
        assert not inside_tree, f"{core.__file__} is in the source tree, not installed"
    if "sanitized" in expected:
        assert residue.is_sanitized(core.__file__), f"{core.__file__} has no sanitizer in it"
        loaded = Path("/proc/self/maps").read_text()
        assert "libasan" in loaded
        assert core.__file__ in loaded
