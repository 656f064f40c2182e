"""The quality report of a single candidate."""

from __future__ import annotations

from collections.abc import Sequence

from optkit.evaluation.quality import LogitsSource, QualityReport, compare_many


def compare(
    reference: LogitsSource, candidate: LogitsSource, token_windows: Sequence[Sequence[int]]
) -> QualityReport:
    """Compare ``candidate`` with ``reference``, window by window."""
    return compare_many(reference, {"candidate": candidate}, token_windows)["candidate"]
