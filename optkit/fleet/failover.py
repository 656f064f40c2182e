"""Failover: an answer whose replica dies goes on with another replica; the client sees a pause.

The tokens of an answer are a function of the prompt, the parameters and the tokens before: numbers for drawing are
counted (``hash(seed, n)``), a constraint's state follows from the tokens, and kernels round alike in every batch. So
the prompt and the tokens so far, sent to another replica of the same artifact as ``EngineRequest.continued``, give the
rest of the same answer. Greedy and seeded answers are equal byte for byte. Text is made from tokens in the API
process, which lives on. The second replica computes the KV of the tokens again, or has the KV in the cache.

    choose a replica ──▶ stream ──▶ end
        ▲                   │ ReplicaGone
        └──── move ◀── verdict (``optkit.fleet.blame``) ──▶ error for this client alone

A request not yet begun may move as often as needed. Without a replica the request waits, for at most
``patience_seconds``. An answer with tokens never goes on with another version of the artifact.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import msgspec

from optkit.fleet.blame import Ledger, Verdict
from optkit.fleet.replica import Fetch, Replica, ReplicaGone, Work
from optkit.runtime.process.client import ENGINE_DIED, ENGINE_GONE
from optkit.runtime.types import EngineRequest, FinishReason, TokenOutput
from optkit.serve.quarantine import QUARANTINED, fingerprint, refusal

logger = logging.getLogger("optkit.fleet")

PATIENCE_SECONDS = 30.0
RETRY_SECONDS = 0.1  # between two attempts to find a replica, when nothing wakes a waiting request
LEAST_SECONDS = 0.001  # a wait worth beginning


class Wanted(NamedTuple):
    """A request in need of a replica.

    Attributes:
        version: digest of the artifact that began the answer; None: any.
        avoid: ids of replicas that must not be chosen.
    """

    request: EngineRequest
    version: str | None
    avoid: frozenset[str]


def nothing() -> None:
    """Do nothing."""


class Placed(NamedTuple):
    """A chosen replica, the version of its artifact, and the work to send.

    Attributes:
        give_up: called in place of ``replica.generate`` where the replica is not taken after all.
    """

    replica: Replica
    version: str
    work: Work
    give_up: Callable[[], None] = nothing


Choose = Callable[[Wanted], Awaitable[Placed | None]]  # None: no replica now


class Migration(NamedTuple):
    """A request that went on with another replica.

    Attributes:
        source, target: ids of the replicas.
        num_tokens: of the answer before.
        was_begun: the first replica had begun the request.
        seconds: from the loss of the first replica to the first output of the second.
    """

    request_id: str
    source: str
    target: str
    num_tokens: int
    was_begun: bool
    seconds: float


@dataclass(eq=False)
class _Stream:
    """The state of an answer, across replicas."""

    request: EngineRequest
    tokens: list[int] = field(default_factory=list)
    version: str | None = None
    placed: float = 0.0  # the time at which the last replica was chosen
    num_deaths: int = 0  # unexplained, with the request begun
    num_migrations: int = 0
    num_scored: int = 0  # prompt logprobs that the client has
    num_preemptions: int = 0  # by all replicas
    earlier_preemptions: int = 0  # by all replicas but the last
    has_first: bool = False
    lost: tuple[str, bool, float] | None = (
        None  # the replica, begun there or not, and the time, until the next output
    )
    _name: bytes | None = None

    @property
    def name(self) -> bytes:
        """The request's fingerprint."""
        if self._name is None:
            self._name = fingerprint(self.request)
        return self._name

    @property
    def num_tokens(self) -> int:
        """The tokens of the answer."""
        return self.request.continued + len(self.tokens)

    @property
    def rest(self) -> EngineRequest:
        """The request for the rest of the answer."""
        ids = (*self.request.prompt_ids, *self.tokens)
        return msgspec.structs.replace(self.request, prompt_ids=ids, continued=self.num_tokens)

    def add(self, output: TokenOutput) -> TokenOutput:
        """Record an output of a replica; the output as an undisturbed replica would have sent it."""
        skip = self.num_scored if self.num_migrations else 0
        scored = output.prompt_logprobs[skip:]
        self.num_scored += len(scored)
        self.tokens += output.token_ids
        self.num_preemptions = self.earlier_preemptions + output.num_preemptions
        first = None if self.has_first else output.first
        self.has_first = self.has_first or first is not None
        return msgspec.structs.replace(
            output,
            first=first,
            prompt_logprobs=scored,
            num_preemptions=self.num_preemptions,
            num_migrations=self.num_migrations,
        )


