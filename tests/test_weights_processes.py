# SPDX-License-Identifier: Apache-2.0
"""Weight sync between real processes, which end, are killed, fork and run out of things."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import offers
import peers
from arctic_rl_c import (
    PeerLostError,
    PeerTimeoutError,
    TornWeightsError,
    WeightReceiver,
    WeightSender,
    WeightSyncError,
)
from peers import Control, Peer

PARAMS = """
source = {"a": np.arange(4000.0).reshape(40, 100), "b": np.arange(7, dtype=np.int8)}
target = {name: np.zeros_like(value) for name, value in source.items()}
"""
SENDER = PARAMS + "sender = arctic_rl_c.WeightSender(source, verify='all', **options)"
RECEIVER = PARAMS + "receiver = arctic_rl_c.WeightReceiver(target, **options)"


def weights() -> dict[str, np.ndarray]:
    return {"a": np.arange(4000.0).reshape(40, 100), "b": np.arange(7, dtype=np.int8)}


def zeros() -> dict[str, np.ndarray]:
    return {name: np.zeros_like(value) for name, value in weights().items()}


def sending(**options: object) -> Peer:
    peer = Peer()
    peer.run(SENDER, options=options)
    return peer


def receiving(**options: object) -> Peer:
    peer = Peer()
    peer.run(RECEIVER, options=options)
    return peer


ARRIVED = "all((target[name] == source[name]).all() for name in source)"


# ---- the ordinary case ---------------------------------------------------------------------------


def test_two_processes() -> None:
    with sending() as trainer, receiving() as sampler:
        for version in (1, 2, 3):
            offer = trainer.eval("sender.offer()")
            trainer.start("sender.serve()")
            pulled = sampler.eval("receiver.pull(offer, verify='all')", offer=offer)
            served = trainer.answer()
            assert pulled.version == served.version == version
            assert pulled.verified == 2
            assert sampler.eval(ARRIVED)
            assert peers.shm_files(trainer.pid) == []  # the last to open removes the names
        trainer.run("sender.release()")
        assert trainer.eval("sender.live_exports()") == 0
        assert sampler.eval("receiver.live_mappings()") == 0


def test_several_receivers_take_one_offer() -> None:
    with sending(receivers=3) as trainer, receiving() as one, receiving() as two:
        offer = trainer.eval("sender.offer()")
        trainer.start("sender.serve()")
        one.start("receiver.pull(offer)", offer=offer)
        two.start("receiver.pull(offer)", offer=offer)
        with WeightReceiver(target := zeros()) as mine:
            mine.pull(offer)
        assert one.answer().version == two.answer().version == trainer.answer().version == 1
        assert one.eval(ARRIVED)
        assert two.eval(ARRIVED)
        assert np.array_equal(target["a"], weights()["a"])
        with pytest.raises(WeightSyncError, match="3 receivers have taken it already"):
            one.eval("arctic_rl_c.WeightReceiver(target).pull(offer)")


def test_kept_mappings_between_processes() -> None:
    with sending(keep_mapped=True) as trainer, receiving(keep_mapped=True) as sampler:
        for _ in range(3):
            trainer.run("source['a'] += 1")
            sampler.run("receiver.pull(offer)", offer=trainer.eval("sender.offer()"))
            trainer.run("sender.serve(); sender.release()")
            assert sampler.eval("receiver.live_mappings()") == 1
            assert np.array_equal(sampler.eval("target['a']"), trainer.eval("source['a']"))
        trainer.run("source['b'] = np.zeros(100000, dtype=np.int8); sender.close()")
        trainer.run("sender = arctic_rl_c.WeightSender(source, keep_mapped=True)")
        sampler.run("target['b'] = np.ones(100000, dtype=np.int8)")
        sampler.run("receiver.close(); assert receiver.live_mappings() == 0")
        sampler.run("receiver = arctic_rl_c.WeightReceiver(target, keep_mapped=True)")
        for _ in range(2):
            sampler.run("receiver.pull(offer)", offer=trainer.eval("sender.offer()"))
        assert not sampler.eval("target['b'].any()")
        trainer.run("sender.close()")
        sampler.run("receiver.close()")


def test_views_never_lend_a_mapping_that_was_kept() -> None:
    """A kept mapping cannot be written to; what views lend may be, and the write stays there."""
    stray = """
