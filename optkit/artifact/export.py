"""Export of an artifact's model in the layout of another format: GPTQ, AWQ, or plain float.

Quantized layers keep their codes: a weight is the same number before and after. The formats have no rounding of
activations: where optkit's runtime rounds activations, readers of the export multiply in float. A layer outside of the
format's range is refused, with name and reason; no value is rounded for the format's sake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optkit.artifact.open import Artifact
from optkit.artifact.staging import staging
from optkit.checkpoint import awq, gptq
from optkit.checkpoint.compressed_tensors_writer import made_at_writing, quantized_embedding, runtime_tensors
from optkit.checkpoint.hf_writer import write_directory
from optkit.checkpoint.modules import modules
from optkit.checkpoint.quantization_config import float_modules
from optkit.checkpoint.quantized_linear import G_IDX, MINIMUM, PACKED, SCALE, ZERO_POINT, QuantizedLinear
from optkit.checkpoint.reading import in_order
from optkit.checkpoint.source import open_source
from optkit.checkpoint.tensors import Overlay
from optkit.errors import UserError
from optkit.graph import ops, variants
from optkit.graph.ir import Graph, module_name
from optkit.graph.stored import StoredTensor
from optkit.kernels import reference
from optkit.kernels.packed_codes import pack_codes


def export(artifact: Artifact, format: str, out: Path) -> None:
    """Write the model of ``artifact`` to the new directory ``out`` in ``format``, a key of ``WRITERS``.

    Raises:
        UserError: the format can't express a layer, or ``out`` exists.
    """
    whole, packed = artifact.graph(), artifact.packed_tensors()
    graph = variants.widest(whole)
    found = list(modules(graph))
    source = open_source(artifact.directory, weights=not packed)
    if format != "hf" and not found:
        raise UserError(
            f"no layer is quantized, so there is nothing to write as {format}",
            where=str(artifact.directory),
            fix="use --format hf",
        )
    if name := experts_of_one_tensor(graph):
        raise refused(name, format, "its experts are one tensor of the checkpoint", "serve the artifact")
    embedding = quantized_embedding(graph)
    if format != "hf" and embedding is not None:
        raise refused(embedding, format, "readers of the format take the embedding to be float")
    written, settings = WRITERS[format](found, set(float_modules(graph)), graph.meta.output_embedding)
    config = {key: value for key, value in source.info.config.items() if key != "quantization_config"}
    config |= {} if settings is None else {"quantization_config": settings}
    tensors = Overlay(source, packed)
    replaced = {name for module in found for name in (f"{module.name}.weight", *module.names())}
    replaced |= {name for layer in source.layers.values() for name in layer.names()}
    floats = {name: tensors[name] for name in set(tensors) - replaced - runtime_tensors(whole).keys()}
    with staging(out, force=False) as directory:
        write_directory(directory, {**floats, **written}, config, artifact.directory)


def experts_of_one_tensor(graph: Graph) -> str | None:
    """The first quantized module with all experts of a layer in a single tensor of the checkpoint, or None."""
    for node in graph.calls(*ops.QUANTIZED_LINEARS):
        weight = graph.weight_of(ops.weight(node))
        parts = weight.origin.parts if weight is not None and weight.origin is not None else ()
        if parts and len(parts) < node.kwargs.get("num_experts", 1):
            return module_name(parts[0].name)
    return None


Written = tuple[Mapping[str, Tensor | StoredTensor], dict[str, Any] | None]


def as_floats(found: list[QuantizedLinear], left: set[str], head: str) -> Written:
    """Dequantized weights, in float16 where exact, each computed at writing."""
    weights = ((module, name, value) for module in found for name, value in module.float_tensor().items())
    return {name: made_at_writing(module, name, value) for module, name, value in weights}, None


def as_gptq(found: list[QuantizedLinear], left: set[str], head: str) -> Written:
    """Tensors and settings of GPTQ v1. All linear layers but the head must be quantized, in the same way."""
    for name in sorted(left - {head}):
        raise refused(name, "gptq", "it is not quantized, and readers of the format take every layer to be")
    codes = {module.name: integer_codes(module, "gptq") for module in found}
    bits, group_size = one_scheme(codes, "gptq")
    tensors: dict[str, Tensor] = {}
    for module in found:
        if module.name == head:
            raise refused(head, "gptq", "readers of the format take the output head to be float")
        packed, zero = codes[module.name][2:]
        reason = gptq.refusal(module.shape, bits, zero)
        if reason:
            raise refused(module.name, "gptq", reason)
        g_idx = module.operands.get(G_IDX, in_order(module.columns, group_size))
        pieces = gptq.pack(packed, module.operands[SCALE], zero, g_idx, bits)
        tensors |= {f"{module.name}.{key}": value for key, value in pieces.items()}
    symmetric = all(zero is None for *_, zero in codes.values())
    act_order = any(G_IDX in module.operands for module in found)
    return tensors, gptq.settings(bits, group_size, symmetric, act_order)


def as_awq(found: list[QuantizedLinear], left: set[str], head: str) -> Written:
    """AWQ, version gemm."""
    codes = {module.name: integer_codes(module, "awq") for module in found}
    tensors: dict[str, Tensor] = {}
    for module in found:
        bits, group_size, packed, zero = codes[module.name]
        reason = awq.refusal(module.shape, bits, group_size, G_IDX in module.operands)
        if reason:
            raise refused(module.name, "awq", reason)
        pieces = awq.pack(packed, module.operands[SCALE], zero, module.columns)
        tensors |= {f"{module.name}.{key}": value for key, value in pieces.items()}
    _, group_size = one_scheme(codes, "awq")
    return tensors, awq.settings(group_size) | {"modules_to_not_convert": sorted(left)}


WRITERS: dict[str, Callable[[list[QuantizedLinear], set[str], str], Written]] = {
    "hf": as_floats,
    "gptq": as_gptq,
    "awq": as_awq,
}


# -- layers as integer codes -----------------------------------------------------------------------------

Codes = tuple[int, int, Tensor, Tensor | None]  # bits, group size, packed codes [N, W], zero points [N, G]


def integer_codes(module: QuantizedLinear, format: str) -> Codes:
    """A layer as ``(code - zero) * scale``."""
    if MINIMUM in module.operands:
        raise refused(
            module.name,
            format,
            "its groups have float minimums, which are no integer zero points",
            "optimize with symmetric weights, or use --format hf",
        )
    if module.op is reference.linear_fp8:
        raise refused(module.name, format, "it is float8")
    if PACKED in module.operands:
        return module.bits, module.group_size, module.operands[PACKED], module.operands.get(ZERO_POINT)
    codes = (module.operands["weight"].to(torch.int16) + 128).to(torch.uint8)
    return 8, module.group_size, pack_codes(codes, 8), None


def one_scheme(codes: dict[str, Codes], format: str) -> tuple[int, int]:
    """The bits and the group size of all layers, stated once in the config."""
    first, *others = codes
    scheme = codes[first][:2]
    for name in others:
        if codes[name][:2] != scheme:
            shown = [f"{bits} bits in groups of {size or 'all'}" for bits, size in (codes[name][:2], scheme)]
            raise refused(
                name, format, f"it has {shown[0]}, {first} has {shown[1]}, and the format has one of each"
            )
    return scheme


def refused(
    name: str, format: str, reason: str, fix: str = "use --format hf or serve the artifact"
) -> UserError:
    return UserError(f"{format} can't express it: {reason}", where=name, fix=fix)
