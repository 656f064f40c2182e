"""What makes the long evaluation an instrument, and a window of attention as the damage to see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.long.evaluation import faults, windowed
from optkit.evaluation.long.score import LongReport
from optkit.evaluation.quality import Estimate
from optkit.lowering.lower import Executable, lower
from optkit.runtime.logits import RuntimeLogits
from tests.support.architectures import tiny_model
from tests.support.graphs import captured, random_ids


def report(loss: float | None) -> LongReport:
    value = None if loss is None else Estimate(loss, 0.0)
    return LongReport(1, 1, value, Estimate(0.0, 0.0), None, (), {}, {})


@pytest.mark.parametrize(
    ("same", "damaged", "ratio", "words"),
    [
        (0.0, 1.0, 0.01, None),
        (0.1, 1.0, 0.01, "differs from itself"),
        (0.0, 0.2, 0.01, "below 0.5"),
        (0.0, 1.0, -0.2, "logarithm of perplexity"),
        (None, None, 0.0, "no task"),
    ],
)
def test_faults(same: float | None, damaged: float | None, ratio: float, words: str | None) -> None:
    found = faults(report(same), report(damaged), ratio)
    assert found == [] if words is None else words in found[0]


def test_a_window_reaches_the_last_tokens_alone() -> None:
    class Opened:
        directory = Path()

        def executable(self, change: Any) -> Executable:
            return lower(change(captured("llama")))

    window = random_ids([40])[0].tolist()
    (rows,) = RuntimeLogits(windowed(Opened(), 8)).logits([window])  # type: ignore[arg-type]
    model = tiny_model("llama")
    near = (torch.arange(40)[:, None] - torch.arange(40)[None]) < 8
    mask = torch.where(near.tril(), 0.0, -torch.inf)[None, None]
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor([window]), attention_mask=mask, use_cache=False).logits[0]
    torch.testing.assert_close(rows, wanted, atol=1e-4, rtol=1e-4)
