# SPDX-License-Identifier: Apache-2.0
"""The ray transport on a real cluster of this machine: `pytest -m ray`, with Ray installed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import golden
import golden_calls
import recording_role
import test_golden_transports
from arctic_rl_c import (
    ArcticRLClient,
    PeerLostError,
    PeerTimeoutError,
    TornWeightsError,
    WeightSender,
    WeightSyncError,
    WrongProcessError,
    normalize_config,
)
from arctic_rl_c.local.grpo import make_data
from arctic_rl_c.local.options import LocalOptions, ModelOptions
from arctic_rl_c.transports import ray_loan
from arctic_rl_c.transports.ray import RayTransport
from arctic_rl_c.transports.ray_actors import RayRole, RoleActor
from arctic_rl_c.transports.ray_watch import identify
from residue import shared_memory
from test_local_trainer import update_payload

pytestmark = [
    pytest.mark.ray,
    # Ray's own code, and its sockets at exit.
    pytest.mark.filterwarnings("ignore"),
]

DRIVER = Path(__file__).with_name("ray_driver.py")
#: What is to happen soon, and would otherwise not happen.
SECONDS = 60.0


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    import ray

    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init(
        address="local",
        num_cpus=4,
        object_store_memory=100_000_000,
        include_dashboard=False,
        runtime_env={"env_vars": {"PYTHONPATH": search_path()}},
    )
    yield ray
    ray.shutdown()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """A cluster keeps its own sockets open; the driver's end with `ray.shutdown`."""
    before = shared_memory()
    yield
    wait_until(lambda: not shared_memory() - before, "shared memory is left behind")


def search_path() -> str:
    return os.pathsep.join(path for path in sys.path if path)


def wait_until(reached: Any, what: str) -> None:
    until = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < until, what
        time.sleep(0.02)


def wait_for_end_of(pids: dict[str, int]) -> None:
    def gone() -> bool:
        return not any(Path(f"/proc/{pid}").exists() for pid in pids.values())

    wait_until(gone, f"some of {pids} live on")


def options() -> LocalOptions:
    model = ModelOptions(shape="micro", threads=1)
    return LocalOptions(model, model)


def bounded(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work(), 3 * SECONDS))


def client_of(transport: RayTransport) -> ArcticRLClient:
    config = {
        "remote_backend": {"log_prob_gpus": 1, "train": {"zorro_train": {"enable": False}}},
        "actor_rollout_ref": {
            "model": {"path": "random:micro"},
            "actor": {"ppo_mini_batch_size": 1, "optim": {"lr": 1e-2}},
            "rollout": {"n": 2},
        },
        "data": {"train_batch_size": 2, "max_prompt_length": 6, "max_response_length": 5},
    }
    return ArcticRLClient(transport, normalize_config(config), owner=False)


def update(client: ArcticRLClient) -> Any:
    """Two mini-batches of two rows."""
    import torch

    prompts = [[4, 13, 5, 16]] * 2 + [[5, 13, 5]] * 2
    responses = [[7, 3], [4, 4, 4], [9], [1, 2, 3]]
    shape = {"prompt_width": 6, "response_width": 5}
    data = make_data(prompts, responses, pad_token_id=0, temperature=1.0, **shape)
    mask = data["response_mask"]
    data["old_log_probs"] = -torch.ones(mask.shape)
    data["advantages"] = torch.tensor([1.0, -1.0, 0.5, -0.5])[:, None] * mask
    data["global_batch_size"] = 4
    return client.update_actor(data, actor_config={}, pad_token_id=0, rollout_n=2)


@pytest.fixture(scope="module")
def forwarder(ray: Any) -> Any:
    class Forwarder:
        def __init__(self, handle: dict[str, Any]) -> None:
            self.transport = RayTransport.from_handle(handle)

        async def call(self, op: str, **arguments: Any) -> Any:
            return await getattr(self.transport, op)(**arguments)

        async def backward(self, payload: dict[str, Any]) -> None:
            await self.transport.fwd_bwd(payload)

    return ray.remote(Forwarder).options(num_cpus=0)


