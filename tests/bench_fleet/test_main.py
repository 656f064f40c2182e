"""The list of figures, and the way to them."""

from __future__ import annotations

import pytest

from bench.fleet.__main__ import figures, main


def test_figures_are_listed_with_what_they_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert "overhead" in figures() and "mock_fleet" not in figures()
    assert main([]) == 0
    assert "overhead" in capsys.readouterr().out
    assert main(["no-such-figure"]) == 2
