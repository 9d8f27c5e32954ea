# SPDX-License-Identifier: Apache-2.0
"""What the builders refuse, and what they say about it: entry, row and numbers."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest
import torch

import arctic_rl_c
import clients
from arctic_rl_c import ConfigError, PayloadError

BOTH = pytest.mark.parametrize("version", ["seed", "final"])
BUILDERS = pytest.mark.parametrize(
    "build", [clients.log_prob_payload, clients.update_payloads], ids=["log_prob", "update"]
)
Entries = dict[str, Any]


def refused(build: Any, says: str, data: Any, config: Any = None, **options: Any) -> PayloadError:
    config = clients.config() if config is None else config
    with pytest.raises(PayloadError, match=says) as caught:
        build(data, config, **options)
    assert isinstance(caught.value, ValueError)
    assert caught.value.code == "ARL_ERR_PAYLOAD"
    return caught.value


# ---- missing entries ----------------------------------------------------------------------------

NEEDED = {
    "log_prob": {"input_ids", "prompts", "responses", "attention_mask", "temperature"},
    "update": {"input_ids", "prompts", "responses", "attention_mask", "temperature"}
    | {"response_mask", "old_log_probs", "advantages"},
}
ONLY_SEED = {
    "log_prob": {"position_ids"},
    "update": {"position_ids", "loss_mask", "global_batch_size"},
}


@BOTH
@BUILDERS
@pytest.mark.parametrize("key", sorted(clients.batch()))
def test_missing_entries_are_named(build: Any, version: str, key: str) -> None:
    kind = "log_prob" if build is clients.log_prob_payload else "update"
    needed = NEEDED[kind] | (ONLY_SEED[kind] if version == "seed" else set())
    data = clients.batch(**{key: ...})
    if key in needed:
        says = "attention_mask is needed" if key == "attention_mask" else f"data has no '{key}'"
        refused(build, says, data, clients.config(version))
    else:
        build(data, clients.config(version))


def test_ref_log_prob_is_needed_with_kl_loss() -> None:
    refused(
        clients.update_payloads,
        "data has no 'ref_log_prob'",
        clients.batch(),
        actor_config={"use_kl_loss": True},
    )


@BUILDERS
def test_positions_are_needed_where_they_are_sent(build: Any) -> None:
    config = clients.config(remote_backend__comms__drop_position_ids=False)
    refused(build, "data has no 'position_ids'", clients.batch(position_ids=...), config)


# ---- shapes, dtypes, forms ----------------------------------------------------------------------

DENSE = torch.zeros(8, 7, dtype=torch.int64)
CASES: list[tuple[str, Entries]] = [
    (r"input_ids: expected a nested jagged torch tensor", {"input_ids": DENSE}),
    (
        r"input_ids: has values float32\[35\], int32 or int64",
        {"input_ids": clients.nested([[1.0] * 35], torch.float32)},
    ),
    (
        r"input_ids: has 2 rows, prompts and responses have 8",
        {"input_ids": clients.nested([[1], [2]])},
    ),
    (
        r"input_ids: the batch is empty",
        {"input_ids": (torch.zeros(0, dtype=torch.int64), torch.tensor([0]))},
    ),
    (
        r"prompts are nested and responses dense",
        {"prompts": clients.nested([[1]] * 8)},
    ),
    (r"prompts are dense and responses nested", {"responses": clients.nested([[1]] * 8)}),
    (
        r"attention_mask: is nested; a dense \[rows, width\] mask is needed",
        {"attention_mask": clients.nested([[1]] * 8)},
    ),
    (
        r"attention_mask: is int64\[8, 9\], \[8, 7\] is needed",
        {"attention_mask": torch.ones(8, 9, dtype=torch.int64)},
    ),
    (
        r"attention_mask: is int64\[3, 7\], \[8, 7\] is needed",
        {"attention_mask": torch.ones(3, 7, dtype=torch.int64)},
    ),
    (r"prompts have 3 rows, responses 8", {"prompts": DENSE[:3, :4]}),
    (r"temperature: is 0, .* above 0 is needed", {"temperature": 0}),
    (r"temperature: is 0.0", {"temperature": 0.0}),
    (r"temperature: is -1.0", {"temperature": -1.0}),
    (r"temperature: is nan", {"temperature": float("nan")}),
    (r"temperature: is inf", {"temperature": float("inf")}),
    (r"temperature: is None", {"temperature": None}),
    (r"temperature: is True", {"temperature": True}),
    (r"temperature: is '0.7'", {"temperature": "0.7"}),
    (r"temperature: is tensor", {"temperature": torch.tensor([0.7, 0.7])}),
]


@BOTH
@BUILDERS
@pytest.mark.parametrize(("says", "entries"), CASES, ids=[says for says, _ in CASES])
def test_bad_entries_of_any_payload(build: Any, version: str, says: str, entries: Entries) -> None:
    refused(build, says, clients.batch() | entries, clients.config(version))


RESPONSE_CASES: list[tuple[str, Entries]] = [
    (r"old_log_probs: is int64\[8, 3\], \[8, 3\] of a float", {"old_log_probs": DENSE[:, :3]}),
    (r"advantages: is float32\[7, 3\]", {"advantages": torch.zeros(7, 3)}),
    (r"advantages: is float32\[8\]", {"advantages": torch.zeros(8)}),
    (r"advantages: has 9 columns, more than the width 7", {"advantages": torch.zeros(8, 9)}),
    (
        r"response_mask: is float32\[8, 3\], .* of bool or integers",
        {"response_mask": torch.ones(8, 3)},
    ),
    (
        r"response_mask: layout is torch.jagged, a dense",
        {"response_mask": clients.nested([[1]] * 8)},
    ),
    (r"old_log_probs: is nested, a dense", {"old_log_probs": clients.nested([[1]] * 8)}),
    (
        r"rollout_is_weights: two dimensions and 8 rows",
        {"rollout_is_weights": torch.ones(4, 3)},
    ),
    (r"rollout_is_weights: two dimensions", {"rollout_is_weights": torch.ones(8)}),
    (r"rollout_is_weights: expected a torch tensor", {"rollout_is_weights": "heavy"}),
]


@pytest.mark.parametrize(("says", "entries"), RESPONSE_CASES, ids=[s for s, _ in RESPONSE_CASES])
@pytest.mark.filterwarnings("ignore:.*do not line up with the responses")
def test_bad_entries_of_updates(says: str, entries: Entries) -> None:
    refused(clients.update_payloads, says, clients.batch() | entries)


def test_bad_counting_masks() -> None:
    """The flat generation counts loss_mask, which the wire does not otherwise read."""
    config = clients.config("seed")
    for mask in (torch.ones(8, 3), torch.ones(7, 3, dtype=torch.int64), torch.ones(8)):
        refused(clients.update_payloads, "loss_mask: is", clients.batch(loss_mask=mask), config)


@BUILDERS
@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("pad_token_id", None, "pad_token_id: is None, an int is needed; a tokenizer without"),
        ("pad_token_id", 1.5, "pad_token_id: is float"),
        ("pad_token_id", True, "pad_token_id: is bool"),
        ("pad_token_id", 2**70, "input_ids"),
        ("rollout_n", None, "rollout_n: is None"),
        ("rollout_n", 0, "rollout_n: is 0, at least 1"),
        ("rollout_n", -2, "rollout_n: is -2"),
        ("rollout_n", 2.0, "rollout_n: is float"),
    ],
)
def test_bad_options(build: Any, option: str, value: Any, says: str) -> None:
    refused(build, says, clients.batch(), **{option: value})


def test_bad_actor_configs() -> None:
    for bad in (7, object(), [1]):
        refused(
            clients.update_payloads, "no attributes to serialise", clients.batch(), actor_config=bad
        )
    refused(
        clients.update_payloads,
        "a dict has a key of type tuple",
        clients.batch(),
        actor_config={"x": {(1, 2): 3}},
    )
    deep: list[Any] = []
    deep.append(deep)
    with pytest.raises(RecursionError):
        clients.update_payloads(clients.batch(), clients.config(), actor_config={"x": deep})


def test_omegaconf_containers_are_refused_by_name() -> None:
    from omegaconf import OmegaConf

    refused(
        clients.update_payloads,
        r"is an OmegaConf container; pass OmegaConf.to_container",
        clients.batch(),
        actor_config=OmegaConf.create({"use_kl_loss": False}),
    )


# ---- lengths ------------------------------------------------------------------------------------


@BOTH
@BUILDERS
def test_rows_that_do_not_add_up(build: Any, version: str) -> None:
    mask = clients.batch()["attention_mask"]
    mask[3, 4] = 1  # row 3 has prompt 4, response 0
    refused(build, "input_ids: row 3", clients.batch(attention_mask=mask), clients.config(version))


@BUILDERS
def test_masks_with_gaps(build: Any) -> None:
    mask = clients.batch()["attention_mask"]
    mask[2, 2] = 0
    refused(build, "attention_mask: row 2", clients.batch(attention_mask=mask))


@BUILDERS
@pytest.mark.parametrize("key", ["max_prompt_len", "max_response_len"])
@pytest.mark.filterwarnings("ignore:.*load balancer picks rows")
def test_declared_widths_that_are_too_small(build: Any, key: str) -> None:
    """The recorded clients cut the prompt's head, or the response's tail, without a word."""
    data = clients.batch(jagged=True, attention_mask=..., **{key: 2})
    error = refused(build, "input_ids: row", data)
    assert re.search(r"\b[34]\b", str(error)) and " 2" in str(error)


@BUILDERS
@pytest.mark.filterwarnings("ignore:.*load balancer picks rows")
def test_masks_that_contradict_nested_prompts(build: Any) -> None:
    mask = clients.batch()["attention_mask"]
    mask[5] = 0
    refused(
        build,
        "attention_mask: row 5 has 0 ones, but its prompt has 1 elements and its response 2",
        clients.batch(jagged=True, attention_mask=mask),
    )


# ---- positions ----------------------------------------------------------------------------------

KEEP = {"remote_backend__comms__drop_position_ids": False}
MROPE = torch.nested.nested_tensor_from_jagged(
    torch.arange(40).reshape(4, 10), torch.tensor([0, 5, 10]), jagged_dim=2
)


@BUILDERS
@pytest.mark.parametrize("paths", [{}, KEEP], ids=["dropped", "kept"])
def test_positions_of_several_components_are_refused(build: Any, paths: dict[str, Any]) -> None:
    data = clients.batch(position_ids=MROPE)
    refused(
        build,
        r"position_ids: its jagged values are int64\[4, 10\].*mrope",
        data,
        clients.config(**paths),
    )


@BUILDERS
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_positions_that_would_be_lost(build: Any, dtype: torch.dtype) -> None:
    rows = [list(range(p)) for p in (5, 3, 6, 4, 2, 3, 6, 5)]
    rows[6][4] = 40
    data = clients.batch(position_ids=clients.nested(rows, dtype))
    error = refused(build, "position_ids: row 6 holds 40 at place 4, not 4", data)
    assert "drop_position_ids=false" in str(error)
    build(data, clients.config(**KEEP))


@BUILDERS
@pytest.mark.parametrize("paths", [{}, KEEP], ids=["dropped", "kept"])
def test_positions_of_other_rows(build: Any, paths: dict[str, Any]) -> None:
    config = clients.config(**paths)
    rows = [list(range(p)) for p in (5, 3, 6, 4, 2, 3, 6, 5)]
    short = [*rows[:7], rows[7][:-1]]
    refused(
        build,
        "position_ids: row 7 has 4 elements, input_ids has 5",
        clients.batch(position_ids=clients.nested(short)),
        config,
    )
    refused(
        build,
        "position_ids: has 7 rows, input_ids has 8",
        clients.batch(position_ids=clients.nested(rows[:7])),
        config,
    )


# ---- sizes that do not divide -------------------------------------------------------------------


def test_rows_that_are_no_whole_mini_batches() -> None:
    lengths = [(2, 2)] * 9
    error = refused(
        clients.update_payloads,
        "9 rows cannot be cut into 2 equal mini-batches",
        clients.batch(lengths, rollouts=9),
        rollout_n=1,
    )
    assert "ppo_mini_batch_size 2" in str(error)


@pytest.mark.parametrize(("train", "mini"), [(6, 4), (2, 4), (4, 0)])
def test_settings_that_are_no_whole_mini_batches(train: int, mini: int) -> None:
    config = arctic_rl_c.normalize_config(clients.config())
    config["data"]["train_batch_size"] = train
    config["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"] = mini
    with pytest.raises(ConfigError, match=f"train_batch_size {train} .*ppo_mini_batch_size {mini}"):
        clients.update_payloads(clients.batch(), config)


def test_no_epochs() -> None:
    config = arctic_rl_c.normalize_config(clients.config())
    config["actor_rollout_ref"]["actor"]["ppo_epochs"] = 0
    with pytest.raises(ConfigError, match="ppo_epochs is 0"):
        clients.update_payloads(clients.batch(), config)


@BOTH
def test_parted_rollouts(version: str) -> None:
    refused(
        clients.update_payloads,
        "rows.* are not a multiple of rollout_n 3",
        clients.batch(),
        clients.config(version),
        rollout_n=3,
    )


def as_it_is(version: str = "final", **paths: Any) -> dict[str, Any]:
    """A config in its normalised form, which builders take as it is, changed afterwards.

    Settings that no batch could satisfy are refused when the config is read. These tests are
    about batches, so they go around that.
    """
    return clients.changed(arctic_rl_c.normalize_config(clients.config(version)), **paths)


@pytest.mark.parametrize(
    ("version", "ranks", "says"),
    [
        ("final", 3, "rows cannot be shared evenly by the 3 ranks"),
        ("seed", 16, "8 rows cannot be shared evenly by the 16 ranks"),
    ],
)
def test_rows_and_ranks(version: str, ranks: int, says: str) -> None:
    config = as_it_is(version, remote_backend__training_gpus=ranks)
    for build in (clients.log_prob_payload, clients.update_payloads):
        error = refused(build, says, clients.batch(), config)
        assert "remote_backend.training_gpus" in str(error)
        build(clients.batch(), config, server_limits=False)


def test_rows_and_micro_batches() -> None:
    """8 rows on 2 ranks are 4 each, which 8 micro-batches of 1 cannot be made of."""
    config = as_it_is("seed", data__train_batch_size=16)
    refused(
        clients.log_prob_payload,
        "the 8 rows of a rank cannot be cut into the 16 equal micro-batches",
        clients.batch(),
        config,
    )
    clients.log_prob_payload(clients.batch(), config, ref=True)  # makes one of all rows


def test_rows_and_reference_ranks() -> None:
    config = as_it_is("final", remote_backend__log_prob_gpus=3)
    error = refused(clients.log_prob_payload, "3 ranks", clients.batch(), config, ref=True)
    assert "remote_backend.log_prob_gpus" in str(error)
    clients.log_prob_payload(clients.batch(), config)


def test_the_balancer_needs_more_rows_than_ranks() -> None:
    data = clients.batch([(1, 1)])
    paths = {
        "data__train_batch_size": 1,
        "actor_rollout_ref__actor__ppo_mini_batch_size": 1,
        "actor_rollout_ref__rollout__n": 1,
        "remote_backend__train__zorro_train__max_rollouts": 1,
    }
    error = refused(
        clients.log_prob_payload,
        "fails on 1 rows for 1 ranks",
        data,
        as_it_is(**paths),
        rollout_n=1,
    )
    assert "set remote_backend.train.load_balancer=false" in str(error)
    config = as_it_is(**paths, remote_backend__train__load_balancer=False)
    for build in (clients.log_prob_payload, clients.update_payloads):
        payload = build(data, config, rollout_n=1)
        payload = payload[0] if isinstance(payload, list) else payload
        assert {value.ndim for value in payload["batch"].values()} == {2}, "one row keeps two axes"


def test_the_balancer_keeps_groups_whole() -> None:
    """2 ranks of 4 rows cannot hold groups of 8; cut at 4 they can."""
    paths = {"remote_backend__training_gpus": 2, "actor_rollout_ref__rollout__n": 8}
    paths |= {"data__train_batch_size": 1, "actor_rollout_ref__actor__ppo_mini_batch_size": 1}
    data = clients.batch(rollouts=8)
    config = as_it_is(**paths, remote_backend__train__zorro_train__max_rollouts=8)
    refused(
        clients.log_prob_payload,
        "cannot pack prompt groups of 8 rows into ranks of 4 rows",
        data,
        config,
        rollout_n=8,
    )
    config = as_it_is(**paths, remote_backend__train__zorro_train__max_rollouts=4)
    clients.log_prob_payload(data, config, rollout_n=8)


def test_the_balancer_has_a_token_budget() -> None:
    config = as_it_is(actor_rollout_ref__actor__ppo_max_token_len_per_gpu=9)
    error = refused(
        clients.log_prob_payload, "prompt of 4 tokens with 2 responses", clients.batch(), config
    )
    assert "ppo_max_token_len_per_gpu 9" in str(error)
    clients.log_prob_payload(
        clients.batch(), as_it_is(actor_rollout_ref__actor__ppo_max_token_len_per_gpu=10)
    )


# ---- groups under prompt sharing ----------------------------------------------------------------

ORDERS = {"A A B B C C D D": None, "A B A B C D C D": "side by side", "A B C D A B C D": "mini-"}


def reordered(order: str) -> dict[str, Any]:
    lengths, rows = [(3, 1)] * 8, order.split()
    data = clients.batch(lengths, rollouts=1)
    values = data["input_ids"].values().clone().reshape(8, 4)
    for i, name in enumerate(rows):
        values[i, :3] = torch.tensor([ord(name), 7, 8])
    data["input_ids"] = torch.nested.nested_tensor_from_jagged(
        values.flatten(), data["input_ids"].offsets()
    )
    return data


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("balanced", [False, True])
def test_rollouts_of_a_prompt_stay_together(order: str, balanced: bool) -> None:
    paths = {"remote_backend__train__load_balancer": balanced}
    config = clients.config(**paths, remote_backend__train__zorro_train__enable=True)
    says = ORDERS[order]
    if says == "side by side" and balanced:
        says = None  # the server sorts the rows of a mini-batch itself
    if says is None:
        clients.update_payloads(reordered(order), config)
    else:
        error = refused(clients.update_payloads, says, reordered(order), config)
        assert re.search(r"rows 0 and [24] ", str(error))
    clients.update_payloads(reordered(order), clients.config(**paths))  # nothing is shared


def test_a_prompt_may_occur_twice() -> None:
    config = clients.config(remote_backend__train__zorro_train__enable=True)
    clients.update_payloads(reordered("A A B B A A C C"), config)


def test_rows_without_twins_are_let_through() -> None:
    config = clients.config(remote_backend__train__zorro_train__enable=True)
    clients.update_payloads(reordered("A B C D E F G H"), config)


# ---- warnings -----------------------------------------------------------------------------------


def test_importance_weights_are_warned_about() -> None:
    data = clients.batch(rollout_is_weights=torch.ones(8, 3))
    with pytest.warns(UserWarning, match="rollout_is_weights travels in meta"):
        payloads = clients.update_payloads(data, clients.config())
    for payload, rows in zip(payloads, (slice(0, 4), slice(4, 8)), strict=True):
        clients.same(payload["meta"]["rollout_is_weights"], data["rollout_is_weights"][rows])
    clients.update_payloads(data, clients.config(), server_limits=False)


@pytest.mark.parametrize(
    ("option", "config"),
    [
        ("clip_ratio", {"clip_ratio": 0.3}),
        ("clip_ratio_low", {"clip_ratio_low": 0.1}),
        ("clip_ratio_high", {"clip_ratio_high": 0.28}),
        ("clip_ratio_c", {"clip_ratio_c": 10}),
        ("policy_loss.loss_mode", {"policy_loss": {"loss_mode": "gspo"}}),
        ("loss_scale_factor", {"loss_scale_factor": 4}),
    ],
)
def test_loss_options_without_effect(option: str, config: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match=rf"actor_config\.{re.escape(option)} has no effect"):
        clients.update_payloads(clients.batch(), clients.config(), actor_config=config)
    clients.update_payloads(
        clients.batch(), clients.config(), actor_config=config, server_limits=False
    )


def test_loss_options_as_the_server_has_them() -> None:
    options = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
    options |= {"clip_ratio_c": 3.0, "loss_scale_factor": None, "entropy_coeff": 0}
    options |= {"policy_loss": {"loss_mode": "vanilla"}}
    clients.update_payloads(clients.batch(), clients.config(), actor_config=options)


def test_the_entropy_loss_is_one_slot_off() -> None:
    options = {"actor_config": {"entropy_coeff": 0.01}}
    with pytest.warns(UserWarning, match="entropy loss is one slot off"):
        clients.update_payloads(clients.batch(), clients.config(), **options)
    shared = clients.config(remote_backend__train__zorro_train__enable=True)
    clients.update_payloads(clients.batch(), shared, **options)


def test_a_reference_call_over_the_token_budget() -> None:
    config = clients.config(actor_rollout_ref__actor__ppo_max_token_len_per_gpu=55)
    with pytest.warns(UserWarning, match=r"all 8 rows of a rank \(7 padded tokens each\)"):
        clients.log_prob_payload(clients.batch(), config, ref=True)
    clients.log_prob_payload(clients.batch(), config)


@BUILDERS
@pytest.mark.parametrize("shift", [1, 2])
def test_masks_that_lie_elsewhere(build: Any, shift: int) -> None:
    """As recorded they travel as they are; the word is the only difference."""
    lengths = [(2, 1)] * 8
    data = clients.batch(lengths, jagged=True)
    mask = torch.roll(data["attention_mask"], shift, dims=1)
    config = clients.config(remote_backend__train__load_balancer=False)
    build(data, config)
    with pytest.warns(UserWarning, match=r"attention_mask is not laid out.*\[8, 7\].*column 4"):
        built = build(data | {"attention_mask": mask}, config)
    built = built[0] if isinstance(built, list) else built
    rows = len(built["batch"]["attention_mask"])
    clients.same(built["batch"]["attention_mask"], mask[:rows])


@BUILDERS
def test_a_missing_mask_is_made(build: Any) -> None:
    data = clients.batch(jagged=True)
    config = clients.config(remote_backend__train__load_balancer=False)
    with_mask, without = build(data, config), build(data | {}, config)
    del data["attention_mask"]
    clients.same(build(data, config), with_mask)
    clients.same(without, with_mask)


def test_nested_prompts_and_the_balancer() -> None:
    with pytest.warns(UserWarning, match="load balancer picks rows from every tensor"):
        clients.log_prob_payload(clients.batch(jagged=True), clients.config())


# ---- forms of the batch -------------------------------------------------------------------------


def arrays(data: dict[str, Any]) -> dict[str, Any]:
    """The same batch without torch."""
    found = {}
    for key, value in data.items():
        if isinstance(value, torch.Tensor):
            nested = value.is_nested
            value = (value.values().numpy(), value.offsets().numpy()) if nested else value.numpy()
        found[key] = value
    return found


def as_torch(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, dict):
        return {key: as_torch(item) for key, item in value.items()}
    if isinstance(value, tuple):
        values, offsets = (torch.from_numpy(part.copy()) for part in value)
        return torch.nested.nested_tensor_from_jagged(values, offsets)
    return value


@BOTH
@BUILDERS
@pytest.mark.parametrize("jagged", [False, True])
def test_numpy_in_numpy_out(build: Any, version: str, jagged: bool) -> None:
    data = clients.batch(jagged=jagged)
    config = clients.config(version, remote_backend__train__load_balancer=False)
    if version == "seed":
        config = clients.config(version)
    wanted, found = build(data, config), build(arrays(data), config)
    for one, other in zip(
        found if isinstance(found, list) else [found],
        wanted if isinstance(wanted, list) else [wanted],
        strict=True,
    ):
        assert not any(isinstance(value, torch.Tensor) for value in one["batch"].values())
        clients.same(as_torch(one), other)


class OnlyDLPack:
    """Nothing but the exchange protocol."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("jagged", [False, True])
