"""Placement: where a prompt is computed, and where its answer: here, there, or with KV from a peer.

Three kinds of options for a prompt, for each replica ``d`` that could answer::

    local     queue(d) + prefill(d, uncached)
    fetch     max(queue(d), bytes / bandwidth) + prefill(d, uncached after the fetch)
    computed  max(queue(d), queue(p) + max(prefill(p), bytes / bandwidth) + last bytes / bandwidth) + prefill(d, rest)

The option with the least cost wins. The cost is the predicted time to first token, and the seconds by which the prompt
makes the tokens of running streams later than promised, over all streams: of ``p`` and ``d``. So prefill goes apart from
decode where that is faster, or where it keeps a promise, and never by a length or a role. A role is a weight
(``ReplicaReport.prefill_weight``): prefill seconds at a replica count less above 1 and more below.

Plain values, no clock and no call. ``Links`` learns the bandwidth from the replicas' counters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from optkit.fleet.replica import Fetch, ReplicaReport

PREFILL_TOKENS = (0, 256, 512, 1024, 2048)  # of ``ReplicaReport.prefill_seconds``
TOKEN_SECONDS = 1e-6  # of a replica without predictions: fewer tokens still win
CHUNK_TOKENS = 256  # between two transfers of a prompt that is computed for another replica
PRIOR_SECONDS = 5e-3  # of a fetch beside its bytes
PRIOR_BANDWIDTH = 1e8  # bytes a second: 1 Gbit/s, until a fetch was measured
SMALLEST_SAMPLE = 1 << 16  # bytes
LEARNING = 0.3  # of the latest sample


@dataclass(frozen=True)
class Candidate:
    """A replica, as a prompt sees it.

    Attributes:
        hit_blocks: of the prompt, from the first on, in the replica's cache.
        queue: predicted seconds until a new prompt would start.
        may_answer: False for a replica that only gives blocks, or only computes for others.
    """

    report: ReplicaReport
    hit_blocks: int
    queue: float
    may_answer: bool = True

    def prefill(self, num_tokens: int) -> float:
        """The predicted seconds of a prefill."""
        return prefill_seconds(self.report.prefill_seconds, num_tokens)


@dataclass(frozen=True)
class Option:
    """A way to serve a prompt.

    Attributes:
        seconds: the predicted time to first token.
        cost: ``seconds`` and the lateness of running streams.
        fetch: blocks to take from another replica first; None computes here.
        charges: seconds of work by replica.
    """

    replica_id: str
    seconds: float
    cost: float
    fetch: Fetch | None = None
    charges: tuple[tuple[str, float], ...] = ()

    @property
    def kind(self) -> str:
        """``local``, ``fetch`` or ``computed``."""
        if self.fetch is None:
            return "local"
        return "computed" if self.fetch.computes else "fetch"


@dataclass
class Link:
    """The measured way into a replica.

    Attributes:
        bandwidth: bytes a second.
        bytes, seconds: of all fetches, as reported last.
    """

    bandwidth: float = PRIOR_BANDWIDTH
    bytes: int = 0
    seconds: float = 0.0


@dataclass
class Links:
    """The bandwidth into each replica, from the counters of its fetches."""

    links: dict[str, Link] = field(default_factory=dict)

    def observe(self, replica_id: str, num_bytes: int, seconds: float) -> None:
        """Take in the counters of a replica: bytes fetched so far, and the seconds of the fetches."""
        link = self.links.setdefault(replica_id, Link())
        if num_bytes < link.bytes:  # another engine
            link.bytes, link.seconds = 0, 0.0
        new_bytes, new_seconds = num_bytes - link.bytes, seconds - link.seconds
        if new_bytes >= SMALLEST_SAMPLE and new_seconds > 0:
            link.bandwidth += LEARNING * (new_bytes / new_seconds - link.bandwidth)
            link.bytes, link.seconds = num_bytes, seconds

    def forget(self, replica_id: str) -> None:
        """Drop a replica that has gone."""
        self.links.pop(replica_id, None)

    def seconds(self, replica_id: str, num_bytes: float) -> float:
        """The predicted seconds of ``num_bytes`` into a replica, without the connection."""
        return num_bytes / self.links.get(replica_id, Link()).bandwidth


def prefill_seconds(table: Sequence[float], num_tokens: int) -> float:
    """The predicted seconds of a prefill, between the reported predictions and beyond the last."""
    if len(table) < len(PREFILL_TOKENS):
        return num_tokens * TOKEN_SECONDS
    place = 1
    while place < len(PREFILL_TOKENS) - 1 and PREFILL_TOKENS[place] < num_tokens:
        place += 1
    low, high = PREFILL_TOKENS[place - 1], PREFILL_TOKENS[place]
    slope = (table[place] - table[place - 1]) / (high - low)
    return table[place - 1] + slope * (num_tokens - low)


def options(
    num_tokens: int,
    digests: Sequence[bytes],
    candidates: Sequence[Candidate],
    links: Links,
    tpot: float | None = None,
) -> list[Option]:
    """All ways to serve a prompt, the least cost first; of equal costs the simplest first.

    Args:
        num_tokens: of the prompt.
        digests: of its full blocks.
        tpot: seconds promised between two tokens of a stream; None promises nothing.
    """
    found: list[Option] = []
    for here in candidates:
        if not here.may_answer or not is_serving(here.report):
            continue
        prompt = Prompt(num_tokens, tuple(digests), here, links, tpot)
        found.append(prompt.local())
        for peer in candidates:
            if peer is not here and gives_blocks(peer.report, here.report):
                found += prompt.fetched(peer) + prompt.computed(peer)
    order = {"local": 0, "fetch": 1, "computed": 2}
    return sorted(found, key=lambda option: (option.cost, order[option.kind]))


def is_serving(report: ReplicaReport) -> bool:
    """True for a replica that takes requests."""
    return report.is_ready and not report.is_draining


def gives_blocks(source: ReplicaReport, target: ReplicaReport) -> bool:
    """True where ``target`` can take blocks from ``source``."""
    mine = target.version, target.kv_layout, target.block_size
    theirs = source.version, source.kv_layout, source.block_size
    return bool(source.is_ready and source.peer_address and target.kv_layout) and mine == theirs


@dataclass(frozen=True)
class Prompt:
    """A prompt at the replica ``here``, which would answer."""

    num_tokens: int
    digests: tuple[bytes, ...]
    here: Candidate
    links: Links
    tpot: float | None

    @property
    def num_blocks(self) -> int:
        """The blocks that a cache may give: a token is left to compute."""
        return max(0, self.num_tokens - 1) // self.here.report.block_size

    @property
    def num_known(self) -> int:
        """The blocks in the replica's own cache."""
        return min(self.here.hit_blocks, self.num_blocks)

    def local(self) -> Option:
        """The replica alone."""
        return self._option(self.here.queue, self.num_known, 0.0)

    def fetched(self, peer: Candidate) -> list[Option]:
        """With the blocks that ``peer`` has and the replica has not."""
        last = min(peer.hit_blocks, self.num_blocks)
        if last <= self.num_known:
            return []
        arrival = PRIOR_SECONDS + self._seconds(last - self.num_known)
        return [self._option(max(self.here.queue, arrival), last, 0.0, self._fetch(peer, last))]

    def computed(self, peer: Candidate) -> list[Option]:
        """With the whole blocks computed by ``peer``."""
        report, size, last = peer.report, self.here.report.block_size, self.num_blocks
        if last <= max(self.num_known, peer.hit_blocks) or report.prefill_weight <= 0 or not is_serving(report):
            return []
        new = (last - min(peer.hit_blocks, last)) * size
        prefill = peer.prefill(new)
        missing = last - self.num_known
        behind = min(missing, -(-CHUNK_TOKENS // size))  # blocks of the last chunk travel after it
        arrival = peer.queue + max(prefill, self._seconds(missing)) + self._seconds(behind) + PRIOR_SECONDS
        num_chunks = -(-new // CHUNK_TOKENS)
        late = num_chunks * lateness(report, peer.prefill(min(new, CHUNK_TOKENS)), new, self.tpot)
        weighed = prefill * (1 / report.prefill_weight - 1)
        fetch = self._fetch(peer, last, computes=True)
        charge = (report.replica_id, prefill)
        return [self._option(max(self.here.queue, arrival), last, late + weighed, fetch, charge)]

    def _option(
        self,
        start: float,
        known: int,
        further: float,
        fetch: Fetch | None = None,
        charge: tuple[str, float] | None = None,
    ) -> Option:
        """The option in which the replica starts after ``start`` seconds, with ``known`` blocks in its cache."""
        report = self.here.report
        left = self.num_tokens - known * report.block_size
        prefill = self.here.prefill(left)
        seconds = start + prefill
        late = lateness(report, prefill, left, self.tpot)
        charges = ((report.replica_id, prefill),) + ((charge,) if charge else ())
        return Option(report.replica_id, seconds, seconds + late + further, fetch, charges)

    def _seconds(self, num_blocks: int) -> float:
        report = self.here.report
        return self.links.seconds(report.replica_id, num_blocks * report.block_bytes)

    def _fetch(self, peer: Candidate, last: int, computes: bool = False) -> Fetch:
        source = peer.report
        digests = self.digests[self.num_known : last]
        return Fetch(source.replica_id, source.peer_address, digests, computes)


def lateness(report: ReplicaReport, step: float, num_tokens: int, tpot: float | None) -> float:
    """Seconds by which the running streams of a replica get tokens later than promised, over all streams.

    Args:
        step: seconds added to a step by a chunk of the prompt.
        num_tokens: of the prompt that are computed.
        tpot: the promise.
    """
    if tpot is None or num_tokens <= 0:
        return 0.0
    return report.num_running * max(0.0, report.decode_seconds + step - tpot)
