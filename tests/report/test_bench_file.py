"""Benchmark results from files: as written, of other versions, damaged, and from elsewhere."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optkit.bench.rates import Sweep, SweepPoint, synchronous
from optkit.bench.workload import WorkloadConfig
from optkit.errors import UserError
from optkit.report.bench_file import read_benches
from optkit.report.bench_sections import workload_text
from optkit.report.loads import load_of
from tests.support.sample_bench import bench_result

STORED = sorted((Path(__file__).parents[2] / "bench" / "results").glob("ttft-cpu-*.json"))


def written(folder: Path, change: Callable[[dict[str, Any]], Any] = lambda data: None) -> Path:
    file = folder / "bench.json"
    data = bench_result().to_dict()
    change(data)
    file.write_text(json.dumps(data))
    return file


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    found, expected = read_benches(written(tmp_path))[0].result, bench_result()
    assert found.comparison() == expected.comparison()
    assert [turn.records for turn in found.turns] == [turn.records for turn in expected.turns]
    assert found.config == expected.config and found.sides == expected.sides


@pytest.mark.parametrize("file", STORED, ids=lambda path: path.stem)
def test_the_stored_results_have_the_numbers_that_they_say(file: Path) -> None:
    found, data = read_benches(file)[0], json.loads(file.read_text())
    assert list(found.problems) == data["problems"]
    for number, expected in data["comparison"].items():
        if number.startswith("latency_ms"):
            side = found.first
            assert found.result.statistic(side, number.split(".")) == pytest.approx(expected[side])


@pytest.mark.parametrize("file", sorted(STORED[0].parent.glob("peers-*.json")), ids=lambda path: path.stem)
def test_the_stored_results_of_other_engines_have_a_result_for_each_workload(file: Path) -> None:
    data = json.loads(file.read_text())
    found = {bench.name.partition(", ")[2]: bench for bench in read_benches(file)}
    assert list(found) == list(data["workloads"])
    figure = next(figure for figure in data["figures"] if figure["figure"] == "TTFT, 512 tokens")
    for side, expected in figure["servers"].items():
        statistic = found["medium"].result.statistic(side, ("latency_ms", "ttft", "p50"))
        assert statistic is not None and statistic["median"] == pytest.approx(expected["median"], rel=1e-5)


def add_keys(data: dict[str, Any]) -> None:
    """Fields of a later version, at every level."""
    data["validity"] = {"verdict": "fine"}
    data["workload"] |= {"burstiness": 0.5, "trace": "t.jsonl"}
    data["turns"][0] |= {"client": {"cpu_share": 0.1}}
    data["turns"][0]["records"][0] |= {"session": 3}
    data["turns"][0]["records"][0]["chunks"][0] |= {"text": "a"}


def drop_keys(data: dict[str, Any]) -> None:
    """Fields that another load lacks."""
    data["workload"] = {}
    del data["problems"], data["environment"], data["definitions"], data["slo_ms"]
    for record in data["turns"][0]["records"]:
        for key in (
            "scheduled",
            "headers",
            "prompt_tokens",
            "output_tokens",
            "cached_tokens",
            "ttft_details",
        ):
            record.pop(key)


def not_numbers(data: dict[str, Any]) -> None:
    """NaN and infinity, which Python's JSON writes."""
    first, second = data["turns"][0]["records"][:2]
    first["send"], second["done"] = float("nan"), float("inf")
    second["chunks"][1]["time"] = float("nan")
    data["environment"]["load_average"] = float("nan")


