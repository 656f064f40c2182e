"""Trees of guesses from several sources, as wide as pays.

A tree grows from the last known token by the likeliest guess first. The chance of a guess is the product of the
chances along the branch, and each chance is measured: guesses of the same *kind* (source, matching tokens, share of
the occurrences) count together, right or wrong, over all requests. The tree has as many guesses as make the most tokens
a second on average, by the measured time of steps of so many rows (``RowCosts``). So trees become chains in repetitive
text, and vanish where no guess pays; a request whose guesses do not pay rests (``optkit.runtime.sampling.looking``).

Sources: what followed the last tokens earlier in the request and in earlier answers (``Occurrences``), and the likely
tokens of earlier logits (``Recycled``).

Guesses outside of the tree are judged, too, once the tokens are known: kinds too dear to verify are not forgotten.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from optkit.kernels.cpu.decode_steps import TokenPairs
from optkit.runtime.draft_tree import DraftTree, depths_of
from optkit.runtime.sampling.looking import CALL_SHARE, LONGEST_REST, RATE, Account, CallShare
from optkit.runtime.sampling.occurrences import END, Occurrences, Place
from optkit.runtime.sampling.proposer import SpeculationStats, StepTime
from optkit.runtime.sampling.recycling import likeliest
from optkit.runtime.sampling.shared_text import SharedText, SharedTexts
from optkit.runtime.scheduling.cost_model import MIN_SECONDS, CostModel, StepWork, chunk_work, step_work
from optkit.runtime.scheduling.row_costs import RowCosts
from optkit.runtime.types import Failure, Request, ScheduledRequest

if TYPE_CHECKING:
    import numpy as np

    from optkit.runtime.sampling.speculative import Followed

DECAY = 0.97  # weight of a kind's record after one more guess
PRIOR_WEIGHT = 2.0  # guesses that the chance before any guess counts for
LEAST_GAIN = 1.03  # predicted, of a step with guesses; below nothing is guessed
FANOUT = 4  # guesses after a token, of each source
LOOK_MATCHING, LOOK_LEAST = 4, -1.0  # repeated tokens that end a rest, where the account is not below

OWN, EARLIER, RECYCLED = range(3)  # sources
Kind = tuple[int, ...]
LENGTHS = (2, 3, 4, 6, 8, 12, 16)  # classes of the number of tokens that match
PRIORS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # for each of LENGTHS
SHARES = (0.3, 0.6, 0.99)  # borders between classes of the share of occurrences with the token
RECYCLED_PRIORS = {1: (0.3, 0.08, 0.04, 0.02), 2: (0.4, 0.1, 0.05, 0.03)}  # after one known token, after two


class Chances:
    """The measured chance of each kind of guess."""

    def __init__(self) -> None:
        self._records: dict[Kind, tuple[float, float]] = {}  # right, all

    def of(self, kind: Kind, prior: float) -> float:
        """The chance of a guess of ``kind`` to be right; ``prior`` before anything is known."""
        right, count = self._records.get(kind, (0.0, 0.0))
        return (right + PRIOR_WEIGHT * prior) / (count + PRIOR_WEIGHT)

    def learn(self, kind: Kind, *, right: bool) -> None:
        before, count = self._records.get(kind, (0.0, 0.0))
        self._records[kind] = (DECAY * before + right, DECAY * count + 1.0)


@dataclass(eq=False)
class Node:
    """A token of a tree, or the root.

    Attributes:
        chance: of the answer to go through the node.
        places: texts with the places of the token's followers, the request's own text first.
        guesses: the kind of each guessed follower, in the tree or not; None before the first search.
        children: the guesses in the tree, by token, the likeliest first.
    """

    token: int
    chance: float
    path: tuple[int, ...] = ()  # tokens from the root, which is left out
    places: Sequence[tuple[Occurrences, list[Place]]] = ()
    guesses: dict[int, Kind] | None = None
    children: dict[int, Node] = field(default_factory=dict)


Candidate = tuple[float, int, Node, Node]  # less its chance, its number, the parent, the guess


class RequestText:
    """The text of a request, and the root of its last tree.

    Args:
        shared: the sources of the salt.
    """

    def __init__(self, shared: SharedText) -> None:
        self.shared = shared
        self.text = Occurrences()
        self.root: Node | None = None
        self.account = Account()
        self.rests = False  # no guess is looked for in this step
        self.is_quiet = False  # none was found that pays

    @property
    def searched(self) -> tuple[Occurrences, ...]:
        """The texts with guesses: the request's own and earlier answers."""
        return self.text, *self.shared.earlier.texts


