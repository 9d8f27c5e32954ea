# SPDX-License-Identifier: Apache-2.0
"""Payloads, calls and results against what both generations of the client were seen to do."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import arctic_rl_c
import clients
import golden

#: What the recorded batches do that deserves a word. Everything else must be silent.
EXPECTED_WARNINGS = (
    "rollout_is_weights travels in meta",
    "attention_mask is not laid out as the padded rows are",
    "its columns do not line up with the responses",
    "load balancer picks rows from every tensor",
)


@contextlib.contextmanager
def known_warnings() -> Iterator[None]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
    for warning in seen:
        assert any(text in str(warning.message) for text in EXPECTED_WARNINGS), warning.message


def client_of(case: golden.Case) -> arctic_rl_c.ArcticRLClient:
    return arctic_rl_c.ArcticRLClient(
        clients.Transport(), case.config, tokenizer=clients.Tokenizer(), prompts_as="text"
    )


@pytest.mark.parametrize("name", ["log_prob", "ref_log_prob"])
@pytest.mark.parametrize("case", golden.CASES, ids=repr)
def test_log_prob(case: golden.Case, name: str) -> None:
    client = client_of(case)
    with known_warnings():
        result = clients.drive(clients.log_prob(client, case, name))
    clients.same(client.transport.calls, case.result(name)["calls"])
    clients.same(result, case.result(name)["result"])


@pytest.mark.parametrize("name", ["log_prob", "ref_log_prob"])
@pytest.mark.parametrize("case", golden.CASES, ids=repr)
def test_the_builder_gives_what_the_client_sends(case: golden.Case, name: str) -> None:
    with known_warnings():
        payload = arctic_rl_c.build_log_prob_payload(
            case.data(),
            case.config,
            pad_token_id=clients.PAD,
            rollout_n=clients.rollout_n(case),
            calculate_entropy=name == "log_prob",
            ref=name == "ref_log_prob",
        )
    clients.same([payload], [payload for _, payload in case.payloads(name)])


RECORDED = [case for case in golden.CASES if "error" not in case.raw["results"]["update_actor"]]
UNRECORDED = [case for case in golden.CASES if case not in RECORDED]


@pytest.mark.parametrize("case", RECORDED, ids=repr)
def test_update_actor(case: golden.Case) -> None:
    client = client_of(case)
    with known_warnings():
        result = clients.drive(clients.update(client, case))
    clients.same(client.transport.calls, case.result("update_actor")["calls"])
    clients.same(result, case.result("update_actor")["result"])


def padded(data: dict[str, Any], widths: tuple[int, int]) -> dict[str, Any]:
    """The same batch as the dense path takes it, padded with zeros row by row."""
    prompts, responses = data["prompts"].unbind(), data["responses"].unbind()
    rows, (wide_p, wide_r) = len(prompts), widths
    dense = dict(data)
    dense["prompts"] = torch.zeros(rows, wide_p, dtype=torch.int64)
    dense["responses"] = torch.zeros(rows, wide_r, dtype=torch.int64)
    dense["attention_mask"] = torch.zeros(rows, wide_p + wide_r, dtype=torch.int64)
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        dense["prompts"][i, wide_p - len(prompt) :] = prompt
        dense["responses"][i, : len(response)] = response
        dense["attention_mask"][i, wide_p - len(prompt) : wide_p + len(response)] = 1
    del dense["max_prompt_len"], dense["max_response_len"]
    return dense


@pytest.mark.parametrize("case", UNRECORDED, ids=repr)
def test_nested_prompts_are_cut_into_mini_batches(case: golden.Case) -> None:
    """Where the recorded client failed: what the padded dense form gives, prompts cut by row."""
    meta = next(case.payloads("log_prob"))[1]["meta"]
    widths = meta["max_prompt_len"], meta["max_response_len"]
    data = case.data() | {"max_prompt_len": widths[0], "max_response_len": widths[1]}
    ours, dense = client_of(case), client_of(case)
    with known_warnings():
        result = clients.drive(clients.update(ours, case, data))
        wanted = clients.drive(clients.update(dense, case, padded(data, widths)))
    clients.same(result, wanted)
    assert len(ours.transport.calls) == len(dense.transport.calls) == 4
    rows = 0
    for ours_call, dense_call in zip(ours.transport.calls, dense.transport.calls, strict=True):
        method, payload, keywords = dense_call
        if method == "fwd_bwd":
            batch = payload["batch"]
            count = len(batch["input_ids"])
            for key in ("prompts", "responses"):
                batch[key] = clients.nested(
                    [row.tolist() for row in data[key].unbind()[rows : rows + count]]
                )
            batch["attention_mask"] = data["attention_mask"][rows : rows + count]
            rows += count
        clients.same(ours_call, [method, payload, keywords])


@pytest.mark.parametrize("case", golden.CASES, ids=repr)
def test_other_calls(case: golden.Case) -> None:
    client = client_of(case)
    clients.drive(client.sync_weights())
    clients.drive(client.generate([5, 6, 7], {"temperature": 1.0, "max_tokens": 8}))
    clients.same(client.transport.calls, case.result("other_calls"))


@pytest.mark.parametrize("case", [c for c in golden.CASES if c.has("make_njt")], ids=repr)
def test_the_way_back(case: golden.Case) -> None:
    """The client shifts where the server answers response-aligned, in both generations."""
    client = client_of(case)
    recorded = case.result("make_njt")
    zorro = client.config["remote_backend"]["train"]["zorro_train"]["enable"]
    found = client.log_probs_to_nested(case.data(), recorded["dense"])
    clients.same(found, recorded["shifted" if zorro else "nested"])


@pytest.mark.parametrize("case", RECORDED, ids=repr)
def test_mini_batches_are_views(case: golden.Case) -> None:
    data = case.data()
    with known_warnings():
        payloads = clients.update_payloads(
            data,
            case.config,
            actor_config=clients.actor_config(case),
            rollout_n=clients.rollout_n(case),
        )
    batches = [payload["batch"] for payload in payloads]
    for batch in batches:
        assert batch["loss_mask"] is batch["response_mask"]
    for key, first in batches[0].items():
        if first.is_nested:
            continue
        storages = {batch[key].untyped_storage().data_ptr() for batch in batches}
        assert len(storages) == 1, f"{key} is copied"
        if key in ("attention_mask", "prompts", "responses"):
            assert storages == {data[key].untyped_storage().data_ptr()}


def test_batch_and_meta_share_no_name() -> None:
    """Both become keyword arguments of one call on the server."""
    for case in golden.CASES:
        for name in ("log_prob", "ref_log_prob", "update_actor"):
            for _, payload in case.payloads(name):
                assert not set(payload["batch"]) & set(payload["meta"])
