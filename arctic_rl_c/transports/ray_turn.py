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
        #: Batches of the holder that are under way, and whether any that ended may have been
        #: applied since the last step.
        self._pending, self._applied = 0, False

    @contextmanager
    def taken(self, op: str, client: Mapping[str, Any]) -> Iterator[None]:
        """Around an op of a client; what the op returns goes to `loaded`.

        Args:
            op: The op's name.
            client: Its `id`, and the `identity` of its process.

        Raises:
            WrongProcessError: The trainer holds gradients of another client.
        """
        if op not in ("fwd_bwd", "step"):
            yield
            return
        if self._holder is not None and self._holder["id"] != client["id"]:
            raise _refusal(op, self._holder)
        batch = op == "fwd_bwd"
        if batch:
            self._holder = client
            self._pending += 1
        try:
            yield
        except BaseException as error:
            # A batch that failed may have left none; a step that failed has, unless it never began.
            if getattr(error, "maybe_applied", not batch):
                self._applied = batch
            raise
        else:
            self._applied = batch
        finally:
            self._pending -= batch
            self._let_go()

    def loaded(self, checkpoint: Mapping[str, Any]) -> None:
        """A checkpoint was loaded, if one was found: the trainer has dropped all gradients."""
        if checkpoint["path"] is not None:
            self._applied = False
            self._let_go()

    def _let_go(self) -> None:
        if not self._applied and self._pending == 0:
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
