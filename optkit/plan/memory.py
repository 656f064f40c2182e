"""The memory of a model in service: weights, the largest step, the KV cache, and the requests that fit at once.

The scheduler's own formulas count blocks (``optkit.runtime.sizing``, ``SchedulerConfig``), so windows, recurrent
states and block sizes are those of the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import msgspec
from torch import Tensor, fx

from optkit.errors import UserError
from optkit.graph import ops, variants
from optkit.graph.ir import Graph
from optkit.graph.kv_layout import kv_layout
from optkit.graph.shapes import Point, infer_shapes
from optkit.graph.states import KVSpec, StateSpec, sequence_bytes
from optkit.lowering.cost import FREE_OPS, as_lowered
from optkit.lowering.lower import Executable
from optkit.machine.target import Target
from optkit.recipe.engine_options import EngineOptions, engine_options
from optkit.recipe.schema import Recipe
from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.runtime.sizing import scheduler_config

SERVER_BYTES = 1e9  # of a server beside weights and KV, on a CPU (docs/sizes.md)
FREE_SHARE = 0.9  # of the memory of a machine that a server may take, on a CPU


@dataclass(frozen=True)
class PlannedModel:
    """The facts of a model for the limits of the scheduler."""

    states: Sequence[StateSpec]
    kv_specs: Sequence[KVSpec]
    max_model_len: int
    variant_limits: tuple[int, ...]


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of a server, and the number of requests running at once.

    Attributes:
        available: for the server, of the memory of the machine.
        activations: of the largest step.
        kv_cache: of the KV pool and recurrent states: the recipe's on a CPU, all remaining memory on a GPU.
        most_kv: ``kv_cache`` at most on the machine.
        kv_token: of a token in the KV cache.
        state_sequence: of the recurrent states of a request.
        requests: at once by context length, at the KV pool and ``max_num_seqs`` of the recipe.
        most_requests: at once by context length, with all memory for KV and no other limit.
        limit: the reason for the number of requests, by context length.
        config: limits of the scheduler; None where the weights do not fit.
    """

    available: float
    weights: int
    activations: float
    process: float
    kv_cache: float
    most_kv: float
    kv_token: int
    state_sequence: int
    requests: dict[int, int] = field(default_factory=dict)
    most_requests: dict[int, int] = field(default_factory=dict)
    limit: dict[int, str] = field(default_factory=dict)
    config: SchedulerConfig | None = None

    @property
    def fits(self) -> bool:
        """True where weights, largest step and some KV fit."""
        return self.config is not None

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self) | {"fits": self.fits}
        config = self.config
        limits = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "num_blocks")
        return data | {"config": {name: getattr(config, name) for name in limits} if config else None}


def memory_plan(graph: Graph, recipe: Recipe, target: Target, contexts: Sequence[int]) -> MemoryPlan:
    """The memory of ``graph`` on ``target`` with the limits of ``recipe``, for requests of ``contexts`` tokens."""
    lowered = as_lowered(graph, target) if target.kind == "cuda" else graph
    model = PlannedModel(
        lowered.meta.states,
        lowered.meta.kv_specs,
        lowered.meta.max_model_len,
        tuple(variants.limits(lowered)),
    )
    options, on_gpu = engine_options(recipe), target.kind == "cuda"
    share = options.gpu_memory_utilization if on_gpu else FREE_SHARE
    process = 0.0 if on_gpu else SERVER_BYTES
    weights = lowered.num_bytes()
    step = min(options.max_num_batched_tokens, model.max_model_len)
    activations = activation_bytes(lowered, Point(step, 1, step), options.block_size)
    left = share * target.memory_bytes - weights - activations - process
    given = None if on_gpu else options.kv_cache_bytes
    plan = MemoryPlan(
        available=share * target.memory_bytes,
        weights=weights,
        activations=activations,
        process=process,
        kv_cache=max(left, 0.0) if given is None else float(given),
        most_kv=max(left, 0.0),
        kv_token=kv_layout(model.states).block_bytes(1) if model.kv_specs else 0,
        state_sequence=sequence_bytes(model.states),
    )
    config = config_of(model, options, plan.kv_cache, target) if plan.kv_cache <= plan.most_kv else None
    if config is None:
        return plan
    most = config_of(model, options, plan.most_kv, target) or config
    found = {context: requests(config, context) for context in contexts}
    without_limit = {context: fitting(most, context) for context in contexts}
    limit = {context: reason(config, context, model.max_model_len) for context in contexts}
    return replace(plan, config=config, requests=found, most_requests=without_limit, limit=limit)


def config_of(
    model: PlannedModel, options: EngineOptions, kv_bytes: float, target: Target
) -> SchedulerConfig | None:
    """The limits of the scheduler with ``kv_bytes`` of KV; None where not even two blocks fit."""
    sized = msgspec.structs.replace(options, kv_cache_bytes=int(kv_bytes))
    try:
        return scheduler_config(cast(Executable, model), sized, target.kind)
    except UserError:
        return None


def fitting(config: SchedulerConfig, context: int) -> int:
    """Requests of ``context`` tokens whose KV fits at once; 0 for a context beyond the limit."""
    if context > config.max_model_len:
        return 0
    return config.num_blocks // max(1, config.blocks_needed(context, 1))


def requests(config: SchedulerConfig, context: int) -> int:
    """The number of requests of ``context`` tokens running at once."""
    return min(config.max_num_seqs, fitting(config, context))


def reason(config: SchedulerConfig, context: int, longest: int) -> str:
    """The limit that decides on ``requests``, of a model with a context of ``longest`` tokens."""
    if context > longest:
        return f"longer than the model's context of {longest} tokens"
    if context > config.max_model_len:
        return f"longer than the KV cache of {config.max_model_len} tokens"
    return "max_num_seqs" if config.max_num_seqs <= fitting(config, context) else "KV cache"


def activation_bytes(graph: Graph, point: Point, block_size: int) -> float:
    """Bytes of the values alive at once in a step of ``point``, at most; views share the memory of their source."""
    graph = variants.at(graph, point.tokens)
    values = infer_shapes(graph, point, block_size)
    owner: dict[fx.Node, fx.Node] = {}
    last: dict[fx.Node, int] = {}
    order = [node for node in graph.fx.nodes if node.op == "call_function"]
    for number, node in enumerate(order):
        source = node.all_input_nodes[0] if node.all_input_nodes else node
        is_view = ops.op_name(node.target) in FREE_OPS and source.op == "call_function"
        owner[node] = owner[source] if is_view else node
        for read in (n for n in node.all_input_nodes if n in owner):
            last[owner[read]] = number
        last.setdefault(owner[node], number)
    for read in graph.fx.output_node().all_input_nodes:
        if read in owner:
            last[owner[read]] = len(order)
    alive = most = 0.0
    ends: dict[int, float] = {}
    for number, node in enumerate(order):
        if owner[node] is node:
            size = value_bytes(values[node])
            alive += size
            ends[last[node]] = ends.get(last[node], 0.0) + size
        most = max(most, alive)
        alive -= ends.pop(number, 0.0)
    return most


def value_bytes(value: Any) -> float:
    if isinstance(value, Tensor):
        return float(value.nbytes)
    return sum(map(value_bytes, value)) if isinstance(value, (list, tuple)) else 0.0
