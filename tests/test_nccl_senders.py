# SPDX-License-Identifier: Apache-2.0
"""nccl with several senders, each with a share of the bytes, on the fake driver and NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import fakes
from fakes.pairs import MODEL, SENDER, STATS, Pair
from fakes.peers import Peer, PeerDied, PeerError, Pending
from peers import Control, until

SLOT = 1 << 16  # the smallest bucket
CHUNKS = 7  # of the model's 441 KB, in buckets of that size


class Team(Pair):
    """Senders on the first devices, receivers on the next ones."""

    def __init__(
        self, env: dict[str, str], senders: int, receivers: int, devices: list[int] | None = None
    ) -> None:
        self.all_devices = devices or list(range(senders + receivers))
        super().__init__(
            env,
            receivers,
            options={"transport": "nccl", "senders": senders, "ring_bytes": 2 * SLOT * senders},
            devices=[self.all_devices[0], *self.all_devices[senders:]],
        )
        self.joiners = [Peer(env) for _ in range(senders - 1)]

    def start(
        self,
        sender: dict[str, object] | None = None,
        receiver: dict[str, object] | None = None,
        *,
        code: str = SENDER,
        vmm: bool = False,
    ) -> Team:
        super().start(sender, receiver, code=code, vmm=vmm)
        for rank in range(1, len(self.joiners) + 1):
            self.start_joiner(rank, **(sender or {}))
        return self

    def start_joiner(self, rank: int, fill: int = 1, **options: object) -> None:
        options = {"transport": "nccl", **options}
        self.joiners[rank - 1].run(
            SENDER, fill=fill, device=self.all_devices[rank], vmm=False, options=options
        )

    def join(self, offer: bytes, **options: object) -> list[Pending]:
        return [
            peer.start(
                "s = sender.join(offer, rank, **given)" + STATS,
                offer=offer,
                rank=1 + number,
                given=options,
            )
            for number, peer in enumerate(self.joiners)
        ]

    def sync(self, serve: str = "s = sender.serve()", **options: object) -> list[dict[str, object]]:
        """The statistics of the sender, of those that join, and of the receivers."""
        offer = self.offer()
        others = [*self.join(offer), *self.pull(offer, **options)]
        sent = self.sender.run(serve + STATS)
        return [sent, *(pending.result() for pending in others)]

    def fail(self, offer: bytes | None = None) -> list[PeerError]:
        """A sync that fails for all: their errors, in the order of sync()."""
        offer = offer or self.offer()
        others = [*self.join(offer), *self.pull(offer)]
        errors = []
        for pending in (self.sender.start("sender.serve()"), *others):
            with pytest.raises(PeerError) as caught:
                pending.result()
            errors.append(caught.value)
        return errors

    @property
    def senders(self) -> list[Peer]:
        return [self.sender, *self.joiners]

    @property
    def everyone(self) -> list[Peer]:
        return [*self.senders, *self.receivers]

    def communicators(self) -> list[int]:
        return [peer.run("result = driver.communicators()") for peer in self.everyone]

    def assert_works(self) -> None:
        """The next sync goes well, and leaves all alike."""
        self.sync()
        self.assert_equal()
        assert not any(peer.run("result = receiver.torn") for peer in self.receivers)
        assert self.communicators() == [1] * len(self.everyone)

    def assert_nothing_open(self) -> None:
        super().assert_nothing_open()
        assert all(peer.run("result = driver.live()")["events"] == 0 for peer in self.joiners)

    def peers(self) -> list[Peer]:
        return [*super().peers(), *self.joiners]


@contextmanager
def teams(
    senders: int = 2,
    receivers: int = 1,
    *,
    devices: list[int] | None = None,
    background: bool = True,
    report_death: bool = False,
) -> Iterator[Team]:
    with fakes.session(devices=senders + receivers) as env:
        env["FAKE_NCCL_IN_PROGRESS"] = str(int(background))
        env["FAKE_NCCL_REPORT_DEATH"] = str(int(report_death))
        team = Team(env, senders, receivers, devices)
        try:
            yield team
        finally:
            team.close()
            fakes.clean(env["FAKE_CUDA_SESSION"])


@pytest.fixture
def team() -> Iterator[Team]:
    with teams() as found:
        yield found


# ---- the usual case -----------------------------------------------------------------------------


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize(("senders", "receivers"), [(2, 1), (2, 2), (3, 1), (3, 2)])
def test_each_sends_its_share(senders: int, receivers: int, background: bool) -> None:
    with teams(senders, receivers, background=background) as team:
        team.start()
        for number in range(3):
            for peer in team.senders:
                peer.run("params['norm'].array[:] = number", number=number)
            stats = team.sync()
            team.assert_equal()
        assert {s["transport"] for s in stats} == {"nccl"}
        assert {s["version"] for s in stats} == {3}
        assert len({s["bytes"] for s in stats}) == 1
        sent = [peer.run("result = driver.sent()") // 3 for peer in team.senders]
        assert 0 <= sum(sent) - int(str(stats[0]["bytes"])) < CHUNKS * 256  # alignment
        assert max(sent) - min(sent) <= SLOT
        assert all(peer.run("result = driver.sent()") == 0 for peer in team.receivers)
        assert team.communicators() == [1] * (senders + receivers)
        team.assert_nothing_open()


@pytest.mark.parametrize("receivers", [1, 2])
def test_the_split_is_by_chunk_and_rank(receivers: int) -> None:
    """Senders with other values: whose bytes arrive shows who sent them."""
    with teams(2, receivers) as team:
        team.start()
        team.start_joiner(1, fill=9)
        team.sync()
        found = team.receiver.run("result = contents(params)")["embed"]
        own = [peer.run("result = contents(params)")["embed"] for peer in team.senders]
        arrays = [np.frombuffer(data, "u1") for data in (found, *own)]
        for begin in range(0, len(found), SLOT):
            part = [array[begin : begin + SLOT] for array in arrays]
            owner = begin // SLOT % 2
            assert (part[0] == part[1 + owner]).all(), begin
            assert not (part[0] == part[2 - owner]).all(), begin


def test_checksums_find_a_sender_with_other_values(team: Team) -> None:
    team.start({"verify": "all"})
    offer = team.offer()
    team.joiners[0].run("params['embed'].array[:] = 0")
    pulls, joins = team.pull(offer, verify="all"), team.join(offer)
    serve = team.sender.start("sender.serve()")
    with pytest.raises(PeerError, match=r"embed: the checksum is .*, the sender's is"):
        pulls[0].result()
    with pytest.raises(PeerError, match=r"receiver 0 of 1 .*failed: .*embed: the checksum"):
        serve.result()
    assert joins[0].result()["transport"] == "nccl"
    assert team.receiver.run("result = receiver.torn")


def test_the_communicator_is_kept_between_syncs() -> None:
    with teams(3, 2) as team:
        team.start().sync()
        for peer in team.everyone:
            peer.run("for n in ('ncclGetUniqueId', 'ncclCommInitRankConfig'): driver.fail(n, 1)")
        for _ in range(3):
            team.assert_works()


def test_ranks_that_change_places_get_a_new_communicator() -> None:
    with teams(3, 1) as team:
        team.start().sync()
        team.joiners.reverse()
        team.assert_works()


@pytest.mark.parametrize("keep", [False, True])
def test_many_syncs_leave_nothing_more(keep: bool) -> None:
    with teams(2, 2) as team:
        team.start({"keep_mapped": keep}, {"keep_mapped": keep}).sync()
        before = [peer.run("result = driver.live()") for peer in team.everyone]
        for _ in range(4):
            team.sync()
        assert [peer.run("result = driver.live()") for peer in team.everyone] == before
        team.assert_nothing_open()


def test_work_that_lags(team: Team) -> None:
    team.start()
    for peer in team.everyone:
        peer.run("driver.lag(2_000)")
    team.assert_works()


def test_a_last_round_that_is_not_full() -> None:
    """One chunk and three senders: two of them have nothing to send."""
    with teams(3, 2) as team:
        for device, peer in enumerate(team.everyone):
            fill = 1 if peer in team.senders else 2
            peer.run(MODEL, fill=fill, device=device, vmm=False)
            peer.run("params = {n: params[n] for n in ('norm', 'head')}")
        options = "transport='nccl', senders=3, receivers=2"
        for peer in team.senders:
            peer.run(f"sender = arctic_rl_c.WeightSender(params, {options})")
        for peer in team.receivers:
            peer.run("receiver = arctic_rl_c.WeightReceiver(params)")
        team.assert_works()
        assert [peer.run("result = driver.sent() > 0") for peer in team.senders] == [
            True,
            False,
            False,
        ]


def test_more_rounds_than_may_be_under_way() -> None:
    """One chunk more than fills the rounds, so that the last one is not full either."""
    with teams(3, 2) as team:
        values = f"np.full(({3 * 20 * SLOT + 5},), fill, 'u1')"
        for device, peer in enumerate(team.everyone):
            fill = 1 if peer in team.senders else 2
            peer.run(MODEL, fill=fill, device=device, vmm=False)
            peer.run(f"params = {{'big': fakes.device_array({values}, device=device)}}")
        options = f"transport='nccl', senders=3, receivers=2, ring_bytes={6 * SLOT}"
        for peer in team.senders:
            peer.run(f"sender = arctic_rl_c.WeightSender(params, {options})")
        for peer in team.receivers:
            peer.run("receiver = arctic_rl_c.WeightReceiver(params)")
        team.assert_works()
        sent = [peer.run("result = driver.sent()") for peer in team.senders]
        assert sent == [20 * SLOT + 5, 20 * SLOT, 20 * SLOT]


def test_only_empty_tensors_need_no_communicator(team: Team) -> None:
    for device, peer in enumerate(team.everyone):
        peer.run(MODEL + "\nparams = {'empty': params['empty']}", fill=1, device=device, vmm=False)
    for peer in team.senders:
        peer.run("sender = arctic_rl_c.WeightSender(params, transport='nccl', senders=2)")
    team.receiver.run("receiver = arctic_rl_c.WeightReceiver(params)")
    team.sync()
    assert team.communicators() == [0, 0, 0]


def test_a_joining_sender_can_lead_and_follow_again(team: Team) -> None:
    """Its kept communicator belongs to another sender's offers."""
    team.start().sync()
    team.sender.close()
    old, team.sender = team.sender, team.joiners[0]
    team.joiners[0] = Peer(team.environment)
    team.all_devices[1] = 0
    team.start_joiner(1)
    code = "sender.close(); sender = arctic_rl_c.WeightSender(params, **options)"
    team.sender.run(code, options={**team.options, "receivers": 1})
    assert old.process.poll() is not None
    team.assert_works()
    team.assert_nothing_open()


