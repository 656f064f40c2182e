"""Writes the README's "Measured" section from bench/results/*.json: no number there is typed by hand.

    python bench/readme_table.py            # rewrite the section
    python bench/readme_table.py --check    # exit code 1 if it is not up to date

Each file is what ``optkit bench --save-result`` wrote; files of another form (kernel timings, say) are passed over, and
so are demo.json and local.json, which ``make demo`` and ``make bench`` write on anybody's machine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"
NOT_QUOTED = {"demo.json", "local.json"}
ROWS = {
    "TTFT p50, ms": "latency_ms.ttft.p50",
    "TTFT p95, ms": "latency_ms.ttft.p95",
    "TPOT p50, ms": "latency_ms.tpot.p50",
    "output tokens/s": "output_throughput",
}
NOTHING = "No benchmark result has been committed yet. `make demo` measures the machine it runs on."
LEGEND = (
    "Medians over interleaved rounds, [quartiles]; in parentheses the first column's number over this one, "
    "taken within rounds. `baseline` is the unoptimized model on the same runtime, `transformers` the model in plain "
    "transformers behind HTTP. Raw records, versions and commands are in `bench/results/`."
)


def results(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file stem, content) of every quotable result, by name."""
    for file in sorted(folder.glob("*.json")):
        data = json.loads(file.read_text("utf-8"))
        if file.name not in NOT_QUOTED and isinstance(data, dict) and {"comparison", "workload"} <= set(data):
            yield file.stem, data


def section(folder: Path) -> str:
    """The text between the markers."""
    blocks = [block(stem, data) for stem, data in results(folder)]
    return "\n\n".join([LEGEND, *blocks]) if blocks else NOTHING


def block(stem: str, data: dict[str, Any]) -> str:
    """A heading and a table for one result."""
    sides = list(data["sides"])
    lines = [
        f"**{workload_line(data['workload'])}** on {machine_line(data['environment'])} (`{stem}.json`)",
        "",
    ]
    lines += ["| | " + " | ".join(sides) + " |", "|---" * (len(sides) + 1) + "|"]
    for label, key in ROWS.items():
        values = data["comparison"].get(key)
        if values:
            lines.append(f"| {label} | " + " | ".join(cell(values, side) for side in sides) + " |")
    if data["problems"]:
        lines += ["", f"Warnings of this run: {len(data['problems'])}; the file lists them."]
    return "\n".join(lines)


def workload_line(workload: dict[str, Any]) -> str:
    """``512 tokens in, 64 out, 16 requests a round, 1 at a time``."""
    rate, clients = workload.get("request_rate"), workload.get("max_concurrency")
    pace = f"{rate:g} arrivals a second" if rate else f"{clients} at a time"
    lengths = f"{workload['input_len']} tokens in, {workload['output_len']} out"
    return f"{lengths}, {workload['num_prompts']} requests a round, {pace}"


def machine_line(environment: dict[str, Any]) -> str:
    packages = environment["packages"]
    return (
        f"{environment['cores']} cores of {environment['cpu']}, torch {packages['torch']}, "
        f"transformers {packages['transformers']}, load average before {environment['load_average']:.1f}"
    )


def cell(values: dict[str, Any], side: str) -> str:
    spread, ratio = values.get(side), values.get("ratio", {}).get(side)
    if spread is None:
        return "-"
    median, low, high = (number(spread[key]) for key in ("median", "q1", "q3"))
    return f"{median} [{low}, {high}]" + (f" ({ratio['median']:.2f})" if ratio else "")


def number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def rewritten(readme: str, text: str) -> str:
    """``readme`` with what is between the markers replaced."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"README.md lacks {BEGIN} or {END}")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main(arguments: list[str]) -> int:
    file = ROOT / "README.md"
    old = file.read_text("utf-8")
    new = rewritten(old, section(ROOT / "bench" / "results"))
    if "--check" in arguments:
        return int(new != old)
    file.write_text(new, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
