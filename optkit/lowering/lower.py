"""Lowering: the kernel of each op of a graph, and the graph as a Python function.

``lower`` picks a kernel per node (``kernels.select``, or the kernel pinned by a pass), packs the kernels' weights once,
and compiles the FX graph to straight-line Python: no interpreter at run time, values freed after the last use. Runs
of native kernels become programs (``optkit.lowering.launch_plan``). A second function, over the same packed weights,
may run steps of some sizes (``Specialize``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, fx, nn

from optkit import kernels
from optkit.cancellation import check_cancelled
from optkit.errors import UserError
from optkit.graph import ops, variants
from optkit.graph.ir import Graph, GraphMeta
from optkit.graph.kv_layout import kv_layout, with_tables
from optkit.graph.ops import op_name
from optkit.graph.ops.aten import is_creator
from optkit.graph.ops.attention import ATTENTION
from optkit.graph.ops.record import Work
from optkit.graph.relative import bound_to_positions
from optkit.graph.states import KVSpec
from optkit.graph.stored import StoredTensor
from optkit.graph.variants import SharedWeights
from optkit.lowering import gpu_rewrites, kv_tables, precision
from optkit.lowering.bind import bind, kernel_of, weight_arguments
from optkit.lowering.by_tokens import ByTokens
from optkit.lowering.streamed import StoredLinear, is_stored_op, keep_stored
from optkit.machine.stack_room import OF_A_STEP, with_stack_room

if TYPE_CHECKING:
    from optkit.kernels.cpu.call_list import CallList
    from optkit.kernels.cpu.program import Program
    from optkit.lowering.launch_plan import Programs
    from optkit.machine.target import Target


OPS_A_PART = 8  # nodes between two checks for cancellation; a program is one node


class Specialized(Protocol):
    """Another function of a bound graph, for steps of some sizes."""

    @property
    def module(self) -> fx.GraphModule: ...

    def serves(self, tokens: int) -> bool:
        """Return True where ``module`` runs the steps of ``tokens`` tokens."""
        ...


Specialize = Callable[[Graph], Specialized]  # takes a bound graph, and uses it up
Packed = Callable[[int], None]  # takes the bytes of the weights of a node whose weights were packed


@dataclass(frozen=True)
class LoweredVariant:
    """The function of a graph in steps of up to ``limit`` tokens; None is any number.

    ``special`` is a second function, for the steps of ``special.serves``; None without one.
    """

    limit: int | None
    module: fx.GraphModule
    meta: GraphMeta
    kernels: dict[str, str]
    special: Specialized | None = None

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        return tuple(str(n.target) for n in self.module.graph.nodes if n.op == "placeholder")

    @cached_property
    def programs(self) -> list[Program]:
        return [n.target for n in self.module.graph.nodes if hasattr(n.target, "constant_at")]

    @property
    def call_lists(self) -> list[CallList]:
        """The native calls of the programs."""
        return [program.calls for program in self.programs]

    def tensors(self) -> list[Tensor]:
        """The packed weights."""
        return [*self.module.buffers(), *(t for program in self.programs for t in program.constants)]

    def workspace_bytes(self, sizes: tuple[int, int]) -> int:
        return max((p.calls.workspace_bytes(sizes) for p in self.programs), default=0)

    @with_stack_room(OF_A_STEP)
    def run(self, inputs: Mapping[str, Tensor], tokens: int) -> Tensor:
        special = self.special
        module = special.module if special is not None and special.serves(tokens) else self.module
        return module(*[inputs[name] for name in self.inputs])


class Executable(ByTokens[LoweredVariant]):
    """A lowered graph: a call with the batch inputs of docs/architecture.md returns logits [L, V] float32.

    ``variants`` are the variants by number of tokens (``optkit.graph.variants``), the last for any number.
    ``keeps_all`` is the reason why sequences keep all their tokens, empty where a rolling window may forget some.
    """

    def __init__(self, lowered: Sequence[LoweredVariant], keeps_all: str = "") -> None:
        self.variants, meta, self.keeps_all = tuple(lowered), lowered[-1].meta, keeps_all
        self.inputs = tuple(dict.fromkeys(name for variant in lowered for name in variant.inputs))
        self.states = meta.states
        self.kv_specs: list[KVSpec] = list(meta.kv_specs)
        self.further_inputs = kv_layout(meta.states).further_inputs
        self.vocab_size = meta.vocab_size
        self.max_model_len = meta.max_model_len
        self.device = next((b.device for b in self.module.buffers()), torch.device("cpu"))
        self.kernels = {name: kernel for variant in lowered for name, kernel in variant.kernels.items()}

    @property
    def module(self) -> fx.GraphModule:
        """The function for any number of tokens."""
        return self.variants[-1].module

    @property
    def special(self) -> Specialized | None:
        """The function that runs steps of some sizes instead of ``module``."""
        return self.variants[-1].special

    @property
    def is_streamed(self) -> bool:
        """True where a step reads float weights from disk."""
        nodes = [node for variant in self.variants for node in variant.module.graph.nodes]
        return any(isinstance(node.target, StoredLinear) for node in nodes)

    def at(self, tokens: int) -> Executable:
        """The model with the variant for ``tokens`` tokens in steps of any number."""
        return Executable([replace(self.variant(tokens), limit=None)], self.keeps_all)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weights; shared memory counts once."""
        return sum(
            {
                address(t): t.numel() * t.itemsize for variant in self.variants for t in variant.tensors()
            }.values()
        )

    @torch.inference_mode()
    def __call__(self, inputs: Mapping[str, Tensor]) -> Tensor:
        tokens = inputs["input_ids"].shape[0]
        if self.further_inputs:
            inputs = with_tables(inputs, self.further_inputs)
        return self.variant(tokens).run(inputs, tokens)