# ---- what differs is a sentence, and no hang ----------------------------------------------------


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ("del named['norm']", ["the offer has 7 tensors and this sender 6"]),
        (
            "named['norm'] = named['head']",
            ["tensor 3 is norm, float32[64], in the offer and norm, uint8[5, 7], here"],
        ),
        (
            "named = {('other' if n == 'norm' else n): t for n, t in named.items()}",
            ["tensor 3 is norm,", "and other,"],
        ),
        (
            "named['tied'] = fakes.device_array(named['tied'].array.copy(), device=1)",
            ["tied shares the memory of embed in the offer and of tied here"],
        ),
    ],
)
def test_tensors_must_be_alike(team: Team, change: str, parts: list[str]) -> None:
    team.start()
    team.joiners[0].run(
        f"named = dict(params)\n{change}\n"
        "sender = arctic_rl_c.WeightSender(named, transport='nccl')"
    )
    sent, joined, got = team.fail()
    assert joined.names[0] == "WeightMismatchError"
    for part in parts:
        assert part in joined.text
        assert part in sent.text
        assert part in got.text
    assert "sender 1 of 2" in sent.text
    assert team.communicators() == [0, 0, 0]
    assert not team.receiver.run("result = receiver.torn")
    team.start_joiner(1)
    team.assert_works()


