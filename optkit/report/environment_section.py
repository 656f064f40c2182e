"""The section on the conditions of each measurement: processor, instruction sets, versions, load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optkit.bench.environment import busy
from optkit.evaluation.saved import Evaluation
from optkit.pages.html import Markup, paragraph
from optkit.pages.page import Section
from optkit.pipeline.report_environment import artifact_rows, block, listed, size_of, text_of
from optkit.report.bench_file import Bench


def environment_section(
    report: Mapping[str, Any] | None, benches: Sequence[Bench], evaluations: Sequence[Evaluation]
) -> Section:
    """The machine of the artifact, of each benchmark and of each evaluation."""
    body: list[Markup] = []
    if report is not None:
        body += block("optkit optimize", artifact_rows(report))
    named = {bench.sweep or bench.name: bench for bench in benches}  # a sweep has one machine
    for name, bench in named.items():
        body += block(f"optkit bench, {name}", environment_rows(bench.result.environment))
        body += warning(bench.result.environment)
    for evaluation in evaluations:
        if evaluation.environment:
            body += block(f"optkit eval, {evaluation.title}", environment_rows(evaluation.environment))
    return Section("environment", "Environment", body)


def environment_rows(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The rows of an environment (``optkit.bench.environment``), as far as the file has the facts."""
    cores, load = environment.get("cores"), environment.get("load_average")
    command = environment.get("command")
    return [
        ("time", text_of(environment.get("time"))),
        ("command", " ".join(map(str, command)) if isinstance(command, list) else ""),
        ("processor", text_of(environment.get("cpu"))),
        ("cores", text_of(cores)),
        ("instruction sets", listed(environment.get("isa"))),
        ("limits", listed(environment.get("isa_env"))),
        ("threads", listed(environment.get("threads_env"))),
        ("memory", size_of(environment.get("memory_bytes"))),
        ("load average before", f"{load:.2f}" if isinstance(load, (int, float)) else ""),
        ("platform", text_of(environment.get("platform"))),
        (
            "versions",
            ", ".join(filter(None, (version_line(environment), listed(environment.get("packages"))))),
        ),
    ]


def version_line(environment: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {environment[key]}" for key in ("optkit", "python") if isinstance(environment.get(key), str)
    )


def warning(environment: Mapping[str, Any]) -> list[Markup]:
    """The sentence on a busy machine; none for a quiet machine, or without the numbers."""
    numbers = {name: environment.get(name) for name in ("cpu_in_use", "load_average", "cores")}
    line = busy({name: value for name, value in numbers.items() if isinstance(value, (int, float))})
    return [paragraph(f"{line[0].upper()}{line[1:]}.", "bad-news")] if line else []
