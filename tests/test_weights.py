# SPDX-License-Identifier: Apache-2.0
"""WeightSender and WeightReceiver in one process: states, arguments, versions, checksums, views."""

from __future__ import annotations

import gc
import logging
import math
import pickle
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import offers
import peers
from arctic_rl_c import (
    Binding,
    ClosedError,
    PeerTimeoutError,
    SyncStats,
    TornWeightsError,
    TransportUnavailableError,
    WeightReceiver,
    WeightSender,
    WeightSyncError,
    weight_norm,
)


def source() -> dict[str, np.ndarray]:
    return {"a": np.arange(6.0).reshape(2, 3), "b": np.arange(5, dtype=np.int32)}


def zeros(like: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.zeros_like(value) for name, value in like.items()}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(a[name], b[name]) for name in a)


def spoil(offer: bytes, at: int = 0) -> None:
    """Change a byte of the offered weights behind everyone's back."""
    name = offer[offers.HEADER + 48 : offers.HEADER + 112].rstrip(b"\0").decode()
    with open(f"/dev/shm{name}", "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


# ---- a sync --------------------------------------------------------------------------------------


def test_a_sync_from_offer_to_release() -> None:
    weights = source()
    target = zeros(weights)
    with WeightSender(weights) as sender, WeightReceiver(target) as receiver:
        assert (sender.version, receiver.version, sender.live_exports()) == (None, None, 0)
        offer = sender.offer()
        assert isinstance(offer, bytes)
        assert (sender.version, sender.live_exports()) == (1, 1)
        weights["a"][:] = -1  # what was offered is what there was
        pulled = receiver.pull(offer)
        served = sender.serve()
        sender.release()
        assert sender.live_exports() == 0
    assert same(target, source())
    assert (receiver.version, receiver.torn) == (1, False)
    for stats in (pulled, served):
        assert (stats.transport, stats.fallback_reason) == ("host_shm", None)
        assert (stats.tensors, stats.bytes, stats.version) == (2, 68, 1)
        assert stats.seconds > 0
    assert served.extra_bytes == 512
    assert peers.shm_files() == []


def test_addresses_stay() -> None:
    """Captured graphs read the old addresses: a sync writes in place."""
    weights = {"w": torch.randn(4, 4)}
    parameter = torch.nn.Parameter(torch.zeros(4, 4))
    before = parameter.data_ptr()
    with WeightSender(weights) as sender, WeightReceiver({"w": parameter}) as receiver:
        for _ in range(3):
            receiver.pull(sender.offer())
    assert parameter.data_ptr() == before
    assert torch.equal(parameter, weights["w"])


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32),
    *(torch.uint64, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
    *(torch.complex64, torch.complex128),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 4), (65, 33)], ids=str)
def test_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    size = max(math.prod(shape) * dtype.itemsize, 1)
    raw = torch.randint(0, 2, (size,), dtype=torch.uint8)
    if dtype is not torch.bool:
        raw = raw * 37 + 3
    weight = raw[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
    target = torch.zeros(shape, dtype=torch.uint8).to(dtype)
    with (
        WeightSender({"w": weight}, verify="all") as sender,
        WeightReceiver({"w": target}) as receiver,
    ):
        receiver.pull(sender.offer(), verify="all")
    assert target.reshape(-1).view(torch.uint8).equal(weight.reshape(-1).view(torch.uint8))


def test_pairs_do_as_well_as_mappings() -> None:
    model, other = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    with (
        WeightSender(model.named_parameters()) as sender,
        WeightReceiver(list(other.named_parameters())) as receiver,
    ):
        receiver.pull(bytearray(sender.offer()))
    assert all(torch.equal(model.get_parameter(n), p) for n, p in other.named_parameters())


def test_replaced_memory_is_followed() -> None:
    """`p.data = …` on either side: the new memory counts, and the old one is not touched."""
    first, second = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.zeros(3))
    with WeightSender({"w": first}) as sender, WeightReceiver({"w": second}) as receiver:
        receiver.pull(sender.offer())
        old = second.data
        first.data, second.data = torch.full((3,), 5.0), torch.zeros(3)
        receiver.pull(sender.offer())
        assert second.tolist() == [5, 5, 5]
        assert old.tolist() == [1, 1, 1]
        second.data = torch.zeros(4)
        with pytest.raises(WeightSyncError, match=r"float32\[3\].*float32\[4\]"):
            receiver.pull(sender.offer())


