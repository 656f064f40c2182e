"""int8 linear layers: the native kernel against oneDNN, at the shapes of SmolLM2-135M.

    python bench/kernels/int8.py [--rounds 20] [--shapes 576x960,...] [--rows 1,4,8,64,512] [--isa avx2]

All row counts and kernels of a shape take turns, round by round, and the figure is the tenth percentile of all calls:
other load only ever adds time. Weights rotate over copies larger than the last-level cache, since in a model each
layer's weights come from memory. Prints Gop/s (a multiply and an add are two), GB/s of weights and scales, and a line
of JSON with the load average before and after.
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
from optkit.kernels.cpu import int8, native, onednn

SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152))  # K, N
ROWS = (1, 4, 8, 64, 512)
COLD_BYTES = 96 << 20  # several times the last-level cache a virtual machine gets
ROUND_SECONDS = 0.004


KERNELS = {"onednn": (onednn, 0), "native": (int8, 0)} | {
    f"native-g{g}": (int8, g) for g in (192, 96, 64, 32)
}


def layers(module, k: int, n: int, group: int) -> Iterator[dict[int, Tensor]]:
    """Endless copies of a layer's packed weights, in rotation."""
    weight = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    scale = torch.rand(n, k // group if group else 1)
    copies = max(1, min(64, COLD_BYTES // weight.numel()))
    return cycle([module.pack({2: weight, 3: scale}) for _ in range(copies)])


def runner(module, packed: Iterator[dict[int, Tensor]], m: int, k: int, group: int) -> Callable[[], None]:
    """A call of the layer with the next copy of the weights."""
    q, s = reference.quantize_per_token(torch.randn(m, k), group)

    def call() -> None:
        weights = next(packed)
        module.linear_w8a8(q, s, weights[2], weights[3])

    return call


def seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure_shape(k: int, n: int, rows: list[int], rounds: int) -> dict[tuple[int, str], float]:
    """Seconds per call for each number of rows and kernel."""
    calls = {}
    for name, (module, group) in KERNELS.items():
        packed = layers(module, k, n, group)
        calls |= {(m, name): runner(module, packed, m, k, group) for m in rows}
    times: dict[tuple[int, str], list[float]] = {key: [] for key in calls}
    for _ in range(rounds):
        for key, call in calls.items():
            call()  # wakes the threads
            spent = len(times[key])
            while sum(times[key][spent:]) < ROUND_SECONDS:
                times[key].append(seconds(call))
    return {key: sorted(all_calls)[len(all_calls) // 10] for key, all_calls in times.items()}


def streamed_bytes(name: str, k: int, n: int) -> int:
    group = int(name.rpartition("-g")[2]) if "-g" in name else k
    return n * k + n * (k // group) * 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--shapes", default=",".join(f"{k}x{n}" for k, n in SHAPES))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--isa", choices=native.usable_isas())
    arguments = parser.parse_args()
    native.set_isa(arguments.isa)
    torch.manual_seed(0)
    load = [os.getloadavg()[0]]
    results = []
    rows = [int(m) for m in arguments.rows.split(",")]
    for k, n in (tuple(map(int, shape.split("x"))) for shape in arguments.shapes.split(",")):
        times = measure_shape(k, n, rows, arguments.rounds)
        for m in rows:
            row = {name: times[m, name] for name in KERNELS}
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
