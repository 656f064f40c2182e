"""optkit bench: bounds, the SLO of a recipe, exit codes, results."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from optkit.artifact.open import Artifact
from optkit.bench import run as bench_run
from optkit.bench.metrics import LatencyBounds
from optkit.cli import main
from optkit.cli.bench import parse_bounds, recipe_bounds
from optkit.errors import UserError
from optkit.recipe.load import parse_recipe
from tests.support.fake_server import FakeServer, normal


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(bench_run, "SETTLE", 0.0)
    monkeypatch.setattr("optkit.bench.environment.load_average", lambda: 0.0)
    monkeypatch.setattr(bench_run, "load_tokenizer", lambda directory: None)
    monkeypatch.setattr(bench_run.workload, "text_ids", lambda tokenizer: list(range(500)))


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft:700", LatencyBounds(ttft=700)),
        ("ttft:700,tpot:50.5", LatencyBounds(700, 50.5)),
        ("e2e:1 ttft:2", LatencyBounds(2, None, 1)),
        ("", LatencyBounds()),
    ],
)
def test_parse_bounds_reads_milliseconds_by_metric(text, slo):
    assert parse_bounds(text) == slo


@pytest.mark.parametrize("text", ["tft:700", "ttft", "ttft:x", "ttft:-1", "ttft:nan", "ttft:inf", "ttft:0"])
def test_parse_bounds_raises_a_user_error_when_a_bound_is_wrong(text):
    with pytest.raises(UserError):
        parse_bounds(text)


@pytest.fixture
def no_model(monkeypatch):
    monkeypatch.setattr("optkit.cli.bench._tokenizer_dir", lambda *_: "")


def test_bench_prints_a_table_and_saves_a_result_when_a_url_is_given(no_model, capsys, tmp_path):
    file = tmp_path / "r.json"
    with FakeServer(normal).run() as url:
        words = ["bench", "--url", url, "--num-prompts", "2", "--random-input-len", "5", "--output-len", "2"]
        assert main.run([*words, "--rounds", "2", "--save-result", str(file), "--slo", "ttft:60000"]) == 0
        assert main.run([*words, "--rounds", "1", "--slo", "ttft:0.0001", "--json"]) == 3
    out = capsys.readouterr()
    assert "TTFT p95 ms" in out.out and "SLO missed: p95 ttft" in out.err
    assert json.loads(file.read_text())["workload"]["input_len"] == 5
    start = out.out.index("{\n")
    assert json.loads(out.out[start:])["slo_misses"]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["somewhere", "--url", "http://x"],
        ["/nonexistent/artifact"],
        ["--url", "http://127.0.0.1:9"],
        ["--url", "http://127.0.0.1:9", "--slo", "ttft:1", "--goodput", "ttft:2"],
        ["--url", "http://127.0.0.1:9", "--definitions", "vlm"],
        ["--url", "http://127.0.0.1:9", "--output-len", "0"],
    ],
)
def test_bench_exits_with_2_when_arguments_are_wrong(no_model, words):
    assert main.run(["bench", *words]) == 2


def test_bench_exits_with_2_when_a_url_has_no_tokenizer(capsys):
    assert main.run(["bench", "--url", "http://127.0.0.1:9"]) == 2
    assert "tokenizer" in capsys.readouterr().err


def test_bench_sends_the_api_key_to_the_url(no_model, monkeypatch):
    monkeypatch.setenv("OPTKIT_API_KEY", "secret")
    server = FakeServer(normal)
    with server.run() as url:
        words = ["bench", "--url", url, "--num-prompts", "1", "--rounds", "1", "--num-warmups", "0", "--json"]
        assert main.run([*words, "--input-len", "4", "--output-len", "1"]) == 0
    assert {h.get("authorization") for h in server.headers} == {"Bearer secret"}


def test_recipe_bounds_are_the_slo_of_the_artifacts_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    bounded = parse_recipe("schema_version: 1\nname: p\npasses: {}\nslo: {ttft_ms: 700}\n")
    silent = parse_recipe("schema_version: 1\nname: s\npasses: {}\n")
    opened = {"bounded": bounded, "silent": silent}
    monkeypatch.setattr(Artifact, "open", lambda path: SimpleNamespace(recipe=opened[path.name]))
    assert recipe_bounds(Path("bounded")) == LatencyBounds(ttft=700)
    with pytest.raises(UserError, match="the artifact's recipe has no slo"):
        recipe_bounds(Path("silent"))
    with pytest.raises(UserError, match="no recipe without an artifact"):
        recipe_bounds(None)
