"""int8 linear layers: the native kernel against oneDNN, at the shapes of SmolLM2-135M.

    python bench/kernels/int8.py [--rounds 20] [--shapes 576x960,...] [--rows 1,4,8,64,512] [--isa avx2]

Kernels are measured in turn, round by round, and the figure is the fastest round: other load only ever adds time.
Weights rotate over copies larger than the last-level cache when M is small, since in a model each
layer's weights come from memory. Prints Gop/s (a multiply and an add are two), GB/s of weights and scales, and
one line of JSON with the load average before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from itertools import cycle

import torch

from optkit.kernels import reference
from optkit.kernels.cpu import int8, native, onednn

SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152))  # K, N
ROWS = (1, 4, 8, 64, 512)
COLD_BYTES = 96 << 20  # several times the last-level cache a virtual machine gets
ROUND_SECONDS = 0.004


def runner(module, m: int, k: int, n: int, group: int) -> Callable[[], None]:
    """A call of the layer with the next copy of its weights."""
    weight = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    scale = torch.rand(n, k // group if group else 1)
    copies = 1 if m > 64 else max(1, min(64, COLD_BYTES // weight.numel()))
    packed = cycle([module.pack({2: weight, 3: scale}) for _ in range(copies)])
    q, s = reference.quantize_per_token(torch.randn(m, k), group)

    def call() -> None:
        weights = next(packed)
        module.linear_w8a8(q, s, weights[2], weights[3])

    return call


def seconds(call: Callable[[], None], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def measure(kernels: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Seconds a call of each, the fastest of interleaved rounds."""
    best = {name: min(seconds(call, 2) for _ in range(3)) for name, call in kernels.items()}
    calls = {name: max(1, int(ROUND_SECONDS / time)) for name, time in best.items()}
    for _ in range(rounds):
        for name, call in kernels.items():
            best[name] = min(best[name], seconds(call, calls[name]))
    return best


def shape_row(m: int, k: int, n: int, rounds: int) -> dict[str, float]:
    kernels = {
        "onednn": runner(onednn, m, k, n, 0),
        "native": runner(int8, m, k, n, 0),
        "native-g64": runner(int8, m, k, n, 64),
        "native-g32": runner(int8, m, k, n, 32),
    }
    return measure(kernels, rounds)


def streamed_bytes(name: str, k: int, n: int) -> int:
    group = int(name.rpartition("-g")[2]) if "-g" in name else k
    return n * k + n * (k // group) * 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--shapes", default=",".join(f"{k}x{n}" for k, n in SHAPES))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--isa", choices=native.ISAS)
    arguments = parser.parse_args()
    native.set_isa(arguments.isa)
    torch.manual_seed(0)
    load = [os.getloadavg()[0]]
    results = []
    for k, n in (tuple(map(int, shape.split("x"))) for shape in arguments.shapes.split(",")):
        for m in map(int, arguments.rows.split(",")):
            row = shape_row(m, k, n, arguments.rounds)
            results.append({"m": m, "k": k, "n": n, "seconds": row})
            cells = [
                f"{name} {2 * m * k * n / time / 1e9:6.0f} Gop/s {streamed_bytes(name, k, n) / time / 1e9:5.1f} GB/s"
                for name, time in row.items()
            ]
            print(f"K {k:5} N {n:6} M {m:4} | " + " | ".join(cells), flush=True)
    load.append(os.getloadavg()[0])
    print(json.dumps({"isa": native.isa(), "threads": native.threads(), "load": load, "results": results}))


if __name__ == "__main__":
    main()