def test_dlpack_in_numpy_out(jagged: bool) -> None:
    data = arrays(clients.batch(jagged=jagged))
    config = clients.config(remote_backend__train__load_balancer=False)
    wanted = clients.update_payloads(data, config)
    wrapped = {
        key: tuple(map(OnlyDLPack, value))
        if isinstance(value, tuple)
        else OnlyDLPack(value)
        if isinstance(value, np.ndarray)
        else value
        for key, value in data.items()
    }
    for one, other in zip(clients.update_payloads(wrapped, config), wanted, strict=True):
        clients.same(as_torch(one), as_torch(other))


class Wrapped:
    """A non-tensor entry as TensorDict keeps it."""

    def __init__(self, data: Any) -> None:
        self.data = data


@BOTH
@BUILDERS
def test_wrappers_are_unwrapped(build: Any, version: str) -> None:
    data, config = clients.batch(), clients.config(version)
    scalars = {"temperature", "global_batch_size"}
    wrapped = {k: Wrapped(v) if k in scalars else v for k, v in data.items()}
    clients.same(build(wrapped, config), build(data, config))


@BOTH
@BUILDERS
@pytest.mark.filterwarnings("ignore:.*is_fx_tracing")
def test_tensordicts(build: Any, version: str) -> None:
    from tensordict import TensorDict
    from tensordict.tensorclass import NonTensorData

    data, config = clients.batch(), clients.config(version)
    scalars = {"temperature", "global_batch_size"}
    held = TensorDict({k: v for k, v in data.items() if k not in scalars}, batch_size=[8])
    for key in scalars:
        held.set_non_tensor(key, data[key])
    assert isinstance(held.get("temperature"), NonTensorData)
    clients.same(build(held, config), build(data, config))
    refused(build, "data has no 'prompts'", held.exclude("prompts"), config)


