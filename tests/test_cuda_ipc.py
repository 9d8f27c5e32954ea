# SPDX-License-Identifier: Apache-2.0
"""cuda_ipc between real processes, on the fake driver."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import arctic_rl_c
import fakes
import native
from fakes.peers import Peer, PeerError

#: What a peer runs first: a model in fake GPU memory, as names and arrays.
MODEL = """
import numpy as np, fakes, arctic_rl_c
driver = fakes.driver()
def model(fill, device=0, names=("embed", "layer.q", "layer.k", "norm", "head")):
    rng = np.random.default_rng(fill)
    like = {
        "embed": np.empty((300, 64), "u2"),
        "layer.q": np.empty((64, 64), "f4"),
        "layer.k": np.empty((33, 64), "u2"),
        "norm": np.empty((64,), "f4"),
        "head": np.empty((5, 7), "u1"),
    }
    found = {}
    for name in names:
        bits = rng.integers(0, 256, like[name].nbytes, dtype="u1").view(like[name].dtype)
        found[name] = fakes.device_array(bits.reshape(like[name].shape), device=device)
    return found
def contents(tensors):
    return {name: tensor.array.tobytes() for name, tensor in tensors.items()}
params = model(fill, device)
"""

SENDER = MODEL + "\nsender = arctic_rl_c.WeightSender(params, cuda_ipc=True, **options)\n"
RECEIVER = MODEL + "\nreceiver = arctic_rl_c.WeightReceiver(params, **options)\n"


class Pair:
    """A sender and a receiver in processes of their own."""

    def __init__(self, env: dict[str, str]) -> None:
        self.sender, self.receiver = Peer(env), Peer(env)

    def start(
        self,
        sender: dict[str, object] | None = None,
        receiver: dict[str, object] | None = None,
        devices: tuple[int, int] = (0, 0),
    ) -> Pair:
        self.sender.run(SENDER, fill=1, device=devices[0], options=sender or {})
        self.receiver.run(RECEIVER, fill=2, device=devices[1], options=receiver or {})
        return self

    def offer(self, **options: object) -> bytes:
        offer: bytes = self.sender.run("result = sender.offer(**options)", options=options)
        return offer

    def pull(self, offer: bytes, **options: object) -> dict[str, object]:
        stats: dict[str, object] = self.receiver.run(
            "s = receiver.pull(offer, **options)\n"
            "result = {n: getattr(s, n) for n in dir(s) if not n.startswith('_')}",
            offer=offer,
            options=options,
        )
        return stats

    def sync(self, **options: object) -> dict[str, object]:
        stats = self.pull(self.offer(), **options)
        self.sender.run("sender.serve()")
        return stats

    def assert_equal(self) -> None:
        sent = self.sender.run("result = contents(params)")
        assert self.receiver.run("result = contents(params)") == sent

    def assert_nothing_open(self) -> None:
        for peer, name in ((self.sender, "sender"), (self.receiver, "receiver")):
            peer.run(f"{name}.close(); del {name}, params; import gc; gc.collect()")
            live = peer.run("result = driver.live()")
            assert live["allocations"] == live["mappings"] == 0, (name, live)
        assert self.sender.run("result = driver.depth()") == 0
        assert self.receiver.run("result = driver.depth()") == 0

    def close(self) -> None:
        self.receiver.close()  # first: it may have the sender's memory mapped
        self.sender.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with fakes.session() as env:
        found = Pair(env)
        yield found
        found.close()


# ---- the usual case -----------------------------------------------------------------------------


def test_weights_arrive(pair: Pair) -> None:
    stats = pair.start().sync()
    pair.assert_equal()
    assert stats["transport"] == "cuda_ipc"
    assert stats["fallback_reason"] is None
    assert stats["tensors"] == 5
    assert stats["bytes"] == 300 * 64 * 2 + 64 * 64 * 4 + 33 * 64 * 2 + 64 * 4 + 5 * 7
    assert stats["version"] == 1
    assert pair.receiver.run("result = driver.live()['mappings']") == 0
    pair.assert_nothing_open()


def test_many_syncs_leave_nothing_more(pair: Pair) -> None:
    pair.start()
    pair.sync()
    before = pair.receiver.run("result = driver.live()"), pair.sender.run("result = driver.live()")
    for number in range(5):
        pair.sender.run("params['norm'].array[:] = number", number=number)
        pair.sync()
        pair.assert_equal()
    after = pair.receiver.run("result = driver.live()"), pair.sender.run("result = driver.live()")
    assert after == before


def test_kept_mappings_are_used_again(pair: Pair) -> None:
    pair.start(receiver={"keep_mapped": True})
    pair.sync()
    assert pair.receiver.run("result = receiver.live_mappings()") == 5
    opened = "driver.fail('cuIpcOpenMemHandle_v2', 1)"
    pair.receiver.run(opened)  # none is opened again
    for number in range(3):
        pair.sender.run("params['norm'].array[:] = number", number=number)
        pair.sync()
        pair.assert_equal()
    assert pair.receiver.run("receiver.close(); result = driver.live()['mappings']") == 0


def test_memory_that_was_freed_and_allocated_again_is_not_read_through_an_old_mapping(
    pair: Pair,
) -> None:
    pair.start(receiver={"keep_mapped": True})
    pair.sync()
    pair.sender.run("sender.release()")
    pair.receiver.run("receiver.close(); receiver = arctic_rl_c.WeightReceiver(params, **options)")
    pair.sender.run(
        "sender.close(); del sender, params; params = model(7)\n"
        "sender = arctic_rl_c.WeightSender(params, cuda_ipc=True)"
    )
    pair.sync()
    pair.assert_equal()


def test_only_what_changed_is_mapped_again(pair: Pair) -> None:
    pair.start(receiver={"keep_mapped": True})
    pair.sync()
    # The old block stays: freeing it while the receiver has it mapped is not allowed.
    pair.sender.run(
        "old, params['head'] = params['head'], model(9, 0, ['head'])['head']\n"
        "sender.close(); sender = arctic_rl_c.WeightSender(params, cuda_ipc=True)"
    )
    pair.receiver.run("driver.fail('cuIpcOpenMemHandle_v2', 2)")
    pair.sync()
    pair.assert_equal()
    assert pair.receiver.run("result = driver.live()['mappings']") == 5
    pair.sender.run("del old")


def test_views_are_the_senders_memory(pair: Pair) -> None:
    """For engines that load by themselves: read-only DLPack views on the right device."""
    pair.start()
    seen = pair.receiver.run(
        "found = {}\n"
        "with receiver.views(offer) as tensors:\n"
        "    for name, view in tensors:\n"
        "        address = fakes.address_of(view)\n"
        "        found[name] = (view.__dlpack_device__(), fakes.read(address, view.nbytes))\n"
        "result = found, driver.live()['mappings']",
        offer=pair.offer(),
    )
    sent = pair.sender.run("result = contents(params)")
    assert seen == ({name: ((2, 0), data) for name, data in sent.items()}, 0)
    pair.sender.run("sender.serve()")


def test_verified(pair: Pair) -> None:
    pair.start(sender={"verify": "all"})
    assert pair.sync(verify="all")["verified"] == 5
    assert pair.sync(verify="sample")["verified"] in range(6)


def test_verify_notices_a_write_after_the_offer(pair: Pair) -> None:
    pair.start(sender={"verify": "all"})
    offer = pair.offer()
    pair.sender.run("params['norm'].array[3] += 1")
    with pytest.raises(PeerError, match="norm: the checksum is") as caught:
        pair.pull(offer, verify="all")
    assert caught.value.names[0] == "WeightSyncError"
    assert pair.receiver.run("result = receiver.torn") is True
    with pytest.raises(PeerError, match="TornWeightsError"):
        pair.receiver.run("receiver.check()")
    pair.sync(verify="all")
    pair.receiver.run("receiver.check()")


def test_without_kernels(pair: Pair) -> None:
    pair.receiver.run(MODEL + "\ndriver.fail('cuModuleLoadDataEx', 1)", fill=1, device=0)
    pair.start(sender={"verify": "all"})
    stats = pair.sync(verify="all")
    pair.assert_equal()
    reason = str(stats["fallback_reason"])
    assert "the copy kernels do not load (cuModuleLoadDataEx: CUDA_ERROR_UNKNOWN)" in reason
    assert reason.endswith("a graph of memcpy nodes is used")


# ---- order --------------------------------------------------------------------------------------


def test_offer_waits_for_the_callers_stream(pair: Pair) -> None:
    """What is still queued on the default stream at offer() is part of the offer."""
    pair.start()
    pair.sender.run(
        "import ctypes\n"
        "late = model(5)\n"
        "driver.library.cuMemcpyAsync.argtypes = [ctypes.c_size_t] * 3 + [ctypes.c_void_p]\n"
        "context = ctypes.c_void_p()\n"
        "assert driver.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0\n"
        "assert driver.library.cuCtxPushCurrent_v2(context) == 0\n"
        "driver.lag(30_000)\n"
        "for name, tensor in params.items():\n"
        "    size, source = tensor.array.nbytes, late[name].array\n"
        "    copied = driver.library.cuMemcpyAsync(\n"
        "        tensor.array.ctypes.data, source.ctypes.data, size, None)\n"
        "    assert copied == 0\n"
    )
    pair.sync()
    expected = pair.sender.run("result = contents(late)")
    assert pair.receiver.run("result = contents(params)") == expected


def test_pull_returns_when_the_bytes_are_there(pair: Pair) -> None:
    pair.start()
    pair.receiver.run("driver.lag(20_000)")
    pair.sync()
    pair.assert_equal()


def test_release_waits_for_a_receiver_that_reads(pair: Pair) -> None:
    pair.start(receiver={"keep_mapped": True}).sync()
    pair.receiver.run(PULL_HELD, offer=pair.offer())
    with pytest.raises(PeerError, match="1 receivers still read the memory"):
        pair.sender.run("sender.release(timeout=0.1)")
    pair.receiver.run("driver.hold(False)")
    pair.receiver.run(PULL_END)
    pair.sender.run("sender.release()")
    pair.assert_equal()


# ---- devices ------------------------------------------------------------------------------------


def uuid(index: int, kind: str = "GPU") -> str:
    digits = "".join(f"{0x10 * (index + 1) + b:02x}" for b in range(16))
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return "-".join((kind, *parts))


@pytest.mark.parametrize(
    ("sender", "receiver"),
    [("1", "0,1"), (uuid(1), "1"), (uuid(1)[:12], uuid(1)), ("3,1", "1")],
)
def test_devices_match_by_uuid_not_by_number(sender: str, receiver: str) -> None:
    """Both sides mean physical device 1, under different numbers."""
    with fakes.session(devices=4) as env:
        pair = Pair(env)
        pair.sender.run("import os; os.environ['CUDA_VISIBLE_DEVICES'] = shown", shown=sender)
        pair.receiver.run("import os; os.environ['CUDA_VISIBLE_DEVICES'] = shown", shown=receiver)
        pair.start(devices=(sender.count(","), receiver.count(",")))
        stats = pair.sync()
        pair.assert_equal()
        assert stats["transport"] == "cuda_ipc"
        pair.close()


def test_mig_slices(pair: Pair) -> None:
    with fakes.session(devices="MIG,MIG") as env:
        slices = Pair({**env, "CUDA_VISIBLE_DEVICES": uuid(1, "MIG")})
        slices.start().sync()
        slices.assert_equal()
        slices.close()


def test_two_gpus_with_peer_access(pair: Pair) -> None:
    pair.start(devices=(0, 1))
    pair.sync()
    pair.assert_equal()


def test_a_receiver_makes_no_context_on_the_senders_gpu(pair: Pair) -> None:
    """One takes 0.2 s on an H200, and memory of that GPU."""
    pair.start(devices=(0, 1))
    pair.sync()
    pair.receiver.run("before = driver.live()['contexts']")
    pair.receiver.run("driver.fail('cuDevicePrimaryCtxRetain', 1)")
    pair.sync()
    assert pair.receiver.run("result = driver.live()['contexts'] - before") == 0


@pytest.mark.parametrize(
    ("settings", "visible"), [({"no_peer": 1}, None), ({}, "1"), ({"devices": "MIG,MIG"}, None)]
)
def test_another_gpu_that_cannot_be_read_is_refused(
    settings: dict[str, object], visible: str | None
) -> None:
    with fakes.session(**settings) as env:
        pair = Pair(env)
        if visible is not None:
            pair.receiver.run(
                "import os; os.environ['CUDA_VISIBLE_DEVICES'] = shown", shown=visible
            )
        pair.start(devices=(0, 0 if visible else 1))
        before = pair.receiver.run("result = contents(params)")
        with pytest.raises(PeerError) as caught:
            pair.pull(pair.offer())
        assert caught.value.names[0] == "TransportUnavailableError"
        assert uuid(0) in caught.value.text
        assert uuid(1) in caught.value.text
        assert "nccl" in caught.value.text
        assert pair.receiver.run("result = (receiver.torn, contents(params))") == (False, before)
        pair.close()


def test_tensors_of_two_devices_need_two_senders(pair: Pair) -> None:
    pair.start()
    with pytest.raises(PeerError, match="embed is on device 0 and head on device 1; use one"):
        pair.sender.run(
            "mixed = {**params, 'head': model(3, 1, ['head'])['head']}\n"
            "arctic_rl_c.WeightSender(mixed, cuda_ipc=True).offer()"
        )
    offer = pair.offer()
    with pytest.raises(PeerError, match=r"the parameters are on devices 0 and 1 \(head\)"):
        pair.receiver.run(
            "mixed = {**params, 'head': model(3, 1, ['head'])['head']}\n"
            "arctic_rl_c.WeightReceiver(mixed).pull(offer)",
            offer=offer,
        )


# ---- one process --------------------------------------------------------------------------------


def small(seed: int, device: int = 0) -> fakes.DeviceArray:
    values = np.random.default_rng(seed).integers(0, 256, 5000, dtype=np.uint8)
    return fakes.device_array(values, device=device)


@pytest.mark.parametrize("keep", [False, True])
def test_the_same_process_uses_its_own_pointers(driver: fakes.Driver, keep: bool) -> None:
    source, target = small(1), small(2)
    sender = arctic_rl_c.WeightSender({"w": source}, cuda_ipc=True)
    receiver = arctic_rl_c.WeightReceiver({"w": target}, keep_mapped=keep)
    for number in range(3):
        source.array[:7] = number
        receiver.pull(sender.offer())
        assert np.array_equal(source.array, target.array)
        assert receiver.live_mappings() == 0
        assert driver.live()["mappings"] == 0
    sender.close()
    receiver.close()


def test_non_contiguous_on_both_sides(driver: fakes.Driver) -> None:
    source = fakes.device_array(np.arange(60 * 40, dtype=np.uint16).reshape(60, 40))
    fused = fakes.device_array(np.zeros((40, 180), np.uint16))
    params = {
        "q": source.view(np.s_[:, 3:33]),
        "k": source.transposed(1, 0),
        "v": source.view(np.s_[::2]),
        "empty": fakes.device_array(np.zeros((0, 4), np.uint16)),
        "scalar": fakes.device_array(np.array(7, np.uint16)),
    }
    scalar, empty = (
        fakes.device_array(np.array(0, "u2")),
        fakes.device_array(np.zeros((0, 4), "u2")),
    )
    targets = {
        "q": fused.view(np.s_[:30, :60]).transposed(1, 0),
        "k": fused.view(np.s_[:, 60:120]),
        "v": fused.view(np.s_[:30, 120:160]),
        "empty": empty,
        "scalar": scalar,
    }
    with (
        arctic_rl_c.WeightSender(params, cuda_ipc=True, verify="all") as sender,
        arctic_rl_c.WeightReceiver(targets) as receiver,
    ):
        stats = receiver.pull(sender.offer(), verify="all")
        assert stats.transport == "cuda_ipc"
    for name, target in targets.items():
        assert np.array_equal(params[name].array, target.array), name
    assert not fused.array[:30, 160:].any()


def test_nothing_but_empty_tensors(driver: fakes.Driver) -> None:
    make = lambda: fakes.device_array(np.zeros((0, 4), np.float32))  # noqa: E731
    with (
        arctic_rl_c.WeightSender({"w": make()}, cuda_ipc=True) as sender,
        arctic_rl_c.WeightReceiver({"w": make()}) as receiver,
    ):
        assert receiver.pull(sender.offer()).bytes == 0


def test_memory_that_is_gone_is_noticed_before_anything_is_written(driver: fakes.Driver) -> None:
    """A parameter whose memory was unmapped (a sleeping engine) must not reach a kernel."""
    source, target = small(1), small(2)
    asleep = fakes.device_array(np.zeros(5000, np.uint8), vmm=True)
    with (
        arctic_rl_c.WeightSender({"a": source, "b": small(3)}, cuda_ipc=True) as sender,
        arctic_rl_c.WeightReceiver({"a": target, "b": asleep}) as receiver,
    ):
        receiver.pull(sender.offer())
        before = target.array.copy()
        source.array[:] = 1
        driver.free(asleep.memory.pointer)
        asleep.memory.pointer = 0
        with pytest.raises(ValueError, match=r"b: 0x[0-9a-f]+ is not memory of a CUDA"):
            receiver.pull(sender.offer())
        assert not receiver.torn
        assert np.array_equal(target.array, before)


def test_expandable_memory_has_no_handle(driver: fakes.Driver) -> None:
    tensor = fakes.device_array(np.zeros(5000, np.uint8), vmm=True)
    with arctic_rl_c.WeightSender({"w": tensor}, cuda_ipc=True, low_memory=False) as sender:
        with pytest.raises(arctic_rl_c.TransportUnavailableError, match="w is in memory that has"):
            sender.offer()
        assert sender.live_exports() == 0


def test_ipc_that_the_platform_lacks() -> None:
    with fakes.session(no_ipc=1) as env:
        pair = Pair(env).start()
        with pytest.raises(PeerError, match="CUDA IPC does not work on this platform") as caught:
            pair.offer()
        assert caught.value.names[0] == "TransportUnavailableError"
        assert "CUDA_ERROR_NOT_SUPPORTED" in caught.value.text
        pair.close()


# ---- peers that die, and time that passes -------------------------------------------------------


def test_sender_killed_before_the_pull(pair: Pair) -> None:
    offer = pair.start().offer()
    before = pair.receiver.run("result = contents(params)")
    pair.sender.kill()
    with pytest.raises(PeerError) as caught:
        pair.pull(offer)
    assert caught.value.names[0] == "PeerLostError"
    assert pair.receiver.run("result = (receiver.torn, contents(params))") == (False, before)
    assert pair.receiver.run("result = driver.live()['mappings']") == 0


#: Pulls on a thread of its own, and answers when the copy is on the device (which is held).
PULL_HELD = """
import threading
failure = []
def pull():
    try:
        receiver.pull(offer, timeout=30)
    except Exception as error:
        failure.append(error)
