# SPDX-License-Identifier: Apache-2.0
"""Batched decoding with a key-value cache: prefill once per distinct prompt, then row by row.

Rows are left-padded, so that all of them append at the same slot. Samples of one prompt share
its prefill. Rows that have ended leave the batch when they make up half of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from arctic_rl_c.local.prefix_cache import LayerStates, PrefixCache
from arctic_rl_c.local.sampling import SamplingParams, TokenChooser, Uniforms, report_logprobs


@dataclass
class Sample:
    """One response in the making.

    Attributes:
        prompt: Its prompt.
        limit: Most tokens it may have.
        seed: Seed of its random numbers.
        cached: Prompt tokens that the prefix cache spared.
        token_ids: The response so far.
        logprobs: Per position, when asked for.
        finish_reason: `stop` or `length` once it has ended.
    """

    prompt: Sequence[int]
    limit: int
    seed: int
    cached: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Any]] = field(default_factory=list)
    finish_reason: str | None = None


class Decoder:
    """Decodes samples with one model.

    Args:
        model: A transformers causal LM.
        stop_ids: Ids that end every response unless `ignore_eos` is set.
        cache: Where prompts' states are kept.
    """

    def __init__(self, model: Any, stop_ids: frozenset[int], cache: PrefixCache) -> None:
        self._model, self._stop_ids, self._prefixes = model, stop_ids, cache
        self._device = next(model.parameters()).device
        # transformers renamed the argument within its fifth major version.
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    @torch.inference_mode()
    def run(self, samples: Sequence[Sample], params: SamplingParams) -> None:
        """Complete the samples in place."""
        cache, mask, logits = self._prefill(samples)
        rows = torch.arange(len(samples))  # batch row -> number of its sample
        lengths = torch.tensor([len(s.prompt) for s in samples], device=self._device)
        uniforms = Uniforms([s.seed for s in samples])
        chooser = TokenChooser(params, logits.shape[-1], [s.prompt for s in samples], self._device)
        ends = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else self._stop_ids
        )
        position = 0
        while True:
            forbidden = ends if position < params.min_tokens else ()
            chosen = chooser.choose(logits, uniforms.at(position, rows), forbidden)
            self._record(samples, rows, logits, chosen, params, ends)
            alive = torch.tensor([samples[r].finish_reason is None for r in rows.tolist()])
            left = int(alive.sum())
            if left == 0:
                return
            if 2 * left <= len(rows):
                keep = alive.nonzero()[:, 0]
                rows = rows[keep]
                keep = keep.to(self._device)
                chooser.keep(keep)
                chosen, mask, lengths = chosen[keep], mask[keep], lengths[keep]
                for layer in cache.layers:
                    layer.keys, layer.values = layer.keys[keep], layer.values[keep]
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            logits = self._forward(chosen[:, None], mask, (lengths + position)[:, None], cache)
            position += 1

    def _record(
        self,
        samples: Sequence[Sample],
        rows: torch.Tensor,
        logits: torch.Tensor,
        chosen: torch.Tensor,
        params: SamplingParams,
        ends: frozenset[int],
    ) -> None:
        """Append the chosen tokens and see which samples end."""
        reports = None
        if params.logprobs is not None:
            reports = report_logprobs(logits, chosen, params.logprobs)
        for i, (row, token) in enumerate(zip(rows.tolist(), chosen.tolist(), strict=True)):
            sample = samples[row]
            if sample.finish_reason is not None:
                continue
            sample.token_ids.append(token)
            if reports is not None:
                sample.logprobs.append(reports[i])
            if token in ends:
                sample.finish_reason = "stop"
            elif len(sample.token_ids) >= sample.limit:
                sample.finish_reason = "length"

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        """Logits of the last slot, float32; the cache grows by the ids' slots."""
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_name: cache},
        )
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def _prefill(self, samples: Sequence[Sample]) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """States, mask `[rows, slots]` and next-token logits of all samples' prompts."""
        distinct: dict[tuple[int, ...], int] = {}
        for sample in samples:
            distinct.setdefault(tuple(sample.prompt), len(distinct))
        prompts = list(distinct)
        found = [self._prefixes.find(prompt) for prompt in prompts]
        past = [length for length, _ in found]
        cache, past_mask = self._stack_prefixes([states for _, states in found], past)
        rest = [prompt[length:] for prompt, length in zip(prompts, past, strict=True)]
        width = max(len(r) for r in rest)
        ids = torch.zeros(len(rest), width, dtype=torch.int64)
        real = torch.zeros(len(rest), width, dtype=torch.int64)
        for row, tail in enumerate(rest):
            ids[row, width - len(tail) :] = torch.tensor(tail)
            real[row, width - len(tail) :] = 1
        positions = (real.cumsum(1) - 1 + torch.tensor(past)[:, None]).clamp(min=0)
        mask = torch.cat([past_mask, real], dim=1).to(self._device)
        logits = self._forward(ids.to(self._device), mask, positions.to(self._device), cache)
        self._remember(prompts, past, cache, mask)
        rows = torch.tensor([distinct[tuple(s.prompt)] for s in samples], device=self._device)
        if len(prompts) != len(samples):
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys[rows], layer.values[rows]
            mask, logits = mask[rows], logits[rows]
        for sample, row in zip(samples, rows.tolist(), strict=True):
            sample.cached = past[row]
        return cache, mask, logits

    def _stack_prefixes(
        self, states: list[LayerStates], lengths: list[int]
    ) -> tuple[Any, torch.Tensor]:
        """A cache of left-padded prefixes, empty when no row has one, and its mask."""
        width = max(lengths)
        mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
        # Without the config every layer keeps all slots, also a model's sliding ones; the
        # masks alone bound those.
        cache = DynamicCache()
        if width:
            layers = next(len(s) for s in states if s)
            for number in range(layers):
                pair = [
                    _left_stack([s[number][side] if s else None for s in states], width)
                    for side in (0, 1)
                ]
                cache.update(pair[0], pair[1], number)
        return cache, mask.to(torch.int64)

    def _remember(
        self,
        prompts: list[tuple[int, ...]],
        past: list[int],
        cache: Any,
        mask: torch.Tensor,
    ) -> None:
        for row, prompt in enumerate(prompts):
            if past[row] >= len(prompt) - 1:
                continue  # known whole
            slots = mask[row].nonzero()[:, 0]
            self._prefixes.add(
                prompt,
                [
                    (layer.keys[row][:, slots], layer.values[row][:, slots])
                    for layer in cache.layers
                ],
            )


def _left_stack(parts: list[torch.Tensor | None], width: int) -> torch.Tensor:
    """Stack `[heads, tokens, channels]` parts at the right edge of `width` slots."""
    known = next(part for part in parts if part is not None)
    out = known.new_zeros(len(parts), known.shape[0], width, known.shape[2])
    for row, part in enumerate(parts):
        if part is not None and part.shape[1]:
            out[row, :, width - part.shape[1] :] = part
    return out
