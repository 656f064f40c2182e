"""Block manager: who owns which blocks of the KV pool.

The KV pool of every attention layer is an array of ``num_blocks`` blocks of ``block_size`` tokens (paged
attention, Kwon et al. 2023). A sequence owns a list of block numbers, its *block table*: token ``t`` lives in
slot ``table[t // block_size] * block_size + t % block_size``. One table serves all layers.

Why the placement matters: when a table is contiguous and ascending, the attention kernel reads K and V as a
*view* of the pool; a scattered table costs a gather at every step. So a new sequence is placed, if it can be,
where the tokens it may still produce have room too: the blocks after it are *held*. Holding is a preference and
never a promise: held blocks count as free, and are taken when nothing else is left.

Plain ints, no torch. ``_state`` is one byte per block, so a run of free blocks is found with ``bytearray.find``.
A prefix cache would turn USED into a reference count; only ``_take`` and ``free`` would change.
"""

from __future__ import annotations

from collections.abc import Iterable

FREE, HELD, USED = 0, 1, 2


class BlockManager:
    """A fixed pool of KV blocks and the tables that own them."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.num_used = 0
        self._state = bytearray(num_blocks)
        self._held_until: dict[int, int] = {}  # first block of a table -> end of the run held for it

    @property
    def num_free(self) -> int:
        return self.num_blocks - self.num_used

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks ``num_tokens`` tokens need."""
        return -(-num_tokens // self.block_size)

    def extend(self, table: list[int], num_tokens: int, expected_tokens: int = 0) -> bool:
        """Grow ``table`` in place until ``num_tokens`` fit; False, and nothing changed, if blocks run out.

        ``expected_tokens`` is how long the sequence may become; it only steers where a new table is placed.
        """
        need = self.blocks_for(num_tokens) - len(table)
        if need > self.num_free:
            return False
        for i in range(need):
            block = self._next(table) if table else self._place(need - i, self.blocks_for(expected_tokens))
            self._take(block)
            table.append(block)
        return True

    def free(self, table: list[int]) -> None:
        """Give all blocks of ``table`` back and empty it."""
        if not table:
            return
        end = self._held_until.pop(table[0], 0)
        for block in table:
            assert self._state[block] == USED, f"block {block} freed twice"
            self._state[block] = FREE
        self.num_used -= len(table)
        held = self._state[table[0] : end]
        self._state[table[0] : table[0] + len(held)] = held.replace(bytes([HELD]), bytes([FREE]))
        table.clear()

    def check(self, tables: Iterable[list[int]]) -> None:
        """Raise AssertionError unless the live ``tables`` own exactly the used blocks, each once."""
        owned = [block for table in tables for block in table]
        assert len(owned) == len(set(owned)), "a block is owned twice"
        assert all(self._state[block] == USED for block in owned), "a table holds a free block"
        assert len(owned) == self.num_used == self._state.count(USED), "a used block belongs to no table"
        assert self.num_free + self.num_used == self.num_blocks

    def _take(self, block: int) -> None:
        assert self._state[block] != USED, f"block {block} taken twice"
        self._state[block] = USED
        self.num_used += 1

    def _place(self, need: int, expected: int) -> int:
        """First block of a new table: the first run that fits all it may need, else what it needs now."""
        for size in (max(need, expected), need):
            start = self._state.find(bytes(size))
            if start >= 0:
                self._state[start : start + size] = bytes([HELD]) * size
                self._held_until[start] = start + size
                return start
        return self._any()

    def _next(self, table: list[int]) -> int:
        """The block after the table's last one if it can be had, else any."""
        block = table[-1] + 1
        return block if block < self.num_blocks and self._state[block] != USED else self._any()

    def _any(self) -> int:
        """A free block that nobody hopes for, else the last held one."""
        block = self._state.find(FREE)
        return block if block >= 0 else self._state.rfind(HELD)
