"""Results at several loads: order, the table, and the points of charts."""

from __future__ import annotations

from pathlib import Path

import pytest

from optkit.bench.rates import Sweep, SweepPoint
from optkit.bench.workload import WorkloadConfig
from optkit.report.bench_file import Bench, read_benches
from optkit.report.bench_sections import bench_sections
from optkit.report.document import Sources
from optkit.report.loads import load_points, loads_table
from optkit.report.markdown import report_markdown
from tests.support.sample_bench import bench_result, record

TPOT = ("latency_ms", "tpot", "p50")


def test_the_points_of_a_chart_are_in_the_order_of_the_loads() -> None:
    loads = [
        Bench(
            str(rate),
            bench_result(
                {"optkit": [[record(i, 0.1 * rate, tpot=0.01 * rate) for i in range(59)]]},
                WorkloadConfig(num_prompts=59, request_rate=rate),
            ),
        )
        for rate in (4.0, 1.0, 2.0)
    ]
    points = list(load_points(loads, "optkit", TPOT))
    assert [latency for _, latency in points] == pytest.approx([10, 20, 40])
    assert [row[0] for row in loads_table(loads)[1]] == ["1.0", "2.0", "4.0"]
    assert not list(load_points(loads, "another", TPOT))


@pytest.mark.parametrize(("requests", "rounds", "shown"), [(58, 1, False), (59, 1, True), (30, 2, True)])
def test_a_p95_of_too_few_requests_is_in_neither_table_nor_chart(
    requests: int, rounds: int, shown: bool, tmp_path: Path
) -> None:
    points = []
    for rate in (1.0, 2.0):
        sides = {"optkit": [[record(i, 0.1 + 0.001 * i) for i in range(requests)] for _ in range(rounds)]}
        config = WorkloadConfig(num_prompts=requests, request_rate=rate, max_concurrency=None)
        points.append(SweepPoint(rate, bench_result(sides, config)))
    Sweep(("optkit",), tuple(points)).save(tmp_path / "sweep.json")
    benches = read_benches(tmp_path / "sweep.json")
    p95 = ("latency_ms", "ttft", "p95")
    assert len(list(load_points(benches, "optkit", p95))) == (2 if shown else 0)
    header, rows = loads_table(benches)
    assert [row[header.index("TTFT p95, ms")] == "not shown" for row in rows] == [not shown] * 2
    assert not any(row[header.index("TTFT p50, ms")] == "not shown" for row in rows)
    text = "".join(bench_sections(benches)[1].body)
    assert ("TTFT p95 against throughput" in text) == shown == ("fewer than 59 requests" not in text)
    assert ("not shown" not in report_markdown(Sources(None, benches))) == shown
