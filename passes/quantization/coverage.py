"""Calibration of mixture-of-experts layers: the rows of each expert, and the number of its calibration tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from optkit.calibration.walk import Walk

TOKENS = "tokens"  # of each expert, beside the operands of a solution


class RowsOfExperts:
    """The activations of each expert of a layer, on the walk's position before the layer.

    Attributes:
        tokens: the calibration tokens of each expert, [E] int64.
    """

    def __init__(self, walk: Walk, x: fx.Node, experts: fx.Node, count: int) -> None:
        self.walk, self.x, self.experts = walk, x, experts
        self.tokens = torch.zeros(count, dtype=torch.int64)
        for node in (x, experts):  # both stay available until the layer is computed
            for _ in walk.values(node):
                pass
        for chosen in walk.values(experts):
            self.tokens += chosen.flatten().bincount(minlength=count)

    def of(self, expert: int) -> Iterator[Tensor]:
        """The activations [tokens, K] of an expert in each window with any."""
        for x, chosen in zip(self.walk.values(self.x), self.walk.values(self.experts), strict=True):
            mine = chosen == expert  # [T, J]
            rows = x[mine] if x.ndim == 3 else x[mine.any(dim=1)]
            if len(rows):
                yield rows


class Coverage:
    """Calibration tokens of each expert of each layer, for the report."""

    def __init__(self, least: int) -> None:
        self.least, self.layers = least, dict[str, list[int]]()

    def add(self, site: str, tokens: Tensor) -> None:
        self.layers[site] = tokens.tolist()

    def stats(self) -> dict[str, Any]:
        """The numbers for the record of the pass; empty for a model without experts."""
        if not self.layers:
            return {}
        few = {
            site: {str(expert): count for expert, count in enumerate(tokens) if count < self.least}
            for site, tokens in self.layers.items()
        }
        return {
            "expert_tokens": self.layers,
            "expert_tokens_needed": self.least,
            "rounded_experts": {site: experts for site, experts in few.items() if experts},
        }
