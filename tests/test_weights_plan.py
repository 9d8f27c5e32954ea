# SPDX-License-Identifier: Apache-2.0
"""What an offer is checked against, and where its bytes go: names, shapes, bindings, overlaps.

Copies are compared with NumPy's own assignment, the slow and obviously right one.
"""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arctic_rl_c import Binding, SyncStats, WeightMismatchError, WeightReceiver, WeightSender


def sync(source: dict[str, object], target: dict[str, object], **options: object) -> SyncStats:
    with (
        WeightSender(source, verify="all") as sender,
        WeightReceiver(target, **options) as receiver,
    ):
        return receiver.pull(sender.offer(), verify="all")


def mismatch(source: dict[str, object], target: dict[str, object], **options: object) -> str:
    """The message of a pull that must be refused before anything is written."""
    before = {
        name: np.array(value) for name, value in target.items() if isinstance(value, np.ndarray)
    }
    with WeightSender(source) as sender, WeightReceiver(target, **options) as receiver:
        with pytest.raises(WeightMismatchError) as caught:
            receiver.pull(sender.offer())
        assert not receiver.torn
    for name, value in before.items():
        assert np.array_equal(value, target[name]), name
    return str(caught.value)


def ones(*names: str) -> dict[str, np.ndarray]:
    return {name: np.ones(2) for name in names}


# ---- names ---------------------------------------------------------------------------------------


def test_names_are_checked_both_ways() -> None:
    assert mismatch(ones("a", "b", "c"), ones("a", "d")) == (
        "Weight-sync param name mismatch [host_shm]: 1 expected but not sent: d; 2 sent but not "
        "expected: b, c; (sender_count=3, expected_count=2)"
    )


def test_ten_names_are_listed_in_order() -> None:
    names = [f"n{i:02}" for i in range(15)]
    text = mismatch(ones("a"), ones("a", *reversed(names)))
    assert text == (
        f"Weight-sync param name mismatch [host_shm]: 15 expected but not sent: "
        f"{', '.join(names[:10])}, …; (sender_count=1, expected_count=16)"
    )
    text = mismatch(ones(*reversed(names)), ones(*names[3:]))
    assert "3 sent but not expected: n00, n01, n02;" in text


def test_long_names_are_cut_in_messages() -> None:
    text = mismatch(ones("a"), ones("a", *(f"{i}{'x' * 900}" for i in range(10))))
    assert len(text) < 1500
    assert f"0{'x' * 79}…, 1x" in text
    assert text.endswith("(sender_count=1, expected_count=11)")


def test_prefixes_are_other_names() -> None:
    text = mismatch(ones("model.q.weight"), ones("model.q.base_layer.weight"))
    assert "not sent: model.q.base_layer.weight; 1 sent but not expected: model.q.weight;" in text


NON_SYNCED = [
    "rotary.inv_freq",
    "q.weight_scale",
    "q.weight_scale_inv",
    "q.input_scale",
    "q.weight_zero_point",
    "q.weight_qzeros",
    "q.weight_g_idx",
    "q.weight_packed",
    "q.weight_shape",
]


@pytest.mark.parametrize("name", NON_SYNCED)
def test_what_is_never_synced_is_no_alarm(name: str, caplog: pytest.LogCaptureFixture) -> None:
    for source, target in (
        (ones("a", name), ones("a")),
        (ones("a"), ones("a", name)),
        (ones("a", name), {**ones("a"), name: np.zeros(7)}),
    ):
        with caplog.at_level(logging.INFO, "arctic_rl_c"):
            stats = sync(source, target)
        assert (stats.tensors, stats.untouched) == (1, 0)
        assert caplog.messages[-1].endswith("sender=1 expected=1")
        if name in target:
            assert target[name].size in (2, 7)
    target = {**ones("a"), name: np.zeros(2)}
    sync(ones("a", name), target)
    assert target[name].tolist() == [0, 0]


def test_the_list_of_what_is_never_synced_can_be_changed() -> None:
    target = {"a": np.zeros(2), "q.weight_scale": np.zeros(2)}
    sync(ones(*target), target, non_synced=())
    assert target["q.weight_scale"].tolist() == [1, 1]
    assert "sent but not expected: q.weight_scale" in mismatch(
        ones("a", "q.weight_scale"), ones("a"), non_synced=()
    )
    target = {"a": np.zeros(2), "lora_A": np.zeros(2)}
    sync(ones("a"), target, non_synced=["lora", ""])
    assert target["lora_A"].tolist() == [0, 0]