class Own(torch.Tensor):
    """A type that is asked through Python, as all are by a torch that has no faster way."""


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter, Own], ids=lambda k: k.__name__)
def test_another_shape_in_the_same_memory_is_followed(kind: type[torch.Tensor]) -> None:
    """The address alone does not tell what is in it."""
    memory, target = torch.arange(6.0), torch.zeros(3, 2)
    weight = memory.view(2, 3).as_subclass(kind) if kind is Own else kind(memory.view(2, 3))
    with WeightSender({"w": weight}) as sender, WeightReceiver({"w": target}) as receiver:
        offer = sender.offer()
        with pytest.raises(WeightSyncError, match=r"float32\[2, 3\].*float32\[3, 2\]"):
            receiver.pull(offer)
        weight.data = memory.view(2, 3).t()
        receiver.pull(sender.offer())
        assert target.tolist() == [[0, 3], [1, 4], [2, 5]]
        weight.data = memory.view(3, 2)
        receiver.pull(sender.offer())
        assert target.tolist() == [[0, 1], [2, 3], [4, 5]]
        weight.requires_grad_(False).data = memory.view(torch.int32).view(3, 2)
        with pytest.raises(WeightSyncError, match=r"int32\[3, 2\].*float32\[3, 2\]"):
            receiver.pull(sender.offer())


def test_a_numpy_array_that_is_reshaped_in_place_is_followed() -> None:
    weight, target = np.arange(6.0), np.zeros((3, 2))
    with WeightSender({"w": weight}) as sender, WeightReceiver({"w": target}) as receiver:
        with pytest.raises(WeightSyncError, match=r"float64\[6\].*float64\[3, 2\]"):
            receiver.pull(sender.offer())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of NumPy 2.5, for this very act
            weight.shape = (3, 2)
        receiver.pull(sender.offer())
        assert target.tolist() == [[0, 1], [2, 3], [4, 5]]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            weight.dtype = np.int64
        with pytest.raises(WeightSyncError, match=r"int64\[3, 2\].*float64\[3, 2\]"):
            receiver.pull(sender.offer())


def test_a_plan_is_used_again(caplog: pytest.LogCaptureFixture) -> None:
    weights, lines = source(), []
    with (
        WeightSender(weights) as sender,
        WeightReceiver(zeros(weights), log=lines.append) as receiver,
    ):
        for _ in range(3):
            receiver.pull(sender.offer())
    assert lines == ["[weight-sync names validated] context=host_shm sender=2 expected=2"]
    with caplog.at_level(logging.INFO, "arctic_rl_c"), WeightSender(weights) as sender:
        WeightReceiver(zeros(weights)).pull(sender.offer())
    assert caplog.messages == lines


def test_a_log_that_raises_is_not_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, target, shown = source(), zeros(source()), []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: shown.append(args.exc_type))
    with WeightSender(weights) as sender:
        WeightReceiver(target, log=lambda line: 1 / 0).pull(sender.offer())
    assert same(target, weights)
    assert shown == [ZeroDivisionError]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_in_a_log_is_not_lost(error: type[BaseException]) -> None:
    weights, target = source(), zeros(source())

    def log(line: str) -> None:
        raise error(line)

    with WeightSender(weights) as sender, WeightReceiver(target, log=log) as receiver:
        with pytest.raises(error, match="names validated"):
            receiver.pull(sender.offer())
        assert same(target, weights)
        assert (receiver.torn, receiver.version) == (False, 1)
        assert sender.serve().version == 1
    with WeightSender(weights) as sender, WeightReceiver(target, log=log) as receiver:
        with pytest.raises(error, match="names validated"), receiver.views(sender.offer()):
            pytest.fail("the block was entered")
        assert (receiver.torn, receiver.live_mappings()) == (True, 0)
        with pytest.raises(WeightSyncError, match="interrupted"):
            sender.serve()
        receiver.pull(sender.offer())
        assert not receiver.torn


def test_ctrl_c_in_logging_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(record: logging.LogRecord) -> None:
        raise KeyboardInterrupt(record.getMessage())

    weights = source()
    monkeypatch.setattr(logging.getLogger("arctic_rl_c"), "handle", handle)
    monkeypatch.setattr(logging.getLogger("arctic_rl_c"), "level", logging.INFO)
    monkeypatch.setenv("ARCTIC_WEIGHT_SYNC_STRICT_NAMES", "0")
    with pytest.raises(KeyboardInterrupt, match="has no effect"):
        WeightReceiver(weights)


# ---- stats ---------------------------------------------------------------------------------------


def test_stats_are_plain_and_cannot_be_changed() -> None:
    weights = source()
    with WeightSender(weights) as sender, WeightReceiver(zeros(weights)) as receiver:
        stats = receiver.pull(sender.offer())
    fields = stats.as_dict()
    assert all(getattr(stats, name) == value for name, value in fields.items())
    assert all(isinstance(value, str | int | float | None) for value in fields.values())
    for name in fields:
        with pytest.raises(AttributeError):
            setattr(stats, name, 1)
    parts = [value for name, value in fields.items() if name.endswith("_seconds")]
    assert 0 < sum(parts) <= stats.seconds * 1.001
    again = pickle.loads(pickle.dumps(stats))
    assert again.as_dict() == fields
    assert repr(stats).startswith("<SyncStats version 1: 2 tensors, 0.00 MiB over host_shm in ")


