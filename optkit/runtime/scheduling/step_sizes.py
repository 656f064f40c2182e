"""Counts of steps by their size, for the histogram of tokens a step in ``/metrics``."""

from __future__ import annotations

import bisect

STEP_EDGES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens; vLLM's buckets


class StepSizes:
    """Numbers of steps with at most ``STEP_EDGES[i]`` tokens, more than the edge before; the last bucket has no edge.

    Attributes:
        counts: steps in each bucket.
        total: tokens of all steps.
    """

    def __init__(self) -> None:
        self.counts, self.total = [0] * (len(STEP_EDGES) + 1), 0

    def add(self, num_tokens: int) -> None:
        """Count a step; a step without tokens does not count."""
        if num_tokens:
            self.counts[bisect.bisect_left(STEP_EDGES, num_tokens)] += 1
            self.total += num_tokens
