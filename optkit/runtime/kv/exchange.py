"""Exchange of published blocks between the prefix caches of engines with equal layouts.

A transfer of KV is a prefix-cache fill: blocks of a path come in one after another, each becomes a node like a block
computed here, and the request behind the transfer is served as an ordinary hit. Missing blocks are computed.

- **The tokens decide.** The engine in wait of blocks knows the tokens and computes the digests (``Incoming``). Of
  blocks beyond a request (``Adoption``) the sender names tokens and parent, and the digest is computed from both. So a
  sender can give wrong KV, which checksums find, but no KV for a prompt with other tokens, and none of another salt.
- **Published blocks are never written again**, and the bytes are copied while the tables stand still
  (``Engine.turn``). So a copy needs no agreement with a running step, and nothing waits for a slow peer.
- **Leases** keep the blocks of a path from being evicted meanwhile, on both sides, while no request needs the room.

Each group of layers (``optkit.graph.kv_layout``) has KV of its own, and windows need the KV at the end of a prefix
alone. Latent and quantized KV are bytes like all KV. Models with recurrent states take no part: a state is no block,
and KV without the state at the end is of no use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from optkit.runtime.kv.offload import CorruptBlock
from optkit.runtime.kv.prefix_cache import COMMON_SALT, Node, NodeKV

if TYPE_CHECKING:
    from optkit.runtime.engine import Engine

LEASE_SECONDS = 10.0  # of a block without progress
NO_CACHE = "the prefix cache is off"
RECURRENT = "the model has recurrent states, which are no part of blocks"
RANKS = "each of the model's ranks has a part of every block"


@dataclass(frozen=True)
class Wanted:
    """A block of a path: its digest, and the groups of layers whose KV is wanted."""

    digest: bytes
    groups: tuple[int, ...]


@dataclass(frozen=True)
class BlockKV:
    """A published block.

    Attributes:
        before: digest of the block before; of a first block the salt.
        data: the bytes of ``groups``, one after the other.
    """

    before: bytes | str
    tokens: tuple[int, ...]
    groups: tuple[int, ...]
    data: np.ndarray


class BlockExchange:
    """Reads and inserts blocks of ``engine``.

    Attributes:
        block_bytes: of the KV of each group in a block.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.kv = engine, engine.scheduler.kv
        self.block_size = engine.config.block_size
        groups, layout = range(len(engine.config.kv_windows)), getattr(engine.runner, "layout", None)
        self._total = engine.runner.read_block(0).nbytes
        whole = [slice(0, self._total)]
        self._slices = [layout.bytes_of(g, self.block_size) if layout else whole for g in groups]
        self.block_bytes = tuple(sum(part.stop - part.start for part in parts) for parts in self._slices)

    @property
    def refusal(self) -> str | None:
        """The reason why the engine exchanges no blocks, or None."""
        if self.kv.cache is None:
            return NO_CACHE
        if self.engine.runner.num_ranks > 1:
            return RANKS
        return RECURRENT if self.engine.config.num_state_slots else None

    def data_bytes(self, groups: Sequence[int]) -> int:
        """Bytes of the KV of ``groups`` in a block."""
        return sum(self.block_bytes[group] for group in groups)

    def lease_end(self) -> float:
        """The end of a lease that begins or goes on now."""
        return self.engine.scheduler.clock() + LEASE_SECONDS

    def read(self, node: Node, groups: Sequence[int]) -> BlockKV | None:
        """A copy of the KV of ``node`` in ``groups``; None where a group lacks KV. The caller has the turn."""
        rows = [self._row(node.kv[group]) for group in groups]
        parts = [
            row[part]
            for row, g in zip(rows, groups, strict=True)
            if row is not None
            for part in self._slices[g]
        ]
        if any(row is None for row in rows):
            return None
        before = node.parent.digest if isinstance(node.parent, Node) else node.parent
        data = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, np.uint8)
        return BlockKV(before, node.tokens, tuple(groups), data)

    def is_whole(self, node: Node) -> bool:
        """True where the pool has the KV of every hit."""
        return all(node.kv[group].block is not None for group in self.kv.tables.unlimited)

    def _row(self, kv: NodeKV) -> np.ndarray | None:
        """The bytes of a block, from the pool or from the offload store."""
        if kv.block is not None:
            return self.engine.runner.read_block(kv.block)
        if kv.host_block is None or self.engine.store is None:
            return None
        try:
            return self.engine.store.read(kv.host_block)
        except (OSError, CorruptBlock):
            return None

    def insert(self, parent: Node | str, digest: bytes, block: BlockKV, holder: Holder) -> Node | None:
        """The node of ``block`` after ``parent``, a node or a salt; None without room. The caller has the turn.

        Raises:
            ValueError: the block has other groups of layers or another size.
        """
        known_groups = set(range(len(self.block_bytes)))
        if set(block.groups) - known_groups or block.data.nbytes != self.data_bytes(block.groups):
            raise ValueError("a block of another layout")
        kv, tokens = self.kv, block.tokens
        missing = self._missing(kv.known(parent, digest, tokens), block.groups)
        table: list[int] = []
        spare = len(self.engine.scheduler.running) * len(self.block_bytes)  # for the requests to grow into
        if len(missing) + spare > kv.blocks.num_available:
            return None
        kv.blocks.extend(table, len(missing) * self.block_size)
        try:
            self.engine.settle()  # a block that was evicted may have to be saved first
            self._write(block, dict(zip(missing, table, strict=True)))
            node = self._node(parent, digest, tokens)
            if node is None or self._missing(node, block.groups) != missing:  # the eviction changed the tree
                return None
            kv.fill(node, dict(zip(missing, table, strict=True)))
            holder.hold(table)
            return node
        finally:
            kv.blocks.free(table)

    def _node(self, parent: Node | str, digest: bytes, tokens: tuple[int, ...]) -> Node | None:
        """The node of ``tokens``, found or made; None where ``parent`` is gone."""
        cache = self.kv.cache
        if isinstance(parent, Node) and (cache is None or parent not in cache):
            return None
        return self.kv.known(parent, digest, tokens) or self.kv.add(parent, digest, tokens)

    def _missing(self, node: Node | None, groups: Sequence[int]) -> list[int]:
        """The part of ``groups`` without KV in the pool; nothing is added to a prefix of the artifact."""
        cache = self.kv.cache
        if node is not None and cache is not None and cache.is_common(node):
            return []
        return [group for group in groups if node is None or node.kv[group].block is None]

    def _write(self, block: BlockKV, numbers: Mapping[int, int]) -> None:
        """Write the KV of groups of layers into blocks of the pool."""
        start = 0
        for group in block.groups:
            data = block.data[start : start + self.block_bytes[group]]
            start += self.block_bytes[group]
            if group in numbers:
                self.engine.runner.write_block(numbers[group], self._full_row(group, data))

    def _full_row(self, group: int, data: np.ndarray) -> np.ndarray:
        """The bytes of a block over all buffers; zeros outside of the layers of ``group``."""
        if data.nbytes == self._total:
            return data
        row, start = np.zeros(self._total, np.uint8), 0
        for part in self._slices[group]:
            size = part.stop - part.start
            row[part] = data[start : start + size]
            start += size
        return row