import ctypes
with receiver.views(offer) as tensors:
    for name, view in tensors:
        array = np.from_dlpack(view)
        ctypes.memset(array.ctypes.data, 255, array.nbytes)
    del array, view
assert receiver.live_mappings() == 0
"""
    with sending(keep_mapped=True) as trainer, receiving(keep_mapped=True) as sampler:
        for work in ("receiver.pull(offer)", stray, "receiver.pull(offer)"):
            sampler.run(work, offer=trainer.eval("sender.offer()"))
            trainer.run("sender.serve()")
        assert sampler.eval(ARRIVED)


def test_nothing_accumulates() -> None:
    """Descriptors, mappings and files are the same after each sync, under a low limit."""
    count = "len(os.listdir('/proc/self/fd'))"
    maps = "Path('/proc/self/maps').read_text().count('/dev/shm/arl-')"
    limit = (
        "import os, resource; from pathlib import Path\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))"
    )
    many = "{f'w{i}': np.full(3, i) for i in range(300)}"
    with Peer() as trainer, Peer() as sampler:
        trainer.run(limit + f"\nsender = arctic_rl_c.WeightSender({many})")
        sampler.run(limit + f"\nreceiver = arctic_rl_c.WeightReceiver({many})")
        seen = set()
        for _ in range(20):
            offer = trainer.eval("sender.offer()")
            sampler.run("receiver.pull(offer)", offer=offer)
            trainer.run("sender.serve(); sender.release()")
            seen.add(
                (
                    *(peer.eval(what) for peer in (trainer, sampler) for what in (count, maps)),
                    len(peers.shm_files(trainer.pid)),
                )
            )
        assert len(seen) == 1
        assert next(iter(seen))[1::2] == (0, 0)
        assert next(iter(seen))[-1] == 0


def test_threads_may_each_have_their_own() -> None:
    """Senders and receivers of one process do not get in each other's way."""
    failures = []

    def work() -> None:
        try:
            target = zeros()
            with (
                WeightSender(weights(), verify="all") as sender,
                WeightReceiver(target) as receiver,
            ):
                for _ in range(20):
                    receiver.pull(sender.offer(), verify="all")
                    sender.serve()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(peers.LIMIT)
    assert failures == []


# ---- the sender goes -----------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True])
def test_a_sender_killed_before_the_pull(keep: bool) -> None:
    with sending(keep_mapped=keep) as trainer, receiving() as sampler:
        offer = trainer.eval("sender.offer()")
        trainer.kill()
        assert len(peers.shm_files(trainer.pid)) == 2
        with pytest.raises(
            PeerLostError, match=f"pid {trainer.pid} on .* has exited or was killed"
        ):
            sampler.eval("receiver.pull(offer)", offer=offer)
        assert not sampler.eval("receiver.torn")
        assert sampler.eval("receiver.version") is None
        assert peers.shm_files(trainer.pid) == []  # whoever finds it dead cleans up


def test_a_sender_that_ended_before_the_pull() -> None:
    with sending() as trainer, receiving() as sampler:
        offer = trainer.eval("sender.offer()")
        trainer.close()
        assert peers.shm_files(trainer.pid) == []  # an ordinary end leaves nothing
        with pytest.raises(PeerLostError, match="has exited or was killed"):
            sampler.eval("receiver.pull(offer)", offer=offer)


def test_a_sender_killed_while_a_receiver_reads() -> None:
    """All of the bytes are there, so the receiver may finish."""
    with sending() as trainer, receiving() as sampler:
        offer = trainer.eval("sender.offer()")
        sampler.run("views = receiver.views(offer); views.__enter__()", offer=offer)
        trainer.kill()
        sampler.run("for name, view in views: target[name][...] = np.from_dlpack(view)")
        sampler.run("del view; views.__exit__(None, None, None)")
        assert sampler.eval(ARRIVED)
        assert sampler.eval("(receiver.torn, receiver.version)") == (False, 1)
        assert peers.shm_files(trainer.pid) == []


