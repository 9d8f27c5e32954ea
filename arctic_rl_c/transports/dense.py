# SPDX-License-Identifier: Apache-2.0
"""Payloads for wires that carry dense tensors only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from arctic_rl_c import PayloadError, pad_prompt_response


def dense_payload(payload: Mapping[str, Any]) -> dict[str, Any]:
    """A payload whose jagged prompts and responses are padded to the widths that its meta tells.

    Newer trainers give both as jagged tensors, and so the payload carries them. A server reads
    no more than their width: prompts are padded left, responses right, with `pad_token_id`.

    Args:
        payload: `{"batch", "meta", "processing"}`; not changed.

    Raises:
        PayloadError: Another jagged tensor is in the batch, or meta lacks the widths.
    """
    batch = payload.get("batch")
    if not isinstance(batch, Mapping) or not any(_is_jagged(value) for value in batch.values()):
        return dict(payload)
    meta = payload.get("meta") or {}
    dense = {
        key: _pad(key, value, meta) if _is_jagged(value) else value for key, value in batch.items()
    }
    return {**payload, "batch": dense}


def _is_jagged(value: Any) -> bool:
    """A nested torch tensor, or the pair (values, offsets)."""
    if isinstance(value, tuple):
        return len(value) == 2 and all(hasattr(part, "shape") for part in value)
    return bool(getattr(value, "is_nested", False))


def _pad(key: str, value: Any, meta: Mapping[str, Any]) -> Any:
    width = {"prompts": "max_prompt_len", "responses": "max_response_len"}.get(key)
    if width is None:
        raise PayloadError(f"{key}: is jagged, and this wire carries dense tensors only")
    missing = [name for name in (width, "pad_token_id") if name not in meta]
    if missing:
        raise PayloadError(f"{key}: is jagged, and meta has no {missing[0]} to pad it by")
    offsets = value[1] if isinstance(value, tuple) else value.offsets()
    lengths = (offsets[1:] - offsets[:-1]).tolist()
    nothing = [0] * len(lengths)
    left = key == "prompts"
    padded, _, _ = pad_prompt_response(
        value,
        lengths if left else nothing,
        nothing if left else lengths,
        pad_value=meta["pad_token_id"],
        prompt_width=int(meta[width]) if left else 0,
        response_width=0 if left else int(meta[width]),
    )
    return padded
