# SPDX-License-Identifier: Apache-2.0
"""What the payload and client tests share: a transport that records, configs, small batches."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import arctic_rl_c
import golden

HERE = Path(__file__).parent
PAD = golden.PAD_TOKEN_ID


class Unencodable:
    """Has no JSON form."""


def actor_config(case: golden.Case) -> Any:
    """The object whose recorded form is in the case: `weird` and `policy_loss` are objects."""
    plain, policy = recorded_configs(case)
    options = dict(plain, weird=Unencodable(), policy_loss=SimpleNamespace(**policy))
    if not policy:
        options["policy_loss"] = None
    return SimpleNamespace(**options)


def recorded_configs(case: golden.Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """actor_config and policy_loss_config of the case, or of its twin in the other generation."""
    if "error" in case.raw["results"]["update_actor"]:
        case = golden.case("seed", case.name)
    meta = next(case.payloads("update_actor"))[1]["meta"]
    return meta["actor_config"], meta["policy_loss_config"]


def rollout_n(case: golden.Case) -> int:
    return case.config["actor_rollout_ref"]["rollout"]["n"]


class Tokenizer:
    """Joins ids with spaces, as the recorded stand-in did."""

    pad_token_id = PAD

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


class Pause:
    """Awaiting it yields once to whoever drives, and gives back what is sent."""

    def __init__(self, token: Any = None) -> None:
        self.token = token

    def __await__(self) -> Iterator[Any]:
        return (yield self.token)


class Transport:
    """Records [method, payload, keywords] and answers as the recorded fake server did.

    `before` is awaited with the method's name and the number of its call, from 1, before each
    answer: the place to pause, raise, or look.
    """

    name = "fake"
    accepts_token_ids = False
    accepts_routing_key = True
    accepts_strict = True
    serves_reference = True

    def __init__(self, before: Callable[[str, int], Awaitable[None]] | None = None) -> None:
        self.calls: list[list[Any]] = []
        self.counts: dict[str, int] = {}
        self.before = before

    async def called(self, method: str, payload: Any = None, **keywords: Any) -> int:
        self.calls.append([method, payload, keywords])
        count = self.counts[method] = self.counts.get(method, 0) + 1
        if self.before is not None:
            await self.before(method, count)
        return count

    async def fwd_no_grad(self, payload: Any, reference_model: bool = False) -> dict[str, Any]:
        await self.called("fwd_no_grad", payload, reference_model=reference_model)
        ids = torch.as_tensor(payload["batch"]["input_ids"]).float()
        return {
            "batch": {"logprobs": 0.5 * ids, "entropy": 0.25 * ids},
            "metrics": {"a": 1.0},
        }

    async def fwd_bwd(self, payload: Any) -> dict[str, Any]:
        i = await self.called("fwd_bwd", payload)
        return {"metrics": {"loss": i / 2, "actor/pg_loss": i / 4, "actor/ppo_kl": i / 8}}

    async def step(self) -> dict[str, Any]:
        i = await self.called("step")
        return {"metrics": {"grad_norm": float(i), "last_lr": i * 1e-6}}

    async def generate(self, **keywords: Any) -> list[dict[str, Any]]:
        await self.called("generate", **keywords)
        return [{"token_ids": [1]} for _ in keywords["prompts"]]

    async def sync_weights(self, **keywords: Any) -> dict[str, Any]:
        await self.called("sync_weights", **keywords)
        return {"status": "ok"}

    async def save_checkpoint(self, **keywords: Any) -> dict[str, Any]:
        await self.called("save_checkpoint", **keywords)
        return {"path": keywords.get("path")}

    async def load_checkpoint(self, **keywords: Any) -> dict[str, Any]:
        await self.called("load_checkpoint", **keywords)
        return {"global_step": 3}

    async def sleep_inference(self, level: int = 1) -> dict[str, Any]:
        await self.called("sleep_inference", level=level)
        return {"status": "sleeping"}

    async def wake_inference(self, tags: list[str] | None = None) -> dict[str, Any]:
        await self.called("wake_inference", tags=tags)
        return {"status": "ready"}

    async def reset_prefix_cache(self) -> Any:
        await self.called("reset_prefix_cache")
        return {"status": "ok"}

    async def shutdown(self) -> None:
        await self.called("shutdown")

    def reconnect_handle(self) -> dict[str, Any]:
        return {"address": "here"}


def changed(config: dict[str, Any], **paths: Any) -> dict[str, Any]:
    """A copy of `config` with values set at paths written with __ for the dots."""
    config = copy.deepcopy(config)
    for path, value in paths.items():
        *parents, last = path.split("__")
        node = config
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    return config


def config(version: str = "final", **paths: Any) -> dict[str, Any]:
    """A small valid config: 4 prompts a batch, 2 a mini-batch, 2 rollouts of each."""
    return changed(golden.case(version, "dense_prompts").config, **paths)


def nested(rows: list[list[Any]], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    offsets = torch.tensor([0, *torch.tensor([len(r) for r in rows]).cumsum(0).tolist()])
    values = torch.tensor([item for row in rows for item in row], dtype=dtype)
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def batch(
    lengths: list[tuple[int, int]] | None = None,
    *,
    widths: tuple[int, int] = (4, 3),
    rollouts: int = 2,
    jagged: bool = False,
    **entries: Any,
) -> dict[str, Any]:
    """A batch of rows with the given prompt and response lengths, 8 of them by default.

    Rows of one group share their prompt. `entries` replace entries; `...` leaves one out.
    """
    if lengths is None:
        lengths = [(2, 3), (2, 1), (4, 2), (4, 0), (1, 1), (1, 2), (3, 3), (3, 2)]
    wide_p, wide_r = widths
    prompts, responses = [], []
    for i, (p, r) in enumerate(lengths):
        prompts.append([100 * (i // rollouts + 1) + k for k in range(p)])
        responses.append([1000 * (i + 1) + k for k in range(r)])
    mask = torch.zeros(len(lengths), wide_p + wide_r, dtype=torch.int64)
    for i, (p, r) in enumerate(lengths):
        mask[i, wide_p - p : wide_p + r] = 1
    rows = torch.arange(len(lengths)).unsqueeze(1)
    columns = torch.arange(wide_r).unsqueeze(0)
    data: dict[str, Any] = {
        "input_ids": nested([p + r for p, r in zip(prompts, responses, strict=True)]),
        "position_ids": nested([list(range(p + r)) for p, r in lengths]),
        "attention_mask": mask,
        "prompts": nested(prompts)
        if jagged
        else torch.tensor([[0] * (wide_p - len(p)) + p for p in prompts]),
        "responses": nested(responses)
        if jagged
        else torch.tensor([r + [0] * (wide_r - len(r)) for r in responses]),
        "response_mask": mask[:, wide_p:].clone(),
        "old_log_probs": -(rows * 10.0 + columns + 1),
        "advantages": rows * 0.5 - columns,
        "temperature": 0.7,
        "global_batch_size": len(lengths),
    }
    data["loss_mask"] = data["response_mask"]
    if jagged:
        data |= {"max_prompt_len": wide_p, "max_response_len": wide_r}
    data |= entries
    return {key: value for key, value in data.items() if value is not ...}


def log_prob_payload(data: Any, config: Any, **options: Any) -> dict[str, Any]:
    options = {"pad_token_id": PAD, "rollout_n": 2, "calculate_entropy": True} | options
    return arctic_rl_c.build_log_prob_payload(data, config, **options)


def update_payloads(data: Any, config: Any, **options: Any) -> list[dict[str, Any]]:
    options = {"pad_token_id": PAD, "rollout_n": 2, "actor_config": {}} | options
    return arctic_rl_c.build_update_payloads(data, config, **options)


def same(found: Any, wanted: Any, path: str = "") -> None:
    """Equal in values, dtypes, shapes, types and the order of keys."""
    if isinstance(wanted, torch.Tensor):
        assert isinstance(found, torch.Tensor), f"{path}: {type(found)}"
        assert found.is_nested == wanted.is_nested, path
        if wanted.is_nested:
            same(found.values(), wanted.values(), f"{path}.values")
            same(found.offsets(), wanted.offsets(), f"{path}.offsets")
            return
        assert found.dtype == wanted.dtype, f"{path}: {found.dtype} for {wanted.dtype}"
        assert found.shape == wanted.shape, f"{path}: {found.shape} for {wanted.shape}"
        assert torch.equal(found, wanted), f"{path}: {found} for {wanted}"
    elif isinstance(wanted, dict):
        assert type(found) is dict, f"{path}: {type(found)}"
        assert list(found) == list(wanted), f"{path}: {list(found)} for {list(wanted)}"
        for key in wanted:
            same(found[key], wanted[key], f"{path}/{key}")
    elif isinstance(wanted, list):
        assert type(found) is list, f"{path}: {type(found)}"
        assert len(found) == len(wanted), path
        for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
            same(one, other, f"{path}[{i}]")
    else:
        assert type(found) is type(wanted), f"{path}: {type(found)} for {type(wanted)}"
        assert found == wanted, f"{path}: {found} for {wanted}"


def drive(operation: Any) -> Any:
    """Run an operation whose transport never waits, without an event loop."""
    try:
        operation.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waits")


def log_prob(client: Any, case: golden.Case, name: str) -> Awaitable[Any]:
    """`name` is that of the recorded result."""
    return client.compute_log_prob(
        case.data(),
        ref=name == "ref_log_prob",
        calculate_entropy=name == "log_prob",
        rollout_n=rollout_n(case),
        temperature=golden.TEMPERATURE,
        pad_token_id=PAD,
    )


def update(client: Any, case: golden.Case, data: Any = None) -> Awaitable[Any]:
    """With the case's own batch unless another is given."""
    return client.update_actor(
        case.data() if data is None else data,
        actor_config=actor_config(case),
        pad_token_id=PAD,
        rollout_n=rollout_n(case),
        temperature=golden.TEMPERATURE,
    )
