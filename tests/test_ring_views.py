# SPDX-License-Identifier: Apache-2.0
"""views() through a ring: each tensor is put together and lent, then the next takes its place."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import arctic_rl_c
import fakes
from fakes.pairs import FEED, SPECIFIED, Pair
from fakes.peers import PeerError
from peers import until

SLOT = 1 << 16  # the smallest; a ring has two


@pytest.fixture
def pair() -> Iterator[Pair]:
    with fakes.session() as env:
        found = Pair(env, options={"transport": "ring"})
        yield found
        found.close()


def small(seed: int) -> fakes.DeviceArray:
    values = np.random.default_rng(seed).integers(0, 256, 5000, dtype=np.uint8)
    return fakes.device_array(values)


TAKE = """
found = []
with receiver.views(offer, **views) as tensors:
    for name, view in tensors:
        assert view.__dlpack_device__() == (2, 0)
        found.append((name, view.shape, fakes.read(fakes.address_of(view), view.nbytes)))
result = found, {n: getattr(tensors.stats, n) for n in dir(tensors.stats) if n[0] != "_"}
"""


def take(pair: Pair, serve: str = "sender.serve()", **views: object) -> tuple[list[Any], Any]:
    offer = pair.offer()
    taking = pair.receiver.start(TAKE, offer=offer, views=views)
    pair.sender.run(serve)
    found, stats = taking.result()
    return found, stats


@pytest.mark.parametrize("fed", [False, True])
def test_views_yield_each_tensor_when_it_is_whole(pair: Pair, fed: bool) -> None:
    if fed:
        pair.start(code=SPECIFIED)
    else:
        pair.start(sender={"verify": "all"})
    for version in (1, 2):
        serve = FEED if fed else "sender.serve()"
        found, stats = take(pair, serve, verify=None if fed else "all")
        sent = pair.sender.run("result = contents(params)")
        assert {name: data for name, _, data in found} == sent
        names = [name for name, _, _ in found]
        if not fed:  # what shares a tensor's bytes comes while they are there
            assert names[:2] == ["embed", "tied"]
            assert stats["verified"] == len(names)
        assert {name: shape for name, shape, _ in found}["layer.k"] == (33, 64)
        assert stats["extra_bytes"] == 700 * 300 * 2  # the largest tensor, and no more
        assert (stats["version"], stats["tensors"]) == (version, len(names))
        assert pair.receiver.run("result = receiver.torn, receiver.version") == (False, version)
    pair.assert_nothing_open()


def test_views_pass_over_names_that_are_not_synced(pair: Pair) -> None:
    """In front of, between and behind the others: their chunks are given back all the same."""
    options = {"non_synced": ["embed", "tied", "layer.k", "head"]}
    pair.start(receiver=options)
    found, _ = take(pair)
    assert [name for name, _, _ in found] == ["layer.q", "norm", "empty"]
    sent = pair.sender.run("result = contents(params)")
    assert all(sent[name] == data for name, _, data in found)
    pair.assert_nothing_open()


def test_views_need_no_tensors_of_ones_own(pair: Pair) -> None:
    pair.start()
    pair.receiver.run("receiver = arctic_rl_c.WeightReceiver(dict.fromkeys(params))")
    found, _ = take(pair)
    assert {name: data for name, _, data in found} == pair.sender.run("result = contents(params)")


def test_views_may_end_without_a_look_at_the_end(pair: Pair) -> None:
    """Code that knows how many there are never asks for one more."""
    pair.start()
    taking = pair.receiver.start(
        "with receiver.views(offer) as tensors:\n"
        "    for _ in params: next(tensors)\n"
        "result = receiver.torn",
        offer=pair.offer(),
    )
    pair.sender.run("sender.serve()")
    assert taking.result() is False


def test_pull_and_views_take_turns(pair: Pair) -> None:
    pair.start(sender={"keep_mapped": True}, receiver={"keep_mapped": True})
    pair.sync()
    take(pair)
    pair.sync()
    pair.assert_equal()
    pair.assert_nothing_open()


def test_a_view_is_valid_until_the_next(pair: Pair) -> None:
    pair.start()
    taking = pair.receiver.start(
        "with receiver.views(offer) as tensors:\n"
        "    views = {name: view for name, view in tensors}\n"
        "    views['head'].__dlpack__()\n"
        "    views['norm'].__dlpack__()",
        offer=pair.offer(),
    )
    with pytest.raises(PeerError, match="the code that read the weights raised ClosedError"):
        pair.sender.run("sender.serve()")
    with pytest.raises(PeerError, match="norm has made room for the tensor after it"):
        taking.result()


def test_views_left_in_the_middle_are_torn_and_the_sender_hears(pair: Pair) -> None:
    pair.start()
    taking = pair.receiver.start(
        "with receiver.views(offer) as tensors:\n    next(tensors)", offer=pair.offer()
    )
    with pytest.raises(PeerError, match="the block ended after 1 of"):
        pair.sender.run("sender.serve()")
    with pytest.raises(PeerError, match="the block ended after 1 of"):
        taking.result()
    with pytest.raises(PeerError, match="TornWeightsError"):
        pair.receiver.run("receiver.check()")
    take(pair)
    pair.receiver.run("receiver.check()")
    pair.assert_nothing_open()


def test_views_wait_no_longer_than_they_may(pair: Pair) -> None:
    pair.start()
    with pytest.raises(PeerError, match=r"chunk 0 of \d+ has not come from the sender") as caught:
        pair.receiver.run(TAKE, offer=pair.offer(), views={"timeout": 0.05})
    assert caught.value.names[0] == "PeerTimeoutError"
    assert pair.receiver.run("result = receiver.torn") is True
    pair.sender.run("sender.release()")
    pair.assert_nothing_open()


def test_views_notice_the_death_of_the_sender(pair: Pair) -> None:
    pair.start()
    taking = pair.receiver.start(TAKE, offer=pair.offer(), views={})
    pair.sender.kill()
    with pytest.raises(PeerError) as caught:
        taking.result()
    assert caught.value.names[0] == "PeerLostError"


def test_views_notice_other_bytes(pair: Pair) -> None:
    pair.start(sender={"verify": "all"})
    offer = pair.offer()
    pair.sender.run("params['norm'].array[3] += 1")
    taking = pair.receiver.start(TAKE, offer=offer, views={"verify": "all"})
    with pytest.raises(PeerError):
        pair.sender.run("sender.serve()")
    with pytest.raises(PeerError, match="norm: the checksum of the mapped bytes is"):
        taking.result()


@pytest.mark.parametrize("call", ["cuMemAlloc_v2", "cuMemcpyAsync", "cuEventRecord"])
def test_views_survive_a_failing_driver(pair: Pair, call: str) -> None:
    """Whichever call it is: the right exception, nothing left open, and the next one goes well."""
    pair.start()
    for nth in range(1, 40):
        offer = pair.offer()
        pair.receiver.run(f"driver.fail({call!r}, {nth})")
        taking = pair.receiver.start(TAKE, offer=offer, views={})
        serving = pair.sender.start("sender.serve()")
        try:
            taking.result()
        except PeerError as error:
            assert error.names[0] in ("WeightSyncError", "MemoryError"), error
            with pytest.raises(PeerError):
                serving.result()
            continue
        serving.result()
        break
    else:
        raise AssertionError("it never went well")
    assert nth > 1
    pair.assert_nothing_open()


def test_views_in_the_same_process(driver: fakes.Driver) -> None:
    source = {"a": small(1), "b": small(2)}
    expected = dict.fromkeys(source)
    with (
        arctic_rl_c.WeightSender(source, transport="ring", ring_bytes=2 * SLOT) as sender,
        arctic_rl_c.WeightReceiver(expected) as receiver,
    ):
        offer = sender.offer()
        serving = threading.Thread(target=sender.serve)
        serving.start()
        with receiver.views(offer) as tensors:
            for name, view in tensors:
                data = fakes.read(fakes.address_of(view), view.nbytes)
                assert data == source[name].array.tobytes()
        serving.join()


def test_the_next_tensor_waits_for_those_who_read_the_last(pair: Pair) -> None:
    """The buffer is written to after what the reader's stream holds, not before."""
    pair.start()
    pair.receiver.run("driver.lag(3_000)")
    found, _ = take(pair)
    assert {name: data for name, _, data in found} == pair.sender.run("result = contents(params)")
    taking = pair.receiver.start(
        "with receiver.views(offer, stream=stream) as tensors:\n    list(tensors)",
        offer=pair.offer(),
        stream=12345,
    )
    with pytest.raises(PeerError):
        pair.sender.run("sender.serve()")
    with pytest.raises(PeerError, match="ordering after the caller's stream") as caught:
        taking.result()
    assert caught.value.names[0] == "WeightSyncError"


def test_no_two_calls_at_a_time(driver: fakes.Driver) -> None:
    """A signal's handler runs in the middle of the wait, as another thread might."""
    source = {"a": small(1)}
    refused: list[str] = []
    state = {"asked": False}

    def interrupt() -> None:
        until(lambda: state["asked"])
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    with (
        arctic_rl_c.WeightSender(source, transport="ring", ring_bytes=2 * SLOT) as sender,
        arctic_rl_c.WeightReceiver(dict.fromkeys(source)) as receiver,
    ):
        threads = [threading.Thread(target=interrupt), threading.Thread(target=sender.serve)]

        def handle(number: int, frame: object) -> None:
            for call in (tensors.__next__, tensors.__exit__):
                with pytest.raises(RuntimeError) as caught:
                    call()
                refused.append(str(caught.value))
            threads[1].start()

        before = signal.signal(signal.SIGUSR1, handle)
        with receiver.views(sender.offer()) as tensors:
            threads[0].start()
            state["asked"] = True  # no signal is handled between here and the wait
            next(tensors)
        for thread in threads:
            thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert (
        refused == ["views() waits for a tensor in another thread; use it from one at a time"] * 2
    )
