"""Paired runs: the order of turns, ratios within rounds, saved results, the command line."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from optkit.artifact.artifact import Artifact
from optkit.bench import run as bench_run
from optkit.bench.metrics import Slo
from optkit.bench.records import Chunk, RequestRecord
from optkit.bench.result import BenchResult, Turn, spread
from optkit.bench.run import Side, run_bench
from optkit.bench.table import legend, rows, table
from optkit.bench.workload import WorkloadConfig
from optkit.cli import main
from optkit.cli.bench import parse_bounds, recipe_bounds
from optkit.errors import UserError
from optkit.recipe.schema import parse_recipe
from tests.support.fake_server import FakeServer, normal

CONFIG = WorkloadConfig(num_prompts=2, input_len=6, output_len=3)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(bench_run, "SETTLE", 0.0)
    monkeypatch.setattr("optkit.bench.environment.load_average", lambda: 0.0)
    monkeypatch.setattr(bench_run, "load_tokenizer", lambda directory: None)
    monkeypatch.setattr(bench_run.workload, "text_ids", lambda tokenizer: list(range(500)))


def turn(side, round_, ttft):
    chunks = [Chunk(ttft, 1), Chunk(ttft + 0.1, 1)]
    record = RequestRecord(0, send=0.0, chunks=chunks, done=ttft + 0.1, output_tokens=2)
    return Turn(side, round_, 0.5, [record], [])


def made():
    turns = [
        turn(side, i, t)
        for i, pair in enumerate([(1, 2), (2, 6), (3, 12)])
        for side, t in zip("ab", pair, strict=True)
    ]
    return BenchResult(CONFIG, ["a", "b"], turns, Slo(ttft=2500), environment={"cpu": "x"})


def test_sides_alternate_on_identical_requests():
    order, servers = [], {}
    for name in "ab":
        servers[name] = FakeServer(lambda body, name=name: order.append(name) or normal(body))
    with servers["a"].run() as a, servers["b"].run() as b:
        result = run_bench([Side("a", url=a + "/v1"), Side("b", url=b)], CONFIG, "", rounds=3, num_warmups=1)
    assert "".join(order) == "ab" + "aabb" * 3
    assert servers["a"].bodies == servers["b"].bodies
    prompts = [tuple(body["prompt"]) for body in servers["a"].bodies]
    assert len(set(prompts)) == len(prompts) == 7
    assert [(t.side, t.round) for t in result.turns] == [(s, i) for i in range(3) for s in "ab"]
    assert result.problems() == [] and all(t.load_average >= 0 for t in result.turns)
    assert {"cpu", "packages", "command", "cores"} <= set(result.environment)


def test_failures_show_as_problems():
    with FakeServer(lambda body: ["{"]).run() as url:
        result = run_bench([Side("a", url=url)], CONFIG, "", rounds=1, num_warmups=0, slo=Slo(ttft=1000))
    assert len(result.problems()) == 2 and "a round 0: request 0 failed" in result.problems()[0]
    assert result.slo_misses() == ["p95 ttft inf ms > 1000 ms"]


def test_a_busy_machine_is_a_problem():
    result = made()
    result.environment = {"load_average": 3.0, "cores": 2}
    assert result.problems() == ["the machine was busy: load average 3.0 on 2 cores"]
    result.environment = {"load_average": 0.4, "cores": 2}
    assert result.problems() == []


def test_medians_and_ratios_are_over_rounds():
    path = ("latency_ms", "ttft", "p50")
    assert made().statistic("a", path) == pytest.approx({"median": 2000, "q1": 1500, "q3": 2500})
    assert made().ratio("b", path)["median"] == pytest.approx(1 / 3)  # of 1/2, 1/3, 1/4
    assert spread([1.0, None]) is None
    assert made().ratio("b", ("no", "such")) is None


def test_slo_looks_at_the_candidate_only():
    assert made().slo_misses() == ["p95 ttft 2900.0 ms > 2500 ms"]


def test_a_saved_result_comes_back(tmp_path):
    made().save(tmp_path / "deep" / "result.json")
    data = json.loads((tmp_path / "deep" / "result.json").read_text())
    assert data["comparison"]["latency_ms.ttft.p50"]["ratio"]["b"]["median"] == pytest.approx(1 / 3)
    again = BenchResult.from_dict(data)
    assert again == made()
    again.definitions = "guidellm"
    assert again.rounds("a")[0]["latency_ms"]["tpot"]["p50"] == pytest.approx(550)  # includes TTFT


def test_the_table_has_a_row_per_number_and_a_formula_per_metric():
    result = made()
    assert table(result).row_count == len(rows(result))
    assert [c.header for c in table(result).columns] == ["", "a", "b", "x b"]
    assert any("(done - first) / (n - 1)" in line for line in legend(result))


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft:700", Slo(ttft=700)),
        ("ttft:700,tpot:50.5", Slo(700, 50.5)),
        ("e2e:1 ttft:2", Slo(2, None, 1)),
        ("", Slo()),
    ],
)
def test_bounds(text, slo):
    assert parse_bounds(text) == slo


@pytest.mark.parametrize("text", ["tft:700", "ttft", "ttft:x", "ttft:-1", "ttft:nan", "ttft:inf", "ttft:0"])
def test_wrong_bounds_are_user_errors(text):
    with pytest.raises(UserError):
        parse_bounds(text)


@pytest.fixture
def no_model(monkeypatch):
    monkeypatch.setattr("optkit.cli.bench._tokenizer_dir", lambda *_: "")


def test_command_line(no_model, capsys, tmp_path):
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
def test_mistakes_exit_with_2(no_model, words):
    assert main.run(["bench", *words]) == 2


def test_url_alone_needs_a_tokenizer(capsys):
    assert main.run(["bench", "--url", "http://127.0.0.1:9"]) == 2
    assert "tokenizer" in capsys.readouterr().err


def test_the_api_key_goes_to_the_url_and_nowhere_else(no_model, monkeypatch):
    monkeypatch.setenv("OPTKIT_API_KEY", "secret")
    server = FakeServer(normal)
    with server.run() as url:
        words = ["bench", "--url", url, "--num-prompts", "1", "--rounds", "1", "--num-warmups", "0", "--json"]
        assert main.run([*words, "--input-len", "4", "--output-len", "1"]) == 0
    assert {h.get("authorization") for h in server.headers} == {"Bearer secret"}


def test_slo_recipe_takes_the_promise_of_the_artifact(monkeypatch: pytest.MonkeyPatch) -> None:
    promised = parse_recipe("schema_version: 1\nname: p\npasses: {}\nslo: {ttft_ms: 700}\n")
    silent = parse_recipe("schema_version: 1\nname: s\npasses: {}\n")
    opened = {"promised": promised, "silent": silent}
    monkeypatch.setattr(Artifact, "open", lambda path: SimpleNamespace(recipe=opened[path.name]))
    assert recipe_bounds(Path("promised")) == Slo(ttft=700)
    with pytest.raises(UserError, match="the artifact's recipe has no slo"):
        recipe_bounds(Path("silent"))
    with pytest.raises(UserError, match="a server has no recipe"):
        recipe_bounds(None)
