# SPDX-License-Identifier: Apache-2.0
"""`python -m arctic_rl_c serve`: the embedded server behind HTTP, until it is told to stop."""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace

from arctic_rl_c import load_config, normalize_config
from arctic_rl_c.local.http_server import HttpServer, listen
from arctic_rl_c.local.options import LocalOptions, ModelOptions
from arctic_rl_c.transports.local import LocalTransport

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass
class ServeOptions:
    """What to serve, and where.

    Attributes:
        config: A YAML main config that model, optimizer, lengths and flags come from; None
            takes defaults and the next two.
        model: A local Hugging Face model directory; None a random `shape`.
        shape: Name of a preset.
        device: A torch device for both roles.
        host: Address to listen on.
        port: 0 picks a free one.
        open: Allow an address that other machines reach. There is no authentication.
    """

    config: str | None = None
    model: str | None = None
    shape: str = "tiny"
    device: str = "cpu"
    host: str = "127.0.0.1"
    port: int = 7000
    open: bool = False


def local_options(options: ServeOptions) -> LocalOptions:
    """The embedded server's options.

    Raises:
        ValueError: `host` can be reached from elsewhere, and nobody said that this is meant.
        ConfigError: The config is wrong.
    """
    if options.host not in _LOOPBACK and not options.open:
        raise ValueError(
            f"{options.host} can be reached from other machines, and there is no authentication: "
            "whoever connects can train, generate and write checkpoints. Say --open if that is "
            "meant"
        )
    if options.config is not None:
        main = normalize_config(load_config(options.config))
        return LocalOptions.from_config(main, device=options.device)
    model = ModelOptions(path=options.model, shape=options.shape, device=options.device)
    return LocalOptions(trainer_model=model, sampler_model=replace(model))


def run_serve(options: ServeOptions, say: Callable[[str], None] = print) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        options: What to serve, and where.
        say: Gets a line when the server is ready, and one when it ends.
    """
    asyncio.run(_serve(options, local_options(options), say))


async def _serve(options: ServeOptions, local: LocalOptions, say: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    listener = listen(options.host, options.port)  # fails before a model is loaded
    backend = LocalTransport(local, timeout=math.inf)  # each client has a deadline of its own
    server = HttpServer(backend, listener=listener)
    try:
        starting = asyncio.ensure_future(backend.start())
        stopped = asyncio.ensure_future(stop.wait())
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return
        await starting
        await server.start()
        model = local.trainer_model
        say(f"serving {model.path or f'random:{model.shape}'} on {model.device} at {server.url}")
        await stopped
    finally:
        await server.close()
        await backend.shutdown()
        say("stopped")
