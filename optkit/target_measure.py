"""The four measurements behind a CPU target, each about half a second.

Shapes are those of a large prefill: big enough to reach the compute ceiling, small enough to be quick.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

ROWS, INNER, COLUMNS = 512, 1024, 4096
OPERATIONS = 2.0 * ROWS * INNER * COLUMNS
STREAM_BYTES = 512 * 1024**2  # far beyond any last-level cache of one socket


def best_time(work: Callable[[], Any], seconds: float = 0.4, least: int = 3) -> float:
    """The fastest of as many runs as fit into ``seconds`` (at least ``least``), after one to warm up.

    The minimum, because a ceiling is what the machine can do when nothing else disturbs it.
    """
    work()
    times: list[float] = []
    stop = time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < stop:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def fp32_flops() -> float:
    """Float32 matrix product, in FLOP/s."""
    return _matmul_rate(torch.float32)


def bf16_flops() -> float:
    """Bfloat16 matrix product, in FLOP/s; worth asking only where the CPU has bf16 units."""
    return _matmul_rate(torch.bfloat16)


def _matmul_rate(dtype: torch.dtype) -> float:
    with torch.inference_mode():
        a, weight = torch.ones(ROWS, INNER, dtype=dtype), torch.ones(COLUMNS, INNER, dtype=dtype)
        return OPERATIONS / best_time(lambda: torch.nn.functional.linear(a, weight))


def int8_ops() -> float:
    """uint8 x int8 linear layer through oneDNN with prepacked weights, in operations/s.

    Falls back to ``torch._int_mm`` where this build of torch has no oneDNN.
    """
    weight = torch.ones(COLUMNS, INNER, dtype=torch.int8)
    with torch.inference_mode():
        if not torch.backends.mkldnn.is_available():
            a = torch.ones(ROWS, INNER, dtype=torch.int8)
            return OPERATIONS / best_time(lambda: torch._int_mm(a, weight.t()))
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        rows = torch.full((ROWS, INNER), 129, dtype=torch.uint8)
        scales, zeros = torch.ones(COLUMNS), torch.zeros(COLUMNS, dtype=torch.int32)
        tail: tuple[Any, ...] = (packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")
        return OPERATIONS / best_time(lambda: torch.ops.onednn.qlinear_pointwise(rows, 1.0, 128, *tail))


def memory_bandwidth() -> float:
    """Sum over 512 MiB of float32 on all cores, in bytes/s: decode reads weights just so, once each."""
    data = torch.ones(STREAM_BYTES // 4)
    with torch.inference_mode():
        return STREAM_BYTES / best_time(lambda: data.sum(), seconds=0.5)
