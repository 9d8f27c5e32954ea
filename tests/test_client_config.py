# SPDX-License-Identifier: Apache-2.0
"""What an Arctic client is started with: the recorded values, and what they derive from."""

from __future__ import annotations

import copy
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import golden
from arctic_rl_c import ConfigError
from arctic_rl_c.client_config import build_client_config, visible_devices
from yaml_reference import assert_same


def plain(node: Any) -> Any:
    """`node` without its marks of config objects."""
    if isinstance(node, dict):
        if list(node) == ["$config"]:
            return plain(node["$config"])
        return {key: plain(value) for key, value in node.items()}
    return [plain(item) for item in node] if isinstance(node, list) else node


def sorted_keys(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: sorted_keys(node[key]) for key in sorted(node)}
    return [sorted_keys(item) for item in node] if isinstance(node, list) else node


def case_config(version: str, name: str = "plain", **values: Any) -> dict[str, Any]:
    """A recorded main config with keys (`__` for dots) replaced."""
    tree = copy.deepcopy(golden.case(version, name).config)
    for path, value in values.items():
        *groups, leaf = path.split("__")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[leaf] = value
    return tree


@pytest.mark.parametrize("case", golden.CASES, ids=repr)
def test_recorded_client_configs(case: golden.Case) -> None:
    before = copy.deepcopy(case.config)
    found = build_client_config(case.config)
    assert_same(sorted_keys(found), sorted_keys(plain(case.raw["client_config"])))
    assert case.config == before


