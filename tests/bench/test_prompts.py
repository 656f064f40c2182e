"""Shared prefixes are shared exactly as far as the workload says, within a round and not between rounds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.bench.prompts import PromptSource, of_trace, with_prefixes
from optkit.bench.traces import TraceRow, block_len
from optkit.errors import UserError

IDS = [int(x) for x in np.random.default_rng(0).integers(0, 3000, 20_000)]


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that two prompts have in common from the start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(st.integers(2, 12), st.integers(1, 40), st.integers(1, 60), st.integers(1, 4), st.integers(0, 3))
def test_prompts_share_their_prefix_and_nothing_else(
    count: int, length: int, prefix_len: int, prefixes: int, round_: int
) -> None:
    prompts = with_prefixes(PromptSource(IDS, 1, round_), count, length, prefix_len, prefixes)
    assert {len(prompt) for prompt in prompts} == {prefix_len + length}
    for (i, a), (j, b) in itertools.combinations(enumerate(prompts), 2):
        assert common(a, b) == (prefix_len if i % prefixes == j % prefixes else 0)
    later = with_prefixes(PromptSource(IDS, 1, round_ + 1), count, length, prefix_len, prefixes)
    assert all(common(a, b) == 0 for a in prompts for b in later)


@st.composite
def rows(draw: st.DrawFn) -> list[TraceRow]:
    """Rows whose hashes form a tree, as in a trace: a hash has the same hashes before it everywhere."""
    paths: list[tuple[int, ...]] = [()]
    found = []
    for number in range(draw(st.integers(1, 8))):
        parent = draw(st.sampled_from(paths))
        path = (*parent, 100 + number)
        paths.append(path)
        found.append(TraceRow(0.0, 512 * len(path) - draw(st.integers(0, 511)), 1, path))
    return found


@given(rows(), st.sampled_from([1.0, 1 / 8, 1 / 32]), st.integers(0, 2))
def test_hashes_of_a_trace_become_shared_prefixes(trace: list[TraceRow], scale: float, round_: int) -> None:
    prompts = of_trace(PromptSource(IDS, 0, round_), trace, scale)
    assert [len(p) for p in prompts] == [max(1, round(row.input_len * scale)) for row in trace]
    size = block_len(scale)
    for (a, x), (b, y) in itertools.combinations(zip(prompts, trace, strict=True), 2):
        shared = common(x.hash_ids, y.hash_ids) * size
        assert common(a, b) == min(shared, len(a), len(b))


def test_a_trace_without_hashes_shares_nothing() -> None:
    prompts = of_trace(PromptSource(IDS, 0, 0), [TraceRow(0.0, n, 1) for n in (5, 9, 9, 1)], 1.0)
    assert [len(p) for p in prompts] == [5, 9, 9, 1]
    assert len({p[0] for p in prompts}) == 4


def test_too_little_text_is_a_user_error() -> None:
    with pytest.raises(UserError, match="needs 512"):
        of_trace(PromptSource(IDS[:100], 0, 0), [TraceRow(0.0, 512, 1, (3,))], 1.0)
    with pytest.raises(UserError, match="distinct prompts"):
        with_prefixes(PromptSource(list(range(30)), 0, 0), 20, 4, 4, 11)
