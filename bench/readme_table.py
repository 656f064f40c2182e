"""Write the README's generated sections and bench/results/peers.md from bench/results/*.json, no number by hand.

    python bench/readme_table.py            # rewrite the files
    python bench/readme_table.py --check    # exit code 1 if one is out of date

The README has the medians beside other engines; peers.md has quartiles, all ratios, versions and instruction sets.
Inputs are files of ``optkit bench --save-result`` or ``python -m bench.peers --save-result``, for the section
between the markers of the same name. Other files (kernel timings, for example) are skipped, and so are the local
files of ``make demo``, ``make bench`` and ``make peers``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optkit.bench.statistics import shows_percentile

ROOT = Path(__file__).resolve().parents[1]
MEASURED, PEERS = "measured", "peers"  # the sections' markers
LOCAL = [f"{kind}-local{isa}.json" for kind in ("peers", "sweep") for isa in ("", "-avx2", "-avx512")]
NOT_QUOTED = {"demo.json", "local.json", *LOCAL}
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


PEERS_NOTHING = (
    "No comparison with other engines has been committed yet. `make peers` makes one on your machine."
)
PEERS_LEGEND = (
    "Every server answers the same prompts over HTTP, one server at a time, in interleaved rounds. Medians over "
    "rounds; in parentheses the first column's number over this one, taken within rounds. Quartiles, the other "
    "ratios, versions and instruction sets: [bench/results/peers.md](bench/results/peers.md). What each engine runs "
    "with, and what not to believe: [bench/README.md](bench/README.md#other-engines)."
)
DETAILS_LEGEND = (
    "# Beside other engines\n\n"
    "Every server answers the same prompts over HTTP, one server at a time, in interleaved rounds. Medians over "
    "rounds, [quartiles]; a ratio is taken within a round. What each engine runs with, and what not to believe: "
    "[bench/README.md](../README.md#other-engines). `python bench/readme_table.py` writes this page."
)
SWEEP_LEGEND = (
    "## Under load\n\n"
    "The same requests at the same arrivals for every server: in turn, at random times (Poisson) at rates between the "
    "lowest and the highest throughput, and all at once. [low, high]: 95 % bounds of the percentile, by order "
    "statistics over all requests of the row. `grows`: the queue grows at 95 %, so the rate is above the server's "
    "capacity, and its latencies would be higher in a longer run."
)


def results(folder: Path, keys: set[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file stem, content) of every quotable result with the keys ``keys``, by name."""
    for file in sorted(folder.glob("*.json"), key=lambda file: file.stem):
        data = json.loads(file.read_text("utf-8"))
        if file.name not in NOT_QUOTED and isinstance(data, dict) and keys <= set(data):
            yield file.stem, data


def section(folder: Path) -> str:
    """The text of the section ``measured``."""
    blocks = [block(stem, data) for stem, data in results(folder, {"comparison", "workload"})]
    return "\n\n".join([LEGEND, *blocks]) if blocks else NOTHING


def peers_section(folder: Path) -> str:
    """The text of the section ``peers``."""
    blocks = [peers_summary(stem, data) for stem, data in results(folder, {"figures", "servers"})]
    return "\n\n".join([PEERS_LEGEND, *blocks]) if blocks else PEERS_NOTHING


def peers_page(folder: Path) -> str:
    """The text of ``bench/results/peers.md``."""
    blocks = [peers_block(stem, data) for stem, data in results(folder, {"figures", "servers"})]
    sweeps = [sweep_block(stem, data) for stem, data in results(folder, {"table", "servers"})]
    under_load = [SWEEP_LEGEND, *sweeps] if sweeps else []
    return "\n\n".join([DETAILS_LEGEND, *(blocks or [PEERS_NOTHING]), *under_load]) + "\n"


def block(stem: str, data: dict[str, Any]) -> str:
    """A heading and a table for a result."""
    sides = list(data["sides"])
    lines = [
        f"**{workload_line(data['workload'])}** on {machine_line(data['environment'])} (`{stem}.json`)",
        "",
    ]
    lines += ["| | " + " | ".join(sides) + " |", "|---" * (len(sides) + 1) + "|"]
    for label, key in ROWS.items():
        values = data["comparison"].get(key)
        if values and all(shows(data, key, side) for side in sides):
            lines.append(f"| {label} | " + " | ".join(cell(values, side) for side in sides) + " |")
    if data["problems"]:
        lines += ["", f"Warnings of this run: {len(data['problems'])}; the file lists them."]
    return "\n".join(lines)