def test_stats_are_made_from_their_fields() -> None:
    stats = SyncStats(transport="ring", fallback_reason="no handle", bytes=1 << 20, version=7)
    assert (stats.transport, stats.fallback_reason, stats.bytes) == ("ring", "no handle", 1 << 20)
    assert "1.00 MiB over ring in 0.00 ms, fallback_reason='no handle'" in repr(stats)
    with pytest.raises(ValueError, match="pigeon"):
        SyncStats(transport="pigeon")
    with pytest.raises(TypeError, match="keywords"):
        SyncStats("ring")
    with pytest.raises(TypeError):
        SyncStats(transport="ring", version="x")


# ---- versions ------------------------------------------------------------------------------------


def test_versions_grow() -> None:
    weights = source()
    with WeightSender(weights) as sender, WeightReceiver(zeros(weights)) as receiver:
        assert receiver.pull(sender.offer(version=10)).version == 10
        with pytest.raises(ValueError, match="version 10 is not above 10"):
            sender.offer(version=10)
        assert receiver.pull(sender.offer()).version == 11
        with pytest.raises(ValueError, match="begin at 1"):
            sender.offer(version=0)
        with pytest.raises(OverflowError):
            sender.offer(version=-1)
        assert receiver.pull(sender.offer(version=2**64 - 1)).version == receiver.version
        assert receiver.version == sender.version == 2**64 - 1


def test_an_offer_is_used_once() -> None:
    weights = source()
    with WeightSender(weights) as sender, WeightReceiver(zeros(weights)) as receiver:
        offer = sender.offer()
        receiver.pull(offer)
        with pytest.raises(WeightSyncError, match="version 1 of the same sender was pulled"):
            receiver.pull(offer)
        with pytest.raises(WeightSyncError, match="1 receiver has taken it already"):
            WeightReceiver(zeros(weights)).pull(offer)
        second = sender.offer()
        receiver.pull(sender.offer())
        with pytest.raises(WeightSyncError, match="version 2, and version 3"):
            receiver.pull(second)
        with pytest.raises(WeightSyncError, match="released it or made a new one"):
            WeightReceiver(zeros(weights)).pull(second)
        assert receiver.version == 3
        assert not receiver.torn


def test_a_new_sender_begins_again() -> None:
    weights, target = source(), zeros(source())
    with WeightReceiver(target) as receiver:
        for _ in range(40):  # more than a receiver remembers
            with WeightSender(weights) as sender:
                assert receiver.pull(sender.offer()).version == 1


def test_a_released_offer_is_over() -> None:
    weights = source()
    with WeightSender(weights) as sender, WeightReceiver(zeros(weights)) as receiver:
        offer = sender.offer()
        sender.release()
        sender.release()
        with pytest.raises(WeightSyncError, match="is over"):
            receiver.pull(offer)
        with pytest.raises(WeightSyncError, match="there is no offer to serve"):
            sender.serve()
        receiver.pull(sender.offer())


def test_a_copy_needs_no_feeding() -> None:
    with WeightSender(source()) as sender:
        sender.offer()
        with pytest.raises(ValueError, match="host_shm took the tensors at offer"):
            sender.serve(iter(source().items()))


# ---- torn ----------------------------------------------------------------------------------------


def test_a_pull_that_fails_half_way_leaves_torn_weights() -> None:
    weights, target = source(), zeros(source())
    with WeightSender(weights, verify="all") as sender, WeightReceiver(target) as receiver:
        receiver.pull(sender.offer())
        offer = sender.offer()
        spoil(offer)
        with pytest.raises(WeightSyncError, match=r"a: the checksum is .* after the copy"):
            receiver.pull(offer, verify="all")
        assert receiver.torn
        assert receiver.version == 1
        with pytest.raises(TornWeightsError, match="pull of version 2 failed: a: the checksum"):
            receiver.check()
        with pytest.raises(WeightSyncError, match=r"receiver 0 of 1 .* failed: a: the checksum"):
            sender.serve()
        receiver.pull(sender.offer(), verify="all")
        receiver.check()
        assert (receiver.torn, receiver.version) == (False, 3)
    assert same(target, weights)


def test_part_of_a_set_does_not_mend_torn_weights() -> None:
    weights, target = source(), zeros(source())
    part = WeightSender({"a": weights["a"]})
    with (
        WeightSender(weights, verify="all") as whole,
        part,
        WeightReceiver(target, partial=True) as receiver,
    ):
        stats = receiver.pull(part.offer())
        assert (stats.tensors, stats.untouched) == (1, 1)
        assert (receiver.torn, receiver.version) == (False, None)
        offer = whole.offer()
        spoil(offer)
        with pytest.raises(WeightSyncError):
            receiver.pull(offer, verify="all")
        receiver.pull(part.offer())
        assert receiver.torn
        assert receiver.pull(whole.offer()).untouched == 0
        assert (receiver.torn, receiver.version) == (False, 2)


# ---- checksums -----------------------------------------------------------------------------------


