"""Capture of the model in a checkpoint directory, float or quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from optkit.capture import boundary
from optkit.capture.export import capture, first_line
from optkit.capture.quantized import capture_quantized
from optkit.capture.streamed import capture_streamed
from optkit.checkpoint.source import open_source
from optkit.errors import UnsupportedModel
from optkit.graph.ir import Graph


def capture_directory(directory: Path, *, weights: bool = True) -> Graph:
    """Capture the model of a checked Hugging Face directory.

    ``weights=False`` builds the model on the meta device, from the config alone: the same graph without tensors.

    Raises:
        UnsupportedModel: the model can't be captured; the message has the reason.
    """
    boundary.register()
    source = open_source(directory, weights=weights)
    if source.layers:
        return capture_quantized(source)
    streamed = capture_streamed(source) if weights else None
    return streamed or capture(load_model(directory, weights))


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
    except ValueError as error:
        raise UnsupportedModel(first_line(error), where=str(directory)) from error
