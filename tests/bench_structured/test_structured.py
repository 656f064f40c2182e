"""The benchmark of structured output: schemas, the verdict on an answer, bounds, and the command on a tiny engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from bench.structured import __main__ as command
from bench.structured import calls, speed, suite, validity
from bench.structured.schemas import SCHEMAS
from optkit.api.results import Choice, Completion, Completions, ToolCall
from optkit.runtime.types import FinishReason
from tests.support.fakes import fake_engine
from tests.support.tiny_tokenizer import tiny_tokenizer


def test_schemas_are_schemas_of_many_kinds() -> None:
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    words = json.dumps(SCHEMAS)
    for keyword in (
        "anyOf",
        "allOf",
        "$ref",
        "prefixItems",
        "patternProperties",
        "multipleOf",
        "format",
        "const",
    ):
        assert f'"{keyword}"' in words


def test_a_tally_tells_valid_cut_and_wrong_answers_apart() -> None:
    tally = validity.Tally()
    tally.add("flag", SCHEMAS["flag"], "true", FinishReason.STOP)
    tally.add("flag", SCHEMAS["flag"], "tru", FinishReason.LENGTH)
    tally.add("flag", SCHEMAS["flag"], "12", FinishReason.STOP)
    tally.add("flag", SCHEMAS["flag"], "tru", FinishReason.STOP)
    assert (tally.valid, tally.cut, [text for _, text, _ in tally.wrong]) == (1, 1, ["12", "tru"])


def test_missed_bounds_are_named() -> None:
    assert command.missed_bounds({"invalid": 0, "mask p50, us": 59.0, "forced: gain": 1.3}) == []
    assert command.missed_bounds({"invalid": 1, "forced: gain": 1.2}) == ["invalid", "forced: gain"]


def test_the_command_measures_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every part, on a fake model; the numbers are those of another machine and say nothing."""

    class Opened:
        directory = tmp_path

    options = {"vocab_size": 302, "max_model_len": 512, "num_blocks": 512, "max_num_batched_tokens": 64}
    monkeypatch.setattr(command, "open_engine", lambda artifact, **given: fake_engine(options=options))
    monkeypatch.setattr(command.Artifact, "open", lambda artifact: Opened())
    monkeypatch.setattr(command.Tokenizer, "from_directory", lambda directory: tiny_tokenizer())
    monkeypatch.setattr(speed, "TOKENS", 4)
    few: dict[str, Any] = {name: SCHEMAS[name] for name in ("flag", "percent", "constant")}
    monkeypatch.setattr(speed, "SCHEMAS", few)
    monkeypatch.setattr(validity, "SCHEMAS", few)
    drafts = tmp_path / "suite" / "draft7"
    drafts.mkdir(parents=True)
    monkeypatch.setattr(suite, "DRAFTS", {"draft7": suite.DRAFTS["draft7"]})
    instances = [{"data": 7, "valid": True}, {"data": "x", "valid": False}]
    listed = [{"schema": {"enum": [7]}, "tests": instances}, {"schema": {"not": {}}, "tests": instances}]
    (drafts / "some.json").write_text(json.dumps([*listed, {"schema": True, "tests": []}]))
    monkeypatch.setattr(command.optkit, "load", lambda artifact, **options: Called())
    monkeypatch.setattr(speed, "HOSTILE", {"multiples": speed.HOSTILE["multiples of a million"]})
    monkeypatch.setattr(command, "MOST", {"invalid": 0})
    monkeypatch.setattr(command, "LEAST", {"forced: gain": 1e9})
    saved = tmp_path / "result.json"
    argv = ["artifact", "--answers", "6", "--rounds", "1", "--save-result", str(saved), "--calls", "20"]
    assert command.main([*argv, "--suite", str(tmp_path / "suite")]) == 1
    result = json.loads(saved.read_text())
    assert result["missed"] == ["forced: gain"] and "MISSED" in capsys.readouterr().out
    assert result["valid"] == 6 and result["masks"] > 0 and result["hostile"]["multiples"] > 10
    assert result["8 clients: TPOT ratio"] > 0 and result["forced: tokens/s"] > 0
    assert [result[f"suite: {name}"] for name in ("schemas", "supported", "instances", "accepted")] == [
        2,
        1,
        2,
        1,
    ]
    assert result["suite: answers valid"] == 1 and result["suite: wrongly accepted"] == 0
    assert result["neighbours: compared tokens"] > 100 and result["neighbours: changed answers"] == 0
    assert (result["calls: answers"], result["calls: calls"], result["calls: invalid"]) == (20, 20, 0)


class Called:
    """A model whose every answer is a call of the last tool, with arguments that the benchmark's schemas allow."""

    def __enter__(self) -> Called:
        return self

    def __exit__(self, *error: object) -> None: ...

    def chat(self, conversations: list[Any], tools: list[Any], **options: Any) -> Completions:
        arguments = {
            "get_weather": '{"city": "Oslo", "unit": "celsius"}',
            "search": '{"query": "", "limit": 9}',
        }
        name = tools[-1]["function"]["name"]
        return Completions(
            [Completion("", (), (answer(ToolCall("c", name, arguments[name])),)) for _ in conversations]
        )


def answer(*made: ToolCall, text: str = "", reason: str = "tool_calls") -> Choice:
    return Choice(text, (), reason, (), "", made)


def test_calls_are_judged_by_name_number_text_and_schema() -> None:
    good, bad = ToolCall("c", "now", "{}"), ToolCall("c", "now", '{"zone": 1}')
    cut = ToolCall("c", "now", "{")
    assert calls.problem_of(answer(good, good), ["now"], several=True) is None
    assert calls.problem_of(answer(good, cut, reason="length"), ["now"], several=True) is None
    for choice, allowed, several in (
        (answer(good), ["search"], True),
        (answer(good, good), ["now"], False),
        (answer(), ["now"], True),
        (answer(good, text="Well"), ["now"], True),
        (answer(cut), ["now"], True),
        (answer(cut, good, reason="length"), ["now"], True),
        (answer(ToolCall("c", "add", '{"x": 1}')), ["add"], True),
    ):
        assert calls.problem_of(choice, allowed, several) is not None
    assert calls.problem_of(answer(bad), ["now"], several=True) is None  # a schema without properties is open
