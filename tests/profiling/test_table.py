"""The texts of rows."""

from __future__ import annotations

import pytest

from optkit.kernels.cpu import native
from optkit.profiling.report import OpRow
from optkit.profiling.table import COLUMNS, cells, machine, summary
from tests.support.recorded import tiny_report

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))


def test_cells_have_the_order_of_the_columns() -> None:
    phase = tiny_report().phases[0]
    row = OpRow("layers.*.mlp.up_proj", "linear", "torch", 3, phase.seconds / 4, phase.seconds / 8, "memory")
    found = dict(zip(COLUMNS, cells(row, phase), strict=True))
    assert (found["layers"], found["of step"], found["of roof"], found["bound"]) == (
        "3",
        "25.0%",
        "50%",
        "memory",
    )
    assert found["lost"] == f"{phase.seconds / 8 * 1e3:.3f} ms"
    part = dict(zip(COLUMNS, cells(OpRow("sampling", "", "-", 1, 0.001), phase), strict=True))
    assert (part["roof"], part["of roof"], part["layers"], part["lost"]) == ("", "", "", "1.000 ms")


def test_words_have_the_roofs_and_the_spread() -> None:
    report = tiny_report()
    assert "10.0 GB/s" in machine(report) and "400 Gop/s int8" in machine(report)
    assert "median of 2 steps" in summary(report.phases[0]) and "roof" in summary(report.phases[0])
