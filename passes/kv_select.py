"""kv_select: a generated token of a long context reads the part of the KV cache that matters to it.

Decode reads the keys and values of all earlier tokens for every token, although most get no weight. With the pass the
runtime keeps, beside the keys, the bounds of each channel over a few tokens. For each query it computes from them the
largest scores that the keys of a block can have, and reads the blocks of most weight, up to ``budget`` tokens, besides
the first block and the last two (Quest, arXiv 2406.10774). Nothing is evicted: the next token may read other blocks. So
prefix cache, offload, preemption and drafts work as before, and prompts are computed with all of their tokens.

The first ``dense`` layers read everything, by default three in ten: their weight lies on many tokens, and no choice of
few keeps enough of it (docs/decisions/0050-kv-select.md). So do all layers in contexts below ``min_context`` tokens, by
default the length from which the cost model of the target predicts a step at least 10 % faster. A context within the
budget gives the bits of a model without the pass.

Predicted gain: a decode step reads ``budget`` tokens of KV in place of the context, and the bounds. Price: the bytes of
the bounds, an eighth of an int8 cache, and a loss that long contexts alone show (``python -m bench.long select``,
``optkit eval --long``).
"""

from __future__ import annotations

import math
from dataclasses import replace

from pydantic import Field
from torch import fx

from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.graph.kv_layout import kv_layout
from optkit.graph.ops.attention import ATTENTION
from optkit.graph.ops.selection import MAX_SELECTED_DIM
from optkit.graph.shapes import Point
from optkit.graph.states import PROMPT_LENS, KVSpec
from optkit.kernels import reference, select
from optkit.lowering.cost import predict_seconds
from optkit.passes.base import Config, Pass, PassContext, PassResult, Plan, Site, Skip, Stage
from optkit.passes.quantization.kv import spec_of

LEAST_GAIN = 1.1  # of a decode step, from ``min_context`` on
DENSE_SHARE = 0.3  # of the layers
STEP = 256  # tokens: ``min_context`` by default is a multiple
MAX_TOKENS = 1 << 24


class KVSelectConfig(Config):
    budget: int = Field(
        1024,
        ge=16,
        le=MAX_TOKENS,
        description="tokens that a generated token reads in each layer, in whole blocks",
    )
    min_context: int | None = Field(
        None,
        ge=1,
        le=MAX_TOKENS,
        description="shorter contexts are read whole; null: the length from which a gain is predicted",
    )
    dense: int | None = Field(
        None, ge=0, description="number of first layers that read the whole context; null: three in ten"
    )
    ignore: tuple[int, ...] = Field(
        (), description="further layers, counted from 0, that read the whole context"
    )


