# SPDX-License-Identifier: Apache-2.0
"""The fakes behave as the real libraries were seen to, where the tests rely on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import fakes
from fakes.peers import Peer, PeerError

# ---- CUDA ---------------------------------------------------------------------------------------

#: Plain calls of the driver, each of which raises with its name and code when it fails.
CUDA = """
import ctypes, fakes
driver = fakes.driver()
class Failed(Exception): pass
def call(name, *args):
    code = getattr(driver.library, name)(*args)
    if code:
        raise Failed(f"{name}: {code}")
class Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 64),)
context = ctypes.c_void_p()
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxPushCurrent_v2", context)
def handle_of(pointer):
    handle = Handle()
    call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_size_t(pointer))
    return bytes(handle)
def open_handle(data):
    pointer = ctypes.c_size_t()
    call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), Handle.from_buffer_copy(data), 1)
    return pointer.value
"""


@pytest.fixture
def pair() -> Iterator[tuple[Peer, Peer]]:
    with fakes.session() as env, Peer(env) as one, Peer(env) as two:
        one.run(CUDA)
        two.run(CUDA)
        yield one, two


def test_a_handle_works_in_another_process_only(pair: tuple[Peer, Peer]) -> None:
    one, two = pair
    handle = one.run("p = driver.allocate(100); ctypes.memset(p, 7, 100); result = handle_of(p)")
    with pytest.raises(PeerError, match="cuIpcOpenMemHandle_v2: 201"):
        one.run("open_handle(handle)", handle=handle)
    read = "q = open_handle(handle); result = ctypes.string_at(q, 100)"
    assert two.run(read, handle=handle) == b"\7" * 100
    assert two.run("result = open_handle(handle) == q") is True  # counted, one mapping
    assert two.run("result = driver.live()['mappings']") == 1
    two.run("[call('cuIpcCloseMemHandle', ctypes.c_size_t(q)) for _ in range(2)]")
    assert two.run("result = driver.live()['mappings']") == 0
    one.run("driver.free(p)")
    with pytest.raises(PeerError, match="cuIpcOpenMemHandle_v2: 1"):
        two.run("open_handle(handle)", handle=handle)


def test_memory_allocated_again_has_another_handle(pair: tuple[Peer, Peer]) -> None:
    one, _ = pair
    assert one.run(
        "p = driver.allocate(100); first = handle_of(p); same = handle_of(p) == first\n"
        "driver.free(p); p = driver.allocate(100); result = same, handle_of(p) == first\n"
        "driver.free(p)"
    ) == (True, False)


def test_expandable_memory_has_no_handle(pair: tuple[Peer, Peer]) -> None:
    with pytest.raises(PeerError, match=r"cuIpcGetMemHandle: 1$"):
        pair[0].run("p = driver.allocate(100, vmm=True); handle_of(p)")
    pair[0].run("driver.free(p)")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("call('cuIpcCloseMemHandle', ctypes.c_size_t(4096))", "which is not open"),
        ("p = driver.allocate(9); driver.free(p); driver.library.cuMemFree_v2(p)", "freed already"),
        ("call('cuCtxPopCurrent_v2', ctypes.byref(context))\n" * 2, "was not pushed"),
        ("call('cuMemFree_v2', 8)", "not an allocation"),
    ],
)
def test_misuse_is_recorded_for_the_whole_session(code: str, text: str) -> None:
    name = fakes.new_session()
    with Peer(fakes.environment(name)) as peer:
        peer.run(CUDA + "\ntry:\n    " + code.replace("\n", "\n    ") + "\nexcept Failed: pass")
    found = fakes.misuse(name)
    fakes.clean(name)
    assert found is not None
    assert text in found


def test_freeing_what_a_live_process_has_mapped_is_misuse() -> None:
    name = fakes.new_session()
    env = fakes.environment(name)
    with Peer(env) as two, Peer(env) as one:
        one.run(CUDA)
        two.run(CUDA)
        handle = one.run("p = driver.allocate(100); result = handle_of(p)")
        two.run("q = open_handle(handle)", handle=handle)
        one.run("driver.free(p)")
        assert two.run("result = ctypes.string_at(q, 3)") == b"\xdb\xdb\xdb"
        assert "while process" in str(fakes.misuse(name))
    fakes.clean(name)


def test_a_killed_process_has_nothing_mapped(pair: tuple[Peer, Peer]) -> None:
    one, two = pair
    handle = one.run("p = driver.allocate(100); result = handle_of(p)")
    two.run("open_handle(handle)", handle=handle)
    two.kill()
    one.run("driver.free(p)")  # the session's end would report misuse


COPY = """
a, b = driver.allocate(64), driver.allocate(64)
ctypes.memset(a, 1, 64); ctypes.memset(b, 0, 64)
def copy(stream):
    call("cuMemcpyAsync", ctypes.c_size_t(b), ctypes.c_size_t(a), ctypes.c_size_t(64), stream)
