# SPDX-License-Identifier: Apache-2.0
"""How long an op may take, and what is said of one that took longer."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arctic_rl_c import ConfigError, PeerTimeoutError
from arctic_rl_c.transports.http_errors import complete, consequence

#: Seconds that an op may take where nobody says otherwise, whatever the transport.
TIMEOUT = 1800.0

#: Ops of the embedded server that others may call.
SERVER_OPS = (
    *("fwd_no_grad", "fwd_bwd", "step", "generate", "sync_weights"),
    *("save_checkpoint", "load_checkpoint"),
    *("sleep_inference", "wake_inference", "reset_prefix_cache"),
    *("describe", "weights_digests", "measure_peak_flops"),
)
#: What may have a limit of its own.
OPS = (*SERVER_OPS, "start", "shutdown", "pids")

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


def limits(
    timeout: Any, timeouts: Mapping[str, Any] | None, where: str = ""
) -> tuple[float, dict[str, float]]:
    """Check `timeout` and `timeouts`, before anything is started for them.

    Args:
        timeout: Seconds; `math.inf` is no limit, 0 lets nothing be waited for.
        timeouts: The same by op.
        where: What precedes the names in messages, such as `remote_backend.comms.`.

    Raises:
        ConfigError: One is not such a number, or no op has that name.
    """
    if timeouts is not None and not isinstance(timeouts, Mapping):
        raise ConfigError(
            f"{where}timeouts is {timeouts!r}: it is a mapping of ops to seconds, such as "
            "{'generate': 600}"
        )
    named = {f"{where}timeout": timeout}
    for op, seconds in (timeouts or {}).items():
        if op not in OPS:
            raise ConfigError(f"{where}timeouts names {op!r}: it is one of {', '.join(OPS)}")
        named[f"{where}timeouts[{op!r}]"] = seconds
    for name, seconds in named.items():
        number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not number or math.isnan(seconds) or seconds < 0:
            raise ConfigError(
                f"{name} is {seconds!r}: it is a number of seconds, 0 or more; infinity for no "
                "limit"
            )
    return float(timeout), {op: float(seconds) for op, seconds in (timeouts or {}).items()}


def left(until: float) -> float | None:
    """Seconds until then, by `time.monotonic`, as asyncio takes them: None is no limit."""
    return None if until == math.inf else max(0.0, until - time.monotonic())


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
