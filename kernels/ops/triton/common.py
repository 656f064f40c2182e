"""Common parts of the Triton kernels: supported GPUs, rows as blocks, and the place of compiled kernels.

Kernels read a type, compute in float32 and write a type; they never compute in bfloat16 or float8 themselves, which
Triton's interpreter cannot do. Sizes that change from step to step are plain arguments; parameters of the code
(tiles, types, formats) are ``tl.constexpr``, so a served model compiles each kernel a handful of times.

Launch configurations are picked by hand (``Config`` tables in each module, a table an architecture). Nothing is tuned
while a model runs: a CUDA graph must not be captured around a benchmark.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from optkit.machine.target import Target

ARCHITECTURES = ("sm_80", "sm_90")  # that configurations were picked for
MAX_COLUMNS = 1 << 16  # of a row that one program holds


@dataclass(frozen=True)
class Config:
    """The launch of a kernel: its tile, warps of a program, and stages of its software pipeline."""

    tile: tuple[int, ...]
    warps: int
    stages: int = 2


def architecture(device: torch.device) -> str:
    """The newest of ``ARCHITECTURES`` with code for ``device``; in the interpreter, the oldest."""
    return ARCHITECTURES[0] if device.type == "cpu" else architecture_of(device.index or 0)


@cache
def architecture_of(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    able = [name for name in ARCHITECTURES if int(name.removeprefix("sm_")) <= 10 * major + minor]
    return able[-1] if able else ARCHITECTURES[0]


def supports(target: Target) -> bool:
    """NVIDIA GPUs from Ampere on."""
    return target.kind == "cuda"


def supports_fp8(target: Target) -> bool:
    """GPUs whose tensor cores take E4M3."""
    return target.kind == "cuda" and "sm_90" in target.isa


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def row_warps(columns: int) -> int:
    """Warps of a program with a row of ``columns`` (a power of two): 16 values a thread, 16 warps at most."""
    return min(16, max(1, columns // (32 * 16)))


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x [..., K] as rows [R, K] whose values lie side by side."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def use_private_cache() -> None:
    """Keep compiled kernels in optkit's cache, unless ``TRITON_CACHE_DIR`` names another place.

    Triton loads the files there as code, so only the user may be able to write the directory.
    """
    if "TRITON_CACHE_DIR" not in os.environ:
        from optkit.machine.paths import cache_dir

        os.environ["TRITON_CACHE_DIR"] = str(cache_dir("triton"))