def address(tensor: Tensor) -> int:
    """A number equal for tensors with shared memory; tensors in oneDNN's own layout have no address to compare."""
    return tensor.data_ptr() if tensor.layout is torch.strided else id(tensor)


def lower(
    graph: Graph,
    target: Target | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    programs: bool = True,
    consume: bool = False,
    packed: Packed | None = None,
    specialize: Specialize | None = None,
    streamed: bool = False,
    shared: SharedWeights | None = None,
) -> Executable:
    """Make ``graph`` executable on ``target``; without a target every op runs the reference.

    For a GPU the graph is rewritten (``gpu_rewrites``) and computes in ``dtype`` (``precision``), and the weights go
    to ``device``, by default the GPU; a CPU computes in float32. ``programs=False`` leaves every kernel call to
    Python, for comparison; results are the same to the bit. ``consume=True`` uses ``graph`` up: each weight is freed
    after packing, and memory holds a single copy. ``packed`` is called after the packing of a node. ``specialize``
    makes a second function of the bound graph, on a CPU (``optkit.lowering.compiled.hook``). Each variant of the
    graph's layers is lowered separately. ``streamed`` leaves float weights on disk (``optkit.lowering.streamed``).
    ``shared`` has the weights that other graphs of the caller read, too.
    """
    spans, keeps_all = variants.spans(graph), bound_to_positions(graph)
    if not spans:
        working = graph if consume else graph.clone()
        whole = lower_variant(
            working, target, None, device, dtype, programs, specialize, shared, packed, streamed
        )
        return Executable([whole], keeps_all)
    parts = [variants.at(graph, tokens) for tokens in spans.values()]
    shared = shared or SharedWeights()
    shared.names |= SharedWeights(parts).names
    lowered = []
    for limit, part in zip([*variants.limits(graph), None], parts, strict=True):
        lowered.append(
            lower_variant(part, target, limit, device, dtype, programs, None, shared, packed, streamed)
        )
    if consume:
        graph.weights.clear()
    return Executable(lowered, keeps_all)


def lower_variant(
    working: Graph,
    target: Target | None,
    limit: int | None,
    device: torch.device | str | None,
    dtype: torch.dtype,
    programs: bool,
    specialize: Specialize | None,
    shared: SharedWeights | None = None,
    packed: Packed | None = None,
    streamed: bool = False,
) -> LoweredVariant:
    """``working``, which is used up, as the function for steps of up to ``limit`` tokens; see ``lower``."""
    rounding = torch.float32
    if target is not None and target.kind == "cuda":
        rounding = dtype
        gpu_rewrites.rewrite(working, target)
        precision.narrow(working, dtype, device or target.device, shared)
        place_created(working, device or target.device)
    else:
        keep_stored(working, target, linears=streamed)
    kv_tables.connect(working)
    calls = [node for node in working.fx.nodes if node.op == "call_function" and not is_stored_op(node)]
    picked = {node: kernel for node in calls if (kernel := kernel_of(working, node, target))}
    if target is not None and torch.device(device or target.device).type == "cuda":
        check_latent(working, picked, target)
        check_experts(working, picked, target)
        check_recurrent(working, picked, target)
    chosen = {node.name: kernel.name for node, kernel in picked.items()}
    native = native_programs(working, picked) if programs and target and target.kind == "cpu" else None
    shared = shared or SharedWeights()
    shared.names |= read_by_several(calls)
    for node, kernel in picked.items():
        num_bytes = sum(weight.nbytes for weight in weight_arguments(working, node).values())
        bind(working, node, kernel, shared)
        if packed is not None:
            packed(num_bytes)
    read_stored(working, shared)
    if rounding != torch.float32:
        precision.round_references(working, rounding)
    special = specialize(working.clone()) if specialize and rounding == torch.float32 else None
    if native is not None:
        chosen |= {node.name: "native" for node in native.ops}
        native.install()
    return LoweredVariant(limit, graph_module(working, nn.Module()), working.meta, chosen, special)


