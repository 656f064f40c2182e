"""Linear layers of Llama-2-7B, each implementation at each number of tokens, and the four layers of a decoder layer.

The single layers feed the table of ``selection`` (``timing``). The decoder layers run the implementations chosen by
the present table and are compared with NVIDIA's measurements on an H200 (aiconfigurator, Apache-2.0: the sum of four
GEMMs over 32 layers, with vLLM 0.24's cuBLAS bf16 and CUTLASS fp8, TensorRT-LLM 1.2's int8 SmoothQuant and int4
weight-only), here for a single layer.

The tolerance is the rounding of bfloat16 results: quantized operands are the same on both sides.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu.case import Case, Inputs
from optkit.kernels import reference
from optkit.kernels.packed_codes import pack_codes
from optkit.kernels.triton.selection import Timing

LAYERS = {"qkv": (12288, 4096), "o": (4096, 4096), "gate_up": (22016, 4096), "down": (4096, 11008)}
HEAD = {"head": (32000, 4096)}
TINY = {"tiny": (48, 256)}
TOKENS = (1, 2, 4, 8, 32, 128, 512, 2048)
GROUP = 128
STORED = {"bf16": "16-bit", "fp8": "fp8", "int8": "int8", "int4": "int4"}
WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5 + 2 / GROUP}
OPS = {"bf16": "linear", "fp8": "linear_fp8_rowwise", "int8": "linear_w8a8", "int4": "linear_wna16"}
# Milliseconds of all layers, by tokens.
PUBLISHED = {
    "bf16": {1: 3.66, 8: 3.65, 32: 3.95, 128: 4.03, 512: 8.37, 2048: 33.8},
    "fp8": {1: 2.59, 8: 2.56, 32: 3.01, 128: 3.03, 512: 5.64, 2048: 20.2},
    "int8": {1: 2.34, 8: 3.07, 32: 3.15, 128: 3.86, 512: 9.05, 2048: 28.2},
    "int4": {1: 1.82, 2: 2.01, 4: 2.71, 8: 3.06, 32: 3.75, 128: 4.64, 512: 9.19, 2048: 32.0},
}
PUBLISHED_LAYERS, MOST = 32, 1.1


def cases(tiny: bool = False) -> list[Case]:
    """All cases. ``tiny``: a small layer, for the interpreter."""
    shapes, tokens = (TINY, (1, 8)) if tiny else (LAYERS | HEAD, TOKENS)
    dtype = torch.float16 if tiny else torch.bfloat16
    singles = [
        single(stored, name, m, shape, dtype)
        for stored in OPS
        for shape in shapes.values()
        for m in tokens
        for name in implementations(stored, m, tiny)
    ]
    return singles if tiny else singles + [layer(stored, m, dtype) for stored in OPS for m in TOKENS]


def implementations(stored: str, m: int, tiny: bool) -> list[str]:
    """The implementations for ``m`` tokens; the vendor's quantized implementations need a GPU."""
    few = ["gemv"] if m <= 4 else []
    if stored == "bf16":
        return [*few, "cublas"]
    if stored == "fp8":
        return [*few, "tile", *([] if tiny else ["scaled_mm"])]
    if stored == "int8":
        return [*few, "tile", *(["int_mm"] if m > 16 and not tiny else [])]
    return [*few, "tile", "dequantized"] if m <= 128 else ["tile", "dequantized"]


def implementation(stored: str, name: str, dtype: torch.dtype) -> Callable[..., Tensor]:
    """A function of the kernel inputs of ``operands``. Triton is imported here, not with the module."""
    from optkit.kernels.triton import gemv, tile, vendor, wna16

    if stored == "bf16":
        if name == "cublas":
            return torch.nn.functional.linear
        return lambda x, weight: gemv.gemv(x, weight, None, None, None, dtype)
    if stored == "int4":
        return lambda x, words, scale: getattr(wna16, name)(x, words, scale, None, None, None, GROUP)
    run = {"gemv": gemv.gemv, "tile": tile.tile, "scaled_mm": vendor.scaled_mm, "int_mm": vendor.int_mm}[name]
    return lambda q, scale, weight, weight_scale: run(q, weight, scale, weight_scale, None, dtype)


