"""Drafts of a step: tokens that constraints force, and tokens guessed by a proposer.

Where a constraint leaves no choice, as for the keys of an object, the next tokens are known before the model has run.
They become a draft and are verified in one step: every position is sampled under its own mask, so the answer is the
same token for token, in fewer steps. Guesses for a constrained request are cut at the first token that the constraint
excludes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from optkit.runtime.draft_tree import first_branch
from optkit.runtime.sampling.proposer import SpeculationStats, StepTime
from optkit.runtime.sampling.tree_speculator import TreeSpeculator
from optkit.runtime.types import ConstraintFailed, Failure, Request, ScheduledRequest

if TYPE_CHECKING:
    from optkit.kernels.cpu.decode_steps import TokenPairs
    from optkit.runtime.sampling.rows import Logits
    from optkit.runtime.sampling.speculative import Followed

logger = logging.getLogger(__name__)

T = TypeVar("T")
MANY_STEPS = 1 << 30  # no limit
MAX_FORCED = 32  # tokens of a request in one step: more would delay the other requests like a prompt


class Proposer(Protocol):
    """Guesses the next tokens of a request (``optkit.runtime.sampling.proposer``): a tuple, or a ``DraftTree``."""

    stats: SpeculationStats

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[tuple[int, ...]]:
        """For each request at most ``limits[i]`` tokens, or none."""
        ...

    def observe(self, request: Request, draft: tuple[int, ...], tokens: tuple[int, ...]) -> None:
        """Learn from the ``tokens`` of the step with ``draft``: the right guesses, and one more."""
        ...

    def took(self, items: Sequence[ScheduledRequest], step: StepTime) -> None:
        """Learn the time of a step without prompts, before its tokens join the requests."""
        ...

    def steps_ahead(self, requests: Sequence[Request]) -> int:
        """Decode steps, with the present step, before the next look for guesses for ``requests``. A pair of
        ``watched`` ends the steps early.
        """
        ...

    def watched(self, requests: Sequence[Request]) -> Sequence[Sequence[TokenPairs]]:
        """Pairs of tokens of each of ``requests`` that end a call of several steps; empty for none."""
        ...

    def finished(self, request: Request) -> None: ...


class Drafts:
    """The drafts of a scheduler.

    Args:
        proposer: source of guesses, if any.
        forces: forced tokens become drafts.

    Attributes:
        num_forced: forced tokens that became part of an answer.
    """

    def __init__(self, proposer: Proposer | None, forces: bool) -> None:
        self.proposer, self.forces = proposer, forces
        self.num_forced = 0
        self._forced: set[str] = set()  # requests whose draft in this step is forced

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[tuple[int, ...]]:
        """For each request at most ``limits[i]`` tokens: forced ones if there are any, else guesses."""
        forced = [self._forced_tokens(*pair) for pair in zip(requests, limits, strict=True)]
        self._forced = {r.request_id for r, draft in zip(requests, forced, strict=True) if draft}
        if self.proposer is None:
            return forced
        left = [0 if draft else limit for draft, limit in zip(forced, limits, strict=True)]
        guesses = self._optional(self.proposer.propose, requests, left) or forced
        return [
            draft or within_constraint(request, guess)
            for request, draft, guess in zip(requests, forced, guesses, strict=True)
        ]

    def observe(self, request: Request, draft: tuple[int, ...], tokens: tuple[int, ...]) -> None:
        """Record the outcome of a draft: the right guesses, and one more token."""
        if request.request_id in self._forced:
            self.num_forced += len(tokens) - 1
        elif self.proposer:
            self.proposer.observe(request, draft, tokens)

    def collect(
        self,
        items: Sequence[ScheduledRequest],
        found: Sequence[Followed | Failure],
        logits: Logits,
        rows: Sequence[int],
    ) -> None:
        """Recycle the logits of a step, before its tokens join the requests; ``rows`` as of ``verify``.

        The logits of a device are left there.
        """
        if isinstance(self.proposer, TreeSpeculator) and isinstance(logits, np.ndarray):
            self._optional(self.proposer.collect, items, found, logits, rows)

    def took(self, items: Sequence[ScheduledRequest], step: StepTime) -> None:
        """Tell the proposer the time of a step, if the step had no prompts."""
        if self.proposer and all(item.num_new == 1 + len(item.draft) for item in items):
            self._optional(self.proposer.took, items, step)

    def steps_ahead(self, requests: Sequence[Request]) -> int:
        """Decode steps of ``requests``, with the present step, before the next look for guesses, at most."""
        if self.proposer is None:
            return MANY_STEPS
        return self._optional(self.proposer.steps_ahead, requests) or 1

    def watched(self, requests: Sequence[Request]) -> Sequence[Sequence[TokenPairs]]:
        """Pairs of tokens of each of ``requests`` that end a call of several steps; empty for none."""
        if self.proposer is None:
            return ()
        return self._optional(self.proposer.watched, requests) or ()

    def finished(self, request: Request) -> None:
        """Forget ``request``."""
        if self.proposer:
            self._optional(self.proposer.finished, request)

    def counters(self) -> dict[str, Any]:
        """Counters, named as fields of ``EngineStats``."""
        forced = {"forced_tokens": self.num_forced}
        if self.proposer is None:
            return forced
        stats = self.proposer.stats
        return forced | {
            "spec_decode_drafts": stats.num_drafts,
            "spec_decode_draft_tokens": stats.num_draft_tokens,
            "spec_decode_accepted_per_pos": tuple(stats.accepted_per_pos),
        }

    def _forced_tokens(self, request: Request, limit: int) -> tuple[int, ...]:
        if not self.forces or request.matcher is None or limit < 1:
            return ()
        try:
            return tuple(request.matcher.forced(request.output_ids)[: min(limit, MAX_FORCED)])
        except ConstraintFailed:
            return ()  # the sampler reports it

    def _optional(self, work: Callable[..., T], *args: Any) -> T | None:
        """The result of ``work(*args)`` of the proposer; None for an exception, because an answer needs no guesses."""
        try:
            return work(*args)
        except Exception:
            logger.exception("the proposer failed")
            return None


def within_constraint(request: Request, guess: tuple[int, ...]) -> tuple[int, ...]:
    """``guess`` up to the first token that the constraint excludes, without branches; also with a rolling window."""
    if not guess or (request.matcher is None and request.rule is None):
        return guess
    guess = first_branch(guess)
    if request.matcher is None:
        return guess
    try:
        return guess[: request.matcher.num_valid(request.output_ids, guess)]
    except ConstraintFailed:
        return ()
