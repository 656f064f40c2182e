"""The load generators: commands on a file of prompts, and the numbers of the reports.

Every tool sends the same number of prompts of the same lengths to ``/v1/completions``, greedy, to the full length, by
``concurrency`` clients without pauses. guidellm and aiperf send text; the texts were chosen to become the same number
of tokens again.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optkit.bench import client
from optkit.bench.metrics import latency, summarize
from optkit.bench.workload import BenchRequest, RequestSchedule, WorkloadConfig

TIMEOUT = 900  # seconds of one run of a tool


@dataclass(frozen=True)
class Target:
    """The measured server. ``tokenizer`` is a directory."""

    url: str
    model: str
    tokenizer: Path


@dataclass(frozen=True)
class Load:
    """The prompts of a run, as text and as token ids."""

    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    output_len: int
    concurrency: int


@dataclass(frozen=True)
class Numbers:
    """The means of a run: TTFT and inter-token latency in ms, output tokens per second over the run."""

    ttft_ms: float
    itl_ms: float
    output_throughput: float

    def over(self, other: Numbers) -> dict[str, float]:
        """The ratio of each number to the same number of ``other``."""
        return {name: value / getattr(other, name) for name, value in vars(self).items()}


class ToolError(Exception):
    """A tool failed, or answered fewer requests than were sent."""


def optkit(target: Target, load: Load, definitions: str) -> Numbers:
    """The numbers of optkit's client, by the formulas of ``definitions``."""
    config = WorkloadConfig(len(load.ids), len(load.ids[0]), load.output_len, load.concurrency)
    requests = [BenchRequest(i, ids, load.output_len, 0.0) for i, ids in enumerate(load.ids)]
    records = client.run_workload(target.url, target.model, RequestSchedule(config, tuple(requests)))
    if failed := [record.error for record in records if not record.ok]:
        raise ToolError(f"optkit: {len(failed)} requests failed: {failed[0]}")
    table = latency(records, definitions)
    return Numbers(table["ttft"]["mean"], table["itl"]["mean"], summarize(records)["output_throughput"])


def guidellm(program: Path, target: Target, load: Load, folder: Path) -> Numbers:
    """The numbers of ``guidellm run``."""
    data = folder / "prompts.jsonl"
    rows = [{"prompt": text, "output_tokens_count": load.output_len} for text in load.texts]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    backend = {
        "kind": "openai_http",
        "target": target.url,
        "model": target.model,
        "request_format": "/v1/completions",
        "extras": {"body": {"temperature": 0}},
    }
    profile = {"kind": "concurrent", "streams": [load.concurrency]}
    command = [str(program), "run", "--profile", json.dumps(profile), "--backend", json.dumps(backend)]
    command += ["--data", json.dumps({"kind": "json_file", "path": str(data)})]
    command += ["--constraint", json.dumps({"kind": "max_requests", "count": len(load.texts)})]
    command += ["--output", json.dumps({"kind": "json", "path": str(folder / "guidellm.json")})]
    run("guidellm", command, folder, {"HF_HUB_OFFLINE": "1"})
    return of_guidellm(json.loads((folder / "guidellm.json").read_text()), len(load.texts))


def of_guidellm(report: dict[str, Any], requests: int) -> Numbers:
    """The numbers of a report.

    guidellm may cut off its last request when the count is reached: ``incomplete``, and no error.
    """
    (benchmark,) = report["benchmarks"]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    if (
        totals["errored"]
        or totals["successful"] + totals["incomplete"] != requests
        or totals["incomplete"] > 1
    ):
        raise ToolError(f"guidellm: of {requests} requests {totals}")
    return Numbers(
        metrics["time_to_first_token_ms"]["successful"]["mean"],
        metrics["inter_token_latency_ms"]["successful"]["mean"],
        metrics["output_tokens_per_second"]["successful"]["mean"],
    )


def aiperf(program: Path, target: Target, load: Load, folder: Path) -> Numbers:
    """The numbers of ``aiperf profile``."""
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in load.texts))
    command = [str(program), "profile", "--model", target.model, "--url", target.url, "--streaming"]
    command += ["--endpoint-type", "completions", "--tokenizer", str(target.tokenizer)]
    command += ["--input-file", str(data), "--custom-dataset-type", "single_turn"]
    command += ["--dataset-sampling-strategy", "sequential", "--request-count", str(len(load.texts))]
    more = {"max_tokens": load.output_len, "ignore_eos": True, "temperature": 0}
    command += ["--concurrency", str(load.concurrency), "--extra-inputs", json.dumps(more)]
    command += ["--use-server-token-count", "--no-gpu-telemetry", "--no-server-metrics", "--ui", "none"]
    command += ["--artifact-dir", str(folder / "aiperf")]
    run(
        "aiperf", command, folder, {}
    )  # offline, aiperf looks for a tokenizer's directory in the Hub's cache alone
    (report,) = (folder / "aiperf").rglob("profile_export_aiperf.json")
    return of_aiperf(json.loads(report.read_text()), len(load.texts))


def of_aiperf(report: dict[str, Any], requests: int) -> Numbers:
    """The numbers of a report."""
    answered = report["request_count"]["avg"]
    if answered != requests:
        raise ToolError(f"aiperf: {answered:g} of {requests} requests were answered")
    return Numbers(
        report["time_to_first_token"]["avg"],
        report["inter_token_latency"]["avg"],
        report["output_token_throughput"]["avg"],
    )


def run(name: str, command: Sequence[str], folder: Path, more: Mapping[str, str]) -> None:
    """Run a tool with all files in ``folder`` and ``more`` variables in the environment.

    Raises:
        ToolError: with the end of the output.
    """
    variables = {**os.environ, **more, "HOME": str(folder)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT, env=variables, cwd=folder, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolError(f"{name}: {error}") from error
    if done.returncode:
        raise ToolError(f"{name} ended with code {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
