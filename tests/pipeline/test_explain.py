"""The sentences about a pass: decision, predicted and measured speed with the bound, and the objective."""

from __future__ import annotations

import pytest

from optkit.pipeline.explain import (
    bound_by,
    disturbed_sentence,
    explain,
    misses,
    misses_sentence,
    objective_sentence,
)
from tests.support.sample_artifact import int8_record, timing

BANDWIDTH = {"memory_bandwidth": 1_000.0}


def test_bound_by_compares_reading_the_weights_with_the_prediction() -> None:
    record = int8_record(
        weight_bytes=[4_000, 1_000], predicted={"decode@513": [4.0, 1.0], "prefill 128": [9.0, 4.0]}
    )
    assert bound_by(record, "decode@513", BANDWIDTH) == "memory"
    assert bound_by(record, "prefill 128", BANDWIDTH) == "compute"
    assert bound_by(record, "unknown", BANDWIDTH) is None
    assert bound_by(record, "decode@513", {}) is None


def test_explain_has_the_decision_and_a_sentence_for_each_measured_step() -> None:
    record = int8_record(
        decision="kept",
        reason="KL 0.003",
        weight_bytes=[4_000, 1_000],
        predicted={"decode@513": [4.0, 2.0], "prefill 128": [9.0, 3.0], "prefill 512": [8.0, 4.0]},
        measured={
            "decode@513": [timing(3.0), timing(2.0)],
            "prefill 128": [timing(9.0), timing(6.0)],
            "prefill 64": [timing(1.0), timing(2.0)],
        },
    )
    assert explain(record, BANDWIDTH).split("; ") == [
        "kept: KL 0.003",
        "decode@513 is compute bound: predicted 2.00x, measured 1.50x, less than predicted",
        "prefill 128 is compute bound: predicted 3.00x, measured 1.50x, less than predicted",
        "prefill 64: no prediction, measured 0.50x",
    ]


@pytest.mark.parametrize(("seconds", "is_less"), [(2.3, False), (2.5, True)])
def test_a_measurement_far_below_the_prediction_is_called_less(seconds: float, is_less: bool) -> None:
    record = int8_record(
        predicted={"decode@513": [4.0, 2.0]}, measured={"decode@513": [timing(4.0), timing(seconds)]}
    )
    assert explain(record, {}).endswith("less than predicted") is is_less


@pytest.mark.parametrize(
    ("worse", "subject"), [(False, "objective: ttft"), (True, "the objective got worse: ttft")]
)
def test_objective_sentence_has_the_ratio_and_its_interval(worse: bool, subject: str) -> None:
    change = {"name": "ttft", "ratio": 0.518, "low": 0.5, "high": 0.54, "worse": worse}
    sentence = objective_sentence(int8_record(objective=change))
    assert sentence == f"{subject} 0.52x of before, 95 % interval 0.50 to 0.54"


def test_measurements_beside_other_work_are_listed() -> None:
    quiet, busy = timing(0.2), {"median": 2.4, "q1": 1.3, "q3": 3.03}
    assert disturbed_sentence([int8_record(measured={"prefill 128": [quiet, quiet]})]) == ""
    found = int8_record(measured={"prefill 128": [busy, quiet], "prefill 512": [quiet, quiet]})
    sentence = disturbed_sentence([found])
    assert sentence.startswith(
        "other work disturbed 1 measurements, quartiles of the rounds: int8, prefill 128: 1.3 to 3.03 s"
    )
    assert sentence.endswith("optkit bench measures again")


def test_predictions_more_than_a_fifth_off_are_listed_in_both_directions() -> None:
    record = int8_record(
        predicted={"a": [2.39, 1.0], "b": [1.61, 1.0], "c": [2.41, 1.0], "d": [1.59, 1.0]},
        measured={label: [timing(2.0), timing(1.0)] for label in "abcde"},
    )
    assert misses([record]) == [
        "int8, c: predicted 2.41x, measured 2.00x",
        "int8, d: predicted 1.59x, measured 2.00x",
    ]
    listed = misses_sentence([record])
    assert listed.startswith("2 of 4 predictions are more than 20% off: int8, c: predicted 2.41x")
    record.predicted = {"a": [2.0, 1.0]}
    assert misses_sentence([record]) == "all 1 predictions are within 20% of the measured speedups"
    record.predicted = {}
    assert misses_sentence([record]) == ""
