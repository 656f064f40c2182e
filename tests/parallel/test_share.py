"""Shares: every element belongs to one rank, and borders are whole units."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from optkit.parallel.share import Share, merged

SHARES = st.builds(
    lambda units, unit: Share(1, tuple(u * unit for u in units), unit),
    st.lists(st.integers(8, 40), min_size=1, max_size=3),
    st.integers(1, 64),
)


@given(SHARES, st.integers(1, 8))
def test_every_element_belongs_to_one_rank_in_whole_units(share: Share, size: int) -> None:
    owned = [
        i for rank in range(size) for start, stop in share.ranges(rank, size) for i in range(start, stop)
    ]
    assert sorted(owned) == list(range(sum(share.parts)))
    assert share.fits(size)
    for rank in range(size):
        assert all(n % share.unit == 0 and n > 0 for n in share.sizes(rank, size))
        assert share.local(rank, size) == sum(stop - start for start, stop in share.ranges(rank, size))


@given(SHARES, st.integers(1, 8), st.integers(1, 96))
def test_an_aligned_share_has_the_same_borders_at_multiples(share: Share, size: int, step: int) -> None:
    found = share.aligned(step, size)
    if found is not None:
        assert found.unit % step == 0
        for rank in range(size):
            assert found.ranges(rank, size) == share.ranges(rank, size)
            assert all(edge % step == 0 for edges in found.ranges(rank, size)[:1] for edge in edges)


@given(SHARES, st.integers(1, 8), st.integers(1, 8))
def test_heads_and_their_channels_have_matching_borders(share: Share, size: int, dim: int) -> None:
    channels = share.multiplied(dim, 1)
    assert channels.divided(dim) == share
    for rank in range(size):
        assert channels.ranges(rank, size) == tuple((dim * a, dim * b) for a, b in share.ranges(rank, size))


def test_unlike_shares_have_nothing_in_common() -> None:
    a, b = Share(1, (8,), 1, frozenset("a")), Share(1, (8,), 1, frozenset("b"), fixed=True)
    assert merged([a, b]) == Share(1, (8,), 1, frozenset("ab"), fixed=True)
    assert merged([a, Share(1, (8,), 2)]) is None
    assert merged([a, Share(2, (8,))]) is None
