"""Lowered models whose steps are native calls alone, as models that run without torch."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from optkit.kernels.cpu.call_list import LOGITS
from optkit.kernels.cpu.program import Program
from optkit.lowering.launch_plan import BATCH
from optkit.lowering.lower import Executable, LoweredVariant
from optkit.lowering.native_model import NativeModel, NativeVariant

NUM_SIZED = len(BATCH) + 1  # arguments of a program before its inputs: the batch, and a KV pool


def to_native(model: Executable) -> NativeModel | None:
    """``model`` as native calls over the same packed weights; None where torch computes a part of a step."""
    if model.device.type != "cpu":
        return None
    variants, weights = list[NativeVariant](), list[list[Tensor]]()
    for variant in model.variants:
        found = program_of(variant)
        if found is None:
            return None
        program, inputs = found
        ((_, (width,), _),) = program.outputs
        variants.append(NativeVariant(variant.limit, inputs, program.calls, width))
        weights.append(program.constants)
    sizes = model.vocab_size, model.max_model_len
    return NativeModel(variants, model.states, *sizes, weights, model.weight_bytes, model.keeps_all)


def program_of(variant: LoweredVariant) -> tuple[Program, tuple[str, ...]] | None:
    """The program that is all of ``variant``, with the names of its inputs; None where torch computes something."""
    calls = [node for node in variant.module.graph.nodes if node.op not in ("placeholder", "output")]
    if variant.special is not None or len(calls) != 2:
        return None
    call, first = calls
    (result,) = (node.args[0] for node in variant.module.graph.nodes if node.op == "output")
    program = call.target
    if not isinstance(program, Program) or first.args != (call, 0) or result is not first:
        return None
    batch, inputs = call.args[: len(BATCH)], call.args[NUM_SIZED:]
    named = [str(node.target) for node in batch if isinstance(node, fx.Node)]
    if (
        tuple(named) != BATCH
        or program.checked
        or not all(isinstance(a, fx.Node) and a.op == "placeholder" for a in inputs)
    ):
        return None
    ((rows, shape, dtype),) = program.outputs
    if rows != LOGITS or len(shape) != 1 or dtype is not torch.float32:
        return None
    return program, tuple(str(node.target) for node in inputs)
