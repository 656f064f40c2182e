"""The output head is found and cut off, or the graph is refused."""

from __future__ import annotations

import pytest

from optkit.errors import UserError
from optkit.kernels import reference
from optkit.runtime.hidden_graph import head_of, hidden_graph
from tests.support.graphs import apply, captured


def test_the_head_is_found_behind_ops_on_logits_and_variants() -> None:
    gemma = captured("gemma2")
    logits = next(node for node in gemma.fx.nodes if node.op == "output").args[0]
    assert logits.target is not reference.linear and head_of(logits).target is reference.linear
    graph = captured("llama")
    apply(graph, "int8", max_tokens=4, lm_head=True)
    logits = next(node for node in graph.fx.nodes if node.op == "output").args[0]
    assert logits.target is reference.by_tokens and head_of(logits).target is reference.linear


def test_a_graph_without_a_head_is_refused() -> None:
    graph = captured("llama")
    output = next(node for node in graph.fx.nodes if node.op == "output")
    norm = next(node for node in reversed(list(graph.fx.nodes)) if node.target is reference.rms_norm)
    output.args = (norm,)
    with pytest.raises(UserError, match="the output head can't be found"):
        hidden_graph(graph)
