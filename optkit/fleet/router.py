"""Router: the replica with the least predicted time to first token.

The interface, for the engine in front of a fleet. No method waits, and none calls a replica::

    router = Router(secret)                          # the deployment's secret (optkit.runtime.kv.digests.new_secret)
    prompt = router.prompt(request)                  # once a request: tokens and digests
    decision = router.choose(prompt)                 # raises NoReplica
    work = Work(request=request, digests=decision.digests, fetch=decision.fetch)   # to decision.replica_id, or, when
                                                     # refused, to the next of decision.ranks by choose(exclude=...)
    log_decision(decision)                           # after the request was sent
    router.answered(decision, output.first)          # with the first token, or
    router.withdrawn(decision)                       # refused, failed or aborted before the first token
    router.ended(decision)                           # an answered request has ended, in whatever way

and a few times a second for each replica (``optkit.fleet.follow`` does this)::

    since, asked = router.mark(replica_id), router.clock()
    router.update(await replica.report(since), since, asked)
    router.remove(replica_id)                        # gone

A replica takes part from the first report on. ``choose(version=...)`` keeps an answer with the version of the beginning
when the answer goes on elsewhere. ``Router.alternatives`` may add ways to serve a prompt, such as blocks fetched from a
peer.

The rules of a decision:

1. Left out are replicas that drain, are not ready, have not reported for ``STALE_SECONDS``, have another version, or
   are held back by an update (unless their version is asked for). A stale replica is taken where all are stale.
2. Every replica has a predicted time to first token (``optkit.fleet.score``), and the least wins. Seconds by which
   running streams would be later than promised count as well.
3. A prompt is *cold* where the caches of all replicas are worth the same, within ``COLD_SHARE`` of the prompt. Among
   the replicas within ``COLD_SHARE`` and ``STEPS`` steps of the best, the replica with the fewest requests takes it,
   and of these the replica whose last cold prompt is the oldest: so streams spread and caches fill evenly. The
   router counts own requests: by the last report a replica looks full after the end of an answer, too. A prompt
   that arrives waits for the end of a step, so a smaller difference is none; without the rule the replica that had been
   measured last, or fastest, would get all short prompts.
4. A way over another replica (``alternatives``) wins when it saves ``FETCH_SHARE`` of the best local way: the work of
   two replicas, a transfer and its failures weigh more than a difference within the error of the predictions.
5. The blocks of the prompt count from now on, for the predicted time and ``EXPECT_SECONDS``, as those of the replica
   that computes the prompt. Where a prompt is computed for the chosen replica, that is the source: a prompt with the
   same prefix that is sent to the chosen replica meanwhile would be computed again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from optkit.fleet.digests import Blocks, Chains, Prompt
from optkit.fleet.index import Index
from optkit.fleet.replica import Fetch, Mark, ReplicaReport
from optkit.fleet.score import MOST_SENT, Backlog, Candidate, Option, local, prefill_seconds
from optkit.runtime.types import EngineRequest, FirstToken

__all__ = ["Alternatives", "Decision", "NoReplica", "Router", "log_decision"]

log = logging.getLogger("optkit.fleet.router")

ROUTE_HEADER = "x-optkit-route"  # of answers in debug mode: ``Decision.header``
EXPECT_SECONDS = 2.0  # blocks of a prompt are expected so long after the predicted first token
STALE_SECONDS = 5.0  # without a report
CLOSE_SHARE = 0.10  # over the best: the second rank
COLD_SHARE = 0.05
FETCH_SHARE = 0.10  # of the best local way's cost, to be saved by a way over another replica
STEPS, LEAST_STEP = 2, 0.010  # a step of the best replica counts as at least so many seconds


class NoReplica(Exception):
    """No replica can take a request now; the message is fit for the client."""


class Alternatives(Protocol):
    """Further ways to serve a prompt, decided without waiting."""

    def __call__(self, prompt: Prompt, candidates: Sequence[Candidate], now: float) -> Sequence[Option]:
        """Options beside the local ones; a ``fetch`` goes only between equal versions and KV layouts."""
        ...


@dataclass(slots=True)
class Decision:
    """The choice of a replica, with the reasons.

    Attributes:
        digests: of all full blocks of the prompt, for ``Work``.
        fetch: blocks to take from another replica first.
        predicted: seconds to the first token.
        queue, prefill: parts of ``predicted`` without a fetch.
        runner_up: the replica with the next best option, and the predicted seconds; None where there is no other.
        ranks: replicas in order: the chosen, those within ``CLOSE_SHARE`` of the best, the rest.
        is_cold: no replica's cache mattered.
        holder: the replica that computes the prompt, so has the blocks first: the source of a computed prompt, else
            the chosen replica.
    """

    number: int
    request_id: str
    replica_id: str
    version: str
    digests: tuple[bytes, ...]
    fetch: Fetch | None
    num_tokens: int
    hit_tokens: int
    predicted: float
    queue: float
    prefill: float
    runner_up: tuple[str, float] | None
    ranks: tuple[tuple[str, ...], ...]
    is_cold: bool
    at: float
    keys: Sequence[int] = field(repr=False, default=())
    charges: tuple[tuple[str, float], ...] = field(repr=False, default=())
    holder: str = ""
    expected_until: float = 0.0

    def __str__(self) -> str:
        other = (
            f"next {self.runner_up[0]} {self.runner_up[1]:.3f} s" if self.runner_up else "no other replica"
        )
        fetched = f", {len(self.fetch.digests)} blocks from {self.fetch.source}" if self.fetch else ""
        return (
            f"{self.request_id} to {self.replica_id}: predicted {self.predicted:.3f} s (queue {self.queue:.3f}, "
            f"prefill {self.prefill:.3f}), {self.hit_tokens} of {self.num_tokens} tokens cached{fetched}, {other}"
        )

    @property
    def header(self) -> str:
        """The decision as the value of ``ROUTE_HEADER``."""
        parts = [
            f"replica={self.replica_id}",
            f"predicted_ms={1000 * self.predicted:.1f}",
            f"hit_tokens={self.hit_tokens}",
            f"tokens={self.num_tokens}",
        ]
        if self.fetch is not None:
            parts.append(f"fetch_from={self.fetch.source}")
        if self.runner_up is not None:
            parts += [f"runner_up={self.runner_up[0]}", f"runner_up_ms={1000 * self.runner_up[1]:.1f}"]
        return "; ".join(parts)


@dataclass(slots=True)
class _Known:
    """A replica as the router knows it.

    Attributes:
        last_given, last_cold: numbers of decisions.
        num_open: requests of this router, not ended.
        num_others: requests of other routers, by the last report.
        ended: the times of the ends of answers since the last report.
    """

    report: ReplicaReport
    asked: float
    backlog: Backlog = field(default_factory=Backlog)
    last_given: int = 0
    last_cold: int = 0
    num_open: int = 0
    num_others: int = 0
    ended: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_SENT))

    def count(self, asked: float) -> None:
        """Take the number of requests from the report on the question of the time ``asked``.

        A request sent or ended between question and answer may be in the report or not, so the router counts own
        requests. Open requests neither reported nor just sent have been lost.
        """
        while self.ended and self.ended[0] <= asked:
            self.ended.popleft()
        reported = self.report.num_running + self.report.num_waiting
        self.num_open = min(self.num_open, reported + len(self.backlog.sent))
        self.num_others = max(0, reported - self.num_open - len(self.ended))

    def end(self, now: float, *, is_reported: bool = True) -> None:
        """Count the end of a request of this router, which is in the last report or not."""
        self.num_open = max(0, self.num_open - 1)
        if is_reported:
            self.ended.append(now)

    @property
    def cold_order(self) -> tuple[int, int]:
        """The least takes the next cold prompt: the requests at the replica, and the time of its last cold prompt."""
        return self.num_open + self.num_others, self.last_cold

    @property
    def budget(self) -> int:
        """The most blocks of the replica's cache."""
        return max(1, self.report.kv_blocks_total + self.report.kv_blocks_host)


