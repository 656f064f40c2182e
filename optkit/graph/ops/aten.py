"""The ops of a graph outside of the dialect: PyTorch's ops left by capture, and Python's.

The list is closed, because a graph.json is data from outside. Each op of the list is functional and deterministic,
takes tensors, numbers, booleans, text and dtypes alone, reads no memory that was never written, and has a result on the
meta device, which is the shape rule.
The list holds PyTorch's "core" and "pointwise" ops without those on images, spectra and gradients, and the idioms of
canonicalization. Capture decomposes other ops into these.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# An element of the result depends on the elements at the same place of the operands, broadcast to one shape.
POINTWISE_TABLE = """
_to_copy.default abs.default acos.default acosh.default add.Scalar add.Tensor addcdiv.default addcmul.default
alias.default asin.default asinh.default atan.default atan2.default atanh.default bitwise_and.Scalar
bitwise_and.Tensor bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar bitwise_not.default
bitwise_or.Scalar bitwise_or.Tensor bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar
bitwise_xor.Scalar bitwise_xor.Tensor ceil.default clamp.Tensor clamp.default clamp_max.Tensor clamp_max.default
clamp_min.Tensor clamp_min.default clone.default copy.default copysign.Scalar copysign.Tensor cos.default
cosh.default div.Scalar div.Scalar_mode div.Tensor div.Tensor_mode elu.default eq.Scalar eq.Tensor erf.default
erfc.default exp.default exp2.default expm1.default fill.Scalar floor.default floor_divide.default fmod.Scalar
fmod.Tensor frac.default full_like.default ge.Scalar ge.Tensor gelu.default gt.Scalar gt.Tensor
hardsigmoid.default hardswish.default hardtanh.default isfinite.default isinf.default isnan.default le.Scalar
le.Tensor leaky_relu.default lerp.Scalar lerp.Tensor log.default log10.default log1p.default log2.default
logaddexp.default logical_and.default logical_not.default logical_or.default logical_xor.default lt.Scalar
lt.Tensor masked_fill.Scalar maximum.default minimum.default mish.default mul.Scalar mul.Tensor
nan_to_num.default ne.Scalar ne.Tensor neg.default ones_like.default pow.Scalar pow.Tensor_Scalar
pow.Tensor_Tensor reciprocal.default relu.default relu6.default remainder.Scalar remainder.Tensor round.default
rsqrt.default rsub.Scalar sigmoid.default sign.default silu.default sin.default sinh.default softplus.default
sqrt.default square.default sub.Scalar sub.Tensor tan.default tanh.default threshold.default trunc.default
type_as.default where.self xlogy.Tensor zeros_like.default
"""
OTHER_TABLE = """
_log_softmax.default _softmax.default addmm.default amax.default amin.default any.default any.dim any.dims
arange.default arange.start arange.start_step argmax.default argmin.default argsort.default bmm.default
cat.default constant_pad_nd.default cumprod.default cumsum.default diagonal.default embedding.default
expand.default flip.default full.default gather.default histc.default index.Tensor index_put.default
index_select.default layer_norm.default linalg_vector_norm.default linear.default matmul.default max.dim
mean.default mean.dim min.dim mm.default one_hot.default permute.default polar.default prod.dim_int
repeat.default repeat_interleave.self_int reshape.default scalar_tensor.default scatter.src scatter.value
scatter_add.default scatter_reduce.two select.int select_scatter.default slice.Tensor slice_scatter.default
softmax.int sort.default split.Tensor split_with_sizes.default squeeze.default squeeze.dim squeeze.dims
stack.default sum.default sum.dim_IntList sym_size.int topk.default transpose.int tril.default triu.default
unsqueeze.default var.correction view.default view_as_complex.default view_as_real.default
"""
POINTWISE = tuple(POINTWISE_TABLE.split())
ATEN_OPS = (*POINTWISE, *OTHER_TABLE.split())
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


def is_creator(target: Any) -> bool:
    """True for an op that makes a tensor of numbers alone: its result lies on the device of keyword ``device``."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    arguments = target._schema.arguments
    return any(a.name == "device" for a in arguments) and not any(
        "Tensor" in str(a.real_type) for a in arguments
    )


def add_rule(self: Any, other: Any, *, alpha: Any = 1) -> Any:
    """The shape rule of ``add.Tensor``. On like tensors torch's own imports torch's compiler, which takes a second."""
    if type(alpha) is int and alpha == 1 and is_alike(self, other):
        return self.new_empty(self.shape)
    return aten("add.Tensor")(self, other, alpha=alpha)


def is_alike(x: Any, y: Any) -> bool:
    """True for contiguous tensors of the same shape and type."""
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return False
    return x.shape == y.shape and x.dtype == y.dtype and x.is_contiguous() and y.is_contiguous()


SHAPE_RULES: dict[Any, Callable[..., Any]] = {aten("add.Tensor"): add_rule}  # of others: the op
