"""The report of a profile: ops against their roofs, sorted by lost time, prefill and decode apart.

The roof of an op is the larger of two times: its arithmetic at the target's peak and its memory traffic at the
target's bandwidth (``optkit.lowering.cost``). Lost time is the op's time minus the roof. Equal ops of different layers
are a row. The report has the step of median time of each phase, so the rows add up to a real step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from torch import fx

from optkit.graph import ops, variants
from optkit.graph.ir import Graph, module_name
from optkit.graph.ops.record import Work as Kind
from optkit.graph.shapes import Point, infer_shapes
from optkit.kernels.cpu.program import NODES
from optkit.lowering.cost import Cost, node_cost
from optkit.machine.target import Target
from optkit.profiling.observer import Work
from optkit.profiling.recording import PHASES, Recorded
from optkit.profiling.timeline import Timeline, timelines
from optkit.profiling.timing import PROGRAM

PER_SEQUENCE = (Kind.ATTENTION, Kind.RECURRENT)  # work that depends on each sequence's length
LAYER = re.compile(r"\.\d+(?=\.)")  # the number of a layer in the name of a module
PREFIXES = ("model.", "transformer.")  # of modules, left out in names
NO_KERNEL = "-"


@dataclass(frozen=True)
class OpRow:
    """Equal ops of ``count`` layers in a step; a part of the step other than ops has no ``op``.

    Attributes:
        name: the module, with ``*`` for the layer; the op where it has no weights.
        kernel: the function that computes the op.
        seconds: of the step.
        roof: seconds on the target at best.
        bound: "memory" or "compute", the nearer roof; empty without one.
        num_bytes, operations: moved and computed.
    """

    name: str
    op: str
    kernel: str
    count: int
    seconds: float
    roof: float = 0.0
    bound: str = ""
    num_bytes: float = 0.0
    operations: float = 0.0

    @property
    def lost(self) -> float:
        return self.seconds - self.roof

    @property
    def share_of_roof(self) -> float:
        """The roof divided by the time; above 1 where weights are read from a cache."""
        return self.roof / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"lost": self.lost, "share_of_roof": self.share_of_roof}


@dataclass(frozen=True)
class PhaseReport:
    """The step of median time of a phase.

    Attributes:
        label: "prefill 512" or "decode@513", with the number of sequences where several.
        all_seconds: of each recorded step, in order.
        rows: ops and other parts, most lost time first; their seconds add up to ``seconds``.
        accounted: share of the step in ops and named parts, without the time between ops.
    """

    phase: str
    label: str
    timeline: Timeline
    all_seconds: tuple[float, ...]
    rows: tuple[OpRow, ...]
    accounted: float

    @property
    def seconds(self) -> float:
        return self.timeline.seconds

    @property
    def roof(self) -> float:
        return sum(row.roof for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON data, times in seconds."""
        plain = {"label": self.label, "seconds": self.seconds, "roof": self.roof, "accounted": self.accounted}
        tokens = {"tokens": sum(w.num_new for w in self.timeline.step.work)}
        return {
            **plain,
            **tokens,
            "sequences": [w._asdict() for w in self.timeline.step.work],
            "all_seconds": list(self.all_seconds),
            "rows": [row.to_dict() for row in self.rows],
        }


