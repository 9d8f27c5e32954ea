# SPDX-License-Identifier: Apache-2.0
"""nccl on real GPUs: a sender on device 0 and a receiver on device 1, in processes of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.peers import Peer, PeerDied, PeerError, Pending
from peers import Control, until

#: Asks no driver: the peers are to have the devices for themselves.
GPUS = len(list(Path("/dev").glob("nvidia[0-9]*")))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(GPUS < 2, reason="waived: needs two GPUs"),
]
needs_three = pytest.mark.skipif(GPUS < 3, reason="waived: needs three GPUs")

#: Small tensors and one of several buckets; dtypes, strides, one empty and one tied.
MODEL = """
import os, gc, torch, arctic_rl_c
def model(seed, device):
    make = torch.Generator("cpu").manual_seed(seed)
    def bits(*shape):
        count = 1
        for n in shape: count *= n
        return torch.randint(0, 256, (count,), generator=make, dtype=torch.uint8).to(device)
    found = {
        "embed": bits(3000 * 1024 * 2).view(torch.bfloat16).view(3000, 1024),
        "q": bits(256 * 128 * 4).view(torch.float32).view(256, 128),
        "turned": bits(64 * 96 * 2).view(torch.bfloat16).view(96, 64).t(),
        "columns": bits(128 * 512 * 2).view(torch.float16).view(128, 512)[:, 64:192],
        "fp8": bits(33 * 7).view(torch.float8_e4m3fn).view(33, 7),
        "norm": bits(64 * 4).view(torch.float32),
        "empty": torch.empty((0, 7), device=device),
        "ids": bits(17 * 8).view(torch.int64),
    }
    found["tied"] = found["embed"]
    torch.cuda.synchronize()
    return found
def contents(tensors):
    torch.cuda.synchronize()
    def raw(t):
        return t.contiguous().view(torch.uint8).cpu().numpy().tobytes() if t.numel() else b""
    return {name: raw(t) for name, t in tensors.items()}
