"""Buckets of captured steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from optkit.runtime.cuda.buckets import Buckets, chunk_sizes, decode_sizes, likely_batches
from optkit.runtime.cuda.layout import StepShape


def test_buckets_fit_the_smallest_graph_and_leave_the_rest_eager() -> None:
    buckets = Buckets((1, 4, 8), (128, 512), 8, 16)
    assert buckets.fit(3, 3, 3) == StepShape(4, 4, 16)
    assert buckets.fit(100, 1, 1) == StepShape(128, 1, 16)
    assert buckets.fit(100, 2, 2) == StepShape(128, 8, 16)
    assert buckets.fit(129, 2, 0) == StepShape(512, 8, 16)
    assert buckets.fit(513, 1, 1) is None
    assert buckets.fit(10, 1, 5) is None  # logits of a whole prompt
    assert replace(buckets, max_sequences=256).fit(100, 2, 2) == StepShape(128, 127, 16)
    assert buckets.shapes()[0] == StepShape(512, 8, 16)
    assert buckets.shapes() == sorted(buckets.shapes(), reverse=True)


def test_decode_sizes_serve_every_batch_with_few_graphs() -> None:
    sizes = decode_sizes(likely_batches(64), lambda n: 1.0 + max(0, n - 16) / 8, max_buckets=6)
    assert sizes[-1] == 64 and len(sizes) <= 6
    assert 16 in sizes  # up to there a larger batch costs nothing
    assert decode_sizes({1: 1.0}, lambda n: 1.0) == (1,)
    assert chunk_sizes(600) == (128, 192, 256, 320, 384, 448, 512, 600)
    assert chunk_sizes(8192)[-1] == 2048 and chunk_sizes(1) == () and chunk_sizes(2) == (2,)
    assert all(after <= 1.5 * before for before, after in pairwise(chunk_sizes(8192)))


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 600))
def test_only_decodes_have_the_shape_of_one(tokens: int, sequences: int, most: int) -> None:
    """Kernels see shapes alone: a padded chunk with no more tokens than sequences would lose all but one of each."""
    sequences = min(tokens, sequences)
    buckets = Buckets(tuple(range(1, 301)), chunk_sizes(most), 300, 4)
    shape = buckets.fit(tokens, sequences, sequences)
    if shape is not None:
        assert shape.is_decode == (tokens == sequences)
        assert shape.tokens >= tokens and shape.sequences >= sequences and shape in buckets.shapes()
    else:
        assert tokens > min(most, 2048)
