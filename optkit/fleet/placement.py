"""Placement: the replicas that compute a prompt and its answer, or give KV.

Beside the local option of each replica ``d`` (``optkit.fleet.score``) a prompt has two kinds for each peer ``p``::

    local     queue(d) + prefill(d, uncached)
    fetch     max(queue(d), bytes / bandwidth) + prefill(d, uncached after the fetch)
    computed  max(queue(d), queue(p) + max(prefill(p), bytes / bandwidth) + last bytes / bandwidth) + prefill(d, rest)

The option with the least cost wins: the predicted time to first token, and the seconds by which tokens of
running streams come later than promised, on ``p`` and on ``d``. So prefill goes apart from decode where the
first token comes earlier or a promise is kept, and never by a length or a role. A role is a weight
(``ReplicaReport.prefill_weight``): seconds of prefill for another replica count less above 1 and more below.

No clock and no call. ``Links`` learns the bandwidth from the counters in the reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from optkit.fleet.digests import Prompt
from optkit.fleet.replica import Fetch, ReplicaReport
from optkit.fleet.score import Candidate, Option, lateness, local_lateness, prefill_seconds

CHUNK_TOKENS = 256  # between two transfers of a prompt that is computed for another replica
PRIOR_SECONDS = 5e-3  # of a fetch beside its bytes
PRIOR_BANDWIDTH = 1e8  # bytes a second: 1 Gbit/s, until a fetch was measured
SMALLEST_SAMPLE = 1 << 16  # bytes
LEARNING = 0.3  # of the latest sample


@dataclass
class Link:
    """The measured way into a replica.

    Attributes:
        bandwidth: bytes a second.
        num_bytes, seconds: of all fetches, as reported last.
    """

    bandwidth: float = PRIOR_BANDWIDTH
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass
class Links:
    """The bandwidth into each replica, from the counters of its fetches."""

    links: dict[str, Link] = field(default_factory=dict)

    def observe(self, replica_id: str, num_bytes: int, seconds: float) -> None:
        """Take in the counters of a replica: bytes fetched so far, and the seconds of the fetches."""
        link = self.links.get(replica_id)
        if link is None:
            link = self.links[replica_id] = Link()
        if num_bytes == link.num_bytes:
            return
        if num_bytes < link.num_bytes:  # another engine
            link.num_bytes, link.seconds = 0, 0.0
        new_bytes, new_seconds = num_bytes - link.num_bytes, seconds - link.seconds
        if new_bytes >= SMALLEST_SAMPLE and new_seconds > 0:
            link.bandwidth += LEARNING * (new_bytes / new_seconds - link.bandwidth)
            link.num_bytes, link.seconds = num_bytes, seconds

    def seconds(self, replica_id: str, num_bytes: float) -> float:
        """The predicted seconds of ``num_bytes`` into a replica, without the connection."""
        link = self.links.get(replica_id)
        return num_bytes / (PRIOR_BANDWIDTH if link is None else link.bandwidth)


class Placement:
    """The options with KV from a peer (``optkit.fleet.router.Alternatives``).

    For each replica two peers count: with the most blocks, and with the least cost of computing the prompt. A
    replica is left out whose queue alone takes longer than the prompt elsewhere. So a decision takes time in proportion
    to the replicas.

    Args:
        tpot: seconds promised between two tokens of a stream, as for the router; None promises nothing.
    """

    def __init__(self, tpot: float | None = None) -> None:
        self.tpot, self.links = tpot, Links()

    def __call__(self, prompt: Prompt, candidates: Sequence[Candidate], now: float = 0.0) -> list[Option]:
        """The options that cost less than the same replica's local one."""
        kinds: dict[tuple[str, str, int], list[Candidate]] = {}
        for each in candidates:
            stats, report = each.report.stats, each.report
            self.links.observe(report.replica_id, stats.kv_bytes_fetched, 1e-6 * stats.kv_fetch_microseconds)
            if report.kv_layout:
                kinds.setdefault((report.version, report.kv_layout, report.block_size), []).append(each)
        return [option for alike in kinds.values() if len(alike) > 1 for option in self._among(prompt, alike)]

    def _among(self, prompt: Prompt, alike: Sequence[Candidate]) -> list[Option]:
        """The options among replicas of equal blocks."""
        size = alike[0].report.block_size
        last = max(0, len(prompt) - 1) // size
        peers = [each for each in alike if each.report.peer_address]
        holders = sorted(peers, key=attrgetter("reported_blocks"), reverse=True)[:2]
        sources = [computing(peer, last * size, self.tpot) for peer in peers if computes(peer, last)]
        sources = sorted(sources, key=attrgetter("cost"))[:2]
        length = len(prompt)
        costs = [each.seconds + local_lateness(each, length, self.tpot) for each in alike]
        enough = min(costs)
        found: list[Option | None] = []
        for here, cost in zip(alike, costs, strict=True):
            if here.queue > enough or here.hit_blocks >= last:
                continue
            way = Way(prompt, here, last, self.links, self.tpot, cost)
            peer = next((peer for peer in holders if peer is not here), None)
            if peer is not None and min(peer.reported_blocks, last) > way.num_known:
                found.append(way.fetched(peer))
            source = next((source for source in sources if source.peer is not here), None)
            if source is not None:
                found.append(way.computed(source))
        return [option for option in found if option is not None]


