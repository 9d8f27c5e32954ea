# SPDX-License-Identifier: Apache-2.0
"""Overrides: Hydra's values and Hydra's rules for what may be changed, added and removed."""

from __future__ import annotations

from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from arctic_rl_c import ConfigError, load_config
from yaml_reference import REFUSALS, assert_same

PARSER = OverridesParser.create()
NO_GROUPS = "choosing config groups is Hydra's business"


def ours(value: str) -> Any:
    return load_config(text="a: 5\nb: {c: x}\n", overrides=[f"+zz={value}"])["zz"]


def hydras(value: str) -> Any:
    """What Hydra and OmegaConf make of the value; an exception for sweeps and functions too."""
    override = PARSER.parse_override(f"zz={value}")
    if override.is_sweep_override():
        raise HydraException("a sweep")
    config = OmegaConf.create({"a": 5, "b": {"c": "x"}, "zz": override.value()})
    return OmegaConf.to_container(config, resolve=True)["zz"]  # type: ignore[index]


VALUES = r"""
1|-1|+1|007|0x1F|1_000|1.5|.5|5.|1e-6|1E6|1e+5|inf|-nan|true|TRUE|False|null
NULL|yes|on|~|text
two words| spaced |||	| |a  b|1x|a-b|a.b|/a/b|a:b|a: b|C:\x
x@y|50%|a+b|$x|*|?|a\,b|a\ b|\ x|a\\b|\[x\]
'quoted'|"quoted"|'1'|"true"|'it\'s'|"say \"x\""|'a\\'|'a\b'|''|""|'a, b'|"a=b"| 'x' |'é'
[]|[1]|[1,2]|[ 1 , 2 ]
[a b, 'c, d']|[[1],[2,[3]]]|[null,true,1e-6]|{}|{a:1}|{a: 1}|{ a : 1 , b : x y }
{a:{b:[1,{c:2}]}}|{1:a}|{true:a}
{a-b:c}|[{a:1},{b:2}]|{a:'b, c'}|[1,2|{a}|{a:}|{:1}|[1,]|[,1]|[1 2]
${a}|${b.c}|x${a}y|[${a},2]|{k:${a}}|'${a}'|${oc.select:nope,3}|${|${}|$|1,2|a,b|[1],[2]|f(1)|choice(a,b)
range(1,3)|a=b|a(b|a)b|a'b|'a'b|"a|'a|é|#|!|&|a b ]|}|]|\|\\|\\\|a\|'\'|'\\\''
"""
CASES = [value for line in VALUES.strip().split("\n") for value in line.split("|")] + [
    "",
    " ",
    "\t",
]


def agree(value: str) -> None:
    try:
        wanted = hydras(value)
    except (HydraException, *REFUSALS):
        with pytest.raises(ConfigError):
            ours(value)
        return
    assert_same(ours(value), wanted)


@pytest.mark.parametrize("value", CASES)
def test_values_mean_what_they_mean_to_hydra(value: str) -> None:
    agree(value)


words = [
    "a",
    "b c",
    "1",
    "-1",
    "1.5",
    "1e-6",
    "true",
    "null",
    "yes",
    "x-y",
    "${a}",
    "é",
    "inf",
    "1_000",
]
signs = [
    " ",
    "\t",
    "'",
    '"',
    "\\",
    "\\\\",
    "[",
    "]",
    "{",
    "}",
    ",",
    ":",
    ": ",
    "=",
    "/",
    "(",
    ")",
    "$",
    "+",
]
pieces = st.sampled_from(words + signs)
wrappings = st.sampled_from(["{}", "[{}]", "{{a: 1, k:{}}}", "'{}'", '"{}"'])


@given(st.lists(pieces, max_size=6).map("".join), wrappings)
def test_any_value_means_what_it_means_to_hydra(inner: str, wrapping: str) -> None:
    agree(wrapping.format(inner))


# ---- what may be changed ----------------------------------------------------------------------

FILE = """
remote_backend: {train: {zorro_train: {enable: false}}}
mine: {list: [1, {a: b}], map: {p: 1, q: {r: 2}}, empty: null, text: x}
"""


def changed(*overrides: str) -> dict[str, Any]:
    return load_config(text=FILE, overrides=overrides)


def test_a_key_of_the_file_or_of_the_schema_can_be_changed() -> None:
    assert changed("mine.text=y")["mine"]["text"] == "y"
    assert changed("mine.list=[]")["mine"]["list"] == []
    assert changed("mine.list.0=7")["mine"]["list"][0] == 7
    assert changed("mine.list.1.a=c")["mine"]["list"][1] == {"a": "c"}
    assert changed("remote_backend.train.zorro_train.enable=true")["remote_backend"]["train"][
        "zorro_train"
    ]["enable"]
    assert changed("remote_backend.colocate=false")["remote_backend"]["colocate"] is False
    assert changed("actor_rollout_ref.rollout.n=8")["actor_rollout_ref"]["rollout"]["n"] == 8


