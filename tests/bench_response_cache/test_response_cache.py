"""The benchmark of the response cache: its requests, its bounds, and the command on a fake engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.response_cache import __main__ as command
from bench.response_cache import measure
from tests.support.serve_fakes import FakeEngine, prompt_of, served, tiny_app


def test_no_two_requests_are_the_same() -> None:
    asked = list(measure.calls())
    found = [json.dumps(call) for call in [*asked, *measure.others(asked)]]
    assert len(found) == len(set(found)) == 200


def test_values_of_a_computation_are_not_compared() -> None:
    assert measure.without_own(b'{"id":"a","created":17,"b":{"cached_tokens":3}}') == (
        b'{"id":"a","created":0,"b":{"cached_tokens":0}}'
    )


@pytest.mark.parametrize("changes", [True, False])
def test_the_command_measures_and_saves(
    changes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server whose answers change with each computation misses the bound on fresh ones."""
    engine = FakeEngine()
    engine.script = lambda request: f"{len(engine.requests) if changes else ''} {prompt_of(request)}"
    app = tiny_app(engine, response_cache_bytes=2**24, max_queue=999)

    @contextmanager
    def running(command: list[str], port: int) -> Iterator[str]:
        assert command[-2:] == ["--response-cache", "64MiB"]
        with served(app) as url:
            yield url

    monkeypatch.setattr(command, "running", running)
    monkeypatch.setattr(command, "MOST", command.MOST | {"hit p50, ms": 1000.0})
    saved = tmp_path / "result.json"
    code = command.main(["artifact", "--rounds", "1", "--save-result", str(saved)])
    result: dict[str, Any] = json.loads(saved.read_text())
    assert result["not answered by the cache"] == 0 and result["pairs across keys"] == 10_000
    assert result["hits across keys"] == 0 and len(result["hits, ms"]) == 100
    assert (code, result["missed"]) == ((1, ["hits unlike fresh answers"]) if changes else (0, []))
    assert ("MISSED" in capsys.readouterr().out) == changes