def test_checksums_cover_what_they_say() -> None:
    weights = {f"w{i}": np.full(7, float(i)) for i in range(20)}
    with (
        WeightSender(weights, verify="all") as sender,
        WeightReceiver(zeros(weights)) as receiver,
    ):
        assert receiver.pull(sender.offer(), verify="all").verified == 20
        assert receiver.pull(sender.offer(), verify="sample").verified in (1, 2)
        assert receiver.pull(sender.offer()).verified == 0
    with (
        WeightSender(weights, verify="sample") as sender,
        WeightReceiver(zeros(weights)) as receiver,
    ):
        assert receiver.pull(sender.offer(), verify="sample").verified in (1, 2)
        with pytest.raises(WeightSyncError, match='verify="all" needs checksums'):
            receiver.pull(sender.offer(), verify="all")
        assert not receiver.torn
    for bad in ("some", 1, True):
        with pytest.raises(ValueError, match="verify"):
            WeightSender(weights, verify=bad)


@pytest.mark.parametrize("name", ["w", "t", "part"])
def test_a_spoilt_byte_is_found_in_every_layout(name: str) -> None:
    from arctic_rl_c import Binding

    big = np.arange(60.0).reshape(6, 10)
    weights = {"w": big.copy(), "t": big.T, "part": big.copy()}
    target = {
        "w": np.zeros((6, 20))[:, ::2],
        "t": np.zeros((10, 6)),
        "part": Binding(np.zeros((6, 3)), dim=1, start=4, full=10),
    }
    with WeightSender(weights, verify="all") as sender, WeightReceiver(target) as receiver:
        assert receiver.pull(sender.offer(), verify="all").verified == 3
        offer = sender.offer()
        place = next(t.offset for t in offers.tensors(offer) if t.name == name)
        spoil(offer, place + 400)
        with pytest.raises(WeightSyncError, match=f"^{name}: the checksum"):
            receiver.pull(offer, verify="all")


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 4095, 4096, 4097, 100_003])
def test_the_checksum_is_the_documented_one(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    spread = np.zeros((size, 3), dtype=np.uint8)
    spread[:, 1] = data
    with WeightSender({"d": data, "s": spread[:, 1], "r": data[::-1]}, verify="all") as sender:
        found = {t.name: t.checksum for t in offers.tensors(sender.offer())}
    assert found["d"] == found["s"] == offers.checksum(data.tobytes())
    assert found["r"] == offers.checksum(data[::-1].tobytes())


# ---- choice of transport -------------------------------------------------------------------------

CHOICES = [
    ({"transport": "pigeon"}, ValueError, "pigeon"),
    ({"cuda_ipc": True}, TransportUnavailableError, "in CPU memory"),
    ({"low_memory": True}, TransportUnavailableError, "in CPU memory"),
    ({"transport": "cuda_ipc"}, TransportUnavailableError, "in CPU memory"),
    ({"transport": "nccl"}, TransportUnavailableError, "in CPU memory"),
    ({"low_memory": True, "cuda_ipc": False}, ValueError, "forbids"),
    ({"transport": "host_shm", "cuda_ipc": True}, ValueError, "contradicts"),
    ({"transport": "ring", "cuda_ipc": False}, ValueError, "contradicts"),
    ({"transport": "host_shm", "low_memory": True}, ValueError, "contradicts"),
    ({"transport": "ring", "low_memory": False}, ValueError, "contradicts"),
]


@pytest.mark.parametrize(("options", "error", "part"), CHOICES, ids=str)
def test_what_cannot_be_had_is_refused(
    options: dict[str, object], error: type[Exception], part: str
) -> None:
    with WeightSender(source(), **options) as sender:
        with pytest.raises(error, match=part):
            sender.offer()
        assert sender.version is None
        assert sender.live_exports() == 0


@pytest.mark.parametrize(
    "options", [{}, {"cuda_ipc": False}, {"low_memory": False}, {"transport": "host_shm"}], ids=str
)
def test_tensors_on_the_cpu_go_over_host_shm(options: dict[str, object]) -> None:
    with WeightSender(source(), **options) as sender:
        assert WeightReceiver(zeros(source())).pull(sender.offer()).transport == "host_shm"


def test_tensors_that_come_later_need_a_stream() -> None:
    """(dtype, shape) is for the transports that stream, which are on the GPU."""
    with (
        WeightSender({"w": ("bfloat16", (3, 4))}) as sender,
        # Which of the two depends on whether the tests of cuda_ipc brought a driver here.
        pytest.raises((TransportUnavailableError, ValueError), match=r"cuda_ipc|only low_memory"),
    ):
        sender.offer()
    with (
        WeightSender({"w": (torch.float32, [3]), "v": np.ones(3)}) as sender,
        pytest.raises(ValueError, match="w is in CUDA memory and v in CPU memory"),
    ):
        sender.offer()


# ---- arguments -----------------------------------------------------------------------------------

BAD_PARAMS = [
    ({}, ValueError, "no parameters"),
    (5, TypeError, "iterable"),
    (None, TypeError, "expected a mapping of name to tensor, .* got NoneType"),
    ("abc", TypeError, "expected a mapping of name to tensor, .* got str"),
    (b"abc", TypeError, "expected a mapping of name to tensor, .* got bytes"),
    (np.ones(3), TypeError, "pairs"),
    (torch.ones(3), TypeError, "pairs"),
    ([1], TypeError, "pairs"),
    ([("a",)], TypeError, "pairs"),
    ([(1, np.ones(1))], TypeError, "pairs"),
    ({"a": 1.5}, TypeError, "a: expected a torch tensor"),
    ({"a": np.array(["x"])}, TypeError, "a: dtype"),
    ({"a": np.ones(1, dtype=">f8")}, TypeError, "a: dtype"),
    ({"a\0b": np.ones(1)}, ValueError, "NUL"),
    ({"a": np.ones((1,) * 9)}, ValueError, "a: has 9 dimensions"),
    ({"a": torch.ones(3).to_sparse()}, ValueError, "a: layout"),
    ({"\ud800": np.ones(1)}, UnicodeEncodeError, "surrogates"),
]


@pytest.mark.parametrize("role", [WeightSender, WeightReceiver])
@pytest.mark.parametrize(("params", "error", "part"), BAD_PARAMS, ids=lambda v: str(v)[:30])
def test_params_are_named_tensors(
    role: type, params: object, error: type[Exception], part: str
) -> None:
    with pytest.raises(error, match=part):
        role(params)


@pytest.mark.parametrize("role", [WeightSender, WeightReceiver])
def test_tensors_without_memory_are_refused(role: type) -> None:
    with pytest.raises(ValueError, match="w: has no memory of its own here"):
        role({"w": torch.ones(3, device="meta")})


def test_names_of_a_sender() -> None:
    for params, part in (
        ([("a", np.ones(1)), ("a", np.ones(1))], "the name a comes twice"),
        ({"": np.ones(1)}, "empty name"),
        ({"n" * 1024: np.ones(1)}, "1024 bytes"),
    ):
        with WeightSender(params) as sender, pytest.raises(ValueError, match=part):
            sender.offer()
    with pytest.raises(ValueError, match="0 bytes"):
        WeightReceiver({"": np.ones(1)})
    with pytest.raises(ValueError, match="1024 bytes"):
        WeightReceiver({"n" * 1024: np.ones(1)})


def test_destinations_are_writable() -> None:
    fixed = np.zeros(3)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="w: is read-only"):
        WeightReceiver({"w": fixed})
    with WeightSender({"w": fixed}) as sender:  # to read is enough there
        WeightReceiver({"w": np.ones(3)}).pull(sender.offer())


