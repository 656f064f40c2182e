"""Greedy continuations of two models of the same prompts: the tokens until they differ.

KL divergence says how far distributions are apart, a greedy continuation what a user would read: after the first
unlike token the texts go separate ways. The prompts are pieces of the text that quality is measured on.
Both models choose the most likely token at each step and never stop. Where a model's two best tokens are almost
equally likely, rounding decides, so even two computations of one model may part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Protocol, runtime_checkable

PROMPTS = 16  # at most
PROMPT_TOKENS = 64  # at most half of a window


@runtime_checkable
class GreedySource(Protocol):
    """A model for continuations of prompts."""

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """``count`` tokens after each prompt, the most likely token each time; prompts have equal lengths."""
        ...


@dataclass(frozen=True)
class GreedyReport:
    """The equal beginnings of the continuations by a candidate and by the reference.

    Attributes:
        prompt_tokens: length of each prompt.
        tokens: length of the continuations.
        lengths: equal tokens of each prompt's continuations; ``tokens`` without a difference.
    """

    prompt_tokens: int
    tokens: int
    lengths: tuple[int, ...]

    @property
    def median(self) -> float:
        return float(median(self.lengths))

    @property
    def unchanged(self) -> int:
        """Continuations without a difference."""
        return sum(length == self.tokens for length in self.lengths)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "lengths": list(self.lengths),
            "median": self.median,
            "unchanged": self.unchanged,
        }

    def line(self) -> str:
        """``median 41 of 64, 5 of 16 without a difference``"""
        count = len(self.lengths)
        return f"median {self.median:g} of {self.tokens}, {self.unchanged} of {count} without a difference"


def prompts_of(windows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Up to ``PROMPTS`` pieces of the windows, evenly chosen; neighbours in a window lie a piece apart."""
    length = min(PROMPT_TOKENS, len(windows[0]) // 2)
    pieces = [
        list(window[start : start + length])
        for window in windows
        for start in range(0, len(window) - length + 1, 2 * length)
    ]
    count = min(PROMPTS, len(pieces))
    return [pieces[i * len(pieces) // count] for i in range(count)]


def compare_greedy(
    reference: GreedySource,
    candidates: Mapping[str, GreedySource],
    prompts: Sequence[Sequence[int]],
    count: int,
) -> dict[str, GreedyReport]:
    """A report for each candidate; the reference runs once. ``count`` tokens follow each prompt."""
    expected = reference.greedy(prompts, count)
    found = {name: source.greedy(prompts, count) for name, source in candidates.items()}
    return {
        name: GreedyReport(len(prompts[0]), count, tuple(map(equal_tokens, expected, continuations)))
        for name, continuations in found.items()
    }


def equal_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of the common beginning."""
    pairs = zip(first, second, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(first))
