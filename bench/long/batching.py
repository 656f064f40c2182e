"""Waiting for a batch, and the size of a chunk: the real scheduler on a virtual clock.

    python -m bench.long batching

Waits: requests of 128 tokens in and 16 out at 0.3 and 0.9 of the capacity; p50 and p95 of TTFT and the throughput of
requests handed over in groups, the first of a group after a fixed wait. Chunks: a prompt of 1,024 tokens alone and
beside four decoding streams; TTFT and the longest gap of a stream by the largest number of tokens of a step, and with
the policy ``slo`` and a bound on the time per token, beside the largest fixed chunk within the bound. Steps take 5 ms,
0.36 ms a token, 0.25 ms a row and 90 ns a pair of query and key, about the times of a small model on two cores;
``python -m bench.plan MODEL --sweep wait`` and ``--sweep chunk`` measure the same on an engine. Exit code 1: a wait
lowers p50 at 0.3 of the capacity or raises throughput by more than ``SAME``, or the policy's TTFT is more than
``CLOSE`` above the TTFT of the best fixed chunk.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bench.adaptive.ablation import COSTS
from bench.figures import command_line
from bench.plan.sweep import gathered
from optkit.bench.records import RequestRecord
from optkit.bench.workload import BenchRequest
from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.simulation.simulator import capacity, simulate

SAME, CLOSE = 0.02, 0.10
WAITS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)  # seconds
LOADS = (0.3, 0.9)  # of the capacity
INPUT, OUTPUT, REQUESTS, SEEDS = 128, 16, 300, (1, 2, 3)
PROMPT, STREAMS, STREAM = 1024, 4, (128, 200)  # the prompt; streams that decode beside it, tokens in and out
CHUNKS = (32, 64, 96, 128, 192, 256, 512, 1024)  # tokens of a step
TPOT = 0.05  # seconds that the policy promises
FINE = range(24, 400, 4)  # fixed chunks among which the best one is searched


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line("bench.long batching", __doc__)
    parser.parse_args(argv)
    missed = [*waits(), *chunks()]
    print("\n".join(f"MISSED {line}" for line in missed) or "done")
    return 1 if missed else 0


def config(tokens: int = 2048, tpot: float | None = None) -> SchedulerConfig:
    """Limits of the scheduler, with ``tokens`` in a step at most; policy ``slo`` where ``tpot`` is bounded."""
    return SchedulerConfig(
        max_num_seqs=16,
        max_num_batched_tokens=max(16, tokens),
        max_model_len=2560,
        block_size=32,
        num_blocks=4096,
        prefill_target_tokens=min(256, tokens),
        enable_prefix_caching=False,
        scheduling_policy="slo" if tpot else "fcfs",
        tpot_slo_ms=1e3 * tpot if tpot else None,
    )


def waits() -> list[str]:
    """Print a row a load and wait; the lines of paying waits."""
    most = capacity(config(), COSTS, requests([0.0] * REQUESTS))
    print(f"capacity {most:.2f} requests/s\n  load  wait, ms  p50 TTFT, ms  p95 TTFT, ms  requests/s")
    missed = []
    for share in LOADS:
        plain: tuple[float, ...] = ()
        for wait in WAITS:
            runs = [waited(poisson(share * most, seed), wait) for seed in SEEDS]
            p50, p95, rate = (statistics.median(column) for column in zip(*runs, strict=True))
            plain = plain or (p50, p95, rate)
            print(f"{share:6} {1e3 * wait:9.0f} {1e3 * p50:13.0f} {1e3 * p95:13.0f} {rate:11.2f}")
            if share == LOADS[0] and p50 < plain[0]:
                missed.append(f"a wait of {1e3 * wait:g} ms lowers p50 at {share:g}")
            if rate > (1 + SAME) * plain[2]:
                missed.append(f"a wait of {1e3 * wait:g} ms raises the throughput at {share:g}")
    return missed


def waited(asked: Sequence[float], wait: float) -> tuple[float, float, float]:
    """p50 and p95 of TTFT in seconds, the wait included, and requests/s."""
    records = simulate(config(), COSTS, requests(gathered(asked, wait))).records
    ttft = sorted(first(record) - at for record, at in zip(records, asked, strict=True))
    last = max(record.chunks[-1].time for record in records)
    return statistics.median(ttft), ttft[int(0.95 * len(ttft))], len(records) / last


def chunks() -> list[str]:
    """Print a row a chunk size, then the policy; a line where the policy is far from the best fixed chunk."""
    print(f"\n{'chunk':>8} {'TTFT alone':>11} {'beside streams':>15} {'longest gap, ms':>16}")
    for size in CHUNKS:
        show(f"{size}", *chunk_figures(config(size)))
    fits = [(figures, size) for size in FINE if (figures := chunk_figures(config(size)))[2] <= TPOT]
    best, size = min(fits, key=lambda found: found[0][1])
    show(f"{size}, best", *best)
    mine = chunk_figures(config(tpot=TPOT))
    show("slo", *mine)
    missed = []
    if mine[1] > (1 + CLOSE) * best[1]:
        missed.append(f"TTFT of the policy is {mine[1] / best[1]:.2f}x that of chunks of {size}")
    if mine[2] > (1 + CLOSE) * TPOT:
        missed.append(f"a gap of the policy is {1e3 * mine[2]:.0f} ms, the bound {1e3 * TPOT:.0f}")
    return missed


def chunk_figures(limits: SchedulerConfig) -> tuple[float, float, float]:
    """TTFT alone, TTFT beside streams, and the longest gap of a stream, in seconds."""
    (alone,) = simulate(limits, COSTS, [request(0, 0.0, PROMPT, 1)]).records
    streams = [request(i, 0.0, *STREAM) for i in range(STREAMS)]
    arrival = 1.0  # all streams decode
    together = simulate(limits, COSTS, [*streams, request(STREAMS, arrival, PROMPT, 1)]).records
    gaps = [
        later.time - earlier.time
        for record in together[:-1]
        for earlier, later in zip(record.chunks, record.chunks[1:], strict=False)
        if later.time > arrival
    ]
    return first(alone), first(together[-1]) - arrival, max(gaps)


def show(name: str, alone: float, beside: float, gap: float) -> None:
    print(f"{name:>8} {1e3 * alone:11.0f} {1e3 * beside:15.0f} {1e3 * gap:16.0f}")


def first(record: RequestRecord) -> float:
    """Seconds of the first token."""
    return record.chunks[0].time


def requests(arrivals: Sequence[float]) -> list[BenchRequest]:
    return [request(i, at, INPUT, OUTPUT) for i, at in enumerate(arrivals)]


def request(index: int, at: float, prompt: int, output: int) -> BenchRequest:
    """Request number ``index``; no two prompts share a block."""
    return BenchRequest(index, (index + 2,) * prompt, output, at)


def poisson(rate: float, seed: int) -> list[float]:
    """Arrivals of a Poisson process."""
    from random import Random

    random, at, found = Random(seed), 0.0, []
    for _ in range(REQUESTS):
        found.append(at)
        at += random.expovariate(rate)
    return found
