# SPDX-License-Identifier: Apache-2.0
"""Which of the sampler's memory is in use: its sleep and wake states, and lost weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from arctic_rl_c import TornWeightsError

TAGS = ("weights", "kv_cache")


class Residency:
    """The sleep and wake states of one model.

    Args:
        model: The model whose weights sleep.
        lost: Why there are no usable weights at the start; None when there are.
    """

    def __init__(self, model: Any, lost: str | None) -> None:
        self._model, self._lost = model, lost
        self._awake = dict.fromkeys(TAGS, True)
        # What `wake` builds the weights from: tensors on the host, or shapes alone.
        self._parked: dict[str, torch.Tensor | torch.Size] = {}

    @property
    def weights_awake(self) -> bool:
        """Whether the weights have memory to be written to."""
        return self._awake["weights"]

    def require_ready(self) -> None:
        """Raise unless the model can generate.

        Raises:
            RuntimeError: A part is asleep.
            TornWeightsError: The weights are lost and no sync has brought them back.
        """
        asleep = [tag for tag in TAGS if not self._awake[tag]]
        if len(asleep) == len(TAGS):
            raise RuntimeError("Model is sleeping; call wake_inference first")
        if asleep:
            raise RuntimeError(
                f"Model is only partly awake, {asleep[0]} is not; call "
                f"wake_inference(tags={asleep!r}) first"
            )
        if self._lost is not None:
            raise TornWeightsError(
                f"there are no weights to generate with: {self._lost}, and no weight sync has "
                "succeeded since; call sync_weights"
            )

    def mark_lost(self, reason: str) -> None:
        """Refuse to generate until `mark_whole`."""
        self._lost = reason

    def mark_whole(self) -> None:
        """All weights were written."""
        self._lost = None

    def sleep(self, level: int) -> dict[str, Any]:
        """Park everything; level 1 keeps the weights' values, level 2 drops them."""
        if level not in (1, 2):
            raise ValueError(f"sleep level must be 1 or 2, found {level!r}")
        if not any(self._awake.values()):
            return {"status": "already_sleeping", "level": level, "workers": 1}
        if self._awake["weights"]:
            self._park(level)
        self._awake = dict.fromkeys(TAGS, False)
        return {"status": "sleeping", "level": level, "workers": 1}

    def _park(self, level: int) -> None:
        params = dict(self._model.named_parameters())
        on_gpu = next(iter(params.values())).is_cuda
        if level == 1 and not on_gpu:
            return  # host memory is where they would go
        for name, param in params.items():
            self._parked[name] = param.shape if level == 2 else param.detach().to("cpu")
            param.data = param.data.new_empty(0)
        if level == 2:
            self._lost = "sleep level 2 dropped the weights"
        if on_gpu:
            torch.cuda.empty_cache()

    def wake(self, tags: Sequence[str] | None) -> dict[str, Any]:
        """Give `tags` (None: all) their memory back; the weights come first."""
        wanted = set(TAGS if tags is None else tags)
        odd = sorted(wanted - set(TAGS))
        if odd or not wanted:
            raise ValueError(
                f"wake tags must be among {', '.join(TAGS)}, found {odd[0] if odd else 'none'!r}"
            )
        if all(self._awake.values()):
            return {"status": "already_ready", "workers": 1}
        if "weights" not in wanted and not self._awake["weights"]:
            raise RuntimeError("kv_cache cannot wake before weights; wake weights first")
        if wanted == {"weights"} and self._awake["weights"]:
            return {"status": "already_weights_ready", "workers": 1}
        if not self._awake["weights"]:
            self._unpark()
        self._awake = {tag: self._awake[tag] or tag in wanted for tag in TAGS}
        ready = all(self._awake.values())
        return {"status": "ready" if ready else "weights_ready", "workers": 1}

    def _unpark(self) -> None:
        for name, param in self._model.named_parameters():
            parked = self._parked.pop(name, None)
            if isinstance(parked, torch.Tensor):
                param.data = parked.to(param.device)
            elif parked is not None:
                param.data = param.data.new_empty(parked)