@pytest.mark.parametrize("timeout", [-1, math.inf, math.nan, "soon", 1e300, 1e9 + 1, 10**400])
def test_every_wait_has_an_end(timeout: object) -> None:
    error = TypeError if isinstance(timeout, str) else ValueError
    for role in (WeightSender, WeightReceiver):
        with pytest.raises(error, match=r"^timeout: expected .* got (str|-?\d|inf|nan)"):
            role(source(), timeout=timeout)
    with WeightSender(source()) as sender, WeightReceiver(source()) as receiver:
        for call in (sender.offer, sender.serve, sender.release):
            with pytest.raises(error):
                call(timeout=timeout)
        with pytest.raises(error):
            receiver.pull(b"", timeout=timeout)
        with pytest.raises(error):
            receiver.views(b"", timeout=timeout)


def test_integers_are_named() -> None:
    """Whichever argument is none, or out of range: the message says which, and of which call."""
    weights = {"w": np.ones(3)}
    makes: dict[str, Callable[[Any], object]] = {
        "WeightSender: receivers": lambda n: WeightSender(weights, receivers=n),
        "WeightSender: senders": lambda n: WeightSender(weights, senders=n),
        "WeightSender: ring_bytes": lambda n: WeightSender(weights, ring_bytes=n),
        "WeightSender: device": lambda n: WeightSender(weights, device=n),
        "offer: version": lambda n: WeightSender(weights).offer(version=n),
        "join: rank": lambda n: WeightSender(weights).join(b"", n),
        "w: dim of a Binding": lambda n: WeightReceiver({"w": Binding(np.ones(3), n, 0, 3)}),
        "w: start of a Binding": lambda n: WeightReceiver({"w": Binding(np.ones(3), 0, n, 3)}),
        "w: full of a Binding": lambda n: WeightReceiver({"w": Binding(np.ones(3), 0, 0, n)}),
        "w: a size of its shape": lambda n: WeightSender({"w": ("float32", (n,))}),
    }
    for name, make in makes.items():
        for odd in ("x", 1.5, [1]):
            with pytest.raises(
                TypeError, match=rf"^{name} is an integer, not {type(odd).__name__}$"
            ):
                make(odd)
        for huge in (2**64, -(2**64)):
            with pytest.raises(OverflowError, match=rf"^{name} is .* to .*, not {huge}"):
                make(huge)
    for name in ("receivers", "senders"):
        with pytest.raises(ValueError, match=rf"^WeightSender: {name} is 1 to \d+, not 0$"):
            WeightSender(weights, **{name: 0})
    with pytest.raises(TypeError, match=r"w: expected \(dtype, shape\) with a sequence of sizes"):
        WeightSender({"w": ("float32", 5)})


class Pairless(dict[str, str]):
    def items(self) -> list[int]:
        return [1]


