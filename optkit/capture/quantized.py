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
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from optkit.capture.building import build_model, refuse_missing
from optkit.capture.experts import checkpoint_origins
from optkit.capture.export import capture
from optkit.capture.loading import class_of, read_config, refusals
from optkit.checkpoint.insertion import insert, share_with_embedding
from optkit.checkpoint.quantized_linear import G_IDX, QuantizedLinear
from optkit.checkpoint.source import Source
from optkit.errors import UnsupportedModel
from optkit.graph import ops
from optkit.graph.ir import Graph, Weight
from optkit.kernels import reference

MAX_CHECKED_BYTES = 4 << 30  # bytes of float weights up to which the check uses the checkpoint's own


def architecture_config(source: Source) -> Any:
    """The configuration of the architecture, of a multimodal checkpoint that of the text decoder."""
    if source.text is None:
        return read_config(source.directory)
    with refusals(str(source.directory)):
        return AutoConfig.for_model(**source.info.config)


def float_config(source: Source) -> Any:
    """The config of the architecture, without quantization; a quantized head is not tied."""
    config = architecture_config(source)
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
    model_class = class_of(config, str(source.directory))
    floats = [name for name in source if module_of(name) not in source.layers or is_bias(name)]
    tensors = {name: source[name] for name in floats if name not in source.float4}
    tensors |= {name: torch.zeros(()).expand(source.float4.shape(name)) for name in source.float4}
    tensors |= stand_ins(model_class, config, source)
    model = build_model(model_class, source, config, tensors)
    fill(model, source)
    model._weight_conversions = (
        None  # names come from the architecture's conversion, not from that of stand-ins
    )
    return model


def fill(model: Any, source: Source) -> None:
    """Put the dequantized tensors of an MXFP4 checkpoint into the parameters of ``model``, one after another.

    Raises:
        UnsupportedModel: a tensor is none of the model's, or has another shape there.
    """
    parameters = dict(model.named_parameters())
    for name in source.float4:
        parameter = parameters.get(name)
        if parameter is None or tuple(parameter.shape) != source.float4.shape(name):
            what = f"the MXFP4 tensor {name} is not one of the model's, or has another shape"
            raise UnsupportedModel(what, where=str(source.directory))
        parameter.data = source.float4[name].to(parameter.dtype)


def stand_ins(model_class: Any, config: Any, source: Source) -> dict[str, Tensor]:
    """A zero of the float shape for each quantized weight, experts under the name of the model's parameter."""
    with torch.device("meta"):
        model = model_class(config)
    shapes = {name: p.shape for name, p in model.named_parameters(remove_duplicate=False)}
    fused = {
        part.name: (name, (part.rows, shapes[name][-1]))
        for name, origin in checkpoint_origins(model).items()
        for part in origin.parts
        if len(shapes[name]) == 3
    }
    refuse_partial(model, source, {name for name, _ in fused.values()})
    values = {}
    for layer in source.layers.values():
        parameter, expert_shape = fused.get(f"{layer.name}.weight", ("", None))
        if expert_shape == tuple(layer.shape):
            values[parameter] = torch.zeros(()).expand(shapes[parameter])
            continue
        shape = shapes.get(f"{layer.name}.weight")
        if shape is None:
            what = f"the quantized layer {layer.name} is no linear layer of a {config.model_type} model"
            raise UnsupportedModel(what, where=str(source.directory))
        if sorted(shape) != sorted(layer.shape):  # Conv1D checkpoints have [in, out]
            what = f"{layer.name} is {list(layer.shape)} in the checkpoint and {list(shape)} in its config"
            raise UnsupportedModel(what, where=str(source.directory))
        values[f"{layer.name}.weight"] = torch.zeros(()).expand(shape)
    return values


def refuse_partial(model: Any, source: Source, parameters: set[str]) -> None:
    """Refuse a layer of which only some experts are quantized: optkit keeps the experts of a layer in one weight."""
    for name, origin in checkpoint_origins(model).items():
        found = {module_of(part.name) in source.layers for part in origin.parts}
        if name in parameters and len(found) > 1:
            refuse_missing(model.config, source)
            what = f"only some of the experts of {name} are quantized, and optkit keeps them in one weight"
            raise UnsupportedModel(what, where=str(source.directory))


