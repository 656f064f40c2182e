"""Sections of benchmarks: the numbers are those of the result."""

from __future__ import annotations

import re

import pytest

from optkit.bench.metrics import LatencyBounds
from optkit.bench.workload import WorkloadConfig
from optkit.report.bench_file import Bench
from optkit.report.bench_sections import (
    bench_cards,
    bench_sections,
    binned,
    problems,
    prompt_series,
    ttft_parts,
    workload_text,
)
from tests.support.parsed_page import ParsedPage
from tests.support.sample_bench import PARTS, bench_result, record


def words(bench: Bench, key: str) -> str:
    (section,) = [section for section in bench_sections([bench]) if section.key == key]
    return ParsedPage("".join(section.body)).words


def test_latencies_have_a_row_for_each_side_and_the_formulas() -> None:
    shown = words(Bench("first", bench_result()), "latency")
    for expected in (
        "first: 512 tokens in, 5 out",
        "p50 201, max 202",
        "p50 1,010, max 1,020",
        "first - send",
    ):
        assert expected in shown


def test_cards_have_the_ratio_to_each_side_and_the_slo() -> None:
    bench = Bench("b", bench_result(slo=LatencyBounds(ttft=150)))
    cards = {card.name: card for card in bench_cards(bench)}
    assert cards["TTFT p50, optkit"].value == "201 ms" and cards["TTFT p50, optkit"].note == "0.20x baseline"
    assert cards["TTFT p50, optkit"].mood == cards["output, optkit"].mood == "good"
    assert "TTFT p50, optkit, b" in [card.name for card in bench_cards(bench, named=True)]
    missed = cards["requests within the SLO"]
    assert missed.value == "0.0%" and missed.mood == "missed" and "150 ms" in missed.note


def test_a_slower_candidate_is_called_bad() -> None:
    slower = bench_result({"new": [[record(0, 1.0)]], "old": [[record(0, 0.5)]]})
    card = bench_cards(Bench("b", slower))[0]
    assert card.note == "2.00x old" and card.mood == "worse"


def test_parts_of_the_time_to_first_token_add_up_to_the_client_s_time() -> None:
    parts = ttft_parts(record(0, 0.2, ttft_details=PARTS))
    assert parts == pytest.approx((2.0, 10.0, 100.0, 0.0, 88.0))
    assert ttft_parts(record(0, 0.2)) is None
    assert ttft_parts(record(0, 0.2, ttft_details=PARTS, error="HTTP 500")) is None
    assert "optkit, 6 requests" in words(Bench("b", bench_result()), "parts")


def test_the_slowest_tenth_of_many_requests_has_a_bar_of_its_own() -> None:
    slow = PARTS | {"queue": 0.5}
    records = [record(i, 0.2, ttft_details=PARTS) for i in range(19)] + [record(19, 0.8, ttft_details=slow)]
    records.append(record(20, 0.7, ttft_details=slow))
    shown = words(Bench("b", bench_result({"optkit": [records]})), "parts")
    assert "optkit, slowest 2" in shown and "750 ms" in shown


def test_results_without_the_server_s_parts_leave_the_section_out() -> None:
    bench = Bench("b", bench_result({"peer": [[record(0, 0.2)]]}))
    by_key = {section.key: section for section in bench_sections([bench])}
    assert not by_key["parts"].body and "optkit bench" in by_key["parts"].missing
    assert not by_key["throughput"].body and by_key["latency"].body


def test_throughput_against_latency_has_a_point_for_each_load_in_its_order() -> None:
    loads = [
        Bench(
            str(rate),
            bench_result(
                {"optkit": [[record(i, 0.1 * rate, tpot=0.01 * rate) for i in range(59)]]},
                WorkloadConfig(num_prompts=59, request_rate=rate),
            ),
        )
        for rate in (4.0, 1.0, 2.0)
    ]
    (section,) = [section for section in bench_sections(loads) if section.key == "throughput"]
    assert len(re.findall("<figure>", "".join(section.body))) == 3
    words = ParsedPage("".join(section.body)).words
    assert (
        words.index("1.0optkit") < words.index("2.0optkit") < words.index("4.0optkit")
    )  # the table of loads
    swept = [Bench(one.name, one.result, ["late"], ["held"], "sweep") for one in loads]
    by_key = {section.key: section for section in bench_sections(swept)}
    assert not by_key["latency"].body and "sweep" in "".join(by_key["throughput"].body)
    assert "late" in "".join(by_key["throughput"].body) and "held" in "".join(by_key["throughput"].body)
    longer = Bench("longer", bench_result({"optkit": [[record(0, 0.1, prompt=999)]]}))
    for benches in ([loads[0], longer], [longer]):  # other prompts are no other load
        (section,) = [section for section in bench_sections(benches) if section.key == "throughput"]
        assert not section.body


def test_times_by_prompt_length_leave_cached_prompts_out() -> None:
    records = [record(0, 0.1, prompt=128), record(1, 0.3, prompt=130), record(2, 0.9, prompt=512)]
    records.append(record(3, 0.01, prompt=512, cached_tokens=500))
    (series,) = prompt_series([Bench("b", bench_result({"optkit": [records]}))])
    assert list(series.points) == [(129.0, pytest.approx(200)), (512.0, pytest.approx(900))]
    assert binned({}) == []


def test_times_by_prompt_length_are_those_without_a_queue_where_there_are_any() -> None:
    alone = Bench("a", bench_result({"optkit": [[record(0, 0.1, prompt=128)]]}))
    queued = Bench(
        "b", bench_result({"optkit": [[record(0, 9.0, prompt=256)]]}, WorkloadConfig(max_concurrency=8))
    )
    (series,) = prompt_series([alone, queued])
    assert [tokens for tokens, _ in series.points] == [128]
    (series,) = prompt_series([queued])
    assert [tokens for tokens, _ in series.points] == [256]


def test_a_busy_machine_and_stored_problems_are_named() -> None:
    bench = Bench("b", bench_result(), ["request 3 failed"])
    bench.result.turns[0] = type(bench.result.turns[0])("optkit", 0, 7.5, bench.result.turns[0].records, [])
    found = problems(bench)
    assert (
        found[0] == "request 3 failed" and found[1] == "optkit round 0: load average 7.5 before it, cores: 2"
    )
    shown = words(bench, "latency")
    assert "do not trust" in shown and "load average 7.5" in shown
    assert problems(Bench("b", bench_result())) == []


def test_a_workload_in_words() -> None:
    assert workload_text(bench_result()) == "512 tokens in, 5 out, 1 at a time, 2 rounds of 3 requests"
    mixed = [[record(0, 0.1, prompt=100), record(1, 0.1, prompt=2000, tokens=9)]]
    config = WorkloadConfig(num_prompts=2, request_rate=2.5, max_concurrency=None)
    assert workload_text(bench_result({"a": mixed}, config)) == (
        "100 to 2,000 tokens in, 5 to 9 out, 2.5 requests/s, 1 round of 2 requests"
    )


def test_failed_requests_and_empty_rounds_break_nothing() -> None:
    failed = record(0, 0.1, error="HTTP 500", done=None, chunks=[])
    for rounds in ([[failed]], [[]]):
        bench = Bench("b", bench_result({"optkit": rounds, "baseline": rounds}))
        for section in bench_sections([bench]):
            ParsedPage("".join(section.body))
        bench_cards(bench)
        assert prompt_series([bench]) == []
