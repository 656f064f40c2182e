"""The simulator of ``optkit tune`` against the real engine, over HTTP.

    python -m bench.simulator artifact/ --save-result bench/results/simulator-NAME.json
    python -m bench.simulator artifact/ --rank 20 --shares --input-len 128 --num-prompts 32

Calibrates the artifact, then serves the same requests at the same arrivals both ways, at several shares of the
simulated capacity, in rounds with a calibration and new arrivals each. The ratio of simulated to measured TTFT p50,
TTFT p95 and output tokens/s is the geometric mean over rounds, with the 95 % interval; below 80 % load the bound is
15 %. A single round shows little: a slow second at 70 % load doubles the p95, and a machine that is 15 % slower a
minute after the calibration has a third more waiting. Exit code 1 for a missed bound.

``--rank N`` measures N settings, too, with a server for each, in rounds of new arrivals. A round is measured
``--repeats`` times with the same arrivals and new prompts; the cost of a setting is the geometric mean. The ranking of
a round is right where each of the three settings with the least simulated costs is among the three least measured
costs, or above the third by at most ``SAME`` and the noise of the measurement at 95 %; four rounds of five have to be
right. The noise is the spread of the logarithms of repeats, divided by the root of their number; above ``MOST_NOISE``
nothing is shown, nor where too many of all possible choices of three settings would be right, too (``MOST_CHANCE``).

The arrivals of rankings come in bursts, so that requests wait and settings differ. The cost is by mean latencies at
0.3 of the capacity (``--rank-slo``, ``--rank-share``): the p95 of 60 requests at a higher load has a noise of 25 % on
a machine with neighbours, and at half of the capacity the settings with few places, which differ most, are left out.
The settings differ in the simulator and are spread evenly over the simulated costs. All servers run at once, so the
settings are those with the recipe's own KV pool.

The result is saved after each part.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from pathlib import Path
from typing import Any

from bench.figures import command_line
from bench.simulator.machine import OneArtifact
from bench.simulator.ranking import MOST_CHANCE, TOP, missed_ranking, rank
from bench.simulator.rates import compare, line, missed_numbers
from optkit.bench.environment import environment
from optkit.bench.slo import Load, Slo, parse_slo
from optkit.errors import UserError
from optkit.machine.paths import check_place, save_text
from optkit.tune.lab import Shape


def main() -> int:
    parser = command_line("bench.simulator", __doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--shares", type=float, nargs="*", default=[0.3, 0.5, 0.7], help="of the capacity")
    parser.add_argument("--num-prompts", type=int, default=60)
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--rank", type=int, default=0, help="settings to measure")
    parser.add_argument("--rank-share", type=float, default=0.3, help="load of the rankings")
    parser.add_argument(
        "--rank-slo", type=slo_of, default="ttft_mean<250ms,tpot_mean<25ms", help="the objective"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of new arrivals")
    parser.add_argument("--repeats", type=int, default=2, help="of a ranking's arrivals, with new prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-result", type=Path)
    given = parser.parse_args()
    least = next(n for n in itertools.count(TOP) if math.comb(n, TOP) * MOST_CHANCE >= 1)
    if 0 < given.rank < least:
        parser.error(f"--rank: at least {least}, among which three are rarely the best by chance")
    if given.rounds < 1:
        parser.error("--rounds: at least 1")
    if given.repeats < 2:
        parser.error("--repeats: at least 2, for the noise of the measurement")
    if given.save_result:
        check_place(given.save_result)
    machine = OneArtifact(given.artifact, Shape(given.input_len, given.output_len, Load(rate=1.0)))
    result: dict[str, Any] = {"environment": environment(), "rates": [], "missed": []}
    if given.shares:
        for rows in compare(machine, given.shares, given.num_prompts, given.seed, given.rounds):
            result["rates"] = rows
            save(given.save_result, result)
        print(*map(line, result["rates"]), sep="\n", flush=True)
        result["missed"] += [each for row in result["rates"] for each in missed_numbers(row)]
        save(given.save_result, result)
    if given.rank:
        known = machine.calibrated()
        result["calibration"] = known.to_dict()
        rate = given.rank_share * machine.capacity(known, given.seed)
        machine.shape = Shape(given.input_len, given.output_len, Load(rate=rate))
        count, rounds, repeats = given.num_prompts, given.rounds, given.repeats
        for found in rank(machine, known, given.rank_slo, given.rank, count, given.seed, rounds, repeats):
            result["ranking"] = found
            print(f"rankings right: {found['right']}; noise of a cost {found['noise']:.1%}", flush=True)
            save(given.save_result, result)
        result["missed"] += missed_ranking(result["ranking"])
        save(given.save_result, result)
    for missed in result["missed"]:
        print("MISSED", missed)
    return bool(result["missed"])


def slo_of(text: str) -> Slo:
    """``--rank-slo``, whose load is ``--rank-share``."""
    try:
        slo = parse_slo(text, "--rank-slo")
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if slo.load is not None:
        raise argparse.ArgumentTypeError("give the load as --rank-share")
    return slo


def save(file: Path | None, result: dict[str, Any]) -> None:
    """Write the result so far, if there is a file."""
    if file is not None:
        save_text(file, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
