"""int4 linear layers against int8 layers with the same groups, at the shapes of SmolLM2-135M.

    python bench/kernels/int4.py [--rounds 40] [--shapes 576x960,...] [--rows 1,4,8,64,512] [--isa avx2]

Kernels and row counts of a shape take turns; the figure is the tenth percentile of all calls, and weights rotate over
copies larger than the last-level cache, as in bench/kernels/int8.py. Prints GB/s of packed weights, Gop/s, and the
time relative to int8 (above 1: int4 is faster), then a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from itertools import cycle

import torch
from torch import Tensor

from optkit.kernels import reference
from optkit.kernels.cpu import int4, int8, native

SHAPES = "576x960,576x3072,1536x576"  # K x N
ROWS = "1,4,8,64,512"
COLD_BYTES = 96 << 20
GROUP = 32
Call = Callable[[], object]


def packed_weights(k: int, n: int) -> dict[str, dict[int, Tensor]]:
    """A random layer in each format."""
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    scale, minimum = ((torch.rand(n, k // GROUP) * 0.01).half() for _ in range(2))
    weights = {2: reference.pack_int4(codes), 3: scale}
    return {
        "int8": int8.pack({2: codes.to(torch.int8), 3: scale.float()}),
        "symmetric": int4.pack(weights),
        "asymmetric": int4.pack(weights | {4: minimum}),
    }


def copies(packed: dict[int, Tensor]) -> Iterator[dict[int, Tensor]]:
    """Endless copies of the layer's weights, in rotation."""
    count = max(1, min(120, COLD_BYTES // packed[2].numel()))
    return cycle([{i: t.clone() for i, t in packed.items()} for _ in range(count)])


def caller(name: str, weights: Iterator[dict[int, Tensor]], m: int, k: int) -> Call:
    q, scale = reference.quantize_per_token(torch.randn(m, k), GROUP)

    def call() -> object:
        w = next(weights)
        if name == "int8":
            return int8.linear_w8a8(q, scale, w[2], w[3])
        return int4.linear_w4a8(q, scale, w[2], w[3], w.get(4))

    return call


def percentile(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Seconds of each call, in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            for _ in range(5):
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
    return {name: sorted(all_times)[len(all_times) // 10] for name, all_times in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--isa", choices=native.usable_isas())
    arguments = parser.parse_args()
    native.set_isa(arguments.isa)
    torch.manual_seed(0)
    load, results = [os.getloadavg()[0]], []
    for k, n in (tuple(map(int, shape.split("x"))) for shape in arguments.shapes.split(",")):
        packed = packed_weights(k, n)
        rotating = {name: copies(weights) for name, weights in packed.items()}
        for m in map(int, arguments.rows.split(",")):
            rounds = arguments.rounds if m < 64 else max(3, arguments.rounds // 8)
            times = percentile({name: caller(name, w, m, k) for name, w in rotating.items()}, rounds)
            results.append({"m": m, "k": k, "n": n, "seconds": times})
            cells = [
                f"{name} {packed[name][2].numel() / t / 1e9:5.1f} GB/s {2 * m * k * n / t / 1e9:6.0f} Gop/s"
                f" {times['int8'] / t:4.2f}"
                for name, t in times.items()
            ]
            print(f"K {k:5} N {n:6} M {m:4} | " + " | ".join(cells), flush=True)
    load.append(os.getloadavg()[0])
    print(json.dumps({"isa": native.isa(), "threads": native.threads(), "load": load, "results": results}))


if __name__ == "__main__":
    main()