@pytest.mark.parametrize(
    ("variables", "parts"),
    [
        ({"FAKE_NCCL_VERSION": "22102"}, ["NCCL 2.28.3 and this sender NCCL 2.21.2"]),
        ({"NCCL_CUMEM_ENABLE": "0"}, ["NCCL_CUMEM_ENABLE is unset there and 0 here"]),
    ],
)
def test_versions_and_settings_must_agree(
    team: Team, variables: dict[str, str], parts: list[str]
) -> None:
    team.joiners[0].run("import os; os.environ.update(new)", new=variables)
    sent, joined, got = team.start().fail()
    assert joined.names[0] == "TransportUnavailableError"
    for part in parts:
        assert part in sent.text
        assert part in joined.text
        assert part in got.text
    assert team.communicators() == [0, 0, 0]


@pytest.mark.parametrize(
    ("devices", "parts"),
    [
        ([0, 0, 1], ["sender and this sender are both on GPU-", "make fewer (senders=)"]),
        ([0, 1, 1], ["sender 1 and receiver 0 are both on GPU-", "give each a GPU of its own"]),
    ],
)
def test_two_ranks_on_one_gpu_are_refused(devices: list[int], parts: list[str]) -> None:
    with teams(devices=devices) as team:
        for error in team.start().fail():
            for part in parts:
                assert part in error.text
        assert team.communicators() == [0, 0, 0]


