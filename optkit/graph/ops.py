"""The dialect: the closed list of ops a graph may hold, and how their names map to callables.

Two kinds. *Dialect ops* are the functions of ``optkit.kernels.reference``: the model's idioms, which passes
look for and kernels implement. *Aten ops* on the list below are what capture did not recognize; they run as
they are. Nothing else is accepted when a ``graph.json`` is read, so a graph file can't call arbitrary code.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from optkit.kernels import reference

DIALECT: dict[str, Callable[..., Any]] = {
    fn.__name__: fn
    for fn in (
        reference.embedding,
        reference.linear,
        reference.rms_norm,
        reference.add_rms_norm,
        reference.layer_norm,
        reference.rope_table,
        reference.rope,
        reference.silu_mul,
        reference.gelu_mul,
        reference.silu_mul_packed,
        reference.gelu_mul_packed,
        reference.select_rows,
        reference.by_tokens,
        reference.grouped_mm,
        reference.quantize_per_token,
        reference.quantize_fp8_per_token,
        reference.rms_norm_quantize,
        reference.add_rms_norm_quantize,
        reference.silu_mul_quantize,
        reference.gelu_mul_quantize,
        reference.linear_w8a8,
        reference.linear_w4a8,
        reference.linear_w8a16,
        reference.linear_wna16,
        reference.linear_fp8,
        reference.linear_fp8_rowwise,
        reference.attention,
        reference.rope_kv_write,
        reference.paged_attention,
    )
}

ATEN_TABLE = """
_to_copy.default abs.default alias.default add.Scalar add.Tensor addmm.default amax.default arange.default
arange.start argsort.default bmm.default embedding.default linear.default cat.default clamp.default
clone.default cos.default cumsum.default div.Scalar div.Tensor empty_like.default exp.default expand.default
floor_divide.default gather.default ge.Scalar gelu.default histc.default index.Tensor index_put.default
index_select.default layer_norm.default log.default masked_fill.Scalar matmul.default max.dim maximum.default mean.dim
minimum.default mm.default mul.Scalar mul.Tensor neg.default one_hot.default ones_like.default
permute.default pow.Tensor_Scalar reciprocal.default relu.default repeat_interleave.self_int reshape.default
rsqrt.default rsub.Scalar select.int sigmoid.default silu.default sin.default slice.Tensor softmax.int
softplus.default sort.default split.Tensor split_with_sizes.default sqrt.default squeeze.dim stack.default
sub.Scalar sub.Tensor sum.dim_IntList sym_size.int tanh.default topk.default transpose.int type_as.default
unsqueeze.default view.default where.self zeros_like.default
"""
ATEN_OPS = tuple(ATEN_TABLE.split())
# Keywords that say where a result lies. They belong to the executor: no graph has them, because native kernels take
# the address of a tensor, and on the meta device that is 0.
PLACEMENT = ("device", "layout", "memory_format", "pin_memory")

SCALAR_OPS: dict[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    "int_mul": operator.mul,
    "int_add": operator.add,
}


def aten(name: str) -> Any:
    """The OpOverload of ``name``, written ``op.overload``."""
    op, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, op), overload)


OPS: dict[str, Any] = dict(DIALECT) | SCALAR_OPS | {f"aten.{name}": aten(name) for name in ATEN_OPS}
NAMES: dict[Any, str] = {target: name for name, target in OPS.items()}


def op_name(target: Any) -> str | None:
    """The name of a call target in the closed list, or None when it is not on it."""
    return NAMES.get(target)


def is_dialect(target: Any) -> bool:
    """True for ops of the dialect, False for plain aten and scalar ops."""
    return op_name(target) in DIALECT
