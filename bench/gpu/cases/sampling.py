"""Sampling at the vocabularies of Llama 2 and Llama 3: greedy and plain rows, and rows with top-k, top-p and min-p.

Token ids are compared. A drawn number may lie within float32's rounding of the edge between two tokens, likely in a
flat row of 128k tokens. The neighbour is then correct too, and the tolerance accepts neighbours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.gpu.case import Case, Inputs
from optkit.kernels import reference

VOCABULARIES = (32_000, 128_256)
ROWS = (1, 8, 64, 256)
KINDS = ("greedy", "plain", "filtered")


def cases(tiny: bool = False) -> list[Case]:
    """All cases. ``tiny``: shapes for an interpreter."""
    sizes = [(2, 300)] if tiny else [(rows, vocabulary) for vocabulary in VOCABULARIES for rows in ROWS]
    return [case(kind, *size) for size in sizes for kind in KINDS]


def case(kind: str, rows: int, vocabulary: int) -> Case:
    filtered = kind == "filtered"

    def make(device: torch.device, generator: torch.Generator) -> Inputs:
        def full(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((rows,), value, dtype=dtype, device=device)

        logits = torch.randn(rows, vocabulary, generator=generator, device=device) * 4
        uniform = torch.rand(rows, dtype=torch.float64, generator=generator, device=device)
        filters = (
            full(50 if filtered else 0, torch.int32),
            full(0.9 if filtered else 1.0),
            full(0.02 if filtered else 0.0),
        )
        return (logits, full(0.0 if kind == "greedy" else 0.8), *filters, uniform, filtered)

    def run(*inputs: Any) -> Tensor:
        from optkit.kernels.triton import sampling

        return sampling.sample(*inputs)

    return Case(
        op="sample",
        kernel="triton",
        shape=f"{kind}, {rows} rows of {vocabulary}",
        dtype="fp32",
        make=make,
        run=run,
        reference=reference.sample,
        tolerance=1e-2,
        bytes=4 * rows * vocabulary,  # read once; later passes find a few rows in the cache
        flops=rows * vocabulary,
    )
