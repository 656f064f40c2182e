"""GPTQ and AWQ against rounding on a model with trained weights, judged on text it was not trained on."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from optkit.calibration.samples import calibration_windows
from optkit.capture import capture_directory
from optkit.evaluation.quality import QualityReport, RuntimeLogits, evaluation_windows
from optkit.graph.ir import Graph
from optkit.lowering.lower import lower
from optkit.machine.target import Target, get_target
from optkit.passes import load
from optkit.passes.base import PassContext
from optkit.text.load import load_tokenizer
from tests.support.comparison import compare
from tests.support.trained_model import VOCABULARY, held_out, trained_model

pytestmark = [pytest.mark.soak]
TOKENS, LENGTH = 24_576, 256
SCHEME: dict[str, Any] = {"scheme": "W4A16", "group_size": 64}
TEXT = {"samples": 64, "length": LENGTH}


def measured(graph: Graph, directory: Path, row: str, **options: Any) -> QualityReport:
    """Pass ``row`` on the model, and what it costs on held-out text."""
    target: Target = get_target("cpu")
    context = PassContext(target, partial(calibration_windows, directory=directory, max_length=1024))
    candidate, pass_class = graph.clone(), load(row)
    optimization = pass_class(pass_class.Config.model_validate(SCHEME | options))
    plan = optimization.check(candidate, context)
    assert len(plan.sites) == 6 * 7
    optimization.apply(candidate, plan, context)
    windows = evaluation_windows(load_tokenizer(str(directory)), TOKENS, LENGTH, held_out())
    return compare(RuntimeLogits(lower(graph, target)), RuntimeLogits(lower(candidate, target)), windows)


def test_gptq_and_awq_beat_rounding() -> None:
    directory = trained_model()
    graph = capture_directory(directory)
    rtn = measured(graph, directory, "rtn")
    assert math.log(rtn.reference_ppl.value) < 0.7 * math.log(VOCABULARY)  # it has learnt something
    gptq = measured(graph, directory, "gptq", calibration=TEXT)
    awq = measured(graph, directory, "awq", calibration=TEXT)
    ratios = [report.kl_mean.value / rtn.kl_mean.value for report in (gptq, awq)]
    assert ratios[0] <= 0.65 and ratios[1] <= 0.85, (rtn.kl_mean, gptq.kl_mean, awq.kl_mean)
