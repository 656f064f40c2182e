"""``optkit.bench``: the report, its exit code, bounds of a recipe, refused arguments."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import optkit
from optkit.api.bench import BenchReport
from optkit.artifact.open import Artifact
from optkit.bench import run as bench_run
from optkit.bench import sides
from optkit.bench.metrics import LatencyBounds
from optkit.bench.verdict import Verdict
from optkit.recipe.load import parse_recipe
from tests.support.fake_server import FakeServer, normal
from tests.support.paired_run import made

SMALL: dict[str, Any] = {"num_prompts": 2, "input_len": 5, "output_len": 2, "rounds": 1, "num_warmups": 0}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_run, "SETTLE", 0.0)
    monkeypatch.setattr("optkit.bench.environment.load_average", lambda: 0.0)
    monkeypatch.setattr("optkit.bench.environment.cpu_in_use", lambda: None)
    monkeypatch.setattr(bench_run, "load_tokenizer", lambda directory: None)
    monkeypatch.setattr(bench_run.workload, "text_ids", lambda tokenizer: list(range(500)))
    monkeypatch.setattr(sides, "tokenizer_directory", lambda *_: "")


def test_bench_measures_a_running_server(tmp_path: Path) -> None:
    lines: list[str] = []
    with FakeServer(normal).run() as url:
        report = optkit.bench(
            url=url, slo={"ttft": 60_000}, progress=lambda event: lines.append(event.text), **SMALL
        )
        missed = optkit.bench(url=url, slo="ttft:0.0001", **SMALL)
        counted = optkit.bench(url=url, goodput="ttft:0.0001", **SMALL)
    assert report.ok and report.median("ttft") is not None
    assert lines == ["round 1 of 1: server"]
    assert (missed.exit_code, missed.ok) == (3, False) and "p95 ttft" in missed.slo_misses[0]
    assert counted.ok and counted.result.statistic("server", ("slo_attainment",))["median"] == 0.0  # type: ignore[index]
    report.save(tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["workload"]["num_prompts"] == 2
    assert "SLO missed" in missed._repr_html_() and ">server</th>" in missed._repr_html_()


def test_a_report_reads_medians_and_verdicts_of_paired_rounds() -> None:
    worse = Verdict("ttft", "b", (1.2, 1.3))
    report = BenchReport(made(), verdicts=(worse,))
    assert report.median("ttft") == 2000.0 and report.median("ttft", side="b") == 6000.0
    assert report.exit_code == 4 and report.lines()[-1] == worse.line()
    assert report.lines()[0].startswith("do not trust this: a: a p95 of 3 requests")
    assert report.intervals() == ["no intervals: an interval needs 6 rounds, 3 were run (--rounds 6)"]
    assert BenchReport(made(), ("p95",), (worse,)).exit_code == 3
    assert BenchReport(made(), verdicts=(Verdict("ttft", "b", (0.5, 1.3)),)).exit_code == 0


def test_bounds_of_the_artifact_s_recipe_decide_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = parse_recipe("schema_version: 1\nname: p\npasses: {}\nslo: {ttft_ms: 0.0001}\n")
    monkeypatch.setattr(Artifact, "open", lambda path, verify=True: SimpleNamespace(recipe=recipe))
    with FakeServer(normal).run() as url:
        monkeypatch.setattr(sides, "artifact_side", lambda artifact, name: bench_run.Side("optkit", url=url))
        report = optkit.bench(tmp_path, slo="recipe", **SMALL)
    assert report.result.slo == LatencyBounds(ttft=0.0001)
    assert report.exit_code == 3


def test_assertions_decide_the_exit_code_and_sides_are_compared() -> None:
    more = SMALL | {"rounds": None, "num_prompts": 10}
    with FakeServer(normal).run() as url:
        against = [f"old={url}"]
        held = optkit.bench(
            url=url, against=against, assertions=["ttft_p50<=1000x old", "ttft_p95<60s"], **more
        )
        failed = optkit.bench(url, against=against, assertions=["ttft_p50<=0.001x baseline"], **more)
    assert [checked.outcome for checked in held.assertions] == ["held", "held"]
    assert held.exit_code == 0 and held.result.sides == ["server", "old"]
    assert len(held.result.turns) == 12  # six rounds, for intervals
    assert failed.exit_code == 5 and failed.assertions[0].outcome == "failed"
    assert any(line.startswith("ttft_p50: ") for line in held.intervals())
    assert any(line.startswith("failed: ") for line in failed.lines())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs either an artifact or --url"),
        ({"url": "http://x", "slo": "ttft:1", "goodput": "ttft:2"}, "both set the bounds"),
        ({"url": "http://x", "definitions": "vlm"}, "did you mean 'vllm'"),
        ({"url": "http://x", "output_len": 0}, "output_len must be positive"),
        ({"url": "http://x", "rounds": 0}, "at least one round"),
        ({"url": "http://x", "slo": {"tft": 1}}, "unknown metric: tft"),
        ({"artifact": "/nowhere"}, "no such artifact"),
        ({"url": "http://x", "assertions": ["tttf<3"]}, "did you mean 'ttft'"),
        ({"url": "http://x", "assertions": ["ttft_p50<1x old"]}, "no side 'old'"),
        ({"url": "http://x", "turns": 3}, "no whole number of conversations"),
        ({"url": "http://x", "against": ["/nowhere"]}, "no such artifact"),
    ],
)
def test_wrong_arguments_are_user_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(optkit.UserError) as error:
        optkit.bench(**arguments)
    assert message in str(error.value)
