"""Forced tokens as drafts, and drafts within a constraint.

Where a constraint leaves no choice, as for the keys of an object, the next tokens are known before the model has run.
They become a draft and are verified in one step: every position is sampled under its own mask, so the answer is the
same token for token, in fewer steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from optkit.runtime.types import ConstraintFailed, Request

MAX_FORCED = 32  # tokens of a request in one step: more would delay the other requests like a prompt


class ForcedTokens:
    """The drafts of constrained requests.

    Attributes:
        num_accepted: forced tokens that became part of an answer.
    """

    def __init__(self) -> None:
        self.num_accepted = 0
        self._drafted: set[str] = set()

    def drafts(self, requests: Sequence[Request], limits: Sequence[int]) -> list[tuple[int, ...]]:
        """For each request the next tokens as far as there is no choice, at most ``limits[i]`` of them."""
        found = [_forced(request, limit) for request, limit in zip(requests, limits, strict=True)]
        self._drafted = {r.request_id for r, draft in zip(requests, found, strict=True) if draft}
        return found

    def observe(self, request: Request, num_accepted: int) -> bool:
        """Count the accepted tokens of a draft; False when the last draft of ``request`` was not forced."""
        if request.request_id not in self._drafted:
            return False
        self.num_accepted += num_accepted
        return True


def _forced(request: Request, limit: int) -> tuple[int, ...]:
    if request.matcher is None or limit < 1:
        return ()
    try:
        return tuple(request.matcher.forced(request.output_ids)[: min(limit, MAX_FORCED)])
    except ConstraintFailed:
        return ()  # the sampler reports it


def within_constraint(request: Request, guess: tuple[int, ...]) -> tuple[int, ...]:
    """``guess`` up to the first token that the constraint excludes."""
    if request.matcher is None or not guess:
        return guess
    try:
        return guess[: request.matcher.num_valid(request.output_ids, guess)]
    except ConstraintFailed:
        return ()
