"""Evaluations from files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optkit.errors import UserError
from optkit.evaluation.saved import of_whole, read_eval
from tests.support.sample_artifact import int8_record, quality


def test_an_evaluation_is_read_with_and_without_variants(tmp_path: Path) -> None:
    file = tmp_path / "e.json"
    file.write_text(json.dumps(quality() | {"model": "a", "against": "b"}))
    found = read_eval(file)
    assert found.title == "a against b" and found.variants[""].kl_p99 == 0.04
    file.write_text(json.dumps({"forms": {"up to 4": quality(), "above": quality()}}))
    assert list(read_eval(file).variants) == ["up to 4", "above"] and read_eval(file).title == "e"
    file.write_text(json.dumps({"windows": 2, "tokens": 9, "ppl": {"value": float("nan"), "stderr": 1.0}}))
    ppl = read_eval(file).variants[""].ppl
    assert ppl is not None and ppl.value is None


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"forms": {}}',
        '{"forms": []}',
        '{"windows": "2", "tokens": 1}',
        '{"long": {}}',
        '{"long": 3}',
        '{"forms": {"a": {}}}',
        "[]",
        "x",
    ],
)
def test_a_foreign_file_is_one_clear_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "foreign.json"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        read_eval(file)
    assert caught.value.where == str(file) and "\n" not in caught.value.line()


def test_the_quality_of_a_whole_result() -> None:
    found = of_whole("small", int8_record().to_dict())
    assert found is not None and found.variants[""].kl_mean is not None
    assert found.variants[""].kl_mean.value == 0.004
    variants = {"to 4": quality(), "above": quality(0.1)}
    found = of_whole("small", int8_record(variants=variants).to_dict())
    assert found is not None and list(found.variants) == ["to 4", "above"]
    assert of_whole("small", None) is None and of_whole("small", int8_record(quality={}).to_dict()) is None
