# SPDX-License-Identifier: Apache-2.0
"""Requests to one server: sessions, deadlines, and what may be sent a second time."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import http.client
import itertools
import socket
import threading
import time
import urllib.parse
import uuid
import weakref
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp

from arctic_rl_c.transports import http_body, http_errors

_FIRST_DELAY, _LONGEST_DELAY = 0.05, 1.0
_REDIRECTS = (301, 302, 303, 307, 308)
_PROBE_BYTES = 1 << 16


class Repeat(enum.Enum):
    """Whether a request whose answer was lost may be sent again."""

    #: It changes nothing, or the same thing again.
    SAFE = "safe"
    #: Only to a server that knows the request by its key and gives the first answer again.
    KEYED = "keyed"


class Connection:
    """HTTP to one server, from any number of event loops.

    Args:
        url: `http://host:port`, or https.
        connect_timeout: Seconds that a TCP connection may take.
        max_response_bytes: The largest answer that is read.
        retries: How often a request that may be repeated is sent again.
    """

    def __init__(
        self, url: str, *, connect_timeout: float, max_response_bytes: int, retries: int
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url must be http://host:port or https://…, found {url!r}")
        if parts.query or parts.fragment:
            raise ValueError(f"url must have no query and no fragment, found {url!r}")
        self.url = url.rstrip("/")
        self._parts = parts
        self._connect_timeout = connect_timeout
        self._limit = max_response_bytes
        self._retries = retries
        #: Set by the owner when the server turned out to know keys.
        self.keyed = False
        self.server_id: str | None = None
        self._client_id = uuid.uuid4().hex
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._sessions: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, tuple[aiohttp.ClientSession, AsyncGenerator[Any, None]]
        ] = weakref.WeakKeyDictionary()

    # -- sessions ----------------------------------------------------------------------------

    async def _session(self) -> aiohttp.ClientSession:
        """The running loop's session. asyncio.run closes it when the loop ends."""
        loop = asyncio.get_running_loop()
        with self._lock:
            found = self._sessions.get(loop)
        if found is not None and not found[0].closed:
            return found[0]
        holder = _hold_session(self._connect_timeout)
        session: aiohttp.ClientSession = await anext(holder)
        with self._lock:
            self._sessions[loop] = (session, holder)
        return session

    async def close(self) -> None:
        """Close the running loop's session. Idempotent; a later request opens a new one."""
        with self._lock:
            found = self._sessions.pop(asyncio.get_running_loop(), None)
        if found is not None:
            await found[1].aclose()

    # -- requests ----------------------------------------------------------------------------

    async def post_frame(
        self, op: str, path: str, frame: bytes, *, timeout: float, repeat: Repeat, key: str
    ) -> tuple[int, bytearray]:
        """POST a DSSST1 frame; status and body of the answer."""
        return await self._send(
            "POST", op, path, frame, http_body.FRAME_TYPE, timeout=timeout, repeat=repeat, key=key
        )

    async def post_json(
        self, op: str, path: str, payload: Any, *, timeout: float, repeat: Repeat
    ) -> Any:
        """POST JSON; the JSON of the answer."""
        body = http_body.to_json(payload)
        return self._json(
            op,
            *await self._send(
                "POST", op, path, body, http_body.JSON_TYPE, timeout=timeout, repeat=repeat
            ),
        )

    async def get_json(self, op: str, path: str, *, timeout: float) -> Any:
        """GET; the JSON of the answer."""
        return self._json(
            op, *await self._send("GET", op, path, None, None, timeout=timeout, repeat=Repeat.SAFE)
        )

    def _json(self, op: str, status: int, body: bytearray) -> Any:
        try:
            return http_body.from_json(body)
        except ValueError as error:
            text = f"{op}: the answer of {self.url} (status {status}) is no JSON: {error}"
            failed = http_errors.HttpServerError(text)
            http_errors.complete(failed, "ARL_ERR_SYSTEM", op)
            failed.status = status
            raise failed from error

    def new_key(self, op: str) -> str:
        """A name for one request that no other request has."""
        return f"{self._client_id}:{op}:{next(self._numbers)}"

    async def _send(
        self,
        method: str,
        op: str,
        path: str,
        body: bytes | None,
        content_type: str | None,
        *,
        timeout: float,
        repeat: Repeat,
        key: str | None = None,
    ) -> tuple[int, bytearray]:
        """Send until an answer comes, the deadline passes, or repeating would not be safe."""
        url = self.url + path
        headers = {http_body.KEY_HEADER: key or self.new_key(op)}
        if content_type is not None:
            headers["Content-Type"] = content_type
        if body is not None:
            headers["Content-Length"] = str(len(body))
        if self.server_id is not None:
            headers[http_body.SERVER_HEADER] = self.server_id
        deadline = time.monotonic() + timeout
        changes = repeat is Repeat.KEYED
        sent = False  # some attempt may have reached the server
        for attempt in range(self._retries + 1):
            try:
                status, answer = await asyncio.wait_for(
                    self._once(method, op, url, headers, body), deadline - time.monotonic()
                )
                break
            # The session has no other time limit than the one for connecting.
            except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
                reason = f"cannot connect: {error}"
            except (aiohttp.ClientError, ConnectionError) as error:
                sent = True
                reason = f"the connection broke: {type(error).__name__}: {error}"
                if changes and not self.keyed:
                    raise http_errors.lost(op, url, reason, True) from error
            except (TimeoutError, asyncio.TimeoutError) as error:
                raise http_errors.timed_out(op, url, timeout, changes) from error
            delay = min(_FIRST_DELAY * 2**attempt, _LONGEST_DELAY)
            if attempt == self._retries or time.monotonic() + delay >= deadline:
                raise http_errors.lost(op, url, reason, changes and sent)
            await asyncio.sleep(delay)
        if status >= 400:
            raise http_errors.from_status(op, url, status, answer)
        return status, answer

    async def _once(
        self, method: str, op: str, url: str, headers: dict[str, str], body: bytes | None
    ) -> tuple[int, bytearray]:
        session = await self._session()
        data = None if body is None else http_body.pieces(body)
        # A redirect would turn a POST into a GET, and its answer would look like the op's.
        async with session.request(
            method, url, data=data, headers=headers, allow_redirects=False
        ) as response:
            if response.status in _REDIRECTS:
                raise http_errors.redirected(
                    op, url, response.status, response.headers.get("Location")
                )
            try:
                return response.status, await http_body.read_body(
                    response.content, response.content_length, self._limit
                )
            except http_body.BodyTooLargeError as error:
                text = f"{op}: {url} answered with {error}; see max_response_bytes"
                failed = http_errors.HttpServerError(text)
                http_errors.complete(failed, "ARL_ERR_SYSTEM", op)
                failed.status = response.status
                raise failed from error

    # -- before there is a loop ----------------------------------------------------------------

    def probe(self, path: str, timeout: float) -> tuple[int, bytes]:
        """GET without an event loop: status and the first part of the body.

        Raises:
            OSError: There was no answer, or not all of it within `timeout` seconds.
        """
        cls = (
            http.client.HTTPSConnection
            if self._parts.scheme == "https"
            else http.client.HTTPConnection
        )
        host = self._parts.hostname
        assert host is not None
        connection = cls(host, self._parts.port, timeout=timeout)
        late = threading.Event()
        # The socket's own limit is for each read, and a server may send a byte now and then.
        cutter = threading.Timer(timeout, _cut, (connection, late))
        cutter.daemon = True
        cutter.start()
        try:
            connection.request("GET", self._parts.path.rstrip("/") + path)
            response = connection.getresponse()
            body = response.read(_PROBE_BYTES)
            if not late.is_set() and response.length and len(body) < _PROBE_BYTES:
                raise OSError(f"the answer broke off after {len(body)} bytes")
        except (OSError, http.client.HTTPException) as error:
            # A socket that was cut is at its end, reset or broken: the time is over all the same.
            if not late.is_set():
                if isinstance(error, http.client.HTTPException):
                    raise OSError(f"not an HTTP server: {type(error).__name__}: {error}") from error
                raise
        finally:
            cutter.cancel()
            connection.close()
        if late.is_set():
            raise TimeoutError("timed out")
        return response.status, body


def _cut(connection: http.client.HTTPConnection, late: threading.Event) -> None:
    """End what waits for the rest of an answer."""
    late.set()
    sock = connection.sock
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


async def _hold_session(connect_timeout: float) -> AsyncGenerator[aiohttp.ClientSession, None]:
    """A session that is closed with its loop: asyncio.run ends what generators are left."""
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),  # the server decides how much runs at once
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout),
        auto_decompress=False,
        headers={"Accept-Encoding": "identity"},
    )
    try:
        yield session
    finally:
        with contextlib.suppress(RuntimeError):  # the loop may be half gone
            await session.close()
