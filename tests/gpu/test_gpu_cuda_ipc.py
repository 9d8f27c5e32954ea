# SPDX-License-Identifier: Apache-2.0
"""cuda_ipc between real processes on a real GPU, with torch's own allocator and streams."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import arctic_rl_c
from fakes.peers import Peer, PeerError

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

MODEL = """
import gc, os, torch, arctic_rl_c
def model(seed, device="cuda"):
    generator = torch.Generator(device).manual_seed(seed)
    def bits(*shape, dtype):
        size = torch.empty((), dtype=dtype).element_size()
        count = torch.Size(shape).numel() * size
        raw = torch.randint(0, 256, (count,), dtype=torch.uint8, device=device, generator=generator)
        return raw.view(dtype).view(shape)
    return {
        "embed": bits(40_000, 256, dtype=torch.bfloat16),
        "q": bits(512, 256, dtype=torch.float32),
        "k": bits(77, 256, dtype=torch.bfloat16),
        "fp8": bits(300, 129, dtype=torch.float8_e4m3fn),
        "half": bits(5, 7, 9, dtype=torch.float16),
        "norm": bits(256, dtype=torch.float32),
        "scalar": bits(dtype=torch.int64),
        "empty": bits(0, 3, dtype=torch.float32),
        "large": bits(3000, 4097, dtype=torch.bfloat16),
    }
def contents(tensors):
    torch.cuda.synchronize()
    flat = {n: t.contiguous().view(-1).view(torch.uint8) for n, t in tensors.items()}
    return {n: t.cpu().numpy().tobytes() for n, t in flat.items()}
def open_files():
    return len(os.listdir("/proc/self/fd"))
