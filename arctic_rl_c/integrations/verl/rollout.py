# SPDX-License-Identifier: Apache-2.0
"""The rollout replica, and the actor that verl's agent loops send their prompts to."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from verl.workers.rollout.replica import RolloutMode, RolloutReplica, TokenOutput

# Registers in this process, which may not have inherited the variable that tells verl to.
import arctic_rl_c.integrations.verl  # noqa: F401
from arctic_rl_c import PeerLostError
from arctic_rl_c.integrations.verl.backend import ArcticBackend
from arctic_rl_c.integrations.verl.batching import Batcher

_CONCURRENCY = 4096


class ArcticServer:
    """Token ids in, token ids out, through the backend. It runs as a Ray actor.

    Args:
        config: The rollout's configuration.
        rollout_mode: verl's `RolloutMode`.
        main_config: verl's whole configuration.
        backend_handle: `reconnect_handle()` of the driver's backend.
        max_position_embeddings: The model's own limit.
        replica_rank, node_rank: Where this is; only node 0 acts.

    Raises:
        ValueError: `rollout.max_model_len` exceeds the model's limit.
    """

    def __init__(
        self,
        config: Any,
        rollout_mode: Any,
        main_config: Any,
        backend_handle: Mapping[str, Any],
        max_position_embeddings: int,
        replica_rank: int = 0,
        node_rank: int = 0,
    ) -> None:
        self.config, self.rollout_mode = config, rollout_mode
        self.replica_rank, self.node_rank = replica_rank, node_rank
        wanted = config.get("max_model_len")
        if wanted is not None and wanted > max_position_embeddings:
            raise ValueError(
                f"rollout.max_model_len is {wanted} and the model's own limit "
                f"{max_position_embeddings}"
            )
        self.max_model_len = int(wanted or max_position_embeddings)
        #: verl's step, where the trainer tells it; None before.
        self.global_steps: int | None = None
        self._backend = ArcticBackend.from_config(main_config, handle=backend_handle)
        # Only a server with a scheduler of its own gains from single requests.
        own_scheduler = getattr(self._backend.transport, "server_limits", True)
        self._batcher = Batcher(self._backend.generate, together=not own_scheduler)
        self._paused = False
        # Since the last sleep.
        self._served = 0
        self._failure: Exception | None = None

    async def generate(
        self,
        prompt_ids: Any,
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        priority: int = 0,
        **other: Any,
    ) -> TokenOutput:
        """One response.

        Args:
            prompt_ids: Token ids; used untouched where the server takes ids.
            sampling_params: As verl's agent loops give them; not changed. `max_tokens`, or
                `max_new_tokens`, limits the response; else what the configuration leaves beside
                this prompt. `logprobs` true asks for the log-prob of each token.
            request_id: A name for `abort`.
            image_data: Not supported: an error when given.
            video_data: Likewise.
            priority: Ignored: requests are served in order.
            other: Not supported: an error when given.

        Raises:
            ValueError: The prompt exceeds the model's length, or holds more than text.
        """
        extra = {"image_data": image_data, "video_data": video_data, **other}
        given = sorted(name for name, value in extra.items() if value)
        if given:
            raise ValueError(f"{given[0]}: the Arctic rollout takes token ids only")
        prompt = [int(token) for token in prompt_ids]
        params, budget = sampling_request(self.config, self.max_model_len, prompt, sampling_params)
        want = params.get("logprobs") is not None
        if self._paused:
            return self._output([], [] if want else None, "aborted", {})
        if budget == 0:
            return self._output([], [] if want else None, "completed", {})
        try:
            item = await self._batcher.submit(request_id, prompt, params)
        except Exception as error:
            self._failure = error
            raise
        self._served += 1
        if item is None:
            return self._output([], [] if want else None, "aborted", {})
        tokens = [int(token) for token in item["token_ids"]]
        log_probs = chosen_log_probs(item, tokens) if want else None
        return self._output(tokens, log_probs, stop_reason(item.get("finish_reason")), item)

    def _output(
        self,
        tokens: list[int],
        log_probs: list[float] | None,
        reason: str | None,
        item: Mapping[str, Any],
    ) -> TokenOutput:
        return TokenOutput(
            token_ids=tokens,
            log_probs=log_probs,
            stop_reason=reason,
            extra_fields={
                "global_steps": self.global_steps,
                "weight_version": item.get("weight_version_end"),
            },
        )

    # -- sleep and wake ------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Give the sampler's memory back, before the trainer needs it.

        verl's V1 trainer logs errors of single requests and goes on with what it got. Here, once
        all are done, it hears of those that leave it nothing to go on with.

        Raises:
            Exception: Of the requests since the last call all failed, or the server was lost.
        """
        failure, served = self._failure, self._served
        self._failure, self._served = None, 0
        if failure is not None and (served == 0 or isinstance(failure, PeerLostError)):
            raise failure
        if self._acts() and self.rollout_mode != RolloutMode.STANDALONE:
            await self._backend.sleep_inference(1)

    async def wake_up(self) -> None:
        """Take it again, with the weights as they are. A weight sync does this by itself."""
        if self._acts() and self.rollout_mode != RolloutMode.STANDALONE:
            await self._backend.wake_up_inference(["weights", "kv_cache"])
            await self._backend.reset_prefix_cache()

    async def release_kv_cache(self) -> None:
        """Do nothing: a sync of the Arctic server arranges its memory by itself."""

    async def resume_kv_cache(self) -> None:
        """Wake what a sync outside this server's control left asleep."""
        if self._acts():
            await self._backend.wake_up_inference(["kv_cache"])

    async def clear_kv_cache(self) -> None:
        """Forget the states of earlier prompts."""
        if self.node_rank == 0:
            await self._backend.reset_prefix_cache()

    def _acts(self) -> bool:
        return self.node_rank == 0 and bool(self.config.get("free_cache_engine", True))

    # -- requests ------------------------------------------------------------------------------

    async def abort_request(self, request_id: str, **_: Any) -> dict[str, Any]:
        """End one request; it gives what an aborted request gives."""
        return {"aborted": self._batcher.abort(request_id), "request_id": request_id}

    async def abort_all_requests(self, **_: Any) -> dict[str, Any]:
        """End all requests, and those that come, until `resume_generation`."""
        self._paused = True
        names = self._batcher.abort_all()
        return {"aborted_count": len(names), "request_ids": names}

    async def resume_generation(self) -> None:
        """Serve requests again after `abort_all_requests`."""
        self._paused = False

    async def set_global_steps(self, global_steps: int) -> None:
        """Note the step whose weights are in use from now on."""
        self.global_steps = int(global_steps)

    async def start_profile(self, **_: Any) -> None:
        """Do nothing: the sampler is in another process."""

    async def stop_profile(self) -> None:
        """Do nothing: the sampler is in another process."""