def test_a_sender_that_is_stopped_and_killed_by_its_parent_is_no_zombie_peer() -> None:
    """A zombie still has an entry in /proc: it counts as dead."""
    with sending() as trainer, receiving() as sampler:
        offer = trainer.eval("sender.offer()")
        trainer.kill(signal.SIGSTOP)
        assert sampler.eval("receiver.pull(offer).version", offer=offer) == 1  # needs no help
        trainer.kill(signal.SIGCONT)
        offer = trainer.eval("sender.offer()")
        trainer.process.kill()
        stat = Path(f"/proc/{trainer.pid}/stat")
        peers.until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")
        with pytest.raises(PeerLostError):
            sampler.eval("receiver.pull(offer)", offer=offer)


def test_what_a_killed_sender_left_is_swept_up_by_the_next() -> None:
    with sending() as trainer:
        trainer.run("sender.offer()")
        trainer.kill()
    left = peers.shm_files(trainer.pid)
    assert len(left) == 2
    with sending() as other, WeightSender(weights()) as sender:
        other.run("sender.offer()")
        sender.offer()
        assert peers.shm_files(trainer.pid) == []
        assert len(peers.shm_files(other.pid)) == 2  # the living are left alone
        assert len(peers.shm_files()) == 2


def test_a_reused_pid_is_not_taken_for_the_sender() -> None:
    with WeightSender(weights()) as sender, WeightReceiver(zeros()) as receiver, Peer() as other:
        offer = sender.offer()
        forged = offers.change(offer, "start_time", offers.get(offer, "start_time") - 1)
        with pytest.raises(PeerLostError):
            receiver.pull(forged)
        forged = offers.change(offer, "pid", other.pid)
        with pytest.raises(PeerLostError):
            receiver.pull(forged)
        assert len(peers.shm_files()) == 2
        receiver.pull(offer)


# ---- a receiver goes -----------------------------------------------------------------------------


def test_a_receiver_that_never_comes() -> None:
    with sending(timeout=0.05) as trainer:
        trainer.run("sender.offer()")
        with pytest.raises(PeerTimeoutError, match="1 never called pull"):
            trainer.eval("sender.serve()")
        trainer.run("sender.offer(); sender.release()")
        assert peers.shm_files(trainer.pid) == []


def test_a_receiver_killed_while_it_reads() -> None:
    with sending() as trainer, receiving() as sampler:
        offer = trainer.eval("sender.offer()")
        trainer.start("sender.serve()")
        sampler.run("views = receiver.views(offer); views.__enter__()", offer=offer)
        sampler.kill()
        with pytest.raises(
            PeerLostError, match=r"receiver 0 of 1 .* died while it copied"
        ) as caught:
            trainer.answer()
        assert caught.value.rank == 0
        assert caught.value.code == "ARL_ERR_PEER_LOST"
        with receiving() as second:  # both sides go on
            second.run("receiver.pull(offer)", offer=trainer.eval("sender.offer()"))
            trainer.run("sender.serve()")


def test_a_receiver_killed_after_it_has_finished() -> None:
    with sending() as trainer, receiving() as sampler:
        offer = trainer.eval("sender.offer()")
        sampler.run("receiver.pull(offer)", offer=offer)
        sampler.kill()
        assert trainer.eval("sender.serve()").version == 1


def test_one_receiver_of_two_is_killed() -> None:
    with sending(receivers=2) as trainer, receiving() as one, receiving() as two:
        offer = trainer.eval("sender.offer()")
        trainer.start("sender.serve()")
        one.run("receiver.pull(offer)", offer=offer)
        two.run("views = receiver.views(offer); views.__enter__()", offer=offer)
        two.kill()
        with pytest.raises(PeerLostError, match="receiver 1 of 2") as caught:
            trainer.answer()
        assert caught.value.rank == 1
        assert one.eval("receiver.version") == 1


def test_a_killed_reader_does_not_hold_kept_memory() -> None:
    with sending(keep_mapped=True) as trainer, receiving() as sampler:
        offer = trainer.eval("sender.offer()")
        sampler.run("views = receiver.views(offer); views.__enter__()", offer=offer)
        with pytest.raises(PeerTimeoutError, match="1 receivers still read"):
            trainer.eval("sender.release(timeout=0)")
        sampler.kill()
        trainer.run("sender.release()")
        trainer.run("sender.close()")


