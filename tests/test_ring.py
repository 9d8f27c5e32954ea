# SPDX-License-Identifier: Apache-2.0
"""low_memory: weights through a ring of slots between real processes, on the fake driver."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

import arctic_rl_c
import fakes
from fakes.pairs import FEED, GATHER, MODEL, SPECIFIED, Pair, sync_may_fail
from fakes.peers import PeerDied, PeerError
from peers import Control, until

SLOT = 1 << 16  # the smallest; a ring has two

RING: dict[str, object] = {"transport": "ring"}


@pytest.fixture
def pair() -> Iterator[Pair]:
    with fakes.session() as env:
        found = Pair(env, options=RING)
        yield found
        found.close()


# ---- the usual case -----------------------------------------------------------------------------


def test_weights_arrive(pair: Pair) -> None:
    sent, got = pair.start().sync()
    pair.assert_equal()
    assert got["transport"] == sent["transport"] == "ring"
    assert got["fallback_reason"] is None
    assert got["tensors"] == 7
    assert sent["bytes"] == 700 * 300 * 2 + 64 * 64 * 4 + 33 * 64 * 2 + 64 * 4 + 5 * 7
    pair.assert_nothing_open()


def test_the_extra_memory_is_the_ring_whatever_the_tensors_are(pair: Pair) -> None:
    sent, got = pair.start().sync()
    tables = 64 << 10
    assert 2 * SLOT <= int(str(sent["extra_bytes"])) < 2 * SLOT + tables
    assert int(str(got["extra_bytes"])) < tables


@pytest.mark.parametrize("keep", [False, True])
def test_many_syncs_leave_nothing_more(pair: Pair, keep: bool) -> None:
    pair.start(sender={"keep_mapped": keep}, receiver={"keep_mapped": keep})
    pair.assert_syncs_leave_nothing()
    assert pair.receiver.run("result = receiver.live_mappings()") == int(keep)
    pair.assert_nothing_open()


def test_tables_are_made_anew_when_a_parameter_moves(pair: Pair) -> None:
    pair.start(sender={"keep_mapped": True}, receiver={"keep_mapped": True})
    pair.sync()
    pair.receiver.run(  # first: it has the ring mapped
        "params['layer.k'] = model(8)['layer.k']\n"
        "receiver.close(); receiver = arctic_rl_c.WeightReceiver(params, keep_mapped=True)"
    )
    pair.sender.run(
        "old, params['layer.q'] = params['layer.q'], model(9)['layer.q']\n"
        "sender.close(); sender = arctic_rl_c.WeightSender(params, **options)"
    )
    pair.sync()
    pair.assert_equal()


def test_two_receivers_take_the_same_slots() -> None:
    with fakes.session() as env:
        pair = Pair(env, receivers=2, options=RING)
        pair.start().sync()
        pair.assert_equal()
        pair.assert_nothing_open()
        pair.close()


def test_verified(pair: Pair) -> None:
    pair.start(sender={"verify": "all"})
    assert pair.sync(verify="all")[1]["verified"] == 5  # neither the empty nor the tied one


def test_work_that_lags_on_both_sides(pair: Pair) -> None:
    """A chunk is announced when it is whole, and a slot is free when it has been read."""
    pair.start()
    pair.sender.run("driver.lag(3_000)")
    pair.receiver.run("driver.lag(3_000)")
    pair.sync()
    pair.assert_equal()


def test_without_kernels(pair: Pair) -> None:
    for peer in (pair.sender, pair.receiver):
        peer.run(MODEL + "\ndriver.fail('cuModuleLoadDataEx', 1)", fill=1, device=0, vmm=False)
    pair.start().sync()
    pair.assert_equal()


def test_memory_without_a_handle_goes_through_the_ring_and_says_so(pair: Pair) -> None:
    """Expandable segments, memory pools: found out from the driver, not from a variable."""
    pair.start(sender={"transport": None, "cuda_ipc": True}, vmm=True)
    sent, got = pair.sync()
    pair.assert_equal()
    assert sent["transport"] == got["transport"] == "ring"
    assert "embed is in memory that has no IPC handle" in str(got["fallback_reason"])


def test_low_memory_of_tensors_that_can_be_read_in_place_takes_no_ring(pair: Pair) -> None:
    """The promise is about memory: nothing is less than any ring."""
    sent, got = pair.start({"transport": None, "low_memory": True}).sync()
    pair.assert_equal()
    assert sent["transport"] == got["transport"] == "cuda_ipc"
    assert got["fallback_reason"] is None
    assert int(str(sent["extra_bytes"])) + int(str(got["extra_bytes"])) < SLOT


@pytest.mark.parametrize("named", [{"low_memory": True}, {"transport": "ring"}])
def test_low_memory_of_memory_without_a_handle_is_a_ring(
    pair: Pair, named: dict[str, object]
) -> None:
    pair.start({"transport": None, **named}, vmm=True)
    sent, _ = pair.sync()
    pair.assert_equal()
    assert sent["transport"] == "ring"


# ---- tensors that come during serve() -----------------------------------------------------------


def test_tensors_are_asked_for_one_after_another(pair: Pair) -> None:
    pair.start(code=SPECIFIED)
    pair.sync(FEED)
    pair.assert_equal()
    assert pair.sender.run("result = alive == list(params)")


def test_a_tensor_may_go_when_the_next_is_asked_for(pair: Pair) -> None:
    pair.start(code=SPECIFIED)
    pair.sync(GATHER)
    pair.assert_equal()
    pair.assert_nothing_open()


def test_strided_tensors_can_be_fed(pair: Pair) -> None:
    pair.start(code=SPECIFIED)
    pair.sync(
        "def turn(t):\n"
        "    if t.array.ndim < 2: return t\n"
        "    return fakes.device_array(np.ascontiguousarray(t.array.T)).transposed(1, 0)\n"
        "turned = {n: turn(t) for n, t in params.items()}\n"
        "s = sender.serve(turned)"
    )
    pair.assert_equal()


@pytest.mark.parametrize(
    ("feed", "name", "text"),
    [
        ("[]", "WeightMismatchError", "ended after 0 tensors; the offer has 6, and embed"),
        ("[('layer.q', params['layer.q'])]", "WeightMismatchError", "came as layer.q; the offer"),
        ("[('embed', params['norm'])]", "WeightMismatchError", "came as float32.64."),
        ("[('embed', np.zeros((700, 300), 'u2'))]", "ValueError", "not in the memory of device 0"),
        ("[('embed',)]", "TypeError", "pairs"),
        ("[('embed', 3)]", "TypeError", "embed: expected a torch tensor"),
        ("(1 / 0 for _ in 'x')", "ZeroDivisionError", "division"),
    ],
)
def test_a_feed_that_is_wrong_ends_the_sync_on_both_sides(
    pair: Pair, feed: str, name: str, text: str
) -> None:
    pair.start(code=SPECIFIED)
    pulls = pair.pull(pair.offer())
    with pytest.raises(PeerError, match=text) as caught:
        pair.sender.run(f"sender.serve({feed})")
    assert name in caught.value.names
    with pytest.raises(PeerError, match=r"the sender .* gave up: ") as told:
        pulls[0].result()
    assert told.value.names[0] == "WeightSyncError"
    pair.sync(FEED)  # and all is well again
    pair.assert_equal()
    assert not pair.receiver.run("result = receiver.torn")


def test_announced_tensors_must_be_given(pair: Pair) -> None:
    pair.start(code=SPECIFIED)
    pulls = pair.pull(pair.offer())
    with pytest.raises(PeerError, match=r"announced as \(dtype, shape\) only; pass them to serve"):
        pair.sender.run("sender.serve()")
    with pytest.raises(PeerError, match="gave up"):
        pulls[0].result()


def test_checksums_need_the_tensors_at_the_offer(pair: Pair) -> None:
    pair.start({"verify": "all"}, code=SPECIFIED)
    with pytest.raises(PeerError, match="verify= needs all tensors at offer"):
        pair.offer()


# ---- when it does not go well -------------------------------------------------------------------


def test_a_sender_that_does_not_serve(pair: Pair) -> None:
    pair.start()
    before = pair.receiver.run("result = contents(params)")
    with pytest.raises(PeerError, match=r"chunk 0 of .* has not come .* is it in serve") as caught:
        pair.pull(pair.offer(), timeout=0.2)[0].result()
    assert caught.value.names[0] == "PeerTimeoutError"
    assert pair.receiver.run("result = contents(params)") == before
    pair.sync()
    pair.assert_equal()


def test_a_receiver_that_does_not_come(pair: Pair) -> None:
    pair.start()
    pair.offer()
    with pytest.raises(PeerError, match="still waits for its slot: the slowest of 1") as caught:
        pair.sender.run("sender.serve(timeout=0.2)")
    assert caught.value.names[0] == "PeerTimeoutError"
    pair.sync()
    pair.assert_equal()


def test_a_receiver_that_refuses_ends_the_senders_wait(pair: Pair) -> None:
    pair.start()
    pair.receiver.run("receiver = arctic_rl_c.WeightReceiver({'other': params['norm']})")
    pulls = pair.pull(pair.offer())
    with pytest.raises(PeerError, match="WeightMismatchError"):
        pulls[0].result()
    with pytest.raises(PeerError, match=r"receiver 0 of 1 .* failed") as caught:
        pair.sender.run("sender.serve()")
    assert caught.value.names[0] == "WeightSyncError"


@pytest.mark.parametrize("victim", ["sender", "receiver"])
def test_death_in_the_middle_is_noticed(victim: str) -> None:
    """Each side is stopped after the first chunks, and then killed."""
    with fakes.session() as env:
        # A first sync, so that no tables have to be uploaded once the GPU is held.
        pair = Pair(env, options=RING).start({"keep_mapped": True}, {"keep_mapped": True})
        pair.sync()
        dying = getattr(pair, victim)
        offer = pair.offer()
        dying.run("driver.hold(True)")
        with Control(offer) as control:
            pulls = pair.pull(offer)
            serve = pair.sender.start("sender.serve()")
            until(lambda: control.receiver(0) == Control.WRITING)
            until(lambda: control.sender == Control.SERVING)
        dying.kill()
        survivor = pulls[0] if victim == "sender" else serve
        with pytest.raises(PeerError) as caught:
            survivor.result()
        assert caught.value.names[0] == "PeerLostError"
        with pytest.raises(PeerDied):
            (serve if victim == "sender" else pulls[0]).result()
        if victim == "sender":
            assert pair.receiver.run("result = receiver.torn")
        pair.close()
        fakes.clean(env["FAKE_CUDA_SESSION"])


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_every_driver_call_may_fail(side: str) -> None:
    """The n-th call fails, for every n, until the sync succeeds: nothing leaks, nobody hangs."""
    with fakes.session() as env:
        # A receiver that fails before it has attached is waited for until the deadline.
        pair = Pair(env, options=RING).start({"timeout": 0.3}, {"timeout": 5.0})
        failing = getattr(pair, side)
        pair.sync()
        pair.sender.run("sender.release()")
        clean = failing.run("result = driver.live()")
        for number in range(1, 400):
            before = failing.run("driver.fail('any', n); result = driver.calls()", n=number)
            failed = not sync_may_fail(pair)
            calls = failing.run("result = driver.calls(); driver.reset()") - before
            pair.sender.run("sender.release()")
            live = failing.run("result = driver.live()")
            for kind in ("streams", "modules", "contexts"):
                # An engine that could not be asked whether it is idle is given up, and only that.
                assert live.pop(kind) - clean[kind] <= number
            assert live.items() <= clean.items(), (number, live)
            if not failed and calls < number:
                break
        else:
            pytest.fail("400 calls and no end")
        pair.sync()
        pair.assert_equal()
        pair.assert_nothing_open()
        pair.close()


# ---- one process, offers that are wrong ----------------------------------------------------------


def small(seed: int, size: int = 5000) -> fakes.DeviceArray:
    values = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return fakes.device_array(values)


def test_the_same_process_with_two_threads(driver: fakes.Driver) -> None:
    source, target = small(1, 500_000), small(2, 500_000)
    with (
        arctic_rl_c.WeightSender({"w": source}, transport="ring", ring_bytes=2 * SLOT) as sender,
        arctic_rl_c.WeightReceiver({"w": target}) as receiver,
    ):
        offer = sender.offer()
        serving = threading.Thread(target=sender.serve)
        serving.start()
        receiver.pull(offer)
        serving.join()
        assert np.array_equal(source.array, target.array)
        assert driver.live()["mappings"] == 0


@pytest.mark.parametrize("size", [1, 100_000])
def test_a_ring_that_is_too_small_is_refused(driver: fakes.Driver, size: int) -> None:
    sender = arctic_rl_c.WeightSender({"w": small(1)}, transport="ring", ring_bytes=size)
    with pytest.raises(ValueError, match="too small: at least 2 slots of 65536 bytes"):
        sender.offer()
