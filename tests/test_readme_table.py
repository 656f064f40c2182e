"""bench/readme_table.py: the README's numbers come from saved results, and the committed README is up to date."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


def script() -> Any:
    spec = importlib.util.spec_from_file_location("readme_table", ROOT / "bench" / "readme_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def spread(value: float) -> dict[str, float]:
    return {"median": value, "q1": value * 0.9, "q3": value * 1.1}


def saved(**changes: Any) -> dict[str, Any]:
    """What ``optkit bench --save-result`` writes, without the raw records."""
    environment = {"cores": 2, "cpu": "Some CPU", "load_average": 0.1}
    ttft = {"optkit": spread(150.0), "baseline": spread(600.0), "ratio": {"baseline": spread(0.25)}}
    return {
        "environment": environment | {"packages": {"torch": "2.13.0", "transformers": "5.23.0"}},
        "workload": {
            "num_prompts": 8,
            "input_len": 512,
            "output_len": 64,
            "max_concurrency": 1,
            "request_rate": None,
        },
        "comparison": {
            "latency_ms.ttft.p50": ttft,
            "latency_ms.tpot.p50": {"optkit": None, "baseline": None, "ratio": {"baseline": None}},
        },
        "sides": {"optkit": {}, "baseline": {}},
        "turns": [],
        "problems": [],
    } | changes


@pytest.mark.parametrize(
    ("rounds", "failed", "shown"), [(1, 0, False), (7, 0, False), (8, 0, True), (8, 6, False)]
)
def test_a_p95_of_fewer_than_59_answered_requests_is_left_out(rounds: int, failed: int, shown: bool) -> None:
    latency = {"optkit": spread(150.0), "baseline": spread(600.0), "ratio": {"baseline": spread(0.25)}}
    comparison = {"latency_ms.ttft.p50": latency, "latency_ms.ttft.p95": latency}
    answered = [{"error": None}] * 8
    turns = [{"side": side, "records": answered} for side in ("optkit", "baseline") for _ in range(rounds)]
    turns[0] = turns[0] | {"records": [{"error": "it failed"}] * failed + answered[failed:]}
    table = script().block("r", saved(comparison=comparison, turns=turns))
    assert "TTFT p50, ms" in table and ("TTFT p95, ms" in table) == shown


def test_the_committed_readme_is_up_to_date() -> None:
    assert script().main(["--check"]) == 0


def test_measurements_in_the_text_of_the_readme_are_in_a_result() -> None:
    """Between the two tables: divergences, agreements and numbers of tokens, as they are rounded there."""
    text = (ROOT / "README.md").read_text("utf-8")
    paragraph = text.partition("<!-- measured:end -->")[2].partition("Every pass's record")[0]
    quoted = re.findall(r"\d[\d,]*(?:\.\d+)?(?= (?:nats|%|tokens))|(?<=: )0\.\d+", paragraph)
    assert len(quoted) == 6
    found = set()
    for file in (ROOT / "bench" / "results").rglob("*.json"):
        for value in numbers(json.loads(file.read_text("utf-8"))):
            found |= {f"{value:.4f}", f"{100 * value:.1f}", f"{value:,}"}
    assert set(quoted) <= found


def numbers(data: Any) -> Iterator[float]:
    """Every number in a JSON document that is no time stamp of a token."""
    if isinstance(data, dict):
        for key, value in data.items():
            if key not in ("records", "chunks", "rounds", "turns"):
                yield from numbers(value)
    elif isinstance(data, list):
        for value in data:
            yield from numbers(value)
    elif isinstance(data, int | float) and not isinstance(data, bool):
        yield data


def test_engines_that_the_readme_names_beside_its_table_were_measured_or_are_said_to_be_left_out() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    before, _, table = text.partition("<!-- peers:begin -->")
    intro = before.partition("### Beside other engines")[2]
    header = next(line for line in table.splitlines() if line.startswith("|  |")).lower()
    for engine, name in (("llama.cpp", "llama.cpp"), ("OpenVINO", "openvino"), ("vLLM", "vllm")):
        assert engine in intro
        assert (name in header) != (f"left {engine} out" in intro)


def test_a_result_becomes_a_table(tmp_path: Path) -> None:
    (tmp_path / "some-cpu-512.json").write_text(json.dumps(saved(problems=["busy"])))
    text = script().section(tmp_path)
    assert "**512 tokens in, 64 out, 8 requests a round, 1 at a time** on 2 cores of Some CPU" in text
    assert "| TTFT p50, ms | 150 [135, 165] | 600 [540, 660] (0.25) |" in text
    assert "| TPOT p50, ms | - | - |" in text
    assert "Warnings of this run: 1" in text


def test_a_result_held_to_an_instruction_set_says_so(tmp_path: Path) -> None:
    result = saved()
    result["environment"]["isa_env"] = {"OPTKIT_CPU_ISA": "avx2"}
    (tmp_path / "some-cpu-avx2.json").write_text(json.dumps(result))
    assert "on 2 cores of Some CPU held to `OPTKIT_CPU_ISA=avx2`, torch" in script().section(tmp_path)


def test_only_benchmark_results_are_quoted(tmp_path: Path) -> None:
    for name in ("demo.json", "local.json", "peers-local.json"):
        (tmp_path / name).write_text(json.dumps(saved(figures=[], servers={})))
    (tmp_path / "kernels.json").write_text('{"linear": 1}')
    (tmp_path / "list.json").write_text("[]")
    assert script().section(tmp_path) == script().NOTHING
    assert script().peers_section(tmp_path) == script().PEERS_NOTHING
    assert script().PEERS_NOTHING in script().peers_page(tmp_path)


def test_only_what_is_between_the_markers_changes() -> None:
    table = script()
    readme = "before\n<!-- x:begin -->\nold\n<!-- x:end -->\nafter\n"
    assert table.rewritten(readme, "x", "new") == readme.replace("old", "new")
    with pytest.raises(SystemExit):
        table.rewritten("no markers", "x", "new")