thread = threading.Thread(target=pull)
driver.hold(True)
thread.start()
while driver.pending() == 0 and thread.is_alive():
    pass
"""

#: Waits for that thread, and raises what it raised.
PULL_END = """
thread.join()
driver.hold(False)
if failure:
    raise failure[0]
"""


def test_sender_killed_during_the_copy(pair: Pair) -> None:
    pair.start(receiver={"keep_mapped": True}).sync()
    pair.receiver.run(PULL_HELD, offer=pair.offer())
    pair.sender.kill()
    with pytest.raises(PeerError, match="exited or was killed during the sync") as caught:
        pair.receiver.run(PULL_END)
    assert caught.value.names[0] == "PeerLostError"
    assert pair.receiver.run("result = receiver.torn") is True
    assert "killed during the sync" in torn_text(pair)


def torn_text(pair: Pair) -> str:
    with pytest.raises(PeerError) as caught:
        pair.receiver.run("receiver.check()")
    assert caught.value.names[0] == "TornWeightsError"
    return caught.value.text


def test_receiver_killed_during_the_copy(pair: Pair) -> None:
    pair.start(receiver={"keep_mapped": True}).sync()
    pair.receiver.run(PULL_HELD, offer=pair.offer())
    waiting = pair.sender.start("sender.serve(timeout=30)")
    pair.receiver.kill()
    with pytest.raises(PeerError) as caught:
        waiting.result()
    assert caught.value.names[0] == "PeerLostError"
    pair.sender.run("sender.release(timeout=5); sender.offer()")


def test_device_that_hangs(pair: Pair) -> None:
    """Before the copy nothing is torn; during it the receiver is, until the next full pull."""
    pair.start()
    pair.receiver.run("driver.hold(True)")
    with pytest.raises(PeerError, match="upload of the copy tables: not done on dev") as caught:
        pair.pull(pair.offer(), timeout=0.2)
    assert caught.value.names[0] == "PeerTimeoutError"
    assert pair.receiver.run("driver.hold(False); result = receiver.torn") is False
    pair.receiver.run(
        "receiver.close(); receiver = arctic_rl_c.WeightReceiver(params, keep_mapped=True)"
    )
    pair.sync()
    pair.receiver.run("driver.hold(True)")
    with pytest.raises(PeerError, match="copy of the weights: not done on device 0") as caught:
        pair.pull(pair.offer(), timeout=0.2)
    assert caught.value.names[0] == "PeerTimeoutError"
    assert pair.receiver.run("driver.hold(False); result = receiver.torn") is True
    pair.sync()
    pair.assert_equal()


def test_offer_under_its_deadline(pair: Pair) -> None:
    pair.start()
    pair.sender.run("driver.hold(True)")
    with pytest.raises(PeerError, match="what the caller's stream held") as caught:
        pair.offer(timeout=0.2)
    assert caught.value.names[0] == "PeerTimeoutError"
    pair.sender.run("driver.hold(False)")
    pair.sync()


def test_child_after_fork_is_told_to_spawn() -> None:
    with fakes.session() as env, Peer(env) as peer:
        text = peer.run(
            MODEL + "\nimport os\n"
            "arctic_rl_c.WeightSender(params, cuda_ipc=True).offer()\n"
            "reader, writer = os.pipe()\n"
            "if os.fork() == 0:\n"
            "    try:\n"
            "        arctic_rl_c.WeightSender(params, cuda_ipc=True).offer()\n"
            "    except arctic_rl_c.TransportUnavailableError as error:\n"
            "        os.write(writer, str(error).encode())\n"
            "    os._exit(0)\n"
            "os.wait()\n"
            "result = os.read(reader, 4096).decode()\n",
            fill=1,
            device=0,
        )
        assert "CUDA does not survive a fork" in text
        assert "spawn" in text


# ---- every call may fail ------------------------------------------------------------------------


def sweep(pair: Pair, peer: Peer, phase: str) -> set[str]:
    """Let the n-th driver call of one side fail, for every n; return the classes it raised."""
    raised: set[str] = set()
    for nth in range(1, 400):
        peer.run("driver.fail('any', nth)", nth=nth)
        calls = peer.run("result = driver.calls()")
        try:
            pair.sync(verify="all")
        except PeerError as error:
            raised.add(error.names[0])
            assert "CUDA_ERROR_UNKNOWN" in error.text, (phase, nth, error.text)
        used = peer.run("driver.reset(); result = driver.calls()") - calls
        live = pair.receiver.run("result = driver.live()")
        assert live["mappings"] == 0, (phase, nth, live)
        assert live["allocations"] == 5, (phase, nth, live)
        assert peer.run("result = driver.depth()") == 0
        if used < nth:
            pair.sync(verify="all")
            pair.assert_equal()
            return raised
    raise AssertionError("the scenario never got through")


def test_every_call_of_the_receiver_may_fail(pair: Pair) -> None:
    pair.start(sender={"verify": "all"})
    raised = sweep(pair, pair.receiver, "receiver")
    assert "WeightSyncError" in raised
    assert raised <= {"WeightSyncError", "TransportUnavailableError", "ValueError"}


def test_every_call_of_the_sender_may_fail(pair: Pair) -> None:
    pair.start(sender={"verify": "all"})
    raised = sweep(pair, pair.sender, "sender")
    assert "TransportUnavailableError" in raised
    assert raised <= {"WeightSyncError", "TransportUnavailableError", "ValueError"}


def test_engines_are_kept_for_the_next_one(driver: fakes.Driver) -> None:
    """The kernels are loaded once, not for each sync."""
    source, target = small(1), small(2)

    def sync() -> None:
        with (
            arctic_rl_c.WeightSender({"w": source}, cuda_ipc=True) as sender,
            arctic_rl_c.WeightReceiver({"w": target}) as receiver,
        ):
            receiver.pull(sender.offer())

    sync()
    modules = driver.live()["modules"]
    driver.fail("cuModuleLoadDataEx", 1)
    sync()
    assert driver.live()["modules"] == modules
    native.library()  # the same driver table serves both libraries of this process
