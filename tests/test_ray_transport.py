# SPDX-License-Identifier: Apache-2.0
"""The ray transport over a double of Ray whose actors are threads of this process.

`test_ray_cluster.py` has what only a real cluster can show.
"""

from __future__ import annotations

import asyncio
import builtins
import importlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from arctic_rl_c import ClosedError, ConfigError, PeerLostError, TransportUnavailableError
from arctic_rl_c.local.options import LocalOptions, ModelOptions, TrainerOptions
from arctic_rl_c.transports import Transport
from arctic_rl_c.transports.ray import RayTransport
from arctic_rl_c.transports.ray_data import PackedTensor, pack, unpack
from test_local_trainer import log_prob_payload, update_payload

DOUBLE = Path(__file__).parent / "ray_double"


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    saved = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_ray(name)}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOUBLE)
        try:
            yield importlib.import_module("ray")
        finally:
            for name in [name for name in sys.modules if _is_ray(name)]:
                del sys.modules[name]
            sys.modules.update(saved)


def _is_ray(name: str) -> bool:
    return name == "ray" or name.startswith("ray.")


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


def test_gpus_are_placed(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    resources = importlib.import_module("arctic_rl_c.transports.ray")._resources
    together, group = resources(ray, True, 2)
    assert group.bundles == [{"GPU": 1}] and together["trainer"]["num_gpus"] == 0.5
    apart, group = resources(ray, False, 2)
    assert group.bundles == [{"GPU": 1}] * 2 and apart["sampler"]["num_gpus"] == 1
    indices = [apart[role]["scheduling_strategy"].placement_group_bundle_index for role in apart]
    assert indices == [0, 1]
    with pytest.raises(ConfigError, match=r"has 1 GPU and remote_backend.colocate=False needs 2"):
        resources(ray, False, 1)


def test_what_cannot_be(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"remote_backend": {"training_gpus": 4}, "actor_rollout_ref": {}}
    with pytest.raises(
        ConfigError, match="training_gpus is 4: the embedded server has one trainer"
    ):
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
