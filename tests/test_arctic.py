# SPDX-License-Identifier: Apache-2.0
"""The transport over an installed Arctic client: probing, config, ops, the golden calls."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import arctic_servers
import clients
import golden
import golden_calls
import http_servers
import test_client_config
from arctic_rl_c import ArcticRLClient, ConfigError, PayloadError, TransportUnavailableError
from arctic_rl_c.transports import http_errors
from arctic_rl_c.transports.arctic import ArcticTransport
from arctic_rl_c.transports.arctic_package import find_client
from arctic_rl_c.transports.base import Transport
from arctic_servers import FINAL, PAYLOAD, SEED, both, config, final_client, run, server

__all__ = ["both"]


# ---- probing -------------------------------------------------------------------------------------


def test_the_generation_that_the_config_is_of_is_taken(both: None) -> None:
    found = find_client("final")
    assert (found.name, found.generation) == ("arctic_platform.client", "final")
    assert str(found) == "arctic_platform.client 9.8 (final generation)"
    assert found.passed_over == (
        "arctic_training.rl: installed, first generation: for flat configs",
        "arctic_platform.rl: arctic_platform 9.8 has no such module",
    )
    found = find_client("seed")
    assert str(found) == "arctic_training.rl of unknown version (first generation)"
    assert (
        found.passed_over[0] == "arctic_platform.client: installed, arctic_training.rl comes first"
    )


def test_a_flat_config_goes_to_the_final_generation_where_it_is_alone() -> None:
    with arctic_servers.installed(FINAL):
        transport = ArcticTransport(config("seed"))
        assert transport.description == "arctic_platform.client 9.8 (final generation) over ray"
        assert transport.package.passed_over[0] == "arctic_training.rl: not installed"
        assert transport._inner_config.backend.colocate is True


def test_none_is_installed() -> None:
    with arctic_servers.installed(), pytest.raises(TransportUnavailableError) as caught:
        ArcticTransport(config("final"))
    text = str(caught.value)
    assert text.startswith("arctic: no Arctic client for a nested config was found (looked for ")
    assert "arctic_platform.client: not installed; arctic_training.rl: not installed, " in text
    assert "pip install 'arctic-platform[rl]'" in text
    assert "leave remote_backend.comms.transport away" in text
    assert caught.value.code == "ARL_ERR_UNAVAILABLE"


def test_the_first_generation_cannot_serve_a_nested_config() -> None:
    with arctic_servers.installed(SEED), pytest.raises(TransportUnavailableError) as caught:
        ArcticTransport(config("final"))
    assert "arctic_training.rl: installed, first generation: cannot serve a nested" in str(
        caught.value
    )


def test_an_import_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "arctic_platform"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "client.py").write_text("raise RuntimeError('no device\\nat all')\n")
    with arctic_servers.installed():
        monkeypatch.delitem(sys.modules, "arctic_platform")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(TransportUnavailableError) as caught:
            find_client("final")
        (package / "client.py").write_text("class ArcticRLClientConfig: pass\n")
        sys.modules.pop("arctic_platform.client", None)
        # A file of the same second and size would be taken for the compiled one.
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        with pytest.raises(TransportUnavailableError, match="has no create_arctic_rl_client"):
            find_client("final")
        (package / "__init__.py").write_text("import a_package_that_it_needs_  # more\n")
        arctic_servers.forget()
        with pytest.raises(TransportUnavailableError, match="importing arctic_platform failed"):
            find_client("final")
    assert "importing arctic_platform.client failed with RuntimeError: no device)" in str(
        caught.value
    ) or "importing arctic_platform.client failed with RuntimeError: no device;" in str(
        caught.value
    )


# ---- config --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", golden.CASES, ids=repr)
def test_the_client_is_given_the_recorded_config(both: None, case: golden.Case) -> None:
    def plain(value: Any) -> Any:
        if isinstance(value, arctic_servers.Config):
            return {key: plain(item) for key, item in value.given.items()}
        return value

    transport = ArcticTransport(case.config)
    wanted = test_client_config.plain(case.raw["client_config"])
    clients.same(
        test_client_config.sorted_keys(plain(transport._inner_config)),
        test_client_config.sorted_keys(wanted),
    )
    assert transport.serves_reference == (wanted["log_prob_gpus"] > 0)
    assert transport.owner and transport.jobs == {}


def test_a_url_means_a_server_that_runs(both: None) -> None:
    there = ArcticTransport(config("final", "http"), url="http://there:81")._inner_config
    assert (there.backend.host, there.backend.port) == ("there", 81)
    assert there.backend.launch_local_server is False
    there = ArcticTransport(config("seed", "http"), url="http://there")._inner_config
    assert (there.host, there.port, there.backend) == ("there", 80, "dss-platform")
    with pytest.raises(ConfigError, match=r"comms\.protocol is not http"):
        ArcticTransport(config("final"), url="http://there:81")
    for url in ("there:81", "http://there:x", "http://there/path", "https://there"):
        with pytest.raises(ConfigError, match="not of the form http://host:port"):
            ArcticTransport(config("final", "http"), url=url)


def test_the_clients_own_deadline_does_not_come_first(both: None) -> None:
    longer = ArcticTransport(config("final"), timeouts={"fwd_bwd": 7200.0})
    assert longer._inner_config.request_timeout == 7200.0
    assert "request_timeout" not in ArcticTransport(config("final"))._inner_config.given


def test_what_the_installed_client_refuses_is_named(
    both: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = final_client().TrainingConfig.FIELDS
    monkeypatch.delitem(fields, "low_memory")
    with pytest.raises(ConfigError) as caught:
        ArcticTransport(config("final"))
    assert str(caught.value) == (
        "arctic: arctic_platform.client 9.8 (final generation) refuses its config: low_memory: "
        "Extra inputs are not permitted"
    )
    monkeypatch.delattr(final_client(), "TrainingConfig")
    with pytest.raises(ConfigError, match="has no attribute 'TrainingConfig'"):
        ArcticTransport(config("final"))


# ---- ops -----------------------------------------------------------------------------------------


async def every_op(transport: ArcticTransport) -> None:
    assert isinstance(transport, Transport)
    found = await transport.fwd_no_grad(PAYLOAD)
    clients.same(found["batch"]["logprobs"], PAYLOAD["batch"]["input_ids"] * 0.5)
    await transport.fwd_no_grad(PAYLOAD, reference_model=True)
    assert (await transport.fwd_bwd(PAYLOAD))["metrics"]["loss"] == 0.5
    assert (await transport.step())["metrics"] == {"grad_norm": 1.0, "last_lr": 1e-6}
    assert await transport.generate(["a", "b"], {"n": 1}) == [{"token_ids": [1]}] * 2
    assert (await transport.sync_weights())["status"] == "ok"
    await transport.sleep_inference(2)
    await transport.wake_inference(["weights"])
    await transport.wake_inference()
    await transport.reset_prefix_cache()


#: What reaches the server for a sync, by the client's generation and protocol.
SYNCS = {
    ("final", "ray"): ["wake_inference", "sync_weights", "wake_inference", "reset_prefix_cache"],
    ("seed", "http"): ["wake_inference", "sync_weights", "wake_inference", "reset_prefix_cache"],
    # The server does all of it.
    ("seed", "ray"): ["sync_weights"],
}


@pytest.mark.parametrize(("version", "protocol"), SYNCS)
def test_every_op(both: None, version: str, protocol: str) -> None:
    if protocol == "http":
        arctic_servers.Server()
    run(every_op, config(version, protocol), url="http://x:1" if protocol == "http" else None)
    calls = server().backend.calls
    assert [call[0] for call in calls] == [
        "fwd_no_grad",
        "fwd_no_grad",
        "fwd_bwd",
        "step",
        "generate",
        *SYNCS[version, protocol],
        "sleep_inference",
        "wake_inference",
        "wake_inference",
        "reset_prefix_cache",
    ]
    assert [call[2] for call in calls[:2]] == [
        {"reference_model": False},
        {"reference_model": True},
    ]
    tags = [call[2]["tags"] for call in calls if call[0] == "wake_inference"]
    assert tags == [*([["weights"], ["kv_cache"]] if len(tags) == 4 else []), ["weights"], None]
    assert server().ended == ["training", "sampling", "log_prob"]


def test_over_http_with_the_final_generation(both: None) -> None:
    """Its session is ours, so that what the server says is kept; tensors go in frames."""
    state = arctic_servers.Server()
    double = http_servers.FinalServer()

    async def use(transport: ArcticTransport) -> None:
        clients.same(
            await transport.fwd_no_grad(PAYLOAD), {"job_id": 3, "batch": {}, "metrics": {}}
        )
        [item] = await transport.generate(["a"])
        assert item["logprobs"] == [{5: {"logprob": -0.5, "rank": 1}}, None]
        assert (await transport.sync_weights())["status"] == "ok"
        double.answers["/step"] = lambda: http_servers.detail(500, "grad_norm is nan")
        with pytest.raises(http_errors.HttpServerError, match="step: grad_norm is nan") as caught:
            await transport.step()
        assert caught.value.maybe_applied and "may or may not have been applied" in str(
            caught.value
        )
        assert caught.value.status == 500
        del double.jobs[1]
        with pytest.raises(http_errors.HttpRequestError, match="sleep_inference: Job 1 not found"):
            await transport.sleep_inference()

    for _ in range(3):
        double.initialize({"job_type": "any"})
    with http_servers.application(double.app()) as url:
        run(use, config("final", "http"), url=url)
    assert double.calls[0][0] == "/forward"
    assert double.calls[0][2]["meta"] == {"temperature": 0.7}
    syncs = [(path, body) for path, _, body in double.calls[2:6]]
    assert [path for path, _ in syncs] == [
        "/wake-inference",
        "/operation",
        "/wake-inference",
        "/operation",
    ]
    assert syncs[0][1] == ["weights"] and syncs[2][1] == ["kv_cache"]
    assert state.ended == ["training", "sampling", "log_prob"]


def test_checkpoints(both: None) -> None:
    async def use(transport: ArcticTransport) -> None:
        assert (await transport.save_checkpoint(path="/x", step=3, stage_info=None))["path"] == "/x"
        assert (await transport.load_checkpoint(path="/x"))["global_step"] == 3
        with pytest.raises(ConfigError, match=r"save_checkpoint: .* takes no colour"):
            await transport.save_checkpoint(colour="red")

    run(use, config("final"))
    assert server().backend.calls[0][2] == {"path": "/x", "step": 3, "save_total_limit": None}

    async def first(transport: ArcticTransport) -> None:
        await transport.save_checkpoint(path=None)
        with pytest.raises(ConfigError, match=r"save_checkpoint: arctic_training.rl .* no path"):
            await transport.save_checkpoint(path="/x", step=1)
        with pytest.raises(TransportUnavailableError, match=r"load_checkpoint: .* has no such op"):
            await transport.load_checkpoint()

    run(first, config("seed"))


def test_no_reference_job(both: None) -> None:
    async def use(transport: ArcticTransport) -> None:
        assert not transport.serves_reference and "log_prob" not in transport.jobs
        with pytest.raises(ConfigError, match="no log_prob job: set"):
            await transport.fwd_no_grad(PAYLOAD, reference_model=True)

    for version in ("final", "seed"):
        run(use, config(version, remote_backend__log_prob_gpus=0))


def test_flags_of_a_sync(both: None) -> None:
    """The final generation has them stored; the first one has no memory of them."""

    async def use(transport: ArcticTransport) -> None:
        await transport.sync_weights()
        await transport.sync_weights(cuda_ipc=False)

    off = {"cuda_ipc": False, "low_memory": False}
    for version, wanted in (
        ("final", [{}, {"cuda_ipc": False}]),
        ("seed", [{**off, "cuda_ipc": True}, off]),
    ):
        run(use, config(version))
        calls = server().backend.calls
        assert [call[2] for call in calls if call[0] == "sync_weights"] == wanted


def test_prompts_are_text(both: None) -> None:
    async def use(transport: ArcticTransport) -> None:
        assert not transport.accepts_token_ids
        with pytest.raises(PayloadError, match=r"generate: prompts\[1\] is of type list, and the"):
            await transport.generate(["a", [1, 2]])
        client = ArcticRLClient(transport, given, tokenizer=clients.Tokenizer())
        with pytest.warns(UserWarning, match="the server takes text only"):
            await client.generate([5, 6, 7])
        await transport.generate("one")

    given = config("final")
    run(use, given)
    assert [call[2]["prompts"] for call in server().backend.calls] == [["5 6 7"], ["one"]]


def test_routing_keys(both: None, recwarn: pytest.WarningsRecorder) -> None:
    async def use(transport: ArcticTransport) -> None:
        for _ in range(2):
            await transport.generate(["a"], routing_key="k")
        await transport.generate(["a"])
        await transport.generate(["a"], strict=True)

    def keys() -> list[Any]:
        return [(c[2].get("routing_key"), c[2].get("strict")) for c in server().backend.calls]

    run(use, config("final"))
    assert keys() == [("k", False), ("k", False), (None, False), (None, True)]
    assert [str(w.message) for w in recwarn] == [
        "generate: routing_key is sent, and the public server ignores it: prompts are routed by "
        "their own text (arctic_platform.client 9.8 (final generation) over ray)"
    ]
    recwarn.clear()
    run(use, config("seed"))
    assert keys() == [("k", True), ("k", True), (None, False), (None, False)]
    assert not recwarn
    arctic_servers.Server()
    run(use, config("seed", "http"), url="http://x:1")
    assert keys() == [(None, None)] * 4
    [warning] = recwarn
    assert "routing_key is left out: this client has no such keyword" in str(warning.message)


# ---- golden calls --------------------------------------------------------------------------------


def inner_class(case: golden.Case) -> type:
    if case.version == "final":
        return final_client().ArcticRLClient
    return importlib.import_module("arctic_training.rl.client").ArcticRLRayClient


def through(case: golden.Case) -> golden_calls.Through:
    """Let a transport be used: the calls of the inner client, and the result."""

    def run_spied(use: Callable[[ArcticTransport], Awaitable[Any]]) -> tuple[list[Any], Any]:
        with arctic_servers.spied(inner_class(case)) as calls:
            return calls, run(use, case.config)

    return run_spied


@pytest.mark.parametrize("name", golden_calls.LOG_PROBS)
@pytest.mark.parametrize("case", golden.CASES, ids=repr)
def test_golden_log_probs(both: None, case: golden.Case, name: str) -> None:
    if name == "ref_log_prob" and case.config["remote_backend"].get("log_prob_gpus", 1) == 0:
        with pytest.raises(ConfigError, match="log_prob_gpus"):
            golden_calls.check_log_prob(through(case), case, name, golden_calls.dense)
        return
    golden_calls.check_log_prob(through(case), case, name, golden_calls.dense)


@pytest.mark.parametrize("case", golden.CASES, ids=repr)
def test_golden_updates(both: None, case: golden.Case) -> None:
    golden_calls.check_update(through(case), case, golden_calls.dense)


@pytest.mark.parametrize("case", golden.CASES, ids=repr)
def test_golden_other_calls(both: None, case: golden.Case) -> None:
    calls, _ = through(case)(lambda t: golden_calls.sync_and_generate(t, case))
    clients.same(calls, case.result("other_calls"))
