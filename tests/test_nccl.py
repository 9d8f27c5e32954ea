# SPDX-License-Identifier: Apache-2.0
"""nccl: weights over one communicator, between real processes on the fake driver and NCCL."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import fakes
from fakes.pairs import FEED, GATHER, MODEL, RECEIVER, SENDER, SPECIFIED, Pair, sync_may_fail
from fakes.peers import Peer, PeerDied, PeerError
from peers import Control, until

NCCL: dict[str, object] = {"transport": "nccl"}


@contextmanager
def pairs(
    receivers: int = 1,
    *,
    devices: list[int] | None = None,
    background: bool = True,
    report_death: bool = False,
) -> Iterator[Pair]:
    """A sender on device 0 and receivers on one each, unless `devices` says otherwise."""
    with fakes.session(devices=receivers + 1) as env:
        env["FAKE_NCCL_IN_PROGRESS"] = str(int(background))
        env["FAKE_NCCL_REPORT_DEATH"] = str(int(report_death))
        pair = Pair(env, receivers, options=NCCL, devices=devices or list(range(receivers + 1)))
        try:
            yield pair
        finally:
            pair.close()
            fakes.clean(env["FAKE_CUDA_SESSION"])


@pytest.fixture
def pair() -> Iterator[Pair]:
    with pairs() as found:
        yield found


def failures(pair: Pair, offer: bytes | None = None) -> list[PeerError]:
    """A sync that fails on all sides: the errors of the sender and of each receiver."""
    pulls = pair.pull(offer or pair.offer())
    caught = []
    for pending in (pair.sender.start("sender.serve()"), *pulls):
        with pytest.raises(PeerError) as error:
            pending.result()
        caught.append(error.value)
    return caught


# ---- the usual case -----------------------------------------------------------------------------


@pytest.mark.parametrize("background", [True, False])
def test_weights_arrive(background: bool) -> None:
    with pairs(background=background) as pair:
        sent, got = pair.start().sync()
        pair.assert_equal()
        assert got["transport"] == sent["transport"] == "nccl"
        assert got["fallback_reason"] is None
        assert got["tensors"] == 7
        assert sent["bytes"] == 700 * 300 * 2 + 64 * 64 * 4 + 33 * 64 * 2 + 64 * 4 + 5 * 7
        pair.assert_nothing_open()


@pytest.mark.parametrize("receivers", [2, 3, 7])
def test_one_broadcast_serves_all(receivers: int) -> None:
    with pairs(receivers) as pair:
        pair.start()
        for number in range(2):
            pair.sender.run("params['norm'].array[:] = number", number=number)
            pair.sync()
            pair.assert_equal()
        pair.assert_nothing_open()


def test_it_is_what_different_gpus_use(pair: Pair) -> None:
    for wish in ({"colocated": False}, {"cuda_ipc": False}):
        pair.start({"transport": None, **wish})
        assert pair.sync()[1]["transport"] == "nccl"


def test_the_communicator_is_kept_between_syncs(pair: Pair) -> None:
    pair.start().sync()
    for peer in (pair.sender, pair.receiver):
        peer.run("for n in ('ncclGetUniqueId', 'ncclCommInitRankConfig'): driver.fail(n, 1)")
    for number in range(3):
        pair.sender.run("params['norm'].array[:] = number", number=number)
        pair.sync()
        pair.assert_equal()
        assert pair.sender.run("result = driver.communicators()") == 1
        assert pair.receiver.run("result = driver.communicators()") == 1


@pytest.mark.parametrize("keep", [False, True])
def test_many_syncs_leave_nothing_more(pair: Pair, keep: bool) -> None:
    pair.start(sender={"keep_mapped": keep}, receiver={"keep_mapped": keep})
    pair.assert_syncs_leave_nothing()
    pair.assert_nothing_open()


def test_buckets_are_given_back_unless_kept(pair: Pair) -> None:
    pair.start(receiver={"keep_mapped": True})
    params = [p.run("result = driver.live()['allocations']") for p in (pair.sender, pair.receiver)]
    sent, got = pair.sync()
    pair.sender.run("sender.release()")
    assert pair.sender.run("result = driver.live()['allocations']") == params[0]
    assert pair.receiver.run("result = driver.live()['allocations']") > params[1]
    for stats in (sent, got):
        assert 2 << 16 <= int(str(stats["extra_bytes"])) < (2 << 16) + (64 << 10)
    assert pair.receiver.run("result = receiver.live_mappings()") == 0


def test_verified(pair: Pair) -> None:
    pair.start(sender={"verify": "all"})
    assert pair.sync(verify="all")[1]["verified"] == 5  # neither the empty nor the tied one


def test_work_that_lags_on_both_sides(pair: Pair) -> None:
    """A bucket is sent when it is packed, and filled again when it is empty."""
    pair.start()
    pair.sender.run("driver.lag(3_000)")
    pair.receiver.run("driver.lag(3_000)")
    pair.sync()
    pair.assert_equal()


def test_without_kernels(pair: Pair) -> None:
    for device, peer in enumerate((pair.sender, pair.receiver)):
        code = MODEL + "\ndriver.fail('cuModuleLoadDataEx', 1)"
        peer.run(code, fill=1, device=device, vmm=False)
    pair.start().sync()
    pair.assert_equal()


def test_memory_without_an_ipc_handle(pair: Pair) -> None:
    pair.start(vmm=True).sync()
    pair.assert_equal()


def test_more_chunks_than_may_be_under_way(pair: Pair) -> None:
    values = "'big': fakes.device_array(np.full((3 << 20,), fill, 'u1'), device=device)"
    for device, peer in enumerate((pair.sender, pair.receiver)):
        peer.run(MODEL, fill=device + 1, device=device, vmm=False)
        peer.run(f"params = {{{values}}}", fill=device + 1)
    pair.sender.run("sender = arctic_rl_c.WeightSender(params, transport='nccl', ring_bytes=1<<17)")
    pair.receiver.run("receiver = arctic_rl_c.WeightReceiver(params)")
    pair.sync()
    pair.assert_equal()


def test_only_empty_tensors_need_no_communicator(pair: Pair) -> None:
    for device, peer in enumerate((pair.sender, pair.receiver)):
        peer.run(MODEL, fill=1, device=device, vmm=False)
        peer.run("params = {'empty': params['empty']}")
    pair.sender.run("sender = arctic_rl_c.WeightSender(params, transport='nccl')")
    pair.receiver.run("receiver = arctic_rl_c.WeightReceiver(params)")
    pair.sync()
    assert pair.receiver.run("result = driver.communicators()") == 0


# ---- tensors that come during serve() -----------------------------------------------------------


def test_tensors_are_asked_for_one_after_another(pair: Pair) -> None:
    pair.start(code=SPECIFIED)
    pair.sync(FEED)
    pair.assert_equal()
    assert pair.sender.run("result = alive == list(params)")


def test_nothing_is_under_way_while_the_callers_code_runs(pair: Pair) -> None:
    """It may wait for the device, where no deadline reaches."""
    pair.start(code=SPECIFIED)
    pair.sender.run("driver.lag(1_000)")
    pair.sync(
        "pending = []\n"
        "def turn(t):\n"
        "    if t.array.ndim < 2: return t\n"
        "    return fakes.device_array(np.ascontiguousarray(t.array.T)).transposed(1, 0)\n"
        "def feed():\n"
        "    for name, tensor in params.items():\n"
        "        pending.append(driver.pending())\n"
        "        yield name, turn(tensor)\n"
        "s = sender.serve(feed())"
    )
    pair.assert_equal()
    assert pair.sender.run("result = pending") == [0] * 6


def test_a_tensor_may_go_when_the_next_is_asked_for(pair: Pair) -> None:
    pair.start(code=SPECIFIED)
    pair.sender.run("driver.lag(1_000)")
    pair.sync(GATHER)
    pair.assert_equal()
    pair.assert_nothing_open()


@pytest.mark.parametrize(
    ("feed", "text"),
    [
        ("[('layer.q', params['layer.q'])]", "came as layer.q; the offer"),
        ("[('embed', params['norm'])]", "came as float32.64."),
        ("(1 / 0 for _ in 'x')", "division"),
    ],
)
def test_a_feed_that_is_wrong_ends_the_sync_on_both_sides(pair: Pair, feed: str, text: str) -> None:
    pair.start(code=SPECIFIED)
    pulls = pair.pull(pair.offer())
    with pytest.raises(PeerError, match=text):
        pair.sender.run(f"sender.serve({feed})")
    with pytest.raises(PeerError, match=r"the sender .* gave up: "):
        pulls[0].result()
    pair.sync(FEED)  # and all is well again
    pair.assert_equal()
    assert not pair.receiver.run("result = receiver.torn")


def test_announced_tensors_must_be_given(pair: Pair) -> None:
    pair.start(code=SPECIFIED)
    sent, got = failures(pair)
    assert "announced as (dtype, shape) only; pass them to serve" in sent.text
    assert "gave up" in got.text
    assert pair.receiver.run("result = driver.communicators(), receiver.torn") == (0, False)


# ---- what differs is a sentence, and no hang ----------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "parts"),
    [
        ({"FAKE_NCCL_VERSION": "22102"}, ["NCCL 2.28.3", "NCCL 2.21.2", "ARCTIC_RL_C_NCCL"]),
        (
            {"NCCL_CUMEM_ENABLE": "0", "NCCL_NET": "Socket"},
            ["NCCL_CUMEM_ENABLE is unset there and 0 here", "NCCL_NET is unset there and Socket"],
        ),
    ],
)
def test_versions_and_settings_must_agree(
    pair: Pair, variables: dict[str, str], parts: list[str]
) -> None:
    pair.receiver.run("import os; os.environ.update(new)", new=variables)
    sent, got = failures(pair.start())
    assert sent.names[0] == "WeightSyncError"
    assert got.names[0] == "TransportUnavailableError"
    for part in parts:
        assert part in sent.text
        assert part in got.text
    assert pair.receiver.run("result = receiver.torn, driver.communicators()") == (False, 0)


def test_settings_of_one_process_may_differ(pair: Pair) -> None:
    new = {"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "lo"}
    pair.receiver.run("import os; os.environ.update(new)", new=new)
    pair.start().sync()
    pair.assert_equal()


def test_sender_and_receiver_on_one_gpu_are_refused() -> None:
    with pairs(devices=[0, 0]) as pair:
        sent, got = failures(pair.start())
        assert got.names[0] == "TransportUnavailableError"
        for text in (sent.text, got.text):
            assert "both on GPU-" in text
            assert "cuda_ipc=True" in text


def test_two_receivers_on_one_gpu_are_refused() -> None:
    with pairs(2, devices=[0, 1, 1]) as pair:
        sent, *got = failures(pair.start())
        assert sent.names[0] == "TransportUnavailableError"
        for error in (sent, *got):
            assert "receivers 0 and 1 are both on GPU-" in error.text
        assert pair.receiver.run("result = receiver.torn") is False


def test_names_that_differ_end_the_senders_wait(pair: Pair) -> None:
    pair.start()
    pair.receiver.run("receiver = arctic_rl_c.WeightReceiver({'other': params['norm']})")
    sent, got = failures(pair)
    assert got.names[0] == "WeightMismatchError"
    assert "receiver 0 of 1" in sent.text


def test_counts_that_differ_are_noticed_before_the_transfer(pair: Pair) -> None:
    """A receiver that speaks for other bytes than the offer's, written by hand."""
    pair.start()
    offer = pair.offer()
    serve = pair.sender.start("sender.serve()")
    name = offer[176:240].rstrip(b"\0").decode()
    with (Path("/dev/shm") / name.lstrip("/")).open("r+b") as file:
        page = mmap.mmap(file.fileno(), 0)
        page[704 + 8 : 704 + 48] = offer[48:88]  # a process that lives: the sender itself
        page[704 + 48 : 704 + 96] = struct.pack("<16sQqqQ", b"GPU of another  ", 1, 2, 3, 0)
        page[704 : 704 + 4] = struct.pack("<I", Control.ATTACHED)
        page[704 + 704 : 704 + 712] = struct.pack("<Q", 1)
        with pytest.raises(PeerError, match="receiver 0 expects 2 chunks of 3 bytes") as caught:
            serve.result()
        page.close()
    assert caught.value.names[0] == "WeightMismatchError"


