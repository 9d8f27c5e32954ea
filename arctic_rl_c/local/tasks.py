# SPDX-License-Identifier: Apache-2.0
"""Problems made on the spot, with a reward that a small random model can climb."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """A prompt and its answer, as texts."""

    prompt: str
    answer: str


class Arithmetic:
    """Sums of two numbers, `3+4=`.

    The reward is graded, since a random model never hits a right answer often enough to learn
    from hits alone: digits before anything else, then an end, then the right length, then
    closeness. Half of it is for the right number.

    Args:
        largest: Largest number in a sum.
        seed: Which problems come, in which order.
    """

    def __init__(self, largest: int = 4, seed: int = 0) -> None:
        if largest < 1:
            raise ValueError(f"largest must be at least 1, found {largest}")
        self._largest, self._random = largest, random.Random(seed)

    def sample(self, count: int) -> list[Problem]:
        """The next `count` problems."""
        problems = []
        for _ in range(count):
            left, right = (self._random.randint(0, self._largest) for _ in range(2))
            problems.append(Problem(f"{left}+{right}=", str(left + right)))
        return problems

    def reward(self, problem: Problem, text: str, ended: bool) -> float:
        """How good a response is, from 0 to 1.

        Args:
            problem: What was asked.
            text: The response.
            ended: The response came to its own end rather than to the length limit.
        """
        if not (text.isascii() and text.isdigit()):
            digits = sum(character in "0123456789" for character in text)
            return 0.05 * digits / max(1, len(text))
        distance = abs(int(text) - int(problem.answer))
        score = 0.1 + 0.1 * ended + 0.1 * (len(text) == len(problem.answer))
        score += 0.2 * max(0.0, 1.0 - distance / 5.0)
        return score + 0.5 * (distance == 0)

    def solved(self, problem: Problem, text: str, ended: bool) -> bool:
        """Whether a response is the answer and nothing else."""
        return ended and text == problem.answer
