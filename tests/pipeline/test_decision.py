"""Keep or roll back: each bound at, below and above its limit."""

from __future__ import annotations

from dataclasses import replace
from math import isnan, nan
from typing import Any

import pytest

from optkit.pipeline.decision import (
    Evidence,
    bounded_means,
    decide,
    decided_early,
    excess_share,
    nearly_meets,
)
from optkit.recipe.schema import Accept
from tests.support.sample_artifact import int8_record, quality, timing

EVIDENCE = Evidence(kld=0.01, top1=0.97, ppl_ratio=1.01, speedup=1.5, decode_speedup=1.2, memory_bytes=1000)
AT_THE_LIMIT = Accept(
    max_kld=0.01,
    min_top1=0.97,
    max_ppl_ratio=1.01,
    min_speedup=1.5,
    min_decode_speedup=1.2,
    max_memory_bytes=1000,
)


def test_evidence_at_every_limit_is_kept_and_the_reason_has_the_numbers() -> None:
    kept, reason = decide(AT_THE_LIMIT, EVIDENCE)
    assert kept
    assert reason == "prefill 1.50x, KL 0.01, top-1 97.0%"


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("kld", 0.0101, "mean KL divergence 0.01 is above 0.01"),
        ("ppl_ratio", 1.02, "perplexity ratio 1.0200 is above 1.0100"),
        ("memory_bytes", 1001, "weight bytes 1,001 is above 1,000"),
        ("top1", 0.9699, "top-1 agreement 96.99% is below 97.00%"),
        ("speedup", 1.49, "prefill speedup 1.490 is below 1.500"),
        ("decode_speedup", 1.19, "decode speedup 1.190 is below 1.200"),
        ("worse", "objective: ttft 1.10x of before", "objective: ttft 1.10x of before"),
    ],
)
def test_a_missed_bound_is_named_with_both_numbers(field: str, value: float, words: str) -> None:
    assert decide(AT_THE_LIMIT, replace(EVIDENCE, **{field: value})) == (False, words)


@pytest.mark.parametrize("field", ["kld", "ppl_ratio", "top1", "speedup", "decode_speedup"])
def test_nan_meets_no_bound(field: str) -> None:
    kept, reason = decide(AT_THE_LIMIT, replace(EVIDENCE, **{field: nan}))
    assert not kept
    assert "nan" in reason


NEAR = Accept(max_kld=0.01, min_top1=0.97, max_ppl_ratio=1.01, min_speedup=1.5)
ERRORS = {"kl_mean": 0.001, "top1_agreement": 0.002, "ln_ppl_ratio": 0.002}


@pytest.mark.parametrize(
    ("changes", "near"),
    [
        ({}, False),  # nothing is missed
        ({"kld": 0.0115}, True),
        ({"kld": 0.0125}, False),
        ({"top1": 0.9665}, True),
        ({"top1": 0.9655}, False),
        ({"ppl_ratio": 1.0135}, True),
        ({"ppl_ratio": 1.0145}, False),
        ({"kld": 0.0115, "top1": 0.9655}, False),
        ({"kld": nan}, False),
        ({"kld": 0.0115, "speedup": 1.4}, False),  # more text does not help
        ({"kld": 0.0115, "worse": "ttft"}, False),
    ],
)
def test_a_bound_on_quality_is_nearly_met_within_the_interval(changes: dict[str, Any], near: bool) -> None:
    quality = {key: {"stderr": error} for key, error in ERRORS.items()}
    assert nearly_meets(NEAR, replace(EVIDENCE, **changes), quality) == near


LONG = {"tokens": 36800, "loss": {"value": 0.2, "stderr": 0.05}}


def test_a_loss_on_long_documents_is_judged_with_its_tokens_and_interval() -> None:
    record = int8_record(quality=quality() | {"long": LONG})
    evidence = Evidence.of(record)
    assert evidence.long_loss == 0.2
    text = "long loss 0.2 [0.1, 0.3] nats on 36,800 tokens"
    assert decide(Accept(max_long_loss=0.1), evidence) == (False, f"{text} is above 0.1")
    kept, reason = decide(Accept(max_long_loss=0.2), evidence)
    assert kept and reason.endswith(text)


def test_a_long_loss_that_was_not_measured_meets_no_bound() -> None:
    bound = Accept(max_long_loss=9.0)
    assert decide(bound, EVIDENCE) == (False, "long loss not measured is above 9")
    unknown = Evidence.of(int8_record(quality=quality() | {"long": {"tokens": 900, "loss": None}}))
    kept, reason = decide(bound, unknown)
    assert not kept and "the source model answers no task" in reason
    assert decide(Accept(), unknown)[0]


def test_every_missed_bound_is_named() -> None:
    bad = Evidence(kld=1.0, top1=0.1, ppl_ratio=9.0, speedup=0.5, decode_speedup=0.5, memory_bytes=5000)
    kept, reason = decide(AT_THE_LIMIT, bad)
    assert not kept
    assert reason.count(";") == 5


def test_no_bounds_keep_anything() -> None:
    assert decide(
        Accept(),
        Evidence(kld=99.0, top1=0.0, ppl_ratio=99.0, speedup=0.01, decode_speedup=0.01, memory_bytes=1),
    )[0]