class ArcticReplica(RolloutReplica):  # type: ignore[misc]  # verl has no types
    """One rollout replica: an `ArcticServer` in front of the server's own sampler.

    Args:
        replica_rank, config, model_config, gpus_per_node: As `RolloutReplica`.
        main_config, backend_handle: From the trainer; required.

    Raises:
        KeyError: One of the latter two is missing.
    """

    def __init__(
        self,
        replica_rank: int,
        config: Any,
        model_config: Any,
        gpus_per_node: int = 1,
        is_reward_model: bool = False,
        **kwargs: Any,
    ) -> None:
        for name in ("main_config", "backend_handle"):
            if name not in kwargs:
                raise KeyError(
                    f"{name}: this replica is for verl's remote-backend trainer, which passes it; "
                    "set trainer.remote_backend too"
                )
        self._main_config = kwargs.pop("main_config")
        self._backend_handle = kwargs.pop("backend_handle")
        known = inspect.signature(RolloutReplica.__init__).parameters
        super().__init__(
            replica_rank,
            config,
            model_config,
            gpus_per_node,
            is_reward_model,
            **{key: value for key, value in kwargs.items() if key in known},
        )

    def rollout_worker_use_gpu(self) -> bool:
        """False: the sampler has its GPUs already."""
        return False

    async def launch_servers(self) -> None:
        """Start the actor that takes prompts."""
        import ray

        server = ray.remote(ArcticServer)
        handle = server.options(num_cpus=0, max_concurrency=_CONCURRENCY).remote(
            config=self.config,
            rollout_mode=self.rollout_mode,
            main_config=self._main_config,
            backend_handle=self._backend_handle,
            max_position_embeddings=position_limit(self.model_config),
            replica_rank=self.replica_rank,
        )
        self.servers = [handle]
        self._server_handle = handle

    async def abort_request(self, request_id: str) -> dict[str, Any]:
        """End one request."""
        found: dict[str, Any] = await self._server_handle.abort_request.remote(request_id)
        return found

    async def set_global_steps(self, global_steps: int) -> None:
        """Tell the server which step's weights are in use."""
        await self._server_handle.set_global_steps.remote(global_steps)