def test_two_forwarders_of_one_server(ray: Any, forwarder: Any, tmp_path: Path) -> None:
    transport = RayTransport(options(), samplers=2)

    async def work() -> None:
        handle = transport.reconnect_handle()
        first, second = (forwarder.remote(handle) for _ in range(2))
        await transport.save_checkpoint(path=str(tmp_path), step=1)
        # One after another each has its way.
        for number, one in enumerate((first, second)):
            await one.backward.remote(update_payload())
            await one.call.remote("step")
            synced = await one.call.remote("sync_weights")
            assert synced["version"] == number + 1 and len(synced["receivers"]) == 2
            digests = await transport.weights_digests()
            assert set(digests) == {"trainer", "sampler-0", "sampler-1"}
            assert set(digests.values()) == {synced["digest"]}
        # Between a batch and its step there is no place for another.
        await first.backward.remote(update_payload())
        for attempt in (second.backward.remote(update_payload()), second.call.remote("step")):
            with pytest.raises(WrongProcessError, match="another client of this server"):
                await attempt
        await first.call.remote("shutdown")  # which leaves the server as it is
        pid = (await transport.pids())["trainer"]
        ray.kill(first)
        while True:
            with pytest.raises(WrongProcessError) as caught:
                await transport.step()
            if "which has ended" in str(caught.value):
                break
        assert (await transport.load_checkpoint(path=str(tmp_path)))["global_step"] == 1
        await second.backward.remote(update_payload())
        await second.call.remote("step")
        assert (await transport.pids())["trainer"] == pid
        items = await transport.generate([[4, 13]] * 4, {"max_tokens": 2}, routing_key="group")
        assert {item["weight_version_end"] for item in items} == {2}
        # With a seed a sample depends on its place, not on the sampler that makes it.
        asked = ([[4, 13, 5]] * 6, {"max_tokens": 4, "seed": 11, "temperature": 1.0})
        spread = await transport.generate(*asked)
        bound = await transport.generate(*asked, routing_key="one", strict=True)
        assert [i["token_ids"] for i in spread] == [i["token_ids"] for i in bound]
        await transport.shutdown()
        with pytest.raises(PeerLostError, match=r"(?s)the server .* start a new one"):
            await second.call.remote("step")
        with pytest.raises(PeerLostError, match="the server"):
            await RayTransport.from_handle(handle).step()

    bounded(work)


def test_golden_calls(ray: Any) -> None:
    """Two cases, with jagged and with dense prompts; `test_golden_transports.py` has them all."""
    transport = test_golden_transports.RecordingRay(options())
    through = test_golden_transports.through_one(transport)
    for name in ("plain", "dense_prompts"):
        case = golden.case("final", name)
        golden_calls.check_log_prob(through, case, "log_prob")
        golden_calls.check_update(through, case)
    asyncio.run(transport.shutdown())