def test_views_are_not_to_be_had(pair: Pair) -> None:
    pair.start()
    with pytest.raises(PeerError, match="which nccl does not reach"):
        pair.receiver.run("with receiver.views(offer): pass", offer=pair.offer())


def test_an_offer_is_served_once(pair: Pair) -> None:
    pair.start().sync()
    with pytest.raises(PeerError, match="served already; make a new one"):
        pair.sender.run("sender.serve()")
    pair.sync()
    pair.assert_equal()


# ---- deadlines ----------------------------------------------------------------------------------


def test_a_sender_that_does_not_serve(pair: Pair) -> None:
    pair.start()
    before = pair.receiver.run("result = contents(params)")
    with pytest.raises(PeerError, match=r"has not begun; is it in serve\(\)") as caught:
        pair.pull(pair.offer(), timeout=0.2)[0].result()
    assert caught.value.names[0] == "PeerTimeoutError"
    assert pair.receiver.run("result = contents(params)") == before
    assert pair.receiver.run("result = receiver.torn") is False
    pair.sync()
    pair.assert_equal()


def test_a_receiver_that_does_not_come() -> None:
    """The one that came is told; both it and the sender can go on."""
    with pairs(2) as pair:
        pair.start()
        offer = pair.offer()
        came = pair.receivers[1].start("receiver.pull(offer)", offer=offer)
        with pytest.raises(PeerError, match="1 of 2 receivers have come") as caught:
            pair.sender.run("sender.serve(timeout=0.5)")
        assert caught.value.names[0] == "PeerTimeoutError"
        with pytest.raises(PeerError, match=r"gave up: .*1 of 2 receivers have come"):
            came.result()
        pair.sync()
        pair.assert_equal()


