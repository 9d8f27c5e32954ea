# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters, and the choice of the next token of many rows at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_GREEDY_BELOW = 1e-5


@dataclass(frozen=True)
class SamplingParams:
    """How responses are drawn. Names and meanings follow vLLM's.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_p, top_k: Nucleus and count limits; `top_k` 0 or -1 is off.
        repetition_penalty: Above 1 makes tokens of prompt and response less likely.
        max_tokens, min_tokens: Length bounds of the response; None is up to the model's limit.
        stop_token_ids: Ids that end a response, besides the model's own.
        ignore_eos: Do not stop at the model's own end ids.
        n: Samples of each prompt.
        logprobs: None, or how many of the likeliest tokens to report beside the chosen one.
            They are those of the model's own distribution, before any of the above.
        allowed_token_ids: Sample among these only.
        seed: Makes a request's samples repeatable, whichever batch it runs in.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    max_tokens: int | None = 1024
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int | None = None

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any] | None) -> SamplingParams:
        """Check a client's `sampling_params`. None is as if nothing was given.

        Raises:
            ValueError: An unknown name or a value out of range.
        """
        given = {
            name: value
            for name, value in (values or {}).items()
            if value is not None or name == "max_tokens"  # whose None means no limit
        }
        unknown = sorted(set(given) - set(cls.__dataclass_fields__))
        if unknown:
            raise ValueError(
                f"sampling parameter {unknown[0]!r} is not known; there are "
                f"{', '.join(cls.__dataclass_fields__)}"
            )
        for name in ("stop_token_ids", "allowed_token_ids"):
            if given.get(name) is not None:
                given[name] = tuple(int(v) for v in given[name])
        params = cls(**given)
        params._check()
        return params

    def _check(self) -> None:
        rules: tuple[tuple[bool, str, Any, str], ...] = (
            (self.temperature >= 0.0, "temperature", self.temperature, "at least 0"),
            (0.0 < self.top_p <= 1.0, "top_p", self.top_p, "in (0, 1]"),
            (self.top_k >= -1, "top_k", self.top_k, "-1, 0 (off) or positive"),
            (self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "above 0"),
            (
                self.max_tokens is None or self.max_tokens >= 1,
                "max_tokens",
                self.max_tokens,
                "at least 1",
            ),
            (self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0"),
            (self.n >= 1, "n", self.n, "at least 1"),
            (
                self.logprobs is None or 0 <= self.logprobs <= 64,
                "logprobs",
                self.logprobs,
                "None or between 0 and 64",
            ),
            (
                self.allowed_token_ids is None or len(self.allowed_token_ids) > 0,
                "allowed_token_ids",
                self.allowed_token_ids,
                "None or not empty",
            ),
        )
        for holds, name, value, wanted in rules:
            if not holds:
                raise ValueError(f"sampling parameter {name} must be {wanted}, found {value}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < _GREEDY_BELOW


class Uniforms:
    """Random numbers by (row, position), from one seed a row.

    A row's numbers do not depend on which rows share its batch or when those end, so a request
    with a seed gives the same samples however it is batched.
    """

    _BLOCK = 64

    def __init__(self, seeds: Sequence[int]) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._block = torch.empty(len(seeds), 0, dtype=torch.float64)
        self._begin = 0

    def at(self, position: int, rows: torch.Tensor) -> torch.Tensor:
        """One number in [0, 1) for each of `rows`; positions must not decrease."""
        if position - self._begin >= self._block.shape[1]:
            self._begin = position
            self._block = torch.stack(
                [
                    torch.rand(self._BLOCK, generator=generator, dtype=torch.float64)
                    for generator in self._generators
                ]
            )
        return self._block[rows, position - self._begin]


class TokenChooser:
    """Chooses the next token of each row by one set of parameters.

    Args:
        params: The parameters.
        vocab_size: Width of the logits.
        prompts: The rows' prompts, for the repetition penalty.
        device: Where the logits are.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompts: Sequence[Sequence[int]],
        device: torch.device,
    ) -> None:
        self._params = params
        self._blocked: torch.Tensor | None = None
        if params.allowed_token_ids is not None:
            self._blocked = torch.ones(vocab_size, dtype=torch.bool, device=device)
            self._blocked[list(params.allowed_token_ids)] = False
        self._seen: torch.Tensor | None = None
        if params.repetition_penalty != 1.0:
            self._seen = torch.zeros(len(prompts), vocab_size, dtype=torch.bool, device=device)
            for row, prompt in enumerate(prompts):
                self._seen[row, list(prompt)] = True

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all rows but these."""
        if self._seen is not None:
            self._seen = self._seen[rows]

    def choose(
        self, logits: torch.Tensor, uniforms: torch.Tensor, forbidden: Iterable[int] = ()
    ) -> torch.Tensor:
        """Pick one token a row.

        Args:
            logits: `[rows, V]` float32; left as they are.
            uniforms: `[rows]`, numbers in [0, 1).
            forbidden: Ids that may not be chosen now (end ids before `min_tokens`).

        Returns:
            `[rows]` int64.
        """
        scores = logits
        if self._seen is not None:
            penalty = self._params.repetition_penalty
            punished = torch.where(scores > 0, scores / penalty, scores * penalty)
            scores = torch.where(self._seen, punished, scores)
        if self._blocked is not None:
            scores = scores.masked_fill(self._blocked, float("-inf"))
        blocked = list(forbidden)
        if blocked:
            scores = scores.clone()
            scores[:, blocked] = float("-inf")
        if self._params.greedy:
            chosen = scores.argmax(-1)
        else:
            chosen = self._draw(scores / self._params.temperature, uniforms.to(scores.device))
        if self._seen is not None:
            self._seen.scatter_(1, chosen[:, None], True)
        return chosen

    def _draw(self, scores: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        top_k, top_p = self._params.top_k, self._params.top_p
        if 0 < top_k < scores.shape[-1]:
            least = scores.topk(top_k, dim=-1).values[:, -1:]
            scores = scores.masked_fill(scores < least, float("-inf"))
        probs = torch.softmax(scores, dim=-1)
        if top_p < 1.0:
            ordered, order = probs.sort(dim=-1, descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered
            ordered = ordered.masked_fill(before >= top_p, 0.0)
            probs = torch.zeros_like(probs).scatter(-1, order, ordered)
        # Inverse of the cumulative distribution in double precision: the first token whose
        # cumulated weight exceeds u, which has a weight of its own above 0.
        cumulated = probs.double().cumsum(-1)
        level = uniforms[:, None] * cumulated[:, -1:]
        return torch.searchsorted(cumulated, level, right=True)[:, 0].clamp(
            max=scores.shape[-1] - 1
        )


def report_logprobs(logits: torch.Tensor, chosen: torch.Tensor, count: int) -> list[dict[int, Any]]:
    """For each row `{token_id: {"logprob", "rank"}}` of the chosen and the `count` likeliest."""
    log_probs = torch.log_softmax(logits, dim=-1)
    own = log_probs.gather(-1, chosen[:, None])
    ranks = ((log_probs > own).sum(-1) + 1).tolist()
    rows: list[dict[int, Any]] = [
        {token: {"logprob": value, "rank": rank}}
        for token, value, rank in zip(chosen.tolist(), own[:, 0].tolist(), ranks, strict=True)
    ]
    if count:
        best = log_probs.topk(min(count, logits.shape[-1]), dim=-1)
        for row, values, tokens in zip(
            rows, best.values.tolist(), best.indices.tolist(), strict=True
        ):
            for rank, (value, token) in enumerate(zip(values, tokens, strict=True), start=1):
                row.setdefault(token, {"logprob": value, "rank": rank})
    return rows
