"""The graph of a model without weights, captured once: a second plan of a recipe takes moments.

The graph follows from the configuration, the libraries and optkit's sources, so the cached file is named by a hash of
all three.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optkit.checkpoint.adapter import Adapter
from optkit.checkpoint.source import open_source
from optkit.errors import UserError
from optkit.graph.ir import Graph
from optkit.graph.serialize import graph_from_json, graph_to_json
from optkit.machine.paths import cache_dir, replace_text
from optkit.pipeline.sources import compiler_digest

LIBRARIES = ("torch", "transformers")


def capture_planned(
    directory: Path, max_model_len: int | None = None, adapters: Sequence[Adapter] = ()
) -> Graph:
    """``capture_directory`` without weights; without adapters from the cache after the first time."""
    file = cache_dir("captures") / f"{key_of(directory, max_model_len)}.json"
    quantized = open_source(
        directory, weights=False
    ).layers  # their graph follows from what lies in the files, too
    cached = not quantized and not adapters
    graph = read(file) if cached else None
    if graph is None:
        from optkit.capture import capture_directory  # seconds of imports

        graph = capture_directory(directory, weights=False, max_model_len=max_model_len, adapters=adapters)
        if cached and all(weight.is_meta for weight in graph.weights.values()):
            replace_text(file, graph_to_json(graph))
    return graph


def key_of(directory: Path, max_model_len: int | None) -> str:
    parts = [compiler_digest(), *(version(name) for name in LIBRARIES), max_model_len]
    config = (directory / "config.json").read_bytes()
    return hashlib.sha256(json.dumps(parts).encode() + config).hexdigest()[:32]


def read(file: Path) -> Graph | None:
    """The graph in ``file``; None for an absent or damaged file."""
    try:
        text = file.read_text("utf-8")
        shapes = {name: entry["shape"] for name, entry in json.loads(text)["weights"].items()}

        def load(name: str, origin: Any, dtype: torch.dtype) -> Tensor:
            return torch.empty(shapes[name], dtype=dtype, device="meta")

        return graph_from_json(text, load)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError):
        return None
