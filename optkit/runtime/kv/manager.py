"""KV manager: gives requests their blocks, and reuses computed KV.

The manager keeps eight parts in agreement: the blocks of the pool (``BlockManager``), the block tables of requests
(``BlockTables``), the tree of the content of blocks (``PrefixCache``), the prefixes that are never evicted (``Pins``),
the blocks that stay for a copy (``Leases``), the host blocks of the offload store (``HostBlockTable``), the slots
and checkpoints of recurrent states (``StateSlots``), and the log of changes for routers (``ChangeLog``).

- **Admission** takes over the blocks of the longest cached prefix; blocks on the host are loaded. At least the last
  token is left to compute, since the logits are needed.
- **Publishing**: a block enters the tree when the block is full and the KV is computed, so a shared block is never
  written again. If the tree has an equal block already, the request goes on below the equal block.
- **Release** (finish, abort, preemption) leaves published blocks cached. A preempted request finds the same blocks
  again, so no "swapping" is needed.
- **Eviction** of a cached block saves the KV to a host block, if there is a store and loading is cheaper than
  computing (``worth_saving``); else the KV is lost.
- **Insertion** adds a block computed by another replica (``optkit.runtime.kv.exchange``).

A request has a block table for each group of layers, and a prefix can be taken over where groups without a window have
the KV of all nodes, and each window the KV of the nodes in the window. Blocks before a window are published first and
then given back, so later prompts find the KV.

Pure bookkeeping: copies are listed in ``transfers``, in order, and the engine makes the copies before the model runs.
The order suffices: a block is saved before writing, and loaded before reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from optkit.runtime.kv.blocks import BlockManager
from optkit.runtime.kv.changes import ChangeLog
from optkit.runtime.kv.leases import Leases
from optkit.runtime.kv.offload import HostBlockTable
from optkit.runtime.kv.pins import Pin, PinRefused, Pins
from optkit.runtime.kv.prefix_cache import Node, NodeKV, PrefixCache
from optkit.runtime.kv.states import StateSlots
from optkit.runtime.kv.tables import BlockTables
from optkit.runtime.prefill import NO_ROOM
from optkit.runtime.report import BlockChanges, Mark
from optkit.runtime.types import ALL_TOKENS, NO_BLOCK, BlockCopy, Request, Transfer


class KVManager:
    """Blocks of all requests.

    Args:
        num_blocks, block_size: of the pool.
        cache: None shares nothing and keeps nothing.
        num_host_blocks: of the offload store; needs a ``cache``.
        num_state_slots, num_checkpoints: of ``StateSlots``; no slots for a model without recurrent states.
        windows, tokens_in_flight: of ``BlockTables``.
        max_pinned_blocks: of ``Pins``.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        cache: PrefixCache | None,
        num_host_blocks: int = 0,
        num_state_slots: int = 0,
        num_checkpoints: int = 0,
        windows: Sequence[int] = (0,),
        tokens_in_flight: int = 1,
        max_pinned_blocks: int = 0,
    ) -> None:
        if num_host_blocks and num_state_slots:
            raise ValueError("a host block has no room for a recurrent state")
        if any(windows) and num_state_slots:
            raise ValueError("a recurrent state that is computed again needs the KV before each window")
        self.blocks = BlockManager(num_blocks, block_size, self._keep, self._evict)
        self.cache, self.block_size = cache, block_size
        self.host_blocks = HostBlockTable(num_host_blocks if cache is not None else 0)
        self.states = StateSlots(num_state_slots, num_checkpoints if cache is not None else 0, block_size)
        self.tables = BlockTables(self.blocks, windows, tokens_in_flight)
        self.pins = Pins(self.blocks, self.states, max_pinned_blocks)
        self.leases = Leases(self.blocks)
        self._needed = tuple(self.tables.unlimited)
        self.log = ChangeLog(num_blocks + num_host_blocks)
        self.states.changed = self._note
        self.worth_saving: Callable[[], bool] = lambda: True
        self.reset_counters()
        self._content: dict[int, NodeKV] = {}  # block -> its content
        self._transfers: list[Transfer | BlockCopy] = []

    def cached_tokens(self, request: Request) -> int:
        """Tokens of ``request``, which has no blocks, with cached KV, if admitted now."""
        return len(self._match(request)[0]) * self.block_size

    def admit(self, request: Request, expected_tokens: int, spare: int = 0) -> bool:
        """Give ``request`` blocks for all tokens, with the cached KV; False, with nothing changed, without room.

        Args:
            spare: blocks of each group to stay available afterwards.
        """
        if self.states.is_full:
            return False
        hits, found = self._match(request)
        if not self._makes_room(request, hits, spare):
            return False
        if not self._take_over(request, hits, expected_tokens):
            hits = []
            if not self._has_room(request, hits, spare):
                return False
            self._take_over(request, hits, expected_tokens)
        request.nodes = hits
        request.num_computed = len(hits) * self.block_size
        self.tables.admit(request, expected_tokens)
        self.states.assign(request, found)
        return True

    def count(self, request: Request) -> None:
        """Count the admission of a new request in the statistics; a preempted request was counted before."""
        if self.cache is not None and request.reads_prefix_cache:
            self.num_queries += len(request.token_ids)
            self.num_hits += request.num_computed
            self.states.count(request)

    def reset_counters(self) -> None:
        """Set the counters to 0: tokens looked up and found, blocks saved and loaded."""
        self.num_queries = self.num_hits = self.num_saves = self.num_loads = self.states.num_lost = 0

    def grow(self, request: Request, num_tokens: int, expected_tokens: int) -> bool:
        """Blocks for ``num_tokens`` tokens of ``request``; False, and nothing changed, if there are too few."""
        grown = self.tables.grow(request, num_tokens, expected_tokens)
        return grown or (self.leases.give_way() and self.tables.grow(request, num_tokens, expected_tokens))

    def cover(self, request: Request, num_tokens: int) -> bool:
        """Take reserved blocks for the next chunk of a prefill, up to ``num_tokens`` tokens.

        False where a window has left blocks that stay with others, and there are no others.
        """
        takes = self.tables.windowed or request.rule
        return not takes or self.grow(request, num_tokens, num_tokens)

    def rolls(self, request: Request) -> bool:
        """True where the next token of ``request`` does not see all tokens with a place."""
        rule = request.rule
        return rule is not None and rule.forgotten(request.num_computed) > request.num_forgotten

    def num_sinks(self, request: Request) -> int:
        """The sinks to compute in the next step of ``request``."""
        return request.rule.sinks if request.rule and (request.stale_sinks or self.rolls(request)) else 0

    def roll(self, request: Request) -> None:
        """Forget the tokens of ``request`` that the next token does not see, before the next step.

        Published blocks stay cached. Blocks with a token that has forgotten others are never published.
        """
        if request.rule is None or not self.rolls(request):
            return
        request.sealed = True
        copy = self.tables.roll(request, request.rule.forgotten(request.num_computed))
        if copy is not None:
            self._transfers.append(copy)

    def trim(self, request: Request) -> None:
        """Give back the blocks beyond the tokens of ``request``, which were for guesses."""
        self.tables.trim(request)

    def publish(self, request: Request, num_tokens: int | None = None) -> None:
        """Publish the full blocks of ``request`` in the prefix cache, and give back the blocks before the windows.

        Args:
            num_tokens: tokens with KV for certain, if fewer than ``num_computed``.
        """
        limit = request.num_computed if num_tokens is None else num_tokens
        if not self._is_reachable(request, whole=self._has_full_block(request, limit)):
            request.sealed = True
        while self._has_full_block(request, limit):
            node = self._published(request, len(request.nodes))
            if node is None:  # the digest belongs to another prompt: later blocks could not be found either
                request.sealed = True
            else:
                request.nodes.append(node)
        if not request.sealed:
            self.states.save(request, limit)
        if self.tables.windowed:
            self.tables.slide(request, limit)

    def release(self, request: Request) -> None:
        """Free the blocks and the slot of ``request``; published blocks stay cached until the room is needed."""
        self.states.release(request)
        self.tables.free(request)
        request.nodes.clear()
        request.num_computed, request.num_shareable, request.sealed = 0, ALL_TOKENS, False
        request.num_forgotten, request.stale_sinks = 0, False

    def distrust(self, request: Request) -> None:
        """Keep the KV of ``request`` from being reused, after a failure."""
        for node in request.nodes:
            if self.cache is not None and not self.cache.is_common(node):  # computed and verified before
                self._drop(node)

    def adopt(
        self, name: str, path: Sequence[tuple[tuple[int, ...], Sequence[bool]]], now: float
    ) -> list[NodeKV]:
        """Pin a prefix for all requests, whose KV the caller writes; the places without KV yet, which have a block.

        Args:
            path: tokens of each block, and whether each group of layers has the KV.

        Raises:
            PinRefused: there is no room; blocks without KV are free again.
        """
        assert self.cache is not None
        nodes: list[Node] = []
        new_nodes: list[Node] = []
        new: list[NodeKV] = []
        for tokens, kept in path:
            parent = nodes[-1] if nodes else None
            if self.cache.find_common(parent, tokens) is None:
                new_nodes.append(self.cache.add_common(parent, tokens))
            nodes.append(self.cache.add_common(parent, tokens))
            new += [kv for kv, has in zip(nodes[-1].kv, kept, strict=True) if has and kv.block is None]
        table: list[int] = []
        try:
            if not self.blocks.extend(table, len(new) * self.block_size):
                raise PinRefused(NO_ROOM)
            for kv, block in zip(new, table, strict=True):
                self.put(kv, block)
            blocks = [kv.block for node in nodes for kv in node.kv if kv.block is not None]
            self.pins.add(Pin(name, None, nodes, blocks, now), self.blocks.num_blocks)
        except PinRefused:
            for block in table:
                self._content.pop(block).block = None
            self.blocks.free(table)
            for node in reversed(new_nodes):
                self._drop(node)
            raise
        self.blocks.free(table)  # the pin holds the blocks
        for node in nodes:
            self._note(node)
        return new

    def known(self, parent: Node | str, digest: bytes, tokens: tuple[int, ...]) -> Node | None:
        """The node of ``tokens`` after ``parent``, a node or a salt: of all requests, else of the salt; or None."""
        assert self.cache is not None
        common = self.cache.find_common(parent if isinstance(parent, Node) else None, tokens)
        return common or self.cache.find(digest, parent, tokens)

    def add(self, parent: Node | str, digest: bytes, tokens: tuple[int, ...]) -> Node | None:
        """A new node of the tree after ``parent``; None if the digest belongs to another prompt."""
        assert self.cache is not None
        if orphan := self.cache.orphan(digest):
            self._drop(orphan)
        return self.cache.add(digest, parent, tokens)

    def put(self, kv: NodeKV, block: int) -> None:
        """Record that ``block`` has the KV of ``kv``."""
        kv.block = block
        self._content[block] = kv

    def fill(self, node: Node, blocks: Mapping[int, int]) -> None:
        """Record that ``blocks`` have the KV of ``node``, by group of layers."""
        for group, block in blocks.items():
            self.put(node.kv[group], block)
        self._note(node)

    def pin(self, name: str, request: Request, now: float, end: float | None, most: int) -> int:
        """Pin the published prefix of ``request``; returns its tokens, 0 where nothing of the prefix is cached.

        Args:
            end: the time at which a lease ends; None for a pin without an end.
            most: blocks that pins may hold at this moment.

        Raises:
            PinRefused: there is no room.
        """
        nodes = self._match(request)[0]
        wanted = [kv for kvs in self._wanted(nodes) for kv in kvs]
        blocks = [kv.block for kv in wanted if kv.block is not None]
        if not nodes or len(blocks) < len(wanted):  # a host block may be lost at any time
            return 0
        self.pins.add(Pin(name, request.received.cache_salt, nodes, blocks, now, end), most)
        return len(nodes) * self.block_size

    def pinned_blocks(self, request: Request) -> int:
        """The blocks of pins that ``request``, which has no blocks, takes over and keeps, whatever is evicted.

        Windows slide off their blocks. Windows and recurrent states find a prefix for certain up to the end of a pin.
        """
        if not len(self.pins):
            return 0
        nodes: Sequence[Node] = self._match(request)[0]
        if self.tables.windowed or self.states.num_slots:
            nodes = self.pins.up_to_an_end(nodes)
        return self.pins.shared_by(nodes, self.tables.unlimited)

    def reset(self) -> None:
        """Drop all cached KV, of the pool and of the store, but what is pinned.

        Running requests keep their blocks, and publish no more.
        """
        for node in self.cache.nodes if self.cache is not None else ():
            if node not in self.pins:
                self._drop(node)

    def changes(self, since: Mark) -> BlockChanges:
        """The changes of the held blocks (``optkit.runtime.kv.changes``) after a mark."""
        return self.log.since(since, lambda: (node.digest for node in self.held_nodes()))

    def held_nodes(self) -> list[Node]:
        """The nodes that a prompt can take over."""
        return [node for node in self._nodes if node.is_held]

    def rekey(self, secret: bytes) -> None:
        """Share the digests with other processes of the same ``secret``; before the first request.

        Raises:
            ValueError: as ``PrefixCache.rekey``.
        """
        if self.cache is not None:
            self.cache.rekey(secret)
            self.log.restart()

    def take_transfers(self) -> tuple[Transfer | BlockCopy, ...]:
        """The copies to make before the next step of the model, in order."""
        transfers = tuple(self._transfers)
        self._transfers.clear()
        return transfers

    def failed(self, transfer: Transfer) -> None:
        """Record a failed ``transfer``, whose KV is missing."""
        kv = (
            self._content.get(transfer.block)
            if not transfer.save
            else self.host_blocks.owner(transfer.host_block)
        )
        if kv is not None:
            self._drop(kv.node)

    def recent_nodes(self) -> Iterator[Node]:
        """The nodes with KV in the pool: those in use first, then the most recently used."""
        yield from [kv.node for block, kv in self._content.items() if not self.blocks.is_cached(block)]
        yield from [self._content[block].node for block in self.blocks.recently_cached()]

    def check(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError if the tables disagree."""
        requests = list(requests)
        held = self.tables.check(requests, [*self.pins.tables, *self.leases.tables])
        self.states.check(requests)
        self.host_blocks.check()
        for block, kv in self._content.items():
            assert kv.block == block and self.cache is not None
            assert self.blocks.is_cached(block) == (block not in held)
        self.pins.check(lambda node: self.cache is not None and node in self.cache)
        assert all(node.is_held == self._is_held(node) for node in self._nodes)
        for request in requests:
            assert len(request.nodes) * self.block_size <= request.num_computed

    # -- taking over a cached prefix -------------------------------------------------------------------

    def _match(self, request: Request) -> tuple[list[Node], int]:
        """The nodes of the longest cached prefix to take over for ``request``, short of all tokens.

        The number counts the blocks with cached KV, more than nodes where a recurrent state is missing at the end.
        """
        if self.cache is None or not request.reads_prefix_cache:
            return [], 0
        salt, size = request.received.cache_salt, self.block_size
        nodes: list[Node] = []
        digests = self.cache.digests(salt, request.token_ids, request.digests)
        most = request.rule.num_exact if request.rule else ALL_TOKENS  # later tokens have forgotten others
        for i in range((min(len(request.token_ids), most) - 1) // size):
            tokens = tuple(request.token_ids[i * size : (i + 1) * size])
            node = self._next(nodes, salt, digests[i], tokens)
            if node is None or not all(node.kv[group].is_kept for group in self.tables.unlimited):
                break
            nodes.append(node)
        found = self._last_window(nodes)
        usable = next((n for n in range(found, 0, -1) if self.states.resumes_at(nodes[n - 1])), 0)
        return nodes[:usable], found

    def _next(self, nodes: list[Node], salt: str, digest: bytes, tokens: tuple[int, ...]) -> Node | None:
        """The node of ``tokens`` after the path ``nodes``: of all requests, else of ``salt``; or None."""
        return self.known(nodes[-1] if nodes else salt, digest, tokens)

    def _last_window(self, nodes: list[Node]) -> int:
        """The length of the longest beginning of ``nodes`` at whose end each window has the KV of its nodes."""
        length = len(nodes)
        while length:
            firsts = self.tables.first_blocks(length * self.block_size)
            lost = [
                index
                for group in self.tables.windowed
                for index in range(firsts[group], length)
                if not nodes[index].kv[group].is_kept
            ]
            if not lost:
                break
            length = max(lost)  # the lost node is in the window of each longer one
        return length

    def _wanted(self, hits: list[Node]) -> list[list[NodeKV]]:
        """The KV needed by a request with the prefix ``hits``, for each group."""
        firsts = self.tables.first_blocks(len(hits) * self.block_size)
        return [[node.kv[group] for node in hits[first:]] for group, first in enumerate(firsts)]

    def _has_room(self, request: Request, hits: list[Node], spare: int) -> bool:
        """True where ``request`` fits with the prefix ``hits``, and leaves ``spare`` blocks of each group."""
        present = [[kv.block for kv in kvs if kv.block is not None] for kvs in self._wanted(hits)]
        most = self.tables.most_blocks(self.tables.admitted_tokens(request), len(hits) * self.block_size)
        own = int(request.rule is not None and request.rule.sinks > 0)
        need = own + sum(max(0, count - len(blocks)) for count, blocks in zip(most, present, strict=True))
        idle = sum(self.blocks.is_cached(block) for blocks in present for block in blocks)
        return need + idle + spare * len(most) <= self.blocks.num_available

    def _makes_room(self, request: Request, hits: list[Node], spare: int) -> bool:
        """``_has_room``, at the cost of all leases where there is none beside them."""
        if self._has_room(request, hits, spare):
            return True
        return self.leases.give_way() and self._has_room(request, hits, spare)

    def _take_over(self, request: Request, hits: list[Node], expected_tokens: int) -> bool:
        """Make the blocks of ``hits`` the beginning of the tables of ``request``; blocks on the host are loaded.

        False, with empty tables, where the store is so small that making room for a load evicted the content.
        """
        wanted = self._wanted(hits)
        present = [kv.block for kvs in wanted for kv in kvs if kv.block is not None]
        for block in present:
            self.blocks.share(block)  # first, so that the loads below do not evict them
        for kv in (kv for kvs in wanted for kv in kvs if kv.host_block is not None):
            self.host_blocks.touch(kv)
        self.tables.open(request, len(hits) * self.block_size)
        left = list(present)
        for table, kvs in zip(request.block_tables, wanted, strict=True):
            for kv in kvs:
                if kv.block is not None:
                    left.remove(kv.block)
                    table.append(kv.block)
                elif kv.host_block is None or not self._load(table, kv, kv.host_block, expected_tokens):
                    self.blocks.free(left)
                    self.tables.free(request)
                    return False
        return True

    def _load(self, table: list[int], kv: NodeKV, host_block: int, expected_tokens: int) -> bool:
        """Load ``host_block`` into a new block; False if the eviction for the new block replaced the content."""
        self.blocks.extend(table, (len(table) + 1) * self.block_size, expected_tokens)
        if kv.host_block != host_block:
            return False
        self.put(kv, table[-1])
        self._transfers.append(Transfer(table[-1], host_block, save=False))
        self.num_loads += 1
        return True

    def _has_full_block(self, request: Request, limit: int) -> bool:
        """True where a block of ``request`` with ``limit`` computed tokens is full and not published."""
        return (
            self.cache is not None
            and not request.sealed
            and request.positions is None  # KV of a part of the prompt is no other prompt's
            and (len(request.nodes) + 1) * self.block_size <= min(limit, request.num_shareable)
            and bool(request.block_tables)  # none after a preemption
        )

    def _is_reachable(self, request: Request, whole: bool) -> bool:
        """False where the tree lost the last node of ``request``, or with ``whole`` any: by a reset or a failure.

        No other request could reach blocks and checkpoints behind a node that is gone.
        """
        nodes = request.nodes if whole else request.nodes[-1:]
        return self.cache is not None and all(node in self.cache for node in nodes)

    # -- the tree --------------------------------------------------------------------------------------

    def _published(self, request: Request, index: int) -> Node | None:
        assert self.cache is not None
        salt, size = request.received.cache_salt, self.block_size
        known = request.token_ids[: request.num_computed]  # later tokens may be pending
        digest = self.cache.digests(salt, known, request.digests)[index]
        parent = request.nodes[-1] if request.nodes else salt
        tokens = tuple(request.token_ids[index * size : (index + 1) * size])
        node = self._next(request.nodes, salt, digest, tokens) or self.add(parent, digest, tokens)
        if node is not None and not self.cache.is_common(node):  # no request adds KV for all requests
            for kv, table in zip(node.kv, request.block_tables, strict=True):
                if kv.block is None and table[index] != NO_BLOCK:
                    self.put(kv, table[index])
            self._note(node)
        return node

    def _keep(self, block: int) -> bool:
        return block in self._content

    def _evict(self, block: int) -> None:
        kv = self._content.pop(block)
        kv.block = None
        if kv.host_block is None and self.host_blocks.num_host_blocks and self.worth_saving():
            loser = self.host_blocks.take(kv)
            if loser is not None:
                self._note(loser.node)
                self.wither(loser.node)
            assert kv.host_block is not None
            self._transfers.append(Transfer(block, kv.host_block, save=True))
            self.num_saves += 1
        self._note(kv.node)
        self.wither(kv.node)

    def wither(self, node: Node) -> None:
        """Take ``node`` out of the tree if no group has the KV and no node follows; then the parents likewise."""
        while self.cache is not None and node in self.cache and not any(kv.is_kept for kv in node.kv):
            self.states.drop(node)
            if node.num_children:
                return
            self._drop(node)
            if not isinstance(node.parent, Node):
                return
            node = node.parent

    def _drop(self, node: Node) -> None:
        """Take ``node`` out of all tables, with the pins of ``node``."""
        self.pins.drop_with(node)
        self.states.drop(node)
        if self.cache is not None:
            self.cache.drop(node)
        for kv in node.kv:
            if kv.host_block is not None:
                self.host_blocks.release(kv)
            if kv.block is not None:
                block, kv.block = kv.block, None
                del self._content[block]
                self.blocks.forget(block)
        self._note(node)

    @property
    def _nodes(self) -> Sequence[Node]:
        return self.cache.nodes if self.cache is not None else ()

    def _note(self, node: Node) -> None:
        """Record the node in the log if a prompt can take it over now and could not before, or the reverse."""
        held = self._is_held(node)
        if held != node.is_held:
            self.log.record(node, held)

    def _is_held(self, node: Node) -> bool:
        """True where a prompt can take ``node`` over, as ``optkit.runtime.kv.changes`` defines."""
        if self.states.num_slots:
            return node.checkpoint is not None
        if not self._needed:
            return any(kv.is_kept for kv in node.kv)
        return all(node.kv[group].is_kept for group in self._needed)
