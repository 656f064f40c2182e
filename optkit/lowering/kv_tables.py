"""Block tables of groups: attention reads the tables of the group of its layer.

In a graph all attention ops read the inputs ``slot_mapping`` and ``block_tables``. Layers with a window have block
tables of their own (``optkit.graph.kv_layout``), so lowering connects each op with the inputs of its group. A graph, a
pass and an artifact know nothing of groups. A caller that gives every sequence one block table may leave out the inputs
of the further groups (``kv_layout.with_tables``).
"""

from __future__ import annotations

from torch import fx

from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.graph.kv_layout import TABLE_INPUTS, kv_layout, table_inputs
from optkit.kernels import reference

OF_TABLES = (reference.attention, reference.paged_attention, reference.rope_kv_write)


def connect(graph: Graph) -> None:
    """Connect each attention op with the block tables of the group of its pools, in place."""
    layout = kv_layout(graph.meta.states)
    if len(layout.groups) == 1:
        return
    for node in graph.calls(*OF_TABLES):
        pool = ops.argument(node, "k_cache")
        group = layout.group_of[str(pool.target)]
        for base, name in zip(TABLE_INPUTS, table_inputs(group), strict=True) if group else ():
            shared = next((a for a in node.all_input_nodes if is_input(a, base)), None)
            if shared is not None:
                node.replace_input_with(shared, graph.input(name))


def is_input(node: fx.Node, name: str) -> bool:
    return node.op == "placeholder" and node.target == name
