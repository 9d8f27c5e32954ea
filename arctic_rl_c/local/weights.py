# SPDX-License-Identifier: Apache-2.0
"""The two ends of a weight sync, as the embedded trainer and sampler use them."""

from __future__ import annotations

from typing import Any

from arctic_rl_c import TornWeightsError


class WeightSource:
    """The trainer's end: one offer at a time over all named parameters."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._sender: Any = None

    def offer(self, *, version: int, cuda_ipc: bool, low_memory: bool, timeout: float) -> bytes:
        """Open an offer, ending the one before."""
        raise NotImplementedError

    def serve(self, *, timeout: float) -> dict[str, Any]:
        """Serve the open offer until the receiver has finished."""
        raise NotImplementedError

    def release(self) -> None:
        """End the open offer. Idempotent."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.release()


class WeightSink:
    """The sampler's end: writes into the model's parameters in place."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._receiver: Any = None
        self._version = 0

    @property
    def version(self) -> int:
        """Version of the last full pull; 0 before the first."""
        return self._version

    def pull(self, offer: bytes, *, timeout: float) -> dict[str, Any]:
        """Copy the offered weights."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise TornWeightsError when the last pull broke off in the middle."""
        if self._receiver is not None:
            self._receiver.check()

    def rebind(self) -> str | None:
        """Let go of the parameters' memory; the reason when the weights are torn."""
        torn = None
        try:
            self.check()
        except TornWeightsError as error:
            torn = str(error)
        self.close()
        return torn

    def close(self) -> None:
        """Let go of the parameters' memory. Idempotent."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()
