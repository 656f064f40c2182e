"""Application of a pass to a graph, verified. A failure names the pass and writes a reproducer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from optkit.errors import OptkitError, UserError, refusal
from optkit.graph.ir import Graph
from optkit.graph.serialize import graph_to_json
from optkit.graph.verify import VerifyError, verify
from optkit.passes.base import Pass, PassContext, PassResult, Plan

Reproduce = Callable[[str, str], Path]  # (pass, text of the graph before it) -> the reproducer's directory


class PassFailed(OptkitError):
    """A pass broke the graph; the message has the pass and the reproducer."""


def apply_pass(
    optimization: Pass, graph: Graph, plan: Plan, context: PassContext, reproduce: Reproduce | None = None
) -> PassResult:
    """Rewrite ``graph`` by ``plan`` and verify the result.

    Raises:
        UserError: the pass lacks something from the user, such as readable calibration text.
        PassFailed: the pass failed or broke the graph; ``reproduce`` has written the graph before the pass.
    """
    if reproduce is None:
        result = optimization.apply(graph, plan, context)
        verify(graph)
        return result
    text = graph_to_json(graph)
    try:
        return apply_pass(optimization, graph, plan, context)
    except UserError:
        raise
    except Exception as error:
        if refusal(error) is not None:  # a full disk, no memory: no fault of the pass
            raise
        place = reproduce(optimization.name, text)
        kind = "broke the graph" if isinstance(error, VerifyError) else "failed"
        raise PassFailed(f"pass {optimization.name} {kind}: {error} (reproducer: {place})") from error
