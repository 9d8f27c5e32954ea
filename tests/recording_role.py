# SPDX-License-Identifier: Apache-2.0
"""Roles for any transport of the embedded server that record what arrives; no language model.

They answer as the recorded fake server did, and `describe` hands over what came since the last
one, pickled, so that the transport has no part in how it comes back.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np

import clients


class RecordingTrainer:
    OPS = frozenset(
        {"forward", "forward_backward", "step", "offer_weights", "serve_weights"}
        | {"release_weights", "weights_digest", "describe", "save_checkpoint", "load_checkpoint"}
    )
    INTERRUPTIBLE: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self._backend = clients.Transport()

    def forward(self, payload: Any, reference_model: bool) -> Any:
        return clients.drive(self._backend.fwd_no_grad(payload, reference_model=reference_model))

    def forward_backward(self, payload: Any) -> Any:
        return clients.drive(self._backend.fwd_bwd(payload))

    def step(self) -> Any:
        return clients.drive(self._backend.step())

    def save_checkpoint(self, **keywords: Any) -> Any:
        return clients.drive(self._backend.save_checkpoint(**keywords))

    def load_checkpoint(self, **keywords: Any) -> Any:
        return clients.drive(self._backend.load_checkpoint(**keywords))

    def offer_weights(self, **flags: Any) -> Any:
        self._record("offer_weights", flags)
        return {"offer": b"an offer", "version": 1}

    def serve_weights(self, timeout: float) -> Any:
        return {}

    def release_weights(self) -> Any:
        return {}

    def weights_digest(self) -> Any:
        return {"digest": "of the weights"}

    def describe(self) -> Any:
        calls, self._backend = self._backend.calls, clients.Transport()
        return {"calls": np.frombuffer(pickle.dumps(calls), dtype=np.uint8)}

    def close(self) -> None:
        """Nothing to give back."""

    def _record(self, op: str, keywords: Mapping[str, Any]) -> None:
        clients.drive(self._backend.called(op, **keywords))


class RecordingSampler(RecordingTrainer):
    OPS = frozenset(
        {"generate", "sleep", "wake", "reset_prefix_cache", "pull_weights", "weights_digest"}
        | {"describe"}
    )

    def generate(self, **keywords: Any) -> Any:
        return {"results": clients.drive(self._backend.generate(**keywords))}

    def sleep(self, level: int) -> Any:
        return clients.drive(self._backend.sleep_inference(level))

    def wake(self, tags: Any = None) -> Any:
        return clients.drive(self._backend.wake_inference(tags))

    def reset_prefix_cache(self) -> Any:
        return clients.drive(self._backend.reset_prefix_cache())

    def pull_weights(self, offer: Any, timeout: float) -> Any:
        self._record("pull_weights", {"offer": offer})
        return {}


def build(role: str, options: Mapping[str, Any]) -> Any:
    """The factory that tests name."""
    return RecordingTrainer() if role == "trainer" else RecordingSampler()


async def calls_of(transport: Any) -> dict[str, list[Any]]:
    """What has reached each role since this was last asked."""
    described = await transport.describe()
    return {
        role: pickle.loads(np.asarray(facts["calls"]).tobytes())
        for role, facts in described.items()
    }
