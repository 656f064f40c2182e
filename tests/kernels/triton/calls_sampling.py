"""Launches of sampling over a vocabulary of 128k, for ``compiling``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from optkit.kernels.triton import sampling


def calls() -> Iterator[Callable[[], Any]]:
    def meta(dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(8, dtype=dtype, device="meta")

    numbers = [torch.float32, torch.int32, torch.float32, torch.float32, torch.float64]
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.empty(8, 128_256, dtype=dtype, device="meta")
        for filtered in (False, True):
            yield partial(sampling.sample, logits, *map(meta, numbers), filtered=filtered)
