# SPDX-License-Identifier: Apache-2.0
"""The offer: its bytes are as documented, and no other bytes are taken for one."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import offers
from arctic_rl_c import (
    PeerLostError,
    TransportUnavailableError,
    WeightMismatchError,
    WeightReceiver,
    WeightSender,
    WeightSyncError,
)

SOURCE = {
    "embed.weight": np.arange(24, dtype=np.float32).reshape(4, 6),
    "norm": np.arange(5, dtype=np.int16),
    "scale": np.array(3.5),
    "empty": np.zeros((0, 3), dtype=np.uint8),
}
SOURCE["head.weight"] = SOURCE["embed.weight"]


def targets() -> dict[str, np.ndarray]:
    found = {name: np.full_like(value, 77) for name, value in SOURCE.items()}
    found["head.weight"] = found["embed.weight"]
    return found


@contextmanager
def pair(**options) -> Iterator[tuple[WeightSender, WeightReceiver, dict[str, np.ndarray]]]:
    target = targets()
    with WeightSender(SOURCE, **options) as sender, WeightReceiver(target) as receiver:
        yield sender, receiver, target


def assert_untouched(target: dict[str, np.ndarray]) -> None:
    for name, value in target.items():
        assert (value == 77).all(), name


def refused(receiver: WeightReceiver, offer: bytes, *parts: str, error=WeightSyncError) -> None:
    with pytest.raises(error) as caught:
        receiver.pull(offer)
    for part in parts:
        assert part in str(caught.value)
    assert not receiver.torn
    assert receiver.version is None


# ---- what is in it -------------------------------------------------------------------------------


def test_the_crc_is_crc32c() -> None:
    assert offers.crc32c(b"123456789") == 0xE3069283


def test_the_header_is_as_documented() -> None:
    with WeightSender(SOURCE, receivers=3, verify="all") as sender:
        offer = sender.offer(version=41)
    assert offers.signed(offer) == offer
    assert offers.get(offer, "magic") == b"ARLOFFER"
    assert offers.get(offer, "format") == 2
    assert offers.get(offer, "total_size") == len(offer)
    assert offers.get(offer, "header_size") == offers.HEADER
    assert offers.get(offer, "transport") == 1
    assert offers.get(offer, "verify") == 2
    assert offers.get(offer, "receivers") == 3
    assert (offers.get(offer, "senders"), offers.get(offer, "sender_rank")) == (1, 0)
    assert offers.get(offer, "pid") == os.getpid()
    assert offers.get(offer, "pid_namespace") == os.stat("/proc/self/ns/pid").st_ino
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    assert offers.get(offer, "start_time") == int(fields[19])
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    assert offers.get(offer, "boot_id").hex() == boot
    assert offers.get(offer, "host").rstrip(b"\0").decode() == socket.gethostname()[:63]
    assert offers.get(offer, "unit_kind") == 0
    assert offers.get(offer, "epoch") == 41
    assert offers.get(offer, "fallback") == bytes(128)


def test_the_tensors_are_as_documented() -> None:
    with WeightSender(SOURCE, verify="all") as sender:
        offer = sender.offer()
    kind, reserved, size, base, unit, index, uuid, handle = struct.unpack_from(
        "<IIQQIi16s64s", offer, offers.HEADER
    )
    assert (kind, reserved, base, unit, index, uuid) == (1, 0, 0, 0, 0, bytes(16))
    assert handle.startswith(b"/arl-")
    found = {tensor.name: tensor for tensor in offers.tensors(offer)}
    assert list(found) == list(SOURCE)
    dtypes = {"float32": 12, "int16": 5, "float64": 13, "uint8": 2}
    for name, value in SOURCE.items():
        tensor = found[name]
        assert tensor.dtype == dtypes[value.dtype.name]
        assert tensor.shape == value.shape
        assert tensor.alloc == 0
        assert tensor.offset % 256 == 0
        assert tensor.offset + value.nbytes <= size
        assert tensor.checksum == offers.checksum(value.tobytes())
    assert found["embed.weight"].strides == (24, 4)
    assert found["head.weight"].alias_of == 0
    assert found["head.weight"].offset == found["embed.weight"].offset
    assert found["norm"].alias_of == 1


def test_an_offer_is_new_each_time_but_its_layout_stays() -> None:
    with WeightSender(SOURCE) as sender:
        first, second = sender.offer(), sender.offer()
        with WeightSender(SOURCE) as other:
            third = other.offer()
    assert offers.get(first, "epoch") + 1 == offers.get(second, "epoch")
    assert offers.get(first, "nonce") == offers.get(second, "nonce") != offers.get(third, "nonce")
    assert offers.get(first, "control") != offers.get(second, "control")
    ids = {offers.get(offer, "layout_id") for offer in (first, second, third)}
    assert len(ids) == 1
    renamed = {**SOURCE, "norms": SOURCE["norm"]}
    with WeightSender(renamed) as sender:
        assert offers.get(sender.offer(), "layout_id") not in ids


@pytest.mark.parametrize("count", [1, 3, 16, 40])
def test_a_sample_comes_round_to_every_tensor(count: int) -> None:
    source = {f"w{i}": np.full(3, i + 1) for i in range(count)}
    seen = set()
    with WeightSender(source, verify="sample") as sender:
        for _ in range(min(count, 16)):
            sampled = [t.name for t in offers.tensors(sender.offer()) if t.checksum]
            assert sampled
            seen.update(sampled)
    assert seen == set(source)


# ---- what is not one -----------------------------------------------------------------------------


def test_other_bytes_are_not_an_offer() -> None:
    with pair() as (_, receiver, target):
        for data in (b"", b"ARL", b"\x80\x04\x95pickle", bytes(500)):
            refused(receiver, data, "not an offer", f"{len(data)} bytes")
        with pytest.raises(TypeError):
            receiver.pull("ARLOFFER")
        assert_untouched(target)


def test_every_cut_is_noticed() -> None:
    with pair() as (sender, receiver, target):
        offer = sender.offer()
        for size in range(8, len(offer)):
            refused(receiver, offer[:size], "cut off")
        refused(receiver, offer + b"\0", "was cut off or something was added")
        assert_untouched(target)
        assert receiver.pull(offer).tensors == 5  # it was never used up by that


def test_every_changed_byte_is_noticed() -> None:
    with pair() as (sender, receiver, target):
        offer = sender.offer()
        for at in range(len(offer)):
            changed = bytearray(offer)
            changed[at] ^= 0x10
            refused(receiver, bytes(changed))
        assert_untouched(target)
        receiver.pull(offer)


HEADER_LIES = [
    ("format", 1, "format 1", "format 2", "same version"),
    ("header_size", 400, "header 400"),
    ("transport", 9, "transport 9 is not known"),
    ("transport", 0, "transport 0 is not known"),
    ("verify", 3, "checksum mode"),
    ("receivers", 0, "number of receivers"),
    ("receivers", 5000, "number of receivers", "4096"),
    ("senders", 0, "sender's rank"),
    ("sender_rank", 1, "sender's rank"),
    ("pid", 0, "pid 0"),
    ("pid", -5, "pid -5"),
    ("unit_kind", 3, "kind of device"),
    ("host", b"x" * 64, "has no end"),
    ("control", b"x" * 64, "has no end"),
    ("control", b"", "needs a control block"),
    ("control", b"/etc/passwd", "not a name this library makes"),
    ("fallback", b"x" * 128, "has no end"),
    ("epoch", 0, "version 0"),
    ("layout_id", 1, "layout id"),
    ("alloc_count", 0, "need"),
    ("alloc_count", 1 << 31, "number of allocations", "65536"),
    ("tensor_count", 1, "need"),
    ("tensor_count", (1 << 32) - 1, "number of tensors", "1048576"),
    ("names_size", (1 << 32) - 1, "need"),
    ("names_size", 1, "need"),
    ("blob_size", 70000, "transport's data", "65536"),
    ("boot_id", bytes(16), "another machine", "reboot"),
    ("pid_namespace", 1, "another container", "PID namespace"),
]


@pytest.mark.parametrize(
    ("field", "value", "parts"), [(f, v, p) for f, v, *p in HEADER_LIES], ids=str
)
def test_a_header_that_lies_is_refused(field: str, value: object, parts: list[str]) -> None:
    with pair() as (sender, receiver, target):
        offer = sender.offer()
        refused(receiver, offers.change(offer, field, value), *parts)
        assert_untouched(target)
        receiver.pull(offer)


def test_offers_of_transports_that_do_not_fit_are_refused() -> None:
    """Without CUDA, or with it (the fake one that other tests bring in) but for CPU tensors."""
    with pair() as (sender, receiver, _):
        for number in (2, 3, 4):
            with pytest.raises((TransportUnavailableError, WeightSyncError, ValueError)):
                receiver.pull(offers.change(sender.offer(), "transport", number))
            assert not receiver.torn
            assert receiver.version is None


def test_a_forged_block_of_another_offer_is_refused() -> None:
    with pair() as (sender, receiver, _), WeightSender(SOURCE) as other:
        offer = sender.offer()
        theirs = offers.get(other.offer(), "control")
        refused(receiver, offers.change(offer, "control", theirs), "was not made for this offer")
        refused(receiver, offers.change(offer, "epoch", 9), "was not made for this offer")
        refused(receiver, offers.change(offer, "receivers", 2), "bytes", "were expected")


#: offset in the record of a tensor, format, value, parts of the message
TENSOR_LIES = [
    (0, "I", 0, "no valid name"),
    (0, "I", 2000, "no valid name"),
    (0, "I", 13, ""),
    (4, "I", 0, "dtype 0"),
    (4, "I", 99, "dtype 99"),
    (8, "I", 9, "number of dimensions"),
    (8, "I", 1, "beyond its dimensions"),
    (12, "I", 1, "allocation of a tensor"),
    (12, "I", 0xFFFFFFFF, "streamed"),
    (16, "I", 4, "alias of a tensor"),
    (16, "I", 0xFFFFFFFF, "alias of a tensor"),
    (20, "I", 1, "number of dimensions"),
    (24, "Q", 1 << 62, "leaves its allocation"),
    (24, "Q", (1 << 64) - 8, "leaves its allocation"),
    (32, "q", -1, "size -1"),
    (32, "q", 1 << 40, "leaves its allocation"),
    (32, "q", 1 << 62, "overflow"),
    (96, "q", 1 << 61, "leaves its allocation"),
    (96, "q", -(1 << 20), "leaves its allocation"),
]


@pytest.mark.parametrize(
    ("offset", "code", "value", "part"),
    TENSOR_LIES,
    ids=[f"{o}-{v:#x}" for o, _, v, _ in TENSOR_LIES],
)
def test_a_tensor_that_lies_is_refused(offset: int, code: str, value: int, part: str) -> None:
    index = 1 if offset == 24 else 0
    with pair() as (sender, receiver, target):
        offer = sender.offer()
        at = offers.tensor_at(offer, index) + offset
        if (offset, value) == (12, 0xFFFFFFFF):
            at = offers.tensor_at(offer, 1) + 12  # one with an offset
        refused(receiver, offers.put(offer, at, code, value), part)
        assert_untouched(target)
        receiver.pull(offer)


def test_an_alias_that_differs_is_refused() -> None:
    with pair() as (sender, receiver, _):
        offer = sender.offer()
        at = offers.tensor_at(offer, 1) + 16
        refused(receiver, offers.put(offer, at, "I", 0), "norm is not the same as embed.weight")


#: offset in the record of an allocation, format, value
@pytest.mark.parametrize(
    ("offset", "code", "value"),
    [(0, "I", 0), (0, "I", 9), (4, "I", 1), (8, "Q", 0), (8, "Q", 1 << 63), (24, "I", 7)],
)
def test_an_allocation_that_lies_is_refused(offset: int, code: str, value: int) -> None:
    with pair() as (sender, receiver, target):
        offer = offers.put(sender.offer(), offers.HEADER + offset, code, value)
        refused(receiver, offer, "allocation 0 has kind")
        assert_untouched(target)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        (b"/arl-" + b"a" * 59, "has no end"),
        (b"/arl-../../etc/passwd", "not a name this library makes"),
        (b"/arl-none", "removed"),
        (b"", "not a name"),
    ],
)
def test_only_its_own_files_are_opened(name: bytes, part: str) -> None:
    with pair() as (sender, receiver, target):
        # views(), because a pull within one process uses the mapping that is there
        forged = offers.put(sender.offer(), offers.HEADER + 48, "64s", name)
        with pytest.raises(WeightSyncError, match=part):
            receiver.views(forged).__enter__()
        assert not receiver.torn
        assert_untouched(target)


def test_a_file_of_another_size_is_refused() -> None:
    with pair() as (sender, receiver, target):
        offer = sender.offer()
        size = struct.unpack_from("<Q", offer, offers.HEADER + 8)[0]
        forged = offers.put(offer, offers.HEADER + 8, "Q", size + 4096)
        with pytest.raises(WeightSyncError, match=f"has {size} bytes, {size + 4096} were"):
            receiver.views(forged).__enter__()
        assert_untouched(target)


def test_no_memory_of_the_sender_travels_behind_a_name() -> None:
    with pair() as (sender, _, _):
        for _ in range(5):
            handle = struct.unpack_from("<64s", sender.offer(), offers.HEADER + 48)[0]
            name, _, rest = handle.partition(b"\0")
            assert name.startswith(b"/arl-")
            assert rest == bytes(len(rest))


def test_a_file_that_others_may_read_is_refused() -> None:
    with pair() as (sender, receiver, target):
        offer = sender.offer()
        name = struct.unpack_from("<64s", offer, offers.HEADER + 48)[0].rstrip(b"\0").decode()
        Path("/dev/shm" + name).chmod(0o644)
        with pytest.raises(WeightSyncError, match="mode 644"):
            receiver.views(offer).__enter__()
        assert_untouched(target)


def named(offer: bytes, end: bytes) -> bytes:
    """The offer with the last bytes of its names changed; a transport's own bytes follow them."""
    stop = len(offer) - offers.get(offer, "blob_size")
    return offers.signed(offer[: stop - len(end)] + end + offer[stop:])


