"""Observers of the steps of an engine. Without a recording a step calls three empty functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Work(NamedTuple):
    """The new tokens of a sequence in a step, of which the last ``num_guessed`` are guesses, and the sequence's tokens
    after the step.
    """

    num_new: int
    context: int
    num_guessed: int = 0

    @property
    def is_decode(self) -> bool:
        """True for a token after computed ones, and its guesses."""
        return self.num_new == 1 + self.num_guessed < self.context


class StepObserver(Protocol):
    """The calls of an engine in each step, in order."""

    @property
    def is_on(self) -> bool:
        """False where the batch need not be told."""
        ...

    def begin(self) -> None:
        """The step begins; next is the schedule."""

    def scheduled(self, work: Sequence[Work]) -> None:
        """The batch is known; next are the inputs of the model, the model and the sampler."""

    def sampled(self) -> None:
        """The new tokens are known; next is the record of the results."""

    def end(self) -> None:
        """The step ends."""


class NoObserver:
    """The observer of an engine without a recording."""

    is_on = False

    def begin(self) -> None: ...

    def scheduled(self, work: Sequence[Work]) -> None: ...

    def sampled(self) -> None: ...

    def end(self) -> None: ...
