"""The boundary of recurrent layers: the meeting point of convolutions and scans with the states of sequences.

transformers calls short convolutions, the gated delta rule and state-space scans through module functions, each under a
name in its registry of kernels (``use_kernel_func_from_hub_with_fallback``). During the export the functions of
``REPLACEMENTS`` are replaced: tensors go into a single opaque op, a row a token, with the number of the
layer, and the rest of the model is captured unchanged, without code for each architecture. Outside of the export the
model has its own functions, so the check of the capture compares with the original functions.

The parts of a function that act on each token alone stay ordinary ops: softplus and limits of time steps, gates,
activations.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from optkit.capture.layer_numbers import layer_number, numbered
from optkit.capture.masks import closure_of
from optkit.errors import UnsupportedModel
from optkit.kernels import reference

SILU = ("silu", "swish")
NO_LIMITS = (0.0, float("inf"))
STATEFUL = "a layer with a recurrent state"


# -- opaque ops ------------------------------------------------------------------------------------------


@torch.library.custom_op("optkit::short_conv", mutates_args=())
def short_conv(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, layer: int) -> Tensor:
    """``reference.short_conv`` of a whole sequence: x [1, T, C]."""
    pool = x.new_zeros(1, weight.shape[1] - 1, weight.shape[0])
    return whole(reference.short_conv, (x, weight[:, None], bias), pool, activation=activation)


@torch.library.custom_op("optkit::gated_delta_rule", mutates_args=())
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, l2norm: int, layer: int
) -> Tensor:
    """``reference.gated_delta_rule`` of a whole sequence: q [1, T, J, D]."""
    pool = q.new_zeros(1, v.shape[2], q.shape[3], v.shape[3])
    return whole(reference.gated_delta_rule, (q, k, v, g, beta), pool, scale=scale, l2norm=l2norm)


@torch.library.custom_op("optkit::ssd_scan", mutates_args=())
def ssd_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, layer: int) -> Tensor:
    """``reference.ssd_scan`` of a whole sequence: x [1, T, H, P]."""
    pool = x.new_zeros(1, x.shape[2], b.shape[3], x.shape[3])
    return whole(reference.ssd_scan, (x, dt, a, b, c, d), pool)


@torch.library.custom_op("optkit::selective_scan", mutates_args=())
def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, layer: int
) -> Tensor:
    """``reference.selective_scan`` of a whole sequence: x [1, T, C], a [N, C]."""
    return whole(reference.selective_scan, (x, dt, a, b, c, d), x.new_zeros(1, *a.shape))


def whole(
    op: Callable[..., Tensor], tensors: tuple[Tensor | None, ...], pool: Tensor, **options: Any
) -> Tensor:
    """The op on one sequence from its first token on; tensors with a row a token have a leading dimension of 1."""
    tokens = tensors[0].shape[1] if tensors[0] is not None else 0
    rows = [t[0] if t is not None and t.ndim > 2 and t.shape[:2] == (1, tokens) else t for t in tensors]
    batch = (torch.tensor(values, dtype=torch.int32) for values in ([0, tokens], [tokens], [0]))
    return op(*rows, pool, *batch, **options)[None]


for made in (short_conv, ssd_scan, selective_scan):
    made.register_fake(lambda x, *rest: torch.empty_like(x, memory_format=torch.contiguous_format))
gated_delta_rule.register_fake(lambda q, k, v, *rest: v.new_empty(v.shape, dtype=q.dtype))


# -- the functions that transformers calls ---------------------------------------------------------------


def refuse_state(**given: Any) -> None:
    """Refuse a state or packed sequences among the arguments: the op starts every sequence from zeros."""
    for name, value in given.items():
        if value is not None:
            raise UnsupportedModel(f"a layer with a recurrent state is called with {name}")


def causal_conv1d(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Any = None,
    **kwargs: Any,
) -> Tensor:
    """The function ``causal_conv1d_fn``: hidden_states [1, C, T]."""
    refuse_state(seq_idx=seq_idx)
    fused = "silu" if activation in SILU else ""
    rows = hidden_states.to(weight.dtype).transpose(1, 2)
    out = short_conv(rows, weight, bias, fused, layer_number(STATEFUL)).transpose(1, 2)
    if activation is not None and not fused:
        out = ACT2FN[activation](out)
    return out.to(hidden_states.dtype)


def chunk_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    scale: float | None = None,
    cu_seqlens: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The functions ``chunk_gated_delta_rule`` and ``chunk_kda``: query [1, T, J, D]."""
    refuse_state(initial_state=initial_state, final_state=output_final_state or None, cu_seqlens=cu_seqlens)
    scale = float(query.shape[-1] ** -0.5 if scale is None else scale)
    layer = layer_number(STATEFUL)
    out = gated_delta_rule(query, key, value, g.float(), beta, scale, int(use_qk_l2norm_in_kernel), layer)
    return out, None


def chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Any = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMITS,
    return_final_states: bool = False,
    **kwargs: Any,
) -> Tensor:
    """The function ``mamba_chunk_scan_combined``: hidden_states [1, T, H, P]. The torch function ignores ``z``, too."""
    refuse_state(
        initial_states=initial_states, final_states=return_final_states or None, seq_idx=seq_idx, z=z
    )
    dt = time_steps(dt, dt_bias, dt_softplus)
    if tuple(dt_limit) != NO_LIMITS or not dt_softplus:
        dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1])
    return ssd_scan(hidden_states.float(), dt.float(), A, B.float(), C.float(), D, layer_number(STATEFUL))


def scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **kwargs: Any,
) -> Tensor:
    """The function ``selective_scan_fn``: hidden_states and dt [1, C, T], B and C [1, N, T]."""
    refuse_state(last_state=return_last_state or None)
    x, dt, B, C = (t.transpose(1, 2) for t in (hidden_states, dt, B, C))
    dt = time_steps(dt, delta_bias, delta_softplus)
    out = selective_scan(x.float(), dt.float(), A.T, B.float(), C.float(), D, layer_number(STATEFUL))
    if z is not None:
        out = F.silu(z.transpose(1, 2)) * out
    return out.transpose(1, 2)


def time_steps(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """Time steps [1, T, ...] from the projection."""
    dt = dt if bias is None else dt + bias
    return F.softplus(dt) if softplus else dt


# -- the registry ----------------------------------------------------------------------------------------

REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_conv1d,
    "chunk_gated_delta_rule": chunk_delta_rule,
    "chunk_kda": chunk_delta_rule,
    "mamba_chunk_scan_combined": chunk_scan,
    "selective_scan_fn": scan,
}


def registered_name(function: Any) -> str | None:
    """The name of a module function in transformers' registry of kernels, None for other functions."""
    if isinstance(function, FunctionType) and {"func_name", "torch_function"} <= set(
        function.__code__.co_freevars
    ):
        return str(closure_of(function)["func_name"])
    return None


def own_functions(model: nn.Module) -> list[tuple[ModuleType, str, Callable[..., Any]]]:
    """The functions of ``REPLACEMENTS`` that the modules of ``model`` call: file, name there, function."""
    return [
        (file, name, function)
        for file in {sys.modules[type(module).__module__] for module in model.modules()}
        for name, function in vars(file).items()
        if registered_name(function) in REPLACEMENTS
    ]


@contextmanager
def replaced(model: nn.Module) -> Iterator[None]:
    """Inside, the modules of ``model`` call the functions of ``REPLACEMENTS``, and layers are numbered."""
    own = own_functions(model)
    try:
        for module, name, function in own:
            setattr(module, name, REPLACEMENTS[registered_name(function) or ""])
        with numbered(model):
            yield
    finally:
        for module, name, function in own:
            setattr(module, name, function)
