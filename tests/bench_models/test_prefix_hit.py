"""The figure of prefix hits, on tiny models and prompts: equal answers, hits, and what a miss looks like."""

from __future__ import annotations

from typing import Any

import pytest

from bench.models import prefix_hit
from bench.models.kinds import KINDS

SMALL = {"short_convolution": "lfm2", "mamba": "mamba"}


@pytest.mark.parametrize("kind", SMALL)
def test_hits_answer_as_an_empty_cache_and_transformers(kind: str) -> None:
    row = prefix_hit.figure(SMALL[kind], dict(KINDS[kind].fields), length=100, rounds=1)
    assert row["answers that differ"] == 0 and not row["differs from transformers"]
    assert row["least cached"] == 96
    assert len(row["times"]) == 1 and row["times"][0]["again"]["wall"] > 0


def test_late_hits_other_answers_and_lost_checkpoints_are_missed() -> None:
    good: dict[str, Any] = {
        "again, wall": 0.1, "next turn, wall": 0.15, "answers that differ": 0, "differs from transformers": False,
        "least cached": 32,
    }  # fmt: skip
    assert prefix_hit.missed(good) == []
    assert prefix_hit.missed(good | {"again, wall": 0.2}) == ["again, wall"]
    assert prefix_hit.missed(good | {"next turn, wall": float("nan")}) == ["next turn, wall"]
    assert prefix_hit.missed(good | {"least cached": 0, "answers that differ": 1}) == [
        "answers that differ",
        "least cached",
    ]
