# SPDX-License-Identifier: Apache-2.0
"""How long an op may take, and what is said of one that took longer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arctic_rl_c import PeerTimeoutError
from arctic_rl_c.transports.http_errors import complete, consequence

#: Seconds that an op may take where nobody says otherwise, whatever the transport.
TIMEOUT = 1800.0

#: Ops that must not be done twice.
_APPLIED_ONCE = frozenset({"fwd_bwd", "step", "sync_weights"})
#: Ops that leave something behind, and may be repeated.
_REPEATABLE = frozenset(
    {
        "save_checkpoint",
        "load_checkpoint",
        "sleep_inference",
        "wake_inference",
        "reset_prefix_cache",
    }
)


@dataclass(frozen=True)
class Wait:
    """Somebody that an op waits for in vain.

    Args:
        role: Its name.
        pid: Its process, where that is known.
        begun: Whether it has the op; else the op was taken back and never runs there.
        inside: What it is in instead, for an op that has not begun, where that is known.
    """

    role: str
    pid: int | None
    begun: bool
    inside: str | None = None

    def __str__(self) -> str:
        text = f"the {self.role}" if self.pid is None else f"the {self.role} (pid {self.pid})"
        return text if self.begun or self.inside is None else f"{text}, still in {self.inside!r},"


def late(op: str, seconds: float, waits: Sequence[Wait]) -> PeerTimeoutError:
    """The error of an op that has taken `seconds`.

    It has `role`, the first of those that were waited for, and `maybe_applied`: True where the op
    has begun and doing it again could apply it twice.
    """
    begun = any(wait.begun for wait in waits)
    maybe_applied = begun and op in _APPLIED_ONCE
    if not begun:
        state = f"the {op} had not begun and never will: nothing was changed by it"
    elif op in _REPEATABLE:
        state = f"the {op} goes on there and may yet have its effect; repeating it is harmless"
    elif maybe_applied:
        state = consequence(op, True)
    else:
        state = "it goes on there, its answer is dropped, and nothing was changed by it"
    who = " and ".join(str(wait) for wait in waits)
    error = PeerTimeoutError(
        f"{op}: {who} gave no answer within {seconds:g} s; {state}. Raise timeout= or "
        f"timeouts={{{op!r}: …}} if that is too short; what hangs ends with shutdown()"
    )
    complete(error, "ARL_ERR_TIMEOUT", op, maybe_applied=maybe_applied)
    error.role = waits[0].role  # type: ignore[attr-defined]
    return error
