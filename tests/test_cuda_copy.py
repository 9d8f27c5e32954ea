# SPDX-License-Identifier: Apache-2.0
"""The device copy engine on the fake driver: the kernels' own source, run on the CPU."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import fakes
import native

FAKE_SMS = 3


@pytest.fixture(scope="module")
def driver() -> Iterator[fakes.Driver]:
    found = fakes.driver()
    native.load_cuda()
    yield found
    fakes.clean(found.session)


@pytest.fixture(autouse=True)
def balanced(driver: fakes.Driver) -> Iterator[dict[str, int]]:
    """Every test leaves the device as it found it, and the thread's context stack too.

    A test that leaves something on purpose adds it to the counts that this yields.
    """
    before = driver.live()
    yield before
    driver.reset()
    gc.collect()  # a caught exception's traceback keeps its frame, which keeps the arrays
    assert driver.live() == before
    assert driver.depth() == 0
    assert fakes.misuse(driver.session) is None


def random_array(nbytes: int, seed: int, offset: int = 0) -> fakes.DeviceArray:
    values = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    return fakes.device_array(values, offset=offset)


def copy_between(source: np.ndarray, destination: np.ndarray, base: int) -> native.Copy | None:
    """The copy of one NumPy view over another, `base` being the source's allocation."""
    return native.make_copy(
        source.itemsize,
        source.shape,
        (0, source.ctypes.data - base, source.strides),
        (destination.ctypes.data, destination.strides),
    )


def run(engine: native.Engine, copies: Sequence[native.Copy], bases: Sequence[int]) -> str:
    with engine.plan(copies, len(bases)) as plan:
        plan.run(bases)
        engine.wait()
        return plan.kind


# ---- contiguous ---------------------------------------------------------------------------------

EDGES = (1, 2, 3, 7, 8, 15, 16, 17, 31, 63, 64, 65, 255, 4095, 4096, 4097, 65535, 65536, 65537)


@pytest.mark.parametrize("threads", [32, 512])
def test_every_alignment_and_length(driver: fakes.Driver, threads: int) -> None:
    source = random_array(70_000, 1)
    target = random_array(70_000, 2)
    with native.Engine(threads=threads) as engine:
        for src in range(17):
            for dst in range(0, 17, 1 if threads == 512 else 5):
                length = EDGES[(src * 17 + dst) % len(EDGES)]
                expected = target.array.copy()
                expected[dst : dst + length] = source.array[src : src + length]
                copy = copy_between(
                    source.array[src : src + length],
                    target.array[dst : dst + length],
                    source.memory.pointer,
                )
                assert copy is not None
                assert run(engine, [copy], [source.memory.pointer]) == "segments"
                assert np.array_equal(target.array, expected), (src, dst, length)


def test_many_tensors_from_several_allocations(driver: fakes.Driver) -> None:
    rng = np.random.default_rng(3)
    sources = [random_array(200_000, seed) for seed in range(5)]
    target = random_array(1_000_000, 9)
    expected = target.array.copy()
    copies, at = [], 0
    for number in range(60):
        length = int(rng.integers(1, 16_000))
        base = number % 5
        start = int(rng.integers(0, 200_000 - length))
        expected[at : at + length] = sources[base].array[start : start + length]
        copy = native.make_copy(1, [length], (base, start, [1]), (target.memory.pointer + at, [1]))
        assert copy is not None
        copies.append(copy)
        at += length
    with native.Engine() as engine:
        run(engine, copies, [s.memory.pointer for s in sources])
    assert np.array_equal(target.array, expected)


def test_tables_are_kept_while_bases_move(driver: fakes.Driver) -> None:
    first, second = random_array(100_000, 1), random_array(100_000, 2)
    target = random_array(100_000, 3)
    copy = copy_between(first.array, target.array, first.memory.pointer)
    assert copy is not None
    with native.Engine() as engine, engine.plan([copy]) as plan:
        allocations = driver.live()["allocations"]
        for source in (first, second, second, first):
            target.array[...] = 0
            plan.run([source.memory.pointer])
            engine.wait()
            assert np.array_equal(target.array, source.array)
        assert driver.live()["allocations"] == allocations
        assert plan.table_bytes < 1024


def test_nothing_to_copy(driver: fakes.Driver) -> None:
    assert native.make_copy(4, [0, 5], (0, 0, [20, 4]), (0, [20, 4])) is None
    with native.Engine() as engine:
        assert run(engine, [], []) == "segments"
        assert run(engine, [], [4096]) == "segments"