def test_a_quantised_weight_comes_with_its_scale() -> None:
    torch = pytest.importorskip("torch")
    eighth = torch.ones(4).to(torch.float8_e4m3fn)
    source = {"q.weight": eighth, "q.weight_scale": torch.ones(1)}
    target = {"q.weight": torch.zeros_like(eighth), "q.weight_scale": torch.zeros(1)}
    text = mismatch(source, target)
    assert "q.weight is quantised (float8_e4m3fn) and its scale q.weight_scale is not" in text
    sync(source, target, non_synced=())
    assert target["q.weight_scale"].tolist() == [1]
    sync({"w": eighth}, {"w": torch.zeros_like(eighth)})  # no scale, no objection


def test_a_partial_receiver_accepts_what_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    target = {name: np.zeros(2) for name in "abc"}
    with caplog.at_level(logging.INFO, "arctic_rl_c"):
        stats = sync(ones("b"), target, partial=True)
    assert (stats.tensors, stats.untouched) == (1, 2)
    assert caplog.messages == ["[weight-sync names validated] context=host_shm sender=1 expected=3"]
    assert [target[name].tolist() for name in "abc"] == [[0, 0], [1, 1], [0, 0]]
    assert "1 sent but not expected: d;" in mismatch(ones("a", "d"), target, partial=True)
    assert mismatch(ones("x.inv_freq"), target, partial=True).startswith(
        "offer and receiver have no name in common"
    )
    assert "sent but not expected: z" in mismatch(ones("z"), target, partial=True)


def test_nothing_to_sync_is_never_a_success() -> None:
    for options in ({}, {"partial": True}):
        text = mismatch(ones("x.inv_freq"), ones("x.inv_freq"), **options)
        assert "nothing would be written" in text


def test_the_switch_of_the_other_server_has_no_effect(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ARCTIC_WEIGHT_SYNC_STRICT_NAMES", "0")
    mismatch(ones("a"), ones("a", "b"))
    assert "partial=True" in caplog.text
    caplog.clear()
    sync(ones("a"), ones("a", "b"), partial=True)
    monkeypatch.setenv("ARCTIC_WEIGHT_SYNC_STRICT_NAMES", "1")
    sync(ones("a"), ones("a"))
    assert "partial=True" not in caplog.text


def test_many_names() -> None:
    source = {f"layers.{i}.weight": np.full(1, i) for i in range(20_000)}
    target = {name: np.zeros(1, dtype=int) for name in reversed(source)}
    assert sync(source, target).tensors == 20_000
    assert all(target[name] == value for name, value in source.items())


# ---- tied weights --------------------------------------------------------------------------------


def tied(value: float) -> dict[str, np.ndarray]:
    array = np.full(3, float(value))
    return {"embed": array, "head": array}


def untied(value: float) -> dict[str, np.ndarray]:
    return {"embed": np.full(3, float(value)), "head": np.full(3, float(value))}


def test_tied_on_both_sides() -> None:
    target = tied(0)
    stats = sync(tied(5), target)
    assert (stats.tensors, stats.bytes) == (2, 24)
    assert target["head"].tolist() == target["embed"].tolist() == [5, 5, 5]


def test_tied_at_the_sender_alone() -> None:
    target = untied(0)
    sync(tied(5), target)
    assert target["head"].tolist() == target["embed"].tolist() == [5, 5, 5]
    for name in ("embed", "head"):  # whichever of the two names the receiver has
        target = {name: np.zeros(3)}
        sync(tied(5), target)
        assert target[name].tolist() == [5, 5, 5]


def test_tied_at_the_receiver_alone() -> None:
    text = mismatch(untied(5), tied(0))
    assert "head and embed share memory here (tied weights)" in text
    for name in ("embed", "head"):  # one name is enough: it is the memory of both
        target = tied(0)
        assert sync({name: np.full(3, 5.0)}, target).untouched == 0
        assert target["embed"].tolist() == [5, 5, 5]


def test_a_tied_name_counts_once_unless_both_are_sent() -> None:
    def counts(source: dict[str, object], target: dict[str, object], **options: object) -> str:
        lines: list[str] = []
        sync(source, target, log=lines.append, **options)
        return lines[0].partition("context=host_shm ")[2]

    one = {"embed": np.full(3, 5.0)}
    assert counts(one, tied(0)) == "sender=1 expected=1"
    assert counts(tied(5), tied(0)) == "sender=2 expected=2"
    assert counts(tied(5), untied(0)) == "sender=2 expected=2"
    assert counts(one, untied(0), aliases={"head": "embed"}) == "sender=1 expected=1"
    unknown = mismatch({**one, **ones("tail")}, tied(0))
    assert unknown.endswith("1 sent but not expected: tail; (sender_count=2, expected_count=1)")
    missing = mismatch(one, {**tied(0), **ones("tail")})
    assert missing.endswith("1 expected but not sent: tail; (sender_count=1, expected_count=2)")


def test_declared_aliases() -> None:
    aliases = {"head": "embed"}
    target = tied(0)
    sync(untied(5), target, aliases=aliases)  # gathered copies of one tensor
    assert target["head"].tolist() == [5, 5, 5]
    for sent in ("embed", "head"):
        target = untied(0)
        sync({sent: np.full(3, 5.0)}, target, aliases=aliases)
        assert target["head"].tolist() == target["embed"].tolist() == [5, 5, 5]
    target = {"embed": np.zeros(3)}
    sync(untied(5), target, aliases=aliases)
    assert target["embed"].tolist() == [5, 5, 5]
    sync({"head": np.full(3, 6.0)}, target, aliases=aliases)
    assert target["embed"].tolist() == [6, 6, 6]
    assert "sent but not expected: tail" in mismatch(
        {**untied(5), "tail": np.ones(3)}, target, aliases=aliases
    )
    assert "not sent: embed, head;" in mismatch(
        ones("a"), {**untied(0), **ones("a")}, aliases=aliases
    )


# ---- dtypes and shapes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "wanted", "parts"),
    [
        (np.zeros(3, "f4"), np.zeros(3, "f2"), ["float32[3]", "float16[3]"]),
        (np.zeros(3, "i4"), np.zeros(3, "u4"), ["int32[3]", "uint32[3]"]),
        (np.zeros((3, 4)), np.zeros((4, 3)), ["float64[3, 4]", "float64[4, 3]"]),
        (np.zeros(12), np.zeros((3, 4)), ["float64[12]", "float64[3, 4]"]),
        (np.zeros(()), np.zeros(1), ["float64[]", "float64[1]"]),
        (np.zeros((1000, 2)), np.zeros((1024, 2)), ["[1000, 2]", "[1024, 2]", "unless the bind"]),
        (np.zeros((0, 2)), np.zeros((0, 3)), ["[0, 2]", "[0, 3]"]),
    ],
    ids=str,
)
def test_dtypes_and_shapes_are_equal(
    sent: np.ndarray, wanted: np.ndarray, parts: list[str]
) -> None:
    text = mismatch({"a": np.ones(2), "w": sent}, {"a": np.zeros(2), "w": wanted})
    assert text.startswith("w: the sender has ")
    for part in parts:
        assert part in text