@pytest.mark.parametrize("victim", ["sender", "receiver"])
def test_a_gpu_that_hangs_in_the_transfer(pair: Pair, victim: str) -> None:
    """Nothing runs on one side: both end at their deadlines, and can go on afterwards."""
    pair.start({"keep_mapped": True, "timeout": 1.0}, {"keep_mapped": True, "timeout": 1.0})
    pair.sync()
    hung = getattr(pair, victim)
    offer = pair.offer()
    hung.run("driver.hold(True)")
    for error in failures(pair, offer):
        assert {"PeerTimeoutError", "WeightSyncError"} & set(error.names), error
    hung.run("driver.hold(False)")
    assert pair.receiver.run("result = receiver.torn")
    pair.sync()
    pair.assert_equal()
    assert not pair.receiver.run("result = receiver.torn")


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_an_error_that_nccl_reports_later(pair: Pair, side: str) -> None:
    pair.start({"timeout": 5.0}, {"timeout": 5.0}).sync()
    getattr(pair, side).run("driver.inject(3)")
    errors = failures(pair)
    assert any("internal error" in e.text and "NCCL_DEBUG=WARN" in e.text for e in errors)
    pair.sync()
    pair.assert_equal()


# ---- deaths -------------------------------------------------------------------------------------


@pytest.mark.parametrize("report", [False, True])
@pytest.mark.parametrize("victim", ["sender", "receiver"])
def test_death_in_the_middle_is_noticed(victim: str, report: bool) -> None:
    with pairs(report_death=report) as pair:
        # A first sync, so that no tables have to be uploaded once the GPU is held.
        pair.start({"keep_mapped": True}, {"keep_mapped": True}).sync()
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
        living = pair.receiver if victim == "sender" else pair.sender
        assert living.run("result = driver.communicators()") == 0
        if victim == "sender":
            assert pair.receiver.run("result = receiver.torn")


