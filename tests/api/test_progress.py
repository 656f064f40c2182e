"""Events of progress."""

from __future__ import annotations

from optkit.api.progress import ProgressEvent, lines_to


def test_an_event_has_stage_detail_and_a_readable_text() -> None:
    event = ProgressEvent("gptq: model.layers.0", (3, 30))
    assert (event.stage, event.detail) == ("gptq", "model.layers.0")
    assert str(event) == "gptq: model.layers.0 (3 of 30)"
    assert (ProgressEvent("writing").stage, ProgressEvent("writing").detail) == ("writing", "")


def test_lines_become_events_and_nothing_without_a_callback() -> None:
    events: list[ProgressEvent] = []
    progress = lines_to(events.append)
    progress("one")
    progress("two", part=(1, 2))
    assert events == [ProgressEvent("one"), ProgressEvent("two", (1, 2))]
    lines_to(None)("three")
