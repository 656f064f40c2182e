"""The spec of the ops of a rank's graph: exchange with the other ranks, and int8 layers cut along input channels.

An int8 layer whose input channels are shared by ranks gives the bits of the whole layer: the scale of a token is that
of the whole row (``absmax_per_token``, then ``all_reduce`` by ``max``, then ``quantize_by``), and the ranks' int32 sums
are added before they become floats (``int8_sums``, ``all_reduce``, ``dequantize_sums``). Integer sums have no order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optkit.kernels.collectives import broadcast_sizes, current, shares
from optkit.kernels.reference_pointwise import ACTIVATION_ZERO_POINT


def local_ids(ids: Tensor, first: int, rows: int) -> Tensor:
    """The rows of ``ids`` [T] int64 in a table of the ids ``first`` to ``first + rows - 1``; ``rows`` for other ids.

    Row ``rows`` of such a table is of zeros, so the ranks' rows of a token add up to the row of the whole table.
    """
    local = ids - first
    return torch.where((local >= 0) & (local < rows), local, rows)


def all_reduce(x: Tensor, op: str = "sum") -> Tensor:
    """The sum (``"sum"``) or the largest (``"max"``) of all ranks' ``x``, float32 or int32, element by element.

    Floats are added in the order of the ranks.
    """
    if x.device.type == "meta":
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return current().all_reduce(x, op)


def all_gather(x: Tensor, total: int, unit: int = 1) -> Tensor:
    """All ranks' columns side by side: [..., C] gives [..., total].

    A rank gives its share of ``total``, in whole units (``collectives.shares``): the first columns of ``x``.
    """
    if x.device.type == "meta":
        return x.new_empty((*x.shape[:-1], total))
    communicator = current()
    return communicator.all_gather(x, shares(total, unit, communicator.size))


def all_gather_quantized(
    q: Tensor, scale: Tensor, total: int, unit: int = 1, groups: int = 1
) -> tuple[Tensor, Tensor]:
    """``all_gather`` of the codes and scales of ``quantize_per_token``, in one exchange.

    q [T, C] uint8 and scale [T, G] give [T, total] and [T, groups]; a group has ``total / groups`` channels.
    """
    return all_gather(q, total, unit), all_gather(scale, groups, unit * groups // total)


def broadcast(rows: Tensor, x: Tensor | None, after: Tensor | None, width: int, source: int) -> Tensor:
    """The x [R, width] float32 of the rank ``source``, in every rank.

    Args:
        rows: [R], any batch input with a number for each row.
        x: None in the other ranks.
        after: the result of the exchange before, so that all ranks run the exchanges in the same order.
    """
    if rows.device.type == "meta":
        return torch.empty((len(rows), width), dtype=torch.float32, device="meta")
    communicator = current()
    if x is None:
        x = torch.empty((len(rows), 0), device=rows.device)
    return communicator.all_gather(x, broadcast_sizes(width, source, communicator.size))


def absmax_per_token(x: Tensor) -> Tensor:
    """The largest magnitude of each row of x [T, K]: [T, 1] float32."""
    return x.to(torch.float32).abs().amax(dim=-1, keepdim=True)


def quantize_by(x: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    """``quantize_per_token`` of x [T, K] with the largest magnitude of each row given: most [T, 1]."""
    inverse = torch.where(most > 0, 127.0 / most, torch.zeros_like(most))
    q = torch.round(x.to(torch.float32) * inverse) + ACTIVATION_ZERO_POINT
    return q.to(torch.uint8), most / 127.0


def int8_sums(q: Tensor, weight: Tensor) -> Tensor:
    """``(q - 128) @ weight.T``: q [T, K] uint8 and weight [N, K] int8 give [T, N] int32, exactly."""
    left = q.to(torch.float64) - ACTIVATION_ZERO_POINT
    return (left @ weight.to(torch.float64).T).to(torch.int32)


def dequantize_sums(sums: Tensor, scale: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """The result of ``linear_w8a8`` from its sums: ``sums * scale * weight_scale``, plus bias.

    sums [T, N] int32, scale [T, 1], weight_scale [N, 1]; gives [T, N] float32.
    """
    out = sums.to(torch.float32) * scale * weight_scale[:, 0].to(torch.float32)
    return out if bias is None else out + bias
