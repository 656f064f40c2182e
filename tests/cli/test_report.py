"""The report command: what it writes, and one line for each mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optkit.cli import main
from tests.report.test_document import evaluation
from tests.support.parsed_page import ParsedPage
from tests.support.sample_artifact import real_artifact, sample_run
from tests.support.sample_bench import bench_result
from tests.support.saved_results import tuning_file

RECIPE = "schema_version: 1\nname: small\ntarget: cuda-h100\npasses: []\n"


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return real_artifact(tmp_path / "out", tmp_path / "source", RECIPE, sample_run())


def test_report_writes_page_and_markdown(artifact: Path, tmp_path: Path) -> None:
    bench_result().save(tmp_path / "bench.json")
    evaluation(tmp_path)
    page, text = tmp_path / "new" / "report.html", tmp_path / "report.md"
    words = [
        "report",
        str(artifact),
        "--bench",
        str(tmp_path / "bench.json"),
        "--eval",
        str(tmp_path / "eval.json"),
    ]
    assert main.run([*words, "-o", str(page), "--markdown", str(text)]) == 0
    parsed = ParsedPage(page.read_text())
    parsed.assert_self_contained()
    assert "small by small" in parsed.words and "bench: 512 tokens in" in parsed.words
    assert text.read_text().startswith("### small by small")


def test_the_page_in_the_artifact_is_the_report_without_further_sources(
    artifact: Path, tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    assert main.run(["report", str(artifact), "-o", str(page)]) == 0
    own = (artifact / "optkit" / "report.html").read_text()
    head, _, rest = page.read_text().partition("<h2>Not in this report</h2>")
    assert own.startswith(head.partition("<nav")[0]) and "optkit bench" in rest
    stored = json.loads((artifact / "optkit" / "report.json").read_text())
    assert stored["memory"]["weight_bytes"] > 0 and stored["floor"]


def test_an_artifact_of_an_earlier_version_gets_floor_and_memory_from_its_graph(
    artifact: Path, tmp_path: Path
) -> None:
    from optkit.artifact.manifest import read_manifest, write_manifest

    file = artifact / "optkit" / "report.json"
    data = json.loads(file.read_text())
    expected = {key: data.pop(key) for key in ("floor", "memory", "environment")}
    file.write_text(json.dumps(data))
    manifest = {key: value for key, value in read_manifest(artifact).items() if key != "files"}
    (artifact / "optkit" / "manifest.json").unlink()
    write_manifest(artifact, manifest)

    from optkit.report.artifact_file import artifact_report

    assert {key: artifact_report(artifact)[key] for key in expected} == expected


def test_markdown_may_go_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench_result().save(tmp_path / "bench.json")
    assert main.run(["report", "--bench", str(tmp_path / "bench.json"), "--markdown", "-"]) == 0
    assert capsys.readouterr().out.startswith("### bench\n")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-o", "page.html"], "nothing to report on"),
        (["ARTIFACT"], "nothing to write"),
        (["none", "-o", "page.html"], "none"),
        (
            ["--bench", "none.json", "-o", "page.html"],
            "No such file or directory. give a file that can be read",
        ),
        (["--eval", "FOREIGN", "-o", "page.html"], "no result of optkit eval"),
        (["--bench", "FOREIGN", "-o", "page.html"], "no result of optkit bench"),
        (["--plan", "FOREIGN", "-o", "page.html"], "no result of optkit plan"),
        (["--profile", "FOREIGN", "-o", "page.html"], "no result of optkit profile"),
        (["--tune", "FOREIGN", "-o", "page.html"], "no result of optkit tune"),
        (["--bench", "BENCH", "-o", "BENCH/page.html"], "can't be written"),
    ],
)
def test_mistakes_are_one_line(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    (tmp_path / "foreign.json").write_text('{"a": NaN}')
    bench_result().save(tmp_path / "bench.json")
    names = {"ARTIFACT": artifact, "FOREIGN": tmp_path / "foreign.json", "BENCH": tmp_path / "bench.json"}
    given = [str(names.get(word.split("/")[0], word)) + word[len(word.split("/")[0]) :] for word in words]
    assert main.run(["report", *given]) == 2
    error = capsys.readouterr().err
    assert told in error and "Traceback" not in error


def test_a_damaged_report_is_one_line(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (artifact / "optkit" / "report.json").write_text("{}")
    assert main.run(["report", str(artifact), "-o", str(tmp_path / "page.html")]) == 2
    assert "report.json" in capsys.readouterr().err


def test_a_tuning_alone_is_a_report(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert main.run(["report", "--tune", str(tuning_file(tmp_path)), "-o", str(page)]) == 0
    assert "ttft_p95 453 ms" in ParsedPage(page.read_text()).words