class KVSelect(Pass):
    name = "kv_select"
    stage = Stage.KERNELS
    exact = False
    Config = KVSelectConfig

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        plan = Plan()
        for node in graph.calls(reference.attention):
            spec = spec_of(graph, node)
            name = f"layer {spec.layer}"
            reason = self.left_out(graph, spec) or why_not(graph, node, spec, ctx)
            if reason:
                plan.skips.append(Skip(name, reason))
            else:
                plan.sites.append(Site(name, (node,)))
        if plan.sites and self.least(graph, plan, ctx) is None:
            reason = f"no gain is predicted up to the model's context of {graph.meta.max_model_len:,} tokens"
            return Plan(skips=[*plan.skips, *(Skip(site.name, reason) for site in plan.sites)])
        return plan

    def left_out(self, graph: Graph, spec: KVSpec) -> str | None:
        """The reason of the options against the layer of ``spec``, or None."""
        layers = sorted(each.layer for each in graph.meta.kv_specs)
        dense = self.config.dense
        count = math.ceil(DENSE_SHARE * len(layers)) if dense is None else dense
        if spec.layer in self.config.ignore:
            return "on the ignore list"
        return (
            f"one of the first {count} layers, which read the whole context"
            if spec.layer in layers[:count]
            else None
        )

    def least(self, graph: Graph, plan: Plan, ctx: PassContext) -> int | None:
        """The length from which tokens select, or None where the model's context is too short for a gain."""
        given, most = self.config.min_context, graph.meta.max_model_len
        if given is not None:
            return given if max(given, self.config.budget) < most else None
        after = graph.clone()
        names = {node.name for site in plan.sites for node in site.nodes}
        rewrite(
            after,
            [node for node in after.calls(reference.attention) if node.name in names],
            self.config.budget,
            0,
        )
        lengths = range(-(-self.config.budget // STEP) * STEP + STEP, most, STEP)
        low, high = 0, len(lengths)  # the gain grows with the length
        while low < high:
            middle = (low + high) // 2
            point = Point(1, 1, lengths[middle])
            gain = predict_seconds(graph, point, ctx.target) / predict_seconds(after, point, ctx.target)
            low, high = (low, middle) if gain >= LEAST_GAIN else (middle + 1, high)
        return lengths[low] if low < len(lengths) else None

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        if not plan.sites:
            return PassResult(0)
        least = self.least(graph, plan, ctx)
        assert least is not None, "check refuses the sites of a model without a gain"
        before = sum(spec.token_bytes for spec in graph.meta.kv_specs)
        rewrite(graph, [site.nodes[0] for site in plan.sites], self.config.budget, least)
        after = sum(spec.token_bytes for spec in graph.meta.kv_specs)
        stats = {"min_context": least, "kv_bytes_per_token_before": before, "kv_bytes_per_token_after": after}
        return PassResult(len(plan.sites), stats)


def why_not(graph: Graph, node: fx.Node, spec: KVSpec, ctx: PassContext) -> str | None:
    """The reason against a choice of blocks in the layer of ``node``, or None."""
    if len(kv_layout(graph.meta.states).groups) > 1:
        return "its blocks are shared with layers that have a window"
    if ops.argument(node, "window") or ops.argument(node, "chunk"):
        return "it reads a window of the context already"
    if spec.latent:
        return "a latent cache has no keys of its own"
    if ops.argument(node, "slopes") is not None:
        return "its scores depend on distances, which chosen blocks do not keep"
    if sum(spec_of(graph, other) is spec for other in graph.calls(*ATTENTION)) > 1:
        return "another layer reads its keys and values"
    if spec.head_dim > MAX_SELECTED_DIM:
        return f"its heads have more than {MAX_SELECTED_DIM} channels"
    options = {"kv_dtype": spec.dtype}
    if select("selected_attention", ctx.target, options=options) is None:
        return f"no kernel chooses blocks of a {spec.dtype} KV cache on {ctx.target.name}"
    return None


def rewrite(graph: Graph, nodes: list[fx.Node], budget: int, min_context: int) -> None:
    """Put ``selected_attention`` in the place of the attention ``nodes``."""
    chosen = {spec_of(graph, node).layer for node in nodes}
    specs = (replace(spec, bounds=True) if spec.layer in chosen else spec for spec in graph.meta.kv_specs)
    kept = {f"k_cache_{spec.layer}": spec.layer for spec in graph.meta.kv_specs}
    graph.meta = graph.meta.with_kv_specs(tuple(specs))
    prompt_lens = graph.input(PROMPT_LENS)
    for node in nodes:
        layer = kept[str(ops.argument(node, "k_cache").target)]
        names = (
            ("q", "k", "v", "k_cache", "v_cache"),
            ("slot_mapping", "query_start", "seq_lens", "block_tables"),
        )
        before, after = ([ops.argument(node, name) for name in part] for part in names)
        sinks = ops.argument(node, "sinks")
        arguments = (
            *before,
            graph.input(f"k_bounds_{layer}"),
            *after,
            prompt_lens,
            *([sinks] if sinks else []),
        )
        options = {"scale": ops.argument(node, "scale"), "softcap": float(ops.argument(node, "softcap"))}
        options |= {name: ops.argument(node, name) for name in ("sparse_cover", "sparse_from")}
        options |= {"budget": budget, "min_context": min_context}
        with graph.fx.inserting_before(node):
            call = graph.fx.call_function(reference.selected_attention, arguments, options)
        call.meta = dict(node.meta)
        call.meta.pop("kernel", None)
        node.replace_all_uses_with(call)
        graph.fx.erase_node(node)
