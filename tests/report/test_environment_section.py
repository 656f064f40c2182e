"""The conditions of each measurement."""

from __future__ import annotations

from optkit.report.bench_file import Bench
from optkit.report.environment_section import environment_rows, environment_section
from tests.pipeline.test_report_page import report
from tests.support.parsed_page import ParsedPage
from tests.support.sample_bench import ENVIRONMENT, bench_result


def test_every_source_has_its_machine_and_a_busy_one_is_named() -> None:
    made = report(machine={"cpu": "maker", "kernels": "avx512"}, environment={"optkit": "0.1.0"})
    busy = Bench("b", bench_result(load_average=3.0))
    words = ParsedPage("".join(environment_section(made, [busy], []).body)).words
    for expected in ("maker", "avx512", "optkit 0.1.0", "a processor", "avx2, fma", "torch 2.13.0", "8 GB"):
        assert expected in words
    assert "The machine was busy: load average 3.0 on 2 cores" in words


def test_values_of_other_types_are_left_out() -> None:
    assert dict(environment_rows(ENVIRONMENT))["load average before"] == "0.10"
    assert not any(
        value for _, value in environment_rows({"cpu": None, "isa": 4, "packages": "x", "command": "y"})
    )
