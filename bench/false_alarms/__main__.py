"""False alarms of ``optkit bench``: how often two equal sides are said to differ, at a nominal 5 %.

    python -m bench.false_alarms resplit
    python -m bench.false_alarms collect artifact/ --rounds 40
    python -m bench.false_alarms live artifact/ --runs 20

``resplit`` splits the stored rounds 1,000 times at random; 3 to 8 % alarms pass. ``collect`` measures new rounds of
two servers of one artifact and stores them. ``live`` makes whole A/A runs, each with two new servers; at most 3 alarms
in 20 runs pass. A live run takes about a minute, and the machine has to be quiet.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.bounds import beyond, print_numbers
from bench.false_alarms import resplit
from bench.figures import command_line
from optkit.bench.environment import environment
from optkit.bench.result import BenchResult
from optkit.bench.run import artifact_side, run_bench
from optkit.bench.workload import WorkloadConfig

LEAST, MOST = 3.0, 8.0  # percent of the splits
ALLOWED = 3 / 20  # of the live runs
LOAD = WorkloadConfig(num_prompts=10, input_len=128, output_len=16)
LIVE_ROUNDS = 8


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line("bench.false_alarms", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    again = commands.add_parser("resplit", help="split the stored rounds at random")
    again.add_argument("--stored", type=Path, default=resplit.STORED)
    again.add_argument("--splits", type=int, default=resplit.SPLITS)
    again.add_argument("--rounds", type=int, default=resplit.ROUNDS, help="rounds of a split")
    collect = commands.add_parser("collect", help="measure and store A/A rounds")
    collect.add_argument("artifact", type=Path)
    collect.add_argument("--rounds", type=int, default=40)
    collect.add_argument("--save-result", type=Path, default=resplit.STORED)
    live = commands.add_parser("live", help="make whole A/A runs")
    live.add_argument("artifact", type=Path)
    live.add_argument("--runs", type=int, default=20)
    live.add_argument("--rounds", type=int, default=LIVE_ROUNDS, help="rounds of a run")
    live.add_argument("--save-result", type=Path)
    args = parser.parse_args(argv)
    return int({"resplit": split, "collect": store, "live": measure}[args.command](args))


def split(args: argparse.Namespace) -> int:
    """Exit code 1 for a share of alarms outside of the bounds."""
    result = resplit.report(resplit.stored(args.stored), args.splits, args.rounds)
    missed = beyond(result, dict.fromkeys(result, MOST), dict.fromkeys(result, LEAST))
    print_numbers(result, missed, 24, "6.1f")
    return 1 if missed else 0


def store(args: argparse.Namespace) -> int:
    """Measure two servers of the artifact and write their rounds."""
    result = run(args.artifact, args.rounds)
    content = {
        "kind": "aa-rounds",
        "environment": result.environment,
        "workload": result.config.to_dict(),
        "doubts": list(result.validity().doubts),
        "rounds": resplit.collected(result),
    }
    args.save_result.write_text(json.dumps(content) + "\n")
    print(f"{len(content['rounds'])} rounds in {args.save_result}")
    return 0


def measure(args: argparse.Namespace) -> int:
    """Exit code 1 for too many alarms of any compared quantity."""
    runs: list[dict[str, Any]] = []
    start = environment()
    for number in range(args.runs):
        result = run(args.artifact, args.rounds, seed=number)
        found = {one.quantity.name: one for one in result.intervals() if one.interval is not None}
        alarmed = [name for name, one in found.items() if one.interval and one.interval.excludes(1.0)]
        runs.append(
            {
                "alarms": alarmed,
                "intervals": {name: one.to_dict() for name, one in found.items()},
                "doubts": list(result.validity().doubts),
            }
        )
        print(f"run {number + 1} of {args.runs}: {', '.join(alarmed) or 'no alarm'}", file=sys.stderr)
    counts = counted(runs)
    missed = beyond(counts, dict.fromkeys(counts, ALLOWED * args.runs))
    print_numbers(counts, missed, 32, "4.0f", dict.fromkeys(counts, ALLOWED * args.runs))
    if args.save_result:
        content = {"kind": "aa-live", "environment": start, "missed": missed, **counts, "runs": runs}
        args.save_result.write_text(json.dumps(content) + "\n")
    return 1 if missed else 0


def counted(runs: Sequence[dict[str, Any]]) -> dict[str, int]:
    """{"alarms of QUANTITY": number of runs}"""
    names = {name for one in runs for name in one["intervals"]}
    return {f"alarms of {name}": sum(name in one["alarms"] for one in runs) for name in sorted(names)}


def run(artifact: Path, rounds: int, seed: int = 0) -> BenchResult:
    """An A/A run: two servers of one artifact."""
    sides = [artifact_side(artifact, "a"), artifact_side(artifact, "b")]
    config = WorkloadConfig(**{**LOAD.to_dict(), "seed": seed})
    return run_bench(sides, config, str(artifact), rounds, progress=lambda line: print(line, file=sys.stderr))


if __name__ == "__main__":
    sys.exit(main())
