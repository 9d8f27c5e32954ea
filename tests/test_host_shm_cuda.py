# SPDX-License-Identifier: Apache-2.0
"""host_shm of tensors in GPU memory, on either side or both: real processes, the fake driver."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import arctic_rl_c
import fakes
import offers
from fakes.pairs import Pair, sync_may_fail
from fakes.peers import PeerError

SLOT = 1 << 16  # the smallest; there are two

#: A model of about ten chunks: one tensor larger than the slots, strided ones, an empty and a
#: tied one. `places` says where its tensors are, one after another and over again.
MODEL = """
import numpy as np, fakes, arctic_rl_c
driver = fakes.driver()
LIKE = {
    "embed": ("u2", (700, 300)),
    "layer.q": ("f4", (64, 64)),
    "layer.k": ("u2", (33, 64)),
    "norm": ("f4", (64,)),
    "empty": ("u1", (0, 7)),
    "turned": ("u2", (120, 90)),
    "column": ("f4", (50, 20)),
    "head": ("u1", (5, 7)),
}
class Host:
    def __init__(self, array):
        self.array = array
    def __dlpack_device__(self):
        return self.array.__dlpack_device__()
    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)
    def view(self, index):
        return Host(self.array[index])
    def transposed(self, *axes):
        return Host(self.array.transpose(*axes))
def make(values, place):
    return Host(values) if place == "cpu" else fakes.device_array(values, device=place)
def model(fill, places):
    rng = np.random.default_rng(fill)
    found = {}
    for number, (name, (dtype, shape)) in enumerate(LIKE.items()):
        rows, columns = (*shape, 1)[:2]
        if name == "turned":
            shape = shape[::-1]
        elif name == "column":
            shape = (rows, 3 * columns)
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        values = rng.integers(0, 256, size, dtype="u1").view(dtype).reshape(shape)
        tensor = make(values, places[number % len(places)])
        if name == "turned":
            tensor = tensor.transposed(1, 0)
        elif name == "column":
            tensor = tensor.view((slice(None), slice(columns, 2 * columns)))
        found[name] = tensor
    found["tied"] = found["embed"]
    return found
def contents(tensors):
    return {name: tensor.array.tobytes() for name, tensor in tensors.items()}
