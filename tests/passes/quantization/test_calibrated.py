"""Calibrated passes without values, and the calibration text of the tests."""

from __future__ import annotations

from optkit.graph.verify import verify
from optkit.passes import load
from optkit.passes.base import PassContext
from tests.support.correlated import TEXT
from tests.support.graphs import calibration, captured, checked
from tests.support.target import TARGET


def test_calibrated_passes_need_no_text_in_a_dry_run() -> None:
    """Dry runs have shapes only."""
    graph = captured("llama")
    for weight in graph.weights.values():
        weight.value = weight.value.to("meta")
    for row in ("rtn", "gptq", "awq"):
        copy = graph.clone()
        optimization, plan = checked(copy, row, scheme="W4A16", group_size=32)
        assert optimization.apply(copy, plan, PassContext(TARGET)).changed == 14
        verify(copy)


def test_calibration_of_the_tests_has_the_wanted_samples() -> None:
    assert [len(window) for window in calibration(load("gptq").Config(calibration=TEXT).calibration)] == [
        32
    ] * 32