@pytest.mark.parametrize("report", [False, True])
def test_one_of_several_dies_and_the_others_go_on(report: bool) -> None:
    with pairs(3, report_death=report) as pair:
        pair.start({"keep_mapped": True}, {"keep_mapped": True}).sync()
        offer = pair.offer()
        pair.receivers[1].run("driver.hold(True)")
        with Control(offer) as control:
            pulls = pair.pull(offer)
            serve = pair.sender.start("sender.serve()")
            until(lambda: all(control.receiver(i) == Control.WRITING for i in range(3)))
        pair.receivers[1].kill()
        with pytest.raises(PeerError) as caught:
            serve.result()
        assert caught.value.names[0] == "PeerLostError"
        for number in (0, 2):
            with pytest.raises(PeerError):
                pulls[number].result()
        pair.receivers.pop(1).close()
        del pair.devices[2]
        pair.sender.run(
            "sender.close(); options['receivers'] = 2\n"
            "sender = arctic_rl_c.WeightSender(params, **options)"
        )
        pair.sync()
        pair.assert_equal()
        pair.assert_nothing_open()


@pytest.mark.parametrize("report", [False, True])
def test_a_receiver_that_died_between_syncs_is_replaced(report: bool) -> None:
    """The kept communicator has a dead member; a new one is made with who comes now."""
    with pairs(2, report_death=report) as pair:
        pair.start().sync()
        env = pair.environment
        pair.receivers[0].kill()
        pair.receivers[0].close()
        pair.receivers[0] = Peer(env)
        pair.receivers[0].run(RECEIVER, fill=9, device=1, vmm=False, options={})
        for _ in range(2):
            pair.sync()
            pair.assert_equal()
        pair.receiver = pair.receivers[0]
        pair.assert_nothing_open()


