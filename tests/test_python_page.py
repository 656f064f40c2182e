"""The examples of docs/python.md, run as doctests on a tiny model."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path

import pytest

from tests.support.model_directory import save_model
from tests.support.quick import quick
from tests.support.tiny_tokenizer import TEMPLATE

PAGE = Path(__file__).resolve().parents[1] / "docs" / "python.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def examples() -> list[doctest.Example]:
    """The examples of all blocks, in order, with their lines in the page."""
    text, found = PAGE.read_text("utf-8"), []
    for block in BLOCK.finditer(text):
        first = text[: block.start(1)].count("\n")
        for example in doctest.DocTestParser().get_examples(block[1]):
            example.lineno += first
            found.append(example)
    return found


def test_the_page_has_an_example_of_each_function() -> None:
    sources = "".join(example.source for example in examples())
    for call in (
        "optkit.optimize(",
        "optkit.load(",
        "optkit.bench(",
        "optkit.recipe(",
        ".generate(",
        ".chat(",
    ):
        assert call in sources
    for call in (".stream(", ".logprobs("):
        assert call in sources


def test_the_examples_give_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_model(tmp_path / "my-model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    quick(monkeypatch.setattr)
    page = doctest.DocTest(examples(), {}, "python.md", str(PAGE), 0, PAGE.read_text("utf-8"))
    told: list[str] = []
    failed, tried = doctest.DocTestRunner(optionflags=FLAGS).run(page, out=told.append)
    assert tried > 20
    assert failed == 0, "".join(told)
