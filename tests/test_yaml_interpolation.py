# SPDX-License-Identifier: Apache-2.0
"""Interpolations: what OmegaConf.to_container(resolve=True) gives, or an error with the place."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arctic_rl_c import ConfigError, load_yaml
from yaml_reference import REFUSALS, assert_same, omegaconf

BASE = """
a: 1
b: x y
c: {d: 2.5, e: [1, z, {f: true}]}
l: [10, 20]
n: null
deep: {er: {est: down}}
k-e-y: dash
t: 1e-6
"""

EXPRESSIONS = r"""
${a}
${b}
${c}
${c.d}
${c.e}
${c.e[0]}
${c.e.0}
${c[e][2].f}
${c.e[2][f]}
${[c].d}
${ a }
${n}
${l}
${k-e-y}
${t}
x${a}
${a}${b}
${a} ${c.d} ${n} ${t} ${c.e[2].f}
${.a}
${..a}
${.here}
${..l[1]}
\${a}
\\${a}
\\\${a}
\\\\${a}
x\y
$a
${a
a}
$${a}
$\{a}
{${a}}
${${k}}
${c.${k}}
${deep.${m.name}.est}
${deep[er].est}
${oc.env:ARL_SET}
${oc.env:ARL_UNSET,fallback}
${oc.env:ARL_UNSET,null}
${oc.env:ARL_UNSET,1e-6}
${oc.env:ARL_UNSET,}
${oc.env:ARL_UNSET,'${a}, b'}
${oc.env:ARL_SET}/${a}
${oc.env:ARL_UNSET,${b}}
${oc.env:"ARL_SET"}
${oc.select:a}
${oc.select:nope}
${oc.select:nope,7}
${oc.select:nope,[1, 2, {x: y}]}
${oc.select:nope,{a: 1, b: [c]}}
${oc.select:nope, 'quoted, with comma'}
${oc.select:nope,"double"}
${oc.select:nope,${l}}
${oc.select:nope,[${a}, ${b}]}
${oc.select:c.e[1]}
${oc.select:c.d.nope,3}
${oc.select:.here}
${oc.select:nope,x:y}
${oc.select:nope,a b  c}
${oc.select:nope,\,\ }
${oc.select:nope,1_000}
${oc.select:nope,-2}
${oc.select:nope,+3}
${oc.select:nope,007}
${oc.select:nope,0x10}
${oc.select:nope,1.}
${oc.select:nope,.5}
${oc.select:nope,1e5}
${oc.select:nope,1.5E-3}
${oc.select:nope,inf}
${oc.select:nope,-NAN}
${oc.select:nope,TRUE}
${oc.select:nope,false}
${oc.select:nope,Null}
${oc.select:nope,yes}
${oc.select:nope,1x}
${oc.select:nope,-}
${oc.select:nope,'it\'s'}
${oc.select:nope,'\\'}
${oc.select:nope,""}
${oc.select:nope,'x${a}y'}
${oc.select:nope,'${a}'}
${oc.select:nope,'\${a}'}
${oc.decode:'[1, 2.5, null]'}
${oc.decode:${oc.env:ARL_LIST}}
${oc.decode:${b}}
${oc.decode:null}
${oc.decode:'{a: ${a}}'}
"""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARL_SET", "from the environment")
    monkeypatch.setenv("ARL_LIST", "[1, true, x]")
    monkeypatch.delenv("ARL_UNSET", raising=False)


def quoted(expression: str) -> str:
    return "'" + expression.replace("'", "''") + "'"


def document(expression: str) -> str:
    value = quoted(expression)
    return f"{BASE}k: d\nm: {{here: 5, name: er, x: {value}}}\nx: {value}\n"


def agree(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an argument left empty is deprecated there
        try:
            wanted = omegaconf(text)
        except REFUSALS:
            with pytest.raises(ConfigError):
                load_yaml(text=text)
            return
    assert_same(load_yaml(text=text), wanted)


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("expression", EXPRESSIONS.strip().split("\n"))
def test_expressions_give_what_omegaconf_gives(expression: str) -> None:
    agree(document(expression))


def test_most_of_the_expressions_are_values_and_not_errors(environment: None) -> None:
    values = 0
    for expression in EXPRESSIONS.strip().split("\n"):
        try:
            load_yaml(text=document(expression))
        except ConfigError:
            continue
        values += 1
    assert values >= 65


signs = [
    "${",
    "}",
    ".",
    "..",
    "[0]",
    "[1]",
    "[",
    "]",
    "'",
    '"',
    "\\",
    "\\\\",
    ":",
    ",",
    " ",
    "$",
    "{",
    "-",
]
words = ["a", "c.d", "x", "n", "1", "1.5", "null", "true", "e5", "_"]
calls = ["oc.env:ARL_SET", "oc.env:ARL_UNSET,", "oc.select:", "oc.decode:"]
pieces = st.sampled_from(signs + words + calls)


@given(st.lists(pieces, min_size=1, max_size=9).map("".join), st.booleans())
def test_any_expression_gives_what_omegaconf_gives(expression: str, lone: bool) -> None:
    # A container inside text is refused here and printed there, so none is in reach.
    value = quoted("${" + expression + "}" if lone else expression)
    text = f"a: 1\nb: x y\nc: {{d: 2.5}}\nx: {value}\n"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            wanted: Any = omegaconf(text)
        except REFUSALS:
            wanted = None
    try:
        found = load_yaml(text=text)
    except ConfigError as error:
        assert wanted is None or "cannot become part of a text" in str(error), expression
        return
    if wanted is not None:
        assert_same(found, wanted)


names = ["a", "b", "c", "d"]
whole = ["1", "x", "'${a}'", "'${b}'", "'${c}'", "'${.a}'", "'${..b}'", "'${a.b}'"]
partly = ["'-${b}-'", "'${d[0]}'", "'${c.d.a}'", "'${...c}'"]
leaves = st.sampled_from(whole + partly)
maps = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: "[" + ", ".join(items) + "]")
        | st.dictionaries(st.sampled_from(names), inner, max_size=3).map(
            lambda items: "{" + ", ".join(f"{k}: {v}" for k, v in items.items()) + "}"
        )
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(names), maps, min_size=1))
def test_documents_full_of_references_agree(tree: dict[str, str]) -> None:
    text = "".join(f"{key}: {value}\n" for key, value in tree.items())
    try:
        wanted = omegaconf(text)
    except (*REFUSALS, RecursionError):
        with pytest.raises(ConfigError):
            load_yaml(text=text)
        return
    try:
        found = load_yaml(text=text)
    except ConfigError as error:
        assert "cannot become part of a text" in str(error)
        return
    assert_same(found, wanted)


def test_containers_inside_an_argument_are_whole_copies() -> None:
    # OmegaConf leaves its own container inside the plain list here.
    found = load_yaml(text="a: {p: '${c}'}\nb: \"${oc.select:nope,[${a}, ${a}]}\"\nc: 1\n")
    assert found["b"] == [{"p": 1}, {"p": 1}]
    assert found["b"][0] is not found["b"][1]


def test_references_to_containers_are_copies() -> None:
    found = load_yaml(text="a: {p: [1]}\nb: ${a}\nc: ${a.p}\n")
    found["b"]["p"].append(2)
    found["c"].append(3)
    assert found["a"] == {"p": [1]}


def test_relative_names_inside_a_referenced_map_mean_its_own_place() -> None:
    text = "a: {p: 1, q: '${.p}'}\nb: {p: 2, r: '${a}'}\n"
    assert load_yaml(text=text)["b"]["r"] == {"p": 1, "q": 1}


def test_what_the_environment_holds_is_not_interpolated_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ARL_SET", "${a}")
    found = load_yaml(text="a: 1\nb: ${oc.env:ARL_SET}\nc: ['${b}', '${..b}']\nd: ${c}\n")
    assert found["b"] == "${a}"
    assert found["d"] == ["${a}", "${a}"]


def test_missing_values_stay_until_somebody_needs_them() -> None:
    assert load_yaml(text="a: ???\n") == {"a": "???"}
    with pytest.raises(ConfigError, match=r"<text>:2:4: b: \$\{a\}: that value is mandatory"):
        load_yaml(text="a: ???\nb: ${a}\n")
    assert load_yaml(text="a: ???\nb: ${oc.select:a,5}\n")["b"] == 5


# ---- refusals ---------------------------------------------------------------------------------

CHAIN = "a0: 1\n" + "".join(f"a{i}: ${{a{i - 1}}}\n" for i in range(1, 60))

REFUSED = {
    "a: ${b}\n": r"<text>:1:4: a: \$\{b\}: there is no such key",
    "x:\n  y: [1, '${.z}']\n": r"<text>:2:10: x\.y\[1\]: \$\{\.z\}: there is no such key",
    "a: ${b.c}\nb: 1\n": r"a: \$\{b\.c\}: there is no such key",
    "a: ${b[7]}\nb: [1]\n": r"there is no such key",
    "a: ${b[-1]}\nb: [1]\n": r"there is no such key",
    "a: ${...b}\n": r"<text>:1:4: a: '\.\.\.b' leads above the root",
    "a: ${a}\n": r"<text>:1:4: a: interpolations lead back to themselves: a -> a",
    "a: ${b}\nb: x${c}\nc: ${a}\n": r"lead back to themselves: a -> b -> c -> a",
    "a: {b: '${a}'}\n": r"lead back to themselves: .*a",
    "a: {b: '${..c}'}\nc: ['${a}']\n": r"lead back to themselves",
    "a: ${foo:1}\n": r"a: the resolver 'foo' is not known here, only oc\.env",
    "a: ${oc.create:{}}\n": r"the resolver 'oc\.create' is not known here",
    "a: ${oc.env:ARL_UNSET}\n": r"a: the environment variable ARL_UNSET is not set",
    "a: ${oc.env:}\n": r"oc\.env takes 1 to 2 arguments, found 0",
    "a: ${oc.env:a,b,c}\n": r"oc\.env takes 1 to 2 arguments, found 3",
    "a: ${oc.env:1}\n": r"oc\.env wants text, found an integer",
    "a: ${oc.env:ARL_UNSET,[1]}\n": r"oc\.env wants text as its default, found a list",
    "a: ${oc.select:[1]}\n": r"oc\.select wants text, found a list",
    "a: ${oc.decode:1}\n": r"oc\.decode wants text, found an integer",
    "a: \"${oc.decode:'[1'}\"\n": r"in '\[1' at character 3: ',' or '\]' is missing",
    "a: \"${oc.decode:'1, 2'}\"\n": r"one value was wanted, and this comes after it",
    "a: ${b\n": r"a: in '\$\{b' at character 4: '\}' is missing",
    "a: ${}\n": r"a: in '\$\{\}' at character 3: a key is missing",
    "a: '${b c}'\n": r"at character 5: '\}' is missing",
    "a: '${b[c}'\n": r"'\]' is missing",
    'a: "${oc.select:x,\'y}"\n': r"the closing ' is missing",
    "a: '${oc.select:x,(}'\n": r"the character '\(' cannot stand in a bare word; quote the",
    "a: '${oc.select:x,é}'\n": r"the character '\?' cannot stand in a bare word; quote the value",
    "a: '${oc.select:x,{y}}'\n": r"':' is missing",
    "a: '${oc.select:x,{y:1,y:2}}'\n": r"a key is given twice",
    "a: '${oc.select:x,{null:1}}'\n": r"null cannot be a key",
    "a: '${oc.select:x,{y:1 z}'\n": r"',' or '\}' is missing",
    "a: '${oc.select:x,{y: 1 [}}'\n": r"cannot stand in a bare word",
    "a: '${oc.select:x,[1 [2]]}'\n": r"cannot stand in a bare word",
    "a: '${oc.select:x,\"y\" z}'\n": r"',' or '\}' is missing",
    f"a: '${{oc.select:{','.join('123456789')}}}'\n": r"more than 8 arguments",
    f"a: '${{oc.select:x,{'[' * 20}{']' * 20}}}'\n": r"nested more than 16 levels deep",
    f"a: '{'${' * 20}b{'}' * 20}'\n": r"nested more than 16 levels deep",
    "a: <${b}>\nb: [1]\n": r"a: in '<\$\{b\}>' at character 6: a list cannot become part of a text",
    "a: <${b}>\nb: {c: 1}\n": r"a mapping cannot become part of a text",
    f"a: <${{b}}>\nb: 0x{'f' * 20}\n": r"an integer cannot become part of a text",
    "a: ${${b}}\nb: 1\n": r"a key must be text, and this interpolation gives an integer",
}


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("text", REFUSED)
def test_refusals_name_place_and_reason(text: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[text]):
        load_yaml(text=text)


def test_chains_are_limited_but_not_when_known_from_the_front() -> None:
    assert load_yaml(text=CHAIN)["a59"] == 1
    backwards = "".join(f"a{i}: ${{a{i - 1}}}\n" for i in range(60, 0, -1)) + "a0: 1\n"
    with pytest.raises(ConfigError, match="through more than 50 values"):
        load_yaml(text=backwards)


def test_nesting_through_references_is_limited() -> None:
    text = "a0: {x: 1}\n" + "".join(f"a{i}: {{x: '${{a{i - 1}}}'}}\n" for i in range(1, 80))
    with pytest.raises(ConfigError, match="nested more than 64 levels deep"):
        load_yaml(text=text)
    text = "".join(f"a{i}: {{x: '${{a{i - 1}}}'}}\n" for i in range(2000, 0, -1)) + "a0: {x: 1}\n"
    with pytest.raises(ConfigError, match="nested more than 64 levels deep"):
        load_yaml(text=text)


def test_an_environment_that_is_not_utf8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("\udcff", "\udcc3(", "\udcc0\udc80", "\udced\udca0\udc80", "\udce2\udc82"):
        monkeypatch.setenv("ARL_SET", value)
        with pytest.raises(ConfigError, match="a: the environment variable ARL_SET is not UTF-8"):
            load_yaml(text="a: ${oc.env:ARL_SET}\n")
    for value in ("é", "日本", "\U0001f600", "\U0010ffff"):
        monkeypatch.setenv("ARL_SET", value)
        assert load_yaml(text="a: ${oc.env:ARL_SET}\n") == {"a": value}
