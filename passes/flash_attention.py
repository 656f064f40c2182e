"""flash_attention: substitutes the best attention kernel of the target.

Capture pins attention to the plain kernel: PyTorch's on a CPU. The pass pins the best kernel of the target instead,
where the target has a better kernel. On a GPU the plain pin already means the only kernel: the pass pins the kernel by
name and gains nothing.

Flash attention (arXiv 2205.14135) computes softmax blockwise and never writes the score matrix: memory is linear in
length, and the arithmetic stays in cache. The result is exact: online softmax only reorders the sum.

The best place is with the fusions: all later passes are then measured with fast attention, which is closer to the
finished artifact and takes less time.
"""

from __future__ import annotations

from torch import fx

from optkit.graph.ir import Graph
from optkit.graph.ops import op_of
from optkit.kernels import PLAIN_KERNELS, Kernel, reference, select
from optkit.lowering.bind import kernel_of, weight_layouts
from optkit.passes.base import Pass, PassContext, PassResult, Plan, Site, Skip, Stage


class FlashAttention(Pass):
    name = "flash_attention"
    stage = Stage.FUSE
    last_stage = Stage.KERNELS

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        plan = Plan()
        for node in graph.calls(reference.attention, reference.paged_attention):
            best = best_kernel(graph, node, ctx)
            if best is not None and best.name == PLAIN_KERNELS.get(ctx.target.kind) == running(
                graph, node, ctx
            ):
                plan.skips.append(Skip(node.name, f"it has the best kernel already ({best.name})"))
            elif best is not None:
                plan.sites.append(Site(node.name, (node,)))
            else:
                special = "".join(f" with {word}" for word in special_parts(node))
                plan.skips.append(
                    Skip(node.name, f"no flash attention kernel{special} for {ctx.target.name}")
                )
        return plan

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        chosen = {}
        for site in plan.sites:
            node = site.nodes[0]
            kernel = best_kernel(graph, node, ctx)
            assert kernel is not None, "a site of the plan has a kernel"
            node.meta["kernel"] = chosen["kernel"] = kernel.name
        return PassResult(len(plan.sites), chosen)


def special_parts(node: fx.Node) -> list[str]:
    """The parts of a site's softmax that not all kernels have, in words."""
    op = op_of(node)
    names = {"softcap": "soft-cap", "sinks": "sinks", "slopes": "ALiBi"}
    return [word for name, word in names.items() if op.argument(node, name)]


def best_kernel(graph: Graph, node: fx.Node, ctx: PassContext) -> Kernel | None:
    """The best kernel for the target and the site's window, soft-cap and KV pools."""
    options = graph.site_options(node)
    return select(op_of(node).name, ctx.target, weights=weight_layouts(graph, node), options=options)


def running(graph: Graph, node: fx.Node, ctx: PassContext) -> str:
    """The name of the site's present kernel."""
    kernel = kernel_of(graph, node, ctx.target)
    return kernel.name if kernel else "reference"