def test_options_of_a_sender() -> None:
    for options, error in (
        ({"receivers": 0}, ValueError),
        ({"receivers": 5000}, ValueError),
        ({"receivers": "x"}, TypeError),
        ({"ring_bytes": -1}, ValueError),
        ({"cuda_ipc": 1}, TypeError),
        ({"low_memory": "yes"}, TypeError),
        ({"colocated": 0}, TypeError),
        ({"transport": 3}, TypeError),
        ({"nonsense": 3}, TypeError),
    ):
        with pytest.raises(error):
            WeightSender(source(), **options)
    for options in (
        {"aliases": {"a": 1}},
        {"aliases": {1: "a"}},
        {"aliases": 3},
        {"aliases": Pairless()},
        {"non_synced": "text"},
        {"non_synced": [1]},
        {"non_synced": 3},
    ):
        with pytest.raises(TypeError):
            WeightReceiver(source(), **options)


# ---- life ----------------------------------------------------------------------------------------


def test_closing_twice_is_fine_and_use_after_it_is_not() -> None:
    weights = source()
    sender, receiver = WeightSender(weights), WeightReceiver(zeros(weights))
    offer = sender.offer()
    for thing in (sender, receiver):
        assert not thing.closed
        thing.close()
        thing.close()
        assert thing.closed
        with pytest.raises(ClosedError, match="is closed"):
            thing.__enter__()
    for call in (sender.offer, sender.serve, sender.release):
        with pytest.raises(ClosedError, match="this WeightSender is closed"):
            call()
    with pytest.raises(ClosedError, match="this WeightReceiver is closed"):
        receiver.pull(offer)
    with pytest.raises(ClosedError):
        receiver.views(offer).__enter__()
    assert (sender.live_exports(), receiver.live_mappings()) == (0, 0)


def test_the_end_of_a_sender_ends_its_offer() -> None:
    sender = WeightSender(source())
    sender.offer()
    assert len(peers.shm_files()) == 2
    del sender
    assert peers.shm_files() == []


def test_params_are_held_and_let_go() -> None:
    class Array(np.ndarray):
        pass

    weights = {"w": np.zeros(3).view(Array)}
    gone = weakref.ref(weights["w"])
    sender, receiver = WeightSender(weights), WeightReceiver(weights)
    del weights
    gc.collect()
    assert gone() is not None
    sender.close()
    assert gone() is not None
    receiver.close()
    gc.collect()
    assert gone() is None


def test_cycles_are_collected() -> None:
    class Array(np.ndarray):
        pass

    for role in (WeightSender, WeightReceiver):
        array = np.zeros(3).view(Array)
        array.owner = role({"w": array})
        gone = weakref.ref(array)
        del array
        gc.collect()
        assert gone() is None


def test_what_a_call_calls_cannot_use_the_sender_too() -> None:
    """A signal's handler, in the middle of a wait for a receiver."""

    class Enough(Exception):
        pass

    def handle(number: int, frame: object) -> None:
        with pytest.raises(RuntimeError, match=r"in use by this thread, in serve\(\): what that"):
            sender.close()
        raise Enough

    before = signal.signal(signal.SIGALRM, handle)
    try:
        with WeightSender(source()) as sender:
            sender.offer()
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Enough):
                sender.serve()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_one_thread_at_a_time() -> None:
    sender = WeightSender(source())
    offer = sender.offer()
    done = []
    thread = threading.Thread(target=lambda: done.append(sender.serve()))
    with peers.Control(offer) as control:
        thread.start()
        peers.until(lambda: control.sender == peers.Control.SERVING)
        with pytest.raises(RuntimeError, match=r"in use by another thread, in serve\(\)"):
            sender.offer()
        with pytest.raises(RuntimeError, match="another thread"):
            sender.close()
        WeightReceiver(zeros(source())).pull(offer)
        thread.join(peers.LIMIT)
    assert done[0].tensors == 2
    sender.close()


def test_a_wait_ends_with_its_deadline() -> None:
    with WeightSender(source(), receivers=2, timeout=0.05) as sender:
        offer = sender.offer()
        begin = time.monotonic()
        with pytest.raises(PeerTimeoutError, match="0 of 2 receivers have finished and 2 never"):
            sender.serve()
        assert time.monotonic() - begin >= 0.05
        first = WeightReceiver(zeros(source()))
        first.pull(offer)
        with pytest.raises(PeerTimeoutError, match="1 of 2 receivers have finished and 1 never"):
            sender.serve(timeout=0)
        WeightReceiver(zeros(source())).pull(offer)  # the offer is still good
        assert sender.serve(timeout=0).version == 1


# ---- kept memory ---------------------------------------------------------------------------------


def test_kept_memory_is_used_again() -> None:
    weights, target = source(), zeros(source())
    files = set()
    with WeightSender(weights, keep_mapped=True) as sender, WeightReceiver(target) as receiver:
        for i in range(3):
            weights["a"][:] = i
            receiver.pull(sender.offer())
            assert same(target, weights)
            sender.release()
            assert sender.live_exports() == 0
            files |= set(peers.shm_files())
        assert len(files) == 1
    assert peers.shm_files() == []


