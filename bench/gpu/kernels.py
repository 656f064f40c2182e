"""The kernel stages: every case is checked against float64 on fresh random inputs, then timed if correct."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bench.gpu import cases
from bench.gpu.case import Case
from bench.gpu.timing import sets_for, summary, timed

CHECKS = 3
POISON_BYTES = 64 << 20


def all_cases(tiny: bool) -> list[Case]:
    """The exports of the modules of ``bench.gpu.cases``. ``tiny``: only modules with shapes for an interpreter."""
    found: list[Case] = []
    for module in pkgutil.iter_modules(cases.__path__, f"{cases.__name__}."):
        export = importlib.import_module(module.name).cases
        sized = "tiny" in inspect.signature(export).parameters
        if sized or not tiny:
            found += export(tiny=tiny) if sized else export()
    return found


def name_of(case: Case) -> str:
    return f"{case.op} · {case.kernel} · {case.shape} · {case.dtype}"


def check(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """The worst error over ``CHECKS`` fresh inputs (on a CPU: 1), relative to the largest reference value."""
    worst = 0.0
    for i in range(CHECKS if device.type == "cuda" else 1):
        inputs = case.make(device, torch.Generator(device).manual_seed(seed + i))
        expected = list(tensors(case.reference(*inputs)))
        poison(device)
        results = list(tensors(case.run(*inputs)))
        if len(results) != len(expected):
            raise ValueError(f"{len(results)} results, the reference has {len(expected)}")
        worst = max(worst, *(error(r, e) for r, e in zip(results, expected, strict=True)))
    row = {"relative_error": worst, "tolerance": case.tolerance, "ok": worst <= case.tolerance}
    return row if row["ok"] else row | {"error": f"wrong by {worst:.3g}, {case.tolerance:g} is allowed"}


def error(result: Tensor, expected: Tensor) -> float:
    """max |result - expected| / max |expected|; infinite for NaN or another shape."""
    if result.shape != expected.shape:
        return float("inf")
    if result.dtype == expected.dtype and torch.equal(result, expected):
        return 0.0
    wide, right = result.to(torch.float64), expected.to(torch.float64)
    difference = float((wide - right).abs().max()) / max(float(right.abs().max()), 1e-30)
    return difference if difference == difference else float("inf")


def tensors(value: Any) -> Iterable[Tensor]:
    return [value] if isinstance(value, Tensor) else [v for v in value if isinstance(v, Tensor)]


def poison(device: torch.device) -> None:
    """Fill the next memory of the allocator with NaN: an unwritten element shows."""
    torch.full((POISON_BYTES // 4,), float("nan"), device=device)


def measure(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """Microseconds of the case, and the ratios to the time of its bytes, its FLOPs and the published time."""
    count = sets_for(case.bytes, device)
    sets = [case.make(device, torch.Generator(device).manual_seed(seed + i)) for i in range(count)]
    row: dict[str, Any] = dict(summary(timed([lambda s=s: case.run(*s) for s in sets], device)))
    seconds = row["us"] / 1e6
    row |= {"gb_per_s": case.bytes / seconds / 1e9, "tflop_per_s": case.flops / seconds / 1e12}
    if case.published_us:
        row |= {"published_us": case.published_us, "ratio": row["us"] / case.published_us}
        if case.most:
            row |= {"most": case.most, "ok": row["ratio"] <= case.most}
    return row | {"op": case.op, "kernel": case.kernel, "shape": case.shape, "dtype": case.dtype}