def stream(flags):
    made = ctypes.c_void_p()
    call("cuStreamCreate", ctypes.byref(made), flags)
    return made
"""


def test_work_lags_until_it_is_waited_for(pair: tuple[Peer, Peer]) -> None:
    one, _ = pair
    one.run(COPY + "s = stream(1); driver.lag(50_000); copy(s)")
    assert one.run("result = ctypes.string_at(b, 1), driver.pending()") == (b"\0", 1)
    with pytest.raises(PeerError, match="cuStreamQuery: 600"):
        one.run("call('cuStreamQuery', s)")
    one.run("call('cuStreamSynchronize', s)")
    assert one.run("result = ctypes.string_at(b, 1)") == b"\1"
    one.run("call('cuStreamDestroy_v2', s); driver.free(a); driver.free(b)")


def test_the_default_stream_orders_blocking_streams_only(pair: tuple[Peer, Peer]) -> None:
    """The youngest piece that may run runs first: only real ordering keeps two in order."""
    one, _ = pair
    code = """
order = []
driver.hold(True)
first, other = stream(blocking), None
Run = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)
keep = [Run(lambda _, n=n: order.append(n) or True) for n in range(2)]
call("fake_stream_push", first, keep[0], None, None)
call("fake_stream_push", other, keep[1], None, None)
driver.hold(False)
call("cuStreamSynchronize", first); call("cuStreamSynchronize", other)
call("cuStreamDestroy_v2", first)
result = order
"""
    one.run(COPY)
    assert one.run(code, blocking=0) == [0, 1]
    assert one.run(code, blocking=1) == [1, 0]
    one.run("driver.free(a); driver.free(b)")


# ---- NCCL ---------------------------------------------------------------------------------------

NCCL = (
    CUDA
    + """
import time
nccl = driver.nccl
class Id(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 128),)
class Config(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint),
                ("blocking", ctypes.c_int), ("numbers", ctypes.c_int * 3),
                ("net", ctypes.c_char_p), ("split", ctypes.c_int))
nccl.ncclGetLastError.restype = ctypes.c_char_p
comm = ctypes.c_void_p()
def use(device):
    context = ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxPushCurrent_v2", context)
def unique():
    made = Id()
    assert nccl.ncclGetUniqueId(ctypes.byref(made)) == 0
    return bytes(made)
def init(id, rank, ranks=2):
    config = Config(ctypes.sizeof(Config), 0xcafebeef, 21900, 0)
    return nccl.ncclCommInitRankConfig(
        ctypes.byref(comm), ranks, Id.from_buffer_copy(id), rank, ctypes.byref(config))
def state():
    error = ctypes.c_int()
    assert nccl.ncclCommGetAsyncError(comm, ctypes.byref(error)) == 0
    return error.value
def settled(seconds=20):
    end = time.monotonic() + seconds
    while state() == 7:
        if time.monotonic() > end:
            raise TimeoutError("still in progress")
    return state()
stream = ctypes.c_void_p()
def transfer(name, pointer, count, peer):
    if name == "ncclBroadcast":
        return nccl.ncclBroadcast(ctypes.c_size_t(pointer), ctypes.c_size_t(pointer),
                                  ctypes.c_size_t(count), 1, peer, comm, stream)
    function, address = getattr(nccl, name), ctypes.c_size_t(pointer)
    return function(address, ctypes.c_size_t(count), 1, peer, comm, stream)