def shows(data: dict[str, Any], key: str, side: str) -> bool:
    """Return False for a percentile of too few answered requests of ``side``, over all rounds."""
    percentile = re.search(r"\.p(\d+)$", key)
    records = (record for turn in data["turns"] if turn["side"] == side for record in turn["records"])
    answered = sum(record["error"] is None for record in records)
    return percentile is None or shows_percentile(answered, float(percentile[1]))


def workload_line(workload: dict[str, Any]) -> str:
    """``512 tokens in, 64 out, 16 requests a round, 1 at a time``."""
    rate, clients = workload.get("request_rate"), workload.get("max_concurrency")
    pace = f"{rate:g} arrivals a second" if rate else f"{clients} at a time"
    lengths = f"{workload['input_len']} tokens in, {workload['output_len']} out"
    return f"{lengths}, {workload['num_prompts']} requests a round, {pace}"


def machine_line(environment: dict[str, Any]) -> str:
    packages, limits = environment["packages"], environment.get("isa_env", {})
    held = ", ".join(f"`{key}={value}`" for key, value in sorted(limits.items()))
    return (
        f"{environment['cores']} cores of {environment['cpu']}{f' held to {held}' if held else ''}, "
        f"torch {packages['torch']}, transformers {packages['transformers']}, "
        f"load average before {environment['load_average']:.1f}"
    )


def cell(values: dict[str, Any], side: str) -> str:
    spread, ratio = values.get(side), values.get("ratio", {}).get(side)
    if spread is None:
        return "-"
    median, low, high = (number(spread[key]) for key in ("median", "q1", "q3"))
    return f"{median} [{low}, {high}]" + (f" ({ratio['median']:.2f})" if ratio else "")


def number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


# -- peers ------------------------------------------------------------------------------------------


def peers_summary(stem: str, data: dict[str, Any]) -> str:
    """A heading and a table of medians, with the ratios of the first artifact."""
    lines = [peers_heading(stem, data)]
    if data["servers"]:
        lines += ["", *summary_table(data["figures"], list(data["servers"]), data["artifacts"])]
    return "\n".join(lines)


def peers_heading(stem: str, data: dict[str, Any]) -> str:
    return f"**{data['model']}** {held_to(data)}on {machine_line(data['environment'])} (`{stem}.json`)"


def peers_block(stem: str, data: dict[str, Any]) -> str:
    """A heading, a table of medians, a table of ratios for each artifact, versions, instruction sets, skipped peers."""
    lines = [peers_heading(stem, data)]
    if data["servers"]:
        lines += ["", *peers_table(data["figures"], list(data["servers"]))]
    for artifact in data["artifacts"]:
        others = [name for name in data["servers"] if name != artifact]
        if others:
            lines += [
                "",
                f"`{artifact}` over each other server (below 1: less time, less memory, fewer tokens/s):",
                "",
            ]
            lines += ratio_table(data["figures"], artifact, others)
    lines += server_lines(data)
    lines += [
        f"No figure: {row['figure']}, {name} ({reason})"
        for row in data["figures"]
        for name, reason in row.get("missing", {}).items()
    ]
    if data["problems"]:
        lines.append(f"Warnings of this run: {len(data['problems'])}; the file lists them.")
    return "\n".join(lines)


def sweep_block(stem: str, data: dict[str, Any]) -> str:
    """A heading, a row for each load and server, versions, instruction sets, skipped peers."""
    load = data["points"][0]["result"]["workload"]
    rounds = len({turn["round"] for turn in data["points"][-1]["result"]["turns"]})
    plural = "round" if rounds == 1 else "rounds"
    shape = f"{load['input_len']} tokens in, {load['output_len']} out, {rounds} {plural} of a load"
    rows = [data["table"]["header"], ["---"] * len(data["table"]["header"]), *data["table"]["rows"]]
    lines = [f"{peers_heading(stem, data)}, {shape}", "", *(f"| {' | '.join(cells)} |" for cells in rows)]
    lines += server_lines(data)
    loads = sum(len(point["result"]["problems"]) for point in data["points"])
    if warnings := len({*data["doubts"], *data["problems"]}) + loads:
        lines.append(f"Warnings of this run: {warnings}; the file lists them.")
    return "\n".join(lines)