def test_padded_vocabulary_only_when_declared() -> None:
    real, padded = np.random.default_rng(0).random((10, 4)), np.full((16, 4), 9.0)
    mismatch({"embed": real}, {"embed": padded})
    sync({"embed": real}, {"embed": padded[:10]})
    assert np.array_equal(padded[:10], real)
    assert (padded[10:] == 9).all()
    target = np.zeros((10, 4))
    mismatch({"embed": padded}, {"embed": target})
    sync({"embed": padded}, {"embed": Binding(target, dim=0, start=0, full=16)})
    assert np.array_equal(target, real)


# ---- bindings ------------------------------------------------------------------------------------


def test_fused_projections_are_slices() -> None:
    """Parts of different sizes, weights and biases, written straight into the fused parameter."""
    rng = np.random.default_rng(1)
    sizes = {"q": 8, "k": 4, "v": 4, "gate": 16}
    source = {f"{name}.weight": rng.random((rows, 6)) for name, rows in sizes.items()}
    source |= {f"{name}.bias": rng.random(rows) for name, rows in sizes.items()}
    weight, bias, target, row = np.zeros((32, 6)), np.zeros(32), {}, 0
    for name, rows in sizes.items():
        target[f"{name}.weight"] = weight[row : row + rows]
        target[f"{name}.bias"] = bias[row : row + rows]
        row += rows
    sync(source, target)
    assert np.array_equal(weight, np.concatenate([source[f"{n}.weight"] for n in sizes]))
    assert np.array_equal(bias, np.concatenate([source[f"{n}.bias"] for n in sizes]))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_shards_are_bindings(dim: int, world: int) -> None:
    source = np.arange(64.0).reshape(8, 8)
    for rank in range(world):
        size = 8 // world
        shard = np.zeros((size, 8) if dim == 0 else (8, size))
        sync({"w": source}, {"w": Binding(shard, dim, rank * size, 8)})
        assert np.array_equal(shard, np.split(source, world, axis=dim)[rank])