params = model(fill, places)
"""

SENDER = MODEL + "\nsender = arctic_rl_c.WeightSender(params, **options)\n"
RECEIVER = MODEL + "\nreceiver = arctic_rl_c.WeightReceiver(params, **options)\n"
BYTES = 700 * 300 * 2 + 64 * 64 * 4 + 33 * 64 * 2 + 64 * 4 + 120 * 90 * 2 + 50 * 20 * 4 + 5 * 7

#: Where the sender's tensors are, and the receiver's.
PLACES: dict[str, tuple[list[object], list[object]]] = {
    "gpu-gpu": ([0], [0]),
    "gpu-cpu": ([0], ["cpu"]),
    "cpu-gpu": (["cpu"], [0]),
    "gpu-both": ([0], [0, "cpu"]),
    "cpu-both": (["cpu"], ["cpu", 0]),
    "two-gpus": ([0], [1]),
}


class PlacedPair(Pair):
    """A sender and receivers in processes of their own, and their tensors where a test says."""

    def __init__(self, env: dict[str, str], receivers: int = 1) -> None:
        options = {"transport": "host_shm", "ring_bytes": 2 * SLOT}
        super().__init__(env, receivers, options=options)

    def place(
        self,
        places: str = "gpu-gpu",
        sender: dict[str, object] | None = None,
        receiver: dict[str, object] | None = None,
    ) -> PlacedPair:
        theirs, ours = PLACES[places]
        options = {"receivers": len(self.receivers), **self.options, **(sender or {})}
        self.sender.run(SENDER, fill=1, places=theirs, options=options)
        for number, peer in enumerate(self.receivers):
            peer.run(RECEIVER, fill=2 + number, places=ours, options=receiver or {})
        return self

    def assert_nothing_open(self) -> None:
        super().assert_nothing_open()
        for peer in (*self.receivers, self.sender):
            live = peer.run("result = driver.live()")
            assert live["pinned"] == live["events"] == 0, live
            assert peer.run("result = driver.depth()") == 0


@pytest.fixture
def pair() -> Iterator[PlacedPair]:
    with fakes.session(devices=2) as env:
        found = PlacedPair(env)
        yield found
        found.close()


# ---- the usual case -----------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("places", list(PLACES))
def test_weights_arrive(pair: PlacedPair, places: str, keep: bool) -> None:
    """Every layout, the first time and again, and all of it compared by checksum too."""
    pair.place(places, {"verify": "all", "keep_mapped": keep}, {"keep_mapped": keep})
    for number in range(3):
        pair.sender.run("params['norm'].array[:] = number", number=number)
        sent, got = pair.sync(verify="all")
        pair.assert_equal()
        assert sent["transport"] == got["transport"] == "host_shm"
        assert sent["fallback_reason"] is got["fallback_reason"] is None
        assert sent["bytes"] == BYTES
        assert got["verified"] == 7  # neither the empty nor the tied one
    pair.assert_nothing_open()


def test_the_gpu_memory_it_takes_is_two_slots_whatever_the_tensors_are(pair: PlacedPair) -> None:
    sent, got = pair.place().sync()
    tables = 64 << 10
    file = int(str(sent["extra_bytes"])) - 2 * SLOT
    assert BYTES <= file < BYTES + 9 * 256 + tables
    assert 2 * SLOT < int(str(got["extra_bytes"])) < 2 * SLOT + tables


def test_a_receiver_on_the_cpu_takes_none(pair: PlacedPair) -> None:
    assert pair.place("gpu-cpu").sync()[1]["extra_bytes"] == 0
    assert pair.receiver.run("result = driver.live()['contexts']") == 0


def test_what_is_not_kept_is_given_back_at_once(pair: PlacedPair) -> None:
    pair.place()
    before = pair.sender.run("result = driver.live()['allocations']")
    pair.sync()
    for peer in (pair.sender, pair.receiver):
        live = peer.run("result = driver.live()")
        assert (live["allocations"], live["pinned"]) == (before, 0)


def test_what_is_kept_is_pinned_once(pair: PlacedPair) -> None:
    pair.place("gpu-gpu", {"keep_mapped": True}, {"keep_mapped": True}).sync()
    before = [p.run("result = driver.live()") for p in (pair.sender, pair.receiver)]
    assert [live["pinned"] for live in before] == [1, 1]
    for _ in range(3):
        pair.sync()
    assert [p.run("result = driver.live()") for p in (pair.sender, pair.receiver)] == before
    pair.assert_equal()


def test_memory_that_cannot_be_pinned_is_copied_all_the_same(pair: PlacedPair) -> None:
    pair.place("gpu-gpu", {"keep_mapped": True}, {"keep_mapped": True})
    for peer in (pair.sender, pair.receiver):
        peer.run("driver.fail('cuMemHostRegister_v2', 1)")
    for _ in range(2):
        pair.sync()
        pair.assert_equal()
        for peer in (pair.sender, pair.receiver):
            assert peer.run("result = driver.live()['pinned']") == 0
    pair.assert_nothing_open()


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("places", ["gpu-gpu", "gpu-both"])
def test_work_that_lags_on_both_sides(pair: PlacedPair, places: str, keep: bool) -> None:
    """A slot is written to again when it has been read, and offer() and pull() end when all is."""
    pair.place(places, {"keep_mapped": keep}, {"keep_mapped": keep})
    for peer in (pair.sender, pair.receiver):
        peer.run("driver.lag(2_000)")
    for number in range(2):
        pair.sender.run("params['norm'].array[:] = number", number=number)
        expected = pair.sender.run("result = contents(params)")
        offer = pair.offer()
        pair.sender.run("params['embed'].array[:] = number", number=number)  # it may change now
        pair.pull(offer)[0].result()
        assert pair.receiver.run("result = contents(params)") == expected


def test_without_kernels(pair: PlacedPair) -> None:
    for peer in (pair.sender, pair.receiver):
        peer.run(MODEL + "\ndriver.fail('cuModuleLoadDataEx', 1)", fill=1, places=[0])
    _, got = pair.place().sync()
    pair.assert_equal()
    assert "the copy kernels do not load" in str(got["fallback_reason"])


def test_two_receivers() -> None:
    with fakes.session() as env:
        pair = PlacedPair(env, receivers=2)
        pair.place().sync()
        pair.assert_equal()
        pair.assert_nothing_open()
        pair.close()


def test_a_shard_and_a_column_of_a_larger_tensor(pair: PlacedPair) -> None:
    """Most chunks hold nothing that this receiver wants, and some a part only."""
    pair.place()
    pair.sender.run(
        "sender = arctic_rl_c.WeightSender({n: params[n] for n in ('embed', 'layer.q')},\n"
        "    verify='all', **options)"
    )
    pair.receiver.run(
        "shard = fakes.device_array(np.zeros((350, 300), 'u2'))\n"
        "column = fakes.device_array(np.zeros((64, 16), 'f4'))\n"
        "receiver = arctic_rl_c.WeightReceiver({\n"
        "    'embed': arctic_rl_c.Binding(shard, dim=0, start=350, full=700),\n"
        "    'layer.q': arctic_rl_c.Binding(column, dim=1, start=48, full=64)})"
    )
    stats = pair.pull(pair.offer(), verify="all")[0].result()
    assert stats["bytes"] == 350 * 300 * 2 + 64 * 16 * 4
    assert stats["verified"] == 2
    expected = pair.sender.run(
        "result = params['embed'].array[350:].tobytes(), params['layer.q'].array[:, 48:].tobytes()"
    )
    assert pair.receiver.run("result = shard.array.tobytes(), column.array.tobytes()") == expected


def test_views_are_in_cpu_memory(pair: PlacedPair) -> None:
    pair.place()
    pair.receiver.run(
        "with receiver.views(offer) as tensors:\n"
        "    seen = {name: np.from_dlpack(view).copy() for name, view in tensors}",
        offer=pair.offer(),
    )
    expected = pair.sender.run("result = contents(params)")
    assert pair.receiver.run("result = {n: a.tobytes() for n, a in seen.items()}") == expected


# ---- the choice ---------------------------------------------------------------------------------


def test_colocated_without_cuda_ipc(pair: PlacedPair) -> None:
    pair.place(sender={"transport": None, "cuda_ipc": False, "colocated": True})
    sent, got = pair.sync()
    pair.assert_equal()
    assert sent["transport"] == got["transport"] == "host_shm"
    reason = "cuda_ipc=False, and NCCL cannot place two ranks on one GPU"
    assert sent["fallback_reason"] == got["fallback_reason"] == reason


def test_tensors_that_come_later_are_refused(pair: PlacedPair) -> None:
    pair.place()
    with pytest.raises(PeerError, match="w is a specification without data; host_shm"):
        pair.sender.run("arctic_rl_c.WeightSender({'w': ('float32', (4,))}, **options).offer()")


def test_tensors_of_two_devices_are_refused(pair: PlacedPair) -> None:
    pair.place()
    pair.sender.run("mixed = model(1, [0, 1])")
    with pytest.raises(PeerError, match="use one sender for each device"):
        pair.sender.run("arctic_rl_c.WeightSender(mixed, **options).offer()")
    pair.receiver.run("receiver = arctic_rl_c.WeightReceiver(model(1, [0, 1]))")
    with pytest.raises(PeerError, match="use one receiver for each device"):
        pair.pull(pair.offer())[0].result()
    assert not pair.receiver.run("result = receiver.torn")


@pytest.mark.parametrize("places", ["gpu-gpu", "cpu-gpu"])
def test_slots_that_are_too_small_are_refused(pair: PlacedPair, places: str) -> None:
    pair.place(places, {"ring_bytes": 100_000})
    with pytest.raises(PeerError, match="too small: at least 2 slots of 65536 bytes"):
        pair.offer()


# ---- when it does not go well -------------------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True])
def test_an_offer_that_hangs_ends_with_its_deadline(pair: PlacedPair, keep: bool) -> None:
    pair.place(sender={"keep_mapped": keep}).sync()
    pair.sender.run("driver.hold(True)")
    with pytest.raises(PeerError, match=r"not done on device 0 .* is other") as caught:
        pair.sender.run("sender.offer(timeout=0.2)")
    assert caught.value.names[0] == "PeerTimeoutError"
    pair.sender.run("driver.hold(False)")
    pair.sync()
    pair.assert_equal()


@pytest.mark.parametrize("keep", [False, True])
def test_a_pull_that_hangs_ends_with_its_deadline(pair: PlacedPair, keep: bool) -> None:
    pair.place(sender={"keep_mapped": keep}, receiver={"keep_mapped": keep}).sync()
    offer = pair.offer()
    pair.receiver.run("driver.hold(True)")
    with pytest.raises(PeerError, match=r"not done on device 0 .* is other") as caught:
        pair.pull(offer, timeout=0.2)[0].result()
    assert caught.value.names[0] == "PeerTimeoutError"
    with pytest.raises(PeerError, match=r"receiver 0 of 1 .* failed"):
        pair.sender.run("sender.serve()")
    pair.receiver.run("driver.hold(False)")
    pair.sync()
    pair.assert_equal()
    assert not pair.receiver.run("result = receiver.torn")


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_every_driver_call_may_fail(side: str, keep: bool) -> None:
    """The n-th call fails, for every n, until the sync succeeds: nothing leaks, nobody hangs."""
    with fakes.session() as env:
        verify = {"verify": "all", "keep_mapped": keep}
        pair = PlacedPair(env).place("gpu-both", verify, {"keep_mapped": keep})
        failing = getattr(pair, side)
        pair.sync(verify="all")
        renew = {
            "sender": "sender.close(); sender = arctic_rl_c.WeightSender(params, **options)",
            "receiver": "receiver.close()\n"
            "receiver = arctic_rl_c.WeightReceiver(params, keep_mapped=keep)",
        }[side]
        failing.run(renew, keep=keep)
        clean = failing.run("result = driver.live()")
        for number in range(1, 600):
            before = failing.run("driver.fail('any', n); result = driver.calls()", n=number)
            failed = not sync_may_fail(pair)
            calls = failing.run("result = driver.calls(); driver.reset()") - before
            failing.run(renew)
            live = failing.run("result = driver.live()")
            for kind in ("streams", "modules", "contexts"):
                # An engine that could not be asked whether it is idle is given up, and only that.
                assert live.pop(kind) - clean[kind] <= 2 * number
            assert live.items() <= clean.items(), (number, live)
            if not failed and calls < number:
                break
        else:
            pytest.fail("600 calls and no end")
        pair.sync(verify="all")
        pair.assert_equal()
        pair.assert_nothing_open()
        pair.close()


# ---- one process, offers that are wrong ----------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True])
def test_the_same_process(driver: fakes.Driver, keep: bool) -> None:
    values = np.random.default_rng(1).integers(0, 256, 500_000, dtype=np.uint8)
    source, target = fakes.device_array(values), fakes.device_array(np.zeros_like(values))
    before = driver.live()["allocations"]
    with (
        arctic_rl_c.WeightSender(
            {"w": source}, transport="host_shm", ring_bytes=2 * SLOT, keep_mapped=keep
        ) as sender,
        arctic_rl_c.WeightReceiver({"w": target}, keep_mapped=keep) as receiver,
    ):
        for number in range(3):
            source.array[0] = number
            receiver.pull(sender.offer())
            assert np.array_equal(source.array, target.array)
    assert driver.live()["allocations"] == before
    assert driver.live()["pinned"] == 0


@pytest.mark.parametrize(
    ("at", "code", "value", "text"),
    [
        ("slots", "I", 0, "it describes no slots"),
        ("slots", "I", 17, "it describes no slots"),
        ("slot_bytes", "Q", 1 << 62, "it describes no slots"),
        ("first", "Q", 256, r"tensor 0 \(a\) is not where host_shm puts it"),
        ("second", "Q", 0, r"tensor 1 \(b\) is not where host_shm puts it"),
    ],
)
def test_offers_that_host_shm_does_not_make(
    driver: fakes.Driver, at: str, code: str, value: int, text: str
) -> None:
    values = np.arange(300, dtype=np.uint16)
    params = {name: fakes.device_array(values) for name in "ab"}
    before = driver.live()["allocations"]
    with (
        arctic_rl_c.WeightSender(params, transport="host_shm") as sender,
        arctic_rl_c.WeightReceiver(params) as receiver,
    ):
        offer = sender.offer()
        places = {
            "slots": len(offer) - 16,
            "slot_bytes": len(offer) - 8,
            "first": offers.tensor_at(offer, 0) + 24,
            "second": offers.tensor_at(offer, 1) + 24,
        }
        with pytest.raises(arctic_rl_c.WeightSyncError, match=text):
            receiver.pull(offers.put(offer, places[at], code, value))
        assert not receiver.torn
    assert driver.live()["allocations"] == before