# ---- strided ------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, list[int], list[int], list[slice], list[slice]]:
    """An item size, a shape, an order of axes, and a slicing for each side."""
    itemsize = draw(st.sampled_from([1, 2, 4, 8, 16]))
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(shape))))

    def slicing() -> list[slice]:
        found = []
        for size in shape:
            step = draw(st.sampled_from([1, 1, 1, 2, -1, -3]))
            before = draw(st.integers(0, 2))
            span = (size - 1) * abs(step) + 1
            found.append(
                slice(before, before + span, step)
                if step > 0
                else slice(before + span - 1, before - 1 if before else None, step)
            )
        return found

    return itemsize, shape, list(order), slicing(), slicing()


def parent_shape(shape: list[int], slices: list[slice]) -> list[int]:
    return [max(s.start, s.stop or 0) + 3 for s in slices]


def sliced(memory: np.ndarray, itemsize: int, shape: list[int], slices: list[slice]) -> np.ndarray:
    parent = parent_shape(shape, slices)
    count = math.prod(parent)
    dtype = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}[itemsize]
    return memory[: count * itemsize].view(dtype).reshape(parent)[tuple(slices)]


@given(layouts(), st.integers(0, 3), st.integers(0, 3))
def test_any_two_layouts(
    layout: tuple[int, list[int], list[int], list[slice], list[slice]], before: int, after: int
) -> None:
    itemsize, shape, order, src_slices, dst_slices = layout
    source = random_array(1 << 20, 1)
    target = random_array(1 << 20, 2)
    shift, move = before * itemsize, after * itemsize
    from_view = sliced(source.array[shift:], itemsize, shape, src_slices)
    to_view = sliced(target.array[move:], itemsize, shape, dst_slices)
    assert list(from_view.shape) == list(to_view.shape) == shape
    from_view, to_view = from_view.transpose(order), to_view.transpose(order)
    reference = target.array.copy()
    reference_view = sliced(reference[move:], itemsize, shape, dst_slices).transpose(order)
    # Bytes, so that a complex NaN is not an excuse.
    reference_view[...] = from_view
    copy = copy_between(from_view, to_view, source.memory.pointer)
    assert copy is not None
    with native.Engine(threads=64) as engine:
        run(engine, [copy], [source.memory.pointer])
    assert np.array_equal(target.array, reference)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(
    ("rows", "columns", "what"),
    [(300, 200, "columns"), (257, 129, "transpose"), (40, 3000, "rows"), (64, 33, "fused")],
)
def test_usual_destinations(
    driver: fakes.Driver, rows: int, columns: int, what: str, kernels: bool
) -> None:
    """Column slices, transposes, padded rows and a slice of a fused parameter, in bfloat16."""
    source = fakes.device_array(np.arange(rows * columns, dtype=np.uint16).reshape(rows, columns))
    target = fakes.device_array(np.zeros((3 * max(rows, columns), 3 * max(rows, columns)), "u2"))
    view = {
        "columns": target.array[:rows, 7 : 7 + columns],
        "transpose": target.array[:columns, :rows].T,
        "rows": target.array[5 : 5 + rows, :columns],
        "fused": target.array.reshape(-1)[: 3 * rows * columns].reshape(3, rows, columns)[1],
    }[what]
    copy = copy_between(source.array, view, source.memory.pointer)
    assert copy is not None
    if not kernels:
        driver.fail("cuModuleLoadDataEx", 1, 218)
    with native.Engine() as engine:
        assert (engine.fallback == "") is kernels
        kind = run(engine, [copy], [source.memory.pointer])
    long_runs = what in ("rows", "fused")
    assert kind == (("segments" if long_runs else "segments+strided") if kernels else "graph")
    assert np.array_equal(view, source.array)
    written = view.size
    view[...] = 0
    assert not target.array.any(), f"wrote outside its {written} elements"


# ---- the graph ----------------------------------------------------------------------------------


def test_without_kernels_says_why(driver: fakes.Driver) -> None:
    driver.fail("cuModuleLoadDataEx", 1, 218)
    with native.Engine() as engine:
        assert "CUDA_ERROR_INVALID_PTX" in engine.fallback
        assert "graph of memcpy nodes" in engine.fallback
    driver.reset()
    driver.fail("cuModuleGetFunction", 2, 500)
    before = driver.live()["modules"]
    with native.Engine() as engine:
        assert "cuModuleGetFunction: CUDA_ERROR_NOT_FOUND" in engine.fallback
        assert driver.live()["modules"] == before


