# SPDX-License-Identifier: Apache-2.0
"""The configuration schema: one normalised form, and every way to get a key or a value wrong."""

from __future__ import annotations

import copy
import gc
import math
import pickle
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

import golden
from arctic_rl_c import (
    ConfigError,
    config_schema,
    config_warnings,
    load_config,
    normalize_config,
)
from arctic_rl_c._core import load_yaml

SCHEMA = config_schema()
ARCTIC = SCHEMA["remote_backend"]
VERL = SCHEMA["verl"]
BOTH_FORMS = [field for field in ARCTIC if field["flat"] is not None]


def put(tree: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """`tree` with `value` at the dotted `path`; changes and returns it."""
    *groups, leaf = path.split(".")
    node = tree
    for group in groups:
        node = node.setdefault(group, {})
    node[leaf] = value
    return tree


def get(tree: dict[str, Any], path: str) -> Any:
    for step in path.split("."):
        tree = tree[step]
    return tree


def config(**values: Any) -> dict[str, Any]:
    """Keys with `__` for dots."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        put(tree, path.replace("__", "."), value)
    return tree


def refusal(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        normalize_config(tree)
    assert caught.value.code == "ARL_ERR_CONFIG"
    assert caught.value.operation == "normalize_config"
    assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args
    return str(caught.value)


# ---- the normalised form ----------------------------------------------------------------------


def test_nothing_at_all_is_the_defaults() -> None:
    found = normalize_config({})
    assert found["remote_backend"] == {
        "colocate": True,
        "training_gpus": 1,
        "sampling_gpus": 1,
        "log_prob_gpus": 1,
        "sampling_tp_size": 1,
        "weight_sync": {"cuda_ipc": False, "low_memory": False},
        "train": {
            "load_balancer": True,
            "zorro_train": {"enable": False, "max_rollouts": 1},
            "logits": {
                "optimization": "none",
                "optimization_peak_mem_size_in_gib": 4,
                "compute_in_fp32": False,
                "compute_from_fp32_inputs": False,
            },
            "determinism": {"full": False, "seed": 42},
            "deepspeed": {
                "zero_optimization": {
                    "stage": 0,
                    "offload_optimizer": {"device": "none"},
                    "offload_param": {"device": "none"},
                },
                "log_level": "INFO",
            },
        },
        "rollout": {"zorro_inference": {"enable": False}, "speculative_decoding": {"model": ""}},
        "comms": {"protocol": "ray", "drop_position_ids": True},
        "generation": "final",
    }
    assert found["actor_rollout_ref"]["actor"]["optim"]["betas"] == [0.9, 0.999]
    assert found["trainer"]["default_local_dir"] == "checkpoints/verl_examples/gsm8k"
    for empty in (None, {}):
        assert normalize_config({"remote_backend": empty}) == found
    assert load_config(text="") == load_config(text="remote_backend:\n") == found


@pytest.mark.parametrize("case", golden.CASES, ids=repr)
def test_recorded_configs_keep_their_values(case: golden.Case) -> None:
    before = copy.deepcopy(case.config)
    found = normalize_config(case.config)
    assert case.config == before
    assert normalize_config(found) == found
    remote = found["remote_backend"]
    assert remote["generation"] == case.version
    given = case.config["remote_backend"]
    if case.version == "final":
        assert {key: value for key, value in remote.items() if key != "generation"} == given
    else:
        for field in BOTH_FORMS:
            if field["flat"] != "tiled_logits_compute":
                assert get(remote, field["path"]) == get(given, field["flat"])
    for section in ("actor_rollout_ref", "data", "trainer"):
        kept(found[section], case.config[section])


def kept(found: Any, wanted: Any) -> None:
    """Everything of `wanted` is in `found`, in its order and with its type."""
    if isinstance(wanted, dict):
        assert [key for key in found if key in wanted] == list(wanted)
        for key, value in wanted.items():
            kept(found[key], value)
    else:
        assert type(found) is type(wanted)
        assert found == wanted


def test_seed_has_its_own_fixed_values() -> None:
    flat = normalize_config(config(remote_backend__comm_protocol="ray"))["remote_backend"]
    assert flat["comms"]["drop_position_ids"] is False
    assert flat["train"]["load_balancer"] is False
    assert flat["train"]["logits"]["tiled_compute"] is True
    flat = normalize_config(config(remote_backend__zorro_train__enable=True))["remote_backend"]
    assert flat["train"]["load_balancer"] is True


def test_defaults_that_follow_other_keys() -> None:
    found = normalize_config(
        config(
            trainer__n_gpus_per_node=4,
            trainer__project_name="p",
            trainer__experiment_name="e",
            actor_rollout_ref__rollout__n=8,
            remote_backend__sampling_gpus=2,
        )
    )
    remote = found["remote_backend"]
    gpus = [remote[key] for key in ("training_gpus", "sampling_gpus", "log_prob_gpus")]
    assert gpus == [4, 2, 4]
    assert remote["train"]["zorro_train"]["max_rollouts"] == 8
    assert found["trainer"]["default_local_dir"] == "checkpoints/p/e"


def test_deepspeed_passes_through_whole() -> None:
    block = {
        "zero_optimization": {"stage": 3, "overlap_comm": False, "offload_param": {"pin": True}},
        "bf16": {"enabled": True},
        "list": [1, {"a": None}],
    }
    found = normalize_config(config(remote_backend__train__deepspeed=block))
    deepspeed = found["remote_backend"]["train"]["deepspeed"]
    assert deepspeed == {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "none"},
            "offload_param": {"device": "none", "pin": True},
            "overlap_comm": False,
        },
        "log_level": "INFO",
        "bf16": {"enabled": True},
        "list": [1, {"a": None}],
    }
    message = refusal(config(remote_backend__zero_optimization__overlap_comm=True))
    assert "remote_backend.zero_optimization.overlap_comm: unknown key" in message


def test_other_sections_pass_through() -> None:
    class Thing:
        pass

    thing = Thing()
    tree = config(other__thing=thing, data__files=("a", "b"), mine={1: {None: 2.5, True: [thing]}})
    found = normalize_config(tree)
    assert found["other"]["thing"] is thing
    assert found["data"]["files"] == ["a", "b"]
    assert found["mine"] == {1: {None: 2.5, True: [thing]}}
    assert normalize_config({"x": 10**30, "y": "\udc80", "z": b"b"})["x"] == 10**30


values = {
    "bool": st.booleans(),
    "int": st.integers(1, 3),
    "number": st.floats(0.25, 1.0) | st.just(1),
    "text": st.sampled_from(["constant", "a/b", "1"]),
    "pair": st.tuples(st.floats(0, 1), st.floats(0, 1)).map(list),
}
#: Values of these exclude some values of others; the property below is about the rest.
ENTANGLED = (
    "gpus", "sampling_tp_size", "cuda_ipc", "low_memory", "colocate", "logits.optimization",
    "ulysses", "batch_size", "use_kl", "rollout.n",
)  # fmt: skip


def free(fields: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [f for f in fields if not any(word in f["path"] for word in ENTANGLED)]


def value_of(field: dict[str, Any]) -> st.SearchStrategy[Any]:
    if field["kind"] == "choice":
        strategy: st.SearchStrategy[Any] = st.sampled_from(field["choices"].split("|"))
    else:
        strategy = values[field["kind"]]
    return strategy | st.none() if field["nullable"] else strategy


@given(st.data())
def test_any_valid_config_keeps_what_is_given_and_normalises_once(data: st.DataObject) -> None:
    flat = data.draw(st.booleans())
    tree: dict[str, Any] = {}
    wanted = {}
    for field in free(BOTH_FORMS if flat else [f for f in ARCTIC if not f["seed_only"]]):
        if data.draw(st.booleans()):
            value = data.draw(value_of(field))
            put(tree, "remote_backend." + (field["flat"] if flat else field["path"]), value)
            wanted["remote_backend." + field["path"]] = value
    for field in free(VERL):
        if data.draw(st.booleans()):
            wanted[field["path"]] = data.draw(value_of(field))
            put(tree, field["path"], wanted[field["path"]])
    found = normalize_config(tree)
    for path, value in wanted.items():
        assert get(found, path) == value
        assert type(get(found, path)) is type(value)
    assert normalize_config(found) == found
    assert all(isinstance(text, str) for text in config_warnings(found))


@given(st.data())
def test_flat_and_nested_forms_of_the_same_values_agree(data: st.DataObject) -> None:
    flat: dict[str, Any] = {"remote_backend": {"comm_protocol": "ray"}}
    nested: dict[str, Any] = {"remote_backend": {"generation": "seed", "comms": {}}}
    for field in free(BOTH_FORMS):
        if data.draw(st.booleans()):
            value = data.draw(value_of(field))
            put(flat, "remote_backend." + field["flat"], value)
            put(nested, "remote_backend." + field["path"], value)
    assert normalize_config(flat) == normalize_config(nested)


# ---- where configurations come from -------------------------------------------------------------


def test_omegaconf_containers_are_resolved() -> None:
    tree = config(actor_rollout_ref__rollout__n=4, remote_backend__train__zorro_train__enable=True)
    put(tree, "remote_backend.train.zorro_train.max_rollouts", "${actor_rollout_ref.rollout.n}")
    container = OmegaConf.create(tree)
    found = normalize_config(container)
    assert found["remote_backend"]["train"]["zorro_train"]["max_rollouts"] == 4
    assert type(found) is dict
    nested = normalize_config({"remote_backend": container.remote_backend, "data": {}})
    assert nested["remote_backend"] == found["remote_backend"]
    assert normalize_config({"x": OmegaConf.create([1, {"a": 2}])})["x"] == [1, {"a": 2}]
    with pytest.raises(Exception, match="nope"):
        normalize_config(OmegaConf.create({"a": "${nope}"}))
    with pytest.raises(TypeError, match="config must be a mapping, not ListConfig"):
        normalize_config(OmegaConf.create([1]))


def test_any_mapping_is_taken() -> None:
    tree = config(remote_backend__colocate=False)
    assert normalize_config(MappingProxyType(tree)) == normalize_config(tree)
    for wrong in (None, 1, "a: 1", [("a", 1)], b"x"):
        with pytest.raises(TypeError, match="config must be a mapping, not"):
            normalize_config(wrong)  # type: ignore[arg-type]


def test_numbers_of_numpy_and_enums_become_plain() -> None:
    found = normalize_config(config(actor_rollout_ref__actor__optim__lr=np.float64(0.5)))
    assert type(found["actor_rollout_ref"]["actor"]["optim"]["lr"]) is float


def test_what_contains_itself_is_refused() -> None:
    tree: dict[str, Any] = {}
    tree["again"] = tree
    assert "nested more than 64 levels deep, or within itself" in refusal(tree)
    tree.clear()
    items: list[Any] = []
    items.append(items)
    assert "within itself" in refusal({"items": items})
    items.clear()


def test_errors_of_foreign_objects_pass_through() -> None:
    class Broken(dict):  # type: ignore[type-arg]
        def keys(self) -> Any:
            raise AssertionError("a plain dict is read as it is")

    assert normalize_config(Broken(data={}))["data"]["max_prompt_length"] == 512

    class Mapping:
        def keys(self) -> Any:
            raise RuntimeError("no keys today")

        def __getitem__(self, key: str) -> Any:
            raise KeyError(key)

    with pytest.raises(RuntimeError, match="no keys today"):
        normalize_config(Mapping())  # type: ignore[arg-type]


def test_files_name_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("remote_backend:\n  train:\n    zorro_train:\n      enabel: true\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == (
        f"{path}:4:7: remote_backend.train.zorro_train.enabel: unknown key; "
        "did you mean remote_backend.train.zorro_train.enable?"
    )
    assert caught.value.operation == "load_config"


def test_partial_files_may_refer_to_verls_defaults() -> None:
    text = (
        "remote_backend: {train: {zorro_train: {max_rollouts: '${actor_rollout_ref.rollout.n}'}}}"
    )
    assert load_config(text=text)["remote_backend"]["train"]["zorro_train"]["max_rollouts"] == 1
    # A section that is itself an interpolation is left alone until it is resolved.
    text = "o: {lr: 0.5}\nactor_rollout_ref: {actor: {optim: '${o}'}}\n"
    optim = load_config(text=text)["actor_rollout_ref"]["actor"]["optim"]
    assert (optim["lr"], optim["weight_decay"]) == (0.5, 0.01)


def test_a_configuration_is_a_mapping() -> None:
    with pytest.raises(
        ConfigError, match=r"<text>:1:1: a configuration is a mapping, found a list"
    ):
        load_config(text="[1]")


# ---- keys -------------------------------------------------------------------------------------


def misspelt(name: str) -> list[str]:
    """One letter too few, two swapped, one doubled."""
    middle = len(name) // 2
    found = {
        name[:middle] + name[middle + 1 :],
        name[: middle - 1] + name[middle] + name[middle - 1] + name[middle + 1 :],
        name[:middle] + name[middle] + name[middle:],
    }
    return sorted(found - {name})


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_a_misspelt_key_is_answered_with_the_right_one(flat: bool) -> None:
    fields = BOTH_FORMS if flat else [f for f in ARCTIC if not f["seed_only"]]
    for field in fields:
        path = field["flat"] if flat else field["path"]
        *groups, leaf = path.split(".")
        if "train.deepspeed" in path:
            continue  # handed to DeepSpeed, which knows its own keys
        for wrong in misspelt(leaf):
            tree = config(remote_backend__generation="seed" if flat else "final")
            if flat:
                put(tree, "remote_backend.comm_protocol", "ray")
            put(tree, "remote_backend." + ".".join([*groups, wrong]), True)
            message = refusal(tree)
            assert f"remote_backend.{'.'.join([*groups, wrong])}: unknown key" in message
            assert f"did you mean remote_backend.{path}" in message, message


@pytest.mark.parametrize("field", BOTH_FORMS, ids=lambda field: field["flat"])
def test_a_key_of_the_other_form_is_answered_with_its_own_name(field: dict[str, Any]) -> None:
    if field["path"] == field["flat"]:
        return
    nested = config(remote_backend__train__determinism={}, remote_backend__comms={})
    message = refusal(put(nested, "remote_backend." + field["flat"], True))
    assert "a key of the flat form, but 'train'" in message
    assert f"remote_backend.{field['flat'].split('.')[0]}: " in message
    flat = config(remote_backend__tiled_logits_compute=True, remote_backend__comm_protocol="ray")
    message = refusal(put(flat, "remote_backend." + field["path"], True))
    assert "a key of the nested form, but 'tiled_logits_compute'" in message


RENAMED = {
    "use_zorro": ("train.zorro_train.enable", "zorro_train.enable"),
    "zorro": ("train.zorro_train.enable", "zorro_train.enable"),
    "zorro_train_enable": ("train.zorro_train.enable", "zorro_train.enable"),
    "max_rollouts": ("train.zorro_train.max_rollouts", "zorro_train.max_rollouts"),
    "cuda_ipc": ("weight_sync.cuda_ipc", "cuda_ipc_weight_sync"),
    "low_memory": ("weight_sync.low_memory", "low_memory_weight_sync"),
    "protocol": ("comms.protocol", "comm_protocol"),
    "load_balancer": ("train.load_balancer", None),
    "drop_position_ids": ("comms.drop_position_ids", None),
    "logits_optimization": ("train.logits.optimization", None),
    "logits_compute_in_fp32": ("train.logits.compute_in_fp32", None),
    "full_determinism": ("train.determinism.full", None),
    "seed": ("train.determinism.seed", None),
    "stage": ("train.deepspeed.zero_optimization.stage", "zero_optimization.stage"),
    "zero_stage": ("train.deepspeed.zero_optimization.stage", "zero_optimization.stage"),
    "deepspeed": ("train.deepspeed", "zero_optimization.stage"),
    "use_arctic_inference": ("rollout.zorro_inference.enable", None),
    "zorro_inference": ("rollout.zorro_inference", None),
    "speculative_decoding": ("rollout.speculative_decoding", None),
    "tensor_parallel_size": ("sampling_tp_size", "sampling_tp_size"),
    "tp_size": ("sampling_tp_size", "sampling_tp_size"),
    "training_gpu": ("training_gpus", "training_gpus"),
    "Colocate": ("colocate", "colocate"),
}


@pytest.mark.parametrize("name", RENAMED)
def test_a_renamed_key_is_answered_with_its_new_name(name: str) -> None:
    nested, flat = RENAMED[name]
    message = refusal({"remote_backend": {"comms": {}, name: True}})
    assert message.endswith(f"{name}: unknown key; did you mean remote_backend.{nested}?")
    message = refusal({"remote_backend": {"comm_protocol": "ray", name: True}})
    if flat is None:
        assert message.endswith(f"only the nested form has it, as remote_backend.{nested}")
    else:
        assert message.endswith(f"did you mean remote_backend.{flat}?")
    message = refusal({"remote_backend": {name: True}})
    assert f"did you mean remote_backend.{nested}" in message
    assert flat in (None, nested) or f"(or remote_backend.{flat} in the flat form)?" in message


def test_a_key_that_resembles_nothing_is_answered_with_what_there_is() -> None:
    assert refusal(config(remote_backend__train__quux=1)).endswith(
        "unknown key; known here: load_balancer, zorro_train, logits, determinism, deepspeed"
    )
    assert "known here: colocate, training_gpus" in refusal(config(remote_backend__quux=1))
    assert "unknown key" in refusal({"remote_backend": {"x" * 5000: 1}})
    assert "unknown key" in refusal({"remote_backend": {"": 1}})


def test_keys_are_text() -> None:
    assert "keys of remote_backend are text, found a boolean true" in refusal(
        {"remote_backend": {True: 1}}
    )
    message = refusal({"remote_backend": {"train": {1: 2}}})
    assert "keys of remote_backend are text, found an integer 1" in message
    assert "keys of remote_backend are text" in refusal({"remote_backend": {"colocate\0": 1}})
    message = refusal({"remote_backend": {"\ud800": 1}})
    assert message.endswith("are text that UTF-8 can hold, found another object")
    with pytest.raises(
        ConfigError, match=r"<text>:1:18: keys of remote_backend are text.*quote it"
    ):
        load_config(text="remote_backend: {on: 1}")


def test_all_of_a_text_is_shown() -> None:
    """A NUL does not end the message, and nothing garbles it."""
    message = refusal({"remote_backend": {"a\0b": 1}})
    assert message.endswith(r"are text without a NUL character, found 'a\x00b'")
    message = refusal({"remote_backend": {"train": {"a\nb\x1b[31m\x7f": 1}}})
    assert r"remote_backend.train.a\x0ab\x1b[31m\x7f: unknown key" in message
    for odd in ("a\0b", "\0", "é\0" * 100):
        message = refusal({"remote_backend": {"colocate": odd}})
        assert "wants true or false, found text '" + odd[:1].strip("\0") in message
        assert r"\x00" in message
        assert "\0" not in message
    with pytest.raises(ConfigError, match=r"override 'a\\x00b=1': no key and no bare value has"):
        load_config(text="a: 1", overrides=["a\0b=1"])


def test_a_block_is_no_value() -> None:
    assert "remote_backend: a block of keys, found a list" in refusal({"remote_backend": [1]})
    message = refusal(config(remote_backend__zorro_train=True))
    assert "zorro_train: a block of keys, found true; known here: enable, max_rollouts" in message
    message = refusal({"actor_rollout_ref": {"model": "x"}})
    assert "actor_rollout_ref.model: wants a mapping here, found text" in message
    assert "data: wants a mapping here, found a list" in refusal({"data": []})


def test_keys_that_stand_in_the_wrong_place() -> None:
    for name in ("cuda_ipc_weight_sync", "weight_sync", "zorro_train", "colocate", "comms"):
        message = refusal({name: True})
        assert f"{name}: nobody reads this key here; it belongs below remote_backend" in message
    message = refusal(config(actor_rollout_ref__actor__use_zorro=True))
    assert "actor_rollout_ref.actor.use_zorro: nobody reads this key; did you mean" in message
    assert "use_zorro" in refusal({"mine": [{"use_zorro": 1}]})
    assert "composed by Hydra" in refusal({"defaults": ["_self_"]})
    assert normalize_config({"defaults": {"a": 1}, "train": {}, "rollout": 1})["rollout"] == 1


def test_mixed_forms_name_both_places() -> None:
    text = "remote_backend:\n  train: {}\n  comm_protocol: ray\n"
    with pytest.raises(ConfigError) as caught:
        load_config(text=text)
    assert str(caught.value) == (
        "<text>:3:3: remote_backend.comm_protocol: a key of the flat form, but 'train' "
        "(<text>:2:3) is of the nested form, and the two do not mix; did you mean "
        "remote_backend.comms.protocol?"
    )


def test_generation() -> None:
    assert "wants seed or final, found 'other'" in refusal(
        config(remote_backend__generation="other")
    )
    message = refusal(config(remote_backend__generation="final", remote_backend__zorro_train={}))
    assert "of the flat form, which is generation 'seed'" in message
    nested = config(remote_backend__generation="seed", remote_backend__comms={"protocol": "http"})
    assert normalize_config(nested)["remote_backend"]["generation"] == "seed"
    put(nested, "remote_backend.comms.drop_position_ids", True)
    assert "generation 'seed' has no such switch: it is always false" in refusal(nested)
    tiled = config(remote_backend__train__logits__tiled_compute=True)
    assert "only generation 'seed' has this key; use train.logits.optimization" in refusal(tiled)


# ---- values -----------------------------------------------------------------------------------

SAMPLES: list[Any] = [
    None,
    True,
    0,
    1,
    -1,
    3,
    0.5,
    1.0,
    1e9,
    -0.5,
    math.nan,
    2**70,
    "",
    "x",
    "none",
]
SAMPLES += [
    "False",
    "1e-6",
    "???",
    "${a}",
    "ray",
    [],
    [0.5, 0.5],
    [1, 2],
    [0.5],
    ["a", "b"],
    {},
    b"x",
]


#: Of messages about one value; those about several values use none of these.
WRONG = ("wants", "must be", "mandatory", "more than 64 bits")


def accepts(field: dict[str, Any], value: Any) -> bool:
    """The rules of the schema, said once more."""
    if value is None:
        return bool(field["nullable"])
    number = type(value) in (int, float) and field["min"] <= value <= field["max"]
    number = number and abs(value) < 2**63
    text = type(value) is str and value != "???" and "${" not in value
    match field["kind"]:
        case "bool":
            return type(value) is bool
        case "int":
            return number and type(value) is int
        case "number":
            return number
        case "text":
            return text
        case "choice":
            return text and value in field["choices"].split("|")
        case "pair":
            return (
                type(value) is list
                and len(value) == 2
                and all(type(v) in (int, float) and 0 <= v <= 1 for v in value)
            )
    raise AssertionError(field)


@pytest.mark.parametrize("field", [*ARCTIC, *VERL], ids=lambda field: field["path"])
def test_every_key_takes_its_kind_and_nothing_else(field: dict[str, Any]) -> None:
    arctic = field in ARCTIC
    for value in SAMPLES:
        tree: dict[str, Any] = {}
        if field["seed_only"]:
            put(tree, "remote_backend.generation", "seed")
        path = ("remote_backend." if arctic else "") + field["path"]
        try:
            normalize_config(put(tree, path, value))
        except ConfigError as error:
            found = str(error)
        else:
            found = ""
        if not accepts(field, value):
            assert f"{path}: " in found or f"{path}[" in found, (value, found)
            assert any(word in found for word in WRONG), found
        else:
            assert not any(word in found for word in WRONG), (value, found)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("colocate: 'False'", "found text 'False' (leave the quotes away)"),
        ("colocate: 0", "wants true or false, found an integer 0"),
        ("colocate: ???", "a value is mandatory here, and '???' was never replaced by one"),
        ("comms: {protocol: on}", "found a boolean true (yes, no, on and off are booleans"),
        ("comms: {protocol: grpc}", "wants one of ray|http, found 'grpc'"),
        ("rollout: {speculative_decoding: {model: 7}}", "found an integer 7 (quote it)"),
        ("rollout: {speculative_decoding: {model: no}}", "found a boolean false (yes, no, on"),
        ("training_gpus: '2'", "wants an integer, found text '2' (leave the quotes away)"),
        ("training_gpus: 1.0", "wants an integer, found a float 1.0"),
        ("training_gpus: 0", "must be at least 1, found 0"),
        ("training_gpus: 99999999999999999999", "an integer of more than 64 bits"),
        ("training_gpus: 9999999999", "must be at most 1e+06, found 9999999999"),
        ("training_gpus:", "wants an integer, found null"),
        ("training_gpus: [1, 2]", "wants an integer, found a list of 2"),
        ("train: {deepspeed: {zero_optimization: {stage: 4}}}", "must be at most 3, found 4"),
    ],
)
def test_wrong_values_say_what_to_do(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(text=f"remote_backend:\n  {line}\n")
    assert str(caught.value).startswith("<text>:2:")
    assert message in str(caught.value)


def test_a_switch_that_another_default_follows_may_be_wrong_itself() -> None:
    message = refusal(config(remote_backend__zorro_train__enable="yes"))
    assert "remote_backend.zorro_train.enable: wants true or false, found text 'yes'" in message


def test_yamls_words_for_booleans_are_booleans_in_typed_fields() -> None:
    text = "remote_backend: {colocate: no, train: {load_balancer: off, zorro_train: {enable: yes}}}"
    remote = load_config(text=text)["remote_backend"]
    assert (remote["colocate"], remote["train"]["load_balancer"]) == (False, False)
    assert remote["train"]["zorro_train"]["enable"] is True


@pytest.mark.parametrize("spelled", ["1e-6", "1E-6", "1e+6", "0.000001", "1"])
def test_numbers_in_every_spelling_are_numbers(spelled: str) -> None:
    text = f"actor_rollout_ref: {{actor: {{optim: {{lr: {spelled}}}}}}}"
    assert load_config(text=text)["actor_rollout_ref"]["actor"]["optim"]["lr"] == float(spelled)


def test_an_interpolation_that_nobody_resolved_is_named() -> None:
    message = refusal(config(remote_backend__training_gpus="${trainer.n_gpus_per_node}"))
    assert "found the interpolation '${trainer.n_gpus_per_node}' that nobody resolved" in message


# ---- contradictions ---------------------------------------------------------------------------

BATCH = config(
    data__train_batch_size=8,
    actor_rollout_ref__actor__ppo_mini_batch_size=4,
    actor_rollout_ref__rollout__n=4,
)


def batch(**values: Any) -> dict[str, Any]:
    tree = copy.deepcopy(BATCH)
    for path, value in values.items():
        put(tree, path.replace("__", "."), value)
    return tree


MICRO = "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu"
CONTRADICTIONS = {
    "low_memory": (
        config(remote_backend__weight_sync__low_memory=True),
        "remote_backend.weight_sync.low_memory: low_memory is a way to sync through CUDA IPC",
    ),
    "flat_low_memory": (
        config(remote_backend__low_memory_weight_sync=True),
        "(cuda_ipc_weight_sync in the flat form) is false",
    ),
    "cuda_ipc": (
        config(remote_backend__weight_sync__cuda_ipc=True, remote_backend__colocate=False),
        "remote_backend.weight_sync.cuda_ipc: CUDA IPC reaches memory of the same GPU only",
    ),
    "logits": (
        config(remote_backend__train__logits__optimization="memory"),
        "train.logits.optimization: 'memory' works with ZoRRO only",
    ),
    "kl_loss": (
        config(remote_backend__log_prob_gpus=0, actor_rollout_ref__actor__use_kl_loss=True),
        "log_prob_gpus: 0 means no reference engine, and actor_rollout_ref.actor.use_kl_loss",
    ),
    "kl_reward": (
        config(remote_backend__log_prob_gpus=0, algorithm__use_kl_in_reward=True),
        "log_prob_gpus: 0 means no reference engine, and algorithm.use_kl_in_reward needs one",
    ),
    "temperature": (
        config(actor_rollout_ref__rollout__temperature=0),
        "rollout.temperature: training divides logits by the temperature, so it cannot be 0",
    ),
    "temperature_float": (
        config(actor_rollout_ref__rollout__temperature=-0.0),
        "so it cannot be 0",
    ),
    "negative_temperature": (
        config(actor_rollout_ref__rollout__temperature=-0.5),
        "must be at least 0, found -0.5",
    ),
    "n": (config(actor_rollout_ref__rollout__n=0), "rollout.n: must be at least 1, found 0"),
    "epochs": (
        config(actor_rollout_ref__actor__ppo_epochs=0),
        "ppo_epochs: must be at least 1, found 0",
    ),
    "tp": (
        config(remote_backend__sampling_gpus=3, remote_backend__sampling_tp_size=2),
        "sampling_gpus: 3 is not a multiple of remote_backend.sampling_tp_size, which is 2",
    ),
    "ulysses": (
        batch(
            remote_backend__training_gpus=4,
            actor_rollout_ref__actor__fsdp_config__ulysses_sequence_parallel_size=3,
        ),
        "training_gpus: 4 is not a multiple of actor_rollout_ref.actor.fsdp_config.ulysses",
    ),
    "mini": (
        batch(data__train_batch_size=6),
        "data.train_batch_size: 6 prompts do not split into mini-batches of "
        "actor_rollout_ref.actor.ppo_mini_batch_size, which is 4",
    ),
    "mini_larger": (batch(data__train_batch_size=2), "2 prompts do not split into mini-batches"),
    "ranks": (
        batch(remote_backend__training_gpus=3),
        "training_gpus: actor.ppo_mini_batch_size * rollout.n is 16 rows, which 3 ranks cannot",
    ),
    "balancer_rows": (
        batch(remote_backend__training_gpus=16),
        "is 16 rows for 16 ranks: the server's load balancer needs more rows than ranks "
        "(or train.load_balancer=false)",
    ),
    "balancer_groups": (
        batch(remote_backend__training_gpus=8),
        "is 16 rows, 2 for each of 8 ranks: the server's load balancer keeps the 4 rollouts of "
        "a prompt together, and they do not fit (or train.load_balancer=false)",
    ),
    "gas": (
        batch(**{MICRO: 5}),
        "ppo_micro_batch_size_per_gpu: actor.ppo_mini_batch_size * rollout.n is 16 rows, 16 for "
        "a rank, which do not split into the 3 micro-batches that a size of 5 asks for",
    ),
    "flat_ranks": (
        batch(remote_backend__training_gpus=3, remote_backend__comm_protocol="ray"),
        "data.train_batch_size * rollout.n is 32 rows, which 3 ranks cannot share equally",
    ),
    "flat_balancer": (
        batch(remote_backend__training_gpus=16, remote_backend__zorro_train__enable=True),
        "2 for each of 16 ranks: the server's load balancer keeps the 4 rollouts of a prompt "
        "together, and they do not fit (it is on with ZoRRO)",
    ),
    "flat_balancer_rows": (
        batch(remote_backend__training_gpus=32, remote_backend__zorro_train__enable=True),
        "is 32 rows for 32 ranks: the server's load balancer needs more rows than ranks (it is",
    ),
    "reference_ranks": (
        batch(remote_backend__log_prob_gpus=3, actor_rollout_ref__actor__use_kl_loss=True),
        "log_prob_gpus: data.train_batch_size * rollout.n is 32 rows, which 3 ranks cannot",
    ),
    "overflow": (
        batch(data__train_batch_size=2**52, actor_rollout_ref__rollout__n=2**52),
        "data.train_batch_size: times rollout.n it is more rows than can be counted",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_are_refused(name: str) -> None:
    tree, message = CONTRADICTIONS[name]
    assert message in refusal(tree)


def test_what_looks_alike_but_works_is_accepted() -> None:
    for tree in (
        config(
            remote_backend__weight_sync__low_memory=True, remote_backend__weight_sync__cuda_ipc=True
        ),
        config(
            remote_backend__train__logits__optimization="memory",
            remote_backend__train__zorro_train__enable=True,
        ),
        config(remote_backend__log_prob_gpus=0),
        batch(remote_backend__log_prob_gpus=3),
        batch(remote_backend__training_gpus=4),
        batch(remote_backend__training_gpus=8, remote_backend__train__load_balancer=False),
        batch(remote_backend__training_gpus=16, remote_backend__train__load_balancer=False),
        batch(remote_backend__training_gpus=16, remote_backend__comm_protocol="ray"),
        batch(data__train_batch_size=6, remote_backend__comm_protocol="ray"),
        batch(**{MICRO: 4}),
        batch(**{MICRO: 100}),
        batch(**{MICRO: 2**53}),
        batch(**{MICRO: 5, "remote_backend__comm_protocol": "ray", "data__train_batch_size": 5}),
    ):
        normalize_config(tree)


# ---- warnings ---------------------------------------------------------------------------------


def warnings_of(tree: dict[str, Any]) -> dict[str, str]:
    """Path to text, for all but the two that the defaults themselves bring."""
    found = {}
    for text in config_warnings(tree):
        path, _, why = text.partition("=")
        assert path not in found, "named twice"
        found[path] = why
    found.pop("remote_backend.rollout", None)
    return found


@pytest.mark.parametrize("generation", ["seed", "final"])
def test_defaults_bring_no_warnings_but_the_servers_own(generation: str) -> None:
    tree = config(remote_backend__generation=generation, data__train_batch_size=256)
    assert warnings_of(tree) == {}
    texts = config_warnings(tree)
    assert len(texts) == (1 if generation == "final" else 0)
    if texts:
        assert texts[0].startswith(
            "remote_backend.rollout=a mapping of 2: nothing in it is enabled"
        )
        put(tree, "remote_backend.rollout.zorro_inference.enable", True)
        assert config_warnings(tree) == []
        tree["remote_backend"]["rollout"] = {"speculative_decoding": {"model": "draft"}}
        assert config_warnings(tree) == []
        tree["remote_backend"] = {"colocate": False}
        assert config_warnings(tree) == []


#: A value of each ignored option that is not harmless.
HARMFUL: dict[str, Any] = {
    "clip_ratio": 0.3, "clip_ratio_low": 0.1, "clip_ratio_high": 0.28, "clip_ratio_c": 10.0,
    "policy_loss.loss_mode": "clip_cov", "loss_scale_factor": 5, "shuffle": True,
    "data_loader_seed": 7, "use_dynamic_bsz": True, "optim.lr_warmup_steps": 10,
    "log_prob_micro_batch_size": 4, "log_prob_micro_batch_size_per_gpu": 4,
    "log_prob_use_dynamic_bsz": True, "top_p": 0.9, "top_k": 50, "max_num_batched_tokens": 4096,
    "trust_remote_code": True, "rollout_is": "token", "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2,
    "sequence_parallel_size": 2, "optimizer": {"type": "Adam"}, "ppo_epochs": 2, "grad_clip": 0.5,
    "optim.clip_grad": 0.5, "optim.lr_scheduler_type": "cosine",
    "optim.lr_warmup_steps_ratio": 0.1, "enable_gradient_checkpointing": False,
    "ppo_micro_batch_size": 4, "strategy": "megatron", "ulysses_sequence_parallel_size": 2,
    "param_offload": True, "optimizer_offload": True, "fsdp_size": 4, "model_dtype": "bf16",
    "dtype": "float16", "seed": 7, "full_determinism": True, "freeze_vision_tower": True,
    "use_prefix_grouper": True, "calculate_sum_pi_squared": True,
    "entropy_from_logits_with_chunking": True, "entropy_checkpointing": True,
    "router_replay.mode": "R2", "async_save": True, "optim.warmup_style": "cosine",
    "optim.optimizer": "Adam8bit", "optim.optimizer_impl": "bitsandbytes.optim",
    "override_optimizer_config": {"amsgrad": True}, "num_cycles": 2.5,
    "tensor_model_parallel_size": 4, "data_parallel_size": 2, "expert_parallel_size": 2,
    "pipeline_model_parallel_size": 2, "ignore_eos": True, "enable_prefix_caching": False,
    "scheduling_policy": "priority", "cudagraph_capture_sizes": [1, 2],
    "quantization_config_file": "q.json", "over_sample_rate": 0.1, "multi_stage_wake_up": True,
    "enable_rollout_routing_replay": True, "disaggregation.enabled": True, "lora_rank": 32,
    "lora.rank": 32, "lora_adapter_path": "there", "lora.adapter_path": "there",
    "hf_config_path": "there", "use_fused_kernels": True, "enable_activation_offload": True,
    "tiled_mlp.enabled": True, "mtp.enable": True, "checkpoint_engine.backend": "nccl",
}  # fmt: skip


def harmful(path: str) -> Any:
    return next(
        value for name, value in HARMFUL.items() if path.endswith("." + name)
        and len(name) == max(len(n) for n in HARMFUL if path.endswith("." + n))
    )  # fmt: skip


@pytest.mark.parametrize("option", SCHEMA["ignored"], ids=lambda option: option["path"])
@pytest.mark.parametrize("generation", ["seed", "final"])
def test_every_ignored_option_is_named_once(option: dict[str, Any], generation: str) -> None:
    tree = config(
        remote_backend__generation=generation,
        data__train_batch_size=256,
        trainer__total_training_steps=100,
    )
    put(tree, option["path"], harmful(option["path"]))
    found = warnings_of(tree)
    if option[generation]:
        assert found[option["path"]].endswith(f": no effect: {option['why']}")
    else:
        assert "no effect: " + option["why"] not in "".join(found.values())
    for word in option["harmless"].split():
        put(tree, option["path"], load_yaml(text=word))
        assert option["path"] not in warnings_of(tree), word


def test_blocks_of_which_little_is_read_are_named_by_key() -> None:
    tree = config(
        actor_rollout_ref__rollout__engine_kwargs={"vllm": {"swap_space": 4}, "sglang": {}},
        actor_rollout_ref__model__override_config={
            "attn_implementation": "sdpa", "model_config": {}, "attention_dropout": 0.1, "x": None
        },
    )  # fmt: skip
    assert warnings_of(tree) == {
        "actor_rollout_ref.rollout.engine_kwargs.vllm": (
            "a mapping of 1: no effect: not sent to the sampler"
        ),
        "actor_rollout_ref.model.override_config.attention_dropout": (
            "0.1: no effect: of override_config only attn_implementation is read"
        ),
    }


def test_parts_of_a_checkpoint_are_named() -> None:
    parts = "actor_rollout_ref__actor__checkpoint"
    whole = ["extra", "model", "hf_model", "optimizer"]
    tree = config(**{parts: {"save_contents": whole, "load_contents": whole}})
    assert warnings_of(tree) == {}
    tree = config(**{parts: {"save_contents": ["model"], "load_contents": ["model", 3, "extra"]}})
    found = warnings_of(tree)
    prefix = "actor_rollout_ref.actor.checkpoint."
    assert list(found) == [prefix + "save_contents", prefix + "load_contents"]
    assert found[prefix + "save_contents"].startswith("a list of 1: no effect on what it leaves")


DISTORTED = {
    "actor_rollout_ref.rollout.temperature": (
        config(actor_rollout_ref__rollout__temperature=0.7),
        "the first ratio is not 1",
    ),
    "actor_rollout_ref.actor.entropy_coeff": (
        config(actor_rollout_ref__actor__entropy_coeff=0.01),
        "one token off its mask",
    ),
    "remote_backend.log_prob_gpus": (
        config(actor_rollout_ref__actor__use_kl_loss=True),
        "takes its whole share of a batch, 1024 rows, in one forward pass",
    ),
    "remote_backend.train.logits.compute_from_fp32_inputs": (
        config(remote_backend__train__logits__compute_from_fp32_inputs=True),
        "it works with ZoRRO only",
    ),
    "actor_rollout_ref.actor.optim.lr_scheduler_type": (
        config(actor_rollout_ref__actor__optim__lr_scheduler_type="linear"),
        "='linear': means 'constant'",
    ),
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": (
        config(
            actor_rollout_ref__actor__optim__lr_warmup_steps_ratio=0.01,
            trainer__total_training_steps=10,
        ),
        "of 40 optimizer steps it rounds to no step",
    ),
    "actor_rollout_ref.actor.grad_clip": (
        config(
            actor_rollout_ref__actor__grad_clip=0.5, actor_rollout_ref__actor__optim__clip_grad=2.0
        ),
        "=0.5: no effect: optim.clip_grad comes first, 2",
    ),
    "remote_backend.train.deepspeed.gradient_clipping": (
        config(remote_backend__train__deepspeed__gradient_clipping=3.0),
        "replaced by the actor's gradient clipping, 1",
    ),
    "remote_backend.train.deepspeed.scheduler": (
        config(
            remote_backend__train__deepspeed__scheduler={"type": "x"},
            actor_rollout_ref__actor__optim__lr_scheduler_type="cosine",
        ),
        "replaced by actor.optim",
    ),
    "actor_rollout_ref.actor.ppo_mini_batch_size": (
        config(remote_backend__comm_protocol="ray"),
        "=256: no effect on the steps",
    ),
    "actor_rollout_ref.actor.optim.betas": (
        config(
            remote_backend__comm_protocol="ray",
            actor_rollout_ref__actor__optim__betas=[0.9, 0.95],
            data__train_batch_size=256,
        ),
        "always uses 0.9 and 0.999",
    ),
}


@pytest.mark.parametrize("path", DISTORTED)
def test_what_acts_otherwise_than_it_says_is_named(path: str) -> None:
    tree, text = DISTORTED[path]
    found = warnings_of(tree)
    assert list(found) == [path]
    assert text in f"={found[path]}"


def test_zorro_takes_two_warnings_away() -> None:
    tree = config(
        actor_rollout_ref__rollout__temperature=0.7,
        actor_rollout_ref__actor__entropy_coeff=0.01,
        remote_backend__train__zorro_train__enable=True,
        remote_backend__train__logits__compute_from_fp32_inputs=True,
    )
    assert warnings_of(tree) == {}


def test_warnings_refuse_what_normalising_refuses() -> None:
    with pytest.raises(ConfigError, match="unknown key") as caught:
        config_warnings(config(remote_backend__use_zorro=True))
    assert caught.value.operation == "config_warnings"
    with pytest.raises(TypeError, match="config must be a mapping"):
        config_warnings(3)  # type: ignore[arg-type]


# ---- memory -----------------------------------------------------------------------------------


def test_foreign_objects_are_given_back() -> None:
    import weakref

    class Thing:
        pass

    thing = Thing()
    alive = weakref.ref(thing)
    found = normalize_config({"thing": thing})
    with pytest.raises(ConfigError):
        normalize_config({"thing": thing, "remote_backend": {"nope": 1}})
    del thing, found
    gc.collect()
    assert alive() is None
