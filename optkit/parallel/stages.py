"""The graph of a stage: some of the layers in a row, and ops that hand hidden states to the next stage.

The graph is cut between nodes where one or two float values of a row a token cross, and no layer's KV is read on both
sides. Between two attentions the narrowest cuts count; of all these the chosen ones leave the largest stage as few
bytes of weights as possible. A token embedding that is also the output head counts in the first and in the last stage.
Rotary angles and other values of the positions alone are computed by every stage with a reader.

All stages are ranks that run the same exchanges in the same order: a stage without anything to compute yet waits in
the exchange.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from optkit.errors import UserError
from optkit.graph.ir import Graph
from optkit.graph.shapes import infer_shapes
from optkit.graph.verify import verify
from optkit.kernels import reference
from optkit.parallel.plan import PROBE, PROBE_BLOCK
from optkit.parallel.rank_graph import clone_for_rank
from optkit.parallel.sizes import PIPELINE_PARALLEL, check_stages, that_work

MOST_CROSSING = 2  # values over a cut: the states and, before a fused addition, the result of the last layer


def stage_graph(graph: Graph, rank: int, size: int, where: str = PIPELINE_PARALLEL) -> Graph:
    """The graph of the stage ``rank`` of ``size``, a clone. Run together, each stage gives the logits of ``graph``.

    Raises:
        UserError: the layers can't be cut into ``size`` stages.
    """
    check_stages(graph.meta, size, where)
    part = clone_for_rank(graph)
    if size > 1:
        keep_stage(part, rank, Stages(part, size, where))
        verify(part, lowered=True)
    return part


@dataclass(frozen=True)
class Cut:
    """A place between two nodes.

    Attributes:
        place: the number of nodes before it.
        crossing: values computed before and read behind.
        width: numbers of a token in these values.
    """

    place: int
    crossing: tuple[fx.Node, ...]
    width: int


class Stages:
    """The nodes of ``graph`` in ``size`` stages.

    Attributes:
        cuts: in order, one fewer than stages.
        values: the shape of each node's result for a probe.

    Raises:
        UserError: there are too few places to cut.
    """

    def __init__(self, graph: Graph, size: int, where: str) -> None:
        self.graph, self.nodes = graph, list(graph.fx.nodes)
        self.numbers = {node: number for number, node in enumerate(self.nodes)}
        self.values = infer_shapes(graph, PROBE, PROBE_BLOCK)
        self.of_text = nodes_of_text(self.nodes)
        pools = self.pool_ranges()
        self.cuts = self.best(self.places(pools), pools, size)
        if (most := len(self.cuts) + 1) < size:
            what = f"the model can't be cut into {size} stages: layers read more of earlier ones than the hidden states"
            raise UserError(what, where=where, fix=that_work(range(1, most + 1)))

    def stage_of(self, node: fx.Node) -> int:
        """The stage of ``node``."""
        return sum(cut.place <= self.numbers[node] for cut in self.cuts)

    def places(self, pools: Sequence[tuple[int, int]]) -> list[Cut]:
        """The places without a layer whose KV is read on both sides; of those between two attentions the narrowest."""
        last = {node: max((self.numbers[user] for user in node.users), default=-1) for node in self.of_text}
        found, alive = list[Cut](), list[fx.Node]()
        for number, node in enumerate(self.nodes):
            if number and not any(first < number <= end for first, end in pools):
                crossing = tuple(each for each in alive if last[each] >= number)
                if 0 < len(crossing) <= MOST_CROSSING and all(map(self.may_cross, crossing)):
                    width = sum(int(self.values[each].shape[1]) for each in crossing)
                    found.append(Cut(number, crossing, width))
            alive = [each for each in alive if last[each] > number]
            if node in last:
                alive.append(node)
        return [cut for between in self.between_attentions(found, pools) for cut in narrowest(between)]

    def between_attentions(self, cuts: Sequence[Cut], pools: Sequence[tuple[int, int]]) -> list[list[Cut]]:
        """The cuts between two attentions in a row, for all of these."""
        groups: dict[int, list[Cut]] = {}
        for cut in cuts:
            groups.setdefault(sum(first < cut.place for first, _ in pools), []).append(cut)
        return list(groups.values())

    def may_cross(self, node: fx.Node) -> bool:
        """True for a float row a token."""
        value = self.values[node]
        is_row = isinstance(value, Tensor) and value.ndim == 2 and value.shape[0] == PROBE.tokens
        return is_row and value.dtype is torch.float32

    def pool_ranges(self) -> list[tuple[int, int]]:
        """The first and the last reader of each layer's KV."""
        found = list[tuple[int, int]]()
        for spec in self.graph.meta.kv_specs:
            pools = [node for node in self.nodes if node.op == "placeholder" and node.target in spec.inputs]
            readers = [self.numbers[user] for pool in pools for user in pool.users]
            found += [(min(readers), max(readers))] if readers else []
        return sorted(found)

    def best(self, places: Sequence[Cut], pools: Sequence[tuple[int, int]], size: int) -> list[Cut]:
        """The cuts into ``size`` stages with the smallest largest one; fewer where there are too few places.

        Each stage has a layer's KV. Found by dynamic programming over the places.
        """
        ends = [0, *(cut.place for cut in places), len(self.nodes)]
        costs = self.costs(ends, [first for first, _ in pools])
        # by the number of stages, up to each end: the largest stage, and the end before
        table = [[(costs[0][end], 0) for end in range(len(ends))]]
        for _ in range(1, size):
            reached = table[-1]
            longer = [
                min(
                    ((max(reached[middle][0], costs[middle][end]), middle) for middle in range(1, end)),
                    default=(math.inf, 0),
                )
                for end in range(len(ends))
            ]
            if math.isinf(longer[-1][0]):
                break
            table.append(longer)
        found, end = list[Cut](), len(ends) - 1
        for row in reversed(table[1:]):
            end = row[end][1]
            found.append(places[end - 1])
        return found[::-1]

    def operands(self, start: int, end: int) -> set[fx.Node]:
        """The operands of the nodes ``start`` to ``end``."""
        return {each for node in self.nodes[start:end] for each in node.all_input_nodes}

    def costs(self, ends: Sequence[int], attentions: Sequence[int]) -> list[list[float]]:
        """Bytes of the weights that nodes between two of ``ends`` read, by first and last; infinite without KV."""
        read = [
            {str(node.target) for node in self.operands(start, end) if node.op == "get_attr"}
            for start, end in itertools.pairwise(ends)
        ]
        found = [[math.inf] * len(ends) for _ in ends]
        for first, start in enumerate(ends):
            names, total = set[str](), 0
            for last in range(first + 1, len(ends)):
                new = read[last - 1] - names
                names |= new
                total += sum(self.graph.weights[name].nbytes for name in new)
                if any(start <= place < ends[last] for place in attentions):
                    found[first][last] = total
        return found


