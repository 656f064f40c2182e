"""The measurements behind a target: up to four for a CPU, up to five for a GPU, half a second each.

The shapes are as in a large prefill: big enough to reach the compute ceiling, small enough to be quick.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from optkit.machine.float_products import by_onednn, onednn_linear
from optkit.machine.target import cpu_isa

ROWS, INNER, COLUMNS = 512, 1024, 4096
OPERATIONS = 2.0 * ROWS * INNER * COLUMNS
STREAM_BYTES = 512 * 1024**2  # far beyond any last-level cache of one socket


def best_time(work: Callable[[], Any], seconds: float = 0.4, least: int = 3) -> float:
    """The shortest time of a call of ``work``, in seconds, after a call to warm up.

    ``work`` runs for ``seconds`` and at least ``least`` times. The minimum is taken because a ceiling is the speed of
    an undisturbed machine.
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
    """Rate of a float32 matrix product, in FLOP/s, by the library of float layers."""
    return _matmul_rate(torch.float32, onednn_linear if by_onednn(cpu_isa()) else torch.nn.functional.linear)


def bf16_flops() -> float:
    """Rate of a bfloat16 matrix product, in FLOP/s; slow on a CPU without bf16 units."""
    return _matmul_rate(torch.bfloat16, torch.nn.functional.linear)


def _matmul_rate(dtype: torch.dtype, linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
    with torch.inference_mode():
        a, weight = torch.ones(ROWS, INNER, dtype=dtype), torch.ones(COLUMNS, INNER, dtype=dtype)
        return OPERATIONS / best_time(lambda: linear(a, weight))


def int8_ops() -> float:
    """Rate of a uint8 x int8 linear layer by oneDNN with prepacked weights, in operations/s.

    Where torch is built without oneDNN, ``torch._int_mm`` is measured.
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
    """Bytes/s of a sum over 512 MiB of float32 on all cores. A decode step reads weights in the same way, once each."""
    data = torch.ones(STREAM_BYTES // 4)
    with torch.inference_mode():
        return STREAM_BYTES / best_time(lambda: data.sum(), seconds=0.5)


# -- GPUs -------------------------------------------------------------------------------------------

GPU_SIDE = 8192  # rows, inner and columns of a product: milliseconds even on the fastest


def product_rate(dtype: torch.dtype, device: torch.device, side: int = GPU_SIDE) -> float:
    """Operations/s of a square matrix product in ``dtype``: float32, bfloat16, int8 or float8."""
    with torch.inference_mode():
        a = torch.ones(side, side, device=device).to(dtype)
        scale = torch.ones((), device=device)
        products: dict[torch.dtype, Callable[[], Any]] = {
            torch.int8: lambda: torch._int_mm(a, a.t()),
            torch.float8_e4m3fn: lambda: torch._scaled_mm(a, a.t(), scale, scale, out_dtype=torch.bfloat16),
        }
        product = products.get(dtype, lambda: a @ a.t())
        return 2.0 * side**3 / best_time(finished(product, device))


def copy_bandwidth(device: torch.device, num_bytes: int = 2 * STREAM_BYTES) -> float:
    """Bytes/s of a copy within the device's memory, each byte read and written."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    return 2 * num_bytes / best_time(finished(lambda: copy.copy_(source), device))


def finished(work: Callable[[], Any], device: torch.device) -> Callable[[], None]:
    """Return a function to call ``work`` and to wait until the device has finished."""

    def whole() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return whole
