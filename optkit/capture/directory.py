"""Capture of the model in a checkpoint directory, float or quantized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from optkit.capture import boundary
from optkit.capture.adapters import merge_adapters
from optkit.capture.building import build_model
from optkit.capture.export import capture
from optkit.capture.loading import class_of, refusals
from optkit.capture.quantized import architecture_config, capture_quantized
from optkit.capture.streamed import capture_streamed
from optkit.checkpoint.adapter import Adapter
from optkit.checkpoint.source import Source, open_source
from optkit.checkpoint.text_part import text_name
from optkit.errors import UserError
from optkit.graph.ir import Graph


def capture_directory(
    directory: Path,
    *,
    weights: bool = True,
    max_model_len: int | None = None,
    adapters: Sequence[Adapter] = (),
) -> Graph:
    """Capture the model of a checked Hugging Face directory.

    Args:
        weights: False builds the model on the meta device, from the config alone: the same graph without tensors.
        max_model_len: tokens of the longest served sequence, None for as many as the model has (``capture.rope``).
        adapters: merged into the model before the capture.

    Raises:
        UnsupportedModel: the model can't be captured; the message has the reason.
        UserError: an adapter does not fit the model.
    """
    boundary.register()
    source = open_source(directory, weights=weights)
    if source.layers or source.float4:
        if adapters:
            fix = "merge it into the model before the quantization"
            raise UserError(
                "an adapter can't be merged into a quantized model", where=str(directory), fix=fix
            )
        return capture_quantized(source, max_model_len)
    streamed = capture_streamed(source, max_model_len) if weights and not adapters else None
    if streamed is not None:
        return streamed
    notes = [source.text.note] if source.text else []
    model = load_model(source, weights, notes)
    notes += merge_adapters(model, adapters if source.text is None else map(of_text, adapters))
    graph = capture(model, max_model_len=max_model_len)
    for note in notes:
        graph.add_note(note)
    return graph


def of_text(adapter: Adapter) -> Adapter:
    """An adapter of a multimodal model with the names of the text model."""
    return replace(
        adapter,
        updates={text_name(name): update for name, update in adapter.updates.items()},
        saved={text_name(name): value for name, value in adapter.saved.items()},
    )


def load_model(source: Source, weights: bool, notes: list[str]) -> Any:
    """The float model with optkit's attention boundary, on the meta device without ``weights``.

    Args:
        notes: gets sentences about the checkpoint (``build_model``).

    Raises:
        UnsupportedModel: transformers can't build the model, or a tensor is missing.
    """
    config, where = architecture_config(source), str(source.directory)
    model_class: Any = AutoModelForCausalLM if source.text is None else class_of(config, where)
    if weights:
        return build_model(model_class, source, config, dict(source) if source.text else None, notes)
    make = AutoModelForCausalLM.from_config if source.text is None else model_class._from_config
    with refusals(where), torch.device("meta"):
        return boundary.built(
            lambda attention: make(config, attn_implementation=attention, dtype=torch.float32)
        )