def read_stored(graph: Graph, shared: SharedWeights) -> None:
    """Read the weights on disk that no kernel has packed; variants share the result."""
    for name, weight in graph.weights.items():
        if isinstance(weight.stored, StoredTensor):
            weight.value = shared.once(("read", name), [name], lambda weight=weight: weight.value)  # type: ignore[misc]


def place_created(graph: Graph, device: torch.device | str) -> None:
    """Make tensors of numbers alone, such as ``arange``, on ``device``, where their readers run."""
    for node in graph.fx.nodes:
        if is_creator(node.target):
            node.kwargs = {**node.kwargs, "device": device}


def read_by_several(calls: Sequence[fx.Node]) -> set[str]:
    """Names of the weights that several of ``calls`` read, such as a head and an embedding."""
    count = Counter(str(n.target) for call in calls for n in call.all_input_nodes if n.op == "get_attr")
    return {name for name in count if count[name] > 1}


def check_experts(graph: Graph, picked: Container[fx.Node], target: Target) -> None:
    """Refuse experts without a kernel on a GPU: in every layer the reference waits for sizes on the host."""
    if any(node not in picked for node in graph.calls(*ops.OF_EXPERTS.values())):
        raise UserError(
            "mixture-of-experts layers have a kernel for bfloat16 on Hopper GPUs alone",
            where=target.name,
            fix="use an H100 or H200 with runtime.compute_dtype bfloat16, or a model without experts",
        )


def check_recurrent(graph: Graph, picked: Container[fx.Node], target: Target) -> None:
    """Refuse states without a kernel on a GPU: the reference reads the batch on the host, token by token."""
    calls = [
        node for node in graph.fx.nodes if (op := ops.record_of(node.target)) and op.work is Work.RECURRENT
    ]
    if any(node not in picked for node in calls):
        raise UserError(
            "convolutions and scans with a recurrent state have no kernel for GPUs",
            where=target.name,
            fix="run the model on a CPU",
        )


def check_latent(graph: Graph, picked: Container[fx.Node], target: Target) -> None:
    """Refuse latent KV without a kernel on a GPU: the reference reads the batch on the host."""
    latent = {spec.inputs[0] for spec in graph.meta.kv_specs if spec.latent}
    calls = [n for n in graph.calls(*ATTENTION) if str(ops.argument(n, "k_cache").target) in latent]
    if any(node not in picked for node in calls):
        raise UserError(
            "attention over latent KV has no kernel for GPUs",
            where=target.name,
            fix="optimize the model for the GPU without the pass latent_kv, or run it on a CPU",
        )


def graph_module(graph: Graph, root: nn.Module) -> fx.GraphModule:
    """``graph`` as a module, the weights as buffers of ``root`` under short names."""
    graph.prune()
    names: dict[str, str] = {}
    for node in graph.fx.nodes:
        if node.op == "get_attr":
            name = str(node.target)
            if name not in names:
                names[name] = f"w{len(names)}"
                root.register_buffer(names[name], graph.weights[name].value)
            node.target = names[name]
    insert_checks(graph.fx)
    return fx.GraphModule(root, graph.fx)


def insert_checks(graph: fx.Graph) -> None:
    """Insert a check for cancellation (``optkit.cancellation``) after each ``OPS_A_PART`` computing nodes."""
    computing = [node for node in graph.nodes if node.op in ("call_function", "call_module")]
    for node in computing[OPS_A_PART::OPS_A_PART]:
        with graph.inserting_before(node):
            graph.call_function(check_cancelled)


def native_programs(graph: Graph, picked: Mapping[fx.Node, kernels.Kernel]) -> Programs | None:
    """The programs of ``graph``, None without native kernels."""
    from optkit.kernels.cpu import native
    from optkit.lowering.launch_plan import Programs

    if not native.available():
        return None
    in_table = {kernel.op for kernel in kernels.table()}  # not picked, they run by their reference
    able = {node for node in graph.fx.nodes if op_name(node.target) not in in_table}
    return Programs(graph, able | {node for node, kernel in picked.items() if kernel.name == "native"})
