"""KV manager: gives requests their blocks, and reuses computed KV.

The manager keeps four tables in agreement: the blocks of the pool (``BlockManager``), the tree of their content
(``PrefixCache``), the host blocks of the offload store (``HostBlockTable``), and the slots and checkpoints of recurrent
states (``StateSlots``).

- **Admission** takes over the blocks of the longest cached prefix; blocks on the host are loaded. At least the last
  token is left to compute, since the logits are needed.
- **Publishing**: a block enters the tree when the block is full and the KV is computed, so a shared block is never
  written again. If the tree has an equal block already, the request goes on below the equal block.
- **Release** (finish, abort, preemption) leaves published blocks cached. A preempted request finds the same blocks
  again, so no "swapping" is needed.
- **Eviction** of a cached block saves the KV to a host block, if there is a store and loading is cheaper than
  computing (``worth_saving``); else the node is dropped.

Pure bookkeeping: copies are listed in ``transfers``, in order, and the engine makes the copies before the model runs.
The order suffices: a block is saved before writing, and loaded before reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from optkit.runtime.kv.blocks import BlockManager
from optkit.runtime.kv.offload import HostBlockTable
from optkit.runtime.kv.prefix_cache import Node, PrefixCache
from optkit.runtime.kv.states import StateSlots
from optkit.runtime.types import ALL_TOKENS, Request, Transfer


class KVManager:
    """Blocks of all requests.

    Args:
        num_blocks, block_size: of the pool.
        cache: None shares nothing and keeps nothing.
        num_host_blocks: of the offload store; needs a ``cache``.
        num_state_slots, num_checkpoints: of ``StateSlots``; no slots for a model without recurrent states.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        cache: PrefixCache | None,
        num_host_blocks: int = 0,
        num_state_slots: int = 0,
        num_checkpoints: int = 0,
    ) -> None:
        if num_host_blocks and num_state_slots:
            raise ValueError("a host block has no room for a recurrent state")
        self.blocks = BlockManager(num_blocks, block_size, self._keep, self._evict)
        self.cache, self.block_size = cache, block_size
        self.host_blocks = HostBlockTable(num_host_blocks if cache is not None else 0)
        self.states = StateSlots(num_state_slots, num_checkpoints if cache is not None else 0, block_size)
        self.worth_saving: Callable[[], bool] = lambda: True
        self.reset_counters()
        self._content: dict[int, Node] = {}  # block -> the node of its content
        self._transfers: list[Transfer] = []

    def cached_tokens(self, request: Request) -> int:
        """Tokens of ``request``, which has no blocks, with cached KV, if admitted now."""
        return len(self._match(request)) * self.block_size

    def admit(self, request: Request, expected_tokens: int, spare: int = 0) -> bool:
        """Allocate blocks for all tokens of ``request``, with the cached KV; False, with nothing changed, without room.

        Args:
            spare: blocks to stay available afterwards.
        """
        if self.states.is_full:
            return False
        found = self._found(request)
        hits = self.states.usable(found)
        present = [node.block for node in hits if node.block is not None]
        need = self.blocks.blocks_for(len(request.token_ids)) - len(present)
        idle = sum(self.blocks.is_cached(block) for block in present)
        if need + spare > self.blocks.num_available - idle:
            return False
        self._take_over(request, hits, present, expected_tokens)
        request.num_computed = len(request.nodes) * self.block_size
        fits = self.blocks.extend(request.block_table, len(request.token_ids), expected_tokens)
        assert fits, "blocks that were counted are gone"
        self.states.assign(request, len(found))
        return True

    def count(self, request: Request) -> None:
        """Count the admission of a new request in the statistics; a preempted request was counted before."""
        if self.cache is not None and request.received.reads_prefix_cache:
            self.num_queries += len(request.token_ids)
            self.num_hits += request.num_computed
            self.states.count(request)

    def reset_counters(self) -> None:
        """Set the counters to 0: tokens looked up and found, blocks saved and loaded."""
        self.num_queries = self.num_hits = self.num_saves = self.num_loads = self.states.num_lost = 0

    def grow(self, request: Request, num_tokens: int, expected_tokens: int) -> bool:
        """Blocks for ``num_tokens`` tokens of ``request``; False, and nothing changed, if there are too few."""
        return self.blocks.extend(request.block_table, num_tokens, expected_tokens)

    def trim(self, request: Request) -> None:
        """Give back the blocks beyond the tokens of ``request``, which were for guesses."""
        need = self.blocks.blocks_for(len(request.token_ids))
        spare = request.block_table[need:]
        del request.block_table[need:]
        self.blocks.free(spare)

    def publish(self, request: Request, num_tokens: int | None = None) -> None:
        """Publish the full blocks of ``request`` in the prefix cache.

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

    def release(self, request: Request) -> None:
        """Free the blocks and the slot of ``request``; published blocks stay cached until the room is needed."""
        self.states.release(request)
        self.blocks.free(request.block_table)
        request.nodes.clear()
        request.num_computed, request.num_shareable, request.sealed = 0, ALL_TOKENS, False

    def distrust(self, request: Request) -> None:
        """Keep the KV of ``request`` from being reused, after a failure."""
        for node in request.nodes:
            self._drop(node)

    def reset(self) -> None:
        """Drop all cached KV, of the pool and of the store. Running requests keep their blocks, and publish no more."""
        for node in self.cache.clear() if self.cache is not None else ():
            self._drop(node)

    def take_transfers(self) -> tuple[Transfer, ...]:
        """The copies to make before the next step of the model, in order."""
        transfers = tuple(self._transfers)
        self._transfers.clear()
        return transfers

    def failed(self, transfer: Transfer) -> None:
        """Record a failed ``transfer``, whose KV is missing."""
        node = (
            self._content.get(transfer.block)
            if not transfer.save
            else self.host_blocks.owner(transfer.host_block)
        )
        if node is not None:
            self._drop(node)

    def check(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError if the tables disagree."""
        requests = list(requests)
        self.blocks.check(request.block_table for request in requests)
        self.states.check(requests)
        self.host_blocks.check()
        for block, node in self._content.items():
            assert node.block == block and self.cache is not None
            assert self.blocks.is_cached(block) == (
                not any(block in request.block_table for request in requests)
            )
        for request in requests:
            assert len(request.nodes) * self.block_size <= request.num_computed

    def _match(self, request: Request) -> list[Node]:
        """The nodes of the longest cached prefix of ``request`` that it can take over, short of all tokens."""
        return self.states.usable(self._found(request))

    def _found(self, request: Request) -> list[Node]:
        """The nodes of the longest prefix of ``request`` with cached KV, short of all tokens."""
        if self.cache is None or not request.received.reads_prefix_cache:
            return []
        salt, size = request.received.cache_salt, self.block_size
        nodes: list[Node] = []
        digests = self.cache.digests(salt, request.token_ids, request.digests)
        for i in range((len(request.token_ids) - 1) // size):
            parent = nodes[-1] if nodes else salt
            node = self.cache.find(digests[i], parent, tuple(request.token_ids[i * size : (i + 1) * size]))
            if node is None:
                break
            nodes.append(node)
        return nodes

    def _take_over(
        self, request: Request, hits: list[Node], present: list[int], expected_tokens: int
    ) -> None:
        """Make the blocks of ``hits`` the beginning of the table of ``request``; blocks on the host are loaded."""
        for block in present:
            self.blocks.share(block)  # first, so that the loads below do not evict them
        for node in hits:
            if node.host_block is not None:
                self.host_blocks.touch(node)
        left = list(present)
        for node in hits:
            if node.block is not None:
                left.remove(node.block)
                request.block_table.append(node.block)
            elif node.host_block is None or not self._load(request, node, node.host_block, expected_tokens):
                break  # the store is so small that making room for the load evicted the content
            request.nodes.append(node)
        self.blocks.free(left)

    def _load(self, request: Request, node: Node, host_block: int, expected_tokens: int) -> bool:
        """Load ``host_block`` into a new block; False if the eviction for the new block replaced the content."""
        self.blocks.extend(
            request.block_table, (len(request.block_table) + 1) * self.block_size, expected_tokens
        )
        if node.host_block != host_block:
            return False
        node.block = request.block_table[-1]
        self._content[node.block] = node
        self._transfers.append(Transfer(node.block, host_block, save=False))
        self.num_loads += 1
        return True

    def _has_full_block(self, request: Request, limit: int) -> bool:
        """True where a block of ``request`` with ``limit`` computed tokens is full and not published."""
        return (
            self.cache is not None
            and not request.sealed
            and (len(request.nodes) + 1) * self.block_size <= min(limit, request.num_shareable)
            and len(request.nodes) < len(request.block_table)  # none after a preemption
        )

    def _is_reachable(self, request: Request, whole: bool) -> bool:
        """False where the tree lost the last node of ``request``, or with ``whole`` any: by a reset or a failure.

        No other request could reach blocks and checkpoints behind a node that is gone.
        """
        nodes = request.nodes if whole else request.nodes[-1:]
        return self.cache is not None and all(node in self.cache for node in nodes)

    def _published(self, request: Request, index: int) -> Node | None:
        assert self.cache is not None
        salt, size, block = request.received.cache_salt, self.block_size, request.block_table[index]
        known = request.token_ids[: request.num_computed]  # later tokens may be pending
        digest = self.cache.digests(salt, known, request.digests)[index]
        parent = request.nodes[-1] if request.nodes else salt
        tokens = tuple(request.token_ids[index * size : (index + 1) * size])
        node = self.cache.find(digest, parent, tokens)
        if node is None:
            if orphan := self.cache.orphan(digest):
                self._drop(orphan)
            node = self.cache.add(digest, parent, tokens, block)
        elif node.block is None:
            node.block = block
        if node is not None and node.block == block:
            self._content[block] = node
        return node

    def _keep(self, block: int) -> bool:
        return block in self._content

    def _evict(self, block: int) -> None:
        node = self._content.pop(block)
        node.block = None
        if node.host_block is None and self.host_blocks.num_host_blocks and self.worth_saving():
            loser = self.host_blocks.take(node)
            if loser is not None and loser.block is None:
                self._drop(loser)
            assert node.host_block is not None
            self._transfers.append(Transfer(block, node.host_block, save=True))
            self.num_saves += 1
        if node.host_block is None:
            self._drop(node)

    def _drop(self, node: Node) -> None:
        """Take ``node`` out of all tables."""
        self.states.drop(node)
        if self.cache is not None:
            self.cache.drop(node)
        if node.host_block is not None:
            self.host_blocks.release(node)
        if node.block is not None:
            block, node.block = node.block, None
            del self._content[block]
            self.blocks.forget(block)