class Router:
    """Chooses replicas for requests. Not thread-safe: all methods belong to one event loop.

    Args:
        secret: of the deployment; None is random, so no replica's digests are found.
        clock: seconds.
        tpot: seconds promised between two tokens of a stream; None promises nothing.

    Attributes:
        alternatives: further options for each decision; None has only the replicas' own caches.
        index: the blocks of each replica.
    """

    def __init__(
        self,
        secret: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
        tpot: float | None = None,
    ) -> None:
        self._chains, self.clock, self.tpot = Chains(secret), clock, tpot
        self.index = Index()
        self.alternatives: Alternatives | None = None
        self._known: dict[str, _Known] = {}
        self._numbers = count(1)

    # -- reports ---------------------------------------------------------------------------------------

    @property
    def reports(self) -> dict[str, ReplicaReport]:
        """The last report of each replica."""
        return {name: known.report for name, known in self._known.items()}

    def mark(self, replica_id: str) -> Mark:
        """The mark for the next question to the replica."""
        return self.index.mark(replica_id)

    def update(self, report: ReplicaReport, since: Mark, asked: float | None = None) -> None:
        """Take in a report.

        Args:
            since: the mark in the question.
            asked: the time of the question, by ``clock``; by default now.
        """
        asked, name = self.clock() if asked is None else asked, report.replica_id
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = _Known(report, asked)
        elif (known.report.version, known.report.block_size) != (report.version, report.block_size):
            self.index.forget(name)  # digests of another version mean other KV
            known.backlog = Backlog()
        known.report, known.asked = report, asked
        known.backlog.report(report.queue_seconds, asked)
        known.count(asked)
        if report.changes is not None:
            self.index.apply(
                name,
                report.changes,
                since,
                budget=known.budget,
                now=self.clock(),
                holds_ends=report.holds_ends,
            )

    def remove(self, replica_id: str) -> None:
        """Forget a replica that has gone."""
        self._known.pop(replica_id, None)
        self.index.forget(replica_id)

    # -- decisions -------------------------------------------------------------------------------------

    def prompt(self, request: EngineRequest) -> Prompt:
        """The prompt of a request, whose digests are computed once, however often the request is routed."""
        return Prompt(
            self._chains,
            request.prompt_ids,
            request.cache_salt,
            name=request.request_id,
            reads_cache=request.reads_prefix_cache,
        )

    def choose(
        self, prompt: Prompt, *, exclude: Collection[str] = (), version: str | None = None
    ) -> Decision:
        """The replica for ``prompt``, which counts as sent from now on.

        Args:
            exclude: replicas not to take: the request failed there.
            version: the only version to take; None takes any.

        Raises:
            NoReplica: there is none.
        """
        now = self.clock()
        candidates = self._candidates(prompt, exclude, version, now)
        options = sorted((local(each, len(prompt), self.tpot) for each in candidates), key=_cost)
        is_cold = _is_cold(candidates, len(prompt))
        best = self._least_recent(options, is_cold)
        if self.alternatives is not None:
            more = self.alternatives(prompt, candidates, now)
            options = sorted([*options, *more], key=_cost)
            if options[0].fetch is not None and options[0].cost < best.cost * (1 - FETCH_SHARE):
                best = options[0]
        return self._take(prompt, best, options, is_cold, now)

    def answered(self, decision: Decision, first: FirstToken | None = None) -> None:
        """The first token of a request came: the replica has the prompt's blocks until a report says otherwise.

        Args:
            first: the parts of the time to the token.
        """
        known = self._known.get(decision.replica_id)
        if known is None or known.report.version != decision.version:
            return
        now = self.clock()
        self._expect(decision, decision.replica_id, now, now + EXPECT_SECONDS)
        if first is not None and log.isEnabledFor(logging.DEBUG):
            log.debug(
                "%s at %s: first token after %.3f s (predicted %.3f), %d tokens cached (predicted %d)",
                decision.request_id,
                decision.replica_id,
                now - decision.at,
                decision.predicted,
                first.cached_tokens,
                decision.hit_tokens,
            )

    def withdrawn(self, decision: Decision) -> None:
        """The prompt is not computed: refused, failed, or without a client before the first token."""
        self.index.disappoint(decision.holder, decision.keys, decision.expected_until)
        for name, seconds in decision.charges:
            if known := self._known.get(name):
                now = self.clock()
                is_reported = not known.backlog.take_back(seconds, now, decision.at)
                if name == decision.replica_id:
                    known.end(now, is_reported=is_reported)

    def ended(self, decision: Decision) -> None:
        """An answered request has ended."""
        if known := self._known.get(decision.replica_id):
            known.end(self.clock())

    # -- parts of a decision ---------------------------------------------------------------------------

    def _candidates(
        self, prompt: Prompt, exclude: Collection[str], version: str | None, now: float
    ) -> list[Candidate]:
        able = [
            known
            for name, known in self._known.items()
            if known.report.is_ready
            and not known.report.is_draining
            and name not in exclude
            and (version == known.report.version or (version is None and not known.report.is_held))
        ]
        fresh = [known for known in able if now - known.asked <= STALE_SECONDS]
        if not able:
            raise NoReplica("no replica is ready" if not self._known else "no replica can take the request")
        taken = fresh or able
        sizes = {known.report.block_size for known in taken}
        blocks = {size: prompt.blocks(size, self.index.knows) for size in sizes}
        return [self._candidate(len(prompt), blocks[known.report.block_size], known, now) for known in taken]

    def _candidate(self, num_tokens: int, blocks: Blocks, known: _Known, now: float) -> Candidate:
        report = known.report
        hits, reported = self.index.hits(report.replica_id, blocks, now)
        tokens = hits * report.block_size
        prefill = prefill_seconds(report.prefill_seconds, num_tokens - tokens)
        return Candidate(report, hits, tokens, known.backlog.seconds(now), prefill, reported)

    def _least_recent(self, options: Sequence[Option], is_cold: bool) -> Option:
        """The option to take: the best; of cold prompts the least recently given among those near the best."""
        most = options[0].cost
        if is_cold:
            step = max(options[0].candidate.report.decode_seconds, LEAST_STEP)
            most = most * (1 + COLD_SHARE) + STEPS * step
        near = [option for option in options if option.cost <= most]
        if len(near) == 1:
            return near[0]
        known = self._known
        if is_cold:
            return min(near, key=lambda option: known[option.candidate.replica_id].cold_order)
        return min(near, key=lambda option: known[option.candidate.replica_id].last_given)

    def _take(
        self, prompt: Prompt, best: Option, options: Sequence[Option], is_cold: bool, now: float
    ) -> Decision:
        chosen, report = best.candidate, best.candidate.report
        blocks = prompt.blocks(report.block_size, self.index.knows)
        runner_up = next((o for o in options if o.candidate.replica_id != chosen.replica_id), None)
        decision = Decision(
            number=next(self._numbers),
            request_id=prompt.name,
            replica_id=chosen.replica_id,
            version=report.version,
            digests=blocks.digests,
            fetch=best.fetch,
            num_tokens=len(prompt),
            hit_tokens=chosen.hit_tokens,
            predicted=best.seconds,
            queue=chosen.queue,
            prefill=chosen.prefill,
            runner_up=None if runner_up is None else (runner_up.candidate.replica_id, runner_up.seconds),
            ranks=_ranks(chosen.replica_id, options),
            is_cold=is_cold,
            at=now,
            keys=_published_keys(blocks, chosen),
            charges=best.charges,
            holder=best.fetch.source if best.fetch is not None and best.fetch.computes else chosen.replica_id,
        )
        for name, seconds in best.charges:
            if name in self._known:
                self._known[name].backlog.send(seconds, now)
        known = self._known[chosen.replica_id]
        known.last_given, known.num_open = decision.number, known.num_open + 1
        if is_cold:
            known.last_cold = decision.number
        self._expect(decision, decision.holder, now, now + best.seconds + EXPECT_SECONDS)
        return decision

    def _expect(self, decision: Decision, holder: str, now: float, until: float) -> None:
        """Count the blocks of the prompt as those of ``holder``."""
        known = self._known.get(holder)
        if known is not None and decision.keys and not known.report.holds_ends:
            self.index.expect(holder, decision.keys, until, budget=known.budget)
            decision.holder, decision.expected_until = holder, until


