# SPDX-License-Identifier: Apache-2.0
"""cuda_ipc on a real GPU: torch's streams, odd destinations, more than one device."""

from __future__ import annotations

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
params = model(seed, device)
"""


NO_COMPILER = {"CUDA_DISABLE_PTX_JIT": "1", "CUDA_CACHE_DISABLE": "1"}


class Pair:
    def __init__(self, devices: tuple[str, str] = ("cuda", "cuda")) -> None:
        self.sender, self.receiver = Peer(), Peer()
        self.devices = devices

    def start(self, sender: dict[str, object] | None = None, **receiver: object) -> Pair:
        loading = self.sender.start(MODEL, seed=1, device=self.devices[0])
        self.receiver.run(MODEL, seed=2, device=self.devices[1])
        loading.result()
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
    """The driver is told to compile nothing, and not to look for what it compiled before, so the
    graph of memcpy nodes does the work."""
    for peer in (pair.sender, pair.receiver):
        peer.run("import os; os.environ |= options", options=NO_COMPILER)
    pair.start().sync()
    pair.assert_equal()
    reason = pair.receiver.run("result = stats.fallback_reason")
    assert reason is not None and reason.endswith("a graph of memcpy nodes is used")


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
