"""Run a graph over calibration text in stretches, with the activations of a single layer in memory.

A pass that calibrates names activations, in execution order. ``Walk.values`` computes the graph up to the named
activation, for all windows of text, and yields the values window by window. Afterwards the walk keeps only values with
readers in the rest of the graph (between decoder layers: the hidden states). The rest of the graph may be rewritten
before the walk goes on: GPTQ replaces the layers that read an activation, and later layers see the rounding errors. A
walk computes only the ancestors of the named activation: for the inputs of the last attention the last MLP is not run.

``state`` saves a walk, and ``restore`` continues the walk in another process; values absent from the state are computed
again. Kernels are the runtime's, so activations are the same as in serving. On a GPU activations are computed on the
device, in float32, and copied to the host; weights and the passes' mathematics are on the host.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from optkit.graph import variants
from optkit.graph.ir import Graph
from optkit.graph.states import STATE_SLOTS, named_pools
from optkit.kernels import PLAIN
from optkit.lowering.dense import dense_inputs
from optkit.lowering.lower import Executable, lower

if TYPE_CHECKING:
    from optkit.machine.target import Target

BLOCK_SIZE = 16
COLLECTED_BYTES = 128 << 20  # of weights in a stretch
STREAMED_BYTES = 2 << 30  # of weights in a stretch; of a longer one the float weights stay on disk


class Walk:
    """A position in ``graph`` over ``windows`` of token ids.

    Attributes:
        live: for each window the values still needed, by node.
        done: nodes with computed values.
    """

    def __init__(self, graph: Graph, windows: Sequence[Sequence[int]], target: Target | None) -> None:
        self.graph, self.target = graph, target
        self.device = torch.device("cpu" if target is None else target.device)
        self.windows = [torch.tensor(window, dtype=torch.int64) for window in windows]
        self.live: list[dict[fx.Node, Tensor]] = [{} for _ in self.windows]
        self.done: set[fx.Node] = set()

    def values(self, node: fx.Node) -> Iterator[Tensor]:
        """Advance to ``node`` and yield the value [T, ...] on the host for each window; use up the whole iterator.

        The value stays available until the present readers are computed.
        """
        if node in self.done:
            for values in self.live:
                yield values[node].cpu()
            return
        segment = self.segment(self.graph, self.done, node)
        kept = [n for n in [*self.live[0], *segment.results] if needed(n, self.done | segment.computed, node)]
        for window, values in zip(self.windows, self.live, strict=True):
            values |= segment.run(window, values)
            yield values[node].cpu()
            for stale in set(values) - set(kept):
                del values[stale]
        self.done |= segment.computed

    def finish(self, graph: Graph, count: int | None = None, every: int = 1) -> Iterator[Tensor]:
        """Yield the output of ``graph`` for each window, from the position of the walk, which stays.

        ``graph`` is the walk's graph, or differs after the position only; nodes are matched by name. ``count`` limits
        the windows, and of each window only the rows of ``every``-th tokens are computed.
        """
        names = {node.name for node in self.done}
        same = {node.name: node for node in graph.fx.nodes if node.name in names}
        output = next(node for node in graph.fx.nodes if node.op == "output").args[0]
        segment = self.segment(graph, set(same.values()), output)
        chosen = of_chosen_rows(self.graph)
        for window, values in list(zip(self.windows, self.live, strict=True))[:count]:
            rows = torch.arange(every - 1, len(window), every)
            here = rows.to(self.device)
            kept = {same[n.name]: value[here] if n in chosen else value for n, value in values.items()}
            yield segment.run(window, kept, rows)[output].cpu()

    def segment(self, graph: Graph, done: set[fx.Node], goal: fx.Node) -> Segment:
        return Segment(graph, done, goal, self.target, max(map(len, self.windows)))

    def change(self, node: fx.Node, factor: Tensor) -> None:
        """Multiply the computed values of ``node`` by ``factor``, after the same change of the op."""
        for values in self.live:
            values[node] = values[node] * factor.to(self.device)

    # -- putting it aside ----------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Everything needed to go on later: tensors by ``window.node``."""
        return {
            f"{index}.{node.name}": value.cpu()
            for index, values in enumerate(self.live)
            for node, value in values.items()
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Stand where another walk over an equal graph stood."""
        by_name = {node.name: node for node in self.graph.fx.nodes}
        for key, value in state.items():
            index, _, name = key.partition(".")
            self.live[int(index)][by_name[name]] = value.to(self.device)
        self.done = ancestors(self.live[0])

    def num_bytes(self) -> int:
        """Bytes of all kept values."""
        return sum(value.nbytes for values in self.live for value in values.values())


def needed(node: fx.Node, done: set[fx.Node], current: fx.Node) -> bool:
    """True where an op outside ``done`` reads ``node``."""
    return node is current or any(user not in done for user in node.users)


def of_chosen_rows(graph: Graph) -> set[fx.Node]:
    """The calls on rows with logits alone (``select_logits_rows``); a walk computes all rows."""
    found: set[fx.Node] = set()
    for node in graph.fx.nodes:
        sources = node.all_input_nodes
        if any(n in found or (n.op == "placeholder" and n.target == "logits_index") for n in sources):
            found.add(node)
    return found


def ancestors(nodes: Mapping[fx.Node, Any]) -> set[fx.Node]:
    """The nodes and everything computed for their sake."""
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node.op == "call_function" and node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def stretch(graph: Graph, done: set[fx.Node], goal: fx.Node) -> list[fx.Node]:
    """The calls between what is done and ``goal``, in order; pieces of a tuple are taken out at once."""
    found: set[fx.Node] = set()
    waiting = [goal]
    while waiting:
        node = waiting.pop()
        if node.op != "call_function" or node in done or node in found:
            continue
        found.add(node)
        waiting += node.all_input_nodes
    for node in list(found):
        found |= pieces(node)
    return [node for node in graph.fx.nodes if node in found]


def pieces(node: fx.Node) -> set[fx.Node]:
    """The ``getitem`` nodes of ``node``, for a tuple."""
    return {user for user in node.users if is_piece(user) and user.args[0] is node}


def is_piece(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


class Segment:
    """The part of a graph between computed values and ``goal``, lowered separately for steps of ``tokens`` tokens.

    Attributes:
        computed: the calls of the part.
        results: the calls with returned values; tuples are returned in pieces.
    """

    def __init__(
        self, graph: Graph, done: set[fx.Node], goal: fx.Node, target: Target | None, tokens: int
    ) -> None:
        order = stretch(graph, done, goal)
        self.computed = set(order)
        after = done | self.computed
        self.results = [n for n in order if needed(n, after, goal) and not pieces(n)]
        self.inputs = list(dict.fromkeys(i for n in order for i in n.all_input_nodes if i in done))
        self.states = graph.meta.states
        self.device = torch.device("cpu" if target is None else target.device)
        self.model = self.lowered(graph, order, target, tokens)
        self.pools: dict[str, Tensor] = {}
        self.blocks = 0

    def lowered(
        self, graph: Graph, order: Sequence[fx.Node], target: Target | None, tokens: int
    ) -> Executable:
        part = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {n: part.placeholder(f"value_{n.name}") for n in self.inputs}
        leaves = {i for n in order for i in n.all_input_nodes if i.op != "call_function"}
        for node in (n for n in graph.fx.nodes if n in leaves):
            copies[node] = part.node_copy(node)
        for node in order:
            copies[node] = part.node_copy(node, copies.__getitem__)
            if copies[node].meta.get("kernel") in (PLAIN, "reference"):  # before a pass has chosen
                del copies[node].meta["kernel"]  # the fastest there is, which differs in rounding only
        part.output(tuple(copies[node] for node in self.results))
        names = {str(n.target) for n in copies if n.op == "get_attr"}
        weights = {
            name: replace(graph.weights[name]) for name in names
        }  # the graph's own stay where they are
        whole = variants.at(Graph(part, weights, graph.meta), tokens)
        num_bytes = sum(weight.nbytes for weight in weights.values())
        if num_bytes > COLLECTED_BYTES:
            gc.collect()  # modules of torch.fx are cycles, and would keep the weights of earlier stretches
        streamed = num_bytes > STREAMED_BYTES
        return lower(whole, target, dtype=torch.float32, programs=False, consume=True, streamed=streamed)

    @torch.inference_mode()
    def run(
        self, window: Tensor, values: Mapping[fx.Node, Tensor], rows: Tensor | None = None
    ) -> dict[fx.Node, Tensor]:
        """The results for a window, given the values computed before; logits of ``rows``, or of all."""
        inputs = dense_inputs([len(window)], window, ())
        if rows is not None:
            inputs["logits_index"] = rows
        inputs[STATE_SLOTS] = torch.zeros(1, dtype=torch.int32)
        inputs = {name: value.to(self.device) for name, value in inputs.items()} | self.state_pools(
            len(window)
        )
        inputs |= {f"value_{node.name}": values[node] for node in self.inputs}
        return dict(zip(self.results, self.model(inputs), strict=True))

    def state_pools(self, length: int) -> dict[str, Tensor]:
        """Pools of the layers in the part, with room for a window; each window begins anew."""
        blocks = -(-length // BLOCK_SIZE)
        if self.blocks < blocks:
            states = [spec for spec in self.states if set(spec.inputs) & set(self.model.inputs)]
            self.pools = named_pools(states, blocks, BLOCK_SIZE, 1, self.device)
            self.blocks = blocks
        return self.pools
