"""Ceilings of the device: a large copy, and a large matrix product. No other case can be faster."""

from __future__ import annotations

import torch

from bench.gpu.case import Case, Inputs


def cases(tiny: bool = False) -> list[Case]:
    size, side = (1 << 12, 32) if tiny else (1 << 30, 8192)
    return [copy(size), product(side)]


def copy(size: int) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> Inputs:
        return (torch.randint(0, 255, (size,), dtype=torch.uint8, device=device, generator=generator),)

    return Case(
        "copy",
        "vendor",
        f"{size} bytes",
        "uint8",
        make,
        torch.clone,
        torch.clone,
        0.0,
        bytes=2 * size,
        flops=0,
    )


def product(side: int) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> Inputs:
        shape = (side, side)
        return tuple(
            torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator) for _ in range(2)
        )

    def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.double() @ b.double()

    return Case(
        "linear", "vendor", f"{side} x {side} x {side}", "bf16", make, torch.matmul, reference, 1e-2,
        bytes=6 * side * side, flops=2 * side**3,
    )  # fmt: skip
