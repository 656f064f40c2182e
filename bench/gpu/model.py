"""Whole models of published shapes with random weights, made on the device without downloads.

The graph is captured from Transformers' model on the meta device, goes through the passes of a GPU recipe as in a dry
run, and is lowered without numbers. The weights follow at the end: normal numbers of standard deviation 0.02 in the
compute type, or random codes with scales of the same size. Timing does not depend on the numbers, provided that they
are not zero. The model's output has no meaning.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from optkit.graph.ir import Graph

STD = 0.02
ROPE_THETA = 10000.0


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a Llama model."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int

    def config(self) -> Any:
        """The configuration for Transformers."""
        from transformers import LlamaConfig

        sizes = {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-5,
            "rope_theta": ROPE_THETA,
            "tie_word_embeddings": False,
        }
        return LlamaConfig(**sizes)


LLAMA_7B = ModelShape("llama-2-7b", 4096, 11008, 32, 32, 32, 32000, 4096)
LLAMA_13B = ModelShape("llama-2-13b", 5120, 13824, 40, 40, 40, 32000, 4096)
TINY = ModelShape("tiny", 64, 128, 1, 4, 2, 128, 256)
FUSIONS = ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm", "select_logits_rows")
SCHEMES: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "bf16": (),
    "fp8": (("fp8", {}),),
    # as recipes have it: int4 where memory bounds, fp8 for steps of more tokens
    "int4": (("rtn", {"scheme": "W4A16", "group_size": 128, "max_tokens": 4}), ("fp8", {})),
    "throughput": (("fp8", {}),),
}
KV: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {"throughput": (("kv_fp8", {}),)}


def build(shape: ModelShape, scheme: str, target: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """An executable of ``shape`` on ``device``, with linear layers stored as ``scheme``."""
    from optkit.lowering.lower import lower

    graph = filled(shape, scheme, target, device, dtype)
    if device.type == "cpu":  # to try the script: an interpreter of kernels takes seconds a step
        by_reference(graph)
    return lower(graph, target, device=device, dtype=dtype, consume=True)


def by_reference(graph: Graph) -> None:
    """Make every op of ``graph`` run its reference."""
    for node in graph.fx.nodes:
        node.meta["kernel"] = "reference"


def filled(shape: ModelShape, scheme: str, target: Any, device: torch.device, dtype: torch.dtype) -> Graph:
    """The graph of ``shape`` for ``target``, with numbers."""
    from optkit.lowering import gpu_rewrites, precision
    from optkit.passes import load
    from optkit.passes.base import PassContext

    graph = captured(shape).clone()
    context = PassContext(target)
    group = {"group_size": min(128, shape.hidden)}
    fusions, kv = ((name, {}) for name in FUSIONS), KV.get(scheme, ())
    for name, options in (*fusions, *SCHEMES[scheme], ("flash_attention", {}), *kv):
        pass_class = load(name)
        options = options | (group if "group_size" in options else {})
        optimization = pass_class(pass_class.Config(**options))
        optimization.apply(graph, optimization.check(graph, context), context)
    gpu_rewrites.rewrite(graph, target)
    precision.narrow(graph, dtype, "meta")
    fill(graph, device)
    return graph


@functools.cache
def captured(shape: ModelShape) -> Any:
    """The graph of Transformers' model, without weights, cached: clone before a change."""
    from transformers import AutoModelForCausalLM

    from optkit.capture import boundary, capture

    boundary.register()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            shape.config(), attn_implementation=boundary.NAME, dtype=torch.float32
        )
    return capture(model)


def sampler(target: Any, device: torch.device) -> Any:
    """The kernel of the op ``sample``; the reference on a CPU."""
    from optkit.runtime.cuda import sampling

    return sampling.sampler(target if device.type == "cuda" else None)


def fill(graph: Any, device: torch.device) -> None:
    """Random numbers for every weight of ``graph`` without data."""
    generator = torch.Generator(device).manual_seed(0)
    for name, weight in graph.weights.items():
        if weight.value.device.type == "meta":
            weight.value = numbers(name, weight.value, device, generator)


def numbers(name: str, like: Tensor, device: torch.device, generator: torch.Generator) -> Tensor:
    """Random numbers for a weight of the shape and type of ``like``."""
    if name.split(".bf")[0].endswith("inv_freq"):
        half = like.shape[0]
        return ROPE_THETA ** -(torch.arange(half, dtype=torch.float32, device=device) / half)
    if like.dtype in (torch.int32, torch.uint8, torch.int8):
        bounds = torch.iinfo(like.dtype)
        top = 16 if like.dtype == torch.uint8 else bounds.max  # uint8 are zero points of 4 bits
        low = 0 if like.dtype == torch.uint8 else bounds.min
        return torch.randint(low, top, like.shape, dtype=like.dtype, device=device, generator=generator)
    if like.dtype == torch.float8_e4m3fn:
        values = torch.empty(like.shape, dtype=torch.float32, device=device)
        return values.normal_(0, 100, generator=generator).clamp_(-448, 448).to(like.dtype)
    if "scale" in name:
        per_code = 4.0 if like.shape[-1] > 1 else 100.0  # the spread of 4-bit codes, and of E4M3 above
        return torch.full(like.shape, STD / per_code, dtype=like.dtype, device=device)
    if like.ndim == 1:
        return torch.ones(like.shape, dtype=like.dtype, device=device)
    return torch.empty(like.shape, dtype=like.dtype, device=device).normal_(0, STD, generator=generator)


def prompt(tokens: int, vocabulary: int) -> Sequence[int]:
    return [(7 + 13 * i) % (vocabulary - 3) + 3 for i in range(tokens)]
