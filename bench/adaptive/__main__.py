"""Limits of the scheduler after live latencies, against the best fixed limits.

    python -m bench.adaptive
    python -m bench.adaptive --artifact artifact/ --save-result adaptive.json

Simulated with the real scheduler, for three mixes of requests: the arrival rate goes from 0.3 of the capacity to 0.9
and back. Compared are the default limits, the best fixed limits (chosen on other seeds among 18), and limits moved
after p95 of the last seconds. With ``--artifact`` the times of steps are measured on the machine at hand first, else
the times are typical of a small model on two cores. Exit code 1: moved limits are no gain, miss a bound after a step of
the load, or move more than once a minute in a steady load.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.adaptive.ablation import COSTS, SEEDS, compare, missed
from bench.adaptive.load import MIXES
from bench.figures import command_line
from optkit.bench.environment import environment
from optkit.simulation.step_costs import fit
from optkit.tune.step_times import steps_in_a_process

CALIBRATION_SECONDS = 120.0  # at most
SECONDS = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line("bench.adaptive", __doc__)
    parser.add_argument("--artifact", type=Path, help="measure the times of steps of this artifact first")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each rate (default: %(default)g)")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), choices=range(1, len(SEEDS) + 1))
    parser.add_argument("--save-result", type=Path)
    args = parser.parse_args(argv)
    costs = fit(steps_in_a_process(args.artifact, {}, CALIBRATION_SECONDS)) if args.artifact else COSTS
    rows = []
    for mix in MIXES:
        rows.append(compare(mix, costs, args.seconds, args.seeds))
        show(rows[-1])
    lines = [f"{row['mix']}: {line}" for row in rows for line in missed(row)]
    if args.save_result:
        result = {
            "kind": "adaptive",
            "environment": environment(),
            "costs": costs.coefficients,
            "mixes": rows,
        }
        args.save_result.write_text(json.dumps(result | {"missed": lines}, indent=1) + "\n")
    print("\n".join(f"MISSED {line}" for line in lines) or "done")
    return 1 if lines else 0


def show(found: dict[str, Any]) -> None:
    """Print a row a side."""
    bounds = ", ".join(f"{name} {bound:g} ms" for name, bound in found["bounds"].items())
    print(f"{found['mix']} ({bounds}), capacity {found['capacity']:.2f} requests/s")
    print(
        f"  {'':20} {'within':>7} {'refused':>8}  {'p95 TTFT, TPOT after rise':>26} {'after fall':>14} moves"
    )
    for name, row in found["sides"].items():
        cells = []
        for number in range(2):
            worst = {
                metric: max(run[number][metric] for run in row["after_steps"]) for metric in found["bounds"]
            }
            cells.append(f"{worst['ttft']:.0f}, {worst['tpot']:.1f}")
        moves = ", ".join(str(len(run)) for run in row["moves"])
        print(
            f"  {name:20} {row['within']:7.3f} {row['refused']:8.3f}  {cells[0]:>26} {cells[1]:>14} {moves}"
        )
    print(f"  best fixed: {found['sides']['best fixed']['limits']}")
    steady = ", ".join(f"{moves:.1f} at {share:g}" for share, moves in found["steady"].items())
    print(f"  moves a minute at a steady load: {steady}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
