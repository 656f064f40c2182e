"""Gains of the scheduler, the prefix cache, the offload store and speculation, on the serving engine without HTTP.

    python bench/serve/engine.py artifact/ policy        # short prompts among long ones: fcfs against slo
    python bench/serve/engine.py artifact/ prefix        # a repeated prefix: TTFT warm against cold
    python bench/serve/engine.py artifact/ speculative   # prompt lookup: copy-heavy and random prompts
    python bench/serve/engine.py artifact/ offload       # a conversation with offloaded KV: TTFT of the next turn

Sides alternate, so a slow phase of the machine slows both. Prints a table. ``--save-result`` writes a JSON with every
single measurement, the command and the environment. Exit code 1: the bound of the behaviour is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.figures import command_line
from optkit.artifact.open import Artifact
from optkit.bench.environment import environment
from optkit.bench.workload import text_ids
from optkit.runtime.engine import Engine
from optkit.runtime.factory import open_engine
from optkit.runtime.types import EngineRequest, SamplingParams
from optkit.text.load import load_tokenizer

SHORT, LONG, LONG_SHARE, OUTPUT = 64, 1800, 0.1, 32
names = itertools.count()


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line("bench.serve.engine", __doc__)
    parser.add_argument("artifact")
    parser.add_argument("what", choices=sorted(BENCHES))
    parser.add_argument("--requests", type=int, default=150, help="of a run under load")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load", type=float, default=0.7, help="share of the capacity that is asked for")
    parser.add_argument("--save-result", type=Path)
    args = parser.parse_args(argv)
    ids = text_ids(load_tokenizer(str(Artifact.open(args.artifact).directory)))
    result, passed = BENCHES[args.what](args, ids)
    print("\n".join(f"{name:36} {value}" for name, value in result.items() if not isinstance(value, list)))
    print("bound kept" if passed else "bound MISSED")
    if args.save_result:
        content = {"kind": f"engine-{args.what}", "environment": environment(), "passed": passed, **result}
        args.save_result.write_text(json.dumps(content) + "\n")
    return 0 if passed else 1


def request(
    prompt: Sequence[int], max_tokens: int, arrival: float, temperature: float = 0.0
) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=1)
    return EngineRequest(
        request_id=str(next(names)), prompt_ids=tuple(prompt), sampling=params, arrival=arrival
    )


def serve(engine: Engine, arrivals: Sequence[tuple[float, Sequence[int]]]) -> tuple[list[float], float]:
    """TTFT of each request in order of arrival, and the time of all requests, in seconds."""
    start, left, found = time.monotonic(), list(arrivals), dict[str, float]()
    order = []
    while left or engine.has_work:
        now = time.monotonic() - start
        if left and not engine.has_work:
            time.sleep(max(0.0, left[0][0] - now))
        while left and left[0][0] <= time.monotonic() - start:
            at, prompt = left.pop(0)
            new = request(prompt, OUTPUT, start + at)
            order.append(new)
            engine.add_request(new)
        for out in engine.step():
            if out.first:
                found[out.request_id] = time.monotonic()
    return [found[r.request_id] - r.arrival for r in order], time.monotonic() - start


def policy(args: argparse.Namespace, ids: list[int]) -> tuple[dict[str, Any], bool]:
    generator = np.random.default_rng(0)
    lengths = [LONG if generator.random() < LONG_SHARE else SHORT for _ in range(args.requests)]
    prompts = [[int(generator.integers(100, 1000)), *cut(ids, length - 1, generator)] for length in lengths]
    options = {"max_model_len": 2048, "ttft_slo_ms": 700.0}
    sides = {name: open_engine(args.artifact, **options, scheduling_policy=name) for name in ("fcfs", "slo")}
    capacity = serve(sides["fcfs"], [(0.0, prompt) for prompt in prompts])[1] / args.requests
    gaps = generator.exponential(capacity / args.load, args.requests).cumsum().tolist()
    raw: dict[str, list[Any]] = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, engine in sides.items():
            engine.reset_prefix_cache()
            ttft, took = serve(engine, list(zip(gaps, prompts, strict=True)))
            short = [t for t, length in zip(ttft, lengths, strict=True) if length == SHORT]
            raw[name].append((float(np.percentile(short, 95)), took))
    tail = {name: statistics.median(p95 for p95, _ in runs) for name, runs in raw.items()}
    took = {name: statistics.median(t for _, t in runs) for name, runs in raw.items()}
    ratio, throughput = tail["slo"] / tail["fcfs"], took["fcfs"] / took["slo"]
    result = {
        "p95 TTFT of short prompts, fcfs, s": tail["fcfs"],
        "p95 TTFT of short prompts, slo, s": tail["slo"],
        "ratio": ratio,
        "throughput, slo / fcfs": throughput,
        "runs": list(raw.items()),
    }
    return result, ratio <= 0.5 and throughput >= 0.95


def cut(ids: list[int], length: int, generator: np.random.Generator) -> list[int]:
    start = int(generator.integers(0, len(ids) - length))
    return ids[start : start + length]


def first_token(engine: Engine, prompt: Sequence[int]) -> float:
    return serve(engine, [(0.0, prompt)])[0][0]


def prefix(args: argparse.Namespace, ids: list[int]) -> tuple[dict[str, Any], bool]:
    """A prefix of 1,500 tokens, and 28 different tokens for each question."""
    engine = open_engine(args.artifact, max_model_len=2048)
    cold, warm = [], []
    for i in range(args.rounds):
        engine.reset_prefix_cache()
        for times, tail in ((cold, 3000), (warm, 4000)):
            times.append(first_token(engine, ids[:1500] + ids[tail + 40 * i : tail + 40 * i + 28]))
    return ratio_of("cold", cold, "warm", warm, bound=0.15)


def offload(args: argparse.Namespace, ids: list[int]) -> tuple[dict[str, Any], bool]:
    """As ``prefix``, after other prompts have taken every block of the pool."""
    options = {"max_model_len": 2048, "kv_cache_bytes": 32 << 20, "kv_offload_bytes": 256 << 20}
    engine = open_engine(args.artifact, **options)
    cold, back = [], []
    for i in range(args.rounds):
        engine.reset_prefix_cache()
        cold.append(first_token(engine, ids[:1500] + ids[3000 : 3000 + 28]))
        for k in range(2):
            first_token(engine, ids[5000 + 40 * i + 1700 * k :][:1600])
        back.append(first_token(engine, ids[:1500] + ids[4000 : 4000 + 28]))
    return ratio_of("cold", cold, "from the store", back, bound=0.3)


def ratio_of(
    first: str, a: list[float], second: str, b: list[float], bound: float
) -> tuple[dict[str, Any], bool]:
    ratio = statistics.median(y / x for x, y in zip(a, b, strict=True))
    result = {
        f"TTFT {first}, s": statistics.median(a),
        f"TTFT {second}, s": statistics.median(b),
        "ratio": ratio,
        "seconds": list(zip(a, b, strict=True)),
    }
    return result, ratio <= bound


def speculative(args: argparse.Namespace, ids: list[int]) -> tuple[dict[str, Any], bool]:
    """128 tokens after a repetitive text and after a random text.

    The random text is continued greedily, where a small model soon repeats itself, and sampled, where guesses almost
    always fail and must not cost time.
    """
    options = {"max_model_len": 2048, "enable_prefix_caching": False}
    plain = open_engine(args.artifact, **options)
    guessing = open_engine(args.artifact, **options, speculative_model="ngram")
    passage = ids[5000:5120]
    other = ids[9000:9100]
    kinds = {
        "copy-heavy": (passage * 3 + passage[:60], 0.0, 1.4),
        "random, greedy": (other, 0.0, 0.97),
        "random, sampled": (other, 1.0, 0.97),
    }
    result: dict[str, Any] = {}
    passed = True
    for name, (prompt, temperature, bound) in kinds.items():
        speedups = []
        for _ in range(args.rounds):
            (one, slow), (two, fast) = (decode(engine, prompt, temperature) for engine in (plain, guessing))
            if one != two:
                raise SystemExit(f"{name}: the answers differ")
            speedups.append(slow / fast)
        result |= {
            f"tok/s with / without, {name}": statistics.median(speedups),
            f"each, {name}": list(speedups),
        }
        passed = passed and statistics.median(speedups) >= bound
    return result, passed


def decode(engine: Engine, prompt: list[int], temperature: float) -> tuple[list[int], float]:
    """128 tokens and the seconds from the first to the last."""
    tokens: list[int] = []
    first = 0.0
    engine.add_request(request(prompt, 128, time.monotonic(), temperature))
    while engine.has_work:
        for out in engine.step():
            first = first or time.monotonic()
            tokens += out.token_ids
    return tokens, time.monotonic() - first


Bench = Callable[[argparse.Namespace, list[int]], tuple[dict[str, Any], bool]]
BENCHES: dict[str, Bench] = {
    "policy": policy,
    "prefix": prefix,
    "offload": offload,
    "speculative": speculative,
}

if __name__ == "__main__":
    sys.exit(main())
