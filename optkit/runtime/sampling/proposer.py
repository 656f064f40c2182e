"""Proposers: sources of guesses, and the number of guesses worth checking.

``NgramProposer`` (prompt lookup, Saxena 2023) needs no second model: the guesses are the tokens after an earlier
occurrence of the last tokens. A guess costs a dictionary lookup, so only checking a wrong guess costs time.

``Lengths`` decides the number of guesses for each request and step. A guess at place j of a draft is right with
probability p^j, where p is the request's own record. Checking the guess makes the step longer by the cost model's
time of a token. A guess pays if the expected tokens exceed the batch's tokens in the same time. So drafts grow where
guesses are right, shrink where guesses are wrong, and end where the cost exceeds the gain. A request without drafts
tries a single token again now and then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from optkit.runtime.scheduling.cost_model import CostModel, StepWork, chunk_work
from optkit.runtime.types import Request, ScheduledRequest

if TYPE_CHECKING:
    from optkit.kernels.cpu.decode_steps import TokenPairs

NGRAMS = (3, 2)  # tokens that must match, the longer first
DECAY = 0.9  # weight of a request's record after one more draft
PRIOR_RIGHT, PRIOR_WRONG = 1.4, 0.6  # before anything is known
PROBE_STEPS = 32


@dataclass
class SpeculationStats:
    """Counters under vLLM's names: drafts, their tokens, and how many were right at each place."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)

    def count(self, num_drafted: int, num_accepted: int, num_guesses: int = 0) -> None:
        """Count a draft of ``num_drafted`` places, a tree with ``num_guesses`` tokens at them."""
        self.num_drafts += 1
        self.num_draft_tokens += num_guesses or num_drafted
        self.accepted_per_pos += [0] * (num_drafted - len(self.accepted_per_pos))
        for place in range(num_accepted):
            self.accepted_per_pos[place] += 1


@dataclass(frozen=True)
class StepTime:
    """The time of a decode step, or of each of several in a call.

    Attributes:
        could_be_several: without guesses the step could have been one of several in a call.
    """

    seconds: float
    num_steps: int = 1
    could_be_several: bool = False


class DraftSource(Protocol):
    """Guesses at most a given number of tokens."""

    seconds_per_token: float  # cost of a guess, beside checking

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[tuple[int, ...]]: ...

    def finished(self, request: Request) -> None: ...

    def run_largest(self, num_requests: int) -> None:
        """Run the step with the largest allocations, for at most ``num_requests``, and free the blocks."""
        ...


@dataclass
class _Record:
    right: float = 0.0
    wrong: float = 0.0
    quiet_steps: int = 0


class Lengths:
    """The number of guesses worth checking, for each request.

    Args:
        cost: predicts steps.
        longest: the most guesses of a request.
    """

    def __init__(self, cost: CostModel, longest: int) -> None:
        self.cost, self.longest = cost, longest
        self._records: dict[str, _Record] = {}
        self._everyone = _Record()

    def choose(self, requests: Sequence[Request], seconds_per_token: float) -> list[int]:
        """The numbers for the requests of a decode step."""
        base = StepWork()
        for request in requests:
            base += chunk_work(1, request.num_held, rows=1)
        step = self.cost.seconds(base)
        return [self._choose(request, base, step, len(requests), seconds_per_token) for request in requests]

    def _choose(
        self, request: Request, base: StepWork, step: float, num_requests: int, seconds_per_token: float
    ) -> int:
        record = self._records.setdefault(request.request_id, _Record())
        one_more = (
            self.cost.seconds(base + chunk_work(1, request.num_held + 1, rows=1)) - step + seconds_per_token
        )
        price = one_more * num_requests / max(step, 1e-9)  # tokens of the batch in that time
        chance = self._chance(record)
        length, right = 0, chance
        while length < self.longest and right > price:
            length, right = length + 1, right * chance
        record.quiet_steps = 0 if length else record.quiet_steps + 1
        if record.quiet_steps == PROBE_STEPS:
            record.quiet_steps, length = 0, 1
        return length

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        for record in (self._records.setdefault(request.request_id, _Record()), self._everyone):
            record.right = DECAY * record.right + num_accepted
            record.wrong = DECAY * record.wrong + (num_accepted < num_drafted)

    def steps_ahead(self, requests: Sequence[Request]) -> int:
        """Steps for which no guess of ``requests`` pays, this one included; 1 where one does."""
        quiet = [self._records[request.request_id].quiet_steps for request in requests]
        return PROBE_STEPS - max(quiet) if all(quiet) else 1

    def skipped(self, requests: Sequence[Request], num_steps: int) -> None:
        """Count steps for which ``choose`` was not asked."""
        for request in requests:
            self._records[request.request_id].quiet_steps += num_steps

    def finished(self, request: Request) -> None:
        self._records.pop(request.request_id, None)

    def _chance(self, record: _Record) -> float:
        """The probability of a guess after right guesses: by the request's record, at first by the record of all
        requests.
        """
        share = (self._everyone.right + PRIOR_RIGHT) / (
            self._everyone.right + self._everyone.wrong + PRIOR_RIGHT + PRIOR_WRONG
        )
        return (record.right + 2 * share) / (record.right + record.wrong + 2)


