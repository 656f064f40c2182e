"""Paged attention and the pointwise ops: the native kernels against PyTorch's, at the shapes of SmolLM2-135M.

    python bench/kernels/attention.py [--rounds 20] [--isa avx2] [--only prefill,decode,pointwise]

Prefill is a sequence of T new tokens; decode is a new token for each of B sequences with the given context, in blocks
scattered over the pool. Kernels are measured in turn, round by round, and the figure is the fastest round: other load
only ever adds time. In decode (``cold``) pools rotate over copies larger than the last-level cache, since in a model
each layer's pool comes from memory; ``warm`` uses a single pool. ``int8`` is the native kernel with int8 pools.
Prints microseconds and a line of JSON with the load average before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch

from optkit.graph.states import KVSpec
from optkit.kernels import cpu, reference
from optkit.kernels.cpu import attention, native, sdpa

HEADS, KV_HEADS, DIM, BLOCK = 9, 3, 64, 16
COLD_BYTES = 96 << 20  # several times the last-level cache a virtual machine gets
ROUND_SECONDS = 0.01
Calls = dict[str, Callable[[], Any]]


def batch(
    sequences: int, new: int, context: int, cold: bool, dtype: str = "float32"
) -> Callable[[Callable[..., Any]], Callable[[], Any]]:
    """Calls of an attention kernel on ``sequences`` of ``context`` tokens each; the last ``new`` tokens are new."""
    heads, blocks = HEADS * DIM, -(-context // BLOCK)
    q, k, v = torch.randn(sequences * new, heads + 2 * KV_HEADS * DIM).split(
        [heads, KV_HEADS * DIM, KV_HEADS * DIM], 1
    )
    tables = torch.randperm(sequences * blocks).view(sequences, blocks).to(torch.int32)
    positions = torch.arange(context - new, context)
    slots = (tables[:, positions // BLOCK].long() * BLOCK + positions % BLOCK).flatten()
    spec = KVSpec(0, KV_HEADS, DIM, DIM, dtype)
    copies = min(256, -(-COLD_BYTES // (sequences * blocks * BLOCK * spec.token_bytes))) if cold else 1
    pools = cycle([filled_pools(spec, sequences * blocks) for _ in range(copies)])
    rest = (
        slots,
        torch.arange(sequences + 1, dtype=torch.int32) * new,
        torch.full((sequences,), context, dtype=torch.int32),
        tables,
    )
    q, k, v = q.unflatten(1, (HEADS, DIM)), k.unflatten(1, (KV_HEADS, DIM)), v.unflatten(1, (KV_HEADS, DIM))
    return lambda kernel: lambda: kernel(q, k, v, *next(pools), *rest, scale=DIM**-0.5)


def filled_pools(spec: KVSpec, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pools of random keys and values."""
    pools = spec.pools(blocks, BLOCK)
    k, v = torch.randn(2, blocks * BLOCK, KV_HEADS, DIM)
    reference.write_kv(k, v, *pools, torch.arange(blocks * BLOCK))
    return pools


def attention_calls(with_reference: bool, *shape: Any) -> Calls:
    call = batch(*shape)
    calls = {"native": call(attention.attention), "int8": batch(*shape, "int8")(attention.attention)}
    calls["sdpa"] = call(sdpa.attention)
    return calls | ({"reference": call(reference.attention)} if with_reference else {})


def prefill() -> dict[str, Calls]:
    cases = {f"prefill {t}": attention_calls(True, 1, t, t, False) for t in (128, 512, 1024, 1900)}
    return cases | {"chunk 128 of 1024": attention_calls(True, 1, 128, 1024, False)}


def decode() -> dict[str, Calls]:
    return {
        f"decode {context} x {size} {'cold' if cold else 'warm'}": attention_calls(
            True, size, 1, context, cold
        )
        for context in (128, 512, 1900)
        for size in (1, 8)
        for cold in (False, True)
    }


def pointwise_ops() -> dict[str, Calls]:
    """Each op by the kernel and by the reference."""
    cases = {}
    kernels = {kernel.op: kernel.fn for kernel in cpu.kernels() if kernel.name == "native"}
    for t in (1, 8, 512):
        for k in (576, 1536):
            x, y, w, packed = torch.randn(t, k), torch.randn(t, k), torch.randn(k), torch.randn(t, 2 * k)
            arguments: dict[str, tuple[Any, ...]] = {
                "rms_norm": (x, w, 1e-5),
                "add_rms_norm": (x, y, w, 1e-5),
                "layer_norm": (x, w, w, 1e-5),
                "silu_mul_packed": (packed,),
                "gelu_mul_packed": (packed, "tanh"),
            }
            if k == 576:
                arguments["rope"] = (x.view(t, HEADS, DIM), torch.randn(t, DIM), torch.randn(t, DIM))
            for name, args in arguments.items():
                cases[f"{name} {t} x {k}"] = {
                    "native": lambda f=kernels[name], a=args: f(*a),
                    "reference": lambda f=getattr(reference, name), a=args: f(*a),
                }
    return cases


GROUPS = {"prefill": prefill, "decode": decode, "pointwise": pointwise_ops}


def seconds(call: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def measure(kernels: Calls, rounds: int) -> dict[str, float]:
    """Seconds per call of each kernel, the fastest of interleaved rounds."""
    best = {name: min(seconds(call, 2) for _ in range(3)) for name, call in kernels.items()}
    calls = {name: max(1, int(ROUND_SECONDS / time)) for name, time in best.items()}
    for _ in range(rounds):
        for name, call in kernels.items():
            best[name] = min(best[name], seconds(call, calls[name]))
    return best


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--isa", choices=native.usable_isas())
    parser.add_argument("--only", default=",".join(GROUPS))
    arguments = parser.parse_args()
    native.set_isa(arguments.isa)
    torch.manual_seed(0)
    load = [os.getloadavg()[0]]
    results = {}
    for group in arguments.only.split(","):
        for name, kernels in GROUPS[group]().items():
            results[name] = measure(kernels, arguments.rounds)
            cells = " | ".join(f"{kernel} {time * 1e6:9.1f} us" for kernel, time in results[name].items())
            print(f"{name:26} | {cells}", flush=True)
    load.append(os.getloadavg()[0])
    print(json.dumps({"isa": native.isa(), "threads": native.threads(), "load": load, "results": results}))


if __name__ == "__main__":
    main()