def narrowest(cuts: Sequence[Cut]) -> list[Cut]:
    """The cuts with the fewest numbers, the first for each set of values."""
    least = min(cut.width for cut in cuts)
    return list({cut.crossing: cut for cut in reversed(cuts) if cut.width == least}.values())[::-1]


def nodes_of_text(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes whose values depend on the token ids."""
    found = set[fx.Node]()
    for node in nodes:
        if node.target == "input_ids" or any(each in found for each in node.all_input_nodes):
            found.add(node)
    return {node for node in found if node.op == "call_function"}


def keep_stage(graph: Graph, rank: int, stages: Stages) -> None:
    """Reduce ``graph``, in place, to the stage ``rank``, with the exchanges of all stages."""
    ids, rows = graph.input("input_ids"), graph.input("logits_index")
    before: fx.Node | None = None
    for source, cut in enumerate(stages.cuts):
        later = {node for node in stages.nodes if stages.stage_of(node) > source}
        for value in cut.crossing:
            if stages.stage_of(value) != source:
                continue  # handed on at an earlier cut
            width, own = int(stages.values[value].shape[1]), value if source == rank else None
            with graph.fx.inserting_before(stages.nodes[cut.place]):
                before = graph.fx.call_function(reference.broadcast, (ids, own, before, width, source))
            value.replace_all_uses_with(before, delete_user_cb=later.__contains__)
    output, last = graph.fx.output_node(), len(stages.cuts)
    logits = output.args[0]
    with graph.fx.inserting_before(output):
        width, own = graph.meta.vocab_size, logits if rank == last else None
        output.args = (graph.fx.call_function(reference.broadcast, (rows, own, before, width, last)),)
    graph.prune()
    pools = {name for spec in graph.meta.kv_specs for name in spec.inputs}
    for node in list(graph.fx.nodes):
        if node.op == "placeholder" and node.target in pools and not node.users:
            graph.fx.erase_node(node)
    read = {str(node.target) for node in graph.fx.nodes if node.op == "placeholder"}
    specs = [spec for spec in graph.meta.kv_specs if set(spec.inputs) <= read]
    graph.meta = graph.meta.with_kv_specs(specs)
