"""The spec of ops with a recurrent state: short convolutions, the gated delta rule, and selective state spaces.

A sequence's state has a fixed size, whatever the length. The state lies in a *pool* [slots, ...] float32, in the slot
``state_slots[s]`` of sequence s, and is updated in place. The rules of all ops here:

- a sequence whose call holds its first token (``seq_lens[s]`` equals the tokens of the call) begins from zeros,
  whatever the slot holds; any other sequence begins from the slot;
- after the call the slot holds the state after the sequence's last token of the call;
- a padding sequence (``seq_lens[s]`` 0) gives zeros and touches no slot.

Tokens are taken one after another, so a prompt in chunks gives the same bits as the whole prompt. Arithmetic is
float32; results have the dtype of the first argument.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from optkit.kernels.reference_attention import heads_per_key

ACTIVATIONS = ("", "silu")
L2_EPSILON = 1e-6


def runs(query_start: Tensor, seq_lens: Tensor, state_slots: Tensor) -> Iterator[tuple[slice, int, bool]]:
    """The rows of each sequence in the batch, its slot, and True where the rows begin the sequence."""
    starts = query_start.tolist()
    for s, (length, slot) in enumerate(zip(seq_lens.tolist(), state_slots.tolist(), strict=True)):
        rows = slice(starts[s], starts[s + 1])
        if length > 0:
            yield rows, slot, length == rows.stop - rows.start


def first_state(pool: Tensor, slot: int, is_first: bool) -> Tensor:
    """The state before a sequence's rows: zeros for the first rows, else the slot's."""
    return torch.zeros_like(pool[slot]) if is_first else pool[slot].clone()


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
    """A causal convolution over the tokens of each sequence, channel by channel: [T, C] like x.

    ``out[t, c] = act(bias[c] + sum over j of weight[c, 0, j] * x[t - K + 1 + j, c])``, with zeros before a sequence's
    first token; weight [C, 1, K], as in ``nn.Conv1d``; ``activation`` is empty or ``silu``. The pool [slots, K - 1, C]
    holds a sequence's last K - 1 inputs, oldest first. Source: the causal depthwise convolution of Mamba (arXiv
    2312.00752).
    """
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    if x.device.type == "meta":
        return out
    taps = weight[:, 0].T.to(torch.float32)  # [K, C]
    for rows, slot, is_first in runs(query_start, seq_lens, state_slots):
        inputs = torch.cat((first_state(conv_state, slot, is_first), x[rows].to(torch.float32)))
        tokens = rows.stop - rows.start
        total = (
            torch.zeros_like(inputs[:tokens]) if bias is None else bias.to(torch.float32).expand(tokens, -1)
        )
        for j, tap in enumerate(taps):
            total = total + tap * inputs[j : j + tokens]
        if (
            activation == "silu"
        ):  # a row by itself: PyTorch rounds the last elements of a tensor in another way
            total = torch.stack([F.silu(row) for row in total])
        out[rows] = total.to(x.dtype)
        conv_state[slot] = inputs[tokens:]
    return out


def l2_normalized(x: Tensor) -> Tensor:
    """``x / sqrt(sum of squares of the last dimension + 1e-6)``."""
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + L2_EPSILON)


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
    """Linear attention by the gated delta rule: [T, H, E] of the dtype of q.

    For each head a state S [D, E], and for each token ``S = exp(g) S``, then ``S = S + k (beta (v - k S))``, and the
    output ``scale * q S``. q and k [T, J, D], each shared by H / J heads in a row; v [T, H, E]; beta [T, H]; g [T, H]
    decays a head, g [T, H, D] each channel of the keys by itself. With ``l2norm`` 1 the rows of q and k are divided by
    their Euclidean norm first. The pool is [slots, H, D, E].

    Source: Gated DeltaNet (arXiv 2412.06464); decay by channel: Kimi Linear (arXiv 2510.26692).
    """
    out = torch.zeros_like(v, dtype=q.dtype, memory_format=torch.contiguous_format)
    if q.device.type == "meta":
        return out
    q, k, v, g, beta = (x.to(torch.float32) for x in (q, k, v, g, beta))
    if l2norm:
        q, k = l2_normalized(q), l2_normalized(k)
    shared = heads_per_key(v.shape[1], k.shape[1])
    q, k = (q * scale).repeat_interleave(shared, dim=1), k.repeat_interleave(shared, dim=1)
    decay = g.exp()[..., None] if g.ndim == 3 else g.exp()[..., None, None]  # [T, H, D or 1, 1]
    for rows, slot, is_first in runs(query_start, seq_lens, state_slots):
        state = first_state(recurrent_state, slot, is_first)
        for t in range(rows.start, rows.stop):
            state = state * decay[t]
            delta = (v[t] - torch.einsum("hd,hde->he", k[t], state)) * beta[t, :, None]
            state = state + k[t, :, :, None] * delta[:, None]
            out[t] = torch.einsum("hd,hde->he", q[t], state).to(out.dtype)
        recurrent_state[slot] = state
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
    """The state-space layer of Mamba-2: [T, H, P] like x.

    For each head a state S [N, P], and for each token ``S = exp(dt A) S + B (dt x)``, and the output ``C S + D x``. x
    [T, H, P]; dt [T, H], positive; A and D [H]; B and C [T, J, N], each shared by H / J heads in a row. The pool is
    [slots, H, N, P]. Source: Mamba-2 (arXiv 2405.21060).
    """
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    if x.device.type == "meta":
        return out
    dtype = x.dtype
    x, dt, A, B, C = (t.to(torch.float32) for t in (x, dt, A, B, C))
    shared = heads_per_key(x.shape[1], B.shape[1])
    B, C = B.repeat_interleave(shared, dim=1), C.repeat_interleave(shared, dim=1)
    decay, given = (dt * A).exp()[..., None, None], x * dt[..., None]
    for rows, slot, is_first in runs(query_start, seq_lens, state_slots):
        state = first_state(ssm_state, slot, is_first)
        for t in range(rows.start, rows.stop):
            state = state * decay[t] + B[t, :, :, None] * given[t, :, None]
            result = torch.einsum("hn,hnp->hp", C[t], state)
            out[t] = (result if D is None else result + D.to(torch.float32)[:, None] * x[t]).to(dtype)
        ssm_state[slot] = state
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
    """The state-space layer of Mamba: [T, C] like x.

    For each channel a state h [N], and for each token ``h = exp(dt A) h + dt x B``, and the output ``C h + D x``. x and
    dt [T, C], dt positive; A [N, C]; B and C [T, N]; D [C]. The pool is [slots, N, C].
    Source: Mamba (arXiv 2312.00752).
    """
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    if x.device.type == "meta":
        return out
    dtype = x.dtype
    x, dt, A, B, C = (t.to(torch.float32) for t in (x, dt, A, B, C))
    for rows, slot, is_first in runs(query_start, seq_lens, state_slots):
        state = first_state(ssm_state, slot, is_first)
        for t in range(rows.start, rows.stop):
            state = state * (dt[t] * A).exp() + (dt[t] * x[t]) * B[t, :, None]
            result = C[t] @ state
            out[t] = (result if D is None else result + D.to(torch.float32) * x[t]).to(dtype)
        ssm_state[slot] = state
    return out
