"""The ops of a graph outside of the dialect: PyTorch's ops left by capture, and Python's."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

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