@pytest.mark.parametrize("case", golden.CASES, ids=repr)
def test_recorded_visible_devices(case: golden.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    assert visible_devices(case.config) == case.raw["cuda_visible_devices"]
    import os

    assert os.environ["CUDA_VISIBLE_DEVICES"] == "6,7"


def test_results_share_nothing_with_each_other() -> None:
    config = case_config("final")
    first, second = build_client_config(config), build_client_config(config)
    first["training"]["ds_config"]["zero_optimization"]["stage"] = 9
    first["sampling"]["arctic_inference_config"]["zorro_inference"]["enable"] = True
    assert second == build_client_config(config)
    reference = first["sampling"]["log_prob_ds_config"]["zero_optimization"]
    assert reference["stage"] == 2


def test_http_has_an_endpoint() -> None:
    seed = build_client_config(case_config("seed", remote_backend__comm_protocol="http"))
    assert (seed["host"], seed["port"], seed["comm_protocol"]) == ("localhost", 7000, "http")
    final = build_client_config(case_config("final", remote_backend__comms__protocol="http"))
    assert final["backend"] == {
        "protocol": "http",
        "colocate": True,
        "host": "localhost",
        "port": 7000,
        "launch_local_server": True,
    }


@pytest.mark.parametrize("version", ["seed", "final"])
def test_a_model_is_needed(version: str) -> None:
    config = case_config(version)
    del config["actor_rollout_ref"]["model"]["path"]
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.model\.path: .* needs a model") as e:
        build_client_config(config)
    assert (e.value.code, e.value.operation) == ("ARL_ERR_CONFIG", "build_client_config")
    assert e.value.rank is None


@pytest.mark.parametrize("override", [None, {}, {"attn_implementation": None}])
def test_attention_has_two_defaults(override: dict[str, Any] | None) -> None:
    name = "actor_rollout_ref__model__override_config"
    seed = build_client_config(case_config("seed", **{name: override}))
    assert seed["ds_worker_config"]["attn_implementation"] == "flash_attention_2"
    assert seed["training_config"]["attn_implementation"] == "eager"
    final = build_client_config(case_config("final", **{name: override}))
    assert final["training"]["ds_worker_config"]["attn_implementation"] == "flash_attention_2"


def test_micro_batches_of_null_are_single_rows() -> None:
    micro = "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu"
    found = build_client_config(case_config("final", **{micro: None}))["training"]["ds_config"]
    assert found["train_micro_batch_size_per_gpu"] == 1
    assert found["gradient_accumulation_steps"] == 4


@given(
    train=st.integers(1, 6),
    mini=st.integers(1, 12),
    n=st.integers(1, 4),
    micro=st.integers(1, 16) | st.none(),
    gpus=st.integers(1, 4),
    references=st.integers(0, 4),
    version=st.sampled_from(["seed", "final"]),
)
def test_batch_keys_follow_the_formula(
    train: int, mini: int, n: int, micro: int | None, gpus: int, references: int, version: str
) -> None:
    config = case_config(
        version,
        data__train_batch_size=train * mini,
        actor_rollout_ref__actor__ppo_mini_batch_size=mini,
        actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=micro,
        actor_rollout_ref__rollout__n=n,
        remote_backend__training_gpus=gpus,
        remote_backend__log_prob_gpus=references,
    )
    try:
        found = build_client_config(config)
    except ConfigError as error:
        text = str(error)
        assert "ranks" in text or "for a rank" in text  # rows that do not divide
        return
    rows = (train * mini if version == "seed" else mini) * n
    if version == "seed":
        training, reference = found["ds_config"], found["log_prob_ds_config"]
    else:
        training = found["training"]["ds_config"]
        reference = found["sampling"]["log_prob_ds_config"]
    assert training["train_batch_size"] == rows
    assert training["gradient_accumulation_steps"] == max(1, rows // ((micro or 1) * gpus))
    # What the server needs of these numbers.
    assert rows % gpus == 0
    assert rows // gpus % training["gradient_accumulation_steps"] == 0
    if references == 0:
        assert reference is None
    else:
        assert reference["gradient_accumulation_steps"] == max(
            1, rows // ((micro or 1) * references)
        )


# ---- schedules of the final generation ----------------------------------------------------------


def ds_config(**values: Any) -> dict[str, Any]:
    names = {f"actor_rollout_ref__actor__{name}": value for name, value in values.items()}
    return build_client_config(case_config("final", **names))["training"]["ds_config"]


def scheduler(**values: Any) -> dict[str, Any] | None:
    return ds_config(**{f"optim__{name}": value for name, value in values.items()}).get("scheduler")


@given(steps=st.integers(1, 400), hundredths=st.integers(0, 100))
def test_warm_up_rounds_halves_to_even(steps: int, hundredths: int) -> None:
    ratio = hundredths / 100
    found = scheduler(
        total_training_steps=steps, lr_warmup_steps_ratio=ratio, lr_scheduler_type="cosine"
    )
    assert found is not None
    horizon = 2 * steps  # two mini-batches a step, one epoch
    product = Fraction(ratio * horizon)  # the same double that is rounded
    low = product.numerator // product.denominator
    rest = product - low
    wanted = low + (rest > Fraction(1, 2) or (rest == Fraction(1, 2) and low % 2 == 1))
    assert found["params"]["total_num_steps"] == horizon
    assert found["params"]["warmup_num_steps"] == wanted


def test_schedules() -> None:
    assert scheduler(lr_warmup_steps_ratio=0.0) is None
    assert scheduler(lr_warmup_steps_ratio=0.003, total_training_steps=80) is None  # rounds to 0
    assert scheduler(lr_scheduler_type="linear") is None
    warm = scheduler(lr_warmup_steps_ratio=0.05, total_training_steps=80, lr=2e-6)
    assert warm == {
        "type": "WarmupLR",
        "params": {
            "warmup_min_lr": 0.0,
            "warmup_max_lr": 2e-6,
            "warmup_num_steps": 8,
            "warmup_type": "linear",
        },
    }
    cosine = scheduler(lr_scheduler_type="cosine", min_lr_ratio=None)
    assert cosine is not None
    assert cosine["params"]["cos_min_ratio"] == 0.0


@pytest.mark.parametrize("missing", [None, -1, 0])
def test_the_horizon_comes_from_two_places(missing: int | None) -> None:
    values = {
        "actor_rollout_ref__actor__optim__total_training_steps": missing,
        "actor_rollout_ref__actor__optim__lr_scheduler_type": "cosine",
        "actor_rollout_ref__actor__ppo_epochs": 3,
    }
    found = build_client_config(case_config("final", trainer__total_training_steps=7, **values))
    params = found["training"]["ds_config"]["scheduler"]["params"]
    assert params["total_num_steps"] == 7 * 3 * 2
    for nothing in (None, 0, -1):
        config = case_config("final", trainer__total_training_steps=nothing, **values)
        with pytest.raises(ConfigError, match="needs the number of training steps"):
            build_client_config(config)
    config["actor_rollout_ref"]["actor"]["optim"]["lr_scheduler_type"] = "constant"
    build_client_config(config)  # without a schedule nobody asks


def test_gradient_clipping() -> None:
    assert ds_config(grad_clip=2)["gradient_clipping"] == 2.0
    assert type(ds_config(grad_clip=2)["gradient_clipping"]) is float
    assert ds_config(grad_clip=2, optim__clip_grad=0.5)["gradient_clipping"] == 0.5
    assert ds_config(grad_clip=2, optim__clip_grad=None)["gradient_clipping"] == 2.0
    for none in (None, 0, 0.0):
        assert "gradient_clipping" not in ds_config(grad_clip=none)
    assert "gradient_clipping" not in ds_config(grad_clip=1, optim__clip_grad=0)


def test_deepspeeds_own_keys_are_kept() -> None:
    config = case_config("final")
    block = config["remote_backend"]["train"]["deepspeed"]
    block |= {"bf16": {"enabled": True}, "train_batch_size": 99, "optimizer": {"type": "Lion"}}
    found = build_client_config(config)
    assert found["training"]["ds_config"]["bf16"] == {"enabled": True}
    assert found["training"]["ds_config"]["train_batch_size"] == 4
    assert found["training"]["ds_config"]["optimizer"]["type"] == "AdamW"
    assert found["sampling"]["log_prob_ds_config"]["bf16"] == {"enabled": True}


def test_a_disabled_rollout_block_can_be_left_away() -> None:
    config = case_config("final")
    assert build_client_config(config)["sampling"]["arctic_inference_config"] is not None
    found = build_client_config(config, omit_disabled_rollout=True)
    assert found["sampling"]["arctic_inference_config"] is None
    for block in ({"zorro_inference": {"enable": True}}, {"speculative_decoding": {"model": "m"}}):
        config["remote_backend"]["rollout"] = block
        found = build_client_config(config, omit_disabled_rollout=True)
        assert found["sampling"]["arctic_inference_config"] is not None


def test_tiled_logits_of_the_first_generation() -> None:
    config = case_config("seed", "zorro", remote_backend__tiled_logits_compute=False)
    assert build_client_config(config)["ds_worker_config"]["tiled_logits_compute"] is False