def test_kept_memory_grows_with_the_parameters() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    with WeightSender({"w": parameter}, keep_mapped=True) as sender:
        for size in (3, 3000, 30):
            parameter.data = torch.full((size,), float(size))
            target = torch.zeros(size)
            WeightReceiver({"w": target}).pull(sender.offer())
            assert target.eq(size).all()


def test_kept_memory_is_not_written_to_under_a_reader() -> None:
    weights = source()
    with WeightSender(weights, keep_mapped=True) as sender:
        receiver = WeightReceiver(zeros(weights))
        with receiver.views(sender.offer()) as tensors:
            list(tensors)
            for call in (sender.offer, sender.release):
                with pytest.raises(PeerTimeoutError, match="1 receivers still read"):
                    call(timeout=0)
            assert sender.live_exports() == 1
        sender.release(timeout=0)


def test_new_memory_needs_no_waiting() -> None:
    weights = source()
    with (
        WeightSender(weights) as sender,
        WeightReceiver(zeros(weights)).views(sender.offer()) as tensors,
    ):
        found = {name: np.from_dlpack(view) for name, view in tensors}
        weights["a"][:] = -1
        sender.offer(timeout=0)
        assert same(found, source())
        del found


def test_full_shared_memory_is_an_error_that_says_so() -> None:
    huge = np.broadcast_to(np.zeros(1), (1 << 40,))
    with WeightSender({"w": huge}) as sender:
        with pytest.raises(OSError, match=r"MiB free and 8388609 are needed: enlarge") as caught:
            sender.offer()
        assert caught.value.errno == 28
        assert sender.version is None
    assert peers.shm_files() == []


# ---- views ---------------------------------------------------------------------------------------


def test_views_are_the_senders_tensors() -> None:
    weights = {
        "a": torch.randn(3, 4),
        "t": torch.randn(3, 4).t(),
        "b": torch.randn(5).to(torch.bfloat16),
        "s": torch.tensor(2.0),
        "z": torch.empty(0, 3),
    }
    with WeightSender(weights, verify="all") as sender:
        receiver = WeightReceiver(dict.fromkeys(weights))
        with receiver.views(sender.offer(), verify="all") as tensors:
            assert receiver.torn
            assert tensors.stats is None
            for name, view in tensors:
                assert name == view.name
                assert view.shape == tuple(weights[name].shape)
                assert f"torch.{view.dtype}" == str(weights[name].dtype)
                assert view.nbytes == weights[name].nbytes
                assert view.__dlpack_device__() == (1, 0)
                assert repr(view).startswith(f"<WeightView {name}: {view.dtype}[")
                assert torch.equal(torch.from_dlpack(view), weights[name])
        assert (receiver.torn, receiver.version) == (False, 1)
        assert repr(view).endswith(", ended>")
        stats = tensors.stats
        assert (stats.tensors, stats.verified, stats.version) == (5, 5, 1)
        assert stats.bytes == sum(t.nbytes for t in weights.values())
        assert sender.serve().version == 1
    with pytest.raises(ClosedError, match="has ended"):
        view.__dlpack__()
    with pytest.raises(ClosedError, match="has ended"):
        next(tensors)


def test_views_are_read_only_and_a_write_stays_here() -> None:
    weights, target = source(), zeros(source())
    with WeightSender(weights, receivers=2) as sender:
        offer = sender.offer()
        with WeightReceiver(zeros(weights)).views(offer) as tensors:
            _, view = next(tensors)
            assert not np.from_dlpack(view).flags.writeable
            old_style = torch.utils.dlpack.from_dlpack(view.__dlpack__())
            old_style.fill_(7)  # torch knows no read-only tensors
            list(tensors)
        WeightReceiver(target).pull(offer)
        assert same(target, weights)
        del old_style


def test_views_without_their_block() -> None:
    with WeightSender(source()) as sender, WeightReceiver(source()) as receiver:
        views = receiver.views(sender.offer())
        with pytest.raises(ClosedError, match="with statement"):
            next(views)
        assert not receiver.torn
        with views:
            list(views)
        with pytest.raises(RuntimeError, match="entered once"):
            views.__enter__()
        assert receiver.pull(sender.offer()).version == 2
        with pytest.raises(TypeError, match="bytes-like"):
            receiver.views(3).__enter__()
        assert receiver.pull(sender.offer()).version == 3


def test_a_block_that_raises_leaves_torn_weights() -> None:
    with WeightSender(source()) as sender, WeightReceiver(source()) as receiver:
        with pytest.raises(KeyError, match="mine"), receiver.views(sender.offer()) as tensors:
            next(tensors)
            raise KeyError("mine")
        with pytest.raises(TornWeightsError, match="raised KeyError"):
            receiver.check()
        with pytest.raises(WeightSyncError, match="raised KeyError"):
            sender.serve()