def test_graph_is_remade_for_other_bases_only(driver: fakes.Driver) -> None:
    driver.fail("cuModuleLoadDataEx", 1)
    first, second = random_array(5000, 1), random_array(5000, 2)
    target = random_array(5000, 3)
    copy = copy_between(first.array, target.array, first.memory.pointer)
    assert copy is not None
    with native.Engine() as engine, engine.plan([copy]) as plan:
        for source in (first, first, second):
            target.array[...] = 0
            plan.run([source.memory.pointer])
            engine.wait()
            assert np.array_equal(target.array, source.array)
            assert driver.live()["graphs"] == 1


@given(layouts())
def test_graph_copies_any_two_layouts(
    layout: tuple[int, list[int], list[int], list[slice], list[slice]],
) -> None:
    itemsize, shape, order, src_slices, dst_slices = layout
    source, target = random_array(1 << 20, 1), random_array(1 << 20, 2)
    from_view = sliced(source.array, itemsize, shape, src_slices).transpose(order)
    to_view = sliced(target.array, itemsize, shape, dst_slices).transpose(order)
    reference = target.array.copy()
    sliced(reference, itemsize, shape, dst_slices).transpose(order)[...] = from_view
    copy = copy_between(from_view, to_view, source.memory.pointer)
    assert copy is not None
    fakes.driver().fail("cuModuleLoadDataEx", 1)
    with native.Engine() as engine:
        assert run(engine, [copy], [source.memory.pointer]) == "graph"
    fakes.driver().reset()
    assert np.array_equal(target.array, reference)


def test_graph_refuses_millions_of_nodes(driver: fakes.Driver) -> None:
    driver.fail("cuModuleLoadDataEx", 1)
    side = 1100
    source = fakes.device_array(np.zeros((side, side), "u1"))
    target = fakes.device_array(np.zeros((side, side), "u1"))
    copy = copy_between(source.array[::-1, ::-1], target.array, source.memory.pointer)
    assert copy is not None
    with native.Engine() as engine, engine.plan([copy]) as plan:
        with pytest.raises(native.NativeError, match="make the tensors contiguous") as caught:
            plan.run([source.memory.pointer])
        assert caught.value.code == "ARL_ERR_UNAVAILABLE"
        assert driver.live()["graphs"] == 0


# ---- order and time -----------------------------------------------------------------------------


def test_follows_the_callers_stream(driver: fakes.Driver) -> None:
    """What the caller's stream still has to write is copied, not what was there before."""
    late = random_array(50_000, 1)
    source = random_array(50_000, 2)
    target = random_array(50_000, 3)
    copy = copy_between(source.array, target.array, source.memory.pointer)
    write = copy_between(late.array, source.array, late.memory.pointer)
    assert copy is not None
    assert write is not None
    with (
        native.Engine() as caller,
        native.Engine() as engine,
        caller.plan([write]) as writing,
        engine.plan([copy]) as copying,
    ):
        driver.lag(20_000)
        writing.run([late.memory.pointer])
        engine.follow(caller.stream)
        copying.run([source.memory.pointer])
        engine.wait()
        assert np.array_equal(target.array, late.array)
        caller.wait()


def test_a_device_that_hangs_is_not_waited_for(driver: fakes.Driver) -> None:
    source, target = random_array(5000, 1), random_array(5000, 2)
    copy = copy_between(source.array, target.array, source.memory.pointer)
    assert copy is not None
    with native.Engine() as engine, engine.plan([copy]) as plan:
        driver.hold(True)
        plan.run([source.memory.pointer])
        with pytest.raises(native.NativeError, match="the copy: not done on device 0") as caught:
            engine.wait(0.01)
        assert caught.value.code == "ARL_ERR_TIMEOUT"
        driver.hold(False)
        engine.wait()
        assert np.array_equal(target.array, source.array)


# ---- checksums ----------------------------------------------------------------------------------

MASK = (1 << 64) - 1


def mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def checksum(array: np.ndarray) -> int:
    """The definition in core/arl_hash.h, word by word."""
    data = array.tobytes()
    total = len(data)
    padded = data + bytes(-total % 8)
    words = np.frombuffer(padded, "<u8").tolist()
    return mix(
        (total + sum(mix(w ^ ((i + 1) * 0x9E3779B97F4A7C15 & MASK)) for i, w in enumerate(words)))
        & MASK
    )


def view_of(array: np.ndarray) -> native.View:
    return native.make_view(array.ctypes.data, array.itemsize, array.shape, array.strides)


