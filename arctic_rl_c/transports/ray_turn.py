# SPDX-License-Identifier: Apache-2.0
"""Keeps the gradients of two clients of one trainer apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from arctic_rl_c import WrongProcessError
from arctic_rl_c.transports.http_errors import complete
from arctic_rl_c.transports.ray_watch import Process


class TrainingTurn:
    """Which client's gradients the trainer holds.

    Batches between two steps add up, so those of two clients must not meet: what another one
    sends in between is refused, until the first has stepped or a checkpoint has been loaded.
    """

    def __init__(self) -> None:
        self._holder: Mapping[str, Any] | None = None

    @contextmanager
    def taken(self, op: str, client: Mapping[str, Any]) -> Iterator[None]:
        """Around an op of a client; what the op returns goes to `loaded`.

        Args:
            op: The op's name.
            client: Its `id`, and the `identity` of its process.

        Raises:
            WrongProcessError: The trainer holds gradients of another client.
        """
        before = self._holder
        if op in ("fwd_bwd", "step"):
            if before is not None and before["id"] != client["id"]:
                raise _refusal(op, before)
            if op == "fwd_bwd":
                self._holder = client
        try:
            yield
        except BaseException as error:
            if op == "fwd_bwd" and not getattr(error, "maybe_applied", False):
                # The trainer may hold what came before a batch that failed, but nothing of it.
                self._holder = before
            elif op == "step" and getattr(error, "maybe_applied", True):
                self._holder = None
            raise
        else:
            if op == "step":
                self._holder = None

    def loaded(self, checkpoint: Mapping[str, Any]) -> None:
        """A checkpoint was loaded, if one was found: the trainer has dropped all gradients."""
        if checkpoint["path"] is not None:
            self._holder = None


def _refusal(op: str, holder: Mapping[str, Any]) -> Exception:
    process = Process(holder["identity"])
    state = "which has ended" if process.gone() else "another client of this server"
    process.close()
    error = WrongProcessError(
        f"{op}: the trainer holds gradients of process {holder['identity']['pid']}, {state}; "
        "they would be mixed. One client trains at a time: let it call step, or drop its "
        "gradients with load_checkpoint"
    )
    return complete(error, "ARL_ERR_PROCESS", op)