@dataclass(slots=True)
class Computing:
    """A prompt computed by a peer for another replica.

    Attributes:
        seconds: until the prompt is computed, without the transfer.
        prefill: the part of ``seconds`` after the peer's queue.
        late: the lateness of the peer's streams, and what the peer's weight adds.
        cost: the seconds to compare peers by.
    """

    peer: Candidate
    seconds: float
    prefill: float
    late: float
    cost: float


def computes(peer: Candidate, num_blocks: int) -> bool:
    """True where ``peer`` may compute ``num_blocks`` blocks for another replica, and lacks some."""
    return peer.hit_blocks < num_blocks and peer.report.prefill_weight > 0


def computing(peer: Candidate, num_tokens: int, tpot: float | None) -> Computing:
    """The cost of ``num_tokens`` tokens computed by ``peer``."""
    report, new = peer.report, num_tokens - peer.hit_tokens
    prefill = prefill_seconds(report.prefill_seconds, new)
    late = prefill * (1 / report.prefill_weight - 1)
    if report.num_running:
        step = prefill_seconds(report.prefill_seconds, min(new, CHUNK_TOKENS))
        late += -(-new // CHUNK_TOKENS) * lateness(report, step, new, tpot)
    seconds = peer.queue + prefill
    return Computing(peer, seconds, prefill, late, seconds + late)


class Way:
    """A prompt with ``last`` blocks fit for a cache, answered by the replica ``here``, which lacks some of them.

    Args:
        most: the cost from which on an option is none.

    Attributes:
        num_known: the blocks in the replica's own cache.
    """

    __slots__ = ("here", "last", "links", "most", "num_known", "prompt", "tpot")

    def __init__(
        self, prompt: Prompt, here: Candidate, last: int, links: Links, tpot: float | None, most: float
    ) -> None:
        self.prompt, self.here, self.last, self.links = prompt, here, last, links
        self.tpot, self.most, self.num_known = tpot, most, here.hit_blocks

    def fetched(self, peer: Candidate) -> Option | None:
        """With the further blocks of ``peer``.

        Blocks that the peer is expected to have, but has not reported, would not be there yet.
        """
        last = min(peer.reported_blocks, self.last)
        return self._option(PRIOR_SECONDS + self._seconds(last - self.num_known), last, peer.report)

    def computed(self, source: Computing) -> Option | None:
        """With all whole blocks computed by a peer."""
        size, missing = self.here.report.block_size, self.last - self.num_known
        behind = min(missing, -(-CHUNK_TOKENS // size))  # blocks of the last chunk travel after it
        slower = max(0.0, self._seconds(missing) - source.prefill)
        arrival = PRIOR_SECONDS + source.seconds + slower + self._seconds(behind)
        return self._option(arrival, self.last, source.peer.report, source)

    def _option(
        self, arrival: float, last: int, peer: ReplicaReport, source: Computing | None = None
    ) -> Option | None:
        """The option with ``last`` blocks at the replica after ``arrival`` seconds, from ``peer``.

        Args:
            source: the peer computes the blocks first.
        """
        report = self.here.report
        left = len(self.prompt) - last * report.block_size
        prefill = prefill_seconds(report.prefill_seconds, left)
        seconds = max(self.here.queue, arrival) + prefill
        late = lateness(report, prefill, left, self.tpot) + (source.late if source else 0.0)
        if seconds + late >= self.most:
            return None
        digests = self.prompt.digests(report.block_size)[self.num_known : last]
        fetch = Fetch(peer.replica_id, peer.peer_address, digests, source is not None)
        charges = [(report.replica_id, prefill)]
        if source is not None:
            charges.append((peer.replica_id, source.prefill))
        return Option(self.here, seconds, fetch, tuple(charges), late)

    def _seconds(self, num_blocks: int) -> float:
        report = self.here.report
        return self.links.seconds(report.replica_id, num_blocks * report.block_bytes)