def test_names_are_utf8_and_come_once() -> None:
    with WeightSender({"aa": np.ones(2), "ab": np.ones(3)}) as sender:
        offer = sender.offer()
        with WeightReceiver({"aa": np.ones(2), "ab": np.ones(3)}) as receiver:
            refused(receiver, named(offer, b"a"), "the name aa comes twice")
            for bad in (b"\xff", b"\x80", b"\x00", b"\xc3"):
                refused(receiver, named(offer, bad), "no valid name")
    with WeightSender({"\u00e9": np.ones(2)}) as sender:
        for bad in (b"\xc0\x80", b"\xc3\x28", b"\xe9\xe9"):
            with WeightReceiver({"\u00e9": np.ones(2)}) as receiver:
                refused(receiver, named(sender.offer(), bad), "no valid name")
    for name in ("é" * 511, "\U0001f600", "日本語", "\ud7ff", "\ue000", "\U0010ffff"):
        target = np.zeros(2)
        with (
            WeightSender({name: np.ones(2)}) as sender,
            WeightReceiver({name: target}) as receiver,
        ):
            receiver.pull(sender.offer())
        assert target.tolist() == [1, 1]


# ---- anything ------------------------------------------------------------------------------------

HARMLESS = (
    WeightSyncError,
    WeightMismatchError,
    PeerLostError,
    TransportUnavailableError,
    OSError,
    MemoryError,
)


@settings(max_examples=600)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 1 << 16),
            st.sampled_from(["B", "H", "I", "Q"]),
            st.one_of(
                st.integers(0, 300),
                st.sampled_from([2**k - d for k in (8, 16, 31, 32, 63, 64) for d in (1, 2)]),
                st.integers(0, 2**64 - 1),
            ),
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(-40, 40),
)
def test_signed_nonsense_does_no_harm(changes: list[tuple[int, str, int]], length: int) -> None:
    """With the checksum made right: either an error before the first byte, or a whole pull."""
    with pair() as (sender, receiver, target):
        offer = sender.offer()
        offer = offer[:length] if length < 0 else offer + bytes(length % 3)
        changed = bytearray(offer)
        for at, code, value in changes:
            size = struct.calcsize(code)
            at %= len(changed) - size
            struct.pack_into("<" + code, changed, at, value & (1 << 8 * size) - 1)
        struct.pack_into("<Q", changed, 16, len(changed))
        try:
            stats = receiver.pull(offers.signed(bytes(changed)))
        except HARMLESS:
            assert_untouched(target)
            assert not receiver.torn
        else:
            assert stats.tensors == 5
