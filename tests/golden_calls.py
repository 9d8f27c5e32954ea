# SPDX-License-Identifier: Apache-2.0
"""The recorded calls of `tests/golden`, made through a transport and compared.

What a transport does on the way to the far end is its own; what it must not do is change a
call that arrives, or its answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import clients
import golden
import test_payload_golden
from arctic_rl_c import ArcticRLClient
from arctic_rl_c.transports.dense import dense_payload

LOG_PROBS = ("log_prob", "ref_log_prob")


def client_over(transport: Any, case: golden.Case) -> ArcticRLClient:
    return ArcticRLClient(transport, case.config, tokenizer=clients.Tokenizer(), prompts_as="text")


def as_they_are(calls: list[Any]) -> list[Any]:
    """What arrives of these calls where jagged tensors travel."""
    return calls


def dense(calls: list[Any]) -> list[Any]:
    """What arrives of these calls where prompts and responses go padded to their widths."""
    return [[name, payload and dense_payload(payload), rest] for name, payload, rest in calls]


Through = Callable[[Callable[[Any], Awaitable[Any]]], tuple[list[Any], Any]]


def check_log_prob(
    through: Through, case: golden.Case, name: str, arriving: Any = as_they_are
) -> None:
    """Log-probs of a case, as recorded.

    Args:
        through: Lets a transport be used: gives the calls that arrived, and the result.
        case: The case.
        name: One of LOG_PROBS.
        arriving: What of recorded calls arrives.
    """
    with test_payload_golden.known_warnings():
        calls, result = through(
            lambda transport: clients.log_prob(client_over(transport, case), case, name)
        )
    clients.same(calls, arriving(case.result(name)["calls"]))
    clients.same(result, case.result(name)["result"])


def check_update(through: Through, case: golden.Case, arriving: Any = as_they_are) -> None:
    """An update of a case as recorded; where nothing was, as without a transport between."""
    with test_payload_golden.known_warnings():
        calls, result = through(
            lambda transport: clients.update(client_over(transport, case), case)
        )
    if case in test_payload_golden.RECORDED:
        recorded = case.result("update_actor")
        clients.same(calls, arriving(recorded["calls"]))
        clients.same(result, recorded["result"])
        return
    direct = clients.Transport()
    with test_payload_golden.known_warnings():
        wanted = clients.drive(clients.update(client_over(direct, case), case))
    clients.same(calls, arriving(direct.calls))
    clients.same(result, wanted)


async def sync_and_generate(transport: Any, case: golden.Case) -> None:
    """What was recorded as `other_calls`."""
    client = client_over(transport, case)
    await client.sync_weights()
    await client.generate([5, 6, 7], {"temperature": 1.0, "max_tokens": 8})
