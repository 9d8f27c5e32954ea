# SPDX-License-Identifier: Apache-2.0
"""A sender and its receivers in processes of their own, for the transports that stream."""

from __future__ import annotations

from fakes.peers import Peer, PeerError, Pending

#: A model of about ten chunks: one tensor larger than the ring, some strided, one empty, one tied.
MODEL = """
import numpy as np, fakes, arctic_rl_c
driver = fakes.driver()
LIKE = {
    "embed": ("u2", (700, 300)),
    "layer.q": ("f4", (64, 64)),
    "layer.k": ("u2", (33, 64)),
    "norm": ("f4", (64,)),
    "empty": ("u1", (0, 7)),
    "head": ("u1", (5, 7)),
}
tie = True
def model(fill, device=0, vmm=False):
    rng = np.random.default_rng(fill)
    found = {}
    for name, (dtype, shape) in LIKE.items():
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        values = rng.integers(0, 256, size, dtype="u1").view(dtype).reshape(shape)
        found[name] = fakes.device_array(values, device=device, vmm=vmm)
    if tie:
        found["tied"] = found["embed"]
    return found
def contents(tensors):
    return {name: tensor.array.tobytes() for name, tensor in tensors.items()}
params = model(fill, device, vmm)
"""

SENDER = MODEL + (
    "\noptions = {'ring_bytes': 2 << 16, **options}"
    "\nsender = arctic_rl_c.WeightSender(params, **options)\n"
)
UNTIED = MODEL.replace("tie = True", "tie = False")  # a specification says of no two they are one
SPECIFIED = UNTIED + (
    "\nnamed = {n: (str(t.array.dtype), t.array.shape) for n, t in params.items()}"
    "\nsender = arctic_rl_c.WeightSender("
    "named, ring_bytes=2 << 16, device=device, **options)\n"
)
RECEIVER = MODEL + "\nreceiver = arctic_rl_c.WeightReceiver(params, **options)\n"
STATS = "\nresult = {n: getattr(s, n) for n in dir(s) if not n.startswith('_')}"


class Pair:
    """A sender and receivers in processes of their own.

    `options` are the sender's; `devices` are the sender's, then those of the receivers.
    """

    def __init__(
        self,
        env: dict[str, str],
        receivers: int = 1,
        *,
        options: dict[str, object],
        devices: list[int] | None = None,
    ) -> None:
        self.environment, self.options = env, options
        self.devices = devices or [0] * (receivers + 1)
        self.sender = Peer(env)
        self.receivers = [Peer(env) for _ in range(receivers)]
        self.receiver = self.receivers[0]

    def start(
        self,
        sender: dict[str, object] | None = None,
        receiver: dict[str, object] | None = None,
        *,
        code: str = SENDER,
        vmm: bool = False,
    ) -> Pair:
        options = {"receivers": len(self.receivers), **self.options, **(sender or {})}
        takes = RECEIVER.replace(MODEL, UNTIED) if code == SPECIFIED else RECEIVER
        self.sender.run(code, fill=1, device=self.devices[0], vmm=vmm, options=options)
        for number, peer in enumerate(self.receivers):
            device = self.devices[1 + number]
            peer.run(takes, fill=2 + number, device=device, vmm=False, options=receiver or {})
        return self

    def offer(self) -> bytes:
        offer: bytes = self.sender.run("result = sender.offer()")
        return offer

    def pull(self, offer: bytes, **options: object) -> list[Pending]:
        return [
            peer.start("s = receiver.pull(offer, **options)" + STATS, offer=offer, options=options)
            for peer in self.receivers
        ]

    def sync(self, serve: str = "s = sender.serve()", **options: object) -> list[dict[str, object]]:
        """The statistics of the sender, then of each receiver."""
        pulls = self.pull(self.offer(), **options)
        sent = self.sender.run(serve + STATS)
        return [sent, *(pull.result() for pull in pulls)]

    def assert_equal(self) -> None:
        sent = self.sender.run("result = contents(params)")
        for peer in self.receivers:
            assert peer.run("result = contents(params)") == sent

    def live(self) -> list[dict[str, int]]:
        """What is alive in the sender and in each receiver."""
        return [peer.run("result = driver.live()") for peer in (self.sender, *self.receivers)]

    def assert_syncs_leave_nothing(self) -> None:
        """One sync after the other, all alike in what they leave."""
        self.sync()
        before = self.live()
        for number in range(4):
            self.sender.run("params['norm'].array[:] = number", number=number)
            self.sync()
            self.assert_equal()
        assert self.live() == before

    def peers(self) -> list[Peer]:
        return [*self.receivers, self.sender]

    def ending(self) -> list[list[Peer]]:
        """Who may end at the same time, in turn."""
        if self.options.get("transport") == "nccl":  # a rank waits a while for the others' ends
            return [self.peers()]
        return [self.receivers, [self.sender]]  # which may have the sender's memory mapped

    def assert_nothing_open(self) -> None:
        for peers in self.ending():
            closing = [
                peer.start(
                    "for name in ('sender', 'receiver'):\n"
                    "    if name in globals(): globals().pop(name).close()\n"
                )
                for peer in peers
            ]
            for pending in closing:
                pending.result()
        for peer in self.peers():
            live = peer.run(
                "import gc; del params; gc.collect()\n"
                "result = {**driver.live(), 'communicators': driver.communicators()}"
            )
            assert live["allocations"] == live["mappings"] == live["communicators"] == 0, live

    def close(self) -> None:
        for peers in self.ending():
            for peer in peers:
                peer.leave()
            for peer in peers:
                peer.close()


#: Each tensor is gone when the next one is asked for.
GATHER = """
def gather():
    for name, tensor in params.items():
        whole = fakes.device_array(tensor.array.copy())
        yield name, whole
        whole.array[...] = 0
        del whole
s = sender.serve(gather())
"""

FEED = """
alive = []
def feed():
    for name, tensor in params.items():
        alive.append(name)
        yield name, tensor
s = sender.serve(feed())
"""


def sync_may_fail(pair: Pair) -> bool:
    """Whether it went well on both sides; if not, each said so with an error of the package."""
    waiting: list[Pending] = []
    well = True
    try:
        waiting = pair.pull(pair.offer())
        waiting.append(pair.sender.start("sender.serve()"))
    except PeerError as error:
        assert {"ArcticError", "MemoryError"} & set(error.names), error
        return False
    for pending in waiting:
        try:
            pending.result()
        except PeerError as error:
            assert {"ArcticError", "MemoryError"} & set(error.names), error
            well = False
    return well