class Speculator:
    """A ``Proposer`` of the scheduler: guesses of ``source``, as many as ``Lengths`` allows."""

    def __init__(self, source: DraftSource, lengths: Lengths) -> None:
        self.source, self.lengths = source, lengths
        self.stats = SpeculationStats()

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[tuple[int, ...]]:
        wanted = self.lengths.choose(requests, self.source.seconds_per_token)
        return self.source.draft(requests, [max(0, min(pair)) for pair in zip(wanted, limits, strict=True)])

    def observe(self, request: Request, draft: tuple[int, ...], tokens: tuple[int, ...]) -> None:
        self.stats.count(len(draft), len(tokens) - 1)
        self.lengths.observe(request, len(draft), len(tokens) - 1)

    def took(self, items: Sequence[ScheduledRequest], step: StepTime) -> None:
        """Count the steps of a call."""
        if step.num_steps > 1:
            self.lengths.skipped([item.request for item in items], step.num_steps - 1)

    def steps_ahead(self, requests: Sequence[Request]) -> int:
        return self.lengths.steps_ahead(requests)

    def watched(self, requests: Sequence[Request]) -> Sequence[Sequence[TokenPairs]]:
        """Nothing: ``steps_ahead`` are certain."""
        return ()

    def finished(self, request: Request) -> None:
        self.lengths.finished(request)
        self.source.finished(request)

    def run_largest(self, num_requests: int) -> None:
        """Run the source's step with the largest allocations."""
        self.source.run_largest(num_requests)


class _Index:
    """The last position of each n-gram of a request, except for the n-gram at the end."""

    def __init__(self) -> None:
        self.length = 0
        self._last: dict[tuple[int, ...], int] = {}  # n-gram -> position after it

    def extend(self, ids: Sequence[int]) -> None:
        """Add the n-grams of ``ids`` except for the n-grams ending in the last token, which are looked up."""
        for end in range(max(self.length, 1), len(ids)):
            for n in NGRAMS:
                if end >= n:
                    self._last[tuple(ids[end - n : end])] = end
        self.length = len(ids)

    def follow(self, ids: Sequence[int]) -> int | None:
        """The position after the latest earlier occurrence of the last tokens of ``ids``."""
        for n in NGRAMS:
            place = self._last.get(tuple(ids[-n:])) if len(ids) > n else None
            if place is not None:
                return place
        return None


class NgramProposer:
    """A ``DraftSource`` of copies of the tokens after the last occurrence of the request's last tokens."""

    seconds_per_token = 0.0

    def __init__(self) -> None:
        self._indexes: dict[str, _Index] = {}

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[tuple[int, ...]]:
        return [self._draft(request, count) for request, count in zip(requests, counts, strict=True)]

    def finished(self, request: Request) -> None:
        self._indexes.pop(request.request_id, None)

    def run_largest(self, num_requests: int) -> None:
        """Do nothing: there is nothing to allocate on a device."""

    def _draft(self, request: Request, count: int) -> tuple[int, ...]:
        if count < 1:
            return ()  # the index catches up when it is needed
        index = self._indexes.setdefault(request.request_id, _Index())
        index.extend(request.token_ids)
        place = index.follow(request.token_ids)
        if place is None:
            return ()
        ids = list(request.token_ids)
        for offset in range(count):
            ids.append(ids[place + offset])  # a repetition continues in its own copy
        return tuple(ids[len(request.token_ids) :])
