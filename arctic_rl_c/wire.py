# SPDX-License-Identifier: Apache-2.0
"""DSSST1, the wire format of Arctic RL: trees of tensors as one safetensors image.

Encoding and decoding are in C: see the functions' own docstrings, and `docs/wire.md`. Nothing
that arrives is ever unpickled or executed; whatever is wrong with a frame is a `WireError`.
"""

from arctic_rl_c._core import WireError
from arctic_rl_c._core import (
    wire_decode_byte_chunks as decode_byte_chunks,
)
from arctic_rl_c._core import (
    wire_dumps as dumps,
)
from arctic_rl_c._core import (
    wire_encode_byte_chunks as encode_byte_chunks,
)
from arctic_rl_c._core import (
    wire_loads as loads,
)
from arctic_rl_c._core import (
    wire_read_metadata as read_metadata,
)

__all__ = [
    "WireError",
    "decode_byte_chunks",
    "dumps",
    "encode_byte_chunks",
    "loads",
    "read_metadata",
]
