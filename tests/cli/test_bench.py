"""optkit bench: output, exit codes, results."""

from __future__ import annotations

import json

import pytest
from starlette.responses import JSONResponse

from optkit.bench import run as bench_run
from optkit.cli import main
from tests.support.fake_server import FakeServer, normal, text, usage


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(bench_run, "SETTLE", 0.0)
    monkeypatch.setattr("optkit.bench.environment.load_average", lambda: 0.0)
    monkeypatch.setattr("optkit.bench.environment.cpu_in_use", lambda: None)
    monkeypatch.setattr(bench_run, "load_tokenizer", lambda directory: None)
    monkeypatch.setattr(bench_run.workload, "text_ids", lambda tokenizer: list(range(500)))


@pytest.fixture
def no_model(monkeypatch):
    monkeypatch.setattr("optkit.bench.sides.tokenizer_directory", lambda *_: "")


def test_bench_prints_a_table_and_saves_a_result_when_a_url_is_given(no_model, capsys, tmp_path):
    file = tmp_path / "r.json"
    with FakeServer(normal).run() as url:
        words = ["bench", "--url", url, "--num-prompts", "2", "--random-input-len", "5", "--output-len", "2"]
        assert main.run([*words, "--rounds", "2", "--save-result", str(file), "--slo", "ttft:60000"]) == 0
        assert main.run([*words, "--rounds", "1", "--slo", "ttft:0.0001", "--json"]) == 3
    out = capsys.readouterr()
    assert "TTFT p50 ms" in out.out and "SLO missed: p95 ttft" in out.err
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
        ["--url", "http://127.0.0.1:9", "--assert", "fast"],
        ["--url", "http://127.0.0.1:9", "--sweep", "--find-rate"],
        ["--url", "http://127.0.0.1:9", "--find-rate"],
        ["--url", "http://127.0.0.1:9", "--sweep", "--assert", "ttft_p50<3ms"],
        ["--url", "http://127.0.0.1:9", "--sweep", "--max-concurrency", "2"],
        ["--url", "http://127.0.0.1:9", "--find-rate", "--slo", "ttft:1", "--rounds", "2"],
        ["--url", "http://127.0.0.1:9", "--probes", "2"],
        ["--url", "http://127.0.0.1:9", "--trace", "nowhere"],
        ["--url", "http://127.0.0.1:9", "--trace-scale", "a/b"],
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


FEW = ["--num-prompts", "6", "--input-len", "4", "--output-len", "2", "--num-warmups", "0"]


def test_bench_exits_with_5_when_an_assertion_is_not_held(no_model, capsys):
    with FakeServer(normal).run() as url:
        words = ["bench", url, *FEW, "--rounds", "1", "--assert"]
        assert main.run([*words, "ttft_p50<60s"]) == 0
        assert main.run([*words, "ttft_p95<60s"]) == 5
    err = capsys.readouterr().err
    assert "held: ttft_p50<60s" in err and "not shown: ttft_p95<60s: 59 requests needed, 6 measured" in err


def test_bench_finds_a_rate(no_model, capsys, tmp_path):
    file = tmp_path / "rate.json"
    with FakeServer(normal).run() as url:
        words = ["bench", url, *FEW, "--find-rate", "--probes", "2", "--request-rate", "50"]
        assert main.run([*words, "--slo", "ttft:60000", "--save-result", str(file)]) == 0
        assert main.run([*words, "--slo", "ttft:0.0001", "--json"]) == 3
    out = capsys.readouterr()
    assert "100/s" in out.out and "requests/s hold" in out.err and "no rate holds" in out.err
    assert json.loads(file.read_text())["kind"] == "find-rate"


def test_bench_sweeps(no_model, capsys):
    with FakeServer(normal).run() as url:
        assert main.run(["bench", "--url", url, *FEW, "--sweep", "--probes", "1"]) == 0
        plain = capsys.readouterr().out
        assert main.run(["bench", url, *FEW, "--sweep", "--probes", "1", "--goodput", "ttft:60000"]) == 0
    out = capsys.readouterr().out
    assert "synchronous" in out and "all at once" in out
    assert "goodput req/s" in out and "goodput" not in plain


@pytest.mark.parametrize(
    "mode",
    [
        ["--rounds", "1"],
        ["--sweep", "--probes", "1"],
        ["--find-rate", "--probes", "1", "--slo", "ttft:60000"],
    ],
)
def test_a_full_disk_costs_the_file_and_not_the_table(no_model, capsys, mode):
    with FakeServer(normal).run() as url:
        assert main.run(["bench", url, *FEW, *mode, "--save-result", "/dev/full"]) == 2
    out = capsys.readouterr()
    assert "TTFT p50 ms" in out.out
    assert "error: /dev/full: can't be written: No space left on device. make room on the disk" in out.err


