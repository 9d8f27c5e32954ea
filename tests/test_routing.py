# SPDX-License-Identifier: Apache-2.0
"""Which of several samplers serves a prompt."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arctic_rl_c.local.routing import Router, as_keys, as_prompts, merge_answers, sequences_of

keys = st.lists(st.one_of(st.none(), st.text(max_size=3)), max_size=40)


@given(keys, st.integers(1, 5), st.integers(1, 8))
def test_equal_keys_go_to_one_sampler_and_all_is_counted(
    given_keys: list[str | None], count: int, sequences: int
) -> None:
    router = Router(count, capacity=1)
    places = router.place(given_keys, sequences, strict=True)
    assert len(places) == len(given_keys) and all(0 <= place < count for place in places)
    homes = dict(zip(given_keys, places, strict=True))
    assert all(
        key is None or homes[key] == place for key, place in zip(given_keys, places, strict=True)
    )
    assert router.loads() == [places.count(index) * sequences for index in range(count)]
    for place in places:
        router.done(place, sequences)
    assert router.loads() == [0] * count


@given(st.integers(1, 6), st.integers(0, 60))
def test_without_keys_all_get_the_same(count: int, prompts: int) -> None:
    router = Router(count, capacity=4)
    places = [router.place([None], 1, strict=False)[0] for _ in range(prompts)]
    loads = [places.count(index) for index in range(count)]
    assert max(loads) - min(loads) <= 1 and loads == router.loads()


def test_idle_equals_take_turns() -> None:
    router, seen = Router(4, capacity=4), []
    for _ in range(8):
        [place] = router.place([None], 1, strict=False)
        seen.append(place)
        router.done(place, 1)
    assert seen == [0, 1, 2, 3] * 2


def test_a_key_is_kept_until_its_sampler_has_its_fill() -> None:
    router = Router(2, capacity=3)
    [home] = set(router.place(["k"] * 3, 1, strict=False))
    assert router.place(["k"], 1, strict=True) == [home]
    assert router.place(["k"] * 3, 1, strict=False) == [1 - home] * 3
    assert router.place(["k"] * 2, 1, strict=False) == [home] * 2  # all have their fill
    router.done(home, 4)
    assert router.place(["k"], 1, strict=False) == [home]


def test_a_key_has_the_same_sampler_in_every_process() -> None:
    code = (
        "from arctic_rl_c.local.routing import Router;"
        "print(Router(7, 99).place([f'key {n}' for n in range(20)], 1, True))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    own = Router(7, 99).place([f"key {number}" for number in range(20)], 1, strict=True)
    assert outputs == {f"{own}\n"} and len(set(own)) > 3


@pytest.mark.parametrize("prompts", [None, True, 5, 1.5, b"text", {"a": 1}])
def test_what_holds_no_prompts(prompts: Any) -> None:
    with pytest.raises(TypeError, match=f"list of these, found {type(prompts).__name__}$"):
        as_prompts(prompts)


def test_what_is_asked_for() -> None:
    assert as_prompts("a") == ["a"] and as_prompts([1, 2]) == [[1, 2]]
    assert as_prompts([[1], "b"]) == [[1], "b"] and as_prompts([]) == []
    assert as_keys("k", 2) == ["k", "k"] and as_keys(None, 1) == [None]
    assert as_keys(["k", None], 2) == ["k", None]
    with pytest.raises(ValueError, match="2 routing keys for 3 prompts"):
        as_keys(["k", "l"], 3)
    with pytest.raises(TypeError, match="routing key 1 is a int; keys are str"):
        as_keys(["k", 7], 2)  # type: ignore[list-item]
    assert [sequences_of(p) for p in (None, {}, {"n": 4}, {"n": 0}, {"n": "x"})] == [1, 1, 4, 1, 1]


def test_answers_of_all_are_one() -> None:
    assert merge_answers([{"status": "ok", "entries": 1}]) == {"status": "ok", "entries": 1}
    one, two = {"status": "already_ready", "workers": 1}, {"status": "ready", "workers": 1}
    assert merge_answers([one, two]) == {"status": "ready", "workers": 2}
    assert merge_answers([one, one]) == {"status": "already_ready", "workers": 2}
    assert merge_answers([{}, {}]) == {}
