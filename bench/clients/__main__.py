"""guidellm and aiperf, unmodified, beside ``optkit bench`` on a server of an artifact.

    make load-clients
    python -m bench.clients artifact/

In each round every tool sends own prompts of equal lengths, in turn; optkit's client runs once for each tool, with the
tool's formulas. Compared are the geometric means over rounds of the ratios to optkit's numbers of the same round, with
95 % intervals over rounds: mean TTFT, mean inter-token latency, output tokens per second. Exit code 1: a ratio is off
by more than 5 %.

The server gets a half of the cores and the tools the rest: aiperf is a dozen processes, and would slow the server
down on shared cores, which is no difference between measurements. A machine with a single core has no rest.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.clients import tools
from bench.clients.tools import Load, Numbers, Target
from bench.cores import split_cores
from bench.figures import command_line
from optkit.bench.environment import environment
from optkit.bench.prompts import PromptSource
from optkit.bench.servers import free_port, model_name, optkit_command, running
from optkit.bench.statistics import exponential, mean_interval
from optkit.bench.workload import text_ids
from optkit.text.load import load_tokenizer

BOUND = 0.05
ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {
    "guidellm": ROOT / ".clients" / "bin" / "guidellm",
    "aiperf": ROOT / ".peers" / "aiperf" / "bin" / "aiperf",
}
RUN: dict[str, Callable[[Path, Target, Load, Path], Numbers]] = {
    "guidellm": tools.guidellm,
    "aiperf": tools.aiperf,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line("bench.clients", __doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument(
        "--rounds", type=int, default=20, help="6 or more have an interval; default: %(default)s"
    )
    parser.add_argument("--requests", type=int, default=20, help="of each tool in each round")
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--only", help="one of the tools", choices=RUN)
    for name, program in PROGRAMS.items():
        parser.add_argument(f"--{name}", type=Path, default=program, help=f"the program {name}")
    parser.add_argument("--save-result", type=Path)
    args = parser.parse_args(argv)
    names = [args.only] if args.only else list(RUN)
    before = environment()
    port = free_port()
    server_cores, tool_cores = split_cores(os.sched_getaffinity(0))
    os.sched_setaffinity(0, server_cores)  # a new process has the cores of its parent
    with running(optkit_command(args.artifact, port), port) as url:
        os.sched_setaffinity(0, tool_cores)
        target = Target(url, model_name(url), args.artifact.resolve())
        rows = measured(target, names, args)
    result = ratios(rows, names)
    missed = [
        f"{name} {number}" for name, of in result.items() for number, x in of.items() if off(x["ratio"])
    ]
    for name, of in result.items():
        for number, x in of.items():
            interval = f" [{x['low']:.3f}, {x['high']:.3f}]" if "low" in x else ""
            print(
                f"{name:10} {number:18} {x['ratio']:6.3f}{interval} x optkit{'   MISSED' * off(x['ratio'])}"
            )
    if args.save_result:
        cores = {"server_cores": sorted(server_cores), "tool_cores": sorted(tool_cores)}
        content = {"kind": "clients", "environment": before, **cores, "missed": missed, "ratios": result}
        content["rounds"] = rows
        args.save_result.write_text(json.dumps(content, indent=1) + "\n")
    return 1 if missed else 0


def off(ratio: float) -> bool:
    """Return True for a ratio beyond the bound, and for NaN."""
    return not abs(ratio - 1) <= BOUND


def measured(target: Target, names: Sequence[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The numbers of each tool and of optkit's client, for each round."""
    tokenizer = load_tokenizer(str(target.tokenizer))
    ids = text_ids(tokenizer)
    rows = []
    for round_ in range(args.rounds + 1):  # the first is a warm-up
        sources = iter(loads(tokenizer, ids, round_, 2 * len(names), args))
        row = {}
        for name in names:
            print(f"round {round_} of {args.rounds}: {name}", file=sys.stderr)
            row[name] = beside(
                name, getattr(args, name), target, (next(sources), next(sources)), round_ % 2 == 0
            )
        rows.append(row)
    return rows[1:]


def beside(
    name: str, program: Path, target: Target, both: tuple[Load, Load], tool_first: bool
) -> dict[str, Any]:
    """The numbers of a tool, then of optkit's client or the reverse, with the ratio."""
    with tempfile.TemporaryDirectory() as folder:
        first = RUN[name](program, target, both[0], Path(folder)) if tool_first else None
        own = tools.optkit(target, both[1], name)
        tool = first or RUN[name](program, target, both[0], Path(folder))
    return {"tool": vars(tool), "optkit": vars(own), "ratio": tool.over(own)}


def loads(
    tokenizer: Any, ids: Sequence[int], round_: int, count: int, args: argparse.Namespace
) -> list[Load]:
    """Disjoint sets of prompts whose text becomes the very same tokens again."""
    wanted = count * args.requests
    source = PromptSource(ids, 11, round_)
    found: list[tuple[str, tuple[int, ...]]] = []
    generator = np.random.default_rng([11, round_])
    while len(found) < wanted:
        place = int(generator.integers(0, len(ids) - args.input_len))
        lead = int(source.leads[int(generator.integers(0, len(source.leads)))])
        prompt = (lead, *ids[place + 1 : place + args.input_len])
        text = tokenizer.decode(prompt)
        if tuple(tokenizer(text, add_special_tokens=False).input_ids) == prompt:
            found.append((text, prompt))
    parts = [found[i * args.requests : (i + 1) * args.requests] for i in range(count)]
    return [
        Load(tuple(t for t, _ in part), tuple(p for _, p in part), args.output_len, args.concurrency)
        for part in parts
    ]


def ratios(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, dict[str, dict[str, float]]]:
    """{tool: {number: {ratio: tool / optkit, low, high: of its interval}}}; no interval with too few rounds."""
    return {
        name: {
            number: of_rounds([row[name]["ratio"][number] for row in rows])
            for number in Numbers.__dataclass_fields__
        }
        for name in names
    }


def of_rounds(values: Sequence[float]) -> dict[str, float]:
    """The geometric mean of a ratio over rounds, with its interval."""
    logs = np.log(values)
    found = {"ratio": float(np.exp(logs.mean()))}
    interval = exponential(mean_interval(logs.tolist()))
    return found | ({"low": interval.low, "high": interval.high} if interval else {})


if __name__ == "__main__":
    sys.exit(main())
