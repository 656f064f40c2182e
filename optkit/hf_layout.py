"""Writes a graph as a Hugging Face model directory: what transformers and vLLM load.

Tensors keep their checkpoint names. Quantized layers are compressed-tensors ``int-quantized``: int8 ``weight``
and ``weight_scale`` [N, G], described by ``quantization_config`` in config.json. An output head that was tied to
the embedding and is now quantized becomes a tensor of its own, so the config unties it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from optkit.checkpoint import validate_checkpoint
from optkit.checkpoint_tensors import TensorFiles, changed_tensors, save_shards
from optkit.graph.ir import Graph
from optkit.kernels import reference

# The int8 ops, and which argument is the weight; its scales follow it.
INT8_OPS = {reference.linear_w8a8: 2, reference.linear_w8a16: 1}

# Files of the source that describe text, not weights; each is copied if it is there.
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
    "LICENSE",
    "README.md",
)


def write_model(graph: Graph, source: Path, directory: Path) -> None:
    """Write config, tokenizer files and tensors of ``graph``, whose checkpoint is ``source``, to ``directory``."""
    info = validate_checkpoint(source)
    files = TensorFiles(source, info)
    changed = changed_tensors(graph, files)
    tensors = {name: files[name] for name in files.names() - set(changed)} | changed
    placed = save_shards(tensors, directory)
    if len(set(placed.values())) > 1:
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": placed}
        write_json(directory / "model.safetensors.index.json", index)
    write_json(directory / "config.json", model_config(graph, info.config))
    for name in TEXT_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def model_config(graph: Graph, config: dict[str, Any]) -> dict[str, Any]:
    """config.json of the optimized model."""
    w8a8, w8a16 = (set(modules(graph, op, position)) for op, position in INT8_OPS.items())
    if not w8a8 | w8a16:
        return config
    ignore = sorted(set(modules(graph, reference.linear, 1)))
    groups = int8_groups(int8_group_size(graph), sorted(w8a8), sorted(w8a16))
    config = {**config, "quantization_config": int8_config(ignore, groups)}
    if graph.meta.output_embedding in w8a8 | w8a16:
        config["tie_word_embeddings"] = False
    return config


def modules(graph: Graph, op: Any, position: int) -> list[str]:
    """Checkpoint modules whose weight is argument ``position`` of an ``op``, fused ones spelled out."""
    names = []
    for node in graph.calls(op):
        weight = graph.weight_of(node.args[position])
        if weight is None or weight.origin is None:
            continue
        tied = str(node.args[position].target) == graph.meta.input_embedding
        parts = [part.name.rpartition(".")[0] for part in weight.origin.parts]
        names += [graph.meta.output_embedding] if tied else parts
    return names


def int8_group_size(graph: Graph) -> int:
    """Channels that share a scale in the graph's int8 layers; 0 for per-channel weights and per-token activations."""
    for op, position in INT8_OPS.items():
        for node in graph.calls(op):
            weight, scale = (graph.weights[str(node.args[position + i].target)].value for i in (0, 1))
            return 0 if scale.shape[1] == 1 else weight.shape[1] // scale.shape[1]
    return 0


def int8_groups(group_size: int, w8a8: list[str], w8a16: list[str]) -> dict[str, Any]:
    """The config groups of int8 layers: those with int8 activations, and those with int8 weights only.

    Where there are both, ``Linear`` stands for the first and the second are named, which weighs more.
    """
    common = {"num_bits": 8, "type": "int", "symmetric": True}
    strategy = {"strategy": "group", "group_size": group_size} if group_size else {"strategy": "channel"}
    weights = {**common, **strategy, "dynamic": False}
    activations = {**common, "strategy": "token", "dynamic": True}
    both = {"weights": weights, "format": "int-quantized"}
    groups = []
    if w8a8:
        groups.append({"targets": ["Linear"], **both, "input_activations": activations})
    if w8a16:
        groups.append({"targets": w8a16 if w8a8 else ["Linear"], **both})
    return {f"group_{i}": group for i, group in enumerate(groups)}


def int8_config(ignore: list[str], groups: dict[str, Any]) -> dict[str, Any]:
    """compressed-tensors' description of int8 layers: per-channel or grouped weights, dynamic activations."""
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore,
    }


def write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
