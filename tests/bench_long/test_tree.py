"""Figures of trees of guesses on a fake engine; their numbers say nothing here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.long import _answers, tree
from optkit.runtime.types import SamplingParams
from tests.bench_long.conftest import opened


def test_there_are_six_kinds_of_prompts() -> None:
    kinds = _answers.kinds()
    assert len(kinds) == 6
    assert all(
        len(prompts) == 5 and all(turns and all(turns) for turns in prompts) for prompts in kinds.values()
    )
    assert [len(turns) for turns in kinds["conversation"]] == [2] * 5


@pytest.mark.usefixtures("faked_artifact")
def test_the_trees_are_measured_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tree.json"
    options = ["--tokens", "12", "--rounds", "2", "--kind", "translation", "--save-result", str(file)]
    assert tree.main(["x", *options]) in (0, 1)
    result = json.loads(file.read_text())
    assert result["different answers"] == 0
    assert result["step of 1 rows after 256"] == 1.0
    assert "translation: gain" in capsys.readouterr().out


def test_repetition_is_counted() -> None:
    assert _answers.distinct(range(10)) == 1.0
    assert _answers.distinct([1, 2] * 10) == pytest.approx(2 / 17)


def test_rounds_do_not_learn_from_each_other() -> None:
    engine = opened("", "suffix")
    both = {_answers.PLAIN: opened(""), _answers.GUESSED: engine}
    sampling = SamplingParams(max_tokens=30, temperature=0.0)
    first = _answers.both(both, [1, 2, 3], sampling, 1)[_answers.GUESSED]
    assert any(text.ids for text in engine.scheduler.proposer.shared.of("").earlier.texts)
    engine = opened("", "suffix")
    both[_answers.GUESSED] = engine
    second = _answers.both(both, [1, 2, 3], sampling, 3)[_answers.GUESSED]
    assert first.tokens == second.tokens
    assert len(engine.scheduler.proposer.shared.of("").earlier.texts[0].ids) == 31
