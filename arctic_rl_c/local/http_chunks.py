# SPDX-License-Identifier: Apache-2.0
"""Requests that arrive in byte chunks: kept until complete, within bounds."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from arctic_rl_c import WireError, wire


class ChunkStore:
    """The chunks of unfinished requests, by group id.

    Args:
        max_bytes: How many bytes of them are kept. Beyond that the group that has waited
            longest goes, and its request is never complete.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._groups: OrderedDict[str, dict[int, bytes | bytearray]] = OrderedDict()
        self._bytes = 0

    def add(self, body: bytes | bytearray) -> bytes | bytearray | dict[str, Any]:
        """Take a body.

        Returns:
            The whole frame, when the body is one or completes one; else how far the request
            has come.

        Raises:
            WireError: It is a chunk that does not fit to the others of its group.
        """
        found = wire.read_metadata(body).get("request_chunk")
        if not isinstance(found, dict):
            return body
        group, index, total = (
            found.get(name) for name in ("chunk_group_id", "chunk_idx", "total_chunks")
        )
        if not isinstance(group, str) or not isinstance(index, int) or not isinstance(total, int):
            raise WireError("a request chunk needs chunk_group_id, chunk_idx and total_chunks")
        chunks = self._groups.setdefault(group, {})
        self._bytes += len(body) - len(chunks.get(index, b""))
        chunks[index] = body  # the same chunk again replaces itself
        self._groups.move_to_end(group)
        while self._bytes > self._max_bytes:
            oldest = next(iter(self._groups))
            self._drop(oldest)
            if oldest == group:
                raise WireError(
                    f"the chunks of unfinished requests would exceed {self._max_bytes} bytes"
                )
        if len(chunks) < total:
            return {"chunk_group_id": group, "received": len(chunks), "total_chunks": total}
        self._drop(group)
        return wire.decode_byte_chunks(chunks.values())

    def _drop(self, group: str) -> None:
        self._bytes -= sum(map(len, self._groups.pop(group).values()))
