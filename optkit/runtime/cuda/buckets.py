"""Buckets: the shapes of captured steps.

Two kinds of steps are captured. *Decodes*, a token per sequence: a graph for each of a few batch sizes, chosen by
dynamic programming over the frequency and the measured cost of each size (``optkit.lowering.buckets``). *Chunks*, any
other mix: two graphs for each of some token counts, the first for a prompt alone, which decides the time to first
token, the second for as many sequences as may run, but fewer than tokens. Four counts an octave keep the padding of a
prompt near a tenth. A step without a graph runs eagerly: the device is then busy for longer than the host takes
to launch.
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
    """``decodes``, batch sizes, and ``chunks``, token counts, ascending. ``fit`` returns the graph of a step."""

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
        """All shapes, largest first: a later capture fits into the memory of the captures before."""
        decodes = [StepShape(n, n, self.blocks) for n in self.decodes]
        chunks = [StepShape(n, width, self.blocks) for n in self.chunks for width in {1, self.width(n)}]
        return sorted({*decodes, *chunks}, reverse=True)


def at_least(sizes: Sequence[int], wanted: int) -> int | None:
    """The smallest of ascending ``sizes`` from ``wanted`` on."""
    place = bisect_left(sizes, wanted)
    return sizes[place] if place < len(sizes) else None


def chunk_sizes(max_tokens: int) -> tuple[int, ...]:
    """Token counts of chunk graphs, up to the largest step and the largest of ``CHUNK_TOKENS``."""
    sizes = (*(size for size in CHUNK_TOKENS if size < max_tokens), min(max_tokens, CHUNK_TOKENS[-1]))
    return tuple(size for size in sizes if size > 1)  # one token is a decode


def most_graphs(max_tokens: int) -> int:
    """Most graphs to capture: decodes with and without filters; chunks of whole prompts, of ends, of many sequences."""
    return 2 * MAX_DECODE_BUCKETS + 3 * len(chunk_sizes(max_tokens))


def likely_batches(max_sequences: int) -> dict[int, float]:
    """Assumed frequencies of decode batches: the smaller, the more frequent."""
    return {size: 1.0 / size for size in range(1, max_sequences + 1)}


def decode_sizes(
    weights: Mapping[int, float], measure: Callable[[int], float], max_buckets: int = MAX_DECODE_BUCKETS
) -> tuple[int, ...]:
    """Batch sizes to capture: the ends of the buckets of least expected time.

    Args:
        weights: frequency of each batch size; the largest size is always served.
        measure: seconds of a step of a number of sequences. Called for powers of two and the largest size; time grows
            slowly and evenly between them.
    """
    sizes = sorted(weights)
    probes = [p for p in (1 << i for i in range(sizes[-1].bit_length())) if p < sizes[-1]] + [sizes[-1]]
    measured = [measure(size) for size in sorted(probes, reverse=True)][::-1]
    rising = np.maximum.accumulate(measured)  # noise must not make a smaller batch look dearer
    seconds = dict(zip(sizes, np.interp(sizes, probes, rising).tolist(), strict=True))
    return tuple(bucket.last for bucket in choose_buckets(weights, seconds, max_buckets))
