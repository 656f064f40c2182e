"""torch.export of a Hugging Face model, and the checks before and after the export.

``capture`` exports a loaded model with a dynamic token count, flattens the batch dimension away, raises idioms to the
dialect, and compares the graph's logits with logits of transformers' eager attention (``check``). A model outside of
capture's range is refused with the reason.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from optkit.capture import boundary, experts, recurrent
from optkit.capture.canonicalize import canonicalize
from optkit.capture.check import changed, check_capture, eager, settings
from optkit.capture.complex_numbers import as_pairs
from optkit.capture.counters import count_from_positions, refuse_counters
from optkit.capture.decomposed import decompose
from optkit.capture.exported_graph import join_filled
from optkit.capture.flatten import Captured, flatten, longest_context
from optkit.capture.masks import COMPUTED
from optkit.capture.own_attention import raise_attention
from optkit.capture.rope import choose_rope, fixed_rope
from optkit.capture.state_wiring import RECURRENT
from optkit.errors import UnsupportedModel, first_line, refusal
from optkit.graph.ir import Graph
from optkit.graph.ops import op_name

aten = torch.ops.aten
SAMPLE_TOKENS = 24
BOUNDARY_OPS = {torch.ops.optkit.attention.default, *RECURRENT}
CAUSES = {
    "Constraints violated": "it computes calls of some lengths in another way than others",
    "Could not guard on data-dependent": "it takes another way for other values of its tensors",
    "Could not extract specialized integer": "it takes another way for other values of its tensors",
}


def capture(
    model: Any,
    *,
    check: bool = True,
    max_model_len: int | None = None,
    give_weights: Callable[[Graph], None] | None = None,
) -> Graph:
    """Capture a causal LM whose attention implementation is optkit's boundary; ``check`` compares the logits.

    A model on the meta device has no logits: only masks and arguments of attention are checked.

    Args:
        give_weights: gives the graph and ``model`` the same weights for the check, where the model has none yet.
        max_model_len: tokens of the longest served sequence; decides RoPE frequencies that depend on the length.
    """
    config = model.config.get_text_config()
    refuse_unsupported(config)
    experts.refuse_numbers(model, config)
    rope = choose_rope(config, max_model_len)
    model.eval()
    with fixed_rope(model, rope):
        exported, own_attention = with_attention(model)
        as_pairs(exported.graph)
        join_filled(exported.graph)
        graph = canonicalize(flatten(Captured(exported, model, config)))
    del exported  # its memory is not needed in the check
    if rope is not None:
        graph.meta = replace(graph.meta, max_model_len=rope.max_model_len)
        graph.add_note(rope.sentence)
    counted = count_from_positions(graph)
    refuse_counters(graph)
    if give_weights is not None:
        give_weights(graph)
    if check and next(model.parameters()).device.type != "meta":
        check_capture(graph, model, rope=rope, counted=counted, own_attention=own_attention)
    return graph


def refuse_unsupported(config: Any) -> None:
    """Refuse configurations known to be unsupported, before the export."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            "it is an encoder-decoder model, optkit serves decoders", where=config.model_type
        )


class LogitsOf(torch.nn.Module):
    """The exported signature: token ids and positions of a sequence, rows of wanted logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, position_ids: Tensor, logits_index: Tensor) -> Tensor:
        out = self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            logits_to_keep=logits_index,
            use_cache=False,
            return_dict=True,
        )
        return out.logits


def with_attention(model: Any) -> tuple[torch.export.ExportedProgram, bool]:
    """The exported model with ``optkit::attention`` in each layer; True where the model's own attention became the op.

    Raises:
        UnsupportedModel: the model can't be exported, or its attention is another than the op's.
    """
    if boundary.is_named(model) or recurrent.own_functions(model):
        try:
            exported = export(model)
            if any(node.target in BOUNDARY_OPS for node in exported.graph.nodes):
                return exported, False
        except UnsupportedModel as error:
            if error.what != COMPUTED:
                raise
    with eager(model):
        exported = export(model)
    try:
        raise_attention(exported, longest_context(model.config.get_text_config()))
    except UnsupportedModel as error:
        raise UnsupportedModel(error.what, where=model.config.model_type) from error
    return exported, True


def export(model: Any) -> torch.export.ExportedProgram:
    """Export with dynamic token and logits-row counts; functional aten IR of the ops that a graph may have."""
    device = next(model.parameters()).device
    with device:
        ids = torch.arange(SAMPLE_TOKENS)[None] % 7 + 1
        positions = torch.arange(SAMPLE_TOKENS)[None]
        rows = torch.tensor([5, SAMPLE_TOKENS - 1, 7])
    limit = max(longest_context(model.config.get_text_config()), 64)
    tokens = torch.export.Dim("T", min=2, max=limit)
    shapes = ({1: tokens}, {1: tokens}, {0: torch.export.Dim("L", min=1, max=limit)})
    logging.getLogger("torch.export").setLevel(logging.ERROR)
    experts.register()
    through_boundary = changed([(c, name, experts.NAME) for c, name, _ in settings(model, experts.SETTING)])
    with warnings.catch_warnings(), torch.no_grad(), through_boundary:
        warnings.simplefilter("ignore")
        try:
            with recurrent.replaced(model):
                program = torch.export.export(
                    LogitsOf(model),
                    (ids, positions, rows),
                    dynamic_shapes=shapes,
                    strict=False,
                    prefer_deferred_runtime_asserts_over_guards=True,  # batched experts: T * min(K, K * T) == K * T
                )
            return decompose(program, decompositions())
        except UnsupportedModel as error:
            raise UnsupportedModel(error.what, where=model.config.model_type) from error
        except Exception as error:
            if refusal(error) is not None:
                raise
            raise UnsupportedModel(
                f"torch.export can't trace it: {reason_of(error)}", where=model.config.model_type
            ) from error


def decompositions() -> dict[Any, Callable[..., Any]]:
    """PyTorch's decompositions of the ops that no graph has; the ops of ``optkit.graph.ops`` stay whole."""
    table = torch.export.default_decompositions()
    chosen = {target: rule for target, rule in table.items() if op_name(target) is None}
    return chosen | ZEROS


# Zeros in place of memory that was never written, which no graph reads.


def zeros(size: Any, *, dtype: torch.dtype | None = None, device: Any = None, **layout: Any) -> Tensor:
    return aten.full.default(size, 0, dtype=dtype or torch.get_default_dtype(), device=device)


def new_zeros(like: Tensor, size: Any, *, dtype: torch.dtype | None = None, **placement: Any) -> Tensor:
    return zeros(size, dtype=dtype or like.dtype, device=like.device)


def zeros_like(like: Tensor, **options: Any) -> Tensor:
    return new_zeros(like, like.shape, **options)


ZEROS = {
    aten.empty.memory_format: zeros,
    aten.new_empty.default: new_zeros,
    aten.empty_like.default: zeros_like,
}


def reason_of(error: BaseException) -> str:
    """The cause of a failed export; torch's own line names symbols of the trace and a debugging option."""
    line = first_line(error)
    return next((reason for start, reason in CAUSES.items() if line.startswith(start)), line)
