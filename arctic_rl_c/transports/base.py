# SPDX-License-Identifier: Apache-2.0
"""What a transport is: how the client's ops reach a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Transport(Protocol):
    """Ops of an Arctic server as coroutines, named as in the Arctic client.

    `ArcticRLClient` knows nothing else about a transport. `docs/transports.md` says what each
    op must do; `arctic_rl_c.transports.local` is the shortest complete example.
    """

    #: Short name for messages.
    name: str
    #: `generate` takes prompts as lists of token ids, and uses them untouched.
    accepts_token_ids: bool
    #: `generate` takes `routing_key=`.
    accepts_routing_key: bool
    #: `generate` takes `strict=`.
    accepts_strict: bool

    async def fwd_no_grad(
        self, payload: Mapping[str, Any], reference_model: bool = False
    ) -> dict[str, Any]:
        """Log-probs of a payload: `{"batch": {"logprobs", "entropy"?}, "metrics"}`."""
        ...

    async def fwd_bwd(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Add the gradients of a payload's loss: `{"metrics", ...}`."""
        ...

    async def step(self) -> dict[str, Any]:
        """One optimizer step: `{"metrics": {"last_lr", "grad_norm"?}}`."""
        ...

    async def generate(
        self,
        prompts: Sequence[Any],
        sampling_params: Mapping[str, Any] | None = None,
        routing_key: str | Sequence[str | None] | None = None,
        strict: bool = False,
    ) -> list[dict[str, Any]]:
        """One result item a prompt."""
        ...

    async def sync_weights(
        self, cuda_ipc: bool | None = None, low_memory: bool | None = None
    ) -> dict[str, Any]:
        """Bring the trainer's weights to the sampler. None means the stored flag."""
        ...

    async def save_checkpoint(self, **kwargs: Any) -> dict[str, Any]:
        """Write a checkpoint: `{"path", "hf_path", "global_step"}`."""
        ...

    async def load_checkpoint(self, **kwargs: Any) -> dict[str, Any]:
        """Resume from a checkpoint: `{"path", "global_step"}`; step 0 when there is none."""
        ...

    async def sleep_inference(self, level: int = 1) -> dict[str, Any]:
        """Give the sampler's memory back."""
        ...

    async def wake_inference(self, tags: Sequence[str] | None = None) -> dict[str, Any]:
        """Take the sampler's memory again."""
        ...

    async def reset_prefix_cache(self) -> dict[str, Any]:
        """Forget the states of earlier prompts."""
        ...

    async def shutdown(self) -> None:
        """End what this transport owns. Idempotent."""
        ...

    def reconnect_handle(self) -> dict[str, Any]:
        """Picklable data from which another process can attach, where that is possible."""
        ...
