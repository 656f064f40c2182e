"""Sweeps behind docs/planning.md: the chunk size of prompts, and a fixed wait before prompts are batched.

Measured on the serving engine, and predicted by the engine's own scheduler on a virtual clock, for the same arrivals.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any

from bench.plan import measure
from optkit.plan import virtual
from optkit.plan.calibrate import Calibrated
from optkit.plan.virtual import Arrival
from optkit.runtime.engine import Engine
from optkit.runtime.factory import open_engine

CHUNKS = (64, 128, 256, 512, 1024)  # tokens of a step
PROMPT, STREAMS, STREAM = 1024, 4, (128, 96)  # the prompt; streams that decode beside it, tokens in and out
LOADS = (0.3, 0.9)  # of the capacity
WAITS = (0.0, 0.02, 0.05, 0.1, 0.2)  # seconds
REQUESTS, INPUT, OUTPUT = 40, 128, 16


def chunks(artifact: str, steps: Calibrated, rounds: int) -> dict[str, Any]:
    """TTFT of a prompt alone and beside streams, and the longest gap of the streams, by chunk size."""
    rows = []
    print(
        f"{'chunk':>6} {'TTFT alone':>22} {'TTFT beside streams':>22} {'longest gap':>22}   measured / predicted, ms"
    )
    for size in CHUNKS:
        options = {"enable_prefix_caching": False, "max_num_batched_tokens": size, "max_num_seqs": 8}
        engine = open_engine(artifact, **options)
        seen = [chunk_figures(engine) for _ in range(rounds + 1)][1:]
        real = [statistics.median(values) for values in zip(*seen, strict=True)]
        predicted = predicted_chunk(engine, steps)
        rows.append({"chunk": size, "measured": real, "predicted": predicted})
        cells = [f"{m * 1e3:8.1f} / {p * 1e3:8.1f}" for m, p in zip(real, predicted, strict=True)]
        print(f"{size:6} {' '.join(f'{cell:>22}' for cell in cells)}", flush=True)
    return {"prompt": PROMPT, "streams": STREAMS, "rows": rows}


def beside() -> list[Arrival]:
    """The streams, and then the prompt."""
    return [*[Arrival(0.0, *STREAM)] * STREAMS, Arrival(0.0, PROMPT, 1)]


def chunk_figures(engine: Engine) -> tuple[float, float, float]:
    """Measured TTFT alone, TTFT beside streams, and longest gap of a stream, in seconds."""
    alone = measure.prefill_seconds(engine, PROMPT)
    together = measure.serve(engine, beside())
    return alone, together[-1].ttft, max(one.longest_gap for one in together[:-1])


def predicted_chunk(engine: Engine, steps: Calibrated) -> list[float]:
    """``chunk_figures``, predicted."""
    durations: list[float] = []

    def seconds(step: Any) -> float:
        found = steps.step(step).seconds
        if len(step) > 1 or step[0].is_decode:
            durations.append(found)
        return found

    alone = virtual.serve(engine.config, lambda s: steps.step(s).seconds, [Arrival(0.0, PROMPT, 1)])[0].ttft
    together = virtual.serve(engine.config, seconds, beside())
    return [alone, together[-1].ttft, max(durations)]


def waits(artifact: str, steps: Calibrated, rounds: int) -> dict[str, Any]:
    """p50 of TTFT and tokens/s by a fixed wait before prompts are handed to the engine, at low and at high load."""
    engine = open_engine(artifact, enable_prefix_caching=False)
    burst = [Arrival(0.0, INPUT, OUTPUT)] * REQUESTS
    capacity = REQUESTS / max(one.end for one in measure.serve(engine, burst))
    rows = []
    print(f"capacity {capacity:.2f} requests/s")
    print("  load  wait, ms    p50 TTFT, ms measured / predicted    tokens/s measured / predicted")
    for share in LOADS:
        for wait in WAITS:
            real, predicted = [], []
            for seed in range(rounds):
                asked = poisson(share * capacity, seed)
                handed = [Arrival(at, INPUT, OUTPUT) for at in gathered(asked, wait)]
                real.append(wait_figures([(m.ttft, m.end) for m in measure.serve(engine, handed, asked)]))
                served = virtual.serve(engine.config, lambda s: steps.step(s).seconds, handed)
                late = [h.seconds - a for h, a in zip(handed, asked, strict=True)]
                predicted.append(
                    wait_figures([(one.ttft + w, one.end) for one, w in zip(served, late, strict=True)])
                )
            row = [[statistics.median(v) for v in zip(*side, strict=True)] for side in (real, predicted)]
            rows.append({"load": share, "wait": wait, "measured": row[0], "predicted": row[1]})
            (ttft, rate), (ttft_p, rate_p) = row
            print(
                f"{share:6} {wait * 1e3:9.0f} {ttft * 1e3:15.0f} / {ttft_p * 1e3:<8.0f} {rate:18.1f} / {rate_p:<8.1f}",
                flush=True,
            )
    return {"capacity": capacity, "rows": rows}


def wait_figures(requests: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """p50 of TTFT in seconds, and output tokens/s, of requests with TTFT and end."""
    return statistics.median(ttft for ttft, _ in requests), len(requests) * OUTPUT / max(
        end for _, end in requests
    )


def poisson(rate: float, seed: int) -> list[float]:
    """Arrivals of a Poisson process."""
    generator, at, found = random.Random(seed), 0.0, []
    for _ in range(REQUESTS):
        found.append(at)
        at += generator.expovariate(rate)
    return found


def gathered(arrivals: Sequence[float], wait: float) -> list[float]:
    """The times of handing requests over: the first of a group waits ``wait`` seconds, the rest joins the group."""
    found: list[float] = []
    closes = -1.0
    for at in arrivals:
        if at > closes or not found:
            closes = at + wait
        found.append(closes)
    return found
