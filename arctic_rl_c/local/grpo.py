# SPDX-License-Identifier: Apache-2.0
"""GRPO with a client: generate, score, compare within groups, update, sync."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from arctic_rl_c import ArcticRLClient
from arctic_rl_c.local.tasks import Arithmetic


def group_advantages(
    rewards: Sequence[float], group_size: int, *, scale_by_std: bool = False
) -> torch.Tensor:
    """Rewards relative to the mean of their group.

    Args:
        rewards: One for each response; the responses of a prompt lie side by side.
        group_size: Responses of a prompt.
        scale_by_std: Also divide by the group's standard deviation. A group that nearly
            agrees then weighs as much as one that does not, which makes late training uneasy.

    Returns:
        `[len(rewards)]` float32.
    """
    groups = torch.tensor(rewards, dtype=torch.float32).view(-1, group_size)
    advantages = groups - groups.mean(1, keepdim=True)
    if scale_by_std:
        advantages = advantages / (groups.std(1, keepdim=True) + 1e-6)
    return advantages.view(-1)


def make_data(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    *,
    prompt_width: int,
    response_width: int,
    pad_token_id: int,
    temperature: float,
) -> dict[str, Any]:
    """The batch that a client's `compute_log_prob` takes.

    Args:
        prompts: Token ids, row by row.
        responses: The same.
        prompt_width: P, at least the longest prompt.
        response_width: R, at least the longest response.
        pad_token_id: Fills `prompts` and `responses`.
        temperature: That of the rollout.

    Returns:
        `input_ids` and `position_ids` as pairs (values, offsets), `prompts` [B, P],
        `responses` [B, R], `attention_mask` [B, P + R], `response_mask` and `loss_mask`
        [B, R], all int64.
    """
    rows = len(prompts)
    left = torch.full((rows, prompt_width), pad_token_id, dtype=torch.int64)
    right = torch.full((rows, response_width), pad_token_id, dtype=torch.int64)
    mask = torch.zeros(rows, prompt_width + response_width, dtype=torch.int64)
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        begin, end = prompt_width - len(prompt), prompt_width + len(response)
        left[i, begin:] = torch.tensor(prompt)
        right[i, : len(response)] = torch.tensor(response, dtype=torch.int64)
        mask[i, begin:end] = 1
    lengths = mask.sum(1)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    values = torch.cat([left, right], dim=1)[mask != 0]
    positions = torch.cat([torch.arange(int(n)) for n in lengths])
    response_mask = mask[:, prompt_width:].clone()
    return {
        "input_ids": (values, offsets),
        "position_ids": (positions, offsets),
        "prompts": left,
        "responses": right,
        "attention_mask": mask,
        "response_mask": response_mask,
        "loss_mask": response_mask,
        "temperature": temperature,
    }


def response_log_probs(
    dense: torch.Tensor, response_mask: torch.Tensor, *, aligned: bool
) -> torch.Tensor:
    """The response tokens' log-probs `[B, R]` from a server's `[B, P + R]`.

    Args:
        dense: As `compute_log_prob` gives it.
        response_mask: `[B, R]`.
        aligned: Slot i holds the log-prob of token i (ZoRRO) rather than of token i + 1.
    """
    width = response_mask.shape[1]
    window = dense[:, -width:] if aligned else dense[:, -width - 1 : -1]
    return torch.where(response_mask != 0, window, 0.0)


@dataclass(frozen=True)
class GrpoOptions:
    """The shape of a run.

    Attributes:
        prompts: Problems a step.
        samples: Responses of each.
        prompt_width: P.
        response_width: R, and the most tokens of a response.
        temperature: Of the rollout and of the update.
        actor_config: Loss options, as they travel to the server.
        sampling_params: More of these.
        scale_by_std: See `group_advantages`.
    """

    prompts: int
    samples: int
    prompt_width: int
    response_width: int
    temperature: float
    actor_config: dict[str, Any]
    sampling_params: dict[str, Any]
    scale_by_std: bool = False


@dataclass(frozen=True)
class StepReport:
    """What one step gave; times in seconds."""

    metrics: dict[str, Any]
    score: float
    solved: float
    response_tokens: float
    rows: list[int]
    generate: float
    log_prob: float
    update_actor: float


class Grpo:
    """Runs GRPO steps through a client.

    Args:
        client: The client.
        tokenizer: Of the model; encodes the problems.
        task: Where problems and rewards come from.
        options: The shape of the run.
    """

    def __init__(
        self, client: ArcticRLClient, tokenizer: Any, task: Arithmetic, options: GrpoOptions
    ) -> None:
        self._client, self._tokenizer = client, tokenizer
        self._task, self._options = task, options
        self._aligned = bool(client.config["remote_backend"]["train"]["zorro_train"]["enable"])
        self._pad = tokenizer.pad_token_id
        if self._pad is None:
            self._pad = tokenizer.eos_token_id

    async def step(self) -> StepReport:
        """Everything of a step but the weight sync."""
        options, client = self._options, self._client
        problems = [p for p in self._task.sample(options.prompts) for _ in range(options.samples)]
        prompts = [self._tokenizer(p.prompt)["input_ids"] for p in problems]
        begin = time.perf_counter()
        results = await client.generate(
            prompts,
            {
                "temperature": options.temperature,
                "max_tokens": options.response_width,
                **options.sampling_params,
            },
        )
        generated = time.perf_counter()
        rewards, solved = [], 0
        for problem, result in zip(problems, results, strict=True):
            answer = result["text"].strip(), result["finish_reason"] == "stop"
            rewards.append(self._task.reward(problem, *answer))
            solved += self._task.solved(problem, *answer)
        data = make_data(
            prompts,
            [r["token_ids"] for r in results],
            prompt_width=options.prompt_width,
            response_width=options.response_width,
            pad_token_id=self._pad,
            temperature=options.temperature,
        )
        scored = time.perf_counter()
        out = await client.compute_log_prob(
            data, pad_token_id=self._pad, rollout_n=options.samples, calculate_entropy=False
        )
        data["old_log_probs"] = response_log_probs(
            out["model_output"]["log_probs"], data["response_mask"], aligned=self._aligned
        )
        advantages = group_advantages(rewards, options.samples, scale_by_std=options.scale_by_std)
        data["advantages"] = advantages[:, None] * data["response_mask"]
        data["global_batch_size"] = len(prompts)
        compared = time.perf_counter()
        update = await client.update_actor(
            data,
            actor_config=options.actor_config,
            pad_token_id=self._pad,
            rollout_n=options.samples,
        )
        updated = time.perf_counter()
        return StepReport(
            metrics={**update["metrics"], "loss": float(update["loss"])},
            score=sum(rewards) / len(rewards),
            solved=solved / len(rewards),
            response_tokens=float(data["response_mask"].sum()) / len(rewards),
            rows=[int(n) for n in update["global_token_num"]],
            generate=generated - begin,
            log_prob=compared - scored,
            update_actor=updated - compared,
        )