def server_lines(data: dict[str, Any]) -> list[str]:
    """Versions and instruction sets of the servers, and the reasons for skipped peers."""
    versions = "; ".join(
        f"{name}: {report['settings']['version']}" for name, report in data["servers"].items()
    )
    lines = ["", f"Versions: {versions}."] if versions else []
    lines += isa_lines(data["servers"])
    return lines + [f"Not measured: {name} ({reason})" for name, reason in data["skipped"].items()]


def held_to(data: dict[str, Any]) -> str:
    """``held to AVX2, `` for a run with ``--isa avx2``; empty for a run on the best instruction set of the CPU."""
    title = {"avx2": "AVX2", "avx512": "AVX-512 without AMX"}.get(data.get("isa", ""))
    return f"held to {title}, " if title else ""


def isa_lines(servers: dict[str, Any]) -> list[str]:
    """A line with the instruction sets named by the servers; empty for results without."""
    found = [
        f"{name}: {isa}{avx512_text(report.get('used_avx512'))}"
        for name, report in servers.items()
        if (isa := report["settings"].get("isa"))
    ]
    return (
        ["", f"Instruction sets, and AVX-512 registers seen by the kernel: {'; '.join(found)}."]
        if found
        else []
    )


def avx512_text(used: bool | None) -> str:
    return {None: "", True: " (AVX-512 seen)", False: " (no AVX-512 seen)"}[used]


def peers_table(figures: list[dict[str, Any]], servers: list[str]) -> list[str]:
    rows = [["", *servers], ["---"] * (len(servers) + 1)]
    for row in figures:
        label = f"{row['figure']}, {row['unit']}"
        rows.append([label, *(spread_cell(row["servers"].get(name)) for name in servers)])
    return [f"| {' | '.join(cells)} |" for cells in rows]


def summary_table(figures: list[dict[str, Any]], servers: list[str], artifacts: list[str]) -> list[str]:
    rows = [["", *servers], ["---"] * (len(servers) + 1)]
    for row in figures:
        ratios = row["ratios"].get(artifacts[0], {}) if artifacts else {}
        cells = [summary_cell(row["servers"].get(name), ratios.get(name)) for name in servers]
        rows.append([f"{row['figure']}, {row['unit']}", *cells])
    return [f"| {' | '.join(cells)} |" for cells in rows]


def summary_cell(spread: dict[str, float] | None, ratio: dict[str, float] | None) -> str:
    """``911 (0.27)``: the median, and the ratio's median where there is a ratio."""
    if spread is None:
        return "-"
    return number(spread["median"]) + (f" ({ratio['median']:.2f})" if ratio else "")


def ratio_table(figures: list[dict[str, Any]], artifact: str, others: list[str]) -> list[str]:
    rows = [["", *others], ["---"] * (len(others) + 1)]
    for row in figures:
        ratios = row["ratios"].get(artifact, {})
        rows.append([row["figure"], *(ratio_cell(ratios.get(name)) for name in others)])
    return [f"| {' | '.join(cells)} |" for cells in rows]


def ratio_cell(spread: dict[str, float] | None) -> str:
    """``0.27 [0.25, 0.28]``; only the median without a spread."""
    if spread is None:
        return "-"
    median, low, high = (f"{spread[key]:.2f}" for key in ("median", "q1", "q3"))
    return median if low == high else f"{median} [{low}, {high}]"


def spread_cell(spread: dict[str, float] | None) -> str:
    """``275 [271, 279]``; only the median without a spread, for example for a single start."""
    if spread is None:
        return "-"
    median, low, high = (number(spread[key]) for key in ("median", "q1", "q3"))
    return median if low == high else f"{median} [{low}, {high}]"


# -- the README -------------------------------------------------------------------------------------


def rewritten(readme: str, name: str, text: str) -> str:
    """``readme`` with a new text between the markers of a section."""
    first, last = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, begin, rest = readme.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise SystemExit(f"README.md lacks {first} or {last}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def main(arguments: list[str]) -> int:
    folder = ROOT / "bench" / "results"
    readme, details = ROOT / "README.md", folder / "peers.md"
    text = rewritten(readme.read_text("utf-8"), MEASURED, section(folder))
    pages = {readme: rewritten(text, PEERS, peers_section(folder)), details: peers_page(folder)}
    if "--check" in arguments:
        return int(any(not page.is_file() or page.read_text("utf-8") != new for page, new in pages.items()))
    for page, new in pages.items():
        page.write_text(new, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