@dataclass(frozen=True)
class Report:
    """The phases of a profile of the artifact ``name`` on ``target``.

    Attributes:
        names: of the ops in timelines, by number.
        timelines: of all recorded steps, in order.
        num_lost: steps without room for their records.
    """

    name: str
    target: Target
    threads: int
    phases: tuple[PhaseReport, ...]
    names: tuple[str, ...]
    timelines: tuple[Timeline, ...]
    num_lost: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON data."""
        return {
            "schema_version": 1,
            "artifact": self.name,
            "target": asdict(self.target),
            "threads": self.threads,
            "num_lost": self.num_lost,
            "phases": {phase.phase: phase.to_dict() for phase in self.phases},
        }


def make_report(name: str, recorded: Recorded, graph: Graph, target: Target) -> Report:
    """The report of ``recorded``, steps of ``graph`` as it is in the artifact."""
    taken = timelines(recorded)
    by_phase = {phase: [t for t in taken if t.step.phase == phase] for phase in PHASES}
    found = [_phase(recorded, steps, graph, target) for steps in by_phase.values() if steps]
    labels = {node.name: label(graph, node) for node in graph.fx.nodes}
    names = tuple(" + ".join(labels.get(each, each) for each in op.node.split(NODES)) for op in recorded.ops)
    threads = taken[0].step.threads if taken else 0
    return Report(name, target, threads, tuple(found), names, tuple(taken), recorded.num_lost)


def _phase(recorded: Recorded, steps: Sequence[Timeline], graph: Graph, target: Target) -> PhaseReport:
    chosen = sorted(steps, key=lambda each: each.seconds)[len(steps) // 2]
    work = chosen.step.work
    rows = [*op_rows(recorded, chosen, graph, target)]
    rows += [OpRow(name, "", NO_KERNEL, 1, spent / 1e9) for name, spent in chosen.parts.items()]
    rows.sort(key=lambda row: -row.lost)
    seconds = tuple(each.seconds for each in steps)
    return PhaseReport(
        chosen.step.phase, described(chosen.step.phase, work), chosen, seconds, tuple(rows), chosen.accounted
    )


def described(phase: str, work: Sequence[Work]) -> str:
    """A step in words: "prefill of 512 tokens" or "decode of 8 sequences at 513 tokens"."""
    tokens, contexts = sum(each.num_new for each in work), [each.context for each in work]
    many = f"{len(work)} sequences" if len(work) > 1 else "1 sequence"
    place = f"{min(contexts)}" if min(contexts) == max(contexts) else f"{min(contexts)} to {max(contexts)}"
    if phase == PHASES[1]:
        return f"decode of {many} at {place} tokens"
    after = "" if len(work) == 1 and tokens == contexts[0] else f" of {many} up to {place} tokens"
    return f"prefill of {tokens} tokens{after}"


def op_rows(recorded: Recorded, taken: Timeline, graph: Graph, target: Target) -> list[OpRow]:
    """A row for equal ops of a step."""
    graph = variants.at(graph, sum(each.num_new for each in taken.step.work))
    costs = step_costs(graph, taken.step.work)
    nodes = {node.name: node for node in graph.fx.nodes}
    spent: dict[str, float] = {}
    kernels: dict[str, list[str]] = {}
    for number, nanoseconds in taken.ops.items():
        op = recorded.ops[number]
        spent[op.node] = spent.get(op.node, 0.0) + nanoseconds / 1e9
        if op.kernel != PROGRAM and op.kernel not in kernels.setdefault(op.node, []):
            kernels[op.node].append(op.kernel)
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name in spent:
        made = [nodes[each] for each in name.split(NODES) if each in nodes]  # several in one call
        op_name = " + ".join(ops.op_name(node.target) or str(node.target) for node in made) or name
        shown = " + ".join(LAYER.sub(".*", label(graph, node)) for node in made) or name
        groups.setdefault((shown, op_name, " + ".join(kernels[name])), []).append(name)

    def cost_of(name: str) -> Cost:
        return total([costs.get(each, Cost()) for each in name.split(NODES)])

    return [
        _row(key, [cost_of(name) for name in names], sum(spent[name] for name in names), target)
        for key, names in groups.items()
    ]


def _row(key: tuple[str, str, str], costs: Sequence[Cost], seconds: float, target: Target) -> OpRow:
    if target.kind == "cpu":  # programs run blocks of tokens whose activations stay in the caches of a core
        costs = [replace(cost, activation_bytes=0.0) for cost in costs]
    cost = total(costs)
    roof = sum(each.seconds(target) for each in costs)
    is_memory = cost.memory_seconds(target) >= cost.compute_seconds(target)
    bound = "" if not roof else "memory" if is_memory else "compute"
    return OpRow(*key, len(costs), seconds, roof, bound, cost.num_bytes, cost.operations)


def step_costs(graph: Graph, work: Sequence[Work]) -> Mapping[str, Cost]:
    """The cost of each op of a step, by the name of the node. Attention is counted for each sequence."""
    tokens, longest = sum(each.num_new for each in work), max(each.context for each in work)
    point = Point(tokens, len(work), longest)
    values = infer_shapes(graph, point)
    found = {}
    for node in graph.fx.nodes:
        if node.op == "call_function":
            record = ops.record_of(node.target)
            alone = record is not None and record.work in PER_SEQUENCE and len(work) > 1
            points = [Point(each.num_new, 1, each.context) for each in work] if alone else [point]
            found[node.name] = total([node_cost(graph, node, values, each) for each in points])
    return found


def total(costs: Sequence[Cost]) -> Cost:
    """The sum of ``costs``."""
    if len(costs) == 1:
        return costs[0]
    return Cost(**{field.name: sum(getattr(cost, field.name) for cost in costs) for field in fields(Cost)})


def label(graph: Graph, node: fx.Node) -> str:
    """The module of a node's first weight, else the name of the op."""
    for argument in node.all_input_nodes:
        if argument.op == "get_attr" and (module := module_name(str(argument.target))):
            prefix = next((p for p in PREFIXES if module.startswith(p)), "")
            return module.removeprefix(prefix)
    return ops.op_name(node.target) or node.name if node.op == "call_function" else node.name
