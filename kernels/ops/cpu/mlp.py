"""A gated MLP of int8 layers in bfloat16 precision as a single native call in programs (w8a16.cpp, w8a16_amx.cpp).

The gated product is not written as floats: gates and ups of some tokens become the bfloat16 activations of the second
layer while still in the cache. Results have the bits of the three ops.
"""

from __future__ import annotations

from torch import Tensor

from optkit.kernels.cpu import native
from optkit.kernels.cpu.emit import Arguments, Chain
from optkit.kernels.cpu.gates import GELUS, SILU
from optkit.kernels.cpu.int8 import BFLOAT16, PANEL, STEP, TILE_BLOCKS, is_half
from optkit.kernels.cpu.program import Builder, Size, View


def emit_silu_mlp(b: Builder, gate_up: Arguments, _: Arguments, down: Arguments) -> View:
    return emit_mlp(b, SILU, gate_up, down)


def emit_gelu_mlp(b: Builder, gate_up: Arguments, gelu: Arguments, down: Arguments) -> View:
    return emit_mlp(b, GELUS[gelu.kwargs.get("approximate", (*gelu.args, "none")[1])], gate_up, down)


def emit_mlp(b: Builder, activation: int, gate_up: Arguments, down: Arguments) -> View:
    """The output of the second layer.

    Raises:
        NotImplementedError: separate calls are as fast, or the layers have other precisions or sizes.
    """
    if not native.multiplies_bfloat16() or any(c.kwargs != {"precision": BFLOAT16} for c in (gate_up, down)):
        raise NotImplementedError("for bfloat16 tiles")
    x: View = gate_up.args[0]
    first, second = layer(*gate_up.args[1:]), layer(*down.args[1:])
    n, width = len(down.args[1]), len(gate_up.args[1]) // 2
    if width % PANEL or x.width % STEP:
        raise NotImplementedError(f"{width} gates are no whole panels")
    out = b.buffer(x.rows, (n,))
    b.call(
        "gated_mlp_w8a16", by_rows=True, blocks=TILE_BLOCKS,
        x=x, x_stride=x.row_stride, out=out, rows=Size(x.rows), n=n, width=width, k=x.width, activation=activation,
        **{f"gate_up{name}": value for name, value in first.items()},
        **{f"down{name}": value for name, value in second.items()},
    )  # fmt: skip
    return out


def layer(weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> dict[str, Tensor | int | None]:
    """The arguments of one layer, by the ends of their names."""
    return {"": weight, "_scale": scale, "_bias": bias, "_groups": scale.shape[1], "_half": is_half(scale)}


KERNELS = ()
CHAINS = (
    Chain(("linear_w8a16", "silu_mul_packed", "linear_w8a16"), emit_silu_mlp),
    Chain(("linear_w8a16", "gelu_mul_packed", "linear_w8a16"), emit_gelu_mlp),
)
