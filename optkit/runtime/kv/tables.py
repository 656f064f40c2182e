"""Block tables of requests: a table for each group of layers (``optkit.graph.kv_layout``), over the blocks of a pool.

A group with a window holds the blocks read by later queries (``optkit.runtime.kv.windows``):

- After each step the blocks before the window are given back (``slide``); ``NO_BLOCK`` stands in the place of each.
- Admission allocates blocks for all known tokens in groups without a window. For a window admission *reserves* the most
  blocks held at once by the prefill, and each chunk takes reserved blocks. So a prefill runs out of blocks only where
  a window has left blocks that stay with a pin or with another request: then there is less to reserve.

A request with a rolling window (``optkit.runtime.kv.rolling``) has one group, and its table has no entry for forgotten
blocks (``roll``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from optkit.runtime.kv.blocks import BlockManager
from optkit.runtime.kv.windows import first_block, widest
from optkit.runtime.types import NO_BLOCK, BlockCopy, Request


class BlockTables:
    """The tables of all requests.

    Args:
        blocks: of the pool.
        windows: the window of each group in tokens; 0 is none.
        tokens_in_flight: the most tokens of a request in steps without results.

    Attributes:
        windowed, unlimited: the numbers of the groups with and without a window.
    """

    def __init__(self, blocks: BlockManager, windows: Sequence[int], tokens_in_flight: int) -> None:
        self.blocks, self.windows = blocks, tuple(windows)
        self.windowed = [group for group, window in enumerate(windows) if window]
        self.unlimited = [group for group, window in enumerate(windows) if not window]
        self._widest = [widest(window, tokens_in_flight, blocks.block_size) for window in windows]

    def first_blocks(self, position: int) -> list[int]:
        """For each group the first block read by a query at ``position``."""
        return [first_block(window, position, self.blocks.block_size) for window in self.windows]

    def most_blocks(self, num_tokens: int, num_cached: int) -> list[int]:
        """The most blocks of each group in a prefill of ``num_tokens`` tokens after a prefix of ``num_cached``."""
        total, firsts = self.blocks.blocks_for(num_tokens), self.first_blocks(num_cached)
        return [min(total - first, most) for first, most in zip(firsts, self._widest, strict=True)]

    def admitted_tokens(self, request: Request) -> int:
        """Tokens of ``request`` with blocks from the admission on."""
        known = len(request.token_ids)
        return min(known, request.rule.num_exact) if request.rule else known

    def open(self, request: Request, num_cached: int) -> None:
        """Give ``request`` tables without blocks, from the first block read after a prefix of ``num_cached`` on."""
        request.first_blocks = self.first_blocks(num_cached)
        request.block_tables = [[NO_BLOCK] * first for first in request.first_blocks]

    def admit(self, request: Request, expected_tokens: int) -> None:
        """Allocate and reserve the blocks of all tokens of ``request``, of which there are enough."""
        request.num_admitted = self.admitted_tokens(request)
        if request.rule and request.rule.sinks:
            fits = self.blocks.extend(request.sink_blocks, self.blocks.block_size)
            assert fits, "a block that was counted is gone"
        for group in self.unlimited:
            fits = self.blocks.extend(request.block_tables[group], request.num_admitted, expected_tokens)
            assert fits, "blocks that were counted are gone"
        self._reserve(request)

    def grow(self, request: Request, num_tokens: int, expected_tokens: int) -> bool:
        """Blocks for ``num_tokens`` tokens of ``request``; False, and nothing changed, if there are too few."""
        num_tokens -= request.num_forgotten
        blocks, need = self.blocks.blocks_for(num_tokens), 0
        for table in request.block_tables:
            need += max(0, blocks - len(table))
        if not need:
            return True
        if need > self.blocks.num_available + request.num_reserved:
            return False
        self._set_reserved(request, 0)
        for table, window in zip(request.block_tables, self.windows, strict=True):
            self.blocks.extend(table, num_tokens, num_tokens if window else expected_tokens)
        self._reserve(request)
        return True

    def trim(self, request: Request) -> None:
        """Give back the blocks beyond the tokens of ``request``."""
        need = self.blocks.blocks_for(len(request.token_ids) - request.num_forgotten)
        if request.num_forgotten:
            need = max(need, self._full_window(request))
        for table in request.block_tables:
            spare = table[need:]
            del table[need:]
            self.blocks.free(spare)

    def slide(self, request: Request, num_tokens: int) -> None:
        """Give back the blocks not read by queries from position ``num_tokens`` on."""
        for group in self.windowed if request.block_tables else ():  # none after a preemption
            table, first = request.block_tables[group], request.first_blocks[group]
            stop = first_block(self.windows[group], num_tokens, self.blocks.block_size)
            if stop > first:
                self.blocks.free(table[first:stop])
                table[first:stop] = [NO_BLOCK] * (stop - first)
                request.first_blocks[group] = stop
        self._reserve(request)

    def roll(self, request: Request, num_forgotten: int) -> BlockCopy | None:
        """Give the first blocks of ``request`` back: ``num_forgotten`` tokens have no place any more.

        The request takes the blocks of a full window for the next tokens, as far as there is room, first from the
        blocks given back. So the memory of a request is the same from then on.

        Returns:
            The copy that makes the block of the sinks, all but the sinks; None without sinks.
        """
        assert request.rule is not None
        count = (num_forgotten - request.num_forgotten) // self.blocks.block_size
        (table,), copy = request.block_tables, None
        request.num_forgotten = num_forgotten
        if request.rule.sinks:
            first = [] if request.sink_blocks else table[:1]  # the block of the sinks from the second time on
            copy = BlockCopy(table[count], (first or request.sink_blocks)[0])
            dropped = table[len(first) : count + 1]
            table[: count + 1] = first or [request.sink_blocks.pop()]
            request.stale_sinks = True
        else:
            dropped, table[:count] = table[:count], []
        full = self._full_window(request)
        while dropped and len(table) < full and self.blocks.is_private(dropped[-1]):
            table.append(dropped.pop())
        self.blocks.free(dropped)
        self.blocks.extend(table, full * self.blocks.block_size)  # dropped blocks may stay with others
        return copy

    def _full_window(self, request: Request) -> int:
        """The blocks that ``request`` keeps once tokens are forgotten."""
        return self.blocks.blocks_for(request.rule.most_seen) if request.rule else 0

    def free(self, request: Request) -> None:
        """Free all blocks of ``request``, the reserved blocks, too."""
        self.blocks.free(request.sink_blocks)
        self._set_reserved(request, 0)
        for table, first in zip(request.block_tables, request.first_blocks, strict=True):
            self.blocks.free(table[first:])
        request.block_tables, request.first_blocks, request.num_admitted = [], [], 0

    def check(self, requests: Iterable[Request], others: Iterable[list[int]] = ()) -> set[int]:
        """The blocks in tables; raise AssertionError if a block is lost, owned twice, or was given back too early.

        Args:
            others: further tables of the pool.
        """
        tables = list(others)
        for request in requests:
            earliest = self.first_blocks(request.num_computed)
            tables.append(request.sink_blocks)
            each = zip(request.block_tables, request.first_blocks, earliest, strict=True)
            for table, first, most in each:
                assert first <= most and set(table[:first]) <= {NO_BLOCK} and NO_BLOCK not in table[first:]
                tables.append(table[first:])
        self.blocks.check(tables)
        assert self.blocks.reserved == sum(request.num_reserved for request in requests)
        assert self.blocks.num_available >= 0
        return {block for table in tables for block in table}

    def _reserve(self, request: Request) -> None:
        """Reserve the most blocks taken by the rest of the prefill, beside the blocks of ``request``."""
        total, missing = self.blocks.blocks_for(request.num_admitted), 0
        for group in self.windowed if request.block_tables else ():
            length, first = len(request.block_tables[group]), request.first_blocks[group]
            if length < total:
                missing += max(0, min(total - first, self._widest[group]) - (length - first))
        missing = min(missing, request.num_reserved + max(0, self.blocks.num_available))
        if missing != request.num_reserved:
            self._set_reserved(request, missing)

    def _set_reserved(self, request: Request, count: int) -> None:
        self.blocks.reserved += count - request.num_reserved
        request.num_reserved = count
