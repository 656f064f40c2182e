"""The comparison of load generators: their reports, and the command with stand-ins for the tools."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.clients import __main__ as command
from bench.clients import tools
from bench.clients.tools import Load, Numbers, Target, ToolError
from tests.support.fake_server import FakeServer, text, usage

GUIDELLM = {
    "benchmarks": [
        {
            "metrics": {
                "request_totals": {"successful": 4, "incomplete": 0, "errored": 0, "total": 4},
                "time_to_first_token_ms": {"successful": {"mean": 20.0}},
                "inter_token_latency_ms": {"successful": {"mean": 5.0}},
                "output_tokens_per_second": {"successful": {"mean": 100.0}},
            }
        }
    ]
}
AIPERF = {
    "request_count": {"avg": 4.0},
    "time_to_first_token": {"avg": 20.0},
    "inter_token_latency": {"avg": 5.0},
    "output_token_throughput": {"avg": 100.0},
}


class Characters:
    """A tokenizer with a token for each character."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        return SimpleNamespace(input_ids=[ord(c) for c in text])

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def test_reports_become_numbers_and_lost_requests_are_errors() -> None:
    assert tools.of_guidellm(GUIDELLM, 4) == tools.of_aiperf(AIPERF, 4) == Numbers(20.0, 5.0, 100.0)
    for read, report in ((tools.of_guidellm, GUIDELLM), (tools.of_aiperf, AIPERF)):
        with pytest.raises(ToolError, match="of 5 requests"):
            read(report, 5)  # type: ignore[operator]


def test_guidellm_may_cut_off_its_last_request_and_nothing_else() -> None:
    metrics = GUIDELLM["benchmarks"][0]["metrics"]

    def read(**totals: int) -> Numbers:
        return tools.of_guidellm({"benchmarks": [{"metrics": metrics | {"request_totals": totals}}]}, 4)

    assert read(successful=3, incomplete=1, errored=0).ttft_ms == 20.0
    for totals in (
        {"successful": 2, "incomplete": 2, "errored": 0},
        {"successful": 3, "incomplete": 0, "errored": 1},
    ):
        with pytest.raises(ToolError, match="of 4 requests"):
            read(**totals)


def test_server_and_tools_have_cores_of_their_own_where_there_are_two() -> None:
    assert command.split_cores({0, 1}) == ({0}, {1})
    assert command.split_cores({4, 5, 6}) == ({4}, {5, 6})
    assert command.split_cores({3}) == ({3}, {3})


def test_a_tool_that_fails_shows_its_output(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match=r"code 3: .*broken"):
        tools.run("x", ["sh", "-c", "echo broken; exit 3"], tmp_path, {})
    with pytest.raises(ToolError, match="nowhere"):
        tools.run("x", ["/nowhere"], tmp_path, {})


def test_optkit_s_numbers_are_means_by_the_tool_s_formulas() -> None:
    script = lambda body: [0.05, text("a"), 0.03, text("b"), usage(len(body["prompt"]), 2), "[DONE]"]  # noqa: E731
    load = Load(("ab", "cd"), ((1, 2), (3, 4)), 2, 1)
    with FakeServer(script).run() as url:
        numbers = tools.optkit(Target(url, "m", Path()), load, "guidellm")
    assert (
        50 <= numbers.ttft_ms < 500 and 20 <= numbers.itl_ms < 200
    )  # a first token read late shortens the 30 ms
    with FakeServer(lambda body: ["{"]).run() as url, pytest.raises(ToolError, match="2 requests failed"):
        tools.optkit(Target(url, "m", Path()), load, "aiperf")


@pytest.mark.parametrize("factor", [1.0, 1.2])
def test_the_command_compares_and_saves(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[str] = []

    def tool(program: Path, target: Target, load: Load, folder: Path) -> Numbers:
        sent.extend(load.texts)
        assert folder.is_dir() and all(len(x) == 8 for x in load.ids)
        return Numbers(20.0 * factor, 5.0, 100.0)

    def own(target: Target, load: Load, definitions: str) -> Numbers:
        sent.extend(load.texts)
        return Numbers(20.0, 5.0, 100.0)

    @contextmanager
    def running(command: list[str], port: int) -> Iterator[str]:
        yield "http://x"

    monkeypatch.setattr(command.os, "sched_setaffinity", lambda process, cores: None)
    monkeypatch.setattr(command, "RUN", {"guidellm": tool, "aiperf": tool})
    monkeypatch.setattr(tools, "optkit", own)
    monkeypatch.setattr(command, "running", running)
    monkeypatch.setattr(command, "model_name", lambda url: "m")
    monkeypatch.setattr(command, "load_tokenizer", lambda directory: Characters())
    monkeypatch.setattr(command, "text_ids", lambda tokenizer: list(range(33, 120)) * 3)
    file = tmp_path / "r.json"
    words = ["artifact", "--rounds", "2", "--requests", "3", "--input-len", "8", "--save-result", str(file)]
    assert command.main(words) == (0 if factor == 1.0 else 1)
    saved = json.loads(file.read_text())
    assert saved["ratios"]["aiperf"]["ttft_ms"] == {"ratio": pytest.approx(factor)}
    assert saved["missed"] == ([] if factor == 1.0 else ["guidellm ttft_ms", "aiperf ttft_ms"])
    assert len(sent) == 3 * 6 * 3  # three prompts, six sets, two rounds and a warm-up
    assert ("MISSED" in capsys.readouterr().out) == (factor != 1.0)


def test_the_ratio_of_rounds_has_an_interval_from_six_on() -> None:
    values = [1.02, 0.97, 1.05, 0.95, 1.0, 1.01]
    found = command.of_rounds(values)
    assert found["low"] == pytest.approx(0.95) and found["high"] == pytest.approx(1.05)
    assert found["ratio"] == pytest.approx(np.prod(values) ** (1 / 6))
    assert set(command.of_rounds(values[:5])) == {"ratio"}


@pytest.mark.parametrize(
    ("found", "remark"),
    [
        ({"ratio": 1.04}, ""),
        ({"ratio": 1.06}, "MISSED"),
        ({"ratio": float("nan")}, "MISSED"),
        ({"ratio": 1.0, "low": 0.97, "high": 1.04}, ""),
        ({"ratio": 1.0, "low": 0.71, "high": 1.41}, "NOT SHOWN"),
        ({"ratio": 1.0, "low": float("nan"), "high": 1.0}, "NOT SHOWN"),
    ],
)
def test_a_ratio_has_to_be_near_one_and_known_well_enough(found: dict[str, float], remark: str) -> None:
    assert command.off(found).strip() == remark


def test_a_steady_drift_between_the_runs_of_a_round_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine gets slower by a tenth with each run: the tool in the middle is as slow as the mean."""
    runs = iter((1.0, 1.1, 1.2))
    numbers = lambda *_: Numbers(*(3 * [100.0 * next(runs)]))  # noqa: E731
    monkeypatch.setattr(command, "RUN", {"x": numbers})
    monkeypatch.setattr(tools, "optkit", numbers)
    load = Load(("a",), ((1,),), 2, 1)
    found = command.beside("x", Path(), Target("http://x", "m", Path()), [load] * 3)
    assert found["ratio"] == pytest.approx(dict.fromkeys(found["ratio"], 1.0))