class Holder:
    """A lease for the blocks of a transfer. Calls, but for ``close``, are made with the turn."""

    def __init__(self, exchange: BlockExchange) -> None:
        self._exchange, self._leases = exchange, exchange.kv.leases
        with exchange.engine.turn:
            self._lease = self._leases.open(exchange.lease_end())

    def hold(self, blocks: Sequence[int]) -> None:
        """Hold ``blocks``, too."""
        self._leases.hold(self._lease, blocks)

    def renew(self) -> bool:
        """Hold the blocks for another ``LEASE_SECONDS``; False after the end."""
        return self._leases.renew(self._lease, self._exchange.lease_end())

    def close(self) -> None:
        """Let go of the blocks."""
        with self._exchange.engine.turn:
            self._leases.close(self._lease)


class Outgoing:
    """The blocks of a path for another replica, under a lease."""

    def __init__(self, exchange: BlockExchange, wanted: Sequence[Wanted]) -> None:
        self._exchange, self.wanted = exchange, tuple(wanted)
        self._holder, self._num_held = Holder(exchange), 0
        with exchange.engine.turn:
            self._hold()

    def take(self, index: int) -> BlockKV | None:
        """The block ``index``, or None while there is none. The caller has the turn."""
        self._holder.renew()
        self._hold()
        wanted = self.wanted[index]
        node = self._node(wanted)
        return None if node is None else self._exchange.read(node, wanted.groups)

    def close(self) -> None:
        """End the lease."""
        self._holder.close()

    def _hold(self) -> None:
        """Hold the next blocks, as far as there are any."""
        while self._num_held < len(self.wanted):
            wanted = self.wanted[self._num_held]
            node = self._node(wanted)
            if node is None or not all(node.kv[group].is_kept for group in wanted.groups):
                break
            self._holder.hold([kv.block for g in wanted.groups if (kv := node.kv[g]).block is not None])
            self._num_held += 1

    def _node(self, wanted: Wanted) -> Node | None:
        cache = self._exchange.kv.cache
        return None if cache is None else cache.get(wanted.digest)


