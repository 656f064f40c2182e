"""The schema of report.json takes what a run writes, and refuses values that ``optkit inspect`` could not show."""

from __future__ import annotations

import json
from math import nan
from typing import Any

import pytest
from pydantic import ValidationError

from optkit.pipeline.records import RunRecord
from optkit.pipeline.report_schema import ReportFile
from tests.support.sample_artifact import int8_record, quality, sample_run, timing

OBJECTIVE = {"name": "ttft", "ratio": 0.5, "low": 0.4, "high": 0.6, "worse": False}
COMPILED = {"tokens": "2", "kept": False, "reason": None}


def report(**changes: Any) -> dict[str, Any]:
    """report.json of a run of one pass, with other fields of the record."""
    written = RunRecord([int8_record(**changes)], None).to_dict()
    return json.loads(json.dumps({"model": "small", "machine": {"cpu": "any"}, **written}))


def test_schema_takes_the_report_of_a_run() -> None:
    run = sample_run()
    read = ReportFile.model_validate(json.loads(json.dumps(run.to_dict())))
    assert [entry.decision for entry in read.passes] == ["kept", "skipped", "rolled back"]
    assert read.passes[0].measured["decode@513"][1].median == 0.02
    assert read.passes[0].weight_bytes == (400_000_000, 100_000_000)
    assert read.whole is not None and read.whole.name == "whole"


@pytest.mark.parametrize(
    "changes",
    [
        {"objective": OBJECTIVE},
        {"variants": {"to 4": quality(), "above": quality()}, "fallback": ["q_proj"]},
        {"quality": {}, "measured": {}, "weight_bytes": []},
        {"quality": quality(kld=nan, ln_ppl_ratio=nan)},  # logits that overflow
        {"stats": {"compiled": [COMPILED], "other": 1}},
    ],
)
def test_schema_takes_the_fields_of_a_record(changes: dict[str, Any]) -> None:
    (entry,) = ReportFile.model_validate(report(**changes)).passes
    assert entry.name == "int8"


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"changed": "2"}, "changed"),
        ({"sites": [1]}, "sites"),
        ({"skips": [{"reason": "a", "count": 1}]}, "first"),
        ({"predicted": {"prefill 128": [0.0, 1.0]}}, "predicted"),
        ({"predicted": {"prefill 128": [1.0]}}, "predicted"),
        ({"measured": {"prefill 1": [timing(1.0), timing(-1.0)]}}, "measured"),
        ({"measured": {"prefill 1": [timing(1.0), timing(nan)]}}, "measured"),
        ({"measured": {"prefill 1": [timing(1.0), timing(1.0) | {"q1": {}}]}}, "q1"),
        ({"measured": {"prefill 1": [timing(1.0) | {"q3": "late"}, timing(1.0)]}}, "q3"),
        ({"weight_bytes": [-1, 1]}, "weight_bytes"),
        ({"weight_bytes": [1 << 60, 1]}, "weight_bytes"),
        ({"quality": quality(ln_ppl_ratio=701.0)}, "ln_ppl_ratio"),
        ({"objective": OBJECTIVE | {"low": 0.0}}, "objective"),
        ({"objective": {"ratio": 1.0}}, "objective"),
        ({"stats": {"compiled": [COMPILED | {"kept": "yes"}]}}, "compiled"),
    ],
)
def test_schema_names_the_field_that_cannot_be_shown(changes: dict[str, Any], place: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        ReportFile.model_validate(report(**changes))
    assert any(place in error["loc"] for error in refusal.value.errors())


@pytest.mark.parametrize(
    "changes",
    [
        {"measured": {"prefill 128": [timing(1.0), timing(1.0)]}},
        {"measured": {"decode@513": [timing(1.0), timing(1.0)]}},
        {"weight_bytes": []},
    ],
)
def test_schema_refuses_times_without_a_prefill_a_decode_and_bytes(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="times need those of a prefill and of a decode step"):
        ReportFile.model_validate(report(**changes))