def test_other_transports_have_one_sender(team: Team) -> None:
    team.start()
    with pytest.raises(PeerError, match=r"senders=2 is for nccl, .* go over cuda_ipc"):
        team.sender.run("arctic_rl_c.WeightSender(params, senders=2).offer()")
    team.sender.run("other = arctic_rl_c.WeightSender(params)")
    offer = team.sender.run("result = other.offer()")
    with pytest.raises(PeerError, match="this offer goes over cuda_ipc") as caught:
        team.joiners[0].run("sender.join(offer, 1)", offer=offer)
    assert "ValueError" in caught.value.names
    team.sender.run("other.close()")


def test_ranks_are_those_of_the_offer(team: Team) -> None:
    team.start()
    offer = team.offer()
    for rank in (0, 8):
        with pytest.raises(PeerError, match="rank is 1 to senders - 1") as caught:
            team.joiners[0].run("sender.join(offer, rank)", offer=offer, rank=rank)
        assert "ValueError" in caught.value.names
    with pytest.raises(PeerError, match="rank 2 of 2 senders") as caught:
        team.joiners[0].run("sender.join(offer, 2)", offer=offer)
    for value in (0, 9):
        with pytest.raises(PeerError, match="senders is 1 to 8"):
            team.sender.run("arctic_rl_c.WeightSender(params, senders=n)", n=value)


def test_a_rank_joins_once(team: Team) -> None:
    team.start()
    offer = team.offer()
    joins = team.join(offer)
    with Control(offer) as control:
        until(lambda: control.receiver(0) == Control.ATTACHED)
        code = MODEL + "\nsender = arctic_rl_c.WeightSender(params)\nsender.join(offer, 1)"
        with (
            Peer(team.environment) as other,
            pytest.raises(PeerError, match="sender 1 has joined this offer already"),
        ):
            other.run(code, fill=1, device=1, vmm=False, offer=offer)
    pulls = team.pull(offer)
    team.sender.run("sender.serve()")
    for pending in (*joins, *pulls):
        pending.result()
    with pytest.raises(PeerError, match=r"this offer .* is over"):
        team.joiners[0].run("sender.join(offer, 1)", offer=offer)


def test_tensors_that_come_later_need_one_sender(team: Team) -> None:
    team.start()
    announced = "{n: (str(t.array.dtype), t.array.shape) for n, t in params.items() if n != 'tied'}"
    code = f"sender = arctic_rl_c.WeightSender({announced}, transport='nccl', senders=2)"
    with pytest.raises(PeerError, match=r"senders=2 each sender needs all of them at offer\(\)"):
        team.sender.run(code + "\nsender.offer()")
    team.sender.run("del params['tied']; sender = arctic_rl_c.WeightSender(params, **options)")
    offer = team.offer()
    with pytest.raises(PeerError, match=r"serve\(\) takes none"):
        team.sender.run("sender.serve(params.items())")
    team.joiners[0].run(code)
    with pytest.raises(PeerError, match="gave up: with senders=2"):
        team.join(offer)[0].result()
    with pytest.raises(PeerError, match=r"each sender needs all of them at join\(\)"):
        team.join(team.offer())[0].result()


