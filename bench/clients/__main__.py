"""guidellm and aiperf, unmodified, beside ``optkit bench`` on a server of an artifact.

    make load-clients
    python -m bench.clients artifact/

In each round every tool sends own prompts of equal lengths, in turn; optkit's client runs before and after each tool,
with the tool's formulas, so a steady drift of the machine cancels. Compared are the geometric means over rounds of the
ratios to optkit's numbers of the same round, with 95 % intervals over rounds: mean TTFT, mean inter-token latency,
output tokens per second. Exit code 1: a ratio is off by more than 5 %, or the half of an interval is wider than that,
so the ratio is not shown. The result is saved after each round.

The server gets a half of the cores and the tools the rest: aiperf is a dozen processes, and would slow the server
down on shared cores, which is no difference between measurements. A machine with a single core has no rest.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench.clients import tools
from bench.clients.tools import Load, Numbers, Target
from bench.cores import held_to, split_cores
from bench.figures import command_line
from optkit.bench.environment import environment
from optkit.bench.prompts import PromptSource
from optkit.bench.servers import free_port, model_name, optkit_command, running
from optkit.bench.statistics import exponential, mean_interval
from optkit.bench.workload import text_ids
from optkit.machine.paths import check_place, save_text
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
        "--rounds", type=int, default=16, help="6 or more have an interval; default: %(default)s"
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
    if args.save_result:
        check_place(args.save_result)
    before = environment()
    port = free_port()
    server_cores, tool_cores = split_cores(os.sched_getaffinity(0))
    cores = {"server_cores": sorted(server_cores), "tool_cores": sorted(tool_cores)}
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        with held_to(server_cores):
            url = stack.enter_context(running(optkit_command(args.artifact, port), port))
        stack.enter_context(held_to(tool_cores))
        target = Target(url, model_name(url), args.artifact.resolve())
        for row in measured(target, names, args):
            rows.append(row)
            result = ratios(rows, names)
            missed = [f"{n} {number}" for n, of in result.items() for number, x in of.items() if off(x)]
            if args.save_result:
                content = {
                    "kind": "clients",
                    "environment": before,
                    **cores,
                    "missed": missed,
                    "ratios": result,
                }
                save_text(args.save_result, json.dumps(content | {"rounds": rows}, indent=1) + "\n")
    for name, of in result.items():
        for number, x in of.items():
            interval = f" [{x['low']:.3f}, {x['high']:.3f}]" if "low" in x else ""
            print(f"{name:10} {number:18} {x['ratio']:6.3f}{interval} x optkit{off(x)}")
    return 1 if missed else 0


def off(x: Mapping[str, float]) -> str:
    """A remark on a ratio beyond the bound, or with an interval wider than the bound; empty otherwise."""
    if not abs(x["ratio"] - 1) <= BOUND:
        return "   MISSED"
    return "   NOT SHOWN" if "low" in x and not x["high"] - x["low"] <= 2 * BOUND else ""


def measured(target: Target, names: Sequence[str], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The numbers of each tool and of optkit's client, for each round."""
    tokenizer = load_tokenizer(str(target.tokenizer))
    ids = text_ids(tokenizer)
    for round_ in range(args.rounds + 1):  # the first is a warm-up
        sources = iter(loads(tokenizer, ids, round_, 3 * len(names), args))
        row = {}
        for name in names:
            print(f"round {round_} of {args.rounds}: {name}", file=sys.stderr)
            row[name] = beside(name, getattr(args, name), target, [next(sources) for _ in range(3)])
        if round_:
            yield row


def beside(name: str, program: Path, target: Target, sets: Sequence[Load]) -> dict[str, Any]:
    """The numbers of optkit's client, of a tool, and of optkit's client again, with the ratio to the mean of both."""
    first = tools.optkit(target, sets[0], name)
    with tempfile.TemporaryDirectory() as folder:
        tool = RUN[name](program, target, sets[1], Path(folder))
    last = tools.optkit(target, sets[2], name)
    own = Numbers(*((a + b) / 2 for a, b in zip(vars(first).values(), vars(last).values(), strict=True)))
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