def log_decision(decision: Decision) -> None:
    """Explain a decision in a line of the log.

    A line takes as long as a fourth of a decision, so it is written once the request is on its way.
    """
    log.info("%s", decision)


def _cost(option: Option) -> float:
    return option.cost


def _is_cold(candidates: Sequence[Candidate], num_tokens: int) -> bool:
    """True where no replica's cache is worth more than ``COLD_SHARE`` of the prompt over another's."""
    hits = [candidate.hit_tokens for candidate in candidates]
    return max(hits) - min(hits) <= COLD_SHARE * num_tokens


def _published_keys(blocks: Blocks, chosen: Candidate) -> Sequence[int]:
    """The keys of blocks after the prefixes in the artifact, which the replica will publish."""
    common = min(len(blocks.common), chosen.hit_blocks)
    return blocks.keys[common:] if common else blocks.keys


def _ranks(chosen: str, options: Sequence[Option]) -> tuple[tuple[str, ...], ...]:
    """Replicas in order of the best options: ``chosen``, replicas within ``CLOSE_SHARE`` of the best, the rest."""
    most = options[0].cost * (1 + CLOSE_SHARE)
    close: dict[str, None] = {}
    rest: dict[str, None] = {}
    for option in options:
        name = option.candidate.replica_id
        if name != chosen and name not in close:
            (close if option.cost <= most else rest)[name] = None
    return ((chosen,), tuple(close), tuple(rest))