def test_one_source_may_go_to_several_places() -> None:
    """Key-value heads that several shards share, or a tied weight that was untied."""
    source = np.arange(12.0).reshape(4, 3)
    whole, half, row = np.zeros((4, 3)), np.zeros((2, 3)), np.zeros((1, 3))
    stats = sync({"w": source}, {"w": [whole, Binding(half, 0, 2, 4), Binding(row, 0, 2, 4)]})
    assert (stats.tensors, stats.verified) == (3, 3)
    assert np.array_equal(whole, source)
    assert np.array_equal(half, source[2:])
    assert np.array_equal(row, source[2:3])


BAD_BINDINGS = [
    (Binding(np.zeros((2, 3)), 2, 0, 3), ValueError, r"along dimension 2.*float64\[2, 3\]"),
    (Binding(np.zeros((2, 3)), -1, 0, 3), ValueError, "0 to 7, not -1"),
    (Binding(np.zeros((2, 3)), 99, 0, 3), ValueError, "0 to 7, not 99"),
    (Binding(np.zeros((2, 3)), 0, -1, 3), ValueError, r"takes \[-1, \+2\)"),
    (Binding(np.zeros((2, 3)), 0, 0, -3), ValueError, "has -3 in the source"),
    (Binding(np.zeros((2, 3)), 0, 2, 3), ValueError, r"takes \[2, \+2\) of dimension 0"),
    (Binding(np.zeros((2, 3)), 0, 2**63 - 1, 2**63 - 1), ValueError, "takes"),
    (Binding(np.zeros(()), 0, 0, 1), ValueError, "along dimension 0"),
    (Binding(np.zeros((2, 3)), 0, 2**63, 3), OverflowError, "too big"),
    (Binding(np.zeros((2, 3)), "0", 0, 3), TypeError, "int"),
    (Binding(5, 0, 0, 3), TypeError, "expected a torch tensor"),
    ((np.zeros(2), 0), TypeError, "a tuple of 2"),
]


@pytest.mark.parametrize(("binding", "error", "part"), BAD_BINDINGS, ids=lambda v: str(v)[:40])
def test_bindings_that_cannot_be(binding: object, error: type[Exception], part: str) -> None:
    with pytest.raises(error, match=part):
        WeightReceiver({"w": binding})


def test_a_binding_of_another_source_is_a_mismatch() -> None:
    text = mismatch({"w": np.zeros((9, 3))}, {"w": Binding(np.zeros((2, 3)), 0, 4, 8)})
    assert (
        "float64[9, 3], the receiver wants float64[8, 3] (of which [4, +2) of dimension 0)" in text
    )


# ---- overlaps ------------------------------------------------------------------------------------


def test_destinations_that_share_memory_are_refused() -> None:
    base = np.zeros((6, 6))
    for a, b in (
        (base[:4], base[3:]),
        (base[:, :4], base[:, 3:]),
        (base, base[2, 2:3]),
        (base[::2], base[::4]),
        (base.T[:3], base[:2]),
        (base[::-1], base),
        (base.reshape(-1), base),
        (base.view(np.int8), base[5]),
    ):
        with pytest.raises(ValueError, match=r"destinations of a \(.*\) and b \(.*\) overlap"):
            WeightReceiver({"a": a, "b": b})


def test_destinations_that_interleave_are_not_refused() -> None:
    base = np.zeros((6, 6))
    for parts in (
        [base[:3], base[3:]],
        [base[:, :2], base[:, 2:5], base[:, 5:]],
        [base[::2], base[1::2]],
        [base[::2, ::2], base[1::2, ::2], base[::2, 1::2], base[1::2, 1::2]],
        [base.T[:3], base[:, 3:]],
        [base[:3, :3], base[3:, :3].T, base[:3, 3:], base[3:, 3:]],
        [base.real[:0], base],
    ):
        WeightReceiver({str(i): part for i, part in enumerate(parts)}).close()
    columns = np.zeros((512, 512))
    WeightReceiver({str(i): columns[:, i] for i in range(512)}).close()


def test_destinations_whose_elements_share_memory_are_refused() -> None:
    base = np.zeros(12)
    for view in (
        np.lib.stride_tricks.as_strided(base, (3, 4), (0, 8), writeable=True),
        np.lib.stride_tricks.as_strided(base, (3, 4), (8, 8), writeable=True),
        np.lib.stride_tricks.as_strided(base, (3, 4), (16, 8), writeable=True),
    ):
        with pytest.raises(ValueError, match=r"w: elements of the destination .* share memory"):
            WeightReceiver({"w": view})
    one = np.lib.stride_tricks.as_strided(base, (1, 4), (0, 8), writeable=True)
    WeightReceiver({"w": one}).close()


