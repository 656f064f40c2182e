"""The experts boundary: mixture-of-experts layers as linear layers with a weight for each expert.

transformers calls experts through a registry (``ALL_EXPERTS_FUNCTIONS``). optkit registers an entry of its own, used
during the export: each projection goes into the opaque op ``optkit::expert_linear``, the sum over a token's experts
into ``optkit::weighted_sum``, and gates, activations and routers are captured unchanged. A model whose experts do not
go through the registry is captured as its code is written.

transformers fuses experts on loading: the parameter ``experts.gate_up_proj`` [E, 2F, K] may be the checkpoint's
``experts.0.gate_proj.weight``, ``experts.0.up_proj.weight``, and so on. ``checkpoint_origins`` finds the names by
sending row numbers in place of weights through transformers' own reversal of the conversion.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from optkit.errors import UnsupportedModel
from optkit.graph.ir import Origin, Part
from optkit.kernels import reference

NAME = "optkit"
SETTING = "_experts_implementation"
# Keys of transformers' configurations.
NUMBERS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
NUMBERS_OF_A_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")


@torch.library.custom_op("optkit::expert_linear", mutates_args=())
def expert_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor, transposed: bool
) -> Tensor:
    """``reference.expert_linear`` for weight [E, N, K], or [E, K, N] if ``transposed``, and bias [E, N]."""
    rows = (weight.transpose(1, 2) if transposed else weight).flatten(0, 1)
    return reference.expert_linear(
        x, rows, None if bias is None else bias.flatten(), experts, num_experts=len(weight)
    )


@expert_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor, transposed: bool) -> Tensor:
    return x.new_empty(*experts.shape, weight.shape[2 if transposed else 1])


@torch.library.custom_op("optkit::weighted_sum", mutates_args=())
def weighted_sum(x: Tensor, weights: Tensor) -> Tensor:
    """``reference.weighted_sum``."""
    return reference.weighted_sum(x, weights)


@weighted_sum.register_fake
def _(x: Tensor, weights: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[2])


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The function transformers calls: hidden states [T, K], experts and their weights [T, J]; gives [T, K]."""

    def project(x: Tensor, name: str) -> Tensor:
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        return expert_linear(x, getattr(module, name), bias, top_k_index, module.is_transposed)

    x = project(hidden_states, "gate_up_proj" if module.has_gate else "up_proj")
    x = project(module._apply_gate(x) if module.has_gate else module.act_fn(x), "down_proj")
    if getattr(module, "has_post_expert_norm", False):
        x = module.post_expert_norm(x)
    return weighted_sum(x, top_k_weights.to(x.dtype)).to(hidden_states.dtype)


def register() -> None:
    """Make the experts implementation "optkit" known to transformers (idempotent)."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def refuse_numbers(model: Any, config: Any) -> None:
    """Refuse a model with experts that sends a token to none, or to more than there are.

    transformers computes the first case as a layer of zeros. A model without experts may have any numbers.
    """
    if not any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules()):
        return
    given = [(key, getattr(config, key, None)) for key in NUMBERS]
    total, limit = next(((key, value) for key, value in given if isinstance(value, int)), ("experts", None))
    for key in NUMBERS_OF_A_TOKEN:
        value = getattr(config, key, None)
        for chosen in value if isinstance(value, list) else [value]:  # a number for each layer
            if isinstance(chosen, int) and not 1 <= chosen <= (limit or chosen):
                most = total if limit is None else f"{total} ({limit})"
                what = f"{key} is {chosen}, and must be from 1 to {most}"
                raise UnsupportedModel(what, where=config.model_type, fix="correct it in config.json")


# -- names in the checkpoint -----------------------------------------------------------------------------


def checkpoint_origins(model: Any) -> dict[str, Origin]:
    """The checkpoint tensors of each parameter with other names or another layout in the checkpoint."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found = {}
    for name, parameter in parameters.items():
        origin = origin_of(model, name, parameter)
        if origin is not None and origin != Origin((Part(name, rows_of(parameter)),)):
            found[name] = origin
    return found


def rows_of(value: Tensor) -> int:
    """The rows of a parameter; of experts [E, N, K] those of all experts."""
    return value[..., 0].numel() if value.ndim > 1 else max(1, value.numel())


def origin_of(model: Any, name: str, parameter: Tensor) -> Origin | None:
    """The checkpoint tensors of parameter ``name``; None where they are not rows of the parameter one after another."""
    shape = (*parameter.shape[:-1], 1) if parameter.ndim > 1 else parameter.shape
    numbers = torch.arange(rows_of(parameter)).reshape(shape)
    with suppress(
        Exception
    ):  # a conversion that needs more than one parameter, or its columns, has no such origin
        return origin_of_rows(revert_weight_conversion(model, {name: numbers}), shape)
    return None


def origin_of_rows(pieces: Mapping[str, Tensor], shape: tuple[int, ...]) -> Origin | None:
    """The origin of a parameter of ``shape``, whose row numbers ended up in ``pieces``, by checkpoint name."""
    if len(pieces) == 1:
        ((name, piece),) = pieces.items()
        same = tuple(piece.shape) == tuple(shape)
        rows = piece.numel()
        return Origin((Part(name, rows),), stacked=shape[0] if len(shape) == 3 else 0) if same else None
    ordered = sorted(pieces.items(), key=lambda item: int(item[1].flatten()[0]))
    together = torch.cat([piece.flatten() for _, piece in ordered])
    matrices = all(piece.ndim == len(shape) - 1 for piece in pieces.values())
    if not matrices or not torch.equal(together, torch.arange(len(together))):
        return None
    return Origin(tuple(Part(name, piece.numel()) for name, piece in ordered))
