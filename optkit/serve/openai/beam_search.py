"""Beam search over the likeliest next tokens, step by step, with the rules of transformers.

The rules: a step ranks all continuations of the running beams by log probability. Of the best ``width``, those that
end become answers, scored with their log probability divided by ``length ** length_penalty``; the best others run on.
The search ends when the likeliest running beam, at its present length, is no better than the worst of ``width``
answers (``early_stopping=False`` in transformers).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import msgspec

from optkit.runtime.types import TokenLogprob


@dataclass(frozen=True)
class BeamOptions:
    """Options of a search.

    Attributes:
        width: beams that run together, and answers.
        max_tokens: of an answer, at least 1.
        stop_ids: tokens that end an answer.
        min_tokens: of an answer before a stop token.
        length_penalty: above 0 favours long answers, below 0 short ones.
        num_listed: likely tokens to keep in the place of each token.
    """

    width: int
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    length_penalty: float = 1.0
    num_listed: int = 0

    @property
    def num_kept(self) -> int:
        """Continuations ranked in a step: should every stop token be among the best, ``width`` others remain."""
        return max(2, 1 + len(self.stop_ids)) * self.width

    @property
    def num_likely(self) -> int:
        """Likely tokens to give for each beam."""
        return self.num_kept + (len(self.stop_ids) if self.min_tokens else 0)


class Beam(NamedTuple):
    """A text so far.

    Attributes:
        logprob: of all tokens together.
        entries: a token each, with the likely tokens in its place.
    """

    logprob: float = 0.0
    entries: tuple[TokenLogprob, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(entry.token_id for entry in self.entries)


class BeamSearch:
    """The state of a search.

    Attributes:
        running: the beams to continue, likeliest first.
        is_done: no further step can improve the answers.
    """

    def __init__(self, options: BeamOptions) -> None:
        self.running: list[Beam] = [Beam()]
        self.is_done = False
        self._options = options
        self._found: list[tuple[float, Beam]] = []

    @property
    def answers(self) -> list[Beam]:
        """The answers found so far, the best first."""
        return [beam for _, beam in self._found]

    def advance(self, likely: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Take a step.

        Args:
            likely: the ``num_likely`` likeliest next tokens of each running beam with their log probabilities.
        """
        options = self._options
        length = len(self.running[0].entries) + 1
        ranked = self._ranked(likely, may_stop=length > options.min_tokens)
        ends = [length == options.max_tokens or self.has_stopped(beam) for beam in ranked]
        for beam, end in zip(ranked[: options.width], ends, strict=False):
            if end:
                self._found.append((self._score(beam), beam))
        self._found = sorted(self._found, key=itemgetter(0), reverse=True)[: options.width]
        self.running = [beam for beam, end in zip(ranked, ends, strict=True) if not end][: options.width]
        self.is_done = not self.running or (
            len(self._found) == options.width and self._score(self.running[0]) <= self._found[-1][0]
        )

    def has_stopped(self, beam: Beam) -> bool:
        """True when a stop token ends ``beam``."""
        return beam.entries[-1].token_id in self._options.stop_ids

    def _ranked(self, likely: Sequence[Sequence[tuple[int, float]]], may_stop: bool) -> list[Beam]:
        options = self._options
        totals = (
            (beam.logprob + logprob, i, TokenLogprob(token, logprob))
            for i, (beam, tokens) in enumerate(zip(self.running, likely, strict=True))
            for token, logprob in tokens
            if may_stop or token not in options.stop_ids
        )
        best = heapq.nlargest(options.num_kept, totals, key=itemgetter(0))
        listed = [tuple(tokens[: options.num_listed]) for tokens in likely]
        return [
            Beam(total, (*self.running[i].entries, msgspec.structs.replace(entry, top=listed[i])))
            for total, i, entry in best
        ]

    def _score(self, beam: Beam) -> float:
        return beam.logprob / len(beam.entries) ** self._options.length_penalty