device = torch.device("cuda", ordinal)
torch.cuda.set_device(device)
"""
SMALL = MODEL + "params = model(seed, device)\n"
#: So many chunks that the host is part of the transfer from its beginning to its end.
LARGE = MODEL + (
    "params = {'w': torch.full((4 << 30,), seed, dtype=torch.uint8, device=device)}\n"
    "torch.cuda.synchronize()\n"
)
SENDER = "sender = arctic_rl_c.WeightSender(params, **{'transport': 'nccl', **options})"
RECEIVER = "receiver = arctic_rl_c.WeightReceiver(params, **options)"


class Pair:
    """The two processes."""

    def __init__(self) -> None:
        self.sender, self.receiver = Peer(), Peer()

    def start(
        self,
        sender: dict[str, object] | None = None,
        receiver: dict[str, object] | None = None,
        *,
        model: str = SMALL,
        ordinals: tuple[int, int] = (0, 1),
    ) -> Pair:
        loading = self.sender.start(
            model + SENDER, seed=1, ordinal=ordinals[0], options=sender or {}
        )
        self.receiver.run(model + RECEIVER, seed=2, ordinal=ordinals[1], options=receiver or {})
        loading.result()
        return self

    def offer(self) -> bytes:
        offer: bytes = self.sender.run("result = sender.offer()")
        return offer

    def pull(self, offer: bytes, **options: object) -> Pending:
        code = "result = receiver.pull(offer, **options).as_dict()"
        return self.receiver.start(code, offer=offer, options=options)

    def sync(self, serve: str = "sender.serve()", **options: object) -> dict[str, object]:
        pulling = self.pull(self.offer(), **options)
        self.sender.run(serve)
        stats: dict[str, object] = pulling.result()
        return stats

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


@pytest.mark.parametrize("ring_bytes", [None, 1 << 20])
def test_weights_arrive(pair: Pair, ring_bytes: int | None) -> None:
    options: dict[str, object] = {"verify": "all"}
    if ring_bytes is not None:
        options["ring_bytes"] = ring_bytes
    stats = pair.start(options).sync(verify="all")
    pair.assert_equal()
    assert stats["transport"] == "nccl"
    assert stats["fallback_reason"] is None
    for number in range(3):  # over the communicator that is there
        pair.sender.run("params['norm'].fill_(number)", number=number)
        pair.sync(verify="all")
        pair.assert_equal()


def test_tensors_that_come_during_serve(pair: Pair) -> None:
    pair.start()
    pair.sender.run(
        "named = {n: (t.dtype, t.shape) for n, t in params.items() if n != 'tied'}\n"
        "sender = arctic_rl_c.WeightSender("
        "named, transport='nccl', ring_bytes=1 << 20, device=device)"
    )
    pair.receiver.run("del params['tied']; receiver = arctic_rl_c.WeightReceiver(params)")
    pair.sender.run("del params['tied']")
    pair.sync(
        "def gather():\n"
        "    for name, tensor in params.items():\n"
        "        whole = tensor.clone()\n"
        "        yield name, whole\n"
        "        whole.zero_()\n"
        "        del whole\n"
        "sender.serve(gather())"
    )
    pair.assert_equal()


def test_many_syncs_take_nothing_more(pair: Pair) -> None:
    count = "result = torch.cuda.mem_get_info()[0], len(os.listdir('/proc/self/fd'))"
    pair.start(model=SMALL)
    for _ in range(3):
        pair.sync()
    before = [peer.run(count) for peer in (pair.sender, pair.receiver)]
    for _ in range(100):
        pair.sync()
    assert [peer.run(count) for peer in (pair.sender, pair.receiver)] == before


def test_closing_gives_the_memory_back(pair: Pair) -> None:
    free = "gc.collect(); torch.cuda.empty_cache(); result = torch.cuda.mem_get_info()[0]"
    pair.start().sync()
    pair.sender.run("sender.close()")
    pair.receiver.run("receiver.close()")
    before = [peer.run(free) for peer in (pair.sender, pair.receiver)]
    for _ in range(2):  # what the first one left (context, kernels) is there already
        pair.sender.run(SENDER)
        pair.receiver.run(RECEIVER)
        pair.sync()
        pair.sender.run("sender.close()")
        pair.receiver.run("receiver.close()")
    after = [peer.run(free) for peer in (pair.sender, pair.receiver)]
    assert all(a >= b - (32 << 20) for a, b in zip(after, before, strict=True))


def test_a_new_communicator_after_either_side_was_closed(pair: Pair) -> None:
    pair.start().sync()
    pair.receiver.run("receiver.close()\n" + RECEIVER)
    pair.sync()
    pair.sender.run("sender.close()\n" + SENDER)
    pair.sync()
    pair.assert_equal()


def test_a_receiver_that_never_comes(pair: Pair) -> None:
    pair.start()
    pair.offer()
    with pytest.raises(PeerError, match="0 of 1 receivers have come"):
        pair.sender.run("sender.serve(timeout=1.0)")
    pair.sync()
    pair.assert_equal()


def test_a_sender_that_never_serves(pair: Pair) -> None:
    pair.start()
    with pytest.raises(PeerError, match="has not begun"):
        pair.pull(pair.offer(), timeout=1.0).result()
    pair.sync()
    pair.assert_equal()


def test_settings_that_differ_are_named(pair: Pair) -> None:
    pair.receiver.run("import os; os.environ['NCCL_P2P_DISABLE'] = '1'")
    pair.start()
    pulling = pair.pull(pair.offer())
    with pytest.raises(PeerError, match="NCCL_P2P_DISABLE is unset there and 1 here"):
        pair.sender.run("sender.serve()")
    with pytest.raises(PeerError, match="NCCL_P2P_DISABLE is unset there and 1 here"):
        pulling.result()


def test_one_gpu_is_refused(pair: Pair) -> None:
    pair.start(ordinals=(0, 0))
    pulling = pair.pull(pair.offer())
    with pytest.raises(PeerError, match="cuda_ipc=True"):
        pair.sender.run("sender.serve()")
    with pytest.raises(PeerError, match="cuda_ipc=True"):
        pulling.result()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("victim", ["sender", "receiver"])
def test_a_side_that_stops_or_dies_in_the_transfer(
    pair: Pair, victim: str, number: signal.Signals
) -> None:
    """The other one aborts in place, and serves or pulls again with a new process."""
    pair.start({"ring_bytes": 1 << 19, "timeout": 10.0}, {"timeout": 10.0}, model=LARGE)
    offer = pair.offer()
    with Control(offer) as control:
        pulling = pair.pull(offer)
        serving = pair.sender.start("sender.serve()")
        until(lambda: control.receiver(0) == Control.WRITING)
    stopped = getattr(pair, victim)
    os.kill(stopped.pid, number)
    with pytest.raises(PeerError) as caught:
        (pulling if victim == "sender" else serving).result()
    lost = "PeerTimeoutError" if number == signal.SIGSTOP else "PeerLostError"
    assert caught.value.names[0] == lost, caught.value
    if number == signal.SIGSTOP:
        stopped.kill()
    with pytest.raises(PeerDied):
        (serving if victim == "sender" else pulling).result()
    stopped.close()
    fresh = Peer()
    setattr(pair, victim, fresh)
    kind = SENDER if victim == "sender" else RECEIVER
    options = {"ring_bytes": 8 << 20} if victim == "sender" else {}
    ordinal = 0 if victim == "sender" else 1
    fresh.run(LARGE + kind, seed=3 + ordinal, ordinal=ordinal, options=options)
    pair.sync()
    equal = "result = bool((params['w'] == value).all())"
    assert pair.receiver.run(equal, value=3 if victim == "sender" else 1)


@needs_three
def test_one_broadcast_serves_two(pair: Pair) -> None:
    pair.start({"receivers": 2, "verify": "all"})
    with Peer() as other:
        other.run(SMALL + RECEIVER, seed=3, ordinal=2, options={})
        for number in range(2):
            pair.sender.run("params['norm'].fill_(number)", number=number)
            offer = pair.offer()
            pulling = pair.pull(offer, verify="all")
            also = other.start("receiver.pull(offer, verify='all')", offer=offer)
            pair.sender.run("sender.serve()")
            pulling.result()
            also.result()
            pair.assert_equal()
            sent = pair.sender.run("result = contents(params)")
            assert other.run("result = contents(params)") == sent


@needs_three
def test_two_senders_share_a_sync(pair: Pair) -> None:
    pair.start({"senders": 2, "ring_bytes": 4 << 20, "verify": "all"})
    with Peer() as other:
        other.run(SMALL + SENDER, seed=1, ordinal=2, options={})
        for _ in range(2):
            offer = pair.offer()
            pulling = pair.pull(offer, verify="all")
            joining = other.start("result = sender.join(offer, 1).bytes", offer=offer)
            pair.sender.run("sender.serve()")
            pulling.result()
            assert joining.result() > 0
            pair.assert_equal()


@needs_three
def test_one_of_two_receivers_dies_in_the_transfer(pair: Pair) -> None:
    """The sender names it; the other receiver is told, and both go on without it."""
    pair.start(
        {"receivers": 2, "ring_bytes": 1 << 19, "timeout": 10.0}, {"timeout": 10.0}, model=LARGE
    )
    with Peer() as other:
        other.run(LARGE + RECEIVER, seed=3, ordinal=2, options={"timeout": 10.0})
        offer = pair.offer()
        with Control(offer) as control:
            pulling = pair.pull(offer)
            other.start("receiver.pull(offer)", offer=offer)
            serving = pair.sender.start("sender.serve()")
            until(lambda: control.receiver(0) == control.receiver(1) == Control.WRITING)
        other.kill()
        for waiting in (serving, pulling):
            with pytest.raises(PeerError) as caught:
                waiting.result()
            assert caught.value.names[0] in ("PeerLostError", "WeightSyncError"), caught.value
    pair.sender.run("sender.close()\n" + SENDER, options={"ring_bytes": 8 << 20})
    pair.sync()
    assert pair.receiver.run("result = bool((params['w'] == 1).all())")