def test_a_block_that_ends_early_leaves_torn_weights() -> None:
    with WeightSender(source()) as sender, WeightReceiver(source()) as receiver:
        with (
            pytest.raises(WeightSyncError, match="after 1 of 2 tensors"),
            receiver.views(sender.offer()) as tensors,
        ):
            next(tensors)
        assert receiver.torn
        with receiver.views(sender.offer()) as tensors:
            list(tensors)
        receiver.check()


def test_a_block_that_is_dropped_leaves_torn_weights() -> None:
    with WeightSender(source()) as sender, WeightReceiver(source()) as receiver:
        views = receiver.views(sender.offer()).__enter__()
        with pytest.raises(RuntimeError, match=r"in views\(\)"):
            receiver.pull(sender.offer())
        del views
        with pytest.raises(TornWeightsError, match="without its end"):
            receiver.check()
        receiver.pull(sender.offer())
        receiver.check()


def test_views_validate_as_pulls_do() -> None:
    with WeightSender(source()) as sender:
        receiver = WeightReceiver({"a": None, "c": None})
        with pytest.raises(WeightSyncError, match="not sent: c; 1 sent but not expected: b"):
            receiver.views(sender.offer()).__enter__()
        assert not receiver.torn
        receiver = WeightReceiver({"a": np.zeros(1), "b": None})
        with pytest.raises(WeightSyncError, match=r"a: the sender has float64\[2, 3\]"):
            receiver.views(sender.offer()).__enter__()
        with pytest.raises(ValueError, match="b: is a name without a tensor"):
            WeightReceiver({"a": np.zeros((2, 3)), "b": None}).pull(sender.offer())


def test_views_find_a_spoilt_byte_before_it_is_read() -> None:
    with WeightSender(source(), verify="all") as sender, WeightReceiver(source()) as receiver:
        offer = sender.offer()
        spoil(offer)
        with (
            pytest.raises(WeightSyncError, match="a: the checksum of the mapped bytes"),
            receiver.views(offer, verify="all") as tensors,
        ):
            list(tensors)
        assert receiver.torn


def test_what_outlives_its_block_keeps_the_mapping() -> None:
    with WeightSender(source()) as sender:
        receiver = WeightReceiver(source())
        with receiver.views(sender.offer()) as tensors:
            kept = [np.from_dlpack(view) for _, view in tensors]
            assert receiver.live_mappings() == 1
        sender.close()
        receiver.close()
        assert receiver.live_mappings() == 1
        assert kept[1].tolist() == [0, 1, 2, 3, 4]
        del receiver, tensors
        kept.pop()
        assert kept[0].tolist() == source()["a"].tolist()


def test_views_refuse_what_dlpack_may_ask() -> None:
    with (
        WeightSender(source()) as sender,
        WeightReceiver(source()) as receiver,
        receiver.views(sender.offer()) as tensors,
    ):
        _, view = next(tensors)
        for options in ({"copy": True}, {"dl_device": (2, 0)}):
            with pytest.raises(BufferError):
                view.__dlpack__(**options)
        with pytest.raises(TypeError):
            view.__dlpack__(max_version=3)
        view.__dlpack__(max_version=(1, 0), dl_device=(1, 0), copy=False, stream=None)
        list(tensors)


# ---- norms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "error", "said"),
    [
        (None, TypeError, "params is of type NoneType, wanted a mapping of names to tensors"),
        ([1], TypeError, "an item of params is of type int, wanted pairs of a name and a tensor"),
        ([("a",)], TypeError, "an item of params is of type tuple, wanted pairs"),
        ({"a": 1.0}, TypeError, "'a' is of type float, wanted a torch tensor or a NumPy array"),
        ({"a": np.array(["x"])}, TypeError, "'a' is an array of <U1, not of numbers"),
        ({"a": torch.zeros(2, device="meta")}, ValueError, "'a' has the layout torch.strided on"),
        ({"a": torch.zeros(2).to_sparse()}, ValueError, "'a' has the layout torch.sparse_coo on"),
    ],
)
def test_weight_norm_of_something_else(params: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=f"^weight_norm: {said}"):
        weight_norm(params)


def test_weight_norm() -> None:
    a, b = torch.randn(5, 7), torch.randn(3).to(torch.bfloat16)
    wanted = math.sqrt(float((a.double() ** 2).sum() + (b.double() ** 2).sum()))
    assert math.isclose(weight_norm({"a": a, "b": b}), wanted, rel_tol=1e-12)
    assert math.isclose(weight_norm([("a", a), ("b", b), ("tied", a)]), wanted, rel_tol=1e-12)
    assert math.isclose(weight_norm({"a": a.numpy()}), float(a.double().norm()), rel_tol=1e-12)
    assert weight_norm({"f": torch.full((4,), 2.0).to(torch.float8_e4m3fn)}) == 4
    assert weight_norm({"c": torch.tensor([3 + 4j])}) == 5
    assert weight_norm({"c": np.array([3 + 4j])}) == 5
    assert weight_norm({"b": np.array([True] * 4)}) == 2
    assert weight_norm({}) == 0
    assert weight_norm({"i": torch.tensor([3, 4])}) == 5
    assert weight_norm({"z": torch.empty(0), "n": np.empty((0, 2))}) == 0