class Incoming:
    """The blocks of a prompt on the way into the cache, from the first missing block.

    Attributes:
        wanted: the blocks to ask another replica for, in order.
    """

    def __init__(self, exchange: BlockExchange, salt: str, token_ids: Sequence[int]) -> None:
        self._exchange, self._salt = exchange, salt
        self._size = exchange.block_size
        self._count = max(0, len(token_ids) - 1) // self._size
        self._tokens = tuple(token_ids[: self._count * self._size])
        self._path: list[Node] = []
        self._holder = Holder(exchange)
        with exchange.engine.turn:
            self._digests = self._begin()

    def _begin(self) -> list[bytes]:
        """Walk the nodes that are there, hold their blocks, and list the rest."""
        kv, cache = self._exchange.kv, self._exchange.kv.cache
        assert cache is not None
        digests = cache.digests(self._salt, self._tokens, [])
        firsts = kv.tables.first_blocks(self._count * self._size)
        self._places: list[int] = []  # of each wanted block in the path
        wanted: list[Wanted] = []
        node: Node | None = None
        for index, digest in enumerate(digests):
            node = kv.known(self._parent(), digest, self._block(index)) if len(self._path) == index else None
            self._path += [node] if node is not None else []
            needed = [group for group, first in enumerate(firsts) if index >= first]
            missing = tuple(g for g in needed if node is None or not node.kv[g].is_kept)
            if node is not None:
                self._holder.hold([block for g in needed if (block := node.kv[g].block) is not None])
            if missing or node is None:  # before all windows a node without KV
                self._places.append(index)
                wanted.append(Wanted(digest, missing))
        self.wanted = tuple(wanted)
        return digests

    @property
    def num_tokens(self) -> int:
        """The tokens of the whole blocks, cached or not."""
        return len(self._tokens)

    def accept(self, number: int, block: BlockKV) -> bool:
        """Insert the wanted block ``number``; False where there is no room, or a block before is gone.

        Raises:
            ValueError: the block is another than the wanted.
        """
        index, wanted = self._places[number], self.wanted[number]
        if block.tokens != self._block(index) or block.groups != wanted.groups:
            raise ValueError("a block of other tokens or layers")
        with self._exchange.engine.turn:
            self._holder.renew()
            if len(self._path) < index:
                return False
            parent = self._path[index - 1] if index else self._salt
            node = self._exchange.insert(parent, self._digests[index], block, self._holder)
            if node is not None:
                self._path[index:] = [node, *self._path[index + 1 :]]
            return node is not None

    def close(self) -> None:
        """End the lease; the blocks stay cached, as the most recently used."""
        with self._exchange.engine.turn:
            self._holder.close()
            if self._path:
                self._exchange.kv.wither(self._path[-1])

    def _parent(self) -> Node | str:
        return self._path[-1] if self._path else self._salt

    def _block(self, index: int) -> tuple[int, ...]:
        return self._tokens[index * self._size : (index + 1) * self._size]


class Adoption:
    """Blocks of any prompts, given by a leaving replica, on the way into the cache."""

    def __init__(self, exchange: BlockExchange) -> None:
        self._exchange, self._holder = exchange, Holder(exchange)

    def accept(self, block: BlockKV) -> bool:
        """Insert ``block``; False without room, or where the block before is not there.

        Raises:
            ValueError: a block of another size, or of the prefixes of the artifact.
        """
        exchange, cache = self._exchange, self._exchange.kv.cache
        assert cache is not None
        if len(block.tokens) != exchange.block_size or block.before == COMMON_SALT:
            raise ValueError("a block that can't be adopted")
        with exchange.engine.turn:
            self._holder.renew()
            parent: Node | str | None = (
                block.before if isinstance(block.before, str) else cache.get(block.before)
            )
            if parent is None:
                return False
            if isinstance(parent, Node):
                digest = cache.digests("", block.tokens * 2, [parent.digest])[1]
            else:
                digest = cache.digests(parent, block.tokens, [])[0]
            return exchange.insert(parent, digest, block, self._holder) is not None

    def close(self) -> None:
        """End the lease."""
        self._holder.close()


def hot_paths(exchange: BlockExchange, num_bytes: int) -> Iterator[Node]:
    """The most recently used nodes, each after its parent, with at most ``num_bytes`` of KV. The caller has the turn.

    Prefixes of the artifact are left out, with all later nodes: a node there does not know the salt.
    """
    seen: set[Node] = set()
    for node in exchange.kv.recent_nodes():
        path: list[Node] = []
        step: Node | str = node
        while isinstance(step, Node) and step not in seen:
            path.append(step)
            step = step.parent
        if step == COMMON_SALT:
            continue
        for each in takewhile(exchange.is_whole, reversed(path)):
            num_bytes -= exchange.data_bytes(kept_groups(each))
            if num_bytes < 0:
                return
            seen.add(each)
            yield each


def kept_groups(node: Node) -> tuple[int, ...]:
    """The groups of layers with KV of ``node`` in the pool."""
    return tuple(group for group, kv in enumerate(node.kv) if kv.block is not None)
