"""float32 linear layers: PyTorch's own choice of a library against oneDNN, at the shapes of SmolLM2-135M.

    python bench/kernels/float32.py [--rounds 20] [--shapes 576x960,...] [--rows 1,4,16,64,256,1024]

Both kernels take turns, call by call, and the figure is the first quartile of all calls. Weights rotate over copies
larger than the last-level cache, other copies for each kernel, since in a model each layer's weights come from memory.
``ONEDNN_MAX_CPU_ISA=AVX2`` holds oneDNN to AVX2. Prints GFLOP/s, how many times as fast oneDNN is, the milliseconds of
oneDNN's first call with a number of rows beyond later calls, and a line of JSON with the load average before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from optkit.machine.float_products import onednn_linear

SHAPES = ((576, 960), (576, 3072), (1536, 576), (576, 49152), (2048, 8192))  # K, N
ROWS = (1, 4, 16, 64, 256, 1024)
COLD_BYTES = 96 << 20  # several times the last-level cache a virtual machine gets
KERNELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"torch": F.linear, "onednn": onednn_linear}


def measure(k: int, n: int, m: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each call of each kernel with ``m`` rows, the first call first."""
    copies = max(1, min(64, COLD_BYTES // (4 * k * n)))
    weights = [torch.randn(n, k) for _ in range(len(KERNELS) * copies)]
    x = torch.randn(m, k)
    times: dict[str, list[float]] = {name: [] for name in KERNELS}
    for number in range(max(rounds, copies)):
        for place, (name, linear) in enumerate(KERNELS.items()):
            weight = weights[place * copies + number % copies]
            start = time.perf_counter()
            linear(x, weight)
            times[name].append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--shapes", default=",".join(f"{k}x{n}" for k, n in SHAPES))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    load = [os.getloadavg()[0]]
    results = []
    for k, n in (tuple(map(int, shape.split("x"))) for shape in arguments.shapes.split(",")):
        for m in map(int, arguments.rows.split(",")):
            times = measure(k, n, m, arguments.rounds)
            usual = {name: statistics.quantiles(calls[1:], n=4)[0] for name, calls in times.items()}
            first = times["onednn"][0] - usual["onednn"]
            results.append({"m": m, "k": k, "n": n, "seconds": usual, "first_call": first})
            rates = " | ".join(f"{name} {2 * m * k * n / t / 1e9:5.0f} GFLOP/s" for name, t in usual.items())
            ratio = usual["torch"] / usual["onednn"]
            print(
                f"K {k:5} N {n:6} M {m:4} | {rates} | {ratio:.2f}x, first call {first * 1e3:+.1f} ms",
                flush=True,
            )
    load.append(os.getloadavg()[0])
    print(json.dumps({"threads": torch.get_num_threads(), "load": load, "results": results}))


if __name__ == "__main__":
    main()