def test_the_result_is_saved_where_the_table_can_not_be_printed(no_model, monkeypatch, tmp_path):
    def closed(*_):
        raise BrokenPipeError

    monkeypatch.setattr("optkit.cli.bench.print_report", closed)
    with FakeServer(normal).run() as url:
        main.run(["bench", url, *FEW, "--rounds", "1", "--save-result", str(tmp_path / "r.json")])
    assert json.loads((tmp_path / "r.json").read_text())["turns"]


@pytest.mark.parametrize("number", ["0", "-1"])
@pytest.mark.parametrize("option", ["--num-prompts", "--input-len", "--output-len", "--max-concurrency"])
@pytest.mark.parametrize("mode", [[], ["--sweep"], ["--find-rate", "--slo", "ttft:60000"]])
def test_a_number_of_nothing_is_refused_in_a_line(no_model, capsys, mode, option, number):
    server = FakeServer(normal)
    with server.run() as url:
        assert main.run(["bench", url, *mode, option, number]) == 2
    assert not server.bodies
    (line,) = [line for line in capsys.readouterr().err.splitlines() if option in line]
    assert "greater than or equal to 1" in line


def test_a_rate_of_zero_is_an_option_given(no_model, capsys):
    assert main.run(["bench", "http://127.0.0.1:9", "--sweep", "--request-rate", "0"]) == 2
    assert "--request-rate has no effect with --sweep" in capsys.readouterr().err


def test_bounds_of_a_sweep_add_a_column_and_are_no_failure(no_model, capsys):
    with FakeServer(normal).run() as url:
        assert main.run(["bench", url, *FEW, "--sweep", "--probes", "1", "--slo", "ttft:0.001"]) == 0
    assert "goodput req/s" in capsys.readouterr().out
    assert main.run(["bench", "--help"]) == 0
    told = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "with --sweep, which goes to saturation, the same as --goodput" in told


@pytest.mark.parametrize("mode", [[], ["--sweep"]])
def test_two_options_with_bounds_are_refused_and_a_wrong_bound_names_its_option(no_model, capsys, mode):
    words = ["bench", "http://127.0.0.1:9", *mode]
    assert main.run([*words, "--slo", "ttft:1", "--goodput", "ttft:2"]) == 2
    assert "--slo and --goodput both set the bounds" in capsys.readouterr().err
    for bounds in ("foo:3", "ttft:x", "ttft_p50<3", "throughput>3", "recipe"):
        assert main.run([*words, "--goodput", bounds]) == 2
        err = capsys.readouterr().err
        assert f"error: --goodput {bounds}: " in err and "--slo" not in err


def failing_after(answers):
    """A script with so many answers, then HTTP 500."""
    left = iter(range(answers))
    return lambda body: normal(body) if next(left, None) is not None else JSONResponse({}, 500)


def test_a_sweep_names_failed_requests_below_its_table(no_model, capsys):
    with FakeServer(failing_after(10)).run() as url:
        assert main.run(["bench", "--url", url, *FEW, "--sweep", "--probes", "1"]) == 0
    err = capsys.readouterr().err
    assert "all at once, " in err and ": 2 of 6 requests failed, the first: " in err
    assert err.count(": all 6 requests failed, the first: ") == 1 and "500" in err


def test_a_search_names_failed_requests_and_wrong_answers(no_model, capsys):
    words = [*FEW, "--find-rate", "--probes", "1", "--request-rate", "50", "--slo", "ttft:60000"]
    with FakeServer(failing_after(0)).run() as url:
        assert main.run(["bench", "--url", url, *words]) == 3
    assert "50/s, " in (err := capsys.readouterr().err) and "all 6 requests failed" in err
    with FakeServer(lambda body: [text("a "), usage(len(body["prompt"]), 1), "[DONE]"]).run() as url:
        main.run(["bench", "--url", url, *words])
    err = capsys.readouterr().err
    assert "1 output tokens, asked for 2 (and 5 more)" in err and err.count("asked for") == 1


@pytest.mark.parametrize("mode", [[], ["--sweep"], ["--find-rate", "--slo", "ttft:60000"]])
def test_a_result_without_a_place_is_refused_before_the_run(no_model, tmp_path, mode):
    server = FakeServer(normal)
    with server.run() as url:
        assert main.run(["bench", url, *FEW, *mode, "--save-result", str(tmp_path)]) == 2
    assert not server.headers