params = model(seed, device)
"""


class Pair:
    def __init__(self, devices: tuple[str, str] = ("cuda", "cuda")) -> None:
        self.sender, self.receiver = Peer(), Peer()
        self.devices = devices

    def start(self, sender: dict[str, object] | None = None, **receiver: object) -> Pair:
        self.sender.run(MODEL, seed=1, device=self.devices[0])
        self.receiver.run(MODEL, seed=2, device=self.devices[1])
        self.sender.run(
            "sender = arctic_rl_c.WeightSender(params, **options)",
            options={"cuda_ipc": True, **(sender or {})},
        )
        self.receiver.run(
            "receiver = arctic_rl_c.WeightReceiver(params, **options)", options=receiver
        )
        return self

    def sync(self, **options: object) -> None:
        offer = self.sender.run("result = sender.offer()")
        self.receiver.run("stats = receiver.pull(offer, **options)", offer=offer, options=options)
        self.sender.run("sender.serve()")

    def assert_equal(self) -> None:
        sent = self.sender.run("result = contents(params)")
        assert self.receiver.run("result = contents(params)") == sent

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    found = Pair()
    yield found
    found.close()


@pytest.mark.parametrize("keep", [False, True])
def test_weights_arrive(pair: Pair, keep: bool) -> None:
    pair.start({"verify": "all"}, keep_mapped=keep)
    for seed in range(3):
        pair.sender.run("for n, t in model(seed).items(): params[n].copy_(t)", seed=seed + 10)
        pair.sync(verify="all")
        pair.assert_equal()
    assert pair.receiver.run("result = stats.transport, stats.verified") == ("cuda_ipc", 8)
    assert (pair.receiver.run("result = receiver.live_mappings()") > 0) is keep


def test_without_kernels(pair: Pair) -> None:
    """The driver is told to compile nothing, so the graph of memcpy nodes does the work."""
    os.environ["CUDA_DISABLE_PTX_JIT"] = "1"
    try:
        other = Pair()
        other.start().sync()
        other.assert_equal()
        other.close()
    finally:
        del os.environ["CUDA_DISABLE_PTX_JIT"]


def test_fused_transposed_and_padded_destinations(pair: Pair) -> None:
    pair.start()
    pair.receiver.run(
        "fused = torch.zeros(512 + 512 + 77, 256, dtype=torch.float32, device='cuda')\n"
        "wide = torch.zeros(300, 2 * 129 + 3, dtype=torch.uint8, device='cuda')\n"
        "turned = torch.zeros(256, 77, dtype=torch.bfloat16, device='cuda')\n"
        "padded = torch.zeros(40_100, 256, dtype=torch.bfloat16, device='cuda')\n"
        "where = dict(params)\n"
        "where['q'] = fused[512:1024]\n"
        "where['fp8'] = wide.view(torch.float8_e4m3fn)[:, 3:132]\n"
        "where['k'] = turned.T\n"
        "where['embed'] = padded[:40_000]\n"
        "params = where\n"
        "receiver = arctic_rl_c.WeightReceiver(params)"
    )
    pair.sync()
    pair.assert_equal()
    untouched = (
        "fused[:512], fused[1024:], wide[:, :3], wide[:, 132:], padded[40_000:].view(torch.int16)"
    )
    assert pair.receiver.run(f"result = [t.any().item() for t in ({untouched})]") == [False] * 5


def test_offer_follows_the_current_stream(pair: Pair) -> None:
    """Work that is queued on a side stream when offer() is called is part of the offer."""
    pair.start()
    offer = pair.sender.run(
        "late = model(5)\n"
        "side = torch.cuda.Stream()\n"
        "side.wait_stream(torch.cuda.current_stream())\n"
        "with torch.cuda.stream(side):\n"
        "    torch.cuda._sleep(200_000_000)\n"
        "    for n, t in late.items(): params[n].copy_(t)\n"
        "    result = sender.offer()"
    )
    pair.receiver.run("receiver.pull(offer)", offer=offer)
    assert pair.receiver.run("result = contents(params)") == pair.sender.run(
        "result = contents(late)"
    )


def test_pull_waits_for_readers_of_the_old_weights(pair: Pair) -> None:
    pair.start()
    offer = pair.sender.run("result = sender.offer()")
    before = pair.receiver.run("result = contents(params)")
    pair.receiver.run(
        "torch.cuda._sleep(200_000_000)\n"
        "read = {n: t.clone() for n, t in params.items()}\n"
        "receiver.pull(offer)",
        offer=offer,
    )
    assert pair.receiver.run("result = contents(read)") == before
    pair.assert_equal()


def test_one_process(pair: Pair) -> None:
    source = {"w": torch.randn(1000, 333, device="cuda")}
    target = {"w": torch.zeros(1000, 333, device="cuda")}
    with (
        arctic_rl_c.WeightSender(source, cuda_ipc=True) as sender,
        arctic_rl_c.WeightReceiver(target) as receiver,
    ):
        assert receiver.pull(sender.offer()).transport == "cuda_ipc"
        assert receiver.live_mappings() == 0
    assert torch.equal(source["w"], target["w"])


def test_memory_is_given_back(pair: Pair) -> None:
    """The trainer frees its weights after a sync, and the GPU has them back."""
    pair.start()
    pair.sync()
    pair.receiver.run("torch.cuda.synchronize(); free = torch.cuda.mem_get_info()[0]")
    held = pair.sender.run(
        "size = sum(t.nbytes for t in params.values())\n"
        "sender.close(); del sender, params; gc.collect(); torch.cuda.empty_cache()\n"
        "result = size"
    )
    assert pair.receiver.run("result = torch.cuda.mem_get_info()[0] - free") >= held


def test_a_thousand_syncs_grow_nothing(pair: Pair) -> None:
    pair.start()
    for _ in range(20):
        pair.sync()
    measure = "result = torch.cuda.mem_get_info()[0], open_files()"
    before = pair.receiver.run(measure), pair.sender.run(measure)
    for _ in range(1000):
        pair.sync()
    assert (pair.receiver.run(measure), pair.sender.run(measure)) == before
    pair.assert_equal()


def test_expandable_segments_are_noticed_on_the_sender_only() -> None:
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = (
        "expandable_segments:True"
    )
    try:
        expandable = Pair()
    finally:
        del os.environ["PYTORCH_CUDA_ALLOC_CONF"], os.environ["PYTORCH_ALLOC_CONF"]
    expandable.start({"low_memory": False})
    with pytest.raises(PeerError, match="is in memory that has no IPC handle") as caught:
        expandable.sender.run("sender.offer()")
    assert caught.value.names[0] == "TransportUnavailableError"
    with Peer() as plain:
        plain.run(MODEL, seed=3, device="cuda")
        plain.run("sender = arctic_rl_c.WeightSender(params, cuda_ipc=True)")
        offer = plain.run("result = sender.offer()")
        expandable.receiver.run("receiver.pull(offer)", offer=offer)
        sent = plain.run("result = contents(params)")
        assert expandable.receiver.run("result = contents(params)") == sent
    expandable.close()


def test_two_receivers(pair: Pair) -> None:
    pair.start({"receivers": 2})
    with Peer() as second:
        second.run(MODEL, seed=3, device="cuda")
        second.run("receiver = arctic_rl_c.WeightReceiver(params)")
        offer = pair.sender.run("result = sender.offer()")
        one = pair.receiver.start("receiver.pull(offer)", offer=offer)
        two = second.start("receiver.pull(offer)", offer=offer)
        one.result()
        two.result()
        pair.sender.run("sender.serve()")
        pair.assert_equal()
        sent = pair.sender.run("result = contents(params)")
        assert second.run("result = contents(params)") == sent


def test_sender_killed_before_the_pull(pair: Pair) -> None:
    pair.start(keep_mapped=True)
    pair.sync()
    before = pair.receiver.run("result = contents(params)")
    offer = pair.sender.run("params['norm'].add_(1); result = sender.offer()")
    pair.sender.kill()
    with pytest.raises(PeerError) as caught:
        pair.receiver.run("receiver.pull(offer)", offer=offer)
    assert caught.value.names[0] == "PeerLostError"
    assert pair.receiver.run("result = receiver.torn, contents(params)") == (False, before)


def test_receiver_killed_leaves_the_sender_usable(pair: Pair) -> None:
    pair.start({"timeout": 20})
    pair.sync()
    offer = pair.sender.run("result = sender.offer()")
    pair.receiver.start("receiver.pull(offer)", offer=offer)
    pair.receiver.kill()
    with pytest.raises(PeerError) as caught:
        pair.sender.run("sender.serve(timeout=5)")
    assert caught.value.names[0] in ("PeerLostError", "PeerTimeoutError")
    pair.sender.run("sender.release(); torch.zeros(9, device='cuda').sum().item()")


def test_devices_match_by_uuid() -> None:
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    other = Pair()
    other.sender.run("import os; os.environ['CUDA_VISIBLE_DEVICES'] = uuid", uuid=uuid)
    other.start().sync()
    other.assert_equal()
    other.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="waived: needs two GPUs")
def test_two_gpus_through_peer_access() -> None:
    two = Pair(("cuda:0", "cuda:1"))
    two.start({"verify": "all"}).sync(verify="all")
    two.assert_equal()
    two.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="waived: needs two GPUs")
def test_a_gpu_that_is_not_visible_is_refused() -> None:
    hidden = Pair(("cuda:1", "cuda:0"))
    hidden.receiver.run("import os; os.environ['CUDA_VISIBLE_DEVICES'] = '0'")
    hidden.start()
    offer = hidden.sender.run("result = sender.offer()")
    with pytest.raises(PeerError, match="the other device is not visible in this process"):
        hidden.receiver.run("receiver.pull(offer)", offer=offer)
    hidden.close()


def test_show_config_sees_the_gpu() -> None:
    found = arctic_rl_c.show_config(as_dict=True)
    assert found is not None
    assert found["cuda"]["available"]
    assert found["devices"][0]["cuda_ipc"]
    assert found["devices"][0]["uuid"] == f"GPU-{torch.cuda.get_device_properties(0).uuid}"