class Raises(dict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise OSError("the store is gone")


@BUILDERS
def test_other_errors_of_the_mapping_pass_through(build: Any) -> None:
    with pytest.raises(OSError, match="the store is gone"):
        build(Raises(), clients.config())
    with pytest.raises(TypeError):
        build(7, clients.config())


@BOTH
@BUILDERS
def test_nothing_is_written_into_the_batch(build: Any, version: str) -> None:
    data = clients.batch()
    kept = copy.deepcopy({k: v for k, v in data.items() if not getattr(v, "is_nested", False)})
    values = {k: v.values().clone() for k, v in data.items() if getattr(v, "is_nested", False)}
    build(data, clients.config(version))
    for key, value in kept.items():
        clients.same(data[key], value)
    for key, value in values.items():
        clients.same(data[key].values(), value)


def test_payloads_own_their_dicts() -> None:
    """A server in this process writes into what it gets."""
    policy = {"loss_mode": "vanilla"}
    options = {"actor_config": {"list": [1, 2], "policy_loss": policy}}
    first, second = clients.update_payloads(clients.batch(), clients.config(), **options)
    assert first["meta"]["actor_config"] == second["meta"]["actor_config"]
    for path in (("batch",), ("meta",), ("processing",), ("processing", "post")):
        one: Any = first
        other: Any = second
        for key in path:
            one, other = one[key], other[key]
        assert one is not other, path
    for key in ("actor_config", "policy_loss_config"):
        assert first["meta"][key] is not second["meta"][key]
    assert first["meta"]["actor_config"]["list"] is not second["meta"]["actor_config"]["list"]
    assert first["meta"]["policy_loss_config"] is not policy
