"""A server of an artifact under steady load for an hour: do memory and latencies stay?

    python -m bench.endurance artifact/ --minutes 60 --save-result bench/results/endurance-NAME.json

The rate is a share of the throughput of many requests at once, measured first. Requests arrive at random times
(Poisson), in windows of 300, the fewest for a p99; prompts differ from window to window, and the prefix cache works as
served. Resident memory of the server's processes is read once a second. ``--split-cores`` gives a half of the cores to
the server and the other to the client; on a busy machine, hold the other work to the client's half.

A trend is a straight line through ten blocks of the windows (Theil and Sen), its sign by Kendall's rank correlation at
95 %. A line does not see what begins late, so each block is also compared with the others. Exit code 1: a number is
above the bound in ``MOST``, or missing after a run too short for a trend. The first tenth of the run fills caches and
is left out. The result is saved after each window.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.bounds import beyond, print_numbers
from bench.cores import held_to, split_cores
from bench.figures import command_line
from bench.memory import memory_of
from optkit.bench import client, servers, workload
from optkit.bench.environment import environment
from optkit.bench.metrics import OPTKIT
from optkit.bench.records import RequestRecord, clock, span
from optkit.bench.statistics import block_means, trend
from optkit.bench.workload import WorkloadConfig
from optkit.errors import UserError
from optkit.machine.load import load_average
from optkit.machine.paths import check_place, save_text
from optkit.text.load import load_tokenizer

MOST = {
    "failed": 0.0,
    "rss_mb_growth": 10.0,
    "ttft_p99_rise": 1.15,
    "ttft_p99_worst": 1.5,
    "gap_p99_rise": 1.15,
    "gap_p99_worst": 1.5,
}
SATURATING = 64  # requests at once, for the capacity
LATENCIES = {"ttft": "ttft", "gap": "itl_chunks"}  # of a window: the name here, and of the metric
INTERVAL_SECONDS = 1.0
SETTLING = 0.1  # of the run


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.save_result:
        check_place(args.save_result)
    before = environment()
    ids = workload.text_ids(load_tokenizer(str(args.artifact)))
    port = servers.free_port()
    usable = os.sched_getaffinity(0)
    server_cores, client_cores = split_cores(usable) if args.split_cores else (usable, usable)
    with ExitStack() as stack:
        with held_to(server_cores):
            server = stack.enter_context(servers.started(servers.optkit_command(args.artifact, port), port))
        stack.enter_context(held_to(client_cores))
        model = servers.model_name(server.url)
        rate = args.share * capacity(server.url, model, args, ids)
        print(f"{rate:.2f} requests/s, {args.share:.0%} of the capacity", file=sys.stderr)
        load = {"input_len": args.input_len, "output_len": args.output_len, "rate": rate, "share": args.share}
        load |= {"server_cores": sorted(server_cores), "client_cores": sorted(client_cores)}
        head = {"kind": "endurance", "environment": before, "load": load}
        windows: list[dict[str, Any]] = []
        with watched(server.process.pid) as memory:
            for window in run(server.url, model, rate, args, ids):
                windows.append(window)
                result = summary(windows, memory)
                missed = [*beyond(result, MOST), *(name for name in MOST if name not in result)]
                if args.save_result:
                    content = {
                        **head,
                        **result,
                        "missed": missed,
                        "windows": windows,
                        "memory": thinned(memory),
                    }
                    save_text(args.save_result, json.dumps(content, separators=(",", ":")) + "\n")
    print_numbers(result, missed, 24, "10.4g", MOST)
    return 1 if missed else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line("bench.endurance", __doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--share", type=float, default=0.5, help="of the capacity; default: %(default)s")
    parser.add_argument("--window", type=int, default=300, help="requests of a window; default: %(default)s")
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument(
        "--split-cores",
        action="store_true",
        help="a half of the cores for the server, the rest for the client",
    )
    parser.add_argument("--save-result", type=Path)
    return parser.parse_args(argv)


def capacity(url: str, model: str, args: argparse.Namespace, ids: Sequence[int]) -> float:
    """Requests per second of ``SATURATING`` requests at once; the second of two runs, as the first one warms up."""
    config = WorkloadConfig(SATURATING, args.input_len, args.output_len, None, float("inf"), seed=99)
    for round_ in range(2):
        records = client.run_workload(url, model, workload.build(config, ids, round_))
    if failed := [record.error for record in records if not record.ok]:
        raise UserError(f"{len(failed)} of {len(records)} requests failed: {failed[0]}", where="the server")
    return len(records) / span(records)


@contextmanager
def watched(pid: int) -> Iterator[list[tuple[float, float]]]:
    """(seconds, MB) of resident memory of a process and its children, once a second while the body runs."""
    samples: list[tuple[float, float]] = []
    begin, done = clock(), threading.Event()

    def sample() -> None:
        while not done.wait(INTERVAL_SECONDS):
            samples.append((clock() - begin, memory_of(pid)["rss"] / 1e6))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def run(
    url: str, model: str, rate: float, args: argparse.Namespace, ids: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """A row for each window, until the time is over; one at least.

    The prompts of as many windows as have distinct first tokens differ in these; then another seed begins.
    """
    config = WorkloadConfig(args.window, args.input_len, args.output_len, None, rate)
    together = max(1, len(set(ids)) // args.window)
    begin = clock()
    for number in itertools.count():
        load = workload.build(replace(config, seed=100 + number // together), ids, number % together)
        at, average = clock() - begin, load_average()
        records = client.run_workload(url, model, load)
        found = {"at": round(at, 1), "load_average": average, **row(records)}
        print(json.dumps(found), file=sys.stderr, flush=True)
        yield found
        if clock() - begin >= 60 * args.minutes:
            return


def row(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """The number of requests and of failed ones, and percentiles of the latencies in ms."""
    found: dict[str, Any] = {"requests": len(records), "failed": sum(not r.ok for r in records)}
    for name, metric in LATENCIES.items():
        samples = [1e3 * s for r in records if r.ok for s in OPTKIT[metric].samples(r)]
        for q in (50, 99):
            found[f"{name}_p{q}"] = round(float(np.percentile(samples, q)), 3) if samples else None
    return found


def summary(windows: Sequence[dict[str, Any]], memory: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Counts, and what memory and latencies did.

    ``rss_mb_growth``: the largest block mean less the first. ``X_first`` and ``X_last``: ends of the line through X;
    ``X_rise``: the last over the first where the line rises at 95 %, else 1. ``X_worst``: the largest block mean over
    the median block mean.
    """
    kept = windows[int(SETTLING * len(windows)) :]
    last = memory[-1][0] if memory else 0.0
    resident = [mb for at, mb in memory if at >= SETTLING * last]
    found: dict[str, Any] = {
        "requests": sum(row["requests"] for row in windows),
        "failed": sum(row["failed"] for row in windows),
        "minutes": last / 60,
    }
    blocks = block_means(resident)
    if blocks is not None:
        first, end = float(blocks[0]), float(blocks[-1])
        found |= {"rss_mb_first": first, "rss_mb_last": end, "rss_mb_growth": float(blocks.max()) - first}
    for name in (f"{latency}_p{q}" for latency in LATENCIES for q in (50, 99)):
        values = [row[name] for row in kept if row[name] is not None]
        line, blocks = trend(values), block_means(values)
        if line is not None and blocks is not None:
            found |= {f"{name}_first": line.first, f"{name}_last": line.last}
            found[f"{name}_rise"] = line.last / line.first if line.grows() else 1.0
            found[f"{name}_worst"] = float(blocks.max() / np.median(blocks))
    return found


def thinned(memory: Sequence[tuple[float, float]], most: int = 720) -> list[list[float]]:
    """At most ``most`` samples, evenly spaced, with a digit after the point."""
    step = -(-len(memory) // most) if memory else 1
    return [[round(at, 1), round(mb, 1)] for at, mb in memory[::step]]


if __name__ == "__main__":
    sys.exit(main())