def test_offers_that_are_none(team: Team) -> None:
    team.start()
    offer = team.offer()
    for broken in (b"", offer[:-1], bytes([offer[0] ^ 1]) + offer[1:]):
        with pytest.raises(PeerError, match="offer") as caught:
            team.joiners[0].run("sender.join(offer, 1)", offer=broken)
        assert caught.value.names[0] == "WeightSyncError"
    with pytest.raises(PeerError) as caught:
        team.joiners[0].run("sender.join('text', 1)")
    assert caught.value.names[0] == "TypeError"
    team.joiners[0].run("sender.close()")
    with pytest.raises(PeerError) as caught:
        team.joiners[0].run("sender.join(offer, 1)", offer=offer)
    assert caught.value.names[0] == "ClosedError"


# ---- deadlines and deaths -----------------------------------------------------------------------


def test_a_sender_that_does_not_join(team: Team) -> None:
    team.start({"timeout": 0.5})
    offer = team.offer()
    pulls = team.pull(offer)
    with pytest.raises(PeerError, match="1 of 1 receivers and 0 of 1 joining senders") as caught:
        team.sender.run("sender.serve()")
    assert caught.value.names[0] == "PeerTimeoutError"
    with pytest.raises(PeerError, match="0 of 1 joining senders have come"):
        pulls[0].result()
    assert not team.receiver.run("result = receiver.torn")
    team.sender.run("sender = arctic_rl_c.WeightSender(params, **{**options, 'timeout': 60.0})")
    team.assert_works()


def test_a_receiver_that_does_not_come() -> None:
    with teams(2, 2) as team:
        team.start()
        offer = team.offer()
        others = [*team.join(offer), team.receivers[0].start("receiver.pull(offer)", offer=offer)]
        with pytest.raises(PeerError, match="1 of 2 receivers and 1 of 1 joining senders"):
            team.sender.run("sender.serve(timeout=0.5)")
        for pending in others:
            with pytest.raises(PeerError, match=r"gave up: .*1 of 2 receivers"):
                pending.result()
        team.assert_works()


def test_a_first_sender_that_does_not_serve(team: Team) -> None:
    team.start()
    offer = team.offer()
    for pending in (*team.join(offer, timeout=0.3), *team.pull(offer, timeout=0.3)):
        with pytest.raises(PeerError, match=r"has not begun; is it in serve\(\)") as caught:
            pending.result()
        assert caught.value.names[0] == "PeerTimeoutError"
    team.assert_works()


@pytest.mark.parametrize("receivers", [1, 2])
@pytest.mark.parametrize("victim", ["sender", "joiner", "receiver"])
def test_a_gpu_that_hangs_in_the_transfer(victim: str, receivers: int) -> None:
    """Nothing runs on one of them: all end at their deadlines, and can go on afterwards."""
    with teams(2, receivers) as team:
        options: dict[str, object] = {"keep_mapped": True, "timeout": 1.0}
        team.start(options, options).sync()
        hung = {"sender": team.sender, "joiner": team.joiners[0], "receiver": team.receiver}[victim]
        offer = team.offer()
        hung.run("driver.hold(True)")
        for error in team.fail(offer):
            assert {"PeerTimeoutError", "WeightSyncError"} & set(error.names), error
        hung.run("driver.hold(False)")
        assert team.communicators() == [0] * (2 + receivers)
        assert all(peer.run("result = receiver.torn") for peer in team.receivers)
        team.assert_works()


@pytest.mark.parametrize("report", [False, True])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_sender_that_dies_in_the_middle(victim: int, report: bool) -> None:
    with teams(2, 2, report_death=report) as team:
        # A first sync, so that no tables have to be uploaded once the GPU is held.
        team.start({"keep_mapped": True}, {"keep_mapped": True}).sync()
        dying = team.senders[victim]
        offer = team.offer()
        dying.run("driver.hold(True)")
        with Control(offer) as control:
            pulls, joins = team.pull(offer), team.join(offer)
            serve = team.sender.start("sender.serve()")
            until(lambda: all(control.receiver(i) == Control.WRITING for i in (1, 2)))
        dying.kill()
        with pytest.raises(PeerDied):
            (serve, joins[0])[victim].result()
        errors = []
        for pending in ((serve, joins[0])[1 - victim], *pulls):
            with pytest.raises(PeerError) as caught:
                pending.result()
            errors.append(caught.value)
        if victim == 0:
            assert {error.names[0] for error in errors} == {"PeerLostError"}
        else:
            assert errors[0].names[0] == "PeerLostError"
            assert "sender 1 of 2" in errors[0].text
            for error in errors[1:]:  # NCCL may be the first to tell the receivers
                told = error.names[0] == "PeerLostError" if report else False
                assert told or "sender 1 of 2" in error.text
        for peer in (team.senders[1 - victim], *team.receivers):
            assert peer.run("result = driver.communicators()") == 0
        assert all(peer.run("result = receiver.torn") for peer in team.receivers)
        dying.close()
        revived = Peer(team.environment)
        if victim == 0:
            team.sender = revived
            options = {**team.options, "receivers": 2}
            revived.run(SENDER, fill=1, device=0, vmm=False, options=options)
        else:
            team.joiners[0] = revived
            team.start_joiner(1)
        team.assert_works()