def test_maps_are_merged_and_lists_replaced() -> None:
    assert changed("mine.map={q:{s:3},t:4}")["mine"]["map"] == {
        "p": 1,
        "q": {"r": 2, "s": 3},
        "t": 4,
    }
    assert changed("mine.map=5")["mine"]["map"] == 5
    assert changed("mine.text={a:1}")["mine"]["text"] == {"a": 1}


def test_adding_and_forcing() -> None:
    assert changed("+new.deep.key=1")["new"] == {"deep": {"key": 1}}
    assert changed("+mine.empty=1")["mine"]["empty"] == 1
    assert changed("+mine.map={z:1}")["mine"]["map"]["z"] == 1
    assert changed("++mine.text=1", "++other=2")["other"] == 2
    assert changed("+remote_backend.colocate=false")["remote_backend"]["colocate"] is False


def test_removing() -> None:
    assert "text" not in changed("~mine.text")["mine"]
    assert "text" not in changed("~mine.text=x")["mine"]
    assert changed("~mine.map.q")["mine"]["map"] == {"p": 1}
    assert "mine" not in changed("~mine")


def test_order_counts() -> None:
    assert changed("+k=1", "k=2", "++k=3")["k"] == 3
    assert changed("~mine.text", "+mine.text=z")["mine"]["text"] == "z"


def test_interpolations_of_overrides_are_resolved_in_place() -> None:
    found = changed("+k=${mine.map.p}", "+mine.map.u=${.p}", "+l='x${mine.text}'")
    assert (found["k"], found["mine"]["map"]["u"], found["l"]) == (1, 1, "xx")


def test_overrides_of_the_flat_form() -> None:
    flat = ["+remote_backend.zorro_train.max_rollouts=3", "+remote_backend.comm_protocol=http"]
    found = load_config(text="{}", overrides=flat)["remote_backend"]
    assert found["generation"] == "seed"
    assert found["train"]["zorro_train"]["max_rollouts"] == 3
    assert found["comms"]["protocol"] == "http"
    assert load_config(text="{}", overrides=["remote_backend.cuda_ipc_weight_sync=true"])[
        "remote_backend"
    ]["weight_sync"] == {"cuda_ipc": True, "low_memory": False}


REFUSED = {
    "": "no '='",
    "mine.text": "no '='; an override is key=value",
    "=1": "no key",
    "~": "no key",
    "+=1": "no key",
    "mine.nope=1": r"there is no key mine\.nope; to add it, write \+mine\.nope=",
    "mine.list.9=1": r"there is no key mine\.list\.9",
    "mine.list.x=1": r"there is no key mine\.list\.x",
    "mine.text.x=1": r"there is no key mine\.text\.x",
    "+mine.text.x=1": r"mine\.text is text and cannot hold keys",
    "+mine.text=1": r"mine\.text is there already; change it with mine\.text=\.\.\. or \+\+",
    "~mine.nope": r"there is no key mine\.nope to remove",
    "~mine.text=y": r"not removed: its value is 'x'",
    "~mine.map=1": r"not removed: its value is a mapping of 2",
    "~mine.list.0": r"an item of a list cannot be removed",
    "a..b=1": r"'a\.\.b' has an empty part",
    ".a=1": r"'\.a' has an empty part",
    "a.=1": r"'a\.' has an empty part",
    "a b=1": r"'a b' is not a key",
    "+é=1": r"is not a key",
    "db/mysql=1": NO_GROUPS,
    "+db@pkg=1": NO_GROUPS,
    "+k=f(1)": r"in 'f\(1\)' at character 2: functions are Hydra's business",
    "+k=1,2": r"in '1,2' at character 2: several values are a sweep",
    "+k='a' b": r"at character 4: one value was wanted",
    "+k=${": r"not an interpolation",
    "+k=${nope}": r"override '\+k=\$\{nope\}': k: \$\{nope\}: there is no such key",
    "remote_backend.use_zorro=true": r"there is no key remote_backend\.use_zorro; did you mean "
    r"remote_backend\.train\.zorro_train\.enable",
    "+remote_backend.use_zorro=true": r"unknown key; did you mean",
    "remote_backend.train.zorro_train.enable=yes": r"wants true or false, found text 'yes'",
    "remote_backend.zorro_train.enable=true": r"of the flat form, but 'train' \(<text>:2:18\)",
    "data.train_batch_size=0": r"=0': data\.train_batch_size: must be at least 1, found 0",
}


@pytest.mark.parametrize("override", REFUSED)
def test_refusals_name_the_override(override: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[override]) as caught:
        changed(override)
    assert str(caught.value).startswith("override '")
    assert caught.value.operation == "load_config"


def test_overrides_are_a_list_of_str() -> None:
    with pytest.raises(TypeError, match="overrides is a list of str, not one str"):
        load_config(text="a: 1", overrides="a=1")
    with pytest.raises(TypeError, match="override 1 must be str, not int"):
        load_config(text="a: 1", overrides=["a=1", 2])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        load_config(text="a: 1", overrides=5)  # type: ignore[arg-type]
    with pytest.raises(UnicodeEncodeError):
        load_config(text="a: 1", overrides=["a=\udc80"])
    assert load_config(text="a: 1", overrides=(text for text in ["a=2"]))["a"] == 2
