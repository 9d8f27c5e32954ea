# SPDX-License-Identifier: Apache-2.0
"""The embedded server on this machine: trainer and sampler as two child processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any, NoReturn

from arctic_rl_c.local.options import ROLE_FACTORY, LocalOptions, as_dict
from arctic_rl_c.local.process import RoleProcess
from arctic_rl_c.local.server import EmbeddedServer
from arctic_rl_c.transports.deadline import TIMEOUT, limits


class LocalTransport(EmbeddedServer):
    """An Arctic server in miniature, owned by this process.

    The constructor starts both processes and returns at once; they load their models while the
    first ops already wait in line. `await start()` waits for both. The processes end with
    `shutdown()`, with this process, or when this object's program exits.

    Args:
        options: A `LocalOptions`, or a normalised main config to derive them from.
        timeout: Seconds that an op may take, with all that it waits for; `math.inf` for ever.
        timeouts: The same for single methods, e.g. `{"generate": 600}`.

    Raises:
        ConfigError: An option is wrong.

    Example:
        >>> async with LocalTransport(LocalOptions()) as transport:
        ...     await transport.generate(["1+2="], {"max_tokens": 4})
    """

    name = "local"
    accepts_token_ids = True
    accepts_routing_key = True
    accepts_strict = True
    #: Every option of the contract that a server may ignore has its effect here.
    server_limits = False
    #: What builds a role in its process; tests have others.
    _factory = ROLE_FACTORY

    def __init__(
        self,
        options: LocalOptions | Mapping[str, Any],
        *,
        timeout: float = TIMEOUT,
        timeouts: Mapping[str, float] | None = None,
    ) -> None:
        if not isinstance(options, LocalOptions):
            options = LocalOptions.from_config(options)
        limits(timeout, timeouts)  # before processes are started
        for model in (options.trainer_model, options.sampler_model):
            model.check()
        self.options = options
        #: Whether log-probs of the reference model can be asked for.
        self.serves_reference = options.trainer.reference
        self._owner = os.getpid()
        self._roles = (
            RoleProcess(
                "trainer",
                {"model": as_dict(options.trainer_model), "options": as_dict(options.trainer)},
                factory=self._factory,
            ),
            RoleProcess(
                "sampler",
                {"model": as_dict(options.sampler_model), "options": as_dict(options.sampler)},
                factory=self._factory,
            ),
        )
        super().__init__(
            *self._roles,
            cuda_ipc=options.cuda_ipc,
            low_memory=options.low_memory,
            sync_timeout=options.sync_timeout,
            verify_weights=options.verify_weights,
            weight_transport=options.weight_transport,
            colocated=options.trainer_model.device == options.sampler_model.device,
            timeout=timeout,
            timeouts=timeouts,
        )

    async def start(self) -> None:
        """Wait until both models are loaded.

        Raises:
            PeerTimeoutError: `start_timeout` passed; both processes were ended.
            PeerLostError: A process died.
            ValueError: An option is wrong, as the role found it.
        """
        try:
            await asyncio.gather(
                *(
                    asyncio.to_thread(role.wait_started, self.options.start_timeout)
                    for role in self._roles
                )
            )
        except BaseException:
            await asyncio.shield(self.shutdown())
            raise

    async def shutdown(self) -> None:
        """End both processes. Idempotent."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """What `shutdown` does, for callers without an event loop. Blocks for a moment."""
        for role in self._roles:
            role.request_close()
        for role in self._roles:
            role.close()
        super().close()

    def reconnect_handle(self) -> dict[str, Any]:
        """Which processes these are. Only the process that owns them can use them."""
        return {
            "transport": self.name,
            "owner_pid": self._owner,
            **{f"{role.role}_pid": role.pid for role in self._roles},
        }

    @property
    def pids(self) -> dict[str, int | None]:
        """Process ids by role."""
        return {role.role: role.pid for role in self._roles}

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a LocalTransport belongs to the process that started it and cannot be pickled; use "
            "the ray or http transport to share a server between processes"
        )

    async def __aenter__(self) -> LocalTransport:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()
