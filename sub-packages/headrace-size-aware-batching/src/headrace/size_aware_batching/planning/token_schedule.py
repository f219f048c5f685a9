"""Tokens of an optimizer step, by its number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._shared.checks import checked_int, shown
from headrace.size_aware_batching._validation import UNLIMITED, Number, real_number


@dataclass(frozen=True)
class TokenSchedule:
    """Tokens of an optimizer step by its number, which counts over all epochs: ``((first step, tokens), ...)``.

    >>> schedule = TokenSchedule.from_argument([(0, 100), (3, 200)])
    >>> schedule.at(2), schedule.at(3), schedule.ends(1, total=450, longest=10).tolist()
    (100, 200, [100, 200, 400, 450])
    """

    stages: tuple[tuple[int, Number], ...]

    @classmethod
    def from_argument(cls, given: Any) -> TokenSchedule:
        """Return the schedule that users give, as a number or a list of pairs."""
        if not isinstance(given, Sequence) or isinstance(given, str | bytes):
            return cls(((0, checked_tokens("tokens_per_step", given)),))
        stages: list[tuple[int, Number]] = []
        for number, stage in enumerate(given):
            name = f"tokens_per_step[{number}]"
            if not isinstance(stage, Sequence) or isinstance(stage, str | bytes) or len(stage) != 2:
                raise TypeError(f"{name} must be a pair (first step, tokens), got {shown(stage)}")
            first = checked_int(f"{name}[0]", stage[0], cure="the number of an optimizer step")
            if first <= stages[-1][0] if stages else first != 0:
                expected = f"more than {stages[-1][0]}, the one before" if stages else "0"
                raise ValueError(f"{name}[0], the first step of a stage, must be {expected}, got {first}")
            stages.append((first, checked_tokens(f"{name}[1]", stage[1])))
        if not stages:
            raise ValueError("tokens_per_step must be a number or a list of (first step, tokens), got an empty list")
        return cls(tuple(stages))

    @property
    def value(self) -> Number | tuple[tuple[int, Number], ...]:
        """The number, or the pairs, in one form."""
        return self.stages[0][1] if len(self.stages) == 1 else self.stages

    def stage(self, step: int) -> int:
        """Return the number of the stage that a step belongs to."""
        return max(number for number, (first, _) in enumerate(self.stages) if first <= step)

    def at(self, step: int) -> Number:
        """Return the tokens of a step."""
        return self.stages[self.stage(step)][1]

    def ends(self, first: int, total: Number, longest: Number) -> NDArray[Any]:
        """Return the cumulated tokens at which the steps of an epoch end, the last of them being ``total``.

        ``first`` is the number of the epoch's first step. What is left at the end makes a shorter step, or belongs to
        the one before where it is no more than half of the longest sample.
        """
        parts: list[NDArray[Any]] = []
        done: Number = 0
        for number in range(self.stage(first), len(self.stages)):
            tokens = self.stages[number][1]
            last = self.stages[number + 1][0] if number + 1 < len(self.stages) else UNLIMITED
            count = min(last - first, int((total - done) // tokens))
            parts.append(done + tokens * np.arange(1, count + 1))
            done, first = done + tokens * count, first + count
            if first < last:
                break
        ends = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        if len(ends) and 2 * (total - done) <= longest:
            ends[-1] = total
            return ends
        return np.append(ends, total)


def checked_tokens(name: str, tokens: Any) -> Number:
    """Return tokens of a step, finite and more than 0."""
    number = real_number(tokens, name)
    if not 0 < number < UNLIMITED:
        raise ValueError(f"{name} must be more than 0 and less than 2**62, got {number}")
    return number


class OptimizerSteps(NamedTuple):
    """Where the optimizer steps of a plan begin in its samples, the last number being the end, and their tokens."""

    starts: NDArray[np.int64]
    asked: list[float]