slices = st.builds(
    lambda start, size, step: slice(start, start + size * step, step),
    st.integers(0, 5),
    st.integers(1, 6),
    st.integers(1, 4),
)


@given(st.lists(st.tuples(slices, slices, st.booleans()), min_size=2, max_size=2))
def test_overlap_is_decided_as_numpy_decides_it(parts: list[tuple[slice, slice, bool]]) -> None:
    base = np.zeros((12, 13), dtype=np.int16)
    a, b = (base[rows, columns].T if flip else base[rows, columns] for rows, columns, flip in parts)
    same = a.strides == b.strides and a.shape == b.shape
    if a.size == 0 or b.size == 0:
        overlap = False
    else:
        same = same and a.__array_interface__["data"] == b.__array_interface__["data"]
        overlap = np.shares_memory(a, b) and not same
    if overlap:
        with pytest.raises(ValueError, match="overlap"):
            WeightReceiver({"a": a, "b": b})
    else:
        WeightReceiver({"a": a, "b": b}).close()


# ---- any layout to any layout --------------------------------------------------------------------

ITEMS = ["u1", "u2", "u4", "u8", "c16"]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Two writable views of one shape and dtype, each laid out in its own way."""
    shape = draw(st.lists(st.integers(0, 7), max_size=4).map(tuple))
    dtype = np.dtype(draw(st.sampled_from(ITEMS)))

    def view() -> np.ndarray:
        order = draw(st.permutations(range(len(shape))))
        steps = [draw(st.sampled_from([1, 1, 1, 2, 3, -1, -2])) for _ in shape]
        base = np.zeros(
            [shape[axis] * abs(steps[axis]) + draw(st.integers(0, 2)) for axis in order],
            dtype=dtype,
        )
        cut = tuple(slice(None, shape[axis] * abs(steps[axis]), abs(steps[axis])) for axis in order)
        found = base[cut].transpose(np.argsort(order)) if shape else base
        flips = tuple(slice(None, None, -1 if step < 0 else 1) for step in steps)
        return found[(*flips, ...)]

    return view(), view()


@given(layouts(), st.integers(0, 2**32 - 1))
def test_any_layout_goes_to_any_layout(pair: tuple[np.ndarray, np.ndarray], seed: int) -> None:
    source, target = pair
    source[...] = np.random.default_rng(seed).integers(0, 256, source.shape)
    base = target if target.base is None else target.base
    target[...] = source
    wanted = base.copy()
    base[...] = 0
    sync({"w": source}, {"w": target})
    assert np.array_equal(base, wanted)  # every element, and nothing between them


@given(layouts(), st.data())
def test_any_box_goes_to_any_layout(pair: tuple[np.ndarray, np.ndarray], data) -> None:
    source, target = pair
    if source.ndim == 0:
        return
    source[...] = np.arange(source.size).reshape(source.shape) + 1
    dim = data.draw(st.integers(0, source.ndim - 1))
    full = source.shape[dim]
    start = data.draw(st.integers(0, full))
    size = data.draw(st.integers(0, full - start))
    box = tuple(
        slice(start, start + size) if axis == dim else slice(None) for axis in range(source.ndim)
    )
    part = target[
        tuple(slice(0, size) if axis == dim else slice(None) for axis in range(target.ndim))
    ]
    sync({"w": source}, {"w": Binding(part, dim, start, full)})
    assert np.array_equal(part, source[box])


def test_large_tensors_are_split_between_threads() -> None:
    rng = np.random.default_rng(2)
    big = rng.integers(0, 255, (1500, 2100), dtype=np.uint8)
    source = {"dense": big, "turned": big.T, "rows": big[::2], "columns": big[:, 5:1900]}
    source["deep"] = big.reshape(50, 30, 70, 30).transpose(2, 0, 3, 1)
    target = {name: np.zeros(value.shape, dtype=np.uint8) for name, value in source.items()}
    target["dense"] = np.zeros((2100, 1500), dtype=np.uint8).T
    target["columns"] = np.zeros((1500, 4000), dtype=np.uint8)[:, 100:1995]
    sync(source, target)
    for name, value in source.items():
        assert np.array_equal(target[name], value), name


def test_a_source_may_repeat_its_elements() -> None:
    source = np.broadcast_to(np.arange(3.0), (4, 3))
    target = np.zeros((4, 3))
    sync({"w": source}, {"w": target})
    assert np.array_equal(target, source)
