"""Figures of trees of guesses on a fake engine; their numbers say nothing here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.long import _answers, generation, tree
from optkit.runtime.sampling.recycling import Recycled
from optkit.runtime.sampling.tree_speculator import TreeSpeculator
from optkit.runtime.types import SamplingParams
from tests.support.fakes import fake_engine
from tests.support.tiny_tokenizer import tiny_tokenizer


def opened(artifact: str, speculative_model: str = "none", **options: Any) -> Any:
    sizes = {"vocab_size": 302, "max_model_len": 4096, "num_blocks": 1200, "max_num_batched_tokens": 2048}
    engine = fake_engine(options=sizes)
    if speculative_model != "none":
        cost = engine.scheduler.cost
        engine.scheduler.proposer = TreeSpeculator(cost, 8, recycled=Recycled(), max_cached_requests=8)
    return engine


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: _answers.Chats, artifact: str) -> None:
        self.tokenizer = tiny_tokenizer()

    monkeypatch.setattr(_answers.Chats, "__init__", start)
    for module in (_answers, tree):
        monkeypatch.setattr(module, "open_engine", opened)


def test_there_are_six_kinds_of_prompts() -> None:
    kinds = _answers.kinds()
    assert len(kinds) == 6
    assert all(
        len(prompts) == 5 and all(turns and all(turns) for turns in prompts) for prompts in kinds.values()
    )
    assert [len(turns) for turns in kinds["conversation"]] == [2] * 5


@pytest.mark.usefixtures("faked")
def test_the_trees_are_measured_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tree.json"
    options = ["--tokens", "12", "--rounds", "2", "--kind", "translation", "--save-result", str(file)]
    assert tree.main(["x", *options]) in (0, 1)
    result = json.loads(file.read_text())
    assert result["different answers"] == 0
    assert result["step of 1 rows after 256"] == 1.0
    assert "translation: gain" in capsys.readouterr().out


@pytest.mark.usefixtures("faked")
def test_long_answers_are_measured(tmp_path: Path) -> None:
    file = tmp_path / "generation.json"
    assert generation.main(["x", "--tokens", "20", "--prompts", "1", "--save-result", str(file)]) in (0, 1)
    result = json.loads(file.read_text())
    assert result["different answers"] == 0
    assert result["greedy: tokens"] == 20
    assert 0 < result["greedy: distinct-4"] <= 1


def test_repetition_is_counted() -> None:
    assert _answers.distinct(range(10)) == 1.0
    assert _answers.distinct([1, 2] * 10) == pytest.approx(2 / 17)


def test_rounds_do_not_learn_from_each_other() -> None:
    engine = opened("", "suffix")
    both = {_answers.PLAIN: opened(""), _answers.GUESSED: engine}
    sampling = SamplingParams(max_tokens=30, temperature=0.0)
    first = _answers.both(both, [1, 2, 3], sampling, 1)[_answers.GUESSED]
    assert any(text.ids for text in engine.scheduler.proposer.earlier.texts)
    engine = opened("", "suffix")
    both[_answers.GUESSED] = engine
    second = _answers.both(both, [1, 2, 3], sampling, 3)[_answers.GUESSED]
    assert first.tokens == second.tokens
    assert len(engine.scheduler.proposer.earlier.texts[0].ids) == 31
