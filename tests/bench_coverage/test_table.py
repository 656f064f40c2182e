"""The table of docs/models.md says what the saved outcomes say."""

from __future__ import annotations

import json
import re

from bench.coverage.__main__ import DOCUMENT, RESULT, ROOT
from bench.coverage.__main__ import tested as names_in_tests
from bench.coverage.models import model_types
from bench.coverage.table import EQUAL, MISSING, TESTED, table, with_table
from bench.coverage.trial import REFUSED, RIGHT, WRONG

OUTCOMES = {
    "a": {"state": RIGHT, "reason": ""},
    "b": {"state": RIGHT, "reason": ""},
    "c": {"state": REFUSED, "reason": "it has x|y."},
    "d": {"state": REFUSED, "reason": "it has x|y."},
    "e": {"state": WRONG, "reason": "logits differ"},
}


def test_table_has_every_type_when_states_differ() -> None:
    assert table(OUTCOMES, {"a"}, {"a", "f"}).splitlines()[2:] == [
        f"| {TESTED} | 1 | `a` |",
        f"| {EQUAL} | 1 | `b` |",
        "| wrong: logits differ | 1 | `e` |",
        "| refused: it has x\\|y | 2 | `c`, `d` |",
        f"| {MISSING} | 1 | `f` |",
    ]


def test_document_has_the_table_of_the_saved_outcomes() -> None:
    types = json.loads(RESULT.read_text("utf-8"))["types"]
    text = DOCUMENT.read_text("utf-8")
    assert with_table(text, table(types, names_in_tests(), model_types())) == text, (
        "python -m bench.coverage --table writes it"
    )


def test_readme_has_the_numbers_of_the_saved_outcomes() -> None:
    states = [outcome["state"] for outcome in json.loads(RESULT.read_text("utf-8"))["types"].values()]
    found = re.search(
        r"(\d+) are captured and served[^;]*; (\d+) are refused", (ROOT / "README.md").read_text("utf-8")
    )
    assert found
    assert (int(found[1]), int(found[2])) == (states.count(RIGHT), states.count(REFUSED))


def test_saved_outcomes_are_of_known_types_and_none_is_wrong() -> None:
    types = json.loads(RESULT.read_text("utf-8"))["types"]
    assert set(types) == set(model_types())
    assert all(types[name]["state"] == RIGHT for name in names_in_tests())
    assert [name for name, outcome in types.items() if outcome["state"] == WRONG] == []
    assert all(
        outcome["reason"] and "\n" not in outcome["reason"]
        for outcome in types.values()
        if outcome["state"] == REFUSED
    )
