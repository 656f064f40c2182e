"""Block manager: the owners of the blocks of the KV pool.

The KV pool of every attention layer is an array of ``num_blocks`` blocks of ``block_size`` tokens (paged attention,
Kwon et al. 2023). A request owns a list of block numbers, its *block table*: token ``t`` lives in slot ``table[t //
block_size] * block_size + t % block_size``. All layers of a group (``optkit.graph.kv_layout``) use the same table.

A block is in one of four states::

    FREE    in no table
    HELD    free, kept for the growth of a request
    USED    in tables (a reference count); shared blocks are full and never written again
    CACHED  in no table, with KV of the prefix cache; the least recently released block goes first

Free, held and cached blocks are all *available*. Blocks are taken in the following order: the block after the table's
last block, a run of free blocks, a held block, and last the oldest cached block, whose content is lost (``on_evict``
is called before).

Placement matters: for a contiguous, ascending table an attention kernel may read K and V as a *view* of the pool. So
a new table is placed, if possible, where the tokens still to come have room, too: the blocks after the table are
*held*. A held block may still be given to another request.

``reserved`` blocks are promised to requests in prefill and not available to others.

Plain ints, no torch. ``_state`` is a byte per block, so ``bytearray.find`` finds a run of free blocks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

FREE, HELD, USED, CACHED = 0, 1, 2, 3


class BlockManager:
    """A fixed pool of KV blocks and the tables of their owners.

    Args:
        keep: True for a block that becomes CACHED instead of FREE when the last table is freed.
        on_evict: called with a cached block just before the block gets a new owner.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        keep: Callable[[int], bool] = lambda block: False,
        on_evict: Callable[[int], None] = lambda block: None,
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._keep, self._on_evict = keep, on_evict
        self.num_used = self.reserved = 0
        self._state = bytearray(num_blocks)
        self._references = [0] * num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._held_until: dict[int, int] = {}  # first block of a run -> end of the run held with it

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """The number of available blocks: free, held or cached, and not reserved."""
        return self.num_blocks - self.num_used - self.reserved

    def blocks_for(self, num_tokens: int) -> int:
        """The number of blocks for ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def is_cached(self, block: int) -> bool:
        """True for a block with KV in no table."""
        return self._state[block] == CACHED

    def is_private(self, block: int) -> bool:
        """True for a block of one table, whose content nobody else will read."""
        return self._references[block] == 1 and not self._keep(block)

    def recently_cached(self) -> list[int]:
        """The cached blocks, the most recently released first."""
        return list(reversed(self._cached))

    def extend(self, table: list[int], num_tokens: int, expected_tokens: int = 0) -> bool:
        """Grow ``table`` in place until ``num_tokens`` fit; False, with nothing changed, if blocks run out.

        Args:
            expected_tokens: the length that the request may reach; decides only the placement of blocks.
        """
        need = self.blocks_for(num_tokens) - len(table)
        if need <= 0:
            return True
        if need > self.num_available:
            return False
        expected = self.blocks_for(expected_tokens) - len(table)
        for i in range(need):
            block = self._after(table)
            if block is None:
                block = self._place(need - i, expected - i)
            self._take(block)
            table.append(block)
        return True

    def share(self, block: int) -> None:
        """Add a table to the owners of a used or cached ``block``; the caller appends the block."""
        assert self._state[block] in (USED, CACHED), f"block {block} has no content to share"
        if self._state[block] == CACHED:
            del self._cached[block]
            self._state[block] = USED
            self.num_used += 1
        self._references[block] += 1

    def free(self, table: list[int]) -> None:
        """Take ``table`` out of the owners of the blocks and empty the table.

        The last block is released first: of a cached prefix the end is evicted before the beginning.
        """
        for block in reversed(table):
            assert self._references[block] > 0, f"block {block} freed twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._release(block)
        table.clear()

    def forget(self, block: int) -> None:
        """Drop the content of ``block``: a cached block becomes free."""
        if self._state[block] == CACHED:
            del self._cached[block]
            self._state[block] = FREE

    def check(self, tables: Iterable[list[int]]) -> None:
        """Raise AssertionError unless the live ``tables`` own exactly the used blocks, as often as counted."""
        owned = Counter(block for table in tables for block in table)
        assert all(self._state[block] == USED for block in owned), "a table holds a block that is not used"
        assert all(self._references[block] == count for block, count in owned.items()), (
            "a wrong reference count"
        )
        assert len(owned) == self.num_used == self._state.count(USED), "a used block belongs to no table"
        assert all(count == 0 for block, count in enumerate(self._references) if block not in owned)
        assert self._state.count(CACHED) == len(self._cached), "the cached blocks are miscounted"
        assert all(self._state[block] == CACHED for block in self._cached)
        num_free = self._state.count(FREE) + self._state.count(HELD)
        assert num_free + self.num_cached + self.num_used == self.num_blocks

    def _take(self, block: int) -> None:
        assert self._state[block] != USED, f"block {block} taken twice"
        if self._state[block] == CACHED:
            self._on_evict(block)
            del self._cached[block]
        self._state[block] = USED
        self._references[block] = 1
        self.num_used += 1

    def _release(self, block: int) -> None:
        self.num_used -= 1
        if self._keep(block):
            self._state[block] = CACHED
            self._cached[block] = None
        else:
            self._state[block] = FREE
        end = self._held_until.pop(block, 0)
        held = self._state[block:end]
        self._state[block : block + len(held)] = held.replace(bytes([HELD]), bytes([FREE]))

    def _after(self, table: list[int]) -> int | None:
        """The block after the table's last block, if free."""
        block = table[-1] + 1 if table else self.num_blocks
        return block if block < self.num_blocks and self._state[block] in (FREE, HELD) else None

    def _place(self, need: int, expected: int) -> int:
        """The start of a table's next blocks: a free run for all expected blocks, else for the needed blocks."""
        for size in (max(need, expected), need):
            start = self._state.find(bytes(size))
            if start >= 0:
                self._state[start : start + size] = bytes([HELD]) * size
                self._held_until[start] = start + size
                return start
        return self._any()

    def _any(self) -> int:
        """A free block without a holder, else the last held block, else the oldest cached block."""
        block = self._state.find(FREE)
        if block < 0:
            block = self._state.rfind(HELD)
        return block if block >= 0 else next(iter(self._cached))
