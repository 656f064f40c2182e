"""Linear layers with 2:4 sparse weights, by NVIDIA's cuSPARSELt through PyTorch.

The kernel is chosen by the weight's values, whoever made them zero: half of the products, and 9/16 of the bytes.
cuSPARSELt multiplies the sparse weight from the left, so the tokens are columns, a multiple of 8; the result is
written transposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optkit.kernels.kernel import Kernel
from optkit.kernels.triton.common import rows_of
from optkit.kernels.two_four import is_two_four

if TYPE_CHECKING:
    from optkit.machine.target import Target

TOKENS, SIDE = 8, 16  # multiples: of the number of tokens, and of both sides of a weight
HALF = (torch.bfloat16, torch.float16)


def supports(target: Target) -> bool:
    """NVIDIA GPUs from Ampere on, with a PyTorch that has cuSPARSELt."""
    return target.kind == "cuda" and torch.backends.cusparselt.is_available()


def fits(weights: dict[int, Tensor]) -> bool:
    """True for a 2:4 sparse weight of 16-bit floats on the GPU."""
    weight = weights.get(1)
    if weight is None or weight.dtype not in HALF or weight.device.type != "cuda":
        return False
    return not any(size % SIDE for size in weight.shape) and is_two_four(weight)


def pack(weights: dict[int, Tensor], options: Mapping[str, Any]) -> dict[int, Tensor]:
    """The weight in cuSPARSELt's layout, [N * K * 9 / 16]."""
    return {1: torch._cslt_compress(weights[1].contiguous())}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See ``reference.linear``; ``weight`` is packed."""
    rows = rows_of(x)
    tokens = len(rows)
    if missing := -tokens % TOKENS:
        rows = F.pad(rows, (0, 0, 0, missing))
    out = torch._cslt_sparse_mm(weight, rows.t(), bias=bias, transpose_result=True)
    return out[:tokens].view(*x.shape[:-1], out.shape[1])


KERNELS = (
    Kernel(
        "linear", "cusparselt", linear, supports, pack, fits, needs="2:4 sparse weights, 16-bit, cuSPARSELt"
    ),
)
