"""Capture of quantized checkpoints: the float architecture, with quantized layers in the place of linear layers.

No library of the format is needed. transformers builds the model of the config without ``quantization_config``; float
tensors are loaded as usual, and a quantized weight is replaced by a zero, expanded to the float shape: export needs
shapes only. In the captured graph each linear of a quantized layer then becomes a quantized op.

The check is the same as for float models (``check``): with dequantized weights in model and graph, the logits must
agree. The check takes the float model's memory. Above ``MAX_CHECKED_BYTES`` random weights of little memory replace the
quantized weights: the same check of the graph, on other numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from optkit.capture import boundary
from optkit.capture.check import check_capture
from optkit.capture.export import capture
from optkit.checkpoint.insertion import insert, share_with_embedding
from optkit.checkpoint.source import Source
from optkit.errors import UnsupportedModel
from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.kernels import reference

MAX_CHECKED_BYTES = 4 << 30  # bytes of float weights up to which the check uses the checkpoint's own


def float_config(source: Source) -> Any:
    """The config of the architecture, without quantization; a quantized head is not tied."""
    config = AutoConfig.from_pretrained(source.directory, local_files_only=True)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if any(name.endswith("lm_head") for name in source.layers):
        config.tie_word_embeddings = False
    return config


def load_model(source: Source) -> Any:
    """The float model, with stand-ins for quantized weights.

    Raises:
        UnsupportedModel: a layer is none of the model's, or has another shape there, or a tensor is missing.
    """
    config = float_config(source)
    where = str(source.directory)
    model_class: Any
    try:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError as error:
        raise UnsupportedModel(f"'{config.model_type}' is no causal language model", where=where) from error
    tensors = {name: source[name] for name in source if module_of(name) not in source.layers or is_bias(name)}
    tensors |= stand_ins(model_class, config, source)
    with boundary.interface_needed(where):
        model, report = model_class.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            attn_implementation=boundary.NAME,
            dtype=torch.float32,
            output_loading_info=True,
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise UnsupportedModel(f"the checkpoint has no tensor for {missing[0]}", where=where)
    return model


def stand_ins(model_class: Any, config: Any, source: Source) -> dict[str, Tensor]:
    """A zero of the float shape for each quantized weight."""
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in model_class(config).named_parameters(remove_duplicate=False)}
    values = {}
    for layer in source.layers.values():
        shape = shapes.get(f"{layer.name}.weight")
        if shape is None:
            what = f"the quantized layer {layer.name} is no linear layer of a {config.model_type} model"
            raise UnsupportedModel(what, where=str(source.directory))
        if sorted(shape) != sorted(layer.shape):  # Conv1D checkpoints have [in, out]
            what = f"{layer.name} is {list(layer.shape)} in the checkpoint and {list(shape)} in its config"
            raise UnsupportedModel(what, where=str(source.directory))
        values[f"{layer.name}.weight"] = torch.zeros(()).expand(shape)
    return values


def insert_layers(graph: Graph, source: Source) -> None:
    """Replace the linears of quantized layers by quantized ops.

    Raises:
        UnsupportedModel: a quantized weight is used outside of a linear layer; a tied embedding may be int8.
    """
    for node in graph.calls(reference.linear):
        weight = graph.weight_of(ops.weight(node))
        layer = source.layers.get(module_of(str(ops.weight(node).target))) if weight else None
        if layer is None:
            continue
        if str(ops.weight(node).target) != graph.meta.input_embedding:
            insert(graph, node, layer)
        elif layer.op is reference.linear_w8a16:
            head = insert(graph, node, replace(layer, name=graph.meta.output_embedding))
            share_with_embedding(graph, head)
    graph.prune()
    left = {module_of(name) for name, weight in graph.weights.items() if weight.origin} & set(source.layers)
    used = {name for name in graph.weights if module_of(name) in left and name.endswith(".weight")}
    for name in sorted(used):
        if graph.weights[name].dtype == torch.float32:
            what = f"the quantized weight {name} is not that of a plain linear layer"
            raise UnsupportedModel(what, where=graph.meta.model_type)


def check_architecture(graph: Graph, model: Any, source: Source) -> None:
    """Compare the float graph with the model, both on dequantized weights, or on random weights for large models."""
    many = sum(4 * layer.shape[0] * layer.shape[1] for layer in source.layers.values()) > MAX_CHECKED_BYTES
    for seed, layer in enumerate(source.layers.values()):
        weight = graph.weights.get(f"{layer.name}.weight")
        if weight is not None and weight.origin is not None:
            weight.value = value = random_weight(layer.shape, seed) if many else layer.float_weight()
            stored = value.T if weight.origin.transposed else value
            model.get_parameter(f"{layer.name}.weight").data = stored
    check_capture(graph, model)


def random_weight(shape: tuple[int, int], seed: int) -> Tensor:
    """A random matrix in the memory of a row and a column: entry (i, j) is number i + j of a sequence."""
    rows, columns = shape
    numbers = torch.randn(rows + columns - 1, generator=torch.Generator().manual_seed(seed))
    return (numbers / columns**0.5).as_strided(shape, (1, 1))


def module_of(name: str) -> str:
    return name.rpartition(".")[0]


def is_bias(name: str) -> bool:
    return name.endswith(".bias")


def capture_quantized(source: Source) -> Graph:
    """Capture a quantized checkpoint."""
    model = load_model(source)
    graph = capture(model, check=False)
    check_architecture(graph, model, source)
    insert_layers(graph, source)
    return graph
