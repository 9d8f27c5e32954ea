# SPDX-License-Identifier: Apache-2.0
"""Bodies of HTTP requests and answers: DSSST1 frames and JSON, for both ends.

Bytes are read into one buffer, which the decoded tensors then are views of, and written piece by
piece, so a frame exists once on each side.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from arctic_rl_c import wire
from arctic_rl_c.transports.off_loop import off_loop

FRAME_TYPE = "application/octet-stream"
JSON_TYPE = "application/json"

#: Repeated unchanged when a request is sent again; the server then gives the first answer again.
KEY_HEADER = "X-Arctic-Idempotency-Key"
#: Which instance of a server the request is meant for.
SERVER_HEADER = "X-Arctic-Server"

_PIECE = 256 << 10  # larger ones outrun the receiver and cost four times the system time


class BodyTooLargeError(ValueError):
    """A body is larger than its reader is willing to hold."""


async def read_body(stream: aiohttp.StreamReader, length: int | None, limit: int) -> bytearray:
    """The whole of a body.

    Args:
        stream: Where it comes from.
        length: Its announced size, None when there was none.
        limit: The largest size that is read.

    Raises:
        BodyTooLargeError: It is larger than `limit`, as announced or as found.
    """
    if length is not None and length > limit:
        raise BodyTooLargeError(f"a body of {length} bytes; at most {limit} are read")
    body = bytearray()  # grows with what arrives: a length alone must not take memory
    try:
        async for piece in stream.iter_any():
            if len(body) + len(piece) > limit:
                raise BodyTooLargeError(f"a body of more than {limit} bytes")
            body += piece
    except BaseException:
        body.clear()  # the stream keeps the error, and its traceback this frame
        raise
    return body


async def pieces(body: bytes) -> AsyncIterator[memoryview]:
    """A body in parts that the event loop writes one by one."""
    view = memoryview(body)
    for begin in range(0, len(view), _PIECE):
        yield view[begin : begin + _PIECE]


async def encode(obj: Any) -> bytes:
    """`wire.dumps`, on a thread when that takes long."""
    return await off_loop(wire.dumps, obj)


def to_json(obj: Any) -> bytes:
    """JSON as Python writes it: NaN and infinities are literals."""
    return json.dumps(obj).encode()


def from_json(body: bytes | bytearray) -> Any:
    """The reverse; an empty body is None.

    Raises:
        ValueError: The body is no JSON, or is nested too deep to be read.
    """
    try:
        return json.loads(bytes(body)) if body else None
    except RecursionError as error:
        raise ValueError(str(error)) from None
