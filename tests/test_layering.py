# SPDX-License-Identifier: Apache-2.0
"""The rules of docs/design/architecture.md that text can show: layers, sizes, symbols."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import arctic_rl_c._core as core
import csource

#: What a layer may include from its own tree. Dependencies point one way.
MAY_INCLUDE = {
    "core": ("core/",),
    "transport": ("core/", "transport/"),
    "python": ("core/", "transport/", "python/"),
}

#: Headers that only the Python layer may see, and only through python/arl_python.h.
PYTHON_HEADERS = re.compile(r"<(Python\.h|numpy/.*|structmember\.h|datetime\.h)>")

#: No vendor header anywhere: the tables of transport/ declare what they load at run time.
VENDOR_HEADERS = re.compile(r"<(cuda|cudart|nccl|nvml|driver_types)[\w/]*\.h>")

MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 80

#: Calls that return a borrowed reference. Allowed where a comment on the line, or on the one
#: before, says "borrowed" and so who keeps the object alive.
BORROWING = re.compile(
    r"\b(PyCell_GET|PyDict_GetItem|PyDict_GetItemString|PyDict_GetItemWithError|PyDict_Next|"
    r"PyDict_SetDefault|PyEval_GetBuiltins|PyEval_GetGlobals|"
    r"PyEval_GetLocals|PyFunction_GetDefaults|PyImport_AddModule|PyList_GET_ITEM|PyList_GetItem|"
    r"PyMethod_GET_SELF|PyModule_GetDict|PySequence_Fast_GET_ITEM|"
    r"PySequence_Fast_ITEMS|PyState_FindModule|PyStructSequence_GET_ITEM|PySys_GetObject|"
    r"PyTuple_GET_ITEM|PyTuple_GetItem|PyWeakref_GET_OBJECT|PyWeakref_GetObject)\s*\("
)


def by_path(path: Path) -> str:
    return csource.relative(path)


@pytest.mark.parametrize("path", csource.sources(), ids=by_path)
def test_includes_point_one_way(path: Path) -> None:
    layer = path.relative_to(csource.CSRC).parts[0]
    wrong = []
    for line, name in csource.includes(path):
        where = f"{csource.relative(path)}:{line} includes {name}"
        if name.startswith('"'):
            if not name.strip('"').startswith(MAY_INCLUDE[layer]):
                wrong.append(f"{where}: {layer}/ may include {' '.join(MAY_INCLUDE[layer])}")
            elif not (csource.CSRC / name.strip('"')).exists():
                wrong.append(f"{where}: no such file; names are relative to csrc/")
        elif PYTHON_HEADERS.match(name) and path.name != "arl_python.h":
            wrong.append(f"{where}: only python/arl_python.h does")
        elif VENDOR_HEADERS.match(name):
            wrong.append(f"{where}: declare what is needed in an api table instead")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", csource.sources("python"), ids=by_path)
def test_python_h_comes_first(path: Path) -> None:
    """Python.h sets feature macros, so no system header may come before it."""
    names = [name for _, name in csource.includes(path)]
    if path.suffix == ".h" and not any(name.startswith('"python/') for name in names):
        return  # a header without Python in it, such as an ABI declaration
    first = names[0]
    assert first == "<Python.h>" or first.startswith('"python/'), (
        f"{csource.relative(path)} includes {first} before a header of python/"
    )


@pytest.mark.parametrize("path", csource.sources(suffixes=(".h",)), ids=by_path)
def test_headers_are_guarded(path: Path) -> None:
    text = csource.without_comments(path.read_text())
    guard = re.search(r"#ifndef (\w+_H)\n#define (\w+_H)\n", text)
    assert guard is not None, f"{csource.relative(path)} has no include guard"
    assert guard.group(1) == guard.group(2)


def test_guards_are_unique() -> None:
    guards = [
        match.group(1)
        for path in csource.sources(suffixes=(".h",))
        if (match := re.search(r"#ifndef (\w+_H)\n", path.read_text()))
    ]
    assert len(guards) == len(set(guards))


@pytest.mark.parametrize("path", csource.sources(), ids=by_path)
def test_sizes(path: Path) -> None:
    lines = path.read_text().count("\n")
    assert lines <= MAX_FILE_LINES, f"{csource.relative(path)} has {lines} lines: split it"
    long = [
        f"{csource.relative(path)}:{function.first} {function.name} has {function.length} lines"
        for function in csource.functions(path)
        if function.length > MAX_FUNCTION_LINES
    ]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("path", csource.sources(), ids=by_path)
def test_borrowed_references_are_labelled(path: Path) -> None:
    lines = path.read_text().split("\n")
    code = csource.blank(path.read_text()).split("\n")
    wrong = [
        f"{csource.relative(path)}:{number + 1} {found.group(1)} without saying whose reference"
        for number, line in enumerate(code)
        if (found := BORROWING.search(line))
        and not any("borrowed" in text for text in lines[max(0, number - 1) : number + 1])
    ]
    assert not wrong, "\n".join(wrong)


#: Calls that take a failed allocation for "no such key"; arl_python.h has those that tell.
SWALLOWING = re.compile(
    r"\b(PyDict_GetItem|PyDict_GetItemString|PyObject_HasAttr|PyObject_HasAttrString|"
    r"PyMapping_HasKey|PyMapping_HasKeyString)\s*\("
)


@pytest.mark.parametrize("path", csource.sources("python"), ids=by_path)
def test_no_call_swallows_errors(path: Path) -> None:
    wrong = [
        f"{csource.relative(path)}:{number} {found.group(1)}"
        for number, line in enumerate(csource.blank(path.read_text()).split("\n"), 1)
        if (found := SWALLOWING.search(line))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", csource.sources("python"), ids=by_path)
def test_nothing_leaves_a_section(path: Path) -> None:
    """No return, goto or Python call while the GIL is released, no exit from a critical section."""
    wrong = []
    for function in csource.functions(path):
        for begin, end, forbidden in SECTIONS:
            for section in re.finditer(rf"\b{begin}\b(.*?)\b{end}\b", function.body, re.DOTALL):
                for exit_ in re.finditer(forbidden, section.group(1)):
                    at = section.start(1) + exit_.start()
                    line = function.last - function.body.count("\n", at)
                    wrong.append(
                        f"{csource.relative(path)}:{line} {exit_.group().strip()!r} "
                        f"between {begin} and {end} in {function.name}"
                    )
    assert not wrong, "\n".join(wrong)


_LEAVES = r"\breturn\b|\bgoto\b"
_PYTHON_CALL = r"|\bPy[A-Z]\w*\s*\(|\bPy_(?!BLOCK_THREADS|UNBLOCK_THREADS)\w+\s*\("

#: (first macro, last macro, what must not stand between them)
SECTIONS = [
    ("Py_BEGIN_ALLOW_THREADS", "Py_END_ALLOW_THREADS", _LEAVES + _PYTHON_CALL),
    ("Py_BEGIN_CRITICAL_SECTION", "Py_END_CRITICAL_SECTION", _LEAVES),
    ("PyEval_SaveThread", "PyEval_RestoreThread", r"\breturn\b"),
]


def dynamic_symbols(path: str) -> list[str]:
    run = subprocess.run(
        ["nm", "-D", "--defined-only", "--format=posix", path],
        capture_output=True,
        text=True,
        check=True,
    )
    return [line.split()[0] for line in run.stdout.splitlines()]


def test_only_the_init_function_is_exported() -> None:
    # A sanitizer build exports what its runtime needs to find.
    exported = [name for name in dynamic_symbols(core.__file__) if not name.startswith("__asan_")]
    assert exported == ["PyInit__core"]


def test_all_names_carry_the_prefix() -> None:
    """What is not static is `arl_<object>_<verb>`, so a static link can never collide."""
    wrong = [
        f"{csource.relative(path)}:{function.first} {function.name}"
        for path in csource.sources(suffixes=(".c",))
        for function in csource.functions(path)
        if not function.name.startswith("arl_") and function.name != "PyInit__core"
        if not _is_static(path, function)
    ]
    assert not wrong, "\n".join(wrong)


def _is_static(path: Path, function: csource.Function) -> bool:
    lines = csource.blank(path.read_text()).split("\n")
    head = "\n".join(lines[function.first - 1 : function.last])
    return re.search(r"\bstatic\b", head.split(function.name)[0]) is not None


class TestReader:
    """The reader itself, on text made to mislead it."""

    @pytest.fixture
    def source(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(csource, "ROOT", tmp_path)
        path = tmp_path / "x.c"
        path.write_text(
            '#include "core/a.h" /* "core/b.h" */\n'
            "// #include <Python.h>\n"
            "#define BLOCK(x) \\\n"
            "    do { \\\n"
            "        (x); \\\n"
            "    } while (0)\n"
            'static const char *text = "} { return";\n'
            "struct thing { int field; };\n"
            "static int table[] = {1, 2};\n"
            "\n"
            "static int\n"
            "first(int (*callback)(void), char c)\n"
            "{\n"
            "    if (c == '}') {\n"
            "        return callback();\n"
            "    }\n"
            "    return 0;\n"
            "}\n"
            "void second(void) { }\n"
        )
        return path

    def test_functions(self, source: Path) -> None:
        found = [(f.name, f.first, f.last) for f in csource.functions(source)]
        assert found == [("first", 11, 18), ("second", 19, 19)]

    def test_includes(self, source: Path) -> None:
        assert csource.includes(source) == [(1, '"core/a.h"')]

    def test_unbalanced_braces_are_reported(self, source: Path) -> None:
        source.write_text("void f(void) {\n")
        with pytest.raises(ValueError, match="left open"):
            csource.functions(source)

    def test_macro_list(self, source: Path) -> None:
        source.write_text(
            '#define LIST(X) \\\n    /* one */ X(a, "x, y") \\\n    X(b, f(1, 2))\nint X(c);\n'
        )
        assert csource.macro_list(source, "LIST") == [["a", '"x, y"'], ["b", "f(1, 2)"]]
        with pytest.raises(LookupError):
            csource.macro_list(source, "OTHER")
