"""Capture of the model in a checkpoint directory, float or quantized."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from optkit.capture import boundary
from optkit.capture.adapters import merge_adapters
from optkit.capture.export import capture, first_line
from optkit.capture.quantized import architecture_config, capture_quantized
from optkit.capture.streamed import capture_streamed
from optkit.checkpoint.adapter import Adapter
from optkit.checkpoint.source import Source, open_source
from optkit.errors import UnsupportedModel, UserError
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
    model = load_model(directory, weights) if source.text is None else load_text_part(source, weights)
    notes = [source.text.note] if source.text else []
    notes += merge_adapters(model, adapters)
    graph = capture(model, max_model_len=max_model_len)
    for note in notes:
        graph.add_note(note)
    return graph


def load_model(directory: Path, weights: bool) -> Any:
    """The float model with optkit's attention boundary, on the meta device without ``weights``.

    Raises:
        UnsupportedModel: transformers can't build the model.
    """

    def build(attention: str) -> Any:
        options: dict[str, Any] = {"attn_implementation": attention, "dtype": torch.float32}
        if weights:
            return AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, **options)
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, **options)

    try:
        return boundary.built(build)
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(first_line(error), where=str(directory)) from error


def load_text_part(source: Source, weights: bool) -> Any:
    """The decoder of a multimodal checkpoint with optkit's attention boundary, on the meta device without ``weights``.

    Raises:
        UnsupportedModel: transformers can't build the model, or a tensor is missing.
    """
    config = architecture_config(source)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    where = str(source.directory)

    def build(attention: str) -> Any:
        options: dict[str, Any] = {"attn_implementation": attention, "dtype": torch.float32}
        if weights:
            return model_class.from_pretrained(
                None, config=config, state_dict=dict(source), output_loading_info=True, **options
            )
        with torch.device("meta"):
            return model_class._from_config(config, **options), {"missing_keys": ()}

    try:
        model, report = boundary.built(build)
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(first_line(error), where=where) from error
    if report["missing_keys"]:
        raise UnsupportedModel(f"the checkpoint has no tensor for {min(report['missing_keys'])}", where=where)
    return model