"""
)

SIZE = 300_000


@pytest.fixture
def ranks() -> Iterator[tuple[Peer, Peer]]:
    with fakes.session() as env, Peer(env) as one, Peer(env) as two:
        for device, peer in enumerate((one, two)):
            peer.run(
                NCCL + "use(device); call('cuStreamCreate', ctypes.byref(stream), 1)\n"
                "p = fakes.driver().allocate(size, device); ctypes.memset(p, device + 1, size)",
                device=device,
                size=SIZE,
            )
        yield one, two
        for peer in (one, two):
            if peer.process.poll() is None:
                peer.run("call('cuStreamDestroy_v2', stream); driver.free(p)")


def join(one: Peer, two: Peer) -> None:
    id = one.run("id = unique(); result = id")
    assert one.run("result = init(id, 0)") == 7
    assert one.run("result = state()") == 7  # nobody else is there
    assert two.run("result = init(id, 1)", id=id) == 7
    assert one.run("result = settled()") == two.run("result = settled()") == 0


def leave(*peers: Peer) -> None:
    for peer in peers:
        assert peer.run("result = nccl.ncclCommFinalize(comm)") == 7
    for peer in peers:
        assert peer.run("result = settled()") == 0
        assert peer.run("result = nccl.ncclCommAbort(comm)") == 0
        assert peer.run("result = driver.communicators()") == 0


@pytest.mark.parametrize(("send", "receive"), [("ncclSend", "ncclRecv"), ("ncclBroadcast",) * 2])
def test_bytes_move(ranks: tuple[Peer, Peer], send: str, receive: str) -> None:
    one, two = ranks
    join(one, two)
    for _ in range(2):
        assert (
            one.run(f"result = transfer('{send}', p, {SIZE}, {1 if send == 'ncclSend' else 0})")
            == 0
        )
        assert two.run(f"result = transfer('{receive}', p, {SIZE}, 0)") == 0
        one.run("call('cuStreamSynchronize', stream)")
        two.run("call('cuStreamSynchronize', stream)")
    assert two.run("result = set(ctypes.string_at(p, size))") == {1}
    leave(one, two)


def test_a_group_makes_progress_in_both_directions(ranks: tuple[Peer, Peer]) -> None:
    """Each sends more than a channel holds before it receives: one at a time would hang."""
    one, two = ranks
    join(one, two)
    half = SIZE // 2
    for peer, other in ((one, 1), (two, 0)):
        assert (
            peer.run(
                "assert nccl.ncclGroupStart() == 0\n"
                f"transfer('ncclSend', p, {half}, {other})\n"
                f"transfer('ncclRecv', p + {half}, {half}, {other})\n"
                "result = nccl.ncclGroupEnd()"
            )
            == 0
        )
    for peer, value in ((one, 2), (two, 1)):
        peer.run("call('cuStreamSynchronize', stream)")
        assert peer.run(f"result = set(ctypes.string_at(p + {half}, {half}))") == {value}
    leave(one, two)


def test_counts_that_differ_hang_until_the_abort(ranks: tuple[Peer, Peer]) -> None:
    one, two = ranks
    join(one, two)
    one.run(f"transfer('ncclSend', p, {SIZE - 2}, 1)")
    two.run(f"transfer('ncclRecv', p, {SIZE}, 0)")
    one.run("call('cuStreamSynchronize', stream)")
    with pytest.raises(PeerError, match="cuStreamQuery: 600"):
        two.run("call('cuStreamQuery', stream)")
    assert two.run("result = nccl.ncclCommAbort(comm)") == 0
    two.run("call('cuStreamSynchronize', stream)")
    one.run("nccl.ncclCommAbort(comm)")
    assert two.run("result = driver.communicators()") == 0


def test_two_ranks_on_one_device_are_refused(ranks: tuple[Peer, Peer]) -> None:
    one, two = ranks
    two.run("use(0)")
    id = one.run("id = unique(); init(id, 0); result = id")
    two.run("init(id, 1)", id=id)
    for peer in ranks:
        assert peer.run("result = settled()") == 5
        assert b"Duplicate GPU detected" in peer.run("result = nccl.ncclGetLastError(comm)")
        peer.run("nccl.ncclCommAbort(comm)")
    two.run("call('cuCtxPopCurrent_v2', ctypes.byref(context))")


def test_a_rank_that_never_comes_is_waited_for(ranks: tuple[Peer, Peer]) -> None:
    one, _ = ranks
    one.run("init(unique(), 0)")
    with pytest.raises(PeerError, match="still in progress"):
        one.run("settled(0.05)")
    assert one.run("result = nccl.ncclCommAbort(comm)") == 0


def test_a_dead_rank_is_reported_only_when_asked_to(ranks: tuple[Peer, Peer]) -> None:
    one, two = ranks
    join(one, two)
    two.kill()
    assert one.run("result = state()") == 0
    one.run("import os; os.environ['FAKE_NCCL_REPORT_DEATH'] = '1'")
    assert one.run("result = state()") == 6
    one.run("nccl.ncclCommAbort(comm)")


def test_failures_and_asynchronous_errors(ranks: tuple[Peer, Peer]) -> None:
    one, two = ranks
    one.run("driver.fail('ncclGetUniqueId', 1)")
    assert one.run("result = nccl.ncclGetUniqueId(ctypes.byref(Id()))") == 3
    join(one, two)
    one.run("driver.fail('ncclSend', 1, 6)")
    assert one.run("result = transfer('ncclSend', p, 8, 1)") == 6
    one.run("driver.inject(2)")
    assert one.run("result = state()") == 2
    assert one.run("result = transfer('ncclSend', p, 8, 1)") == 5
    for peer in ranks:
        peer.run("nccl.ncclCommAbort(comm)")
