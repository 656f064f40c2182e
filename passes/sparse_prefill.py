"""sparse_prefill: lets blocks of queries of a long prompt read only the blocks of keys that matter.

From some thousand tokens on attention takes most of a prefill, and most of its work is on keys with next to no weight.
For each block of 64 queries and each KV head the kernel estimates the attention of blocks of 64 keys by antidiagonals
(XAttention, arXiv 2503.16428; ``reference_sparse_prefill`` is the spec), and reads those with a share ``cover`` of it.
Keys come from the KV cache, so chunks of a prompt, cached prefixes and int8 KV work as before; decode stays dense, and
so do layers with a window. Nothing is evicted: later tokens read everything.

The loss grows as ``cover`` falls, and no bound on short texts sees it, so the pass is in no shipped recipe. Its row in
the report has the density, the share of the tiles of keys that were read, and the predicted gain, at ``measure_tokens``
tokens of calibration text. Answers depend on the cut of a prompt into steps where a cut is not at a multiple of 64.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import fx

from optkit.calibration.samples import Calibration
from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.graph.ops.attention import ATTENTION, visible
from optkit.graph.shapes import Point
from optkit.kernels import PLAIN, Kernel, select
from optkit.lowering.cost import SPARSE_DENSITY, predict_seconds
from optkit.lowering.dense import dense_inputs
from optkit.lowering.lower import lower
from optkit.passes.base import Config, Pass, PassContext, PassResult, Plan, Site, Skip, Stage

REPORTED = (1024, 4096, 8192)  # lengths of prompts with a predicted gain


class SparsePrefillConfig(Config):
    cover: float = Field(0.95, ge=0.5, lt=1, description="share of the estimated attention that is read")
    min_tokens: int = Field(
        1024, ge=64, le=1 << 24, description="queries before this position are dense, which is as fast there"
    )
    measure_tokens: int = Field(
        4096, ge=0, le=1 << 17, description="length of the text on which the density is measured; 0: none"
    )


class SparsePrefill(Pass):
    name = "sparse_prefill"
    stage = Stage.KERNELS
    exact = False
    Config = SparsePrefillConfig

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        plan = Plan()
        for node in graph.calls(*ATTENTION):
            if reason := self.why_not(graph, node, ctx):
                plan.skips.append(Skip(node.name, reason))
            else:
                plan.sites.append(Site(node.name, (node,)))
        return plan

    def why_not(self, graph: Graph, node: fx.Node, ctx: PassContext) -> str | None:
        """The reason against a change of ``node``, or None."""
        if visible(node):
            return "its window or chunks limit the keys already"
        if ops.op_of(node).option(node, "slopes") is not None:
            return "the estimate knows no ALiBi"
        if ops.argument(node, "sparse_cover"):
            return "it is sparse already"
        if self.config.min_tokens >= graph.meta.max_model_len:
            return f"min_tokens is not below the context of {graph.meta.max_model_len}"
        if self.kernel(graph, node, ctx) is None:
            return f"no kernel for block-sparse prefill on {ctx.target.name}"
        return None

    def kernel(self, graph: Graph, node: fx.Node, ctx: PassContext) -> Kernel | None:
        """The kernel of the changed site, or None."""
        pinned = node.meta.get("kernel")
        options = {**graph.site_options(node), "sparse_cover": self.config.cover}
        wanted = None if pinned in (PLAIN, "sdpa", "reference") else pinned
        try:
            return select(ops.op_of(node).name, ctx.target, pinned=wanted, options=options)
        except LookupError:
            return None

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        dense = graph.clone()
        for site in plan.sites:
            node = site.nodes[0]
            kernel = self.kernel(graph, node, ctx)
            assert kernel is not None, "a site of the plan has a kernel"
            options = {"sparse_cover": self.config.cover, "sparse_from": self.config.min_tokens}
            node.kwargs = {**node.kwargs, **options}
            node.meta["kernel"] = kernel.name
        if not plan.sites or graph.is_meta:
            return PassResult(len(plan.sites))
        length = min(self.config.measure_tokens, graph.meta.max_model_len)
        if length <= self.config.min_tokens:
            return PassResult(len(plan.sites))
        density = measured_density(graph, length, ctx)
        graph.annotations[SPARSE_DENSITY] = density
        gains = {
            f"predicted_gain_{tokens}": round(predicted_gain(dense, graph, tokens, ctx), 3)
            for tokens in REPORTED
            if tokens <= graph.meta.max_model_len
        }
        return PassResult(len(plan.sites), {"density": round(density, 4), "density_tokens": length, **gains})


def measured_density(graph: Graph, length: int, ctx: PassContext) -> float:
    """The share of the tiles of keys that sparse blocks of queries read, in a prompt of ``length`` tokens of text."""
    from optkit.kernels.cpu.attention import sparse_tiles

    ctx.progress("measuring the density")
    (ids,) = ctx.calibration_windows(Calibration(samples=1, length=length))
    model = lower(graph.clone(), ctx.target)
    before = sparse_tiles()
    inputs = dense_inputs([len(ids)], torch.tensor(ids), graph.meta.states)
    model(inputs | {"logits_index": torch.tensor([len(ids) - 1])})
    read, seen = (after - first for after, first in zip(sparse_tiles(), before, strict=True))
    return read / seen if seen else 1.0


def predicted_gain(dense: Graph, sparse: Graph, tokens: int, ctx: PassContext) -> float:
    """Predicted seconds of a prefill of ``tokens`` tokens, dense over sparse."""
    point = Point(tokens, 1, tokens)
    return predict_seconds(dense, point, ctx.target) / predict_seconds(sparse, point, ctx.target)