@pytest.mark.parametrize("kernels", [True, False])
def test_checksums(driver: fakes.Driver, kernels: bool) -> None:
    memory = random_array(200_000, 7)
    words = memory.array[:160_000].view("u2").reshape(200, 400)
    arrays = [
        memory.array[:1],
        memory.array[:8],
        memory.array[3:20],
        memory.array[8:70_000],
        memory.array[1:1],
        words,
        words[:, 3:77],
        words.T,
        words[::-2, ::3],
        memory.array[:1600].view("c16").reshape(10, 10).T,
    ]
    if not kernels:
        driver.fail("cuModuleLoadDataEx", 1)
    with native.Engine() as engine:
        assert engine.checksums([view_of(a) for a in arrays]) == [checksum(a) for a in arrays]
        assert engine.checksums([]) == []
        assert engine.checksums([view_of(memory.array[:0])]) == [checksum(memory.array[:0])]


def test_checksum_notices_exchanged_words(driver: fakes.Driver) -> None:
    memory = random_array(64, 1)
    with native.Engine() as engine:
        before = engine.checksums([view_of(memory.array)])
        words = memory.array.view("u8")
        words[[0, 5]] = words[[5, 0]]
        assert engine.checksums([view_of(memory.array)]) != before


def test_checksum_deadline(driver: fakes.Driver, balanced: dict[str, int]) -> None:
    memory = random_array(64, 1)
    with native.Engine() as engine:
        driver.hold(True)
        with pytest.raises(native.NativeError, match="checksums: not done") as caught:
            engine.checksums([view_of(memory.array)], seconds=0.01)
        assert caught.value.code == "ARL_ERR_TIMEOUT"
        driver.hold(False)
        engine.wait()
    # Freeing device memory waits for the device: a call that timed out gives it up instead.
    balanced["allocations"] += 1


# ---- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", [True, False])
def test_every_call_may_fail(driver: fakes.Driver, kernels: bool) -> None:
    """The n-th driver call fails, for every n: an error that names it, and nothing left over."""
    source, target = random_array(9000, 1), random_array(9000, 2)
    odd = source.array.reshape(90, 100)[:, ::3], target.array.reshape(90, 100)[:, ::3]
    copies = [
        copy_between(source.array[:4000], target.array[:4000], source.memory.pointer),
        copy_between(*odd, source.memory.pointer),
    ]
    assert None not in copies
    bases = [source.memory.pointer]

    def scenario() -> None:
        if not kernels:
            driver.fail("cuModuleLoadDataEx", 1)
        with native.Engine() as engine, engine.plan(copies) as plan:  # type: ignore[arg-type]
            plan.run(bases)
            engine.wait()
            engine.checksums([view_of(target.array)])

    before = driver.live()
    start = driver.calls()
    scenario()
    total = driver.calls() - start
    failed = set()
    for nth in range(1, total + 1):
        driver.reset()
        driver.fail("any", nth)
        try:
            scenario()
        except native.NativeError as error:
            assert "CUDA_ERROR_UNKNOWN" in error.text
            assert error.operation
            failed.add(error.text.split(":")[0])
        assert driver.live() == before, f"call {nth} of {total}"
        assert driver.depth() == 0, f"call {nth} of {total}"
    expected = {"cuDevicePrimaryCtxRetain", "cuStreamCreate", "cuMemcpyAsync", "cuStreamQuery"}
    expected |= {"cuLaunchKernel", "cuMemAlloc"} if kernels else {"cuGraphLaunch"}
    assert expected <= failed


def test_out_of_memory_is_a_memory_error(driver: fakes.Driver) -> None:
    source = random_array(5000, 1)
    copy = copy_between(source.array, source.array, source.memory.pointer)
    assert copy is not None
    with native.Engine() as engine:
        driver.fail("cuMemAlloc_v2", 1, 2)
        with pytest.raises(native.NativeError, match="bytes of copy tables on device 0") as caught:
            engine.plan([copy])
        assert caught.value.code == "ARL_ERR_NOMEM"


def test_wrong_copies_are_refused(driver: fakes.Driver) -> None:
    copy = native.Copy(alloc=2, dst=4096, run_bytes=16)
    with native.Engine() as engine:
        with pytest.raises(native.NativeError, match="copy 0 reads from allocation 2 of 1"):
            engine.plan([copy], bases=1)
        copy = native.Copy(dst=4096, run_bytes=0)
        with pytest.raises(native.NativeError, match="copy 0 has runs of 0 bytes"):
            engine.plan([copy])
        copy.run_bytes = 16
        misaligned = pytest.raises(native.NativeError, match="0x1004, which is not 16-byte")
        with engine.plan([copy]) as plan, misaligned:
            plan.run([0x1004])
