"""Linear layers by NVIDIA's libraries, through PyTorch: hard to beat where arithmetic bounds.

Float layers are ``F.linear`` itself. ``scaled_mm`` is E4M3 with a scale for each token and output channel, ``int_mm``
int8. ``expert_linear`` is the product of experts in bfloat16, with groups made on the device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from optkit.kernels.triton.gemv import U8, has
from optkit.kernels.triton.tile import REDUCED, reduce_splits

INT_MM_ROWS = 17  # torch._int_mm refuses fewer


def can_scaled_mm(n: int, k: int, dtype: torch.dtype, bias: Tensor | None, arch: str) -> bool:
    """cuBLASLt and CUTLASS want 16-byte rows and give bfloat16."""
    fits = n % 16 == 0 and k % 16 == 0 and (bias is None or bias.dtype == dtype)
    return fits and dtype == torch.bfloat16 and arch != "sm_80"


def scaled_mm(
    q: Tensor, weight: Tensor, scale: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """See ``reference.linear_fp8_rowwise``. Fast accumulation: the tensor cores' own, of about 14 bits."""
    return torch._scaled_mm(
        q,
        weight.t(),
        scale_a=scale,
        scale_b=weight_scale.t(),
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=True,
    )


def can_int_mm(m: int, n: int, k: int) -> bool:
    return m >= INT_MM_ROWS and n % 8 == 0 and k % 8 == 0


def int_mm(
    q: Tensor, weight: Tensor, scale: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """See ``reference.linear_w8a8``, for one group. A second kernel reads the int32 sums again and scales them."""
    sums = torch._int_mm((q ^ 128).view(torch.int8), weight.t())
    m, n = sums.shape
    out = torch.empty((m, n), dtype=dtype, device=q.device)
    reduce_splits[(triton.cdiv(m * n, REDUCED),)](
        sums, scale, weight_scale, q if bias is None else bias, out, m, n, 1,
        BLOCK=REDUCED, X=U8, HAS=has(weight_scale, bias),
    )  # fmt: skip
    return out


def can_expert_linear(weights: dict[int, Tensor]) -> bool:
    """CUTLASS's grouped products are bfloat16 of 16-byte rows."""
    weight = weights.get(1)
    return weight is not None and weight.dtype == torch.bfloat16 and not any(s % 8 for s in weight.shape)


def expert_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor, *, num_experts: int
) -> Tensor:
    """See ``reference.expert_linear``. The reference reads experts on the host, which a CUDA graph cannot."""
    tokens, each = experts.shape
    by_expert, order = experts.flatten().sort()
    ends = torch.searchsorted(by_expert, torch.arange(num_experts, device=x.device), right=True)
    rows = x[order // each] if x.ndim == 2 else x.flatten(0, 1)[order]
    matrices = weight.unflatten(0, (num_experts, -1)).transpose(1, 2)
    out = x.new_empty(tokens * each, matrices.shape[2])
    out[order] = F.grouped_mm(rows, matrices, offs=ends.to(torch.int32))
    out = out.view(tokens, each, -1)
    return out if bias is None else out + bias.unflatten(0, (num_experts, -1))[experts]
