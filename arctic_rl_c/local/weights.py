# SPDX-License-Identifier: Apache-2.0
"""The two ends of a weight sync, as the embedded trainer and sampler use them."""

from __future__ import annotations

from typing import Any

from arctic_rl_c import WeightReceiver, WeightSender


def _on_gpu(model: Any) -> bool:
    """Whether what a sync maps is worth keeping for the next one.

    On a GPU that is most of a sync's time. A kept file of shared memory would outlive a process
    that is killed, until the next sender on the machine sweeps it away.
    """
    return bool(next(model.parameters()).is_cuda)


class WeightSource:
    """The trainer's end: one offer at a time over all named parameters.

    Args:
        model: The model under training.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._sender: WeightSender | None = None
        self._built_with: tuple[Any, ...] = ()
        self._version = 0

    @property
    def version(self) -> int:
        """Version of the last offer; 0 before the first."""
        return self._version

    def offer(
        self,
        *,
        cuda_ipc: bool,
        low_memory: bool,
        transport: str | None,
        colocated: bool | None,
        timeout: float,
        receivers: int = 1,
    ) -> bytes:
        """Offer the parameters as they are now; see `WeightSender`."""
        wanted = (cuda_ipc, low_memory, transport, colocated, receivers)
        if self._sender is None or self._built_with != wanted:
            self.close()
            self._sender = WeightSender(
                self._model.named_parameters(),
                cuda_ipc=cuda_ipc,
                low_memory=low_memory,
                transport=transport,
                colocated=colocated,
                receivers=receivers,
                keep_mapped=_on_gpu(self._model),
            )
            self._built_with = wanted
        data = self._sender.offer(version=self._version + 1, timeout=timeout)
        self._version += 1
        return data

    def serve(self, *, timeout: float) -> dict[str, Any]:
        """Serve the open offer until the receiver has finished."""
        if self._sender is None:
            raise RuntimeError("serve_weights without an offer")
        return self._sender.serve(timeout=timeout).as_dict()

    def release(self) -> None:
        """End the open offer, if there is one."""
        if self._sender is not None:
            self._sender.release()

    def close(self) -> None:
        """End the offer and let go of the parameters. Idempotent."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()


class WeightSink:
    """The sampler's end: writes into the model's parameters in place.

    Args:
        model: The model that generates.
    """

    def __init__(self, model: Any) -> None:
        self._lines: list[str] = []
        self._receiver = WeightReceiver(
            model.named_parameters(), keep_mapped=_on_gpu(model), log=self._lines.append
        )

    @property
    def version(self) -> int:
        """Version of the last full pull; 0 before the first."""
        return self._receiver.version or 0

    def pull(self, offer: bytes, *, timeout: float) -> dict[str, Any]:
        """Copy the offered weights; the statistics, and the line that told of the names.

        The receiver writes that line when it has compared the names: at its first pull, and
        when something about them has changed.
        """
        stats = self._receiver.pull(offer, timeout=timeout).as_dict()
        return {**stats, "names_line": self._lines[-1] if self._lines else None}

    def check(self) -> None:
        """Raise TornWeightsError when the last pull broke off in the middle."""
        self._receiver.check()

    def close(self) -> None:
        """Let go of the parameters. Idempotent."""
        self._receiver.close()