def test_a_trainer_that_hangs_and_is_killed_in_an_update(ray: Any, tmp_path: Path) -> None:
    transport = RayTransport(options())

    async def work() -> None:
        client = client_of(transport)
        pids = await transport.pids()
        limited = RayTransport.from_handle(transport.reconnect_handle(), timeouts={"fwd_bwd": 1.0})
        os.kill(pids["trainer"], signal.SIGSTOP)
        with pytest.raises(PeerTimeoutError) as late:
            await limited.fwd_bwd(update_payload())
        said = f"fwd_bwd: the trainer (pid {pids['trainer']}) gave no answer within 1 s; "
        assert str(late.value).startswith(said) and late.value.maybe_applied is True
        os.kill(pids["trainer"], signal.SIGCONT)
        # It was applied in the end: there are gradients.
        assert (await limited.step())["metrics"]["grad_norm"] > 0
        assert (await update(client))["metrics"]["grad_norm"] > 0
        await client.save_checkpoint(path=str(tmp_path), step=7)
        digest = (await transport.weights_digests())["trainer"]
        os.kill(pids["trainer"], signal.SIGSTOP)
        updating = asyncio.ensure_future(update(client))
        await asyncio.sleep(0)  # it has asked for the first mini-batch, which cannot end
        os.kill(pids["trainer"], signal.SIGKILL)
        with pytest.raises(PeerLostError, match="the trainer") as lost:
            await updating
        assert lost.value.role == "trainer"
        assert "died during 'forward_backward'" in str(lost.value)
        assert "load the last checkpoint" in str(lost.value)
        with pytest.raises(PeerLostError, match="the trainer"):
            await transport.sync_weights()
        # The sampler still has the weights that it had.
        [item] = await transport.generate([[4, 13]], {"max_tokens": 2})
        assert item["weight_version_end"] == 0
        await transport.shutdown()
        wait_for_end_of(pids)
        another = RayTransport(options())
        loaded = await another.load_checkpoint(path=str(tmp_path))
        assert loaded["global_step"] == 7
        assert (await another.weights_digests())["trainer"] == digest
        assert (await update(client_of(another)))["metrics"]["grad_norm"] > 0
        assert (await another.sync_weights())["version"] == 1
        await another.shutdown()

    bounded(work)


def test_ops_run_in_the_order_of_their_calls(ray: Any) -> None:
    """Ray itself starts most bursts of calls of an async actor in another order."""
    transport = test_golden_transports.RecordingRay(options())
    steps = ["fwd_bwd", "step"] * 3

    async def work() -> None:
        await recording_role.calls_of(transport)
        for _ in range(30):
            payloads = iter([(update_payload(),), ()] * 3)
            await asyncio.gather(*(getattr(transport, op)(*next(payloads)) for op in steps))
            calls = (await recording_role.calls_of(transport))["trainer"]
            assert [op for op, _, _ in calls] == steps
        await transport.shutdown()

    bounded(work)


def test_a_client_that_dies_with_the_trainer_in_its_hands(ray: Any) -> None:
    """Its payload never comes. The others do not wait for the end of the loan."""

    class Borrower:
        def __init__(self, handle: dict[str, Any]) -> None:
            self.transport = RayTransport.from_handle(handle)

        async def borrow(self) -> bool:
            client = {**self.transport._client, "number": 1}
            asked = "fwd_no_grad", {}, client, 600.0, True
            answer = await self.transport._server.lend.remote(*asked)
            return bool(answer["result"]["actor"])

    transport = test_golden_transports.RecordingRay(options())

    async def work() -> None:
        borrower = ray.remote(Borrower).options(num_cpus=0).remote(transport.reconnect_handle())
        assert await borrower.borrow.remote()
        begin = time.monotonic()
        waiting = asyncio.ensure_future(transport.fwd_bwd(update_payload()))
        await asyncio.sleep(0)
        ray.kill(borrower)
        await waiting
        assert time.monotonic() - begin < ray_loan.LOAN_SECONDS / 2
        await transport.shutdown()

    bounded(work)