@pytest.mark.parametrize("change", [add_keys, drop_keys, not_numbers])
def test_other_fields_and_missing_numbers_are_no_error(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    found = read_benches(written(tmp_path, change))[0]
    assert found.result.sides == ["optkit", "baseline"]
    assert found.result.comparison()["latency_ms.ttft.p50"]["baseline"]["median"] == pytest.approx(1010)


def sweep(**head: Any) -> dict[str, Any]:
    """Two loads in a file."""
    points = []
    for label, rate in (("synchronous", None), ("2/s", 2.0)):
        result = bench_result(config=WorkloadConfig(num_prompts=3, request_rate=rate)).to_dict()
        points.append({"label": label, "rate": rate, "result": result | {"environment": {}}})
    return {"kind": "sweep", "environment": {"cpu": "a"}, "doubts": ["busy"], "points": points} | head


def test_a_sweep_has_a_result_for_each_load(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    file.write_text(json.dumps(sweep()))
    first, second = read_benches(file)
    assert [first.name, second.name] == ["s, synchronous", "s, 2/s"] and first.sweep == second.sweep == "s"
    assert second.result.config.request_rate == 2.0 and second.result.environment == {"cpu": "a"}
    assert first.problems == ["busy"] and second.problems == []


def test_problems_of_a_whole_sweep_are_told_once(tmp_path: Path) -> None:
    """Of ``bench.peers --sweep``, with the engines that were left out."""
    file = tmp_path / "s.json"
    problems = ["llama.cpp used AVX-512", "round 1: 2 requests failed"]
    data = sweep(doubts=[], problems=problems, skipped={"vllm": "not installed"})
    data["points"][1]["result"]["problems"] = ["round 1: 2 requests failed"]
    file.write_text(json.dumps(data))
    first, second = read_benches(file)
    assert first.problems == ["llama.cpp used AVX-512", "vllm was not measured: not installed"]
    assert second.problems == ["round 1: 2 requests failed"]


def test_the_file_of_a_real_sweep_is_read_with_both_ends(tmp_path: Path) -> None:
    """Requests in turn and all at once have an infinite rate, which JSON has no number for."""
    base = WorkloadConfig(num_prompts=3, input_len=8)
    configs = (None, synchronous(base)), (2.0, base.at_rate(2.0)), (math.inf, base.closed(None))
    points = tuple(SweepPoint(rate, bench_result(config=config)) for rate, config in configs)
    Sweep(("optkit", "baseline"), points, {"cpu": "a"}).save(tmp_path / "s.json")
    benches = read_benches(tmp_path / "s.json")
    assert [bench.name for bench in benches] == ["s, synchronous", "s, 2/s", "s, all at once"]
    assert [load_of(bench)[0] for bench in benches] == [0.0, 2.0, math.inf]
    assert [workload_text(bench.result).split(", ")[2] for bench in benches] == [
        "1 at a time",
        "2 requests/s",
        "all at once",
    ]


def test_probes_of_a_search_say_what_held(tmp_path: Path) -> None:
    result = bench_result().to_dict()
    probes = [
        {"rate": 4.0, "held": False, "reasons": ["p95 ttft 812 ms > 700 ms"], "result": result},
        {"rate": 2.0, "held": True, "reasons": [], "result": result},
    ]
    file = tmp_path / "r.json"
    file.write_text(json.dumps({"kind": "find-rate", "highest_rate": 2.0, "probes": probes}))
    low, high = read_benches(file)
    assert (low.name, low.claims) == ("r, 2/s", ["held"])
    assert high.claims == ["missed: p95 ttft 812 ms > 700 ms"]


def test_doubts_and_outcomes_of_claims_are_kept(tmp_path: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        data["validity"] = {"trusted": False, "doubts": ["the client was late"]}
        data["assertions"] = [{"text": "ttft_p50 <= 0.5x baseline", "outcome": "held", "detail": "0.20"}]

    (found,) = read_benches(written(tmp_path, change))
    assert found.problems == ["the client was late"]
    assert found.claims == ["held: ttft_p50 <= 0.5x baseline: 0.20"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"points": 3}', "points"),
        ('{"points": [{"result": {}}]}', "no result of optkit bench"),
        ('{"workloads": {"a": {"workload": {}}}}', "has no turns"),
        ('{"workloads": {"a": {"workload": {}, "turns": [1]}}}', "no result of optkit bench"),
        ('{"probes": []}', "no load was measured"),
        ("", "not valid JSON"),
        ("[1]", "not a JSON object"),
        ('{"passes": []}', "no result of optkit bench"),
        ("{" * 9000, "not valid JSON"),
        ('{"a": 1, "a": 2}', "duplicate keys"),
        ('{"workload": [], "sides": {}, "turns": []}', "workload"),
        ('{"workload": {}, "sides": {}, "turns": []}', "turns of sides"),
        (
            '{"workload": {}, "sides": {"a": {}}, "turns": [{"side": "b", "round": 0, "records": []}]}',
            "turns of sides",
        ),
        (
            '{"workload": {}, "sides": {"a": {}}, "turns": [{"side": "a", "round": "0", "records": []}]}',
            "round",
        ),
        (
            '{"workload": {}, "sides": {"a": {}, "b": {}}, "turns": [{"side": "a", "round": 0, "records": []}]}',
            "unlike numbers of rounds",
        ),
        ('{"workload": {"num_prompts": 1e99}, "sides": {"a": {}}, "turns": []}', "num_prompts"),
    ],
)
def test_a_foreign_file_is_one_clear_line(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "foreign.json"
    file.write_text(text)
    with pytest.raises(UserError, match=problem) as caught:
        read_benches(file)
    assert caught.value.where == str(file) and "\n" not in caught.value.line()


def test_a_missing_file_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="can't be read"):
        read_benches(tmp_path / "none.json")
