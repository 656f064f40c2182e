"""The list of figures of a package, and the way to them."""

from __future__ import annotations

import pytest

import bench.fleet
from bench.figures import figures, run


def test_figures_are_listed_with_what_they_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert "overhead" in figures(bench.fleet) and "mock_fleet" not in figures(bench.fleet)
    assert run(bench.fleet, []) == 0
    assert "overhead" in capsys.readouterr().out
    assert run(bench.fleet, ["no-such-figure"]) == 2
