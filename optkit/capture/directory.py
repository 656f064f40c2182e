"""Capture of the model in a checkpoint directory, float or quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from optkit.capture import boundary
from optkit.capture.export import capture, first_line
from optkit.capture.quantized import capture_quantized
from optkit.checkpoint.source import open_source
from optkit.errors import UnsupportedModel
from optkit.graph.ir import Graph


def capture_directory(directory: Path, *, weights: bool = True, max_model_len: int | None = None) -> Graph:
    """Capture the model of a checked Hugging Face directory.

    Args:
        weights: False builds the model on the meta device, from the config alone: the same graph without tensors.
        max_model_len: tokens of the longest served sequence, None for as many as the model has (``capture.rope``).

    Raises:
        UnsupportedModel: the model can't be captured; the message has the reason.
    """
    boundary.register()
    source = open_source(directory, weights=weights)
    if source.layers:
        return capture_quantized(source, max_model_len)
    return capture(load_model(directory, weights), max_model_len=max_model_len)


def load_model(directory: Path, weights: bool) -> Any:
    """The float model with optkit's attention boundary, on the meta device without ``weights``.

    Raises:
        UnsupportedModel: transformers can't build the model.
    """
    options: dict[str, Any] = {"attn_implementation": boundary.NAME, "dtype": torch.float32}
    try:
        with boundary.interface_needed(str(directory)):
            if weights:
                return AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, **options)
            config = AutoConfig.from_pretrained(directory, local_files_only=True)
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(config, **options)
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(first_line(error), where=str(directory)) from error
