"""int8: linear layers in W8A8 (or W8A16), per-channel weights and dynamic per-token activations.

Each weight row and each activation row gets a symmetric scale, ``absmax / 127``; products accumulate exactly in int32
and are scaled back once (the scheme of LLM.int8(), arXiv 2208.07339, without outlier columns, and of ZeroQuant, arXiv
2206.01861). With ``group_size`` every run of ``group_size`` channels has a scale, so an outlier channel costs
resolution only in the channel's own group. Compute-bound prefill gains from the int8 units, memory-bound decode from
weights of a quarter the size. Layers on the ``weight_only`` list keep float activations (W8A16): right for the output
head, since the head has few rows to multiply, and no later layer makes up for the head's errors.

With ``activations: bfloat16``, or ``auto`` on a CPU with AMX, all other layers are W8A16 too, and multiply bfloat16: on
AMX the fastest form of a prompt, since sums stay in the tiles where groups of int8 products would be scaled group by
group, and closer to the source model than W8A8. Experts stay W8A8.

On CPUs with AVX2 and without VNNI, codes are chosen so that products of two neighbouring channels fit 16 bits
(``quantization.reduced_range``); ``reduce_range`` turns this on or off.

With ``embedding`` a token embedding tied to the head reads rows of the head's int8 weight, and model and directory
hold a single table of the vocabulary (as Q8_0 models do in llama.cpp).

On disk the weights are compressed-tensors ``int-quantized``: ``weight`` int8 and ``weight_scale`` [N, G],
float16 where float16 costs no accuracy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field
from torch import fx

from optkit.checkpoint.insertion import quantized_sites, share_with_embedding
from optkit.graph import ops
from optkit.graph.ir import Graph, module_name
from optkit.kernels import reference
from optkit.kernels.cpu import native
from optkit.passes.base import PassContext, PassResult, Plan, Skip
from optkit.passes.quantization.activation_types import BFLOAT16, Activations, in_bfloat16
from optkit.passes.quantization.formats import Int8Format
from optkit.passes.quantization.linear import LinearQuantization, LinearQuantizationConfig, weight_stats
from optkit.passes.quantization.overrides import LayerOverrides
from optkit.passes.quantization.targets import Patterns, listed
from optkit.passes.rewriting.stack import site_name


class Int8Config(LayerOverrides, LinearQuantizationConfig):
    overridable = ("group_size", "reduce_range")

    group_size: Literal[0, 32, 64, 96, 128, 192] = Field(
        0, description="channels that share a scale; 0 is one scale a token and output channel"
    )
    weight_only: Patterns = Field(
        default_factory=list,
        description="modules whose activations stay as they are (W8A16): names as in ignore",
    )
    reduce_range: bool | None = Field(
        None,
        description="codes that AVX2 multiplies 1.25 to 1.5 times as fast, at 1.45 times the squared rounding error; "
        "null: if the CPU at hand gains, for weights that 8 bits do not hold as they are",
    )
    activations: Activations = Field(
        "int8",
        description="int8: quantized for each token, W8A8; bfloat16: rounded to bfloat16, W8A16, for CPUs with AMX; "
        "auto: bfloat16 on a CPU with AMX, else int8",
    )
    embedding: bool = Field(
        False, description="read a tied embedding's rows from the head's weight, if the head is weight_only"
    )


class Int8(LinearQuantization):
    name = "int8"
    Config = Int8Config
    in_bfloat16 = False  # activations of layers, on the target of ``check`` and ``apply``

    def format_for(self, graph: Graph, node: fx.Node, name: str) -> Int8Format | str:
        config = self.config_for(graph, node)
        if isinstance(config, str):
            return config
        if self.config.activations == BFLOAT16 and not native.multiplies_bfloat16():
            return "bfloat16 activations are for CPUs with AMX"
        weight_only = listed(config.weight_only, graph, node, site_name(graph, node))
        asked = config.reduce_range
        reduced = not weight_only and (native.gains_by_reduced_range() if asked is None else asked)
        of_experts = node.target is reference.expert_linear
        if self.in_bfloat16 and not weight_only and not of_experts:
            return Int8Format(config.group_size, weight_only=True, precision=BFLOAT16)
        return Int8Format(config.group_size, weight_only, reduced, keep_levels=asked is None)

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        self.in_bfloat16 = in_bfloat16(self.config.activations, ctx.target)
        plan = super().check(graph, ctx)
        reason = self.embedding_reason(graph, plan)
        if self.config.embedding and reason:
            plan.skips.append(Skip(module_name(graph.meta.input_embedding), reason))
        return plan

    def embedding_reason(self, graph: Graph, plan: Plan) -> str | None:
        """The reason for a float embedding under ``plan``, or None."""
        head = next((site.nodes[0] for site in plan.sites if site.name == graph.meta.output_embedding), None)
        if head is None:
            return "the output head is not quantized for all steps here, and only its weight is shared"
        if str(ops.weight(head).target) != graph.meta.input_embedding:
            return "the output head has a weight of its own"
        if not listed(self.config.weight_only, graph, head, graph.meta.output_embedding):
            return "the output head is not on the weight_only list"
        return None

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        self.in_bfloat16 = in_bfloat16(self.config.activations, ctx.target)
        shared = self.config.embedding and not self.embedding_reason(graph, plan)
        before, result = graph.num_bytes(), super().apply(graph, plan, ctx)
        if not shared:
            return result
        share_with_embedding(graph, quantized_sites(graph)[graph.meta.output_embedding])
        return replace(result, stats=weight_stats(before, graph))
