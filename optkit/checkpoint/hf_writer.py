"""Writes a graph as a Hugging Face model directory, for transformers and vLLM.

Tensors keep the names of the checkpoint. Quantized layers are in the formats of compressed-tensors
(``compressed_tensors_writer``), described by ``quantization_config`` in config.json, whatever the source's format. A
tied output head with a weight of its own in the graph, quantized or float, is untied in the config.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from optkit.checkpoint.compressed_tensors_writer import model_tensors, tensors_of_codes
from optkit.checkpoint.quantization_config import quantization_config, quantized_modules
from optkit.checkpoint.safetensors_writer import save_tensors
from optkit.checkpoint.source import Source, open_source
from optkit.checkpoint.tensors import changed_tensors, save_shards
from optkit.checkpoint.text_files import write_text_files
from optkit.graph import variants
from optkit.graph.ir import Graph
from optkit.graph.layer_names import layer_number
from optkit.graph.stored import StoredTensor


def write_model(graph: Graph, source: Path, directory: Path) -> None:
    """Write config, tokenizer files and tensors of ``graph``, whose checkpoint is ``source``, to ``directory``."""
    files = open_source(source)
    tensors = model_tensors(graph, checkpoint_tensors(graph, files))
    write_directory(directory, tensors, model_config(graph, files), source)


def write_codes(graph: Graph, source: Path, directory: Path, file: Path) -> None:
    """Write config and tokenizer files to ``directory``, and the tensors of ``graph`` to ``file``, for optkit alone.

    The config has no ``quantization_config``, and the directory no weights: transformers refuses to load it.
    """
    files = open_source(source)
    widest = variants.widest(graph)
    save_tensors(tensors_of_codes(graph, checkpoint_tensors(widest, files)), file)
    config = {k: v for k, v in model_config(widest, files).items() if k != "quantization_config"}
    write_json(directory / "config.json", config)
    write_text_files(source, directory)


def checkpoint_tensors(graph: Graph, files: Source) -> dict[str, Tensor | StoredTensor]:
    """The tensors of ``graph`` by their names in the checkpoint, and those of ``files`` that are in no graph."""
    changed = changed_tensors(graph, files)
    used = {part.name for w in graph.weights.values() if w.origin for part in w.origin.parts}
    operands = {name for layer in files.layers.values() for name in layer.names()}
    left = files.names() - set(changed) - (operands - used) - removed_layers(graph, files)
    return {name: files[name] for name in left} | changed


def write_directory(
    directory: Path, tensors: Mapping[str, Tensor | StoredTensor], config: dict[str, Any], texts: Path
) -> None:
    """Write tensors, config and the text files of ``texts`` to ``directory``."""
    placed = save_shards(tensors, directory)
    if len(set(placed.values())) > 1:
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": placed}
        write_json(directory / "model.safetensors.index.json", index)
    write_json(directory / "config.json", config)
    write_text_files(texts, directory)


def model_config(graph: Graph, source: Source) -> dict[str, Any]:
    """config.json of the optimized model, from the config of ``source``."""
    config = {key: value for key, value in source.info.config.items() if key != "quantization_config"}
    config |= graph.annotations.get("config", {})
    if isinstance(kinds := config.get("layer_types"), list):  # layers are removed where all are of one kind
        config["layer_types"] = kinds[: config.get("num_hidden_layers", len(kinds))]
    quantization = quantization_config(graph)
    if quantization is not None:
        config = {**config, "quantization_config": quantization}
    if graph.meta.output_embedding in quantized_modules(graph) or unties_head(graph, source):
        config = {**config, "tie_word_embeddings": False}
    return config


def removed_layers(graph: Graph, source: Source) -> set[str]:
    """The tensors of ``source`` whose layer number is beyond the layers of ``graph``."""
    count = graph.annotations.get("config", {}).get("num_hidden_layers")
    if count is None:
        return set()
    return {name for name in source.names() if (layer_number(name) or 0) >= count}


def unties_head(graph: Graph, source: Source) -> bool:
    """True where the head is tied in ``source`` and has a float weight of the head's own in ``graph``.

    With the source's config transformers would tie the head to the embedding again.
    """
    weight = f"{graph.meta.output_embedding}.weight"
    parts = {part.name for w in graph.weights.values() if w.origin for part in w.origin.parts}
    tied = source.info.config.get("tie_word_embeddings", weight not in source)
    return weight in parts and tied is True


def write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
