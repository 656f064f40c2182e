"""Leases keep blocks from eviction, for a while, and never from a request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from optkit.runtime.kv.blocks import BlockManager
from optkit.runtime.kv.leases import Lease, Leases


def pool(size: int = 6) -> tuple[BlockManager, Leases]:
    """A pool whose blocks are all cached, block 0 the oldest."""
    blocks = BlockManager(size, 4, keep=lambda block: True)
    for number in range(size):
        table: list[int] = []
        blocks.extend(table, 4)
        assert table == [number]
        blocks.free(table)
    return blocks, Leases(blocks)


def test_a_leased_block_is_not_evicted_and_is_the_newest_afterwards() -> None:
    blocks, leases = pool()
    lease = leases.open(end=10.0)
    leases.hold(lease, [0, 1])
    table: list[int] = []
    assert blocks.extend(table, 4 * 4) and not {0, 1} & set(table)
    assert not blocks.extend(table, 4 * 5)
    leases.close(lease)
    leases.close(lease)
    assert blocks.recently_cached() == [0, 1]  # the first of a path goes last


def test_a_lease_ends_by_itself_unless_renewed() -> None:
    blocks, leases = pool()
    first, second = leases.open(end=10.0), leases.open(end=10.0)
    leases.hold(first, [0])
    leases.hold(second, [0, 1])
    assert leases.renew(second, 20.0)
    leases.expire(10.0)
    assert not leases.renew(first, 30.0) and leases.tables == [[0, 1]]
    leases.hold(first, [2])  # too late
    assert first.blocks == [] and blocks.is_cached(2)
    assert leases.give_way() and not leases.give_way()
    blocks.check([])


@given(st.lists(st.tuples(st.sampled_from(["open", "hold", "close", "expire", "way"]), st.integers(0, 7))))
def test_blocks_are_held_as_often_as_leased(calls: list[tuple[str, int]]) -> None:
    blocks, leases = pool(8)
    opened: list[Lease] = []
    for call, number in calls:
        if call == "open":
            opened.append(leases.open(end=float(number)))
        elif call == "hold" and opened:
            leases.hold(opened[number % len(opened)], [number])
        elif call == "close" and opened:
            leases.close(opened[number % len(opened)])
        elif call == "expire":
            leases.expire(float(number))
        elif call == "way":
            leases.give_way()
        blocks.check(leases.tables)
    leases.give_way()
    assert len(leases) == 0 and blocks.num_used == 0
