"""The benchmark of embeddings: texts, bounds, and the command on a tiny model, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.embeddings import __main__ as command
from bench.embeddings import measure
from optkit.lowering.lower import lower
from optkit.runtime.embedding import Embedder
from optkit.runtime.hidden_graph import hidden_graph
from tests.support.fakes import fake_engine
from tests.support.graphs import apply, captured
from tests.support.model_directory import VOCABULARY, save_model
from tests.support.target import TARGET
from tests.support.tiny_tokenizer import tiny_tokenizer


def test_texts_have_the_lengths_in_turn_and_differ() -> None:
    found = measure.texts(tiny_tokenizer())
    count = len(measure.MIXED)
    assert [len(ids) for ids in found[: 2 * count]] == 2 * list(measure.MIXED)
    assert {len(ids) for ids in measure.texts(tiny_tokenizer(), (5,))} == {5}
    assert len({tuple(ids) for ids in found}) == len(found) == 64


def test_missed_bounds_are_named() -> None:
    good = {"float, last: min cosine": 0.99995, "quantized, mean: min cosine": 0.9995, "2 tokens: gain": 3.0}
    assert (
        command.missed_bounds(good | {"quantized, 4 tokens: batch differs": 0, "4 tokens: gain": 1.0}) == []
    )
    bad = {"float, last: min cosine": 0.9998, "2 tokens: gain": 2.9, "quantized, 2 tokens: batch differs": 1}
    assert command.missed_bounds(bad) == [
        "quantized, 2 tokens: batch differs",
        "float, last: min cosine",
        "2 tokens: gain",
    ]


def test_quantized_artifacts_are_told_from_float() -> None:
    graph = captured("llama")
    assert not measure.is_quantized(graph)
    apply(graph, "int8", group_size=32)
    assert measure.is_quantized(graph)


def test_the_command_measures_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a tiny model; the times are those of another machine and say nothing, the cosines hold."""
    model = save_model(tmp_path / "model")
    graph = captured("llama", vocab_size=VOCABULARY, max_position_embeddings=1024)

    class Opened:
        directory = model

        def graph(self) -> Any:
            return graph

    def open_engine(artifact: str) -> Any:
        engine = fake_engine(options={"max_model_len": 128, "num_blocks": 64, "vocab_size": 512})
        engine.make_embedder = lambda: Embedder(lower(hidden_graph(graph), TARGET), 4, 64)
        return engine

    monkeypatch.setattr(command.Artifact, "open", lambda artifact: Opened())
    monkeypatch.setattr(command, "open_engine", open_engine)
    monkeypatch.setattr(measure, "BATCH", 6)
    monkeypatch.setattr(measure, "LENGTHS", (2, 4))
    least = {name: bound for name, bound in command.LEAST.items() if "gain" not in name}
    monkeypatch.setattr(command, "LEAST", least | {"4 tokens: gain": 1e9})
    saved = tmp_path / "result.json"
    argv = ["artifact", "--model", str(model), "--rounds", "1", "--save-result", str(saved)]
    assert command.main(argv) == 1
    result = json.loads(saved.read_text())
    assert result["missed"] == ["4 tokens: gain"] and "MISSED" in capsys.readouterr().out
    assert result["float, mean: min cosine"] > 0.9999 and "float, 2 tokens: batch differs" in result
    with pytest.raises(SystemExit):
        command.main(["artifact"])
