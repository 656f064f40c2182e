"""Figures and ratios from turns, and the README's tables from figures."""

from __future__ import annotations

import pytest

from bench import readme_table
from bench.peers.result import MIB, Measured, ServerReport, rounded
from bench.peers.workloads import WORKLOADS
from optkit.bench.records import Chunk, RequestRecord
from optkit.bench.result import BenchResult, Turn


def turn(side: str, round_: int, ttft: float) -> Turn:
    chunks = [Chunk(ttft, 1), Chunk(ttft + 0.1, 1)]
    return Turn(
        side, round_, 0.1, [RequestRecord(0, 0.0, chunks=chunks, done=ttft + 0.1, output_tokens=2)], []
    )


def made() -> Measured:
    """Two artifacts and a peer, whose TTFT in two rounds are 1 and 2, 2 and 2, 4 and 10 seconds."""
    times = {"a": (1, 2), "b": (2, 2), "peer": (4, 10)}
    turns = [turn(side, i, pair[i]) for i in range(2) for side, pair in times.items()]
    environment = {"cores": 2, "cpu": "Some CPU", "load_average": 0.1}
    environment |= {"packages": {"torch": "2", "transformers": "5"}}
    servers = {
        name: ServerReport({"version": f"{name} 1"}, [start], memory * MIB)
        for name, start, memory in (("a", 2.0, 100), ("b", 2.0, 50), ("peer", 4.0, 400))
    }
    results = {"short": BenchResult(WORKLOADS["short"], list(times), turns, environment=environment)}
    return Measured("tiny", environment, {"gone": "no wheel"}, servers, results, ["a", "b"])


def row(name: str) -> dict:
    return next(row for row in made().figures() if row["figure"].startswith(name))


def test_ratios_are_taken_within_rounds_for_every_artifact():
    ratios = row("TTFT, 128")["ratios"]
    assert ratios["a"]["peer"]["median"] == pytest.approx((1 / 4 + 2 / 10) / 2)
    assert ratios["b"]["peer"]["median"] == pytest.approx((2 / 4 + 2 / 10) / 2)
    assert ratios["a"]["b"]["median"] == pytest.approx((1 / 2 + 1) / 2)
    assert "a" not in ratios["a"]


def test_medians_have_quartiles():
    assert row("TTFT, 128")["servers"]["peer"] == {"median": 7000, "q1": 5500, "q3": 8500}


def test_start_and_memory_are_figures_too():
    assert row("process start")["ratios"]["a"]["peer"]["median"] == 0.5
    assert row("peak")["servers"]["a"]["median"] == 100
    assert row("peak")["ratios"]["b"]["peer"]["median"] == pytest.approx(1 / 8)


def test_a_side_that_failed_has_no_number():
    measured = made()
    measured.results["short"].turns[2].records[0].error = "gone"
    assert measured.figures()[0]["servers"]["peer"] is None
    assert measured.figures()[0]["ratios"]["a"]["peer"] is None
    assert any("peer round 0: request 0 failed" in line for line in measured.problems())
    text = readme_table.peers_block("x", measured.to_dict())
    assert "| - |" in text
    assert "No figure: TTFT, 128 tokens, peer (round 1: gone)" in text


def test_a_server_left_out_of_a_workload_has_no_number_and_a_reason():
    measured = made()
    measured.results["short"].sides.remove("peer")
    measured.results["short"].turns = [t for t in measured.results["short"].turns if t.side != "peer"]
    text = readme_table.peers_block("x", measured.to_dict())
    assert "| TTFT, 128 tokens | 0.75 [0.62, 0.88] | - |" in text
    assert "No figure: TTFT, 128 tokens, peer (it answers one request at a time)" in text


def test_an_engine_with_avx512_in_a_run_on_avx2_is_a_problem():
    measured = made()
    measured.servers["peer"].used_avx512 = True
    assert measured.problems() == []
    measured.isa = "avx2"
    assert measured.problems() == ["peer used AVX-512 in a run on AVX2"]


def test_the_page_says_what_each_engine_ran_on():
    measured = made()
    measured.isa = "avx2"
    measured.servers["a"].settings["isa"] = "avx2 kernels"
    measured.servers["a"].used_avx512 = False
    measured.servers["b"].settings["isa"] = "AVX2"
    text = readme_table.peers_block("x", measured.to_dict())
    assert "**tiny** held to AVX2, on 2 cores" in text
    assert "seen by the kernel: a: avx2 kernels (no AVX-512 seen); b: AVX2." in text
    assert "held to" not in readme_table.peers_block("x", made().to_dict())


def test_the_readme_has_medians_and_the_ratios_of_the_first_artifact():
    text = readme_table.peers_summary("peers-x", made().to_dict())
    assert "| TTFT, 128 tokens, ms | 1500 | 2000 (0.75) | 7000 (0.23) |" in text
    assert "[" not in text and "Versions" not in text


def test_an_artifact_that_was_skipped_is_no_candidate():
    measured = made()
    measured.artifacts = ["a", "lost"]
    assert measured.to_dict()["artifacts"] == ["a"]


def test_the_page_shows_medians_ratios_versions_and_who_is_missing():
    text = readme_table.peers_block("peers-x", made().to_dict())
    assert "**tiny** on 2 cores of Some CPU" in text and "`peers-x.json`" in text
    assert "|  | a | b | peer |" in text
    assert "| TTFT, 128 tokens, ms | 1500 [1250, 1750] | 2000 | 7000 [5500, 8500] |" in text
    assert "| TTFT, 128 tokens | 0.75 [0.62, 0.88] | 0.23 [0.21, 0.24] |" in text
    assert "| peak resident memory | 2.00 | 0.25 |" in text
    assert "Not measured: gone (no wheel)" in text


def test_numbers_are_saved_with_microseconds():
    assert rounded({"a": [0.12345678, 1], "b": None}) == {"a": [0.123457, 1], "b": None}
