# SPDX-License-Identifier: Apache-2.0
"""The arithmetic task, advantages, and the batch that a loop makes of rollouts."""

from __future__ import annotations

import pytest
import torch

import arctic_rl_c
from arctic_rl_c.local.grpo import group_advantages, make_data, response_log_probs
from arctic_rl_c.local.model import load_tokenizer
from arctic_rl_c.local.options import ModelOptions
from arctic_rl_c.local.tasks import Arithmetic, Problem


def test_problems_repeat_by_seed() -> None:
    first, second = Arithmetic(4, 7).sample(20), Arithmetic(4, 7).sample(20)
    assert first == second != Arithmetic(4, 8).sample(20)
    for problem in first:
        left, right = problem.prompt.removesuffix("=").split("+")
        assert int(left) + int(right) == int(problem.answer) and max(int(left), int(right)) <= 4
    with pytest.raises(ValueError, match="largest must be at least 1"):
        Arithmetic(0)


def test_the_reward_is_a_ladder() -> None:
    task, problem = Arithmetic(), Problem("3+4=", "7")
    ladder = [
        task.reward(problem, text, ended)
        for text, ended in (
            ("+-*", False),
            ("+1", False),
            ("99", False),
            ("99", True),
            ("9", True),
            ("8", True),
            ("7", False),
            ("7", True),
        )
    ]
    assert ladder[0] == 0.0 and ladder[-1] == pytest.approx(1.0)
    assert ladder[:6] == sorted(ladder[:6]) and len(set(ladder)) == len(ladder)
    assert ladder[5] < ladder[6] < ladder[7]
    assert task.reward(problem, "", True) == 0.0
    assert task.reward(problem, "²", True) < 0.05  # a digit to isdigit, no number
    assert task.solved(problem, "7", True) and not task.solved(problem, "7", False)


def test_the_tokenizer_is_one_id_a_character() -> None:
    tokenizer = load_tokenizer(ModelOptions())
    ids = tokenizer("12+3= ?")["input_ids"]
    assert len(ids) == 7 and tokenizer.decode(ids) == "12+3= ?"
    assert tokenizer("x")["input_ids"] == tokenizer("?")["input_ids"]
    assert tokenizer.decode([4, tokenizer.eos_token_id], skip_special_tokens=True) == "1"


def test_advantages_within_groups() -> None:
    rewards = [0.0, 1.0, 0.5, 0.5]
    assert group_advantages(rewards, 2).tolist() == [-0.5, 0.5, 0.0, 0.0]
    scaled = group_advantages(rewards, 2, scale_by_std=True)
    assert scaled.tolist() == pytest.approx([-0.7071, 0.7071, 0, 0], abs=1e-3)


def test_a_batch_of_rollouts() -> None:
    data = make_data(
        [[5, 6], [7, 8, 9]],
        [[1, 2, 3], []],
        prompt_width=4,
        response_width=3,
        pad_token_id=0,
        temperature=0.7,
    )
    assert data["prompts"].tolist() == [[0, 0, 5, 6], [0, 7, 8, 9]]
    assert data["responses"].tolist() == [[1, 2, 3], [0, 0, 0]]
    assert data["attention_mask"].tolist() == [[0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0, 0]]
    values, offsets = data["input_ids"]
    assert values.tolist() == [5, 6, 1, 2, 3, 7, 8, 9] and offsets.tolist() == [0, 5, 8]
    assert data["position_ids"][0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    wire, _, _ = arctic_rl_c.pad_prompt_response(
        data["input_ids"], data["prompts"], data["responses"], data["attention_mask"], pad_value=9
    )
    assert wire.tolist() == [[9, 9, 5, 6, 1, 2, 3], [9, 7, 8, 9, 9, 9, 9]]


def test_response_log_probs_of_both_alignments() -> None:
    mask = torch.tensor([[1, 1, 0]])
    dense = torch.arange(7.0)[None]
    assert response_log_probs(dense, mask, aligned=False).tolist() == [[3, 4, 0]]
    assert response_log_probs(dense, mask, aligned=True).tolist() == [[4, 5, 0]]
