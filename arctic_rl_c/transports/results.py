# SPDX-License-Identifier: Apache-2.0
"""Result items of `generate` as every transport gives them."""

from __future__ import annotations

from typing import Any


def with_token_ids(item: dict[str, Any]) -> dict[str, Any]:
    """JSON makes text of the token ids that log-probs are keyed by; make them numbers again."""
    for field in ("logprobs", "prompt_logprobs"):
        positions = item.get(field)
        if isinstance(positions, list):
            item[field] = [
                {int(token): value for token, value in position.items()}
                if isinstance(position, dict)
                else position
                for position in positions
            ]
    for sample in item.get("samples", ()):
        with_token_ids(sample)
    return item
