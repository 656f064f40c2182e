"""Pass records: what check found, round trips, speedups."""

from __future__ import annotations

import json

import pytest

from optkit.passes.base import Plan, Site, Skip
from optkit.pipeline.records import PassRecord, grouped_skips
from tests.support.sample_artifact import int8_record, quality, sample_run


def test_skips_are_grouped_by_reason_in_order() -> None:
    plan = Plan(skips=[Skip("layer 0", "too wide"), Skip("head", "stays float"), Skip("layer 1", "too wide")])
    assert grouped_skips(plan) == [
        {"reason": "too wide", "count": 2, "first": "layer 0"},
        {"reason": "stays float", "count": 1, "first": "head"},
    ]


def test_a_planned_record_names_its_sites_and_is_undecided() -> None:
    record = PassRecord.planned("int8", {"lm_head": False}, Plan([Site("q", ()), Site("k", ())]))
    assert record.sites == ["q", "k"]
    assert (record.decision, record.changed, record.measured) == ("", 0, {})


def test_records_survive_json() -> None:
    record = int8_record()
    assert PassRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record


def test_records_have_the_json_keys_of_earlier_reports() -> None:
    record = int8_record(fallback=["q_proj"], variants={"up to 4 tokens": quality()})
    data = record.to_dict()
    assert data["restored"] == ["q_proj"] and data["forms"] == {"up to 4 tokens": quality()}
    assert PassRecord.from_dict(data) == record


def test_a_run_survives_json_and_may_have_no_whole() -> None:
    run = sample_run()
    data = json.loads(json.dumps(run.to_dict()))
    assert [PassRecord.from_dict(entry) for entry in data["passes"]] == run.passes
    run.whole = None
    assert run.to_dict()["whole"] is None


def test_keys_of_a_later_version_are_passed_over() -> None:
    assert PassRecord.from_dict(int8_record().to_dict() | {"energy_joules": 3}) == int8_record()


def test_from_dict_gives_a_pass_its_present_name_when_the_report_has_a_former_one() -> None:
    assert PassRecord.from_dict(int8_record(name="prune_rows").to_dict()).name == "select_logits_rows"


def test_speedups_are_before_over_after() -> None:
    record = int8_record()
    assert record.speedup("prefill 128") == pytest.approx(4.0)
    assert record.predicted_speedup("decode@513") == pytest.approx(2.0)
