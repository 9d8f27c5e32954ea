# SPDX-License-Identifier: Apache-2.0
"""The ray transport over a double of Ray whose actors are threads of this process.

`test_ray_cluster.py` has what only a real cluster can show.
"""

from __future__ import annotations

import asyncio
import builtins
import importlib
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from arctic_rl_c import (
    ClosedError,
    ConfigError,
    PayloadError,
    PeerLostError,
    TransportUnavailableError,
    WrongProcessError,
)
from arctic_rl_c.local.options import LocalOptions, ModelOptions, TrainerOptions
from arctic_rl_c.transports import Transport
from arctic_rl_c.transports.ray import RayTransport
from arctic_rl_c.transports.ray_actors import RayRole
from arctic_rl_c.transports.ray_data import PackedTensor, pack, unpack
from ray_doubles import ray
from test_golden_transports import RecordingRay, through_one
from test_local_trainer import log_prob_payload, update_payload

__all__ = ["ray"]


def settled(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def options(**trainer: Any) -> LocalOptions:
    model = ModelOptions(shape="micro", seed=5)
    return LocalOptions(model, model, TrainerOptions(lr=1e-2, **trainer), weight_transport=None)


@pytest.fixture(scope="module")
def server(ray: Any) -> Iterator[RayTransport]:
    transport = RayTransport(options())
    asyncio.run(transport.pids())
    yield transport
    asyncio.run(transport.shutdown())


def test_train_and_generate_by_one_who_is_attached(server: RayTransport) -> None:
    assert isinstance(server, Transport) and server.owner
    attached = pickle.loads(pickle.dumps(server))
    assert not attached.owner and attached.serves_reference

    async def work() -> None:
        answer = await attached.fwd_no_grad(log_prob_payload())
        assert answer["batch"]["logprobs"].dtype == torch.float32
        reference = await attached.fwd_no_grad(log_prob_payload(), reference_model=True)
        assert answer["batch"]["logprobs"].shape == reference["batch"]["logprobs"].shape
        update = await attached.fwd_bwd(update_payload())
        assert "loss" in update["metrics"]
        stepped = await attached.step()
        assert stepped["metrics"]["grad_norm"] > 0
        with pytest.raises(RuntimeError, match="step without a forward_backward") as caught:
            await attached.step()
        assert "Traceback" in str(caught.value.__cause__)
        [item] = await attached.generate([[4, 13]], {"max_tokens": 2}, routing_key="group")
        assert item["prompt_token_ids"] == [4, 13]
        await attached.sleep_inference(1)
        with pytest.raises(RuntimeError, match="sleep"):
            await attached.generate([[4]], {"max_tokens": 1})
        await attached.wake_inference(["weights", "kv_cache"])
        assert (await attached.reset_prefix_cache())["status"] == "ok"
        assert set(await attached.describe()) == {"trainer", "sampler"}
        await attached.shutdown()
        await attached.detach()
        with pytest.raises(ClosedError, match="step: this transport was shut down"):
            await attached.step()

    asyncio.run(work())


def test_checkpoints_travel(server: RayTransport, tmp_path: Path) -> None:
    async def work() -> None:
        saved = await server.save_checkpoint(path=str(tmp_path), step=3)
        assert saved["global_step"] == 3
        assert (await server.load_checkpoint(path=str(tmp_path)))["global_step"] == 3
        digests = await server.weights_digests()
        assert set(digests) == {"trainer", "sampler"}

    asyncio.run(work())


def test_the_loop_stays_free_while_an_op_runs(server: RayTransport) -> None:
    async def work() -> None:
        running = asyncio.create_task(server.fwd_no_grad(log_prob_payload()))
        turns = 0
        while not running.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns > 1

    asyncio.run(work())


def test_a_large_payload_is_copied_off_the_loop(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is called after it is sent after it; what is cancelled meanwhile never is."""
    go_on, put = threading.Event(), ray.put
    monkeypatch.setattr(ray, "put", lambda value: (go_on.wait(60), put(value))[1])
    transport = RecordingRay(options())

    def large(number: int) -> dict[str, Any]:
        ids = torch.full((512, 1024), number)  # 4 MiB
        return {"batch": {"input_ids": ids}, "meta": {"number": number}, "processing": {}}

    async def use(transport: RayTransport) -> None:
        go_on.clear()
        ops = [transport.fwd_bwd(large(1)), transport.fwd_bwd(large(2)), transport.step()]
        tasks = [asyncio.create_task(op) for op in ops]
        await asyncio.sleep(0)  # the loop goes on while the first is copied
        go_on.set()
        await asyncio.gather(*tasks)
        go_on.clear()
        ops = [transport.fwd_bwd(large(3)), transport.fwd_bwd(large(4)), transport.step()]
        tasks = [asyncio.create_task(op) for op in ops]
        for _ in range(3):
            await asyncio.sleep(0)
        tasks[1].cancel()  # which waits for the first one's copy
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.wait(tasks)
        go_on.set()

    calls, _ = through_one(transport)(use)
    found = [(name, payload and payload["meta"]["number"]) for name, payload, _ in calls]
    assert found == [("fwd_bwd", 1), ("fwd_bwd", 2), ("step", None), ("step", None)]
    asyncio.run(transport.shutdown())


@pytest.mark.parametrize("role", ["trainer", "sampler", "server"])
def test_a_death_is_named(ray: Any, role: str) -> None:
    first = len(ray.state.actors)
    transport = RayTransport(options(reference=False))
    assert not transport.serves_reference

    async def work() -> None:
        await transport.pids()
        number = first + {"server": 0, "trainer": 1, "sampler": 2}[role]
        ray.kill(ray.ActorHandle(number))
        op = transport.generate([[4]]) if role == "sampler" else transport.step()
        with pytest.raises(
            PeerLostError, match=rf"the {role} \(a Ray actor\) died during"
        ) as caught:
            await op
        assert caught.value.role == role and caught.value.code == "ARL_ERR_PEER_LOST"
        await transport.shutdown()
        await transport.shutdown()

    asyncio.run(work())
    assert all(actor.dead is not None for actor in ray.state.actors[first:])


def test_a_model_that_cannot_be_loaded_is_the_first_ops_error(ray: Any) -> None:
    wrong = options()
    wrong.trainer_model = ModelOptions(path="/no/such/model")
    transport = RayTransport(wrong)

    async def work() -> None:
        with pytest.raises(ValueError, match=r"holds no config\.json"):
            await transport.step()
        await transport.shutdown()

    asyncio.run(work())


def test_several_samplers(ray: Any) -> None:
    transport = RayTransport(options(), samplers=2)
    keys = [f"key {number}" for number in range(16)]

    async def work() -> None:
        assert set(await transport.pids()) == {"server", "trainer", "sampler-0", "sampler-1"}
        described = await transport.describe()
        assert set(described) == {"trainer", "sampler-0", "sampler-1"}
        items = await transport.generate(
            [[4, number] for number in range(16)], {"max_tokens": 1}, routing_key=keys
        )
        assert [item["prompt_token_ids"] for item in items] == [[4, n] for n in range(16)]
        # A key finds what its earlier prompts have left, whoever asks.
        again = RayTransport.from_handle(transport.reconnect_handle())
        items = await again.generate(
            [[4, number] for number in range(16)], {"max_tokens": 1}, routing_key=keys
        )
        assert all(item["prefix_cache_len"] for item in items)
        assert await transport.generate([], {"max_tokens": 1}) == []
        with pytest.raises(ValueError, match="prompt 1 is empty"):
            await transport.generate([[4], []], {"max_tokens": 1})
        assert (await transport.reset_prefix_cache())["entries"] > 0
        slept = await transport.sleep_inference(1)
        assert slept["sampling"] == {"status": "sleeping", "level": 1, "workers": 2}
        with pytest.raises(RuntimeError, match="Model is sleeping"):
            await transport.generate([[4]])
        woken = await transport.wake_inference(["weights"])
        assert woken["sampling"] == {"status": "weights_ready", "workers": 2}
        assert (await transport.wake_inference())["sampling"]["status"] == "ready"
        await transport.shutdown()

    asyncio.run(work())


def test_one_client_trains_at_a_time(server: RayTransport, tmp_path: Path) -> None:
    first, second = (RayTransport.from_handle(server.reconnect_handle()) for _ in range(2))

    async def work() -> None:
        await first.fwd_bwd(update_payload())
        for op in (second.fwd_bwd(update_payload()), second.step()):
            with pytest.raises(WrongProcessError, match="holds gradients of process") as caught:
                await op
            assert caught.value.code == "ARL_ERR_PROCESS"
        await first.fwd_bwd(update_payload())  # batches of one add up
        # A batch that fails is none: what came before it stays with whom it came from.
        with pytest.raises(PayloadError):
            await first.fwd_bwd({**update_payload(), "batch": {}})
        with pytest.raises(WrongProcessError):
            await second.step()
        await first.step()
        with pytest.raises(PayloadError):
            await second.fwd_bwd({**update_payload(), "batch": {}})
        await first.fwd_bwd(update_payload())
        missing = await second.load_checkpoint(path=str(tmp_path / "nothing"))
        assert missing["path"] is None
        with pytest.raises(WrongProcessError):
            await second.fwd_bwd(update_payload())
        await second.save_checkpoint(path=str(tmp_path), step=1)
        await second.load_checkpoint(path=str(tmp_path))
        await second.fwd_bwd(update_payload())
        await second.step()
        with pytest.raises(RuntimeError, match="step without a forward_backward"):
            await first.step()

    asyncio.run(work())


def test_a_handle_of_another_cluster(
    ray: Any, server: RayTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = server.reconnect_handle()
    monkeypatch.setattr(ray.state, "session", "session-1")
    with pytest.raises(PeerLostError, match="cluster session-0, and this process is in session-1"):
        RayTransport.from_handle(handle)


def test_an_actor_that_is_a_thread_is_not_signalled(server: RayTransport) -> None:
    class Actor:
        identity = SimpleNamespace(
            remote=lambda: SimpleNamespace(future=lambda: settled({"interruptible": False}))
        )

    RayRole("trainer", Actor()).interrupt("serve_weights")  # which would end this process


def test_gpus_are_placed(ray: Any) -> None:
    resources = importlib.import_module("arctic_rl_c.transports.ray")._resources
    (trainer, sampler), group = resources(ray, True, 1, 2)
    assert group.bundles == [{"GPU": 1}]
    assert trainer["num_gpus"] == sampler["num_gpus"] == 0.5
    apart, group = resources(ray, False, 2, 4)
    assert group.bundles == [{"GPU": 1}] * 3 and {each["num_gpus"] for each in apart} == {1}
    indices = [each["scheduling_strategy"].placement_group_bundle_index for each in apart]
    assert indices == [0, 1, 2]
    with pytest.raises(ConfigError, match=r"has 2 GPU and .*colocate=False with 2 .* needs 3"):
        resources(ray, False, 2, 2)
    with pytest.raises(ConfigError, match=r"2 samplers on GPUs need one each.*colocate=False"):
        resources(ray, True, 2, 4)


def test_the_number_of_samplers(ray: Any) -> None:
    config = {
        "remote_backend": {"sampling_gpus": 3},
        "actor_rollout_ref": {"model": {"path": "random:micro"}},
    }
    transport = RayTransport(config)
    pids = asyncio.run(transport.pids())
    assert set(pids) == {"server", "trainer", "sampler-0", "sampler-1", "sampler-2"}
    asyncio.run(transport.shutdown())
    with pytest.raises(ConfigError, match="samplers must be at least 1, found 0"):
        RayTransport(options(), samplers=0)


def test_what_cannot_be(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("training_gpus", "sampling_tp_size"):
        config = {"remote_backend": {key: 4}, "actor_rollout_ref": {}}
        with pytest.raises(ConfigError, match=f"{key} is 4: the embedded server has one trainer"):
            RayTransport(config)
    with pytest.raises(ConfigError, match="no handle of a RayTransport"):
        RayTransport.from_handle({"transport": "http"})
    monkeypatch.setattr(ray.state, "initialized", False)
    with pytest.raises(TransportUnavailableError, match=r"call ray\.init\(\) first"):
        RayTransport(options())
    real = builtins.__import__

    def without_ray(name: str, *rest: Any) -> Any:
        if name == "ray":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    with pytest.raises(TransportUnavailableError, match=r"pip install 'arctic_rl_c\[ray\]'"):
        RayTransport(options())


def test_packing_keeps_tensors_as_they_are() -> None:
    jagged = torch.nested.as_nested_tensor([torch.arange(3), torch.arange(2)], layout=torch.jagged)
    half = torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16)
    value = {"a": [half, (torch.ones(2, dtype=torch.bool), "x")], "j": jagged, "n": 3, "b": half}
    packed = pickle.loads(pickle.dumps(pack(value), protocol=5))
    assert isinstance(packed["j"], PackedTensor) and packed["b"] is packed["a"][0]
    packed["b"].array.flags.writeable = False  # as the object store has it
    out = unpack(packed)
    assert out["a"][0] is out["b"] and out["b"].dtype == torch.bfloat16
    assert torch.equal(out["b"], half) and torch.equal(out["a"][1][0], value["a"][1][0])
    assert out["a"][1][1] == "x" and out["n"] == 3
    assert out["j"].offsets().tolist() == [0, 3, 5]
    assert out["j"].values().tolist() == [0, 1, 2, 0, 1]
    shared = np.shares_memory(unpack({"x": packed["j"]})["x"].values().numpy(), packed["j"].array)
    assert shared
