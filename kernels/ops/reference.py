"""The spec: every dialect op in plain PyTorch.

A function defines the meaning of an op; a faster kernel is right when the results agree with the function of the same
name here. Norms and gates are written in ``reference_pointwise``, linear layers on integer weights in
``reference_linear``, mixtures of experts in ``reference_experts``, float8 in ``reference_fp8``, RoPE, the KV cache and
attention in ``reference_attention``, convolutions and scans with a recurrent state in ``reference_recurrent``, the
ops of tensor-parallel ranks in ``reference_collectives``. The functions run on any device. Under
``torch.device("meta")`` the functions compute shapes only, for the verifier and the cost model.

Layout rules: activations are token-major, ``[T, ...]`` for the T tokens of the flattened batch; a linear weight is
``[N, K]`` (out, in); attention takes ``[T, H, D]``; the KV pool of a layer is ``[blocks, block_size, Hkv, D]``
float32, or int8 or E4M3 with four more bytes a row (``quantize_kv``). Arithmetic is float32 unless an op says
otherwise.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from optkit.kernels.reference_attention import (  # noqa: F401
    KV_CODES,
    attend,
    attention,
    causal_mask,
    dequantize_kv,
    gather_kv,
    heads_per_key,
    kv_parts,
    paged_attention,
    partial_rope,
    quantize_kv,
    rope,
    rope_kv_write,
    rope_table,
    write_kv,
)
from optkit.kernels.reference_collectives import (  # noqa: F401
    absmax_per_token,
    all_gather,
    all_gather_quantized,
    all_reduce,
    broadcast,
    dequantize_sums,
    int8_sums,
    local_ids,
    quantize_by,
)
from optkit.kernels.reference_experts import (  # noqa: F401
    expert_linear,
    expert_w4a8,
    expert_w8a8,
    expert_w8a16,
    expert_wna16,
    weighted_sum,
)
from optkit.kernels.reference_fp8 import (  # noqa: F401
    DEQUANTIZED_AT_ONCE,
    FP8_MOST,
    check_fp8,
    check_fp8_rowwise,
    dequantize_fp8,
    linear_fp8,
    linear_fp8_rowwise,
    quantize_fp8_per_token,
    round_fp8,
)
from optkit.kernels.reference_linear import (  # noqa: F401
    INT4_PER_WORD,
    INT4_ZERO_POINT,
    check_int4,
    check_wna16,
    dequantize_int4,
    dequantize_wna16,
    linear_w4a8,
    linear_w8a8,
    linear_w8a16,
    linear_wna16,
    pack_int4,
    unpack_int4,
)
from optkit.kernels.reference_pointwise import (  # noqa: F401
    ACTIVATION_ZERO_POINT,
    FORMATS,
    add_rms_norm,
    add_rms_norm_quantize,
    gelu_mul,
    gelu_mul_packed,
    gelu_mul_quantize,
    layer_norm,
    quantize_as,
    quantize_per_token,
    rms_norm,
    rms_norm_quantize,
    silu_mul,
    silu_mul_packed,
    silu_mul_quantize,
    softplus,
)
from optkit.kernels.reference_recurrent import (  # noqa: F401
    ACTIVATIONS,
    gated_delta_rule,
    runs,
    selective_scan,
    short_conv,
    ssd_scan,
)
from optkit.kernels.reference_sampling import sample  # noqa: F401


def embedding(weight: Tensor, ids: Tensor) -> Tensor:
    """Rows of ``weight`` [V, K] for ``ids`` [...] int64, as [..., K]."""
    if ids.device.type == "meta":
        return weight.new_empty((*ids.shape, *weight.shape[1:]))
    return F.embedding(ids, weight)


def embedding_w8(ids: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Rows ``ids`` [T] int64 of an int8 embedding, ``weight * weight_scale``, as [T, K] float32.

    weight [V, K] int8; weight_scale [V, G], with K / G channels to a group.
    """
    rows = weight.index_select(0, ids).unflatten(1, (weight_scale.shape[1], -1))
    return (rows * weight_scale.index_select(0, ids).to(torch.float32)[..., None]).flatten(1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: [..., K] and [N, K] give [..., N]."""
    return F.linear(x, weight, bias)


def head_linear(
    x: Tensor, weight: Tensor, *, num_heads: int, first: int, last: int, transposed: int = 0
) -> Tensor:
    """The linear layer of each head: x [T, H, C] gives [T, H, N].

    weight [H * R, K] has R rows a head, of which rows ``first`` to ``last - 1`` are the head's matrix ``w``. A head's
    result is ``x @ w.T``, from C = K channels to N = last - first, or, with ``transposed``, ``x @ w``, from C = last -
    first channels to N = K. Latent KV multiplies queries and results by parts of one weight so.
    """
    matrices = weight.unflatten(0, (num_heads, -1))[:, first:last]
    right = matrices if transposed else matrices.transpose(1, 2)
    return torch.bmm(x.transpose(0, 1), right).transpose(0, 1)


def select_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows ``index`` [L] of x [T, ...]."""
    return x.index_select(0, index)


def by_tokens(few: Tensor, many: Tensor, positions: Tensor, limit: int) -> Tensor:
    """``few`` in a step of up to ``limit`` tokens, else ``many``: two variants of a layer, both [T, N].

    ``positions`` [T] int64, the graph's input, has the number of tokens of the step. Lowering keeps one of the two
    (``optkit.graph.variants``), so no kernel computes both.
    """
    return few if len(positions) <= limit else many
