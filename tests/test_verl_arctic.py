# SPDX-License-Identifier: Apache-2.0
"""The verl plug-in with `comms.transport=arctic`, over doubles of verl and of both clients."""

from __future__ import annotations

import asyncio
import importlib
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import arctic_servers
import clients
from arctic_rl_c import ConfigError
from arctic_servers import PACKAGES, config, server
from verl_doubles import PLUGIN, verl


@pytest.fixture(scope="module")
def plugin() -> Iterator[Any]:
    with verl("plugin"):
        # The loop that the plug-in keeps for all of a process is no residue of a test.
        importlib.import_module(f"{PLUGIN}.compat").LoopThread.get()
        yield importlib.import_module(f"{PLUGIN}.backend")


@pytest.fixture
def backend(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(plugin, "_load_tokenizer", lambda config: clients.Tokenizer())
    with arctic_servers.installed(*PACKAGES):
        yield plugin


def user_config(version: str, **paths: Any) -> dict[str, Any]:
    """As a user writes it: the flat form has no `comms` of its own."""
    return clients.changed(config(version, **paths), remote_backend__comms__transport="arctic")


@pytest.mark.parametrize("version", ["final", "seed"])
def test_a_run_goes_through_the_installed_client(
    backend: Any, capsys: pytest.CaptureFixture[str], version: str
) -> None:
    made = backend.ArcticBackend.from_config(user_config(version))
    name = "arctic_platform.client 9.8 (final" if version == "final" else "arctic_training.rl of un"
    line = capsys.readouterr().out
    assert line.startswith("arctic_rl_c: registered as 'arctic' with verl 0.0-plugin (plug-in form")
    assert f"; transport arctic, {name}" in line and line.endswith(" over ray\n")
    attached = pickle.loads(pickle.dumps(made))
    assert made.owner and not attached.owner

    async def work() -> None:
        with pytest.warns(UserWarning, match="the server takes text only"):
            assert await attached.generate([5, 6]) == [{"token_ids": [1]}]
        assert server().backend.calls[-1][2]["prompts"] == ["5 6"]
        await attached.update_weights()
        await attached.destroy()
        await attached.destroy()
        assert server().ended == []
        await made.sleep_inference()
        await made.destroy()
        assert server().ended == ["training", "sampling", "log_prob"]

    asyncio.run(work())


def test_a_url_goes_to_the_client(backend: Any) -> None:
    arctic_servers.Server()
    config = user_config("final", remote_backend__comms__protocol="http")
    config["remote_backend"]["comms"]["url"] = "http://there:81"
    made = backend.ArcticBackend.from_config(config)
    assert made.transport._inner_config.backend.host == "there"
    asyncio.run(made.destroy())
    config["remote_backend"]["comms"]["protocol"] = "ray"
    with pytest.raises(ConfigError, match=r"comms\.protocol is not http"):
        backend.ArcticBackend.from_config(config)


def test_another_transport_is_refused(backend: Any) -> None:
    config = user_config("final")
    config["remote_backend"]["comms"]["transport"] = "pigeon"
    with pytest.raises(ConfigError, match=r"comms\.transport is 'pigeon': it is arctic, for an"):
        backend.ArcticBackend.from_config(config)


def test_a_client_that_is_not_used_is_told_of(
    backend: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(
        "arctic_rl_c.transports.ray.RayTransport", lambda config, **_: made.append(config)
    )
    with caplog.at_level(logging.WARNING, "arctic_rl_c.integrations.verl"):
        backend._start_ray({"some": "config"}, backend.Reach())
    assert made == [{"some": "config"}]
    assert "set remote_backend.comms.transport=arctic" in caplog.text


def test_what_the_public_server_ignores_is_warned_about(
    backend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = user_config("final", actor_rollout_ref__actor__clip_ratio=0.3)
    with caplog.at_level(logging.WARNING, "arctic_rl_c.integrations.verl"):
        made = backend.ArcticBackend.from_config(config)
    asyncio.run(made.destroy())
    assert "clip_ratio" in caplog.text


def test_an_update_reaches_the_client(backend: Any) -> None:
    made = backend.ArcticBackend.from_config(user_config("final"))

    async def work() -> Any:
        data = clients.batch()
        update = made.update_actor(
            data, actor_config={"use_kl_loss": False}, pad_token_id=clients.PAD, rollout_n=2
        )
        result = await update
        await made.destroy()
        return result

    result = asyncio.run(work())
    assert result["metrics"]["grad_norm"] == pytest.approx(1.5)
    payloads = [call[1] for call in server().backend.calls if call[0] == "fwd_bwd"]
    assert [payload["batch"]["input_ids"].shape for payload in payloads] == [torch.Size([4, 7])] * 2