def insert_layers(graph: Graph, source: Source) -> None:
    """Replace the linears of quantized layers by quantized ops.

    Raises:
        UnsupportedModel: a quantized weight is used outside of a linear layer; a tied embedding may be int8.
    """
    for node in graph.calls(reference.linear, reference.expert_linear):
        weight = graph.weight_of(ops.weight(node))
        layer = stored_layer(weight, source, str(ops.weight(node).target)) if weight else None
        if layer is None:
            continue
        if str(ops.weight(node).target) != graph.meta.input_embedding:
            insert(graph, node, layer)
        elif layer.op is reference.linear_w8a16:
            head = insert(graph, node, replace(layer, name=graph.meta.output_embedding))
            share_with_embedding(graph, head)
    graph.prune()
    for name in sorted(graph.weights):
        weight = graph.weights[name]
        parts = weight.origin.parts if weight.origin else ()
        quantized = any(
            part.name.endswith(".weight") and module_of(part.name) in source.layers for part in parts
        )
        if quantized and weight.dtype == torch.float32:
            what = f"the quantized weight {name} is not that of a plain linear layer"
            raise UnsupportedModel(what, where=graph.meta.model_type)


def stored_layer(weight: Weight, source: Source, name: str) -> QuantizedLinear | None:
    """The quantized layer of the weight ``name`` in the checkpoint; None for a float weight.

    Raises:
        UnsupportedModel: only some experts of a layer are quantized, or in different ways.
    """
    origin = weight.origin
    parts = [module_of(part.name) for part in origin.parts] if origin is not None else []
    layers = [source.layers[part] for part in parts if part in source.layers]
    if len(parts) < 2 or not layers:
        return layers[0] if layers else source.layers.get(module_of(name))
    first, site = layers[0], module_of(name)
    schemes = {(each.op, str(each.options), each.activation_group, tuple(each.operands)) for each in layers}
    if len(layers) < len(parts) or len(schemes) > 1:
        what = f"the experts of {site} are quantized in different ways, and optkit keeps them in one weight"
        raise UnsupportedModel(what, where=str(source.directory))
    if first.op not in ops.OF_EXPERTS or G_IDX in first.operands:
        what = (
            f"the experts of {site} have weights of {first.op.__name__} or an order of channels of their own"
        )
        raise UnsupportedModel(what, where=str(source.directory))
    operands = {key: torch.cat([each.operands[key] for each in layers]) for key in first.operands}
    return replace(first, name=site, shape=(len(weight.value), first.columns), operands=operands)


def dequantize(source: Source, model: Any, graph: Graph) -> None:
    """Give the float graph and the model dequantized weights, or random weights if they are large."""
    many = sum(4 * layer.shape[0] * layer.shape[1] for layer in source.layers.values()) > MAX_CHECKED_BYTES
    for seed, (name, weight) in enumerate(list(graph.weights.items())):
        layer = stored_layer(weight, source, name) if name.endswith(".weight") else None
        if layer is None or weight.origin is None:
            continue
        weight.value = value = random_weight(layer.shape, seed) if many else layer.float_weight()
        fused = dict(model.named_parameters()).get(name.removesuffix(".weight"))
        if fused is not None:
            fused.data = value.view(fused.shape)
        else:
            model.get_parameter(name).data = value.T if weight.origin.transposed else value


def random_weight(shape: tuple[int, int], seed: int) -> Tensor:
    """A random matrix in the memory of a row and a column: entry (i, j) is number i + j of a sequence."""
    rows, columns = shape
    numbers = torch.randn(rows + columns - 1, generator=torch.Generator().manual_seed(seed))
    return (numbers / columns**0.5).as_strided(shape, (1, 1))


def module_of(name: str) -> str:
    return name.rpartition(".")[0]


def is_bias(name: str) -> bool:
    return name.endswith(".bias")


def capture_quantized(source: Source, max_model_len: int | None = None) -> Graph:
    """Capture a quantized checkpoint; ``max_model_len`` as in ``capture``."""
    model = load_model(source)
    graph = capture(model, max_model_len=max_model_len, give_weights=partial(dequantize, source, model))
    insert_layers(graph, source)
    if source.text is not None:
        graph.add_note(source.text.note)
    return graph
