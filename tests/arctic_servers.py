# SPDX-License-Identifier: Apache-2.0
"""The server behind the doubles of the Arctic clients, and those doubles for as long as needed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import clients
from arctic_rl_c.transports.arctic import ArcticTransport

DOUBLE = Path(__file__).parent / "arctic_double"
FINAL, SEED = PACKAGES = ("arctic_platform", "arctic_training")
PAYLOAD = {
    "batch": {"input_ids": torch.arange(6).reshape(2, 3), "mask": torch.ones(2, 3)},
    "meta": {"temperature": 0.7},
    "processing": {"post": ["identity"], "loss_fn": None},
}


class Config:
    """A config class of the doubles: fields with defaults, which says what it was given.

    `REQUIRED` as a default means what it says. With `FORBID` an unknown field is an error that
    lists itself as pydantic's do.
    """

    REQUIRED = object()
    FORBID = False
    FIELDS: dict[str, Any] = {}

    def __init__(self, **given: Any) -> None:
        unknown = [key for key in given if key not in self.FIELDS]
        missing = [k for k, v in self.FIELDS.items() if v is Config.REQUIRED and k not in given]
        if missing or (unknown and self.FORBID):
            wrong = [(key, "Field required") for key in missing]
            wrong += [(key, "Extra inputs are not permitted") for key in unknown]
            raise RefusedConfigError(wrong)
        self.given = given
        self.model_fields_set = set(given)
        for key, default in self.FIELDS.items():
            setattr(self, key, given.get(key, default() if isinstance(default, type) else default))

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter([(key, getattr(self, key)) for key in self.FIELDS])


class RefusedConfigError(ValueError):
    def __init__(self, wrong: list[tuple[str, str]]) -> None:
        super().__init__(f"{len(wrong)} validation errors")
        self._wrong = wrong

    def errors(self) -> list[dict[str, Any]]:
        return [{"loc": (key,), "msg": text} for key, text in self._wrong]


class Server:
    """Jobs, and a recording transport of this package for what the ops do."""

    def __init__(self, **options: Any) -> None:
        self.backend = clients.Transport()
        self.options = options
        self.payloads: list[dict[str, Any]] = []
        self.jobs: dict[int, str] = {}
        self.ended: list[str] = []
        self.key = len(SERVERS)
        SERVERS.append(self)

    def __reduce__(self) -> Any:
        return _find, (self.key,)

    def initialize(self, payload: dict[str, Any]) -> int:
        self.payloads.append(payload)
        number = len(self.payloads)
        self.jobs[number] = payload["job_type"]
        return number

    def check(self, number: Any, *types: str) -> None:
        if number not in self.jobs:
            raise ValueError(f"Job {number} not found")
        if self.jobs[number] not in types:
            raise ValueError(f"Job {number} is not a {types[0]} job")

    def destroy(self, number: int) -> None:
        self.check(number, "training", "sampling", "log_prob")
        self.ended.append(self.jobs.pop(number))

    async def generate(self, number: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
        self.check(number, "sampling")
        if not all(isinstance(prompt, str) for prompt in body["prompts"]):
            raise ValueError("validation error: prompts must be text")
        return await self.backend.generate(**body)


class Session:
    """Connections of the first generation's HTTP client."""

    closed = False

    def close(self) -> None:
        self.closed = True


#: Every server that a test has made, so that a pickled one is found again.
SERVERS: list[Server] = []


def _find(key: int) -> Server:
    return SERVERS[key]


def forget() -> None:
    """Drop the clients from the modules."""
    for name in list(sys.modules):
        if name.partition(".")[0] in PACKAGES:
            del sys.modules[name]


@contextlib.contextmanager
def installed(*packages: str) -> Iterator[None]:
    """Doubles of the clients in these packages, and no other."""
    forget()
    SERVERS.clear()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(DOUBLE)
            for name in PACKAGES:
                if name not in packages:
                    patch.setitem(sys.modules, name, None)
            yield
    finally:
        forget()


@contextlib.contextmanager
def spied(cls: type) -> Iterator[list[list[Any]]]:
    """The calls of a client, as the golden data has them: method, payload, keywords."""
    calls: list[list[Any]] = []

    def spy(name: str, original: Any) -> Any:
        @functools.wraps(original)
        async def method(self: Any, *args: Any, **keywords: Any) -> Any:
            calls.append([name, args[0] if args else None, keywords])
            return await original(self, *args, **keywords)

        return method

    with pytest.MonkeyPatch.context() as patch:
        for name, original in inspect.getmembers(cls, inspect.iscoroutinefunction):
            if name != "shutdown":
                patch.setattr(cls, name, spy(name, original))
        yield calls


@pytest.fixture
def both() -> Iterator[None]:
    """Both generations are installed."""
    with installed(*PACKAGES):
        yield


def final_client() -> Any:
    return importlib.import_module("arctic_platform.client")


def config(version: str, protocol: str = "ray", **paths: Any) -> dict[str, Any]:
    key = (
        "remote_backend__comms__protocol" if version == "final" else "remote_backend__comm_protocol"
    )
    return clients.config(version, **{key: protocol, **paths})


def server() -> Server:
    """The one that was made last."""
    return SERVERS[-1]


def run(
    use: Callable[[ArcticTransport], Awaitable[Any]], given: dict[str, Any], **options: Any
) -> Any:
    async def main() -> Any:
        async with ArcticTransport(given, **options) as transport:
            return await use(transport)

    return asyncio.run(main())