@pytest.mark.parametrize("report", [False, True])
def test_a_sender_that_died_between_syncs_is_replaced(report: bool) -> None:
    with pairs(report_death=report) as pair:
        pair.start().sync()
        pair.sender.kill()
        pair.sender.close()
        pair.sender = Peer(pair.environment)
        pair.sender.run(SENDER, fill=9, device=0, vmm=False, options=NCCL)
        for _ in range(2):
            pair.sync()
            pair.assert_equal()
        pair.assert_nothing_open()


@pytest.mark.parametrize("victim", ["sender", "receiver"])
def test_death_before_the_other_has_come(pair: Pair, victim: str) -> None:
    pair.start()
    offer = pair.offer()
    with Control(offer) as control:
        if victim == "sender":
            pending = pair.pull(offer)[0]
        else:
            pair.pull(offer)
            until(lambda: control.receiver(0) == Control.ATTACHED)
        getattr(pair, victim).kill()
        if victim == "receiver":
            pending = pair.sender.start("sender.serve()")
        with pytest.raises(PeerError) as caught:
            pending.result()
    assert caught.value.names[0] == "PeerLostError"


def test_closing_one_side_leaves_the_other_well(pair: Pair) -> None:
    pair.start().sync()
    pair.receiver.run("receiver.close(); receiver = arctic_rl_c.WeightReceiver(params)")
    pair.sync()
    pair.assert_equal()
    pair.sender.run("sender.close(); sender = arctic_rl_c.WeightSender(params, **options)")
    pair.sync()
    pair.assert_equal()
    pair.assert_nothing_open()


# ---- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_every_call_may_fail(side: str, kept: bool) -> None:
    """The n-th call to the driver or NCCL fails, for every n, until the sync succeeds."""
    with pairs() as pair:
        # A receiver that fails before it has attached is waited for until the deadline.
        pair.start({"timeout": 0.3, "keep_mapped": kept}, {"timeout": 5.0, "keep_mapped": kept})
        failing = getattr(pair, side)
        pair.sync()
        for number in range(1, 600):
            if not kept:  # then each begins without a communicator
                pair.sender.run(
                    "sender.close(); sender = arctic_rl_c.WeightSender(params, **options)"
                )
            before = failing.run("driver.fail('any', n); result = driver.calls()", n=number)
            failed = not sync_may_fail(pair)
            calls = failing.run("result = driver.calls(); driver.reset()") - before
            assert failing.run("result = driver.depth()") == 0
            if not failed and calls < number:
                break
        else:
            pytest.fail("600 calls and no end")
        pair.sync()
        pair.assert_equal()
        pair.assert_nothing_open()
        assert failing.run("result = driver.live()['events']") == 0


# ---- one process --------------------------------------------------------------------------------


def test_the_same_process_with_two_threads() -> None:
    with pairs() as pair:
        same, communicators, allocations = pair.sender.run(
            MODEL + "import threading\n"
            "target = model(2, 1)\n"
            "sender = arctic_rl_c.WeightSender(params, transport='nccl', ring_bytes=2 << 16)\n"
            "receiver = arctic_rl_c.WeightReceiver(target)\n"
            "for _ in range(3):\n"
            "    offer = sender.offer()\n"
            "    serving = threading.Thread(target=sender.serve)\n"
            "    serving.start()\n"
            "    receiver.pull(offer)\n"
            "    serving.join()\n"
            "same = contents(params) == contents(target)\n"
            "sender.close(); receiver.close(); del params, target\n"
            "result = same, driver.communicators(), driver.live()['allocations']",
            fill=1,
            device=0,
            vmm=False,
        )
        assert (same, communicators, allocations) == (True, 0, 0)
