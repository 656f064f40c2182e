"""Facts of a result for its report that need the graph: the least times by prompt length, and the memory plan."""

from __future__ import annotations

from typing import Any

from optkit.graph.ir import Graph
from optkit.graph.shapes import Point
from optkit.lowering.step_bounds import activation_bytes, floor_seconds
from optkit.machine.target import Target
from optkit.recipe.engine_options import engine_options
from optkit.recipe.schema import Recipe
from optkit.runtime.state_memory import state_memory

LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # tokens of a prompt


def facts(graph: Graph, recipe: Recipe, target: Target) -> dict[str, Any]:
    """``floor`` and ``memory`` of report.json."""
    return {"floor": floor(graph, target), "memory": memory(graph, recipe)}


def floor(graph: Graph, target: Target) -> list[list[float]]:
    """[tokens, seconds] of a prompt by itself: the least time on ``target``, by prompt length."""
    lengths = [tokens for tokens in LENGTHS if tokens <= graph.meta.max_model_len]
    return [[tokens, floor_seconds(graph, Point(tokens, 1, tokens), target)] for tokens in lengths]


def memory(graph: Graph, recipe: Recipe) -> dict[str, Any]:
    """The plan of a server's memory in bytes: weights, states (``state_memory``), pool, and the largest step."""
    options = engine_options(recipe)
    tokens = min(options.max_num_batched_tokens, graph.meta.max_model_len)
    states = state_memory(graph.meta, recipe)
    return states | {
        "weight_bytes": graph.num_bytes(),
        "pool_bytes": options.kv_cache_bytes if states["token_bytes"] or states["sequence_bytes"] else 0,
        "max_model_len": options.max_model_len or graph.meta.max_model_len,
        "step_tokens": tokens,
        "activation_bytes": activation_bytes(graph, Point(tokens, 1, tokens)),
    }