def test_a_receiver_that_refuses_tells_the_sender() -> None:
    with sending() as trainer, Peer() as sampler:
        sampler.run("receiver = arctic_rl_c.WeightReceiver({'a': np.zeros(3), 'b': np.zeros(7)})")
        offer = trainer.eval("sender.offer()")
        trainer.start("sender.serve()")
        with pytest.raises(WeightSyncError, match=r"a: the sender has float64\[40, 100\]"):
            sampler.eval("receiver.pull(offer)", offer=offer)
        with pytest.raises(WeightSyncError, match=r"receiver 0 of 1 .* failed: a: the sender has"):
            trainer.answer()


def test_a_receiver_that_exits_in_its_block_tells_the_sender() -> None:
    with sending() as trainer, receiving() as sampler:
        offer = trainer.eval("sender.offer()")
        trainer.start("sender.serve()")
        sampler.run("views = receiver.views(offer); views.__enter__()", offer=offer)
        sampler.close()
        with pytest.raises((WeightSyncError, PeerLostError), match="receiver 0 of 1"):
            trainer.answer()


# ---- interrupts ----------------------------------------------------------------------------------


def test_ctrl_c_ends_a_wait() -> None:
    with sending(timeout=600) as trainer:
        offer = trainer.eval("sender.offer()")
        with Control(offer) as control:
            trainer.start("sender.serve()")
            peers.until(lambda: control.sender == Control.SERVING)
        begin = time.monotonic()
        trainer.kill(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            trainer.answer()
        assert time.monotonic() - begin < peers.LIMIT
        WeightReceiver(target := zeros()).pull(offer)  # the offer is still there
        assert target["b"].tolist() == list(range(7))
        assert trainer.eval("sender.serve()").version == 1


def test_signals_do_not_break_a_wait() -> None:
    handler = "import signal; hits = []; signal.signal(signal.SIGUSR1, lambda *_: hits.append(1))"
    with sending(timeout=600) as trainer:
        trainer.run(handler)
        offer = trainer.eval("sender.offer()")
        with Control(offer) as control:
            trainer.start("sender.serve()")
            peers.until(lambda: control.sender == Control.SERVING)
            trainer.kill(signal.SIGUSR1)
        WeightReceiver(zeros()).pull(offer)
        assert trainer.answer().version == 1
        assert trainer.eval("len(hits)") == 1


def test_signals_do_not_stop_a_large_reservation() -> None:
    timer = """
import signal
hits = []
signal.signal(signal.SIGALRM, lambda *_: hits.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
with arctic_rl_c.WeightSender({"w": np.ones(8 << 20)}) as large:
    large.offer()
signal.setitimer(signal.ITIMER_REAL, 0)
"""
    with Peer() as peer:
        peer.run(timer)
        assert peer.eval("len(hits)") > 0


# ---- fork ----------------------------------------------------------------------------------------

FORK = """
import os, pickle
def forked(work):
    # The result of work() in a child, or its exception; the child then collects its objects.
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = work()
        except BaseException as error:
            answer = error
        os.write(writing, pickle.dumps(answer))
        names = globals()
        for name in ("sender", "receiver", "views"):
            names.pop(name, None)
        import gc
        gc.collect()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        answer = pickle.load(stream)
    assert os.waitpid(pid, 0)[1] == 0
    return answer
"""


def test_a_forked_child_has_its_own() -> None:
    with sending() as trainer:
        trainer.run(FORK)
        trainer.run("receiver = arctic_rl_c.WeightReceiver(target)")
        offer = trainer.eval("sender.offer()")
        for call in (
            "sender.offer()",
            "sender.serve()",
            "sender.release()",
            "sender.close()",
            "receiver.pull(offer)",
            "receiver.close()",
            "receiver.views(offer).__enter__()",
        ):
            error = trainer.eval(f"forked(lambda: {call})", offer=offer)
            assert type(error).__name__ == "WrongProcessError"
            assert f"belongs to process {trainer.pid}, and this is its child" in str(error)
        assert len(peers.shm_files(trainer.pid)) == 2  # the child's end took nothing away
        WeightReceiver(target := zeros()).pull(offer)
        assert target["b"].tolist() == list(range(7))
        assert trainer.eval("sender.serve()").version == 1


def test_a_child_can_make_its_own() -> None:
    work = "lambda: arctic_rl_c.WeightReceiver(target).pull(offer).version"
    with sending() as trainer, sending() as other:
        trainer.run(FORK)
        trainer.run("sender.offer()")
        assert trainer.eval(f"forked({work})", offer=other.eval("sender.offer()")) == 1
        trainer.run(
            "def whole():\n"
            "    with arctic_rl_c.WeightSender(source) as mine:\n"
            "        return arctic_rl_c.WeightReceiver(target).pull(mine.offer()).version\n"
        )
        assert trainer.eval("forked(whole)") == 1
        own = trainer.eval(
            "forked(lambda: arctic_rl_c.WeightReceiver(target).pull(sender_offer))",
            sender_offer=trainer.eval("sender.offer()"),
        )
        assert own.version == 2  # the parent's offer, from its child


def test_a_fork_inside_of_a_block() -> None:
    with sending() as trainer, receiving() as sampler:
        sampler.run(FORK)
        offer = trainer.eval("sender.offer()")
        trainer.start("sender.serve()")
        sampler.run("views = receiver.views(offer); views.__enter__()", offer=offer)
        assert sampler.eval("forked(lambda: 1)") == 1
        sampler.run("list(views); views.__exit__(None, None, None)")
        assert trainer.answer().version == 1


def test_a_forked_child_neither_reads_nor_ends_its_parents_block() -> None:
    """It would tell the sender that all has been read, or that it failed."""
    leave = """
def leave(*reason):
    taken = list(views) if not reason else None
    return views.__exit__(*(reason or (None, None, None)))
"""
    with sending() as trainer, receiving() as sampler:
        sampler.run(FORK + leave)
        offer = trainer.eval("sender.offer()")
        with Control(offer) as control:
            sampler.run("views = receiver.views(offer); views.__enter__()", offer=offer)
            for call in ("next(views)", "views.__exit__(None, None, None)", "leave()"):
                error = sampler.eval(f"forked(lambda: {call})")
                assert type(error).__name__ == "WrongProcessError"
                assert f"belongs to process {sampler.pid}, and this is its child" in str(error)
            # An exception on its way through the child's block is not replaced.
            ended = sampler.eval("forked(lambda: leave(SystemExit, SystemExit(0), None))")
            assert ended is False
            assert control.receiver(0) == Control.WRITING
        sampler.run("leave()")
        assert sampler.eval("receiver.torn") is False
        assert trainer.eval("sender.serve()").version == 1


# ---- torn, between processes ---------------------------------------------------------------------


def test_torn_weights_are_said_to_be() -> None:
    with sending() as trainer, receiving() as sampler:
        offer = trainer.eval("sender.offer()")
        handle = offer[offers.HEADER + 48 : offers.HEADER + 112].rstrip(b"\0").decode()
        with open(f"/dev/shm{handle}", "r+b") as file:
            file.write(b"\xff" * 8)
        with pytest.raises(WeightSyncError, match="a: the checksum is"):
            sampler.eval("receiver.pull(offer, verify='all')", offer=offer)
        with pytest.raises(TornWeightsError, match="mixture"):
            sampler.eval("receiver.check()")
        with pytest.raises(WeightSyncError, match=r"receiver 0 of 1 .* failed: a: the checksum"):
            trainer.eval("sender.serve()")
        sampler.run("receiver.pull(offer, verify='all')", offer=trainer.eval("sender.offer()"))
        sampler.run("receiver.check()")
        assert sampler.eval(ARRIVED)


def test_errors_cross_processes() -> None:
    with sending(timeout=0) as trainer:
        trainer.run("sender.offer()")
        with pytest.raises(PeerTimeoutError) as caught:
            trainer.eval("sender.serve()")
    assert caught.value.code == "ARL_ERR_TIMEOUT"
    assert caught.value.operation == "serve"
    assert os.getpid() != trainer.pid
