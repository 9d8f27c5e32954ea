# SPDX-License-Identifier: Apache-2.0
"""The embedded server as a whole: client to trainer and sampler, and what happens when one dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from arctic_rl_c import (
    ArcticRLClient,
    ConfigError,
    PeerLostError,
    TornWeightsError,
    TransportUnavailableError,
    WeightSyncError,
    normalize_config,
)
from arctic_rl_c.local.grpo import group_advantages, make_data, response_log_probs
from arctic_rl_c.local.options import LocalOptions, ModelOptions, SamplerOptions, TrainerOptions
from arctic_rl_c.local.process import RoleProcess
from arctic_rl_c.local.server import EmbeddedServer
from arctic_rl_c.transports import Transport
from arctic_rl_c.transports.local import LocalTransport
from test_local_process import until
from test_local_trainer import log_prob_payload, update_payload

PROMPT = [[4, 13, 5, 16]]


def micro_options(**changes: Any) -> LocalOptions:
    model = ModelOptions(shape="micro", seed=5, threads=1)
    options = LocalOptions(
        trainer_model=model,
        sampler_model=ModelOptions(shape="micro", seed=5, threads=1),
        trainer=TrainerOptions(lr=1e-2),
        sampler=SamplerOptions(),
        sync_timeout=30.0,
    )
    for name, value in changes.items():
        setattr(options, name, value)
    return options


@pytest.fixture(scope="module")
def server() -> Iterator[LocalTransport]:
    """One server for the tests that leave it as it was."""
    transport = LocalTransport(micro_options())
    asyncio.run(transport.start())
    yield transport
    transport.close()


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        return await asyncio.wait_for(work(), 120)

    return asyncio.run(main())


def stop(pid: int | None) -> None:
    """Stop a process and wait until it is: what is asked of it now stays unanswered."""
    process = psutil.Process(pid)
    process.suspend()
    until(lambda: process.status() == psutil.STATUS_STOPPED, "the process to stop")


# -- the surface ---------------------------------------------------------------------------------


def test_it_is_a_transport(server: LocalTransport) -> None:
    assert isinstance(server, Transport)
    assert (server.name, server.accepts_token_ids) == ("local", True)
    assert server.accepts_routing_key and server.accepts_strict and server.serves_reference
    handle = server.reconnect_handle()
    assert handle["owner_pid"] == os.getpid() and handle["trainer_pid"] == server.pids["trainer"]
    assert pickle.loads(pickle.dumps(handle)) == handle
    with pytest.raises(TypeError, match="use the ray or http transport"):
        pickle.dumps(server)


def test_train_sync_generate(server: LocalTransport) -> None:
    async def work() -> None:
        before = await server.fwd_no_grad(log_prob_payload())
        assert before["batch"]["logprobs"].shape == (4, 11)
        out = await server.fwd_bwd(update_payload())
        assert {"loss", "actor/pg_loss", "actor/ppo_kl"} <= set(out["metrics"])
        step = await server.step()
        assert set(step["metrics"]) == {"last_lr", "grad_norm"}
        digests = await server.weights_digests()
        assert digests["trainer"] != digests["sampler"]
        first = await server.sync_weights()
        digests = await server.weights_digests()
        assert digests["trainer"] == digests["sampler"] == first["digest"]
        assert first["receiver"]["transport"] == "host_shm" and first["status"] == "ok"
        line = "[weight-sync names validated] context=host_shm sender=24 expected=24"
        assert first["receiver"]["names_line"] == line
        result = (await server.generate(PROMPT, {"max_tokens": 3}))[0]
        assert result["weight_version_start"] == first["version"]
        assert (await server.sync_weights())["version"] == first["version"] + 1
        assert result["prompt_token_ids"] == PROMPT[0]
        reference = await server.fwd_no_grad(log_prob_payload(), reference_model=True)
        assert torch.equal(reference["batch"]["logprobs"], before["batch"]["logprobs"])

    run(work)


def test_sync_wakes_a_sleeping_sampler(server: LocalTransport) -> None:
    async def work() -> None:
        expected = await server.generate(PROMPT, {"max_tokens": 5})
        for level in (1, 2):
            slept = await server.sleep_inference(level)
            assert slept["sampling"]["status"] == "sleeping"
            with pytest.raises(RuntimeError, match="Model is sleeping"):
                await server.generate(PROMPT)
            await server.sync_weights()
            again = await server.generate(PROMPT, {"max_tokens": 5})
            assert again[0]["token_ids"] == expected[0]["token_ids"]
            assert again[0]["prefix_cache_len"] == 0  # emptied by the sync
        assert (await server.wake_inference())["sampling"]["status"] == "already_ready"
        await server.generate(PROMPT)
        assert (await server.reset_prefix_cache())["entries"] == 1

    run(work)


def test_deep_sleep_and_waking_by_hand(server: LocalTransport) -> None:
    async def work() -> None:
        await server.sleep_inference(2)
        await server.wake_inference(["weights"])
        await server.wake_inference(["kv_cache"])
        with pytest.raises(TornWeightsError, match="sleep level 2 dropped the weights"):
            await server.generate(PROMPT)
        await server.sync_weights()
        assert await server.generate(PROMPT)

    run(work)


def test_what_cannot_be_had_is_said_and_harms_nothing(server: LocalTransport) -> None:
    async def work() -> None:
        with pytest.raises(TransportUnavailableError, match="CPU memory"):
            await server.sync_weights(cuda_ipc=True)
        with pytest.raises(ValueError, match="low_memory applies to cuda_ipc only"):
            await server.sync_weights(low_memory=True)
        for tags in ("weights", True, [[]], [None]):
            with pytest.raises(TypeError, match="tags is a list of text or None, found"):
                await server.wake_inference(tags)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="list of these, found NoneType"):
            await server.generate(None)  # type: ignore[arg-type]
        await server.sleep_inference(1)
        with pytest.raises(TransportUnavailableError):
            await server.sync_weights(cuda_ipc=True)
        assert await server.generate(PROMPT)  # a sync that failed leaves nothing asleep
        await server.sync_weights()

    run(work)


def test_routing_keys(server: LocalTransport) -> None:
    async def work() -> None:
        params = {"max_tokens": 2}
        plain = await server.generate(PROMPT * 2, params)
        keyed = await server.generate(PROMPT * 2, params, routing_key=["a", None], strict=True)
        assert [r["token_ids"] for r in keyed] == [r["token_ids"] for r in plain]
        assert await server.generate(PROMPT[0], params, routing_key=["a"])
        with pytest.raises(ValueError, match="1 routing keys for 2 prompts"):
            await server.generate(PROMPT * 2, params, routing_key=["a"])

    run(work)


def test_checkpoints(server: LocalTransport, tmp_path: Path) -> None:
    async def work() -> None:
        saved = await server.save_checkpoint(path=str(tmp_path), step=4)
        assert saved["global_step"] == 4
        digest = (await server.weights_digests())["trainer"]
        await server.fwd_bwd(update_payload())
        await server.step()
        assert (await server.weights_digests())["trainer"] != digest
        loaded = await server.load_checkpoint(path=str(tmp_path))
        assert loaded["global_step"] == 4
        assert (await server.weights_digests())["trainer"] == digest

    run(work)


def test_describe(server: LocalTransport) -> None:
    facts = run(server.describe)
    assert facts["trainer"]["tensors"] == facts["sampler"]["tensors"] == 24
    assert facts["sampler"]["max_model_len"] == 128


# -- time and order ------------------------------------------------------------------------------


def test_roles_work_at_the_same_time_and_the_loop_is_free(server: LocalTransport) -> None:
    async def work() -> None:
        stop(server.pids["trainer"])
        try:
            update = asyncio.ensure_future(server.fwd_no_grad(log_prob_payload()))
            assert await server.generate(PROMPT)  # while the trainer does nothing
            assert not update.done()
        finally:
            os.kill(server.pids["trainer"] or 0, signal.SIGCONT)
        assert (await update)["batch"]

    run(work)


def test_cancelling_leaves_the_server_usable(server: LocalTransport) -> None:
    async def work() -> None:
        stop(server.pids["sampler"])
        running = asyncio.ensure_future(server.generate(PROMPT))
        waiting = asyncio.ensure_future(server.sleep_inference(2))
        await asyncio.sleep(0)
        until(lambda: server._roles[1]._current is not None, "the request to be sent")
        running.cancel()
        waiting.cancel()
        for task in (running, waiting):
            with pytest.raises(asyncio.CancelledError):
                await task
        os.kill(server.pids["sampler"] or 0, signal.SIGCONT)
        assert await server.generate(PROMPT)  # the sleep was never sent

    run(work)


def test_a_cancelled_sync_goes_on_to_its_end(server: LocalTransport) -> None:
    async def work() -> None:
        await server.fwd_bwd(update_payload())
        await server.step()
        stop(server.pids["sampler"])
        sync = asyncio.ensure_future(server.sync_weights())
        await asyncio.sleep(0)
        sync.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sync
        os.kill(server.pids["sampler"] or 0, signal.SIGCONT)
        assert await server.generate(PROMPT)  # waits for the sync
        digests = await server.weights_digests()
        assert digests["trainer"] == digests["sampler"]

    run(work)


def test_syncs_and_ops_from_two_loops(server: LocalTransport) -> None:
    results: list[Any] = []

    async def work() -> None:
        for _ in range(4):
            sync, texts = await asyncio.gather(server.sync_weights(), server.generate(PROMPT))
            results.append((sync["version"], texts[0]["generation_len"]))

    threads = [threading.Thread(target=run, args=(work,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    versions = [version for version, _ in results]
    assert len(versions) == 8 and len(set(versions)) == 8


# -- death ---------------------------------------------------------------------------------------

OPS: dict[str, tuple[str, Callable[[LocalTransport], Awaitable[Any]]]] = {
    "fwd_no_grad": ("trainer", lambda t: t.fwd_no_grad(log_prob_payload())),
    "fwd_bwd": ("trainer", lambda t: t.fwd_bwd(update_payload())),
    "step": ("trainer", lambda t: t.step()),
    "save_checkpoint": ("trainer", lambda t: t.save_checkpoint(path="/dev/null/no")),
    "load_checkpoint": ("trainer", lambda t: t.load_checkpoint(path="/dev/null/no")),
    "generate": ("sampler", lambda t: t.generate(PROMPT)),
    "sleep_inference": ("sampler", lambda t: t.sleep_inference()),
    "wake_inference": ("sampler", lambda t: t.wake_inference()),
    "reset_prefix_cache": ("sampler", lambda t: t.reset_prefix_cache()),
}


@contextlib.asynccontextmanager
async def fake_server(**seeds: int) -> AsyncIterator[LocalTransport]:
    """A transport whose processes hold no language model; with seeds, a layer to sync."""
    transport = LocalTransport.__new__(LocalTransport)
    transport.options = micro_options()
    transport._roles = tuple(
        RoleProcess(role, {"seed": seeds[role]} if role in seeds else {}, factory="fake_role:build")
        for role in ("trainer", "sampler")
    )
    EmbeddedServer.__init__(transport, *transport._roles, sync_timeout=30.0)
    async with transport:
        yield transport


@pytest.mark.parametrize("op", OPS)
def test_death_during_an_op(op: str) -> None:
    role, call = OPS[op]

    async def work() -> None:
        async with fake_server() as transport:
            stop(transport.pids[role])
            task = asyncio.ensure_future(call(transport))
            await asyncio.sleep(0)
            os.kill(transport.pids[role] or 0, signal.SIGKILL)
            with pytest.raises(PeerLostError, match=f"{role} .* killed by SIGKILL") as caught:
                await task
            assert caught.value.role == role

    run(work)


@pytest.mark.parametrize("role", ["trainer", "sampler"])
@pytest.mark.parametrize("phase", ["before", "during"])
def test_death_in_a_sync(role: str, phase: str) -> None:
    """The error names who died; the one that is left stays usable."""

    async def work() -> None:
        async with fake_server(trainer=1, sampler=2) as transport:
            await transport.sync_weights()
            victim = transport._roles[("trainer", "sampler").index(role)]
            other = transport._roles[("sampler", "trainer").index(role)]
            fatal = {
                "before": ("offer_weights", "wake"),
                "during": ("serve_weights", "pull_weights"),
            }
            submit = victim.submit

            def submit_and_kill(op: str, **arguments: Any) -> Future[Any]:
                if op not in fatal[phase]:
                    return submit(op, **arguments)
                del victim.submit
                stop(victim.pid)
                future = submit(op, **arguments)
                until(lambda: victim._current is not None, "the request to be sent")
                os.kill(victim.pid or 0, signal.SIGKILL)
                return future

            victim.submit = submit_and_kill  # type: ignore[method-assign]
            with pytest.raises(PeerLostError):
                await transport.sync_weights()
            assert victim.submit("weights_digest").exception(60).role == role
            assert other.submit("weights_digest").result(60)["digest"]
            if role == "trainer" and phase == "before":
                assert (await transport.generate(PROMPT))[0]["version"] == 1

    run(work)


def test_shutdown_ends_everything() -> None:
    async def work() -> None:
        async with fake_server() as transport:
            pids = [pid for pid in transport.pids.values() if pid]
            await transport.shutdown()
            await transport.shutdown()
            assert len(pids) == 2 and not any(psutil.pid_exists(pid) for pid in pids)
            for call in (transport.step(), transport.sync_weights(), transport.generate(PROMPT)):
                with pytest.raises(PeerLostError, match="was shut down"):
                    await call

    run(work)


def test_a_start_that_fails_leaves_no_process() -> None:
    async def work() -> None:
        roles = (
            RoleProcess("trainer", {"refuse": "no such model"}, factory="fake_role:build"),
            RoleProcess("sampler", {}, factory="fake_role:build"),
        )
        transport = LocalTransport.__new__(LocalTransport)
        transport.options, transport._roles = micro_options(), roles
        EmbeddedServer.__init__(transport, *roles)
        with pytest.raises(ValueError, match="no such model"):
            await transport.start()
        assert not any(psutil.pid_exists(pid) for pid in transport.pids.values() if pid)

    run(work)


def test_a_shape_that_does_not_exist_starts_nothing() -> None:
    options = micro_options()
    options.trainer_model.shape = "vast"
    with pytest.raises(ConfigError, match="shape 'vast' is not one of micro, tiny"):
        LocalTransport(options)


# -- a sync that fails, step by step, over roles that are told to ---------------------------------


class ScriptedRole:
    """Answers at once; fails the ops it is told to."""

    def __init__(self, role: str, log: list[str], failing: dict[str, Exception]) -> None:
        self.role, self._log, self._failing = role, log, failing
        self.pid, self.current = None, None

    def submit(self, op: str, **arguments: Any) -> Future[Any]:
        self._log.append(f"{self.role}.{op}" + "".join(arguments.get("tags") or ()))
        future: Future[Any] = Future()
        if op in self._failing:
            future.set_exception(self._failing[op])
        else:
            answers = {
                "offer_weights": {"offer": b"", "version": 1},
                "weights_digest": {"digest": self._failing.get("digest", "same")},
            }
            future.set_result(answers.get(op, {}))
        return future

    def interrupt(self, op: str) -> None:
        self._log.append(f"{self.role}!{op}")


def scripted(**failing: Any) -> tuple[EmbeddedServer, list[str]]:
    log: list[str] = []
    trainer = ScriptedRole("trainer", log, failing.get("trainer", {}))
    sampler = ScriptedRole("sampler", log, failing.get("sampler", {}))
    return EmbeddedServer(trainer, sampler), log


def test_the_order_of_a_sync() -> None:
    server, log = scripted()
    run(server.sync_weights)
    server.close()
    assert log == [
        "sampler.wakeweights",
        "trainer.offer_weights",
        "trainer.serve_weights",
        "sampler.pull_weights",
        "trainer.weights_digest",
        "sampler.weights_digest",
        "trainer.release_weights",
        "sampler.wakekv_cache",
        "sampler.reset_prefix_cache",
    ]


@pytest.mark.parametrize(
    ("role", "op"),
    [
        ("sampler", "wake"),
        ("trainer", "offer_weights"),
        ("trainer", "serve_weights"),
        ("sampler", "pull_weights"),
        ("sampler", "weights_digest"),
    ],
)
def test_a_failed_sync_is_undone(role: str, op: str) -> None:
    first = WeightSyncError("the first error")
    server, log = scripted(**{role: {op: first}})
    with pytest.raises(WeightSyncError, match="the first error"):
        run(server.sync_weights)
    server.close()
    assert log[-3:] == ["trainer.release_weights", "sampler.wake", "sampler.reset_prefix_cache"]


def test_digests_that_differ_mark_the_weights_torn() -> None:
    server, log = scripted(sampler={"digest": "other"})
    with pytest.raises(WeightSyncError, match="digest other, the trainer's same"):
        run(server.sync_weights)
    server.close()
    assert "sampler.mark_torn" in log


# -- through the client --------------------------------------------------------------------------


def main_config(generation: str) -> dict[str, Any]:
    block: dict[str, Any] = {"train": {"zorro_train": {"enable": False}}}
    if generation == "flat":
        block = {"zero_optimization": {"stage": 0}, "comm_protocol": "ray"}
    return {
        "remote_backend": {"log_prob_gpus": 1, **block},
        "actor_rollout_ref": {
            "model": {"path": "random:micro", "enable_gradient_checkpointing": False},
            "actor": {"ppo_mini_batch_size": 2, "optim": {"lr": 1e-2}},
            "rollout": {"n": 2},
        },
        "data": {"train_batch_size": 4, "max_prompt_length": 6, "max_response_length": 5},
    }


@pytest.mark.parametrize("generation", ["flat", "nested"])
def test_the_client_drives_it(server: LocalTransport, generation: str, tmp_path: Path) -> None:
    config = normalize_config(main_config(generation))

    async def work() -> None:
        client = ArcticRLClient(server, config, temperature_in_log_prob=True, owner=False)
        before = (await server.describe())["trainer"]["global_step"]
        prompts = [[4, 13, 5, 16], [5, 13, 5, 16], [3, 16], [9, 9, 9]]
        prompts = [p for p in prompts for _ in range(2)]
        params = {"temperature": 1.0, "max_tokens": 5, "seed": 3}
        await client.sync_weights()
        results = await client.generate(prompts, params, routing_key="group")
        data = make_data(
            prompts,
            [r["token_ids"] for r in results],
            prompt_width=6,
            response_width=5,
            pad_token_id=0,
            temperature=1.0,
        )
        common = {"pad_token_id": 0, "rollout_n": 2}
        policy, reference = [
            (await client.compute_log_prob(data, ref=ref, calculate_entropy=not ref, **common))[
                "model_output"
            ]
            for ref in (False, True)
        ]
        assert policy["log_probs"].shape == reference["log_probs"].shape == (8, 11)
        assert "entropy" in policy and "entropy" not in reference
        mask = data["response_mask"]
        data["old_log_probs"] = response_log_probs(policy["log_probs"], mask, aligned=False)
        advantages = group_advantages([float(i) for i in range(8)], 2, scale_by_std=True)
        data["advantages"] = advantages[:, None] * mask
        data["global_batch_size"] = 8
        actor = {"entropy_coeff": 0.01, "rollout_n": 2, "calculate_entropy": True}
        update = await client.update_actor(data, actor_config=actor, **common)
        assert update["global_token_num"] == data["attention_mask"].sum(1).tolist()
        assert update["metrics"]["lr"] == 1e-2 and update["metrics"]["grad_norm"] > 0
        # The first of the steps is on-policy: its ratios are 1.
        limit = 1e-6 if generation == "flat" else 0.5
        assert abs(update["metrics"]["actor/ppo_kl"]) < limit
        steps = (await server.describe())["trainer"]["global_step"] - before
        assert steps == (1 if generation == "flat" else 2)
        await client.save_checkpoint(path=str(tmp_path))
        synced = await client.sync_weights()
        digests = await server.weights_digests()
        assert digests["trainer"] == digests["sampler"] == synced["digest"]
        await client.destroy()
        assert server._roles[0].alive  # not the client's to end

    run(work)


# -- options from a config -----------------------------------------------------------------------


def test_options_follow_the_config() -> None:
    config = main_config("nested")
    config["actor_rollout_ref"]["actor"]["optim"].update(
        lr=2e-3,
        betas=[0.8, 0.9],
        weight_decay=0.1,
        lr_warmup_steps_ratio=0.25,
        lr_scheduler_type="cosine",
        total_training_steps=10,
        min_lr_ratio=0.1,
    )
    config["actor_rollout_ref"]["actor"].update(grad_clip=0.5, ppo_epochs=3)
    config["remote_backend"]["weight_sync"] = {"cuda_ipc": True, "low_memory": True}
    config["trainer"] = {"default_local_dir": "somewhere"}
    options = LocalOptions.from_config(normalize_config(config))
    assert (options.cuda_ipc, options.low_memory) == (True, True)
    assert options.trainer_model.shape == "micro" and options.trainer_model.path is None
    assert options.sampler.max_model_len == 11
    trainer = options.trainer
    assert (trainer.lr, trainer.betas, trainer.weight_decay) == (2e-3, (0.8, 0.9), 0.1)
    assert trainer.gradient_clipping == 0.5 and trainer.checkpoint_path == "somewhere"
    assert trainer.scheduler == {
        "type": "WarmupCosineLR",
        "params": {
            "total_num_steps": 60,
            "warmup_num_steps": 15,
            "warmup_min_ratio": 0.0,
            "cos_min_ratio": 0.1,
            "warmup_type": "linear",
        },
    }
    config["actor_rollout_ref"]["actor"]["optim"]["lr_scheduler_type"] = "constant"
    config["actor_rollout_ref"]["model"]["path"] = "/models/x"
    options = LocalOptions.from_config(normalize_config(config))
    assert options.trainer_model.path == "/models/x"
    assert options.trainer.scheduler is not None
    assert options.trainer.scheduler["type"] == "WarmupLR"
    assert options.trainer.scheduler["params"]["warmup_num_steps"] == 15


def test_options_refuse_half_a_config() -> None:
    with pytest.raises(ConfigError, match=r"model\.path is missing"):
        LocalOptions.from_config({})
    with pytest.raises(ConfigError, match="remote_backend must be a mapping, found int"):
        LocalOptions.from_config({"remote_backend": 3})
    config = normalize_config(main_config("nested"))
    config["actor_rollout_ref"]["actor"]["optim"]["lr_scheduler_type"] = "cosine"
    with pytest.raises(ConfigError, match="its horizon is unknown"):
        LocalOptions.from_config(config)


# -- several samplers ------------------------------------------------------------------------------


def several(**failing: dict[str, Any]) -> tuple[EmbeddedServer, list[str]]:
    log: list[str] = []
    names = ("trainer", "sampler-0", "sampler-1")
    trainer, *samplers = (
        ScriptedRole(name, log, failing.get(name.replace("-", "_"), {})) for name in names
    )
    return EmbeddedServer(trainer, samplers), log


def test_one_offer_serves_all_samplers() -> None:
    server, log = several()
    result = run(server.sync_weights)
    server.close()
    assert result["receivers"] == [{}, {}] and result["receiver"] == {}
    pulls = [entry for entry in log if "serve" in entry or "pull" in entry or "offer" in entry]
    assert pulls == [
        "trainer.offer_weights",
        "trainer.serve_weights",
        "sampler-0.pull_weights",
        "sampler-1.pull_weights",
    ]


def test_a_sync_that_reaches_some_leaves_none_to_generate() -> None:
    error = WeightSyncError("no room")
    server, log = several(sampler_1={"pull_weights": error})
    with pytest.raises(WeightSyncError, match="no room"):
        run(server.sync_weights)
    server.close()
    assert log.index("sampler-0.mark_torn") < log.index("trainer.release_weights")
    assert "sampler-1.mark_torn" in log


def test_a_sync_that_reaches_nobody_leaves_the_old_weights() -> None:
    error = {"pull_weights": WeightSyncError("no room")}
    server, log = several(sampler_0=error, sampler_1=error)
    with pytest.raises(WeightSyncError, match="no room"):
        run(server.sync_weights)
    server.close()
    assert not any("mark_torn" in entry for entry in log)


def test_the_role_that_has_gone_is_the_reason() -> None:
    gone = PeerLostError("the sampler-1 died")
    gone.role = "sampler-1"  # type: ignore[attr-defined]
    felt = PeerLostError("a receiver has gone")
    server, _ = several(trainer={"serve_weights": felt}, sampler_1={"pull_weights": gone})
    with pytest.raises(PeerLostError, match="the sampler-1 died"):
        run(server.sync_weights)
    server.close()


def test_a_digest_that_differs_stops_all_samplers() -> None:
    server, log = several(sampler_1={"digest": "other"})  # type: ignore[dict-item]
    with pytest.raises(WeightSyncError, match="the sampler-1's weights have the digest other"):
        run(server.sync_weights)
    server.close()
    assert {"sampler-0.mark_torn", "sampler-1.mark_torn"} <= set(log)