class TreeSpeculator:
    """A ``Proposer`` of trees, or of chains where the runner takes no trees.

    Args:
        cost: predicts steps.
        most: guesses of a request in a step.
        branches: whether the runner takes trees.
        recycles: whether the likely tokens of earlier logits are guessed.
        max_cached_requests: earlier answers that are searched.
    """

    def __init__(
        self,
        cost: CostModel,
        most: int,
        *,
        branches: bool = True,
        recycles: bool = False,
        max_cached_requests: int = 0,
    ) -> None:
        self.costs, self.most, self.branches, self.recycles = RowCosts(cost), most, branches, recycles
        self.shared = SharedTexts(max_cached_requests)
        self.chances, self.stats, self.call_share = Chances(), SpeculationStats(), CallShare()
        self._texts: dict[str, RequestText] = {}
        self._expected = 0.0  # right guesses of the latest draft, on average

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[tuple[int, ...]]:
        base = StepWork()
        for request in requests:
            base += chunk_work(1, request.num_computed, rows=1)
            if own := self._texts.get(request.request_id):
                own.is_quiet = own.rests = False
        drafts, tokens = list[tuple[int, ...]](), float(len(requests))
        for request, limit in zip(requests, limits, strict=True):
            drafts.append(self._draft(request, min(limit, self.most), base, tokens))
            for _ in drafts[-1]:
                base += chunk_work(1, len(request.token_ids), rows=1)
            tokens += self._expected
        return drafts

    def observe(self, request: Request, draft: tuple[int, ...], tokens: tuple[int, ...]) -> None:
        self.stats.count(max(depths_of(draft)), len(tokens) - 1, len(draft))
        own = self._texts.get(request.request_id)
        if own is not None:
            own.account.earn(len(tokens) - 1)

    def took(self, items: Sequence[ScheduledRequest], step: StepTime) -> None:
        """Learn the time of a step, and charge the requests that looked for guesses."""
        owns = [own for item in items if (own := self._texts.get(item.request.request_id))]
        looking = [own for own in owns if not own.rests]
        plain = sum((chunk_work(1, item.request.num_held, rows=1) for item in items), StepWork())
        alone = max(self.costs.seconds(plain), MIN_SECONDS)  # a plain step
        if step.num_steps == 1:
            self.costs.observe(step_work(items), step.seconds)
        elif not looking:
            self.call_share.observe(step.seconds / alone)
        for own in owns:
            if own.rests:
                own.account.earn(RATE * step.num_steps)
        if not looking:
            return
        share = self.call_share.value if step.could_be_several else CALL_SHARE
        # a call that begins with a look costs what a step alone costs more than one in a call
        seconds = step.seconds if step.num_steps == 1 else alone
        price = (seconds / (share * alone) - 1) * len(items) / len(looking)
        for own in looking:
            own.account.spend(price)

    def steps_ahead(self, requests: Sequence[Request]) -> int:
        """Steps before the next look for guesses for one of ``requests``, at most.

        A pair of ``watched`` of any request ends the steps, so the plan is shorter for several requests.
        """
        owns = [self._texts.get(request.request_id) for request in requests]
        quiet = sum(own is not None and own.is_quiet for own in owns)
        most = max(1, LONGEST_REST // max(quiet, 1))
        return min((ahead(own, most) for own in owns), default=1)

    def watched(self, requests: Sequence[Request]) -> list[list[TokenPairs]]:
        """The pairs of tokens in the text of each request and in earlier answers: behind a pair there may be
        something to copy. Empty while a request rests.
        """
        owns = [self._texts.get(request.request_id) for request in requests]
        return [[] if own is None or own.rests else [text.pairs for text in own.searched] for own in owns]

    def _shared(self, request: Request) -> SharedText:
        """The sources of the salt of ``request``, the same object until the request ends."""
        own = self._texts.get(request.request_id)
        return own.shared if own is not None else self.shared.of(request.received.cache_salt)

    def collect(
        self,
        items: Sequence[ScheduledRequest],
        found: Sequence[Followed | Failure],
        logits: np.ndarray,
        rows: Sequence[int],
    ) -> None:
        """Recycle the logits of a step, before its tokens join the requests; arguments as of ``verify``."""
        if not self.recycles:
            return
        known = [
            (item.request, outcome.tokens, [row, *(row + right for right in outcome.rows)])
            for item, outcome, row in zip(items, found, rows, strict=True)
            if not isinstance(outcome, Failure) and not self.rests(item.request)
        ]
        if not known:
            return
        likely = iter(likeliest(logits, [row for _, _, places in known for row in places]))
        for request, tokens, places in known:
            recycled = self._shared(request).recycled
            recycled.collect(request.token_ids, tokens, list(itertools.islice(likely, len(places))))

    def rests(self, request: Request) -> bool:
        """True if the step looked for no guess, because guesses did not pay."""
        own = self._texts.get(request.request_id)
        return own is not None and own.rests

    def finished(self, request: Request) -> None:
        """Forget ``request``; the answer becomes a source for other requests of its salt."""
        own = self._texts.pop(request.request_id, None)
        if own is not None:
            own.shared.earlier.add(request.output_ids)

    def run_largest(self, num_requests: int) -> None:
        """Do nothing: there is nothing to allocate on a device."""

    def _draft(self, request: Request, limit: int, base: StepWork, tokens: float) -> tuple[int, ...]:
        """The guesses for ``request``, beside ``base`` with ``tokens`` tokens on average."""
        self._expected = 0.0
        own = self._texts.get(request.request_id)
        if own is None:
            own = self._texts[request.request_id] = RequestText(self._shared(request))
        known = len(own.text.ids)
        own.text.extend(request.token_ids[known:])
        if own.root is not None:
            self._judge(own.root, own.text.ids[known:])
            own.root = None
        ids = own.text.ids
        places = own.text.find(ids)
        repeats = longest(places) >= LOOK_MATCHING and own.account.tokens > LOOK_LEAST
        own.rests = own.account.is_empty and not repeats
        if own.rests or limit < 1:
            return ()
        earlier = own.shared.earlier.texts
        own.root = Node(
            ids[-1], 1.0, places=[(own.text, places), *((text, text.find(ids)) for text in earlier)]
        )
        own.is_quiet = not self._grow(own, own.root, limit, base, tokens)
        return () if own.is_quiet else in_preorder(own.root)

    def _judge(self, root: Node, tokens: Sequence[int]) -> None:
        """Learn from ``tokens``, which followed the root of a tree."""
        node: Node | None = root
        for token in tokens:
            if node is None or node.guesses is None:
                return
            for guess, kind in node.guesses.items():
                self.chances.learn(kind, right=guess == token)
            node = node.children.get(token)

    def _grow(self, own: RequestText, root: Node, limit: int, base: StepWork, tokens: float) -> int:
        """Add the guesses that pay to the tree; how many."""
        heap: list[Candidate] = []
        order = itertools.count()
        self._add_guesses(own, root, heap, order)
        if not heap:
            return 0
        times = self._times(len(own.text.ids), limit, base)
        worthless = tokens * (times[-1] / times[0] - 1) / (2 * limit)  # half of what a row costs on average
        joined: list[tuple[Node, Node]] = []
        best, least, reached = 0, LEAST_GAIN * tokens / times[0], tokens
        while len(joined) < limit:
            found = self._likeliest(heap)
            if found is None or found[1].chance < worthless:
                break
            parent, latest = found
            parent.children[latest.token] = latest
            joined.append(found)
            reached += latest.chance
            if reached > least * times[len(joined)]:
                best, least = len(joined), reached / times[len(joined)]
                self._expected = reached - tokens
            self._add_guesses(own, latest, heap, order)
        for parent, node in joined[best:]:
            del parent.children[node.token]
        return best

    def _add_guesses(self, own: RequestText, node: Node, heap: list[Candidate], order: Iterator[int]) -> None:
        for guess in self._guesses_after(own, node):
            heapq.heappush(heap, (-guess.chance, next(order), node, guess))

    def _times(self, context: int, limit: int, base: StepWork) -> list[float]:
        """The seconds of the step with 0 to ``limit`` guesses after ``context`` tokens."""
        times, row = [], chunk_work(1, context, rows=1)
        for _ in range(limit + 1):
            times.append(max(self.costs.seconds(base), 1e-9))
            base += row
        return times

    def _likeliest(self, heap: list[Candidate]) -> tuple[Node, Node] | None:
        """Take the likeliest guess that may join the tree, with its parent."""
        while heap:
            _, _, parent, guess = heapq.heappop(heap)
            if self.branches or not parent.children:
                return parent, guess
        return None

    def _guesses_after(self, own: RequestText, node: Node) -> Iterator[Node]:
        """The guesses after ``node``, each with its chance."""
        guesses = node.guesses = {}
        for text, places in node.places:
            source = OWN if text is own.text else EARLIER
            followers = by_token(text, places, node.path if source == OWN else ())
            for token, group in sorted(followers.items(), key=lambda item: longest(item[1]), reverse=True)[
                :FANOUT
            ]:
                if token in guesses:
                    continue
                share = len(group) / len(places)
                length = bisect.bisect_right(LENGTHS, longest(group)) - 1
                kind = (source, length, bisect.bisect_right(SHARES, share), min(len(places), 3))
                after = [(place + 1, matching + 1) for place, matching in group]
                guesses[token] = kind
                yield self._guess(node, token, kind, PRIORS[length] * share, [(text, after)])
        if self.recycles:
            known, likely = own.shared.recycled.after((*own.text.ids[-2:], *node.path)[-2:])
            told = len(guesses)
            for rank, token in enumerate(likely):
                if token not in guesses:
                    guesses[token] = kind = (RECYCLED, known, rank, min(told, 2))
                    yield self._guess(node, token, kind, RECYCLED_PRIORS[known][rank], [])

    def _guess(
        self,
        node: Node,
        token: int,
        kind: Kind,
        prior: float,
        places: Sequence[tuple[Occurrences, list[Place]]],
    ) -> Node:
        chance = node.chance * self.chances.of(kind, prior)
        return Node(token, chance, (*node.path, token), places)


def ahead(own: RequestText | None, most: int) -> int:
    """Steps before the next look for guesses of a request, up to ``most`` where no guess pays."""
    if own is None:
        return 1
    return own.account.rest if own.rests else most if own.is_quiet else 1


def longest(places: Sequence[Place]) -> int:
    """The most matching tokens at any of ``places``, or 0."""
    return max((matching for _, matching in places), default=0)


def by_token(text: Occurrences, places: Sequence[Place], path: Sequence[int]) -> dict[int, list[Place]]:
    """``places`` by the token there; the text goes on with ``path``, for a repetition of a repetition."""
    found: dict[int, list[Place]] = {}
    known = len(text.ids)
    for place, matching in places:
        if place < known + len(path):
            token = text.ids[place] if place < known else path[place - known]
            if token != END:
                found.setdefault(token, []).append((place, matching))
    return found


def in_preorder(root: Node) -> tuple[int, ...]:
    """The draft of a tree, a ``DraftTree`` where it has branches."""
    tokens, depths = list[int](), list[int]()
    stack = list(reversed(root.children.values()))
    while stack:
        node = stack.pop()
        tokens.append(node.token)
        depths.append(len(node.path))
        stack += reversed(node.children.values())
    is_chain = depths == list(range(1, len(depths) + 1))
    return tuple(tokens) if is_chain else DraftTree(tokens, depths)
