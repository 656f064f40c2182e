"""Ops with a recurrent state by optkit's native kernels (recurrent.cpp): a sequential scan over the tokens of each
sequence, shared by threads over sequences, heads and channels.

A sequence has the same bits in any batch, in any chunks and by any number of threads. Activations of other types than
float32 run the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from optkit.kernels import reference
from optkit.kernels.cpu import native
from optkit.kernels.cpu.call_list import SEQUENCES
from optkit.kernels.cpu.emit import Emitter, Result
from optkit.kernels.cpu.program import Builder, Size, View
from optkit.kernels.cpu.rows import all_float32, pointer
from optkit.kernels.kernel import Kernel

TAPS_FIRST = 1  # the position of a convolution's weight


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    state_slots: Tensor,
    *,
    activation: str = "",
) -> Tensor:
    """See ``reference.short_conv``; ``weight`` is [K, C] (``pack_conv``)."""
    if not all_float32(x, weight, bias, conv_state):
        batch = (query_start, seq_lens, state_slots)
        return reference.short_conv(x, weight.T[:, None], bias, conv_state, *batch, activation=activation)
    x = dense_rows(x)
    tokens, channels = x.shape
    taps = weight.shape[0]
    native.require(
        weight.shape == (taps, channels) and weight.is_contiguous(), f"the weight must be [K, {channels}]"
    )
    native.require_vector(bias, channels, torch.float32, "bias")
    check_pool(conv_state, taps - 1, channels)
    check_batch(query_start, seq_lens, state_slots)
    out = torch.empty((tokens, channels))
    native.library().optkit_short_conv(
        x.data_ptr(), x.stride(0), weight.data_ptr(), pointer(bias), conv_state.data_ptr(), query_start.data_ptr(),
        seq_lens.data_ptr(), state_slots.data_ptr(), out.data_ptr(), len(seq_lens), channels, taps,
        activation == "silu", native.threads(),
    )  # fmt: skip
    return out


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    recurrent_state: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    state_slots: Tensor,
    *,
    scale: float,
    l2norm: int = 0,
) -> Tensor:
    """See ``reference.gated_delta_rule``."""
    batch = (query_start, seq_lens, state_slots)
    if not all_float32(q, k, v, g, beta, recurrent_state):
        return reference.gated_delta_rule(
            q, k, v, g, beta, recurrent_state, *batch, scale=scale, l2norm=l2norm
        )
    q, k, v, g, beta = (dense_rows(t) for t in (q, k, v, g, beta))
    (tokens, heads, width), (key_heads, dim) = v.shape, k.shape[1:]
    by_channel = g.ndim == 3
    native.require(q.shape == k.shape == (tokens, key_heads, dim), "q and k differ")
    reference.heads_per_key(heads, key_heads)
    native.require(beta.shape == (tokens, heads), f"beta must be [T, {heads}]")
    native.require(
        g.shape == (tokens, heads, *((dim,) if by_channel else ())), "g has other rows than beta or k"
    )
    check_pool(recurrent_state, heads, dim, width)
    check_batch(*batch)
    out = torch.empty((tokens, heads, width))
    native.library().optkit_gated_delta_rule(
        q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), g.data_ptr(), g.stride(0),
        beta.data_ptr(), beta.stride(0), recurrent_state.data_ptr(), query_start.data_ptr(), seq_lens.data_ptr(),
        state_slots.data_ptr(), out.data_ptr(), len(seq_lens), heads, key_heads, dim, width, scale, l2norm, by_channel,
        native.threads(),
    )  # fmt: skip
    return out


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    ssm_state: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    state_slots: Tensor,
) -> Tensor:
    """See ``reference.ssd_scan``."""
    batch = (query_start, seq_lens, state_slots)
    if not all_float32(x, dt, A, B, C, D, ssm_state):
        return reference.ssd_scan(x, dt, A, B, C, D, ssm_state, *batch)
    x, dt, B, C = (dense_rows(t) for t in (x, dt, B, C))
    (tokens, heads, width), (key_heads, dim) = x.shape, B.shape[1:]
    native.require(B.shape == C.shape == (tokens, key_heads, dim), "b and c differ")
    reference.heads_per_key(heads, key_heads)
    native.require(dt.shape == (tokens, heads), f"dt must be [T, {heads}]")
    native.require_vector(A, heads, torch.float32, "a")
    native.require_vector(D, heads, torch.float32, "d")
    check_pool(ssm_state, heads, dim, width)
    check_batch(*batch)
    out = torch.empty((tokens, heads, width))
    native.library().optkit_ssd_scan(
        x.data_ptr(), x.stride(0), dt.data_ptr(), dt.stride(0), A.data_ptr(), B.data_ptr(), B.stride(0), C.data_ptr(),
        C.stride(0), pointer(D), ssm_state.data_ptr(), query_start.data_ptr(), seq_lens.data_ptr(),
        state_slots.data_ptr(), out.data_ptr(), len(seq_lens), heads, key_heads, dim, width, native.threads(),
    )  # fmt: skip
    return out


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    ssm_state: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    state_slots: Tensor,
) -> Tensor:
    """See ``reference.selective_scan``."""
    batch = (query_start, seq_lens, state_slots)
    if not all_float32(x, dt, A, B, C, D, ssm_state):
        return reference.selective_scan(x, dt, A, B, C, D, ssm_state, *batch)
    x, dt, B, C = (dense_rows(t) for t in (x, dt, B, C))
    A = A.contiguous()
    (tokens, channels), states = x.shape, B.shape[1]
    native.require(dt.shape == x.shape, "dt has other rows than x")
    native.require(B.shape == C.shape == (tokens, states), "b and c differ")
    native.require(A.shape == (states, channels), f"a must be [{states}, {channels}]")
    native.require_vector(D, channels, torch.float32, "d")
    check_pool(ssm_state, states, channels)
    check_batch(*batch)
    out = torch.empty((tokens, channels))
    native.library().optkit_selective_scan(
        x.data_ptr(), x.stride(0), dt.data_ptr(), dt.stride(0), A.data_ptr(), B.data_ptr(), B.stride(0), C.data_ptr(),
        C.stride(0), pointer(D), ssm_state.data_ptr(), query_start.data_ptr(), seq_lens.data_ptr(),
        state_slots.data_ptr(), out.data_ptr(), len(seq_lens), channels, states, native.threads(),
    )  # fmt: skip
    return out


def dense_rows(x: Tensor) -> Tensor:
    """``x`` with the elements of each row side by side; a copy where the layout is another."""
    return x if x[0].is_contiguous() else x.contiguous()


def check_pool(pool: Tensor, *state: int) -> None:
    """Refuse a pool of states of another shape.

    Raises:
        ValueError: the kernel would read or write elsewhere.
    """
    native.require(
        pool.shape[1:] == state and pool.is_contiguous(), f"the pool must be of states {list(state)}"
    )


def check_batch(query_start: Tensor, seq_lens: Tensor, state_slots: Tensor) -> None:
    """Refuse batch inputs of other sizes than the number of sequences.

    Raises:
        ValueError: an input has another dtype or shape, or is not dense.
    """
    sequences = seq_lens.shape[0]
    native.require_vector(query_start, sequences + 1, torch.int32, "query_start")
    native.require_vector(seq_lens, sequences, torch.int32, "seq_lens")
    native.require_vector(state_slots, sequences, torch.int32, "state_slots")


def pack_conv(weights: dict[int, Tensor], options: Mapping[str, Any]) -> dict[int, Tensor]:
    """The weight [C, 1, K] as [K, C]: the channels of a tap side by side."""
    return {TAPS_FIRST: weights[TAPS_FIRST][:, 0].T.contiguous()}


# -- in programs -----------------------------------------------------------------------------------------


def emit_short_conv(
    b: Builder,
    x: View,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: View,
    query_start: View,
    seq_lens: View,
    state_slots: View,
    activation: str = "",
) -> Result:
    out = b.buffer(x.rows, x.shape)
    b.call(
        "short_conv", x=x, x_stride=x.row_stride, weight=weight, bias=bias, pool=conv_state, query_start=query_start,
        seq_lens=seq_lens, state_slots=state_slots, out=out, sequences=Size(SEQUENCES), channels=x.width,
        taps=weight.shape[0], silu=int(activation == "silu"),
    )  # fmt: skip
    return (out,)


def emit_gated_delta_rule(
    b: Builder,
    q: View,
    k: View,
    v: View,
    g: View,
    beta: View,
    recurrent_state: View,
    query_start: View,
    seq_lens: View,
    state_slots: View,
    scale: float,
    l2norm: int = 0,
) -> Result:
    (key_heads, dim), (heads, width) = k.shape, v.shape
    out = b.buffer(v.rows, v.shape)
    b.call(
        "gated_delta_rule", q=q, q_stride=q.row_stride, k=k, k_stride=k.row_stride, v=v, v_stride=v.row_stride, g=g,
        g_stride=g.row_stride, beta=beta, beta_stride=beta.row_stride, pool=recurrent_state, query_start=query_start,
        seq_lens=seq_lens, state_slots=state_slots, out=out, sequences=Size(SEQUENCES), heads=heads,
        key_heads=key_heads, dim=dim, width=width, scale=float(scale), normalize=l2norm,
        by_channel=int(len(g.shape) == 2),
    )  # fmt: skip
    return (out,)


def emit_ssd_scan(
    b: Builder,
    x: View,
    dt: View,
    A: Tensor,
    B: View,
    C: View,
    D: Tensor | None,
    ssm_state: View,
    query_start: View,
    seq_lens: View,
    state_slots: View,
) -> Result:
    (key_heads, dim), (heads, width) = B.shape, x.shape
    out = b.buffer(x.rows, x.shape)
    b.call(
        "ssd_scan", x=x, x_stride=x.row_stride, dt=dt, dt_stride=dt.row_stride, a=A, b=B, b_stride=B.row_stride, c=C,
        c_stride=C.row_stride, d=D, pool=ssm_state, query_start=query_start, seq_lens=seq_lens,
        state_slots=state_slots, out=out, sequences=Size(SEQUENCES), heads=heads, key_heads=key_heads, dim=dim,
        width=width,
    )  # fmt: skip
    return (out,)


def emit_selective_scan(
    b: Builder,
    x: View,
    dt: View,
    A: Tensor,
    B: View,
    C: View,
    D: Tensor | None,
    ssm_state: View,
    query_start: View,
    seq_lens: View,
    state_slots: View,
) -> Result:
    out = b.buffer(x.rows, x.shape)
    b.call(
        "selective_scan", x=x, x_stride=x.row_stride, dt=dt, dt_stride=dt.row_stride, a=A.contiguous(), b=B,
        b_stride=B.row_stride, c=C, c_stride=C.row_stride, d=D, pool=ssm_state, query_start=query_start,
        seq_lens=seq_lens, state_slots=state_slots, out=out, sequences=Size(SEQUENCES), channels=x.width,
        states=B.width,
    )  # fmt: skip
    return (out,)


KERNELS = (
    Kernel("short_conv", "native", short_conv, native.supports, pack=pack_conv),
    Kernel("gated_delta_rule", "native", gated_delta_rule, native.supports),
    Kernel("ssd_scan", "native", ssd_scan, native.supports),
    Kernel("selective_scan", "native", selective_scan, native.supports),
)
EMITTERS = (
    Emitter("short_conv", emit_short_conv),
    Emitter("gated_delta_rule", emit_gated_delta_rule),
    Emitter("ssd_scan", emit_ssd_scan),
    Emitter("selective_scan", emit_selective_scan),
)