def test_samplers_that_die(ray: Any) -> None:
    """One of two in a sync, which then reaches the other only; that one while it generates."""
    transport = RayTransport(options(), samplers=2)

    async def work() -> None:
        pids = await transport.pids()
        await transport.sync_weights()
        # It is killed while it cannot have begun to pull: the transfer is already on its way.
        os.kill(pids["sampler-1"], signal.SIGSTOP)
        syncing = asyncio.ensure_future(transport.sync_weights())
        await asyncio.sleep(0)
        os.kill(pids["sampler-1"], signal.SIGKILL)
        with pytest.raises(PeerLostError, match="the sampler-1"):
            await syncing
        versions = set()
        for key in (f"key {number}" for number in range(16)):
            try:
                [item] = await transport.generate([[4]], {"max_tokens": 1}, routing_key=key)
                versions.add(item["weight_version_end"])
            except (PeerLostError, TornWeightsError):
                continue
        assert versions == {1}
        for op in (transport.sync_weights, transport.sleep_inference, transport.wake_inference):
            with pytest.raises(PeerLostError, match="the sampler-1"):
                await op()
        os.kill(pids["sampler-0"], signal.SIGSTOP)
        generating = asyncio.ensure_future(transport.generate([[4, 13]] * 4, {"max_tokens": 2}))
        await asyncio.sleep(0)
        os.kill(pids["sampler-0"], signal.SIGKILL)
        with pytest.raises(PeerLostError, match=r"the sampler-0 .* died during 'generate'") as lost:
            await generating
        assert lost.value.role == "sampler-0"
        await transport.shutdown()
        wait_for_end_of(pids)

    bounded(work)


def test_the_wait_of_a_role_can_be_broken_off(ray: Any) -> None:
    actor = ray.remote(RoleActor).remote("trainer", {}, identify(), "fake_role:build_weights")
    role = RayRole("trainer", actor)
    flags = {"cuda_ipc": False, "low_memory": False, "transport": None, "colocated": None}
    role.submit("offer_weights", **flags, timeout=600.0).result(SECONDS)
    serving = role.submit("serve_weights", timeout=600.0)  # for a receiver that never comes
    wait_until(lambda: role.interrupt("serve_weights") or serving.done(), "it waits on")
    with pytest.raises(WeightSyncError, match="broken off: the other side"):
        serving.result()
    role.interrupt("serve_weights")  # nothing runs that may be: nothing happens
    role.submit("release_weights").result(SECONDS)
    assert role.submit("weights_digest").result(SECONDS)["digest"]
    ray.kill(actor)


def test_handles_of_what_is_no_more(ray: Any, forwarder: Any) -> None:
    transport = test_golden_transports.RecordingRay(options())

    async def work() -> None:
        handle = transport.reconnect_handle()
        attached = forwarder.remote(handle)
        pids = await transport.pids()
        await attached.backward.remote(update_payload())
        os.kill(pids["server"], signal.SIGKILL)
        for asked in (attached.call.remote("step"), transport.step(), transport.pids()):
            with pytest.raises(PeerLostError, match="the server"):
                await asked
        wait_for_end_of(pids)  # the roles end with the one in front
        with pytest.raises(PeerLostError, match="the server"):
            await RayTransport.from_handle(handle).generate([[4]])
        with pytest.raises(PeerLostError, match="is of the Ray cluster session_of_old"):
            RayTransport.from_handle({**handle, "cluster": "session_of_old"})
        await transport.shutdown()

    bounded(work)


@pytest.mark.parametrize(
    ("owner", "number"),
    [("driver", signal.SIGINT), ("actor", signal.SIGTERM), ("actor", signal.SIGKILL)],
)
def test_actors_end_with_their_driver(ray: Any, owner: str, number: int) -> None:
    end_a_driver(ray.get_runtime_context().gcs_address, owner, number)


def test_actors_end_with_a_driver_and_its_cluster() -> None:
    """Ray may end an actor before it has cleaned up. The next offer on the machine does it then."""
    end_a_driver("new", "actor", signal.SIGTERM)
    with WeightSender({"w": np.ones(1)}) as sender:
        sender.offer()


def end_a_driver(address: str, owner: str, number: int) -> None:
    """Start a driver, end it in the middle of its work, and wait for its actors' ends."""
    driver = subprocess.Popen(
        [sys.executable, str(DRIVER), address, owner],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": search_path()},
        text=True,
    )
    with driver:
        try:
            assert driver.stdout is not None
            pids = json.loads(driver.stdout.readline())
            assert set(pids) == {"server", "trainer", "sampler-0", "sampler-1"}
            driver.send_signal(number)
            driver.wait(SECONDS)
        finally:
            driver.kill()
    wait_for_end_of(pids)
