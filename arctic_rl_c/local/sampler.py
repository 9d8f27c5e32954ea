# SPDX-License-Identifier: Apache-2.0
"""The sampler role: generation, sleep and wake, and the receiving side of a sync.

Plain synchronous Python, without knowledge of how its ops reach it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from arctic_rl_c.local.generation import Decoder, Sample
from arctic_rl_c.local.model import (
    build_model,
    describe_model,
    eos_token_ids,
    load_tokenizer,
    weights_digest,
)
from arctic_rl_c.local.options import ModelOptions, SamplerOptions
from arctic_rl_c.local.prefix_cache import PrefixCache
from arctic_rl_c.local.residency import Residency
from arctic_rl_c.local.routing import as_prompts
from arctic_rl_c.local.sampling import SamplingParams
from arctic_rl_c.local.weights import WeightSink

_DUMMY_SEED = 0x5EED


class Sampler:
    """A causal LM that generates.

    Args:
        model: Which model, and where.
        options: Limits and the starting weights.
    """

    #: The ops that a server may call by name.
    OPS = frozenset(
        {
            "generate",
            "sleep",
            "wake",
            "reset_prefix_cache",
            "pull_weights",
            "mark_torn",
            "weights_digest",
            "describe",
        }
    )

    #: The ops among them that may be broken off while they wait.
    INTERRUPTIBLE = frozenset({"pull_weights"})

    def __init__(self, model: ModelOptions, options: SamplerOptions) -> None:
        if model.threads is not None:
            torch.set_num_threads(model.threads)
        if options.load_format not in ("auto", "dummy"):
            raise ValueError(f"load_format {options.load_format!r} is not one of auto, dummy")
        self._options = options
        dummy = options.load_format == "dummy"
        self._model = build_model(model, seed=model.seed + _DUMMY_SEED if dummy else None)
        self._tokenizer = load_tokenizer(model)
        self._cache = PrefixCache(options.prefix_cache_tokens)
        self._decoder = Decoder(
            self._model, eos_token_ids(self._model, self._tokenizer), self._cache
        )
        limit = int(self._model.config.max_position_embeddings)
        self._max_len = limit if options.max_model_len is None else options.max_model_len
        if self._max_len > limit:
            raise ValueError(f"max_model_len {self._max_len} exceeds the model's own {limit}")
        self._seeds = torch.Generator().manual_seed(options.seed)
        self._sink = WeightSink(self._model)
        self._residency = Residency(
            self._model,
            "the engine started with dummy weights" if dummy else None,
        )

    # -- generation --------------------------------------------------------------------------

    def generate(
        self,
        prompts: str | Sequence[Any],
        sampling_params: Mapping[str, Any] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """Generate responses.

        Args:
            prompts: One prompt or a list of them, each a text or a list of token ids. Ids are
                used as they are.
            sampling_params: See `SamplingParams`.
            numbers: Each prompt's place in the request that these are a share of. With a `seed`
                a prompt's samples depend on its place, and not on who makes them.

        Returns:
            `{"results": [...]}` with one dict a prompt: `text, token_ids, finish_reason,
            prompt_len, generation_len, prefix_cache_len, prompt_token_ids,
            weight_version_start, weight_version_end`, and `logprobs` when asked for. With
            `n > 1` it is the first sample, and `samples` holds all of them.

        Raises:
            RuntimeError: The model is asleep, wholly or in part.
            TornWeightsError: The weights are a mixture, or none were ever synced.
            ValueError: A prompt is empty, too long or holds an id outside the vocabulary; or a
                sampling parameter is wrong.
        """
        self._residency.require_ready()
        self._sink.check()
        params = SamplingParams.from_mapping(sampling_params)
        listed = as_prompts(prompts)
        places = range(len(listed)) if numbers is None else numbers
        requests = [self._prompt_ids(i, p) for i, p in zip(places, listed, strict=True)]
        base = params.seed
        if base is None:
            base = int(torch.randint(0, 1 << 62, (1,), generator=self._seeds))
        samples = []
        for number, ids in zip(places, requests, strict=True):
            room = self._max_len - len(ids)
            limit = room if params.max_tokens is None else min(room, params.max_tokens)
            for draw in range(params.n):
                samples.append(Sample(ids, limit, _mix(base, number, draw)))
        version = self._sink.version
        for begin in range(0, len(samples), self._options.max_num_seqs):
            self._decoder.run(samples[begin : begin + self._options.max_num_seqs], params)
        results = [self._result(s, version, params) for s in samples]
        if params.n == 1:
            return {"results": results}
        groups = [results[i : i + params.n] for i in range(0, len(results), params.n)]
        return {"results": [{**group[0], "samples": group} for group in groups]}

    def _prompt_ids(self, number: int, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            ids = list(self._tokenizer(prompt)["input_ids"])
        else:
            ids = [int(token) for token in prompt]
        if not ids:
            raise ValueError(f"prompt {number} is empty")
        if len(ids) >= self._max_len:
            raise ValueError(
                f"prompt {number} has {len(ids)} tokens and the model's limit is "
                f"{self._max_len}: there is no room for a response"
            )
        vocab = int(self._model.config.vocab_size)
        for token in ids:
            if not 0 <= token < vocab:
                raise ValueError(
                    f"prompt {number} holds the id {token}, the vocabulary ends at {vocab}"
                )
        return ids

    def _result(self, sample: Sample, version: int, params: SamplingParams) -> dict[str, Any]:
        known = len(self._tokenizer)
        result: dict[str, Any] = {
            "text": self._tokenizer.decode(
                [t for t in sample.token_ids if t < known], skip_special_tokens=True
            ),
            "token_ids": sample.token_ids,
            "finish_reason": sample.finish_reason,
            "prompt_len": len(sample.prompt),
            "generation_len": len(sample.token_ids),
            "prefix_cache_len": sample.cached,
            "prompt_token_ids": list(sample.prompt),
            "weight_version_start": version,
            "weight_version_end": self._sink.version,
        }
        # A model's rows may outnumber the tokenizer's ids: say so, a decoder would drop them.
        unknown = [i for i, token in enumerate(sample.token_ids) if token >= known]
        if unknown:
            result["unknown_token_positions"] = unknown
        if params.logprobs is not None:
            result["logprobs"] = sample.logprobs
        return result

    def reset_prefix_cache(self) -> dict[str, Any]:
        """Forget all prompts' states."""
        return {"status": "ok", "entries": self._cache.reset()}

    # -- sleep and wake ----------------------------------------------------------------------

    def sleep(self, level: int = 1) -> dict[str, Any]:
        """Give memory back.

        Args:
            level: 1 drops cached states and moves the weights of a GPU to host memory (those
                on a CPU stay where they are); 2 drops the weights as well, and after waking
                the model generates only when a weight sync has succeeded.

        Returns:
            `{"status": "sleeping" | "already_sleeping", "level", "workers"}`.
        """
        result = self._residency.sleep(level)
        self._cache.reset()
        return result

    def wake(self, tags: Sequence[str] | None = None) -> dict[str, Any]:
        """Take memory again.

        Args:
            tags: Any of `weights`, `kv_cache`; None wakes both.

        Returns:
            `{"status", "workers"}` with `ready`, `already_ready`, `weights_ready` or
            `already_weights_ready`.

        Raises:
            RuntimeError: `kv_cache` alone while the weights are asleep.
        """
        return self._residency.wake(tags)

    # -- weights -----------------------------------------------------------------------------

    def pull_weights(self, offer: bytes, *, timeout: float) -> dict[str, Any]:
        """Copy a sender's weights into the model, in place.

        Returns:
            The receiver's statistics, with `version`.

        Raises:
            RuntimeError: The weights are asleep.
            WeightSyncError: As `WeightReceiver.pull`.
        """
        if not self._residency.weights_awake:
            raise RuntimeError("weights are asleep; wake_inference(tags=['weights']) first")
        # States of the old weights are worthless from the first byte on.
        self._cache.reset()
        stats = self._sink.pull(offer, timeout=timeout)
        self._residency.mark_whole()
        return stats

    def mark_torn(self, reason: str) -> dict[str, Any]:
        """Refuse to generate until the next full pull."""
        self._residency.mark_lost(reason)
        return {"status": "ok"}

    def weights_digest(self) -> dict[str, Any]:
        """SHA-256 over all weights."""
        return {"digest": weights_digest(self._model), "version": self._sink.version}

    # -- reports -----------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Facts about the model."""
        return {
            **describe_model(self._model),
            "max_model_len": self._max_len,
            "tokenizer_size": len(self._tokenizer),
            "threads": torch.get_num_threads(),
            "weight_version": self._sink.version,
        }

    def close(self) -> None:
        """End what is open. Idempotent."""
        self._sink.close()


def _mix(seed: int, number: int, draw: int) -> int:
    """A seed for one sample: equal inputs give equal seeds in every process."""
    digest = hashlib.blake2b(f"{seed}/{number}/{draw}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
