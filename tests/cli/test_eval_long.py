"""``optkit eval --long``: on a tiny artifact's runtime, against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optkit.cli import eval as eval_module
from optkit.cli import main
from optkit.cli.eval_long import parse_lengths
from optkit.errors import UserError
from optkit.evaluation.long import score, tasks
from optkit.evaluation.quality import ModuleLogits, RuntimeLogits
from optkit.evaluation.saved import read_eval
from optkit.lowering.lower import lower
from tests.support.architectures import tiny_model
from tests.support.graphs import captured
from tests.support.long_documents import tokenizer

TINY = {"vocab_size": 320, "max_position_embeddings": 1024}


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = {
        "artifact": lambda: RuntimeLogits(lower(captured("llama", **TINY))),
        "model": lambda: ModuleLogits(tiny_model("llama", **TINY)),
    }
    monkeypatch.setattr(eval_module, "_open", lambda model, progress: (opened[model](), Path(model)))
    monkeypatch.setattr(eval_module, "_tokenizer", lambda artifact, source: tokenizer())
    few = {name: tasks.TASKS[name] for name in ("needle", "common_words")}
    monkeypatch.setattr(tasks, "TASKS", few)
    monkeypatch.setattr(score, "LEAST_GAIN", -100.0)  # random weights take nothing from a document


@pytest.mark.usefixtures("fakes")
def test_the_runtime_of_a_model_loses_nothing_against_transformers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["eval", "artifact", "--against", "model", "--long", "--lengths", "768,1024"]
    assert main.run([*arguments, "--json"]) == 0
    text = capsys.readouterr().out
    long = json.loads(text)["long"]
    assert [(task["task"], task["length"]) for task in long["tasks"]] == [
        (task, length) for length in (768, 1024) for task in ("needle", "common_words")
    ]
    for task in long["tasks"]:
        assert task["score"]["loss"]["value"] == pytest.approx(0, abs=1e-3)
        assert task["score"]["kl"]["value"] == pytest.approx(0, abs=1e-4)
    assert long["positions"][-1]["last"] == 1023 and long["positions"][-1]["kl"]["value"] < 1e-4
    (tmp_path / "eval.json").write_text(text)
    saved = read_eval(tmp_path / "eval.json").variants[""].long
    assert saved is not None and saved.documents == 4
    assert main.run([*arguments, "--documents", "2"]) == 0
    shown = capsys.readouterr().out
    assert "needle" in shown and "1,024" in shown and "depth" in shown and "positions of plain text" in shown


@pytest.mark.usefixtures("fakes")
def test_without_a_reference_the_model_is_scored_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["eval", "artifact", "--long", "--json"]) == 0
    long = json.loads(capsys.readouterr().out)["long"]
    assert {task["length"] for task in long["tasks"]} == {1024}
    assert long["loss"] is None and not long["positions"]


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["artifact", "--lengths", "1024"], "needs --long"),
        (["artifact", "--long", "--lengths", "4096"], "more than the context of 1024"),
        (["artifact", "--long", "--lengths", "100"], "100 are too few"),
        (["artifact", "--long", "--text", "some.txt"], "shipped"),
        (["artifact", "--long", "--tokens", "2048"], "count tokens of short windows"),
        (["artifact", "--long", "--greedy-tokens", "0"], "count tokens of short windows"),
        (["http://127.0.0.1:9", "--long"], "tokenizer"),
    ],
)
def test_what_cannot_be_measured_is_one_clear_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["eval", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("given", "found"), [(None, [1024, 2048]), ("512, 3000", [512, 3000]), ("8,8", [8])])
def test_lengths(given: str | None, found: list[int]) -> None:
    assert parse_lengths(given, 3000) == found


@pytest.mark.parametrize("text", ["", "1k", "1024;2048", "-1", "99999999"])
def test_no_lengths(text: str) -> None:
    with pytest.raises(UserError):
        parse_lengths(text, 3000)
