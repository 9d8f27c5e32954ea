# SPDX-License-Identifier: Apache-2.0
"""What an Arctic client's exceptions become: this package's types, in the server's own words."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from arctic_rl_c import ArcticError, PeerTimeoutError
from arctic_rl_c.transports import http_errors

#: What Ray raises when an actor, worker or node behind a call is gone.
_RAY_LOSSES = (
    "RayActorError",
    "WorkerCrashedError",
    "NodeDiedError",
    "ObjectLostError",
    "LocalRayletDiedError",
)


class RefusedError(Exception):
    """An HTTP answer that is no success, read to its end before the client throws it away."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status, body)
        self.status, self.body = status, body


async def refuse(response: Any) -> None:
    """The `raise_for_status` of an aiohttp session that keeps what the server says."""
    if response.status >= 400:
        raise RefusedError(response.status, await response.read())


def translate(op: str, where: str, error: Exception, harmless: bool) -> Exception | None:
    """The exception to raise instead; None for one that says what it is already.

    Args:
        op: The transport's method.
        where: The client, for messages.
        error: What the client raised.
        harmless: Whether the op changes nothing, so that doing it again is safe.
    """
    if isinstance(error, ArcticError):
        return None
    if isinstance(error, RefusedError):
        return _refused(op, where, error.status, error.body)
    lost = _ray_loss(error)
    if lost is not None:
        return _lost(op, where, lost, harmless)
    if _is_ray_task_error(error):
        return None  # it has the type of what was raised over there, and that traceback
    return _of_requests(op, where, error, harmless) or _of_aiohttp(op, where, error, harmless)


def _refused(op: str, where: str, status: int, body: bytes) -> Exception:
    error = http_errors.from_status(op, where, status, body)
    if op == "step" and isinstance(error, http_errors.HttpServerError):
        http_errors.doubt_step(error)
    return error


def _of_requests(op: str, where: str, error: Exception, harmless: bool) -> Exception | None:
    requests: Any = sys.modules.get("requests")
    if requests is None:
        return None
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return _refused(op, where, error.response.status_code, error.response.content)
    if isinstance(error, requests.Timeout):
        return _late(op, where, error, harmless or isinstance(error, requests.ConnectTimeout))
    if isinstance(error, requests.ConnectionError):
        return _lost(op, where, error, harmless)
    return None


def _of_aiohttp(op: str, where: str, error: Exception, harmless: bool) -> Exception | None:
    aiohttp: Any = sys.modules.get("aiohttp")
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
        return _late(op, where, error, harmless)
    if aiohttp is None:
        return None
    if isinstance(error, aiohttp.ClientResponseError):
        said = f"{error.message} (the Arctic client does not keep the server's own words)"
        return _refused(op, where, error.status, said.encode())
    if isinstance(error, aiohttp.ClientConnectorError):
        return _lost(op, where, error, True)  # nothing was sent
    if isinstance(error, aiohttp.ClientConnectionError):
        return _lost(op, where, error, harmless)
    return None


def _ray_loss(error: Exception) -> Exception | None:
    """The loss of a process that an exception of Ray tells of, also one met by the server."""
    exceptions: Any = sys.modules.get("ray.exceptions")
    losses = tuple(getattr(exceptions, name) for name in _RAY_LOSSES if hasattr(exceptions, name))
    inner = getattr(error, "cause", None) if _is_ray_task_error(error) else error
    return inner if isinstance(inner, Exception) and isinstance(inner, losses) else None


def _is_ray_task_error(error: Exception) -> bool:
    exceptions: Any = sys.modules.get("ray.exceptions")
    return exceptions is not None and isinstance(error, exceptions.RayTaskError)


def _lost(op: str, where: str, error: Exception, harmless: bool) -> Exception:
    return http_errors.lost(op, where, _text(error), not harmless)


def _late(op: str, where: str, error: Exception, harmless: bool) -> Exception:
    """The client's own deadline passed, or the server's for the client."""
    text = f"{op}: {_text(error) or 'the Arctic client waited no longer'} ({where})"
    late = PeerTimeoutError(text)
    http_errors.complete(late, "ARL_ERR_TIMEOUT", op, maybe_applied=not harmless)
    return late


def _text(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
