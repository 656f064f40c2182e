"""Capture of large float checkpoints: the export needs shapes, and the weights stay on disk.

transformers builds the model with small tensors from the checkpoint and zeros, expanded to the shape, for all others:
buffers such as the frequencies of RoPE are computed as always. The graph is checked as any other (``check``), on random
numbers in place of the large weights: each weight has numbers of its own, and all weights of a width together take the
memory of the largest. Then the weights of the graph become the tensors of the checkpoint, by name and shape.

Models whose parameters have other names or shapes than the checkpoint's tensors (experts stacked on loading) are left
to the loading by transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from optkit.capture.building import build_model, refuse_not_finite, refuse_other_tensors
from optkit.capture.export import capture
from optkit.capture.limits import MAX_LOADED_BYTES
from optkit.capture.loading import read_config, refusals
from optkit.checkpoint.adapter import Adapter
from optkit.checkpoint.source import Source
from optkit.checkpoint.tensors import STORED_BYTES, float_bytes, stored
from optkit.graph.ir import Graph
from optkit.graph.stored import Place
from optkit.machine.mapped_files import PageRelease

APART = 7  # numbers between the first elements of two random weights of a width


def capture_streamed(source: Source, max_model_len: int | None = None) -> Graph | None:
    """The graph of a large float checkpoint, with weights on disk; None for a model to be loaded by transformers.

    Raises:
        UnsupportedModel: the model can't be captured; the message has the reason.
    """
    if float_bytes(source.info) <= MAX_LOADED_BYTES:
        return None
    found = streamed_class(source)
    if found is None:
        return None
    model = skeleton(*found[:2], source, found[2])
    graph = capture(model, max_model_len=max_model_len, give_weights=partial(fill, model))
    return with_stored_weights(graph, source)


def streamed_class(source: Source) -> tuple[Any, Any, dict[str, torch.Size]] | None:
    """Class, configuration and shapes of a model whose weights stay on disk; None for a model to be loaded whole.

    Raises:
        UnsupportedModel: a parameter has no tensor, or another shape.
    """
    if source.layers or source.float4 or source.text:
        return None
    config = read_config(source.directory)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        return None
    shapes = parameter_shapes(model_class, config, str(source.directory))
    if not fits(shapes, source, tied=bool(getattr(config, "tie_word_embeddings", False))):
        stored_shapes = {name: tuple(info.shape) for name, info in source.info.tensors.items()}
        refuse_other_tensors(config, source, stored_shapes)
        return None
    return model_class, config, shapes


def is_loaded_whole(source: Source, adapters: Sequence[Adapter] = ()) -> bool:
    """True where the capture of a large float checkpoint loads all weights as float32."""
    if source.layers or source.float4 or float_bytes(source.info) <= MAX_LOADED_BYTES:
        return False
    return bool(adapters) or streamed_class(source) is None


def parameter_shapes(model_class: Any, config: Any, where: str) -> dict[str, torch.Size]:
    """Shapes of the model's parameters by name."""
    with refusals(where), torch.device("meta"):
        return {name: p.shape for name, p in model_class(config).named_parameters()}


def fits(shapes: Mapping[str, torch.Size], source: Source, *, tied: bool) -> bool:
    """True where the checkpoint has a tensor of the same name and shape for each parameter."""
    stored_shapes = {name: tuple(info.shape) for name, info in source.info.tensors.items()}
    absent = [name for name, shape in shapes.items() if stored_shapes.get(name) != tuple(shape)]
    return not [name for name in absent if not (tied and name == "lm_head.weight")]


def skeleton(model_class: Any, config: Any, source: Source, shapes: Mapping[str, torch.Size]) -> Any:
    """The model in optkit's attention boundary, with zeros of little memory for large parameters.

    Raises:
        UnsupportedModel: transformers can't build the model, or a tensor is missing.
    """
    large = {name: shape for name, shape in shapes.items() if 4 * math.prod(shape) >= STORED_BYTES}
    tensors = {name: source[name] for name in source if name not in large}
    tensors |= {name: torch.zeros(()).expand(shape) for name, shape in large.items() if name in source}
    return build_model(model_class, source, config, tensors)


# -- random weights ----------------------------------------------------------------------------------------


def fill(model: Any, graph: Graph) -> None:
    """Give every large weight random numbers of its own, on both sides of the check."""
    large = [w for w in graph.weights.values() if w.origin is not None and 0 in w.value.stride()]
    shapes = [tuple(model.get_parameter(w.origin.parts[0].name).shape) for w in large if w.origin]
    for weight, value in zip(large, random_weights(shapes), strict=True):
        assert weight.origin is not None  # of a large weight
        model.get_parameter(weight.origin.parts[0].name).data = value
        weight.value = value.T if weight.origin.transposed else value


def random_weights(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Normal numbers of deviation 1 / sqrt(K) for each shape [..., K].

    Weights with the same K are windows of one sequence of numbers, each begins ``APART`` numbers later.
    """
    sizes: dict[int, int] = {}
    for shape in shapes:
        sizes[shape[-1]] = max(sizes.get(shape[-1], 0), math.prod(shape))
    numbers = {
        k: torch.randn(size + APART * len(shapes), generator=torch.Generator().manual_seed(k)).div_(k**0.5)
        for k, size in sizes.items()
    }
    return [
        numbers[shape[-1]][APART * index :][: math.prod(shape)].view(shape)
        for index, shape in enumerate(shapes)
    ]


def with_stored_weights(graph: Graph, source: Source) -> Graph:
    """``graph`` with the tensors of the checkpoint for weights.

    Raises:
        UnsupportedModel: a value is not finite.
    """
    release = PageRelease(source.directory)

    def read(place: Place) -> Tensor:
        return source[place.name]

    for weight in graph.weights.values():
        if weight.origin is not None:
            weight.stored = stored(weight.origin, partial(Place, None), read, weight.dtype, release)
            for part in weight.origin.parts:
                values = source[part.name]
                refuse_not_finite(part.name, values, str(source.directory))
                release(values.nbytes)
    return graph
