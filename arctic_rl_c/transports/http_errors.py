# SPDX-License-Identifier: Apache-2.0
"""What a failed HTTP request becomes: the server's own words, under a fitting type."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from arctic_rl_c import (
    ArcticError,
    ConfigError,
    PeerLostError,
    PeerTimeoutError,
    TransportUnavailableError,
)
from arctic_rl_c.local.remote_errors import rebuild_error

_TEXT_LIMIT = 4000
_FOUND_LIMIT = 100


class HttpRequestError(ArcticError, ValueError):
    """The server refused a request (status 4xx); `status` is the number."""

    status: int


class HttpServerError(ArcticError, RuntimeError):
    """The server failed in a request (status 5xx); `status` is the number."""

    status: int


def complete(
    error: ArcticError, code: str, op: str, *, maybe_applied: bool | None = None
) -> ArcticError:
    """Give an error of the package the attributes that all of them have."""
    error.code, error.operation, error.rank = code, op, None
    error.domain, error.foreign = "none", 0
    if maybe_applied is not None:
        error.maybe_applied = maybe_applied  # type: ignore[attr-defined]
    return error


def lost(op: str, url: str, reason: str, maybe_applied: bool) -> PeerLostError:
    """The server went away, or never was there."""
    text = f"{op}: {reason} ({url}); {consequence(op, maybe_applied)}"
    error = PeerLostError(text)
    complete(error, "ARL_ERR_PEER_LOST", op, maybe_applied=maybe_applied)
    return error


def timed_out(op: str, url: str, seconds: float, maybe_applied: bool) -> PeerTimeoutError:
    """The answer did not come in time."""
    text = (
        f"{op}: no answer from {url} within {seconds:g} s; {consequence(op, maybe_applied)}. "
        "Raise timeouts={...} if the server needs longer"
    )
    error = PeerTimeoutError(text)
    complete(error, "ARL_ERR_TIMEOUT", op, maybe_applied=maybe_applied)
    return error


def redirected(op: str, url: str, status: int, location: str | None) -> HttpServerError:
    """The answer is a redirect, which no Arctic server gives."""
    error = HttpServerError(
        f"{op}: {url} redirects to {location or 'nowhere'} (status {status}), which is not "
        "followed: give the transport the url of the server itself"
    )
    complete(error, "ARL_ERR_SYSTEM", op)
    error.status = status
    return error


def unreadable(op: str, url: str, wanted: str, answer: Any) -> HttpServerError:
    """A success whose body is not what the route answers with."""
    found = repr(answer)
    if len(found) > _FOUND_LIMIT:
        found = found[:_FOUND_LIMIT] + "…"
    error = HttpServerError(
        f"{op}: the server at {url} answered with {type(answer).__name__}, not with {wanted}: "
        f"{found}"
    )
    complete(error, "ARL_ERR_SYSTEM", op)
    error.status = 200
    return error


#: What to do when nobody knows whether an op was applied.
_CURES = {
    "fwd_bwd": "resume from the last checkpoint",
    "step": "resume from the last checkpoint",
    "sync_weights": "call sync_weights() again before anything is generated",
}


def consequence(op: str, maybe_applied: bool) -> str:
    """What state is left by an op without an answer, and what to do."""
    if not maybe_applied:
        return "nothing was changed by it"
    cure = _CURES.get(op, "look at the server's state before going on")
    return (
        f"the {op} may or may not have been applied, and doing it again could apply it twice: "
        f"{cure}"
    )


def doubt_step(error: HttpServerError) -> None:
    """Say of a failed `step` of a public server that it may have been taken.

    A metric that is not finite makes that server fail after the step.
    """
    error.args = (
        f"{error}; the step may or may not have been applied (such a server also answers so when "
        "a metric is not finite): resume from the last checkpoint",
    )
    error.maybe_applied = True  # type: ignore[attr-defined]


def misconfigured(op: str, text: str) -> ConfigError:
    """An option, or a combination of them, that cannot be."""
    error = ConfigError(f"{op}: {text}")
    complete(error, "ARL_ERR_CONFIG", op)
    return error


def unavailable(op: str, text: str) -> TransportUnavailableError:
    """What this server or this wire cannot do."""
    error = TransportUnavailableError(f"{op}: {text}")
    complete(error, "ARL_ERR_UNAVAILABLE", op)
    return error


def from_status(op: str, url: str, status: int, body: bytes | bytearray) -> Exception:
    """The exception for an answer that is no success.

    An error that our own server describes comes back with its type; any other keeps its text:
    ValueError for 4xx, RuntimeError for 5xx, TransportUnavailableError for a route that the
    server lacks.
    """
    found = _parse(body)
    if isinstance(found, Mapping):
        described = _rebuild(found.get("error"))
        if described is not None:
            return described
        detail = _detail(found.get("detail"))
    else:
        detail = bytes(body[:_TEXT_LIMIT]).decode(errors="replace").strip()
    if status in (404, 405) and detail in ("Not Found", "Method Not Allowed", ""):
        return unavailable(op, f"the server at {url} has no such route (status {status})")
    text = f"{op}: {detail or 'no reason given'} (status {status} from {url})"
    cls = HttpServerError if status >= 500 else HttpRequestError
    error = cls(text)
    complete(error, "ARL_ERR_VALUE" if status < 500 else "ARL_ERR_SYSTEM", op)
    error.status = status
    return error


def _parse(body: bytes | bytearray) -> Any:
    try:
        return json.loads(bytes(body))
    except (ValueError, RecursionError):
        return None


def _detail(detail: Any) -> str:
    """FastAPI's `detail`: a text, or a list of what is wrong where."""
    if isinstance(detail, list):
        items = []
        for item in detail:
            if isinstance(item, Mapping):
                where = ".".join(str(part) for part in item.get("loc", ()))
                items.append(f"{where}: {item.get('msg', item)}")
            else:
                items.append(str(item))
        return "; ".join(items)[:_TEXT_LIMIT]
    return "" if detail is None else str(detail)[:_TEXT_LIMIT]


def _rebuild(data: Any) -> Exception | None:
    """An error that our own server described; None for what does not look like one."""
    if not isinstance(data, Mapping):
        return None
    types, args, attributes = (data.get(key) for key in ("types", "args", "attributes"))
    if not (isinstance(types, list) and types and isinstance(args, list)):
        return None
    plain = (str, int, float, bool, type(None))
    if not all(isinstance(value, plain) for value in args):
        return None
    safe = {
        str(name): value
        for name, value in (attributes if isinstance(attributes, Mapping) else {}).items()
        if str(name).isidentifier() and not str(name).startswith("_") and isinstance(value, plain)
    }
    return rebuild_error(
        {
            "types": [str(name) for name in types],
            "args": args,
            "text": str(data.get("text", "")),
            "attributes": safe,
            "traceback": str(data.get("traceback", "")),
        }
    )
