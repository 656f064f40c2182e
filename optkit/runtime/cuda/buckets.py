"""Which steps run as captured graphs, and how large each graph is.

Two kinds of steps are captured. *Decodes*, one token a sequence: a graph for each of a few batch sizes, chosen by
dynamic programming over how often each size occurs and what it was measured to cost (``optkit.lowering.buckets``).
*Chunks*, any other mix: a graph for each of some token counts, twice: for one prompt alone, which is what a first
token waits for, and for as many sequences as may run, though always fewer than tokens. Four counts an octave, so that
padding adds a tenth to a prompt and not a half. What fits no graph runs eagerly: there the device is busy for longer
than the host takes to launch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from optkit.lowering.buckets import choose_buckets
from optkit.runtime.cuda.layout import StepShape

CHUNK_TOKENS = (128, 192, *range(256, 513, 64), *range(640, 1025, 128), *range(1280, 2049, 256))
MAX_DECODE_BUCKETS = 12


@dataclass(frozen=True)
class Buckets:
    """``decodes``, batch sizes, and ``chunks``, token counts, ascending. ``fit`` says which graph runs a step."""

    decodes: tuple[int, ...]
    chunks: tuple[int, ...]
    max_sequences: int
    blocks: int

    def fit(self, tokens: int, sequences: int, rows: int) -> StepShape | None:
        """The smallest captured shape for a step of so many tokens, sequences and rows of logits; None: run eagerly."""
        if rows > sequences:
            return None
        if tokens == sequences:
            size = at_least(self.decodes, sequences)
            return StepShape(size, size, self.blocks) if size else None
        size = at_least(self.chunks, tokens)
        if size is None:
            return None
        return StepShape(size, 1 if sequences == 1 else self.width(size), self.blocks)

    def width(self, tokens: int) -> int:
        """Sequences of a chunk of ``tokens`` tokens, at most: as many tokens as sequences would be a decode."""
        return min(self.max_sequences, tokens - 1)

    def shapes(self) -> list[StepShape]:
        """All of them, largest first: a later capture fits into the memory of an earlier one."""
        decodes = [StepShape(n, n, self.blocks) for n in self.decodes]
        chunks = [StepShape(n, width, self.blocks) for n in self.chunks for width in {1, self.width(n)}]
        return sorted({*decodes, *chunks}, reverse=True)


def at_least(sizes: Sequence[int], wanted: int) -> int | None:
    """The first of ascending ``sizes`` that is no smaller."""
    place = bisect_left(sizes, wanted)
    return sizes[place] if place < len(sizes) else None


def chunk_sizes(max_tokens: int) -> tuple[int, ...]:
    """Token counts of chunk graphs: as far as a step may be large, and no further than pays."""
    sizes = (*(size for size in CHUNK_TOKENS if size < max_tokens), min(max_tokens, CHUNK_TOKENS[-1]))
    return tuple(size for size in sizes if size > 1)  # one token is a decode


def most_graphs(max_tokens: int) -> int:
    """Graphs that may be captured: decodes with and without sampling filters; chunks that are a whole prompt, the end
    of one, or of many sequences."""
    return 2 * MAX_DECODE_BUCKETS + 3 * len(chunk_sizes(max_tokens))


def likely_batches(max_sequences: int) -> dict[int, float]:
    """How often each decode batch occurs when nothing is known: the smaller, the more often."""
    return {size: 1.0 / size for size in range(1, max_sequences + 1)}


def decode_sizes(
    weights: Mapping[int, float], measure: Callable[[int], float], max_buckets: int = MAX_DECODE_BUCKETS
) -> tuple[int, ...]:
    """Batch sizes to capture: the ends of the buckets of least expected time.

    Args:
        weights: how often each batch size occurs; the largest is served in any case.
        measure: seconds of a step of so many sequences. It is asked for powers of two and the largest; time grows
        slowly
            and evenly between them.
    """
    sizes = sorted(weights)
    probes = [p for p in (1 << i for i in range(sizes[-1].bit_length())) if p < sizes[-1]] + [sizes[-1]]
    measured = [measure(size) for size in sorted(probes, reverse=True)][::-1]
    rising = np.maximum.accumulate(measured)  # noise must not make a smaller batch look dearer
    seconds = dict(zip(sizes, np.interp(sizes, probes, rising).tolist(), strict=True))
    return tuple(bucket.last for bucket in choose_buckets(weights, seconds, max_buckets))
