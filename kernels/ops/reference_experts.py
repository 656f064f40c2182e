"""The spec of mixture-of-experts layers: linear layers with a weight for each expert, and the weighted sum of experts.

A router gives every token J experts, ``experts`` [T, J] int64, in any order, with repetitions allowed. The weights of
all E experts are the rows of a single weight: expert e has the rows from ``e * N`` to ``(e + 1) * N`` of weight
[E * N, K], and the same rows of scales, zero points and bias. So a layer quantizes, splits and loads like a stack of
linear layers.
Activations are [T, K], the same for all experts of a token, or [T, J, K], one for each; the result is [T, J, N].

A row of the result is that of the linear op of the same name for the row's expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optkit.kernels import reference_linear


def expert_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor, *, num_experts: int
) -> Tensor:
    """``linear`` with the weight of each token's experts: x [T, K] or [T, J, K], weight [E * N, K], bias [E * N]."""
    return of_experts(F.linear, (x,), (weight, bias), experts, num_experts, x.dtype)


def expert_w8a8(
    q: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    experts: Tensor,
    *,
    num_experts: int,
) -> Tensor:
    """``linear_w8a8`` with the weight of each token's experts.

    q [T, K] or [T, J, K] uint8 with scale [T, G] or [T, J, G]; weight [E * N, K] int8, weight_scale [E * N, G], bias
    [E * N]; gives [T, J, N] float32.
    """
    operands = (weight, weight_scale, bias)
    return of_experts(reference_linear.linear_w8a8, (q, scale), operands, experts, num_experts)


def expert_w8a16(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, experts: Tensor, *, num_experts: int
) -> Tensor:
    """``linear_w8a16`` with the weight of each token's experts: float activations, int8 weight [E * N, K]."""
    return of_experts(reference_linear.linear_w8a16, (x,), (weight, weight_scale, bias), experts, num_experts)


def expert_w4a8(
    q: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_minimum: Tensor | None,
    bias: Tensor | None,
    experts: Tensor,
    *,
    num_experts: int,
) -> Tensor:
    """``linear_w4a8`` with the weight of each token's experts.

    weight [E * N, K / 8] int32 holds codes, weight_scale and weight_minimum are [E * N, G].
    """
    operands = (weight, weight_scale, weight_minimum, bias)
    return of_experts(reference_linear.linear_w4a8, (q, scale), operands, experts, num_experts)


def expert_wna16(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    bias: Tensor | None,
    experts: Tensor,
    *,
    num_experts: int,
    bits: int = 4,
    group_size: int = 0,
) -> Tensor:
    """``linear_wna16``, without ``g_idx``, with the weight of each token's experts: codes [E * N, words] int32."""

    def product(
        rows: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        options: dict[str, Any] = {"bits": bits, "group_size": group_size}
        return reference_linear.linear_wna16(rows, codes, scale, zero, None, bias, **options)

    return of_experts(product, (x,), (weight, weight_scale, weight_zero_point, bias), experts, num_experts)


def weighted_sum(x: Tensor, weights: Tensor) -> Tensor:
    """The sum over j of ``x[:, j] * weights[:, j]``: x [T, J, N] and weights [T, J] give [T, N]."""
    exact = torch.promote_types(x.dtype, torch.float32)
    return (x.to(exact) * weights.to(exact)[..., None]).sum(dim=1).to(x.dtype)


def of_experts(
    product: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    operands: Sequence[Tensor | None],
    experts: Tensor,
    num_experts: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``product(*inputs, *operands)`` of each token and each of its experts, [T, J, N].

    ``inputs`` are [T, ...] or [T, J, ...], ``operands`` [E * N, ...].

    Raises:
        IndexError: an index in ``experts`` is no expert.
    """
    (tokens, each), n = experts.shape, len(present(operands)) // num_experts
    out = inputs[0].new_empty((tokens * each, n), dtype=dtype)
    if experts.device.type == "meta":
        return out.view(tokens, each, n)
    chosen = experts.flatten()
    rows = [(x[:, None].expand(-1, each, -1) if x.ndim == 2 else x).flatten(0, 1) for x in inputs]
    for expert in sorted(set(chosen.tolist())):
        if not 0 <= expert < num_experts:
            raise IndexError(f"expert {expert} of {num_experts}")
        of_expert = slice(expert * n, (expert + 1) * n)
        mine = (chosen == expert).nonzero()[:, 0]
        weights = [None if operand is None else operand[of_expert] for operand in operands]
        out[mine] = product(*(x[mine] for x in rows), *weights)
    return out.view(tokens, each, n)


def present(operands: Sequence[Tensor | None]) -> Tensor:
    """The first operand, the weight.

    Raises:
        ValueError: the weight is missing.
    """
    if operands[0] is None:
        raise ValueError("experts have a weight")
    return operands[0]
