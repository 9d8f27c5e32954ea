# SPDX-License-Identifier: Apache-2.0
"""The embedded server over HTTP: real models, real processes, and the command that serves them."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

import clients
import http_servers
from arctic_rl_c import ConfigError, PayloadError, PeerLostError
from arctic_rl_c.local.options import LocalOptions, ModelOptions, SamplerOptions
from arctic_rl_c.local.serve import ServeOptions, local_options
from arctic_rl_c.transports.http import HttpTransport
from arctic_rl_c.transports.local import LocalTransport
from test_http import with_transport
from test_local_trainer import log_prob_payload, update_payload

PROMPT = [4, 13, 5, 16]


@pytest.fixture(scope="module")
def embedded() -> Iterator[tuple[LocalTransport, str]]:
    """Both roles, behind HTTP. Starting them takes longest; the last test here ends one."""
    model = ModelOptions(shape="micro", seed=5, threads=1)
    backend = LocalTransport(
        LocalOptions(
            trainer_model=model,
            sampler_model=ModelOptions(shape="micro", seed=5, threads=1),
            sampler=SamplerOptions(load_format="dummy"),
        )
    )
    try:
        asyncio.run(backend.start())  # what it opens later would look like a test's leftovers
        with http_servers.serving(backend) as server:
            yield backend, server.url
    finally:
        backend.close()


def test_a_training_step(embedded: tuple[LocalTransport, str], tmp_path: Path) -> None:
    backend, url = embedded

    async def use(transport: HttpTransport) -> None:
        assert transport.accepts_token_ids
        # The sampler began with other weights, and says so.
        with pytest.raises(RuntimeError, match="dummy weights"):
            await transport.generate([PROMPT])
        before = await transport.fwd_no_grad(log_prob_payload())
        reference = await transport.fwd_no_grad(log_prob_payload(), reference_model=True)
        assert torch.equal(before["batch"]["logprobs"], reference["batch"]["logprobs"])
        assert before["batch"]["entropy"].shape == before["batch"]["logprobs"].shape
        loss = (await transport.fwd_bwd(update_payload()))["metrics"]["loss"]
        metrics = (await transport.step())["metrics"]
        assert isinstance(loss, float)
        assert metrics["grad_norm"] > 0
        after = await transport.fwd_no_grad(log_prob_payload())
        assert not torch.equal(before["batch"]["logprobs"], after["batch"]["logprobs"])
        assert (await transport.sync_weights())["status"] == "ok"
        assert len(set((await backend.weights_digests()).values())) == 1
        (item,) = await transport.generate([PROMPT], {"max_tokens": 3, "logprobs": 1})
        assert item["prompt_token_ids"] == PROMPT
        assert all(isinstance(token, int) for found in item["logprobs"] for token in found)
        saved = await transport.save_checkpoint(path=str(tmp_path), step=1)
        assert (await transport.load_checkpoint(path=str(tmp_path)))["global_step"] == 1
        assert Path(saved["path"]).is_dir()

    with_transport(url, use)


def test_errors_of_the_roles_come_through(embedded: tuple[LocalTransport, str]) -> None:
    backend, url = embedded

    async def use(transport: HttpTransport) -> None:
        payload = update_payload()
        payload["batch"]["advantages"] = payload["batch"]["advantages"][:1]
        with pytest.raises(PayloadError):
            await transport.fwd_bwd(payload)
        with pytest.raises(RuntimeError, match="step without a forward_backward"):
            await transport.step()
        psutil.Process(backend.pids["trainer"]).kill()
        said = r"trainer \(pid \d+\) died .* killed by SIGKILL"
        with pytest.raises(PeerLostError, match=said):
            await transport.fwd_bwd(update_payload())

    with_transport(url, use)


# ---- the command ---------------------------------------------------------------------------------


def serve(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "arctic_rl_c", "serve", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_line(process: subprocess.Popen[str]) -> str:
    async def read() -> str:
        assert process.stdout is not None
        return await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), 120)

    return asyncio.run(read())


def test_the_command_serves_until_it_is_told_to_stop() -> None:
    with serve("--shape", "micro", "--port", "0") as process:
        try:
            said = read_line(process)
            assert said.startswith("serving random:micro on cpu at http://127.0.0.1:")
            children = psutil.Process(process.pid).children()
            assert len(children) == 2
            with_transport(said.split()[-1], lambda t: t.generate([PROMPT], {"max_tokens": 2}))
            with serve("--port", said.split(":")[-1].strip()) as second:
                _, error = second.communicate(timeout=120)
                assert second.returncode == 1
                assert "cannot listen on 127.0.0.1" in error
            process.send_signal(signal.SIGINT)
            rest, error = process.communicate(timeout=120)
            assert (process.returncode, rest, error) == (0, "stopped\n", "")
            assert not any(child.is_running() for child in children)
        finally:
            process.kill()


def test_a_config_can_be_served(tmp_path: Path) -> None:
    config = clients.config(actor_rollout_ref__model__path="random:micro")
    yaml = tmp_path / "run.yaml"
    yaml.write_text(json.dumps(config))  # JSON is YAML
    options = local_options(ServeOptions(config=str(yaml)))
    assert options.trainer_model.shape == "micro"
    assert options.sampler.max_model_len == (
        config["data"]["max_prompt_length"] + config["data"]["max_response_length"]
    )


def test_what_others_can_reach_must_be_meant() -> None:
    with pytest.raises(ValueError, match="there is no authentication"):
        local_options(ServeOptions(host="0.0.0.0"))
    assert local_options(ServeOptions(host="0.0.0.0", open=True)).trainer_model.shape == "tiny"
    with pytest.raises((ConfigError, OSError)):
        local_options(ServeOptions(config="/nowhere.yaml"))
