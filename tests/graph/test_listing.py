"""The listing of a graph: a line for each op, with weights by name, sizes and kernels."""

from __future__ import annotations

from optkit.graph.listing import list_graph
from optkit.graph.shapes import Point
from tests.support.graphs import captured


def test_list_graph_has_a_line_for_each_op_with_the_sizes_of_the_batch() -> None:
    graph = captured("llama")
    lines = list(list_graph(graph, Point(7, 1, 7)))
    calls = [node.name for node in graph.fx.nodes if node.op == "call_function"]
    assert [line.partition(" = ")[0] for line in lines] == calls
    (embedding,) = [line for line in lines if " = embedding(" in line]
    assert embedding.endswith("(model.embed_tokens.weight, input_ids)  # [7, 64]")
    (head,) = [line for line in lines if "lm_head.weight" in line]
    assert head.endswith("# [1, 128]")


def test_list_graph_names_the_sizes_of_each_part_and_the_kernel() -> None:
    graph = captured("llama")
    norm = next(node.name for node in graph.fx.nodes if "rms_norm" in node.name)
    (line,) = [x for x in list_graph(graph, Point(7, 1, 7), {norm: "native"}) if x.endswith("<native>")]
    assert line.startswith(f"{norm} = rms_norm(")
    table = next(x for x in list_graph(graph, Point(7, 1, 7)) if " = rope_table(" in x)
    assert table.endswith("# [7, 16], [7, 16]")
