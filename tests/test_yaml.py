# SPDX-License-Identifier: Apache-2.0
"""The YAML reader: equal to OmegaConf's where that accepts, named errors where ours refuses."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from arctic_rl_c import ConfigError, load_yaml
from yaml_reference import REFUSALS, assert_same, omegaconf

# ---- scalars ----------------------------------------------------------------------------------

SCALARS = """
1 0 -1 +1 007 0o17 010 08 0_ 0__7 -017 0x1F -0x1f 0X1F 0xg 0b101 0b2 0b1_0 1_000 _1 1__0 1_ 1:30
-1:30 1:60 1:5 0:30 1:30:00 01:30 190:20:30.15 1:30.5 1:2:3. 1.5 -1.5 +1.5 .5 -.5 +.5 5. 1_0.5
1._5 1.5_ 1e-6 1E-6 1e+6 1e6 1E6 1.e5 1.0e5 1.0e-5 1._5e5 .5e5 .5e-5 .5E+5 1_0e5 1__0e5 1__0.5e5
1e 1e5.5 e5 12e03 -2e2
-2E+2 1.5e300 1e400 -1e400 1e-400 1e5_0 .inf -.inf +.inf .Inf .INF .iNF inf -inf .nan .NaN .NAN
-.nan nan . .. ... + -- +- ~ ~~ null Null NULL nULL none None yes Yes YES yEs no No NO y n Y N true
True TRUE tRue false False FALSE on On ON oN off Off OFF = =x << <<x 2024-01-01
2024-01-01T00:00:00Z 12:30:45 0.0 -0.0 -0 00 0.1 1e16 123456789012345678 9223372036854775807
-9223372036854775808 9223372036854775808 -9223372036854775809 0xffffffffffffffffffff
-0b1111111111111111111111111111111111111111111111111111111111111111111111 1_000_000.000_1 3.14
1.7976931348623157e308 5e-324 2.2250738585072014e-308 0.1e1 abc a.b a-b a/b C:/x 1a 1.2.3 1-2 1+1
""".split()  # noqa: SIM905


@pytest.mark.parametrize("scalar", SCALARS)
def test_plain_scalars_mean_what_they_mean_to_omegaconf(scalar: str) -> None:
    text = f"a: {scalar}\n"
    try:
        wanted = omegaconf(text)
    except REFUSALS:
        assert scalar in ("=", "<<")  # YAML 1.1's value and merge marks; text to us
        assert load_yaml(text=text) == {"a": scalar}
        return
    assert_same(load_yaml(text=text), wanted)


@pytest.mark.parametrize("scalar", SCALARS)
@pytest.mark.parametrize("quote", ["'", '"'])
def test_quoted_scalars_stay_text(scalar: str, quote: str) -> None:
    assert load_yaml(text=f"a: {quote}{scalar}{quote}\n") == {"a": scalar}


@given(st.text("0123456789+-._:eExXbo~nfaINFT", min_size=1, max_size=9))
def test_any_mixture_of_number_characters_reads_like_omegaconf(scalar: str) -> None:
    text = f"a: {scalar}\n"
    try:
        wanted = omegaconf(text)
    except REFUSALS:
        with pytest.raises(ConfigError):
            load_yaml(text=text)
        return
    assert_same(load_yaml(text=text), wanted)


@given(st.floats())
def test_every_float_comes_back(value: float) -> None:
    spelled = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(repr(value), repr(value))
    assert_same(load_yaml(text=f"a: {spelled}\n"), {"a": value})


@given(st.floats() | st.integers())
def test_numbers_print_into_text_as_python_prints_them(value: float) -> None:
    spelled = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(repr(value), repr(value))
    found = load_yaml(text=f"a: {spelled}\nb: <${{a}}>\n")
    assert found["b"] == f"<{value}>"


def test_big_integers_keep_every_digit() -> None:
    digits = "123456789" * 40
    assert load_yaml(text=f"a: -{digits}\nb: 0x{'f' * 300}\n") == {
        "a": -int(digits),
        "b": 16**300 - 1,
    }


def test_an_integer_beyond_pythons_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"<text>:1:4: a?.*4301 digits; at most 4300"):
        load_yaml(text=f"a: {'9' * 4301}\n")


def test_numbers_do_not_follow_the_process_locale() -> None:
    import locale

    before = locale.setlocale(locale.LC_NUMERIC)
    for name in ("de_DE.UTF-8", "fr_FR.UTF-8", "C.UTF-8"):
        try:
            locale.setlocale(locale.LC_NUMERIC, name)
        except locale.Error:
            continue
        try:
            assert load_yaml(text="a: 1.5\nb: x${a}\n") == {"a": 1.5, "b": "x1.5"}
        finally:
            locale.setlocale(locale.LC_NUMERIC, before)


# ---- documents --------------------------------------------------------------------------------

DOCUMENTS = [
    "",
    "# nothing\n",
    "---\n",
    "--- {}\n...\n",
    "%YAML 1.1\n---\na: 1\n",
    "\ufeffa: 1\n",
    "a:\n",
    "a: {}\nb: []\n",
    "a: {b: {c: [1, [2, [3]]]}}\n",
    "a: {b: 1, c}\n",
    "[a, b: c, {d: e}]\n",
    "- 1\n-\n  - 2\n- a: 1\n  b: 2\n",
    "a: |\n  x\n  y\nb: >\n  x\n  y\n\n  z\nc: |-\n  x\nd: >+\n  x\n\n",
    "a: \"\\u00e9\\n\\t\\\\ \\x41 \\0\"\nb: 'it''s'\n",
    "? a\n: 1\n? b\n: 2\n",
    "2: a\n2.5: b\ntrue: c\nno: d\n0x10: e\n-1: f\n",
    "on: 1\n'on': 2\n",
    "a: &x {p: 1, q: [1, 2]}\nb: *x\nc: [*x, *x]\n",
    "a: &x 1e-6\nb: *x\n&k key: *x\n",
    "base: &b {p: 1, q: 2}\na: {<<: *b, q: 3, r: 4}\n",
    "base: &b {p: 1, q: 2}\na:\n  q: 3\n  <<: *b\n  r: 4\n",
    "a: &a {p1: 1}\nb: &b {<<: *a, p2: 2}\nc: {<<: *b, p3: 3}\n",
    "x: &x {k1: 1}\nz: {<<: [*x], k3: 3}\n",  # how several combine differs between PyYAMLs
    "a: {<<: {b: 1}, c: 2}\n",
    "'<<': 1\na: {\"<<\": 2}\n",
    "a: 'b: c'\n",
    "a: x # comment\nb: x#y\n",
    "über: ñ\n日本: 語\n",
    "a: 'multi\n  line\n\n  text'\n",
    "a: plain\n  over lines\n",
    "=: 1\n",
    "a: [\n 1,\n 2,\n]\n",
    "a: '!'\n",
]


@pytest.mark.parametrize("text", DOCUMENTS)
def test_documents_read_like_omegaconf(text: str) -> None:
    found = load_yaml(text=text)
    wanted = omegaconf(text)
    if found is None:  # an empty document: OmegaConf makes a map of it
        found = {}
    assert_same(found, wanted)


plain = st.sampled_from(
    ["a", "b", "key", "1", "1.5", "true", "null", "x y", "é", "-", "~", "1e-6", "'q'", '"d"', "??"]
)
keys = st.sampled_from(["a", "b", "c d", "1", "2.5", "no", "'q'", "é", "k-e.y"])


def block(node: Any, indent: int = 0) -> str:
    """`node` (dict of key text, list, or scalar text) in block style."""
    pad = " " * indent
    if isinstance(node, dict):
        return "".join(f"{pad}{key}:{below(value, indent)}" for key, value in node.items())
    return "".join(f"{pad}-{below(value, indent)}" for value in node)


def below(value: Any, indent: int) -> str:
    if isinstance(value, str):
        return f" {value}\n"
    return "\n" + block(value, indent + 2) if value else " []\n" if value == [] else " {}\n"


def flow(node: Any) -> str:
    if isinstance(node, str):
        return node
    if isinstance(node, dict):
        return "{" + ", ".join(f"{key}: {flow(value)}" for key, value in node.items()) + "}"
    return "[" + ", ".join(map(flow, node)) + "]"


trees = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(keys, trees, min_size=1, max_size=5), st.booleans())
def test_generated_documents_read_like_omegaconf(tree: dict[str, Any], in_flow: bool) -> None:
    text = flow(tree) + "\n" if in_flow else block(tree)
    assume("-]" not in text and "-}" not in text and "- }" not in text)  # '-' alone ends no item
    try:
        wanted = omegaconf(text)
    except REFUSALS:
        with pytest.raises(ConfigError):
            load_yaml(text=text)
        return
    assert_same(load_yaml(text=text), wanted)


marks = [
    ": ",
    ":",
    " ",
    "\n",
    "\n  ",
    "\n    ",
    "- ",
    "-",
    "[",
    "]",
    "{",
    "}",
    ", ",
    ",",
    "#",
    " # c",
]
signs = ["&x ", "*x", "<<: *x", "'", '"', "|", "|\n", ">", "?", "%", "@", "`", "\\", "...", "---"]
words = ["a", "b", "1", "1.5", "true", "~", "null", "k: v", "é", "\\n"]
pieces = st.sampled_from(marks + signs + words)


@given(st.lists(pieces, min_size=1, max_size=14).map("".join))
def test_text_of_yaml_pieces_agrees_wherever_both_accept(text: str) -> None:
    """libyaml and PyYAML draw the line of valid YAML differently; the meaning must not differ."""
    try:
        found = load_yaml(text=text)
        wanted = omegaconf(text)
    except (ConfigError, *REFUSALS):
        return
    if isinstance(found, (dict, list)):  # a scalar alone is the name of a key to OmegaConf
        assert_same(found, wanted)


@given(st.binary(max_size=64))
def test_any_bytes_give_data_or_an_error(data: bytes) -> None:
    try:
        load_yaml(text=data.decode("latin-1"))
    except ConfigError as error:
        assert str(error).startswith("<text>")


def test_aliases_are_independent_copies() -> None:
    found = load_yaml(text="a: &x {p: [1]}\nb: *x\n")
    found["b"]["p"].append(2)
    assert found["a"] == {"p": [1]}


def test_merge_lists_prefer_the_earlier_map_and_own_keys() -> None:
    text = "x: &x {one: 1, two: 1}\ny: &y {two: 2, three: 2}\nz: {three: 3, <<: [*x, *y]}\n"
    found = load_yaml(text=text)["z"]
    assert found == {"one": 1, "two": 1, "three": 3}
    assert list(found) == ["one", "two", "three"]


# ---- refusals ---------------------------------------------------------------------------------

REFUSED = {
    "a: 1\nb: 2\na: 3\n": r"<text>:3:1: the key 'a' is given twice: here on line 3 and before .* 1",
    "x: {low_memory: true, low_memory: false}\n": r"<text>:1:23: the key .low_memory. is",
    "1: a\n0x1: b\n": r"<text>:2:1: the key 1 is given twice",
    "true: a\n1: b\n": r"the key 1 is given twice",
    "a: {<<: {b: 1}, <<: {c: 1}}\n": r"<text>:1:17: the key '<<' is given twice",
    "a: {<<: 1}\n": r"<text>:1:9: '<<' merges a mapping or a list of mappings, found an integer",
    "a: {<<: [{b: 1}, 2]}\n": r"<text>:1:18: '<<' merges .*, found an integer",
    "a: !!python/object/apply:os.system ['true']\n": r"<text>:1:4: the tag 'tag:.*python/",
    "a: !!int '1'\n": r"<text>:1:4: the tag 'tag:yaml.org,2002:int': tags are not read",
    "a: !local {b: 1}\n": r"<text>:1:4: the tag '!local'",
    "a: !!seq [1]\n": r"<text>:1:4: the tag",
    "- 1\n---\n- 2\n": r"<text>:2:1: a second document begins",
    "a: *nowhere\n": r"<text>:1:4: no anchor '&nowhere' before '\*nowhere'",
    "a: &x [1, *x]\n": r"<text>:1:11: '\*x' stands inside what it names \(line 1\)",
    "a: &x {b: {c: *x}}\n": r"<text>:1:15: '\*x' stands inside",
    "a: &x 1\nb: &x 2\n": r"<text>:2:4: the anchor '&x' is defined twice, before on line 1",
    "~: 1\n": r"<text>:1:1: a key is missing or null",
    "? \n: 1\n": r"<text>:1:2: a key is missing or null",
    "{[a]: 1}\n": r"<text>:1:2: a list cannot be a key",
    "? {a: 1}\n: 2\n": r"<text>:1:3: a mapping cannot be a key",
    "a: 0x_\n": r"<text>:1:4: .*a number with a prefix but no digits",
    f"a: {'9' * 30}:30\n": r"<text>:1:4: .*base-60 number .* is too large",
    "a: [1\n": r"<text>:2:1: not valid YAML: .* \(while parsing .* that begins on line 1\)",
    "a: b: c\n": r"<text>:1:5: not valid YAML: mapping values are not allowed",
    "\ta: 1\n": r"<text>:1:1: not valid YAML: found character that cannot start any token",
    "a: 'x\n": r"not valid YAML: .*unexpected end of stream",
    "a: \x00\n": r"<text>:1:4: unreadable: control characters are not allowed",
    "é: 1\nb: \x07\n": r"<text>:2:4: unreadable: control characters are not allowed",
    "%YAML 3.0\n---\na: 1\n": r"<text>:1:1: not valid YAML: found incompatible YAML document",
}


@pytest.mark.parametrize("text", REFUSED)
def test_refusals_name_line_column_and_reason(text: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[text]) as caught:
        load_yaml(text=text)
    assert caught.value.code == "ARL_ERR_CONFIG"
    assert caught.value.operation == "load_yaml"


def test_bytes_that_are_not_utf8_are_refused_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes("a: é\nbb: ".encode() + b"\xff\n")
    with pytest.raises(ConfigError, match=r"bad\.yaml:2:5: unreadable: invalid leading"):
        load_yaml(path)


def test_utf16_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "wide.yaml"
    path.write_bytes("a: 1\n".encode("utf-16"))
    with pytest.raises(ConfigError, match=r"wide\.yaml:1:1: unreadable"):
        load_yaml(path)


# ---- limits: nothing that is read may take memory or time without bound --------------------------


def test_nesting_is_limited() -> None:
    deep = "a: " + "[" * 63 + "]" * 63
    assert load_yaml(text=deep) is not None
    with pytest.raises(ConfigError, match=r"<text>:1:67: nested more than 64 levels deep"):
        load_yaml(text="a: " + "[" * 64 + "]" * 64)
    with pytest.raises(ConfigError, match="nested more than 64 levels deep"):
        load_yaml(text="[" * 100_000)
    with pytest.raises(ConfigError, match="nested more than 64 levels deep"):
        load_yaml(text="".join(" " * i + "a:\n" for i in range(100)))


def test_aliases_cannot_nest_beyond_the_limit() -> None:
    text = "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 80))
    with pytest.raises(ConfigError, match="nested more than 64 levels deep"):
        load_yaml(text=text)


def test_laughing_aliases_are_stopped() -> None:
    text = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
    )
    with pytest.raises(ConfigError, match=r"more than 200000 values: .* aliases"):
        load_yaml(text=text)


def test_laughing_interpolations_are_stopped() -> None:
    text = "a0: lol\n" + "".join(f"a{i}: ${{a{i - 1}}}${{a{i - 1}}}\n" for i in range(1, 40))
    with pytest.raises(ConfigError, match="beyond 64 MiB"):
        load_yaml(text=text)
    text = "a0: [x, x]\n" + "".join(
        f"a{i}: ['${{a{i - 1}}}', '${{a{i - 1}}}']\n" for i in range(1, 40)
    )
    with pytest.raises(ConfigError, match="more than 200000 values"):
        load_yaml(text=text)


def test_keys_of_one_map_are_limited() -> None:
    text = "".join(f"k{i}: 1\n" for i in range(5000))
    with pytest.raises(ConfigError, match="more than 4096 keys"):
        load_yaml(text=text)


def test_input_is_limited(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    path.write_text("# " + "x" * (9 << 20))
    with pytest.raises(ConfigError, match=r"large\.yaml: more than 8 MiB"):
        load_yaml(path)


# ---- where text comes from ----------------------------------------------------------------------


def test_paths_text_and_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: 1\n")
    wanted = {"a": 1}
    assert load_yaml(path) == load_yaml(str(path)) == load_yaml(os.fsencode(path)) == wanted
    assert load_yaml("a: 1\n") == load_yaml(text="a: 1") == wanted
    with pytest.raises(FileNotFoundError, match="cannot open a: 1"):
        load_yaml("a: 1")
    with pytest.raises(IsADirectoryError, match="cannot read"):
        load_yaml(tmp_path)
    for arguments in ((), (None,)):
        with pytest.raises(TypeError, match=r"either a path .* or text="):
            load_yaml(*arguments)
    with pytest.raises(TypeError, match=r"either a path .* or text="):
        load_yaml("a: 1\n", text="a: 1\n")
    with pytest.raises(TypeError, match="text must be str, not bytes"):
        load_yaml(text=b"a: 1")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        load_yaml(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="null"):
        load_yaml("a\0b")
    for line in ("remote_backend: {}", "x" * 5000, "/dev/null/below"):
        with pytest.raises(OSError, match="a path: YAML text of one line is passed as text="):
            load_yaml(line)
    for data in (b"a: 1", b"a: 1\n", b"a: \xff"):
        with pytest.raises(FileNotFoundError, match="YAML text, decoded to str, is passed as"):
            load_yaml(data)
    with pytest.raises(FileNotFoundError) as caught:
        load_yaml(tmp_path / "missing.yaml")  # nobody writes a Path for a text
    assert "text=" not in str(caught.value)
    with pytest.raises(UnicodeEncodeError):
        load_yaml(text="a: \udc80")


def test_a_pipe_can_be_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    text = "a: [" + "1, " * 40_000 + "2]\n"
    writer = threading.Thread(target=pipe.write_text, args=(text,))
    writer.start()
    try:
        assert len(load_yaml(pipe)["a"]) == 40_001
    finally:
        writer.join(timeout=60)


def test_anything_that_is_data_may_be_the_root() -> None:
    assert load_yaml(text="[1, 2]") == [1, 2]
    assert load_yaml(text="x") == "x"
    assert load_yaml(text="") is None
    assert load_yaml(text="a: ${b}\nb: 1", resolve=False) == {"a": "${b}", "b": 1}
