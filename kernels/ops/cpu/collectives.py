"""Exchange between ranks, and int8 layers in exact parts, by native kernels (collectives.cpp, int8_shared.cpp).

In a program the address of the rank's communicator is a constant, so a graph is lowered under the communicator that
runs it. Under another one than shared memory the exchange is an op between two programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from optkit.kernels import reference
from optkit.kernels.collectives import REDUCTIONS, broadcast_sizes, current, shares
from optkit.kernels.cpu import native, weight_memory
from optkit.kernels.cpu.emit import Emitter, Result
from optkit.kernels.cpu.program import Builder, Size, View
from optkit.kernels.cpu.shared_memory import SharedRank
from optkit.kernels.kernel import Kernel
from optkit.machine.target import Target

STEP = 4  # of the packed layout, as in int8.h
NATIVE_RANKS = "ranks that share memory"


def pack_pieces(weights: dict[int, Tensor], options: Mapping[str, Any] | None = None) -> dict[int, Tensor]:
    """The weight [N, K] int8 in pieces of the native layout: a uint8 blob [N, bytes / N], of which only N has a
    meaning.
    """
    position = min(weights)
    weight = weights[position].contiguous()
    n, k = weight.shape
    library = native.library()
    blob = weight_memory.zeros((n, -(-library.optkit_w8_pieces_bytes(n, k) // n)), torch.uint8)
    library.optkit_pack_w8_pieces(weight.data_ptr(), blob.data_ptr(), n, k, native.threads())
    return {position: blob}


def vector(weights: dict[int, Tensor], options: Mapping[str, Any] | None = None) -> dict[int, Tensor]:
    """Scales and bias as dense float32."""
    return {place: weight.to(torch.float32).contiguous() for place, weight in weights.items()}


def whole_steps(weights: dict[int, Tensor]) -> bool:
    """True for input channels in whole steps."""
    return weights[min(weights)].shape[1] % STEP == 0


def shares_memory(target: Target) -> bool:
    """True where the native kernels run and the ranks of the running code share memory."""
    return native.supports(target) and isinstance(communicator(), SharedRank)


def communicator() -> object:
    """The current communicator, None without one."""
    try:
        return current()
    except RuntimeError:
        return None


def shared_rank() -> SharedRank:
    """The current communicator, of ranks that share memory.

    Raises:
        NotImplementedError: the ranks exchange tensors in another way.
    """
    found = communicator()
    if not isinstance(found, SharedRank):
        raise NotImplementedError("programs exchange through shared memory alone")
    return found


def all_reduce(x: Tensor, op: str = "sum") -> Tensor:
    """See ``reference.all_reduce``."""
    return current().all_reduce(x, op)


def all_gather(x: Tensor, total: int, unit: int = 1) -> Tensor:
    """See ``reference.all_gather``."""
    found = current()
    return found.all_gather(x, shares(total, unit, found.size))


def all_gather_quantized(
    q: Tensor, scale: Tensor, total: int, unit: int = 1, groups: int = 1
) -> tuple[Tensor, Tensor]:
    """See ``reference.all_gather_quantized``; in programs one exchange, and here two."""
    return all_gather(q, total, unit), all_gather(scale, groups, unit * groups // total)


def absmax_per_token(x: Tensor) -> Tensor:
    """See ``reference.absmax_per_token``; equal to the bit."""
    x = dense_rows(x)
    most = torch.empty((len(x), 1))
    native.library().optkit_absmax_per_token(
        x.data_ptr(), x.stride(0), most.data_ptr(), *x.shape, native.threads()
    )
    return most


def quantize_by(x: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    """See ``reference.quantize_by``; equal to the bit."""
    x, most = dense_rows(x), most.contiguous()
    native.require(most.shape == (len(x), 1) and most.dtype is torch.float32, "most must be [T, 1] float32")
    q, scale = torch.empty(x.shape, dtype=torch.uint8), torch.empty((len(x), 1))
    native.library().optkit_quantize_by(
        *(x.data_ptr(), x.stride(0), most.data_ptr(), q.data_ptr(), scale.data_ptr()),
        *(*x.shape, native.threads()),
    )
    return q, scale


def int8_sums(q: Tensor, weight: Tensor) -> Tensor:
    """See ``reference.int8_sums``, equal to the bit; ``weight`` is packed."""
    q, (rows, k), n = q.contiguous(), q.shape, len(weight)
    needed = native.library().optkit_w8_pieces_bytes(n, k)
    native.require(q.dtype is torch.uint8 and k % STEP == 0, "q must be uint8 of whole steps")
    native.require(weight.shape[1] == -(-needed // n), f"the weight was not packed for {k} channels")
    out = torch.empty((rows, n), dtype=torch.int32)
    native.library().optkit_int8_sums(
        q.data_ptr(), k, weight.data_ptr(), out.data_ptr(), rows, n, k, native.threads()
    )
    return out


def dequantize_sums(sums: Tensor, scale: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """The floats that the native ``linear_w8a8`` makes of its sums, to the bit."""
    sums, scale, (rows, n) = sums.contiguous(), scale.contiguous(), sums.shape
    native.require(sums.dtype is torch.int32 and scale.shape == (rows, 1), "sums must be int32, scale [T, 1]")
    native.require_vector(weight_scale.view(-1), n, torch.float32, "weight_scale")
    native.require_vector(bias, n, torch.float32, "bias")
    out = torch.empty((rows, n))
    native.library().optkit_dequantize_sums(
        *(sums.data_ptr(), scale.data_ptr(), weight_scale.data_ptr(), 0 if bias is None else bias.data_ptr()),
        *(out.data_ptr(), rows, n, native.threads()),
    )
    return out


def dense_rows(x: Tensor) -> Tensor:
    """x [T, K] as float32 rows of neighbouring elements."""
    return x if x.stride(-1) == 1 and x.dtype is torch.float32 else x.to(torch.float32).contiguous()


# -- in programs -----------------------------------------------------------------------------------------


def emit_all_reduce(b: Builder, x: View, op: str = "sum") -> Result:
    rank = shared_rank()
    out = b.buffer(x.rows, x.shape, x.dtype)
    b.call(
        "all_reduce_int" if x.dtype is torch.int32 else "all_reduce",
        communicator=rank.handle, x=x, out=out, rows=Size(x.rows), width=x.width, max=REDUCTIONS.index(op),
    )  # fmt: skip
    return (out,)


def emit_all_gather(b: Builder, x: View, total: int, unit: int = 1) -> Result:
    rank = shared_rank()
    sizes = rank.sizes(shares(total, unit, rank.size))
    if len(x.shape) != 1 or sizes[rank.rank] > x.width:
        raise NotImplementedError("a row a token, of at least the rank's share")
    out = b.buffer(x.rows, (total,), x.dtype)
    b.call(
        "all_gather_codes" if x.dtype is torch.uint8 else "all_gather",
        communicator=rank.handle, x=x, x_stride=x.row_stride, sizes=sizes, out=out, rows=Size(x.rows), width=total,
    )  # fmt: skip
    return (out,)


def emit_all_gather_quantized(
    b: Builder, q: View, scale: View, total: int, unit: int = 1, groups: int = 1
) -> Result:
    rank = shared_rank()
    sizes = rank.sizes(shares(total, unit, rank.size))
    scales = rank.sizes(shares(groups, unit * groups // total, rank.size))
    if (q.shape, scale.shape) != ((int(sizes[rank.rank]),), (int(scales[rank.rank]),)):
        raise NotImplementedError("a row a token, of the rank's share")
    q_out, scale_out = b.buffer(q.rows, (total,), torch.uint8), b.buffer(q.rows, (groups,))
    b.call(
        "all_gather_quantized",
        communicator=rank.handle, q=q, q_stride=q.row_stride, scale=scale, sizes=sizes, groups=scales, q_out=q_out,
        scale_out=scale_out, rows=Size(q.rows), width=total, all_groups=groups,
    )  # fmt: skip
    return q_out, scale_out


def emit_broadcast(
    b: Builder, rows: View, x: View | None, after: View | None, width: int, source: int
) -> Result:
    rank = shared_rank()
    if x is not None and x.shape != (width,):
        raise NotImplementedError("a row a token, of the whole width")
    sizes = rank.sizes(broadcast_sizes(width, source, rank.size))
    out = b.buffer(rows.rows, (width,))
    given = out if x is None else x  # of which another rank than the source gives nothing
    b.call(
        "all_gather",
        communicator=rank.handle, x=given, x_stride=given.row_stride, sizes=sizes, out=out, rows=Size(rows.rows),
        width=width,
    )  # fmt: skip
    return (out,)


def emit_absmax_per_token(b: Builder, x: View) -> Result:
    most = b.buffer(x.rows, (1,))
    b.call(
        "absmax_per_token", by_rows=True, x=x, x_stride=x.row_stride, most=most, rows=Size(x.rows), columns=x.width
    )  # fmt: skip
    return (most,)


def emit_quantize_by(b: Builder, x: View, most: View) -> Result:
    q, scale = b.buffer(x.rows, x.shape, torch.uint8), b.buffer(x.rows, (1,))
    b.call(
        "quantize_by", by_rows=True, x=x, x_stride=x.row_stride, most=most, q=q, scale=scale, rows=Size(x.rows),
        columns=x.width,
    )  # fmt: skip
    return q, scale


def emit_int8_sums(b: Builder, q: View, weight: Tensor) -> Result:
    if q.width % STEP:
        raise NotImplementedError(f"{q.width} input channels are no whole steps")
    out = b.buffer(q.rows, (len(weight),), torch.int32)
    b.call(
        "int8_sums", by_rows=True, q=q, q_stride=q.row_stride, weight=weight, out=out, rows=Size(q.rows),
        n=len(weight), k=q.width,
    )  # fmt: skip
    return (out,)


def emit_dequantize_sums(
    b: Builder, sums: View, scale: View, weight_scale: Tensor, bias: Tensor | None = None
) -> Result:
    out = b.buffer(sums.rows, sums.shape)
    b.call(
        "dequantize_sums", by_rows=True, sums=sums, scale=scale, weight_scale=weight_scale, bias=bias, out=out,
        rows=Size(sums.rows), n=sums.width,
    )  # fmt: skip
    return (out,)


KERNELS = (
    Kernel("all_reduce", "native", all_reduce, shares_memory, needs=NATIVE_RANKS),
    Kernel("all_gather", "native", all_gather, shares_memory, needs=NATIVE_RANKS),
    Kernel("all_gather_quantized", "native", all_gather_quantized, shares_memory, needs=NATIVE_RANKS),
    Kernel("broadcast", "native", reference.broadcast, shares_memory, needs=NATIVE_RANKS),
    Kernel("absmax_per_token", "native", absmax_per_token, native.supports),
    Kernel("quantize_by", "native", quantize_by, native.supports),
    Kernel(
        "int8_sums", "native", int8_sums, native.supports, pack_pieces, whole_steps, needs="whole 4 channels"
    ),
    Kernel("dequantize_sums", "native", dequantize_sums, native.supports, vector),
)
EMITTERS = (
    Emitter("all_reduce", emit_all_reduce),
    Emitter("all_gather", emit_all_gather),
    Emitter("all_gather_quantized", emit_all_gather_quantized),
    Emitter("broadcast", emit_broadcast),
    Emitter("absmax_per_token", emit_absmax_per_token),
    Emitter("quantize_by", emit_quantize_by),
    Emitter("int8_sums", emit_int8_sums),
    Emitter("dequantize_sums", emit_dequantize_sums),
)
