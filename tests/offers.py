# SPDX-License-Identifier: Apache-2.0
"""The offer's bytes, read and made again as docs/design/offer.md lays them out."""

from __future__ import annotations

import struct
from dataclasses import dataclass

HEADER = 416
ALLOC = 112
TENSOR = 160

#: name: (offset, format)
FIELDS = {
    "magic": (0, "8s"),
    "format": (8, "I"),
    "crc": (12, "I"),
    "total_size": (16, "Q"),
    "header_size": (24, "I"),
    "transport": (28, "I"),
    "verify": (32, "I"),
    "receivers": (36, "I"),
    "senders": (40, "I"),
    "sender_rank": (44, "I"),
    "boot_id": (48, "16s"),
    "pid_namespace": (64, "Q"),
    "pid": (72, "q"),
    "start_time": (80, "Q"),
    "unit_kind": (88, "I"),
    "unit_index": (92, "i"),
    "unit_uuid": (96, "16s"),
    "host": (112, "64s"),
    "control": (176, "64s"),
    "fallback": (240, "128s"),
    "nonce": (368, "16s"),
    "epoch": (384, "Q"),
    "layout_id": (392, "Q"),
    "alloc_count": (400, "I"),
    "tensor_count": (404, "I"),
    "names_size": (408, "I"),
    "blob_size": (412, "I"),
}

_TABLE = []
for _byte in range(256):
    for _ in range(8):
        _byte = _byte >> 1 ^ (0x82F63B78 if _byte & 1 else 0)
    _TABLE.append(_byte)


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def get(offer: bytes, name: str):
    offset, code = FIELDS[name]
    return struct.unpack_from("<" + code, offer, offset)[0]


def signed(offer: bytes) -> bytes:
    """The same bytes with the right checksum."""
    blank = offer[:12] + bytes(4) + offer[16:]
    return blank[:12] + struct.pack("<I", crc32c(blank)) + blank[16:]


def put(offer: bytes, offset: int, code: str, *values) -> bytes:
    """Change a number anywhere and sign again."""
    changed = bytearray(offer)
    struct.pack_into("<" + code, changed, offset, *values)
    return signed(bytes(changed))


def change(offer: bytes, name: str, value) -> bytes:
    """Change a field of the header and sign again."""
    return put(offer, *FIELDS[name], value)


@dataclass
class Tensor:
    name: str
    dtype: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alloc: int
    alias_of: int
    offset: int
    checksum: int | None


def tensor_at(offer: bytes, index: int) -> int:
    """Where the record of a tensor begins."""
    return HEADER + ALLOC * get(offer, "alloc_count") + TENSOR * index


def tensors(offer: bytes) -> list[Tensor]:
    count = get(offer, "tensor_count")
    at = tensor_at(offer, count)
    names = at + (8 * count if get(offer, "verify") else 0)
    found = []
    for index in range(count):
        length, dtype, ndim, alloc, alias, reserved, offset, *sizes = struct.unpack_from(
            "<6IQ16q", offer, tensor_at(offer, index)
        )
        assert reserved == 0
        found.append(
            Tensor(
                offer[names : names + length].decode(),
                dtype,
                tuple(sizes[:ndim]),
                tuple(sizes[8 : 8 + ndim]),
                alloc,
                alias,
                offset,
                struct.unpack_from("<Q", offer, at + 8 * index)[0]
                if get(offer, "verify")
                else None,
            )
        )
        names += length
    assert names + get(offer, "blob_size") == len(offer)
    return found


MASK = (1 << 64) - 1


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def checksum(data: bytes) -> int:
    padded = data + bytes(-len(data) % 8)
    total = sum(
        mix(word ^ (i + 1) * 0x9E3779B97F4A7C15 & MASK)
        for i, (word,) in enumerate(struct.iter_unpack("<Q", padded))
    )
    return mix(len(data) + total & MASK)
