# SPDX-License-Identifier: Apache-2.0
"""The two generations of the Arctic client behind one face: config, jobs, reattaching, ending."""

from __future__ import annotations

import inspect
import subprocess
from collections.abc import Mapping
from typing import Any

from arctic_rl_c import ConfigError
from arctic_rl_c.transports import arctic_errors, http_errors
from arctic_rl_c.transports.arctic_package import ArcticPackage

JOB_TYPES = ("training", "sampling", "log_prob")
#: The parts of the final generation's config, and their classes.
_PARTS = {"backend": "OnPremConfig", "training": "TrainingConfig", "sampling": "SamplingConfig"}
_CONNECTION_LIMIT = 0  # none: thousands of prompts wait at once


def protocol_of(fields: Mapping[str, Any], generation: str) -> str:
    """`ray` or `http`, from a client's config as plain data."""
    if generation == "final":
        return str(fields["backend"]["protocol"])
    return str(fields["comm_protocol"])


def launch_address(fields: Mapping[str, Any], generation: str) -> tuple[str, int] | None:
    """Where a client with this config launches a server; None if it launches none."""
    if protocol_of(fields, generation) != "http":
        return None
    if generation == "final":
        backend = fields["backend"]
        return (backend["host"], backend["port"]) if backend["launch_local_server"] else None
    return (fields["host"], fields["port"]) if fields["backend"] == "local" else None


def point_at(fields: dict[str, Any], generation: str, host: str, port: int) -> None:
    """Let a client with this config talk to a server that runs already."""
    if generation == "final":
        fields["backend"] |= {"host": host, "port": port, "launch_local_server": False}
    else:
        fields |= {"host": host, "port": port, "backend": "dss-platform"}


def make_config(package: ArcticPackage, fields: Mapping[str, Any]) -> Any:
    """The client's own config object.

    Raises:
        ConfigError: The installed version refuses a field; says which.
    """
    module, values = package.module, dict(fields)
    try:
        if package.generation == "final":
            # Plain dicts would do for two of them; the third is one of several kinds.
            for field, kind in _PARTS.items():
                values[field] = getattr(module, kind)(**values[field])
        return module.ArcticRLClientConfig(**values)
    except (AttributeError, TypeError, ValueError) as error:
        raise http_errors.misconfigured(
            "arctic", f"{package} refuses its config: {_refusals(error)}"
        ) from error


def _refusals(error: Exception) -> str:
    """Each field that a validation error names, on one line."""
    errors = getattr(error, "errors", None)
    if not callable(errors):
        return str(error)
    found = []
    for item in errors():
        where = ".".join(str(part) for part in item.get("loc", ())) or "config"
        found.append(f"{where}: {item.get('msg', item)}")
    return "; ".join(found)


class InnerClient:
    """A client object of either generation.

    Making one makes the server and the jobs, or attaches when the config has job ids.

    Args:
        package: Where it comes from.
        config: Its own config object.
        server_state: The actor to attach to, over Ray.
    """

    def __init__(self, package: ArcticPackage, config: Any, server_state: Any) -> None:
        self._final = package.generation == "final"
        create = package.module.create_arctic_rl_client
        if server_state is None:
            self.client = create(config)
        elif self._final:
            self.client = create(config, server_state=server_state)
        else:
            self.client = create(config, server_state)

    def jobs(self) -> dict[str, int | str | None]:
        """Ids by type; None for a job that does not exist."""
        if self._final:
            return {job: getattr(self.client.jobs, job) for job in JOB_TYPES}
        config = self.client.reconnect_config()
        return {job: getattr(config, f"{job}_job_id") for job in JOB_TYPES}

    def reconnect_fields(self) -> dict[str, Any]:
        """The config for attaching, as plain data."""
        plain = _plain(self.client.reconnect_config())
        if not isinstance(plain, dict):
            raise ConfigError(f"reconnect_config gave a {type(plain).__name__}, not a config")
        return plain

    def server_state(self) -> Any:
        """The actor that another process attaches to, over Ray."""
        return self.client.get_server_state()

    @property
    def server_process(self) -> subprocess.Popen[bytes] | None:
        """The server that a client of the final generation launched.

        That of the first generation ends its own when the interpreter exits.
        """
        process = getattr(self.client.transport, "proc", None) if self._final else None
        return process if isinstance(process, subprocess.Popen) else None

    async def keep_error_bodies(self) -> None:
        """Let errors over HTTP hold what the server says, where the client would drop it.

        The final generation opens its session on first use, and takes one that is there. To be
        awaited on the loop that ops run on.
        """
        transport: Any = getattr(self.client, "transport", None)
        names = ("_asession", "_asession_loop", "timeout")
        if not self._final or not all(hasattr(transport, name) for name in names):
            return
        import asyncio

        import aiohttp

        transport._asession = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=transport.timeout),
            connector=aiohttp.TCPConnector(limit=_CONNECTION_LIMIT),
            raise_for_status=arctic_errors.refuse,
        )
        transport._asession_loop = asyncio.get_running_loop()

    async def close_session(self) -> None:
        """Close connections that belong to the running loop."""
        close = getattr(getattr(self.client, "transport", None), "aclose", None)
        if close is not None:
            await close()

    async def end(self, *, owner: bool) -> None:
        """End the jobs and a launched server; by others than the owner, let go of them."""
        if not owner:
            self._let_go()
        elif self._final:
            self.client.transport.shutdown()
        else:
            # A coroutine function over Ray, a plain one over HTTP.
            ended = self.client.shutdown()
            if inspect.isawaitable(ended):
                await ended

    def _let_go(self) -> None:
        """Close what this process holds; the clients' own shutdown would end the jobs."""
        if self._final:
            transport = self.client.transport
            transport.jobs = type(transport.jobs)()
            transport.shutdown()
            return
        session = getattr(self.client, "_session", None)
        if session is not None:
            session.close()


def _plain(value: Any) -> Any:
    """Config objects as dicts, all the way down."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "model_fields_set"):
        # By iteration: a dump leaves out the job ids of the first generation.
        return {key: _plain(item) for key, item in value}
    return value
