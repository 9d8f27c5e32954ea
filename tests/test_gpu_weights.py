# SPDX-License-Identifier: Apache-2.0
"""Weight sync on a real GPU: sender and receivers as processes of their own, torch tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fakes.peers import Peer, PeerDied, PeerError, Pending
from peers import Control, until

pytestmark = pytest.mark.gpu

#: What every peer runs first. `kind` is a model's name in benchmarks/shapes.py, or "mixed".
MODEL = """
import os, sys
sys.path.append(benchmarks)
import torch, shapes, arctic_rl_c
FLOATS = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float16)
def make(name, shape, dtype, generator):
    size = torch.empty((), dtype=dtype).element_size()
    bits = torch.randint(0, 256, (*shape, size), dtype=torch.uint8, device="cuda",
                         generator=generator)
    return bits.view(dtype).view(shape)
def model(kind, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    if kind == "mixed":
        found = {f"t{i}": make("", (64 + i, 33 + i), FLOATS[i % 4], generator) for i in range(40)}
        found["transposed"] = make("", (300, 500), torch.bfloat16, generator).t()
        found["column"] = make("", (300, 500), torch.bfloat16, generator)[:, 100:300]
        found["scalar"] = make("", (), torch.float32, generator)
        found["empty"] = torch.empty((0, 4), device="cuda")
        found["tied"] = found["t0"]
        return found
    shapes_of = shapes.MODELS[kind].parameters()
    return {n: make(n, s, torch.bfloat16, generator) for n, s in shapes_of.items()}
def fingerprint(tensors):
    found = {}
    for name, tensor in tensors.items():
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        edge = flat[:64].tolist() + flat[-64:].tolist()
        found[name] = (tuple(edge), int(flat.to(torch.int64).sum()) if flat.numel() else 0)
    return found
params = model(kind, seed)
"""

STATS = "\nresult = s.as_dict()"


@pytest.fixture
def benchmarks(pytestconfig: pytest.Config) -> str:
    return str(pytestconfig.rootpath / "benchmarks")


class Group:
    """One sender and some receivers on GPU 0."""

    def __init__(self, benchmarks: str, kind: str, receivers: int = 1, **env: str) -> None:
        self.sender = Peer(env)
        self.receivers = [Peer() for _ in range(receivers)]
        self.receiver = self.receivers[0]
        loading = [
            peer.start(MODEL, benchmarks=benchmarks, kind=kind, seed=seed)
            for seed, peer in enumerate((self.sender, *self.receivers))
        ]
        for peer in loading:
            peer.result()

    def start(self, receiver: str = "", **sender: object) -> Group:
        options = {"receivers": len(self.receivers), **sender}
        self.sender.run("sender = arctic_rl_c.WeightSender(params, **options)", options=options)
        for peer in self.receivers:
            peer.run(f"receiver = arctic_rl_c.WeightReceiver(params, {receiver})")
        return self

    def pull(self, **options: object) -> list[Pending]:
        offer = self.sender.run("result = sender.offer()")
        code = "s = receiver.pull(offer, **options)" + STATS
        return [peer.start(code, offer=offer, options=options) for peer in self.receivers]

    def sync(self, serve: str = "s = sender.serve()", **options: object) -> list[dict[str, object]]:
        pulls = self.pull(**options)
        sent = self.sender.run(serve + STATS)
        return [sent, *(pull.result() for pull in pulls)]

    def assert_equal(self) -> None:
        sent = self.sender.run("result = fingerprint(params)")
        for peer in self.receivers:
            assert peer.run("result = fingerprint(params)") == sent

    def close(self) -> None:
        for peer in (*self.receivers, self.sender):
            peer.close()


@pytest.fixture
def group(benchmarks: str) -> Iterator[Group]:
    found = Group(benchmarks, "mixed")
    yield found
    found.close()


@pytest.mark.parametrize("transport", ["cuda_ipc", "ring", "host_shm"])
def test_mixed_dtypes_and_layouts(group: Group, transport: str) -> None:
    group.start(transport=transport, verify="all")
    for _ in range(2):
        sent, got = group.sync(verify="all")
        group.assert_equal()
        assert sent["transport"] == got["transport"] == transport
        assert got["verified"] == 43  # not the empty one, and the tied one once


@pytest.mark.parametrize("kind", ["qwen3-0.6b", "qwen3-8b"])
def test_whole_models(benchmarks: str, kind: str) -> None:
    group = Group(benchmarks, kind).start()
    group.sync()
    group.assert_equal()
    group.sender.run("params['model.norm.weight'].zero_()")
    group.start(transport="ring").sync()
    group.assert_equal()
    group.close()


def test_expandable_segments_go_through_the_ring(benchmarks: str) -> None:
    group = Group(benchmarks, "mixed", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    group.start(cuda_ipc=True)
    _, got = group.sync()
    group.assert_equal()
    assert got["transport"] == "ring"
    assert "no IPC handle" in str(got["fallback_reason"])
    group.close()


def test_two_receivers(benchmarks: str) -> None:
    for transport in ("cuda_ipc", "ring", "host_shm"):
        group = Group(benchmarks, "mixed", receivers=2).start(transport=transport)
        group.sync()
        group.assert_equal()
        group.close()


def test_tensors_that_are_gathered_one_after_another(group: Group) -> None:
    group.sender.run("del params['tied']")
    group.receiver.run("del params['tied']")
    group.start()
    group.sender.run(
        "named = {n: (t.dtype, t.shape) for n, t in params.items()}\n"
        "sender = arctic_rl_c.WeightSender(named, low_memory=True)\n"
        "gathered = ((n, t.clone()) for n, t in params.items())"
    )
    group.sync("s = sender.serve(gathered)")
    group.assert_equal()


FREE = "torch.cuda.synchronize(); result = torch.cuda.mem_get_info()[0]"


@pytest.mark.parametrize("transport", ["cuda_ipc", "ring"])
def test_a_thousand_syncs_take_nothing(group: Group, transport: str) -> None:
    group.start(transport=transport)
    state = FREE + "; result = (result, len(os.listdir('/proc/self/fd')))"
    group.sync()
    group.sender.run("sender.release()")
    before = group.sender.run(state), group.receiver.run(state)
    for _ in range(1000):
        group.sync()
    group.sender.run("sender.release()")
    assert (group.sender.run(state), group.receiver.run(state)) == before
    assert group.receiver.run("result = receiver.live_mappings()") == 0
    group.assert_equal()


def test_memory_of_the_trainer_is_free_after_a_sync(group: Group) -> None:
    """It offloads: what receivers had mapped really goes back to the device."""
    group.start(cuda_ipc=True).sync()  # what a process takes for its first sync, it keeps
    free = group.sender.run(
        "big = torch.zeros(1 << 30, dtype=torch.uint8, device='cuda')\n"
        "before = torch.cuda.mem_get_info()[0]\n"
        "sender = arctic_rl_c.WeightSender({**params, 'big': big}, cuda_ipc=True)\n"
        "result = before"
    )
    group.receiver.run(
        "room = torch.empty(1 << 30, dtype=torch.uint8, device='cuda')\n"
        "receiver = arctic_rl_c.WeightReceiver({**params, 'big': room})"
    )
    group.sync()
    group.sender.run("sender.close(); del sender, big; torch.cuda.empty_cache()")
    after = group.sender.run(FREE)
    assert after >= free  # the receiver took one GiB of its own, the sender gave one back


@pytest.mark.parametrize("victim", ["sender", "receiver"])
def test_a_peer_killed_in_the_middle(benchmarks: str, victim: str) -> None:
    group = Group(benchmarks, "qwen3-0.6b").start(transport="ring", ring_bytes=2 << 16)
    offer = group.sender.run("result = sender.offer()")
    with Control(offer) as control:
        pull = group.receiver.start("receiver.pull(offer)", offer=offer)
        serve = group.sender.start("sender.serve()")
        until(lambda: control.receiver(0) == Control.WRITING)
    getattr(group, victim).kill()
    survivor, lost = (pull, serve) if victim == "sender" else (serve, pull)
    with pytest.raises(PeerError) as caught:
        survivor.result()
    assert caught.value.names[0] == "PeerLostError"
    with pytest.raises(PeerDied):
        lost.result()
    if victim == "sender":  # the process is well: its GPU works, and its memory is its own
        assert group.receiver.run("result = receiver.torn")
        group.receiver.run("assert int(torch.ones(9, device='cuda').sum()) == 9")
    else:
        group.sender.run("assert int(torch.ones(9, device='cuda').sum()) == 9")
        group.sender.run("sender.close()")
    group.close()


def test_a_peer_that_never_comes(group: Group) -> None:
    group.start(transport="ring")
    group.sender.run("sender.offer()")
    never = r"after 0\.3 s, 0 of 1 receivers have finished and 1 never called pull\(\)"
    with pytest.raises(PeerError, match=never) as caught:
        group.sender.run("sender.serve(timeout=0.3)")
    assert caught.value.names[0] == "PeerTimeoutError"
    group.sync()
    group.assert_equal()
