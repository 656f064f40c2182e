"""Quantized layers on disk: tensors for transformers and vLLM, and tensors for optkit's runtime alone.

compressed-tensors has a format for most layers: ``int-quantized``, ``pack-quantized``, ``float-quantized``. A model
with a layer without a format (a float minimum, act-order, a short last group) has all tensors in
``optkit/packed.safetensors``, as the runtime reads them, and no program but optkit loads the directory. Where the
recipe asks for float copies, the codes of these layers alone are there, and ``model.safetensors`` has a plain
``weight`` with the dequantized values (docs/decisions/0077-codes-alone.md).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from optkit.checkpoint.compressed import FLOAT8, INTS, PACK
from optkit.checkpoint.modules import modules, raw_tensors, shared_by_fused
from optkit.checkpoint.quantized_linear import (
    G_IDX,
    INPUT_SCALE,
    MINIMUM,
    PACKED,
    SCALE,
    ZERO_POINT,
    QuantizedLinear,
)
from optkit.checkpoint.tensors import same, values_of
from optkit.checkpoint.validate import CODES
from optkit.graph import variants
from optkit.graph.ir import Graph, module_name
from optkit.graph.stored import Place, StoredPart, StoredTensor
from optkit.kernels import reference
from optkit.kernels.packed_codes import pack_codes

PACKED_FILE = CODES.name


def stored_format(module: QuantizedLinear) -> str | None:
    """The compressed-tensors format in which a module is written, or None where there is none."""
    if module.stacked is not None:
        return None
    if PACKED in module.operands:
        if MINIMUM in module.operands or G_IDX in module.operands:
            return None
        return None if module.group_size and module.columns % module.group_size else PACK
    dtype = raw_tensors(module)[f"{module.name}.weight"].dtype  # without reading the weight
    return FLOAT8 if dtype == torch.float8_e4m3fn else INTS


def has_layer_without_format(graph: Graph) -> bool:
    """True where a quantized layer has no compressed-tensors format; variants for few tokens do not count."""
    return any(stored_format(module) is None for module in modules(variants.widest(graph)))


def tensors_of_codes(
    graph: Graph, tensors: Mapping[str, Tensor | StoredTensor]
) -> dict[str, Tensor | StoredTensor]:
    """The tensors of an artifact without float copies.

    Those of no quantized layer among ``tensors``, and the operands of every quantized layer.

    Args:
        tensors: of the checkpoint and of the widest variant of ``graph``, under the names of the checkpoint.
    """
    found = list(modules(variants.widest(graph)))
    # a tensor of all experts has the name of its module
    left = {name for module in found for name in (module.name, f"{module.name}.weight", *module.names())}
    kept = {name: value for name, value in tensors.items() if name not in left}
    return kept | {name: v for m in found for name, v in raw_tensors(m).items()} | runtime_tensors(graph)


def runtime_tensors(graph: Graph) -> dict[str, Tensor | StoredTensor]:
    """The tensors that ``optkit/packed.safetensors`` has beside float copies: codes of layers written as floats, shared
    operands of fused layers, and the variants of layers for steps of few tokens.
    """
    whole, graph = graph, variants.widest(graph)
    few = {
        name: piece
        for key, weight in whole.weights.items()
        if key not in graph.weights and weight.origin is not None
        for name, piece in weight.pieces().items()
    }
    own = {
        name: value
        for module in modules(graph)
        if stored_format(module) is None
        for name, value in raw_tensors(module).items()
    }
    return few | own | shared_by_fused(graph)


def model_tensors(
    graph: Graph, tensors: dict[str, Tensor | StoredTensor]
) -> dict[str, Tensor | StoredTensor]:
    """``tensors``, of the source and the graph, with quantized layers in the layouts of compressed-tensors."""
    fused = shared_by_fused(graph)
    tensors = {name: value for name, value in tensors.items() if name not in fused}
    for module in modules(graph):
        weight = f"{module.name}.weight"
        if stored_format(module) is None:
            for name in module.tensors():
                tensors.pop(name, None)
            for name, value in module.float_tensor().items():
                if name not in tensors or not same(value, values_of(tensors[name])):
                    tensors[name] = made_at_writing(module, name, value)
        elif PACKED in module.operands:
            tensors.pop(weight, None)
            tensors |= packed_tensors(module)
        elif INPUT_SCALE in module.operands:
            tensors[f"{module.name}.{INPUT_SCALE}"] = module.operands[INPUT_SCALE].clone()
        if module.name == quantized_embedding(graph):
            tensors[f"{graph.meta.output_embedding}.{SCALE}"] = module.operands[SCALE].clone()
    return tensors


def quantized_embedding(graph: Graph) -> str | None:
    """The module of the embedding that shares the int8 weight of the tied output head, or None.

    compressed-tensors ties the weights of the two modules and not the scales, so the head's scales are written too.
    """
    quantized = next(graph.calls(reference.embedding_w8), None)
    return None if quantized is None else module_name(graph.meta.input_embedding)


def packed_tensors(module: QuantizedLinear) -> dict[str, Tensor]:
    """The tensors of ``pack-quantized`` besides codes and scales: the shape, and zero points packed along N."""
    tensors = {f"{module.name}.weight_shape": torch.tensor(module.shape)}
    zero = module.operands.get(ZERO_POINT)
    if zero is not None:
        packed = pack_codes(zero.T.contiguous(), module.bits).T.contiguous()
        tensors[f"{module.name}.{ZERO_POINT}"] = packed
    return tensors


def made_at_writing(module: QuantizedLinear, name: str, value: Tensor) -> StoredTensor:
    """The float weight ``value`` of ``module``, tensor ``name``, computed again when the tensor is written."""
    dtype = smallest_exact(value).dtype
    part = StoredPart(
        Place("float", name), tuple(value.shape), dtype, lambda: module.float_tensor()[name].to(dtype)
    )
    return StoredTensor((part,), dtype)


def smallest_exact(value: Tensor) -> Tensor:
    """``value`` in float16 where exact, else in float32."""
    half = value.to(torch.float16)
    return half if torch.equal(half.to(torch.float32), value) else value