def test_a_receiver_that_dies_in_the_middle() -> None:
    with teams(2, 2) as team:
        team.start({"keep_mapped": True}, {"keep_mapped": True}).sync()
        offer = team.offer()
        team.receivers[0].run("driver.hold(True)")
        with Control(offer) as control:
            pulls, joins = team.pull(offer), team.join(offer)
            serve = team.sender.start("sender.serve()")
            until(lambda: all(control.receiver(i) == Control.WRITING for i in (1, 2)))
        team.receivers[0].kill()
        with pytest.raises(PeerError, match=r"receiver [01] of 2 .* died") as caught:
            serve.result()
        assert caught.value.names[0] == "PeerLostError"
        for pending in (joins[0], pulls[1]):
            with pytest.raises(PeerError, match=r"receiver [01] of 2 .* died"):
                pending.result()
        team.receivers[0].close()
        team.receivers[0] = Peer(team.environment)
        code = MODEL + "\nreceiver = arctic_rl_c.WeightReceiver(params)"
        team.receivers[0].run(code, fill=9, device=2, vmm=False)
        team.assert_works()


def test_a_sender_that_dies_before_the_others_have_come(team: Team) -> None:
    team.start()
    offer = team.offer()
    with Control(offer) as control:
        team.join(offer)
        until(lambda: control.receiver(0) == Control.ATTACHED)
        team.joiners[0].kill()
        pulls = team.pull(offer)
        with pytest.raises(PeerError, match=r"sender 1 of 2 .* died during the sync") as caught:
            team.sender.run("sender.serve()")
    assert caught.value.names[0] == "PeerLostError"
    with pytest.raises(PeerError, match="sender 1 of 2"):
        pulls[0].result()
    assert not team.receiver.run("result = receiver.torn")


# ---- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("side", "kept"), [("sender", True), ("joiner", False), ("joiner", True), ("receiver", True)]
)
def test_every_call_may_fail(side: str, kept: bool) -> None:
    """The n-th call to the driver or NCCL fails, for every n, until the sync succeeds."""
    with teams(2, 1) as team:
        # Whoever fails before it has attached is waited for until the deadline.
        options: dict[str, object] = {"timeout": 0.3, "keep_mapped": kept}
        team.start(options, {"timeout": 5.0, "keep_mapped": kept}).sync()
        failing = {"sender": team.sender, "joiner": team.joiners[0], "receiver": team.receiver}
        peer = failing[side]
        for number in range(1, 600):
            if not kept:  # then each begins without a communicator
                code = "sender.close(); sender = arctic_rl_c.WeightSender(params, **options)"
                team.sender.run(code)
            before = peer.run("driver.fail('any', n); result = driver.calls()", n=number)
            failed = not sync_may_fail(team)
            calls = peer.run("result = driver.calls(); driver.reset()") - before
            assert peer.run("result = driver.depth()") == 0
            if not failed and calls < number:
                break
        else:
            pytest.fail("600 calls and no end")
        team.assert_works()
        team.assert_nothing_open()
        assert peer.run("result = driver.live()['events']") == 0


def sync_may_fail(team: Team) -> bool:
    """Whether it went well for all; if not, each said so with an error of the package."""
    try:
        offer = team.offer()
    except PeerError as error:
        assert {"ArcticError", "MemoryError"} & set(error.names), error
        return False
    pending = [*team.pull(offer), *team.join(offer), team.sender.start("sender.serve()")]
    well = True
    for one in pending:
        try:
            one.result()
        except PeerError as error:
            assert {"ArcticError", "MemoryError"} & set(error.names), error
            well = False
    return well