def test_evidence_takes_the_geometric_mean_over_prefills_only() -> None:
    evidence = Evidence.of(int8_record())
    assert evidence.speedup == pytest.approx(2.0)  # sqrt(4 * 1); decode is not in it
    assert evidence.decode_speedup == pytest.approx(2.0)
    assert evidence.memory_bytes == 100_000_000
    assert evidence.kld == 0.004


def test_evidence_turns_the_log_ratio_into_a_ratio() -> None:
    record = int8_record(quality=quality(ln_ppl_ratio=0.0953101798))
    assert Evidence.of(record).ppl_ratio == pytest.approx(1.1)


def test_a_slower_pass_has_a_speedup_below_one() -> None:
    slower = [timing(0.1), timing(0.2)]
    evidence = Evidence.of(int8_record(measured={"prefill 128": slower, "decode@129": slower}))
    assert evidence.speedup == evidence.decode_speedup == pytest.approx(0.5)


def test_evidence_names_a_loss_of_the_objective_and_nothing_without_a_loss() -> None:
    change = {"name": "ttft", "ratio": 1.1, "low": 1.05, "high": 1.15, "worse": True}
    assert Evidence.of(int8_record(objective=change)).worse.startswith(
        "the objective got worse: ttft 1.10x of before"
    )
    assert Evidence.of(int8_record(objective=change | {"worse": False})).worse == ""
    assert Evidence.of(int8_record()).worse == ""


def test_a_single_token_prompt_is_a_prefill() -> None:
    measured = {"prefill 1": [timing(0.3), timing(0.1)], "decode@2": [timing(0.2), timing(0.1)]}
    evidence = Evidence.of(int8_record(measured=measured))
    assert evidence.speedup == pytest.approx(3.0)
    assert evidence.decode_speedup == pytest.approx(2.0)


def test_evidence_of_a_pass_undone_for_speed_has_speed_and_no_quality() -> None:
    evidence = Evidence.of(int8_record(quality={}))
    assert evidence.speedup == pytest.approx(2.0) and evidence.memory_bytes == 100_000_000
    assert all(map(isnan, (evidence.kld, evidence.top1, evidence.ppl_ratio)))


@pytest.mark.parametrize(
    ("kld", "top1", "share"),
    [
        (0.005, 0.98, 0.0),  # within both
        (0.04, 0.98, 0.75),  # a quarter of the divergence is allowed
        (0.005, 0.94, 0.75),  # twice the allowed changes of the top token: four times the divergence
        (0.02, 0.94, 0.75),  # the tighter bound counts
        (nan, nan, 0.0),
        (0.0, 1.0, 0.0),
    ],
)
def test_share_of_the_divergence_that_is_too_much(kld: float, top1: float, share: float) -> None:
    evidence = replace(EVIDENCE, kld=kld, top1=top1)
    assert excess_share(Accept(max_kld=0.01, min_top1=0.97), evidence) == pytest.approx(share)
    assert excess_share(Accept(), evidence) == 0.0


# -- the end of a measurement --------------------------------------------------------------------------------


def report(kld: float, top1: float, windows: int = 16, stderr: float = 1e-4) -> dict[str, Any]:
    """A quality report on windows of 511 positions."""
    means = {"kl_mean": kld, "top1_agreement": top1, "ln_ppl_ratio": 0.0}
    estimates = {name: {"value": value, "stderr": stderr} for name, value in means.items()}
    return {"windows": windows, "tokens": 511 * windows, **estimates}


@pytest.mark.parametrize(
    ("bounds", "reports", "ends"),
    [
        ({"max_kld": 0.01}, {"": report(0.002, 0.98)}, True),
        ({"max_kld": 0.01}, {"": report(0.05, 0.98)}, True),
        ({"max_kld": 0.01}, {"": report(0.0098, 0.98)}, False),
        ({"max_kld": 0.01}, {"": report(0.002, 0.98, windows=15)}, False),  # no look
        ({"max_kld": 0.01, "min_top1": 0.97}, {"": report(0.002, 0.971)}, False),
        ({"max_kld": 0.01, "min_top1": 0.97}, {"": report(0.002, 0.99)}, True),
        ({"max_kld": 0.01, "min_top1": 0.97}, {"": report(0.002, 0.9)}, True),
        ({"max_ppl_ratio": 1.02}, {"": report(0.002, 0.98)}, True),
        ({"max_kld": 0.01}, {"a": report(0.002, 0.98), "b": report(0.0098, 0.98)}, False),
        ({"max_kld": 0.01}, {"a": report(0.05, 0.98), "b": report(0.0098, 0.98)}, True),
        ({"min_speedup": 1.0, "max_memory_bytes": 1}, {"": report(0.002, 0.98)}, False),
        ({}, {"": report(0.002, 0.98)}, False),
    ],
)
def test_a_measurement_ends_where_all_bounds_hold_or_one_is_missed_for_certain(
    bounds: dict[str, Any], reports: dict[str, Any], ends: bool
) -> None:
    assert decided_early(Accept(**bounds), reports, 40) is ends


def test_agreement_without_any_other_token_still_has_an_error() -> None:
    (mean,) = bounded_means(Accept(min_top1=0.999), report(0.0, 1.0, windows=8, stderr=0.0))
    assert 2e-4 < mean.stderr < 3e-4
    assert not decided_early(Accept(min_top1=0.9995), {"": report(0.0, 1.0, 8, 0.0)}, 40)