def operands(stored: str, m: int, n: int, k: int, dtype: torch.dtype, random: Any) -> tuple[Inputs, Inputs]:
    """(inputs of the kernels, inputs of the reference: activations and weight as the float values of the codes)."""
    x, weight = random((m, k)).to(dtype), random((n, k)) * 0.02
    if stored == "bf16":
        weight = weight.to(dtype)
        return (x, weight), (x, weight)
    if stored == "fp8":
        q, scale = reference.quantize_fp8_per_token(x)
        w, w_scale = reference.quantize_fp8_per_token(weight)
        return (q, scale, w, w_scale), (q.float() * scale, w.float() * w_scale)
    if stored == "int8":
        q, scale = reference.quantize_per_token(x)
        w, w_scale = reference.quantize_per_token(weight)
        signed = (w ^ reference.ACTIVATION_ZERO_POINT).view(torch.int8)
        return (q, scale, signed, w_scale), ((q.float() - 128) * scale, signed.float() * w_scale)
    return int4_operands(x, weight)


def int4_operands(x: Tensor, weight: Tensor) -> tuple[Inputs, Inputs]:
    from optkit.kernels.triton import wna16

    groups = weight.unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(-1) / 7).to(torch.float16)
    codes = (groups / scale[..., None]).round().clamp(-8, 7)
    exact = (codes * scale[..., None].float()).flatten(1)
    stored = pack_codes((codes + 8).flatten(1).to(torch.uint8), 4)
    packed = wna16.pack({wna16.WEIGHT: stored, wna16.SCALE: scale}, {"bits": 4, "group_size": GROUP})
    return (x, packed[wna16.WEIGHT], packed[wna16.SCALE]), (x, exact)


def bytes_and_flops(stored: str, m: int, n: int, k: int) -> tuple[int, int]:
    read = WEIGHT_BYTES[stored] * n * k + m * k * (2 if stored in ("bf16", "int4") else 1)
    return int(read + 2 * m * n), 2 * m * n * k


def single(stored: str, name: str, m: int, shape: tuple[int, int], dtype: torch.dtype) -> Case:
    """A layer by a given implementation."""
    n, k = shape

    def make(device: torch.device, generator: torch.Generator) -> Inputs:
        random = partial(torch.randn, device=device, generator=generator)
        return operands(stored, m, n, k, dtype, random)

    def run(taken: Inputs, _: Inputs) -> Tensor:
        return implementation(stored, name, dtype)(*taken)

    def exact(_: Inputs, values: Inputs) -> Tensor:
        return values[0].double() @ values[1].double().T

    size, flops = bytes_and_flops(stored, m, n, k)
    return Case(
        OPS[stored], name, f"m={m} n={n} k={k}", stored, make, run, exact, 1e-2, bytes=size, flops=flops
    )


def layer(stored: str, m: int, dtype: torch.dtype) -> Case:
    """The four linear layers of a decoder layer, by the table's choice, each with its own activations."""

    def make(device: torch.device, generator: torch.Generator) -> Inputs:
        random = partial(torch.randn, device=device, generator=generator)
        return tuple(operands(stored, m, n, k, dtype, random) for n, k in LAYERS.values())

    def run(*layers: tuple[Inputs, Inputs]) -> list[Tensor]:
        return [chosen(stored, dtype, *taken) for taken, _ in layers]

    def exact(*layers: tuple[Inputs, Inputs]) -> list[Tensor]:
        return [values[0].double() @ values[1].double().T for _, values in layers]

    counts = [bytes_and_flops(stored, m, n, k) for n, k in LAYERS.values()]
    published = PUBLISHED[stored].get(m)
    return Case(
        OPS[stored], "chosen", f"decoder layer, {m} tokens", stored, make, run, exact, 1e-2,
        bytes=sum(size for size, _ in counts), flops=sum(flops for _, flops in counts),
        published_us=published and published * 1e3 / PUBLISHED_LAYERS, most=MOST if published else None,
    )  # fmt: skip


def chosen(stored: str, dtype: torch.dtype, *taken: Tensor) -> Tensor:
    from optkit.kernels.triton import linear

    if stored == "bf16":
        return linear.linear(*taken)
    if stored == "int4":
        x, words, scale = taken
        return linear.linear_wna16(x, words, scale, None, None, bits=4, group_size=GROUP)
    run = linear.linear_fp8_rowwise if stored == "fp8" else linear.linear_w8a8
    return run(*taken, dtype=str(dtype).removeprefix("torch."))


def timing(case: Case, us: float) -> Timing | None:
    """The timing of a measured case for ``selection.measured``; None for cases of several layers."""
    found = re.fullmatch(r"m=(\d+) n=(\d+) k=(\d+)", case.shape)
    if case.op not in OPS.values() or found is None:
        return None
    m, n, k = map(int, found.groups())
    return Timing(case.op, STORED[case.dtype], case.kernel, m, n, k, us)
