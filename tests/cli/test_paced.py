"""Progress outside a terminal: one line a second for each stage, and never without the last one."""

from __future__ import annotations

import time

from optkit.cli.paced import PacedLines


def lines_of(*told: tuple[str, tuple[int, int] | None], seconds: float = 60.0) -> list[str]:
    """What is written of lines that come at once."""
    written: list[str] = []
    lines = PacedLines(written.append, seconds)
    for text, part in told:
        lines(text, part=part)
    lines.flush()
    return written


def test_paced_lines_write_the_first_and_the_last_line_of_a_stage() -> None:
    layers = [("int8: model.layers", (number, 100)) for number in range(100)]
    written = lines_of(
        ("int8: rewriting 7 sites", None), *layers, ("int8: kept, 2.00x", None), ("awq: kept", None)
    )
    assert written == ["int8: rewriting 7 sites", "int8: kept, 2.00x", "awq: kept"]


def test_paced_lines_always_write_estimates() -> None:
    estimate, result = "awq: calibrating on 8 samples, about 3 minutes", "awq: calibrated, in 2 minutes"
    written = lines_of(("awq: rewriting", None), (estimate, None), ("awq: layer", (0, 2)), (result, None))
    assert written == ["awq: rewriting", estimate, result]


def test_paced_lines_write_all_where_time_passes() -> None:
    assert lines_of(("a: 1", None), ("a: layer", (0, 2)), seconds=0) == ["a: 1", "a: layer (1 of 2)"]


def test_paced_lines_write_a_line_that_waits_when_its_second_is_over() -> None:
    written: list[str] = []
    lines = PacedLines(written.append, 0.05)
    lines("a: first")
    lines("a: second")
    end = time.monotonic() + 30
    while len(written) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert written == ["a: first", "a: second"]