class Failover:
    """Answers of replicas that may die; a ``TokenSource``. Use it from a single event loop.

    Args:
        choose: returns a replica for a request, or None while there is none.
        patience_seconds: the longest time without a replica, before the request fails.
        on_migration: called for each migration, for metrics and logs.

    Attributes:
        num_migrations: requests moved after their first replica had begun.
        num_moves: requests moved before.
    """

    def __init__(
        self,
        choose: Choose,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        on_migration: Callable[[Migration], None] | None = None,
    ) -> None:
        self._choose, self._patience, self._clock = choose, patience_seconds, clock
        self._on_migration = on_migration or log_migration
        self.ledger = Ledger()
        self._changed = asyncio.Event()  # set for a moment when a waiting request may find a replica
        self.num_migrations = self.num_moves = 0
        self._sourced: dict[str, dict[str, tuple[str, _Stream]]] = {}  # source -> request -> target, stream

    def wake(self) -> None:
        """Have waiting requests look for a replica at once: one has come, or a probation has ended."""
        self._changed.set()
        self._changed.clear()

    def source_gone(self, replica: str) -> None:
        """Suspect the requests whose prompts ``replica`` was computing for other replicas when it died."""
        for request_id, (target, stream) in self._sourced.pop(replica, {}).items():
            self.ledger.source_died(target, request_id, stream.name, self._clock())

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenOutput, None]:
        """Outputs until an output has a ``finish_reason``. Closing or cancelling the generator aborts the request."""
        stream = _Stream(request)
        self.ledger.forget(self._clock())
        while True:
            if not self.ledger.is_empty and self.ledger.is_blocked(stream.name, self._clock()):
                yield refusal(request)
                return
            placed = await self._place(stream)
            if placed is None:
                yield ended(request, ENGINE_DIED if stream.tokens else ENGINE_GONE)
                return
            replica = placed.replica.replica_id
            if (fetch := placed.work.fetch) is not None and fetch.computes:
                self._sourced.setdefault(fetch.source, {})[request.request_id] = replica, stream
            try:
                async with aclosing(self._outputs(stream, placed)) as outputs:
                    async for output in outputs:
                        yield output
                return
            except ReplicaGone as gone:
                verdict = self._judge(stream, replica, gone)
            finally:
                self._forget_source(placed.work.fetch, request.request_id)
                self.ledger.end(replica, request.request_id)
                self.wake()
            if verdict is Verdict.UNLUCKY:
                yield ended(request, ENGINE_DIED)
                return

    def _forget_source(self, fetch: Fetch | None, request_id: str) -> None:
        """The prompt of a request is computed, or the request has ended."""
        if fetch is not None:
            self._sourced.get(fetch.source, {}).pop(request_id, None)

    async def _place(self, stream: _Stream) -> Placed | None:
        """A replica for the rest of ``stream``; None after the patience has ended."""
        until = self._clock() + self._patience
        while True:
            is_suspect = not self.ledger.is_empty and self.ledger.is_suspect(stream.name)
            avoid = self.ledger.resting(self._clock())
            avoid |= self.ledger.probing if is_suspect else frozenset()
            placed = await self._choose(Wanted(stream.rest, stream.version, avoid))
            if placed is not None:
                if self._may_run(stream, placed, is_suspect):
                    stream.placed = self._clock()
                    return placed
                placed.give_up()
            left = until - self._clock()
            if left < LEAST_SECONDS:
                return None
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(left, RETRY_SECONDS))

    def _may_run(self, stream: _Stream, placed: Placed, is_suspect: bool) -> bool:
        """Take the replica for ``stream``; False where another suspect came first, or of another version."""
        replica = placed.replica.replica_id
        if stream.version not in (None, placed.version):
            return False
        if is_suspect:
            if replica in self.ledger.probing:
                return False
            self.ledger.begin(replica, stream.request.request_id, stream.name)
        return True

    async def _outputs(self, stream: _Stream, placed: Placed) -> AsyncGenerator[TokenOutput, None]:
        """The outputs of one replica.

        Raises:
            ReplicaGone: the replica died before the last output.
        """
        replica, request_id = placed.replica.replica_id, stream.request.request_id
        source = cast(AsyncGenerator[TokenOutput, None], placed.replica.generate(placed.work))
        async with aclosing(source) as outputs:
            async for output in outputs:
                self._forget_source(placed.work.fetch, request_id)
                self._note_migration(stream, replica)
                if output.error == QUARANTINED:
                    self.ledger.block(stream.name, self._clock())
                output = stream.add(output)
                if output.token_ids or output.prompt_logprobs:
                    stream.version = placed.version
                is_over = output.finish_reason is not None
                if self.ledger.passed(replica, request_id, stream.num_tokens, is_over=is_over):
                    self.wake()
                yield output
                if is_over:
                    return
        raise ReplicaGone("the replica ended a stream without a reason", was_begun=bool(stream.tokens))

    def _note_migration(self, stream: _Stream, target: str) -> None:
        """Report the migration that the first output of ``target`` completes."""
        if stream.lost is None:
            return
        (source, was_begun, since), stream.lost = stream.lost, None
        stream.num_migrations += was_begun
        self.num_migrations += was_begun
        self.num_moves += not was_begun
        seconds = self._clock() - since
        name = stream.request.request_id
        self._on_migration(Migration(name, source, target, stream.num_tokens, was_begun, seconds))

    def _judge(self, stream: _Stream, replica: str, gone: ReplicaGone) -> Verdict:
        """The consequence of a death for ``stream``."""
        now, ledger = self._clock(), self.ledger
        ledger.rest(replica, now)
        since = stream.lost[2] if stream.lost else now
        was_begun = gone.was_begun or bool(stream.lost and stream.lost[1])
        stream.lost, stream.earlier_preemptions = (replica, was_begun, since), stream.num_preemptions
        if not gone.was_begun:
            return Verdict.MOVE
        name, count = stream.name, stream.num_deaths
        verdict = ledger.died(
            *(replica, stream.request.request_id, name),
            since=stream.placed,
            num_tokens=stream.num_tokens,
            num_deaths=count,
            now=now,
        )
        stream.num_deaths += ledger.is_unexplained(replica)
        logger.warning("request %s: %s; %s", stream.request.request_id, gone, verdict.value)
        return verdict


def log_migration(migration: Migration) -> None:
    """Write a line for a migration."""
    logger.warning(
        "request %s went on with %s after %s, at token %d, after a pause of %.2f s",
        *(migration.request_id, migration.target, migration.source, migration.num_tokens, migration.seconds),
    )


def ended(request: EngineRequest, error: str) -> TokenOutput:
    """The end of a request without a replica."""
    name, reason = request.request_id, FinishReason.ERROR
    return TokenOutput(request_id=name, token_ids=(), finish_reason=reason, error=error)