def sampling_request(
    config: Any, max_model_len: int, prompt: list[int], given: Mapping[str, Any]
) -> tuple[dict[str, Any], int]:
    """Sampling parameters for the server, and how many tokens they allow.

    Args:
        config: The rollout's configuration.
        max_model_len: Prompt and response together.
        prompt: Token ids.
        given: What the caller asked for; not changed.

    Raises:
        ValueError: The prompt alone is longer than that.
    """
    room = max_model_len - len(prompt)
    if room < 0:
        raise ValueError(
            f"Prompt length ({len(prompt)}) exceeds the model's maximum context length "
            f"({max_model_len})."
        )
    params = dict(given)
    limits = [params.pop(key, None) for key in ("max_tokens", "max_new_tokens")]
    limit = next((limit for limit in limits if limit is not None), None)
    if limit is None:
        limit = config.get("response_length") + config.get("prompt_length") - len(prompt)
    budget = max(0, min(int(limit), room))
    # 0 asks for the chosen token's log-prob alone.
    params["logprobs"] = 0 if params.pop("logprobs", False) else None
    if params["logprobs"] is None:
        del params["logprobs"]
    params.setdefault("repetition_penalty", config.get("repetition_penalty", 1.0))
    params["max_tokens"] = budget
    return params, budget


def chosen_log_probs(item: Mapping[str, Any], tokens: list[int]) -> list[float]:
    """The log-prob of each token of a result.

    Raises:
        RuntimeError: The server gave none.
    """
    listed = item.get("logprobs")
    if listed is None or len(listed) != len(tokens):
        raise RuntimeError(
            "log-probs were asked for (rollout.calculate_log_probs) and the server gave "
            f"{0 if listed is None else len(listed)} for {len(tokens)} tokens"
        )
    values = []
    for token, entry in zip(tokens, listed, strict=True):
        found = entry.get(token, entry.get(str(token)))  # JSON has no integer keys
        values.append(float(found["logprob"] if isinstance(found, Mapping) else found))
    return values


def stop_reason(finish_reason: str | None) -> str | None:
    """The word that verl has for an engine's."""
    if finish_reason == "abort":
        return "aborted"
    return "completed" if finish_reason in ("stop", "length") else finish_reason


def position_limit(model_config: Any) -> int:
    """The longest sequence that the model was made for."""
    hf_config = getattr(model_config, "hf_config", None)
    if hf_config is None:
        from transformers import AutoConfig

        hf_config = AutoConfig.from_pretrained(
            model_config["path"] if isinstance(model_config, Mapping) else model_config.path,
            trust_remote_code=bool(model_config.get("trust_remote_code", False)),
        )
    text = getattr(hf_config, "text_config", None) or hf_config
    return int(text.max_position_embeddings)
