"""Benchmark results from files: as written, of other versions, damaged, and from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optkit.errors import UserError
from optkit.report.bench_file import read_bench
from tests.support.sample_bench import bench_result

STORED = sorted((Path(__file__).parents[2] / "bench" / "results").glob("ttft-cpu-*.json"))


def written(folder: Path, change: Callable[[dict[str, Any]], Any] = lambda data: None) -> Path:
    file = folder / "bench.json"
    data = bench_result().to_dict()
    change(data)
    file.write_text(json.dumps(data))
    return file


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    found, expected = read_bench(written(tmp_path)).result, bench_result()
    assert found.comparison() == expected.comparison()
    assert [turn.records for turn in found.turns] == [turn.records for turn in expected.turns]
    assert found.config == expected.config and found.sides == expected.sides


@pytest.mark.parametrize("file", STORED, ids=lambda path: path.stem)
def test_the_stored_results_have_the_numbers_that_they_say(file: Path) -> None:
    found, data = read_bench(file), json.loads(file.read_text())
    assert list(found.problems) == data["problems"]
    for number, expected in data["comparison"].items():
        if number.startswith("latency_ms"):
            side = found.first
            assert found.result.statistic(side, number.split(".")) == pytest.approx(expected[side])


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
    found = read_bench(written(tmp_path, change))
    assert found.result.sides == ["optkit", "baseline"]
    assert found.result.comparison()["latency_ms.ttft.p50"]["baseline"]["median"] == pytest.approx(1010)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
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
        read_bench(file)
    assert caught.value.where == str(file) and "\n" not in caught.value.line()


def test_a_missing_file_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="can't be read"):
        read_bench(tmp_path / "none.json")
