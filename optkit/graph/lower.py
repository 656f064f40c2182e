"""Lowering: each op of a graph becomes the kernel that runs it, and the graph becomes a Python function.

``lower`` picks a kernel per node (``kernels.select``, or the kernel a pass pinned), lets kernels pack
their weights once, and compiles the FX graph to straight-line Python: no interpreter at run time, values freed
after their last use. Stretches of native kernels become programs (``optkit.graph.programs``). Where compiled code is
at hand (``optkit.code_tier``) the graph is lowered a second time, over the same packed weights, with layers that call
it; a step runs there if its number of tokens has code, else in the first. Lowering itself never compiles.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx, nn

from optkit import kernels
from optkit.graph import gpu_rewrites, precision
from optkit.graph.bind import bind, kernel_of
from optkit.graph.ir import Graph, KVSpec
from optkit.graph.ops import op_name

if TYPE_CHECKING:
    from optkit.graph.compiled_region import CompiledRegion, Variant
    from optkit.graph.programs import Programs
    from optkit.graph.region_lowering import RegionSource
    from optkit.target import Target


@dataclass(frozen=True)
class CompiledCode:
    """Code for the layers of a graph: what it was made from, and the functions by number of tokens."""

    source: RegionSource
    variants: tuple[Variant, ...]


class Executable:
    """A lowered graph: call it with the batch inputs of docs/architecture.md, get logits [L, V] float32.

    ``compiled`` is the same model with compiled layers, for the steps that it ``serves``; None without code.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        graph: Graph,
        chosen: dict[str, str],
        compiled: tuple[fx.GraphModule, CompiledRegion] | None = None,
    ) -> None:
        self.module, self.compiled = module, compiled
        self.inputs = tuple(str(n.target) for n in module.graph.nodes if n.op == "placeholder")
        self.kv_specs: list[KVSpec] = list(graph.meta.kv_specs)
        self.vocab_size = graph.meta.vocab_size
        self.max_model_len = graph.meta.max_model_len
        self.device = next((b.device for b in module.buffers()), torch.device("cpu"))
        self.kernels = chosen
        self._programs = [n.target for n in module.graph.nodes if hasattr(n.target, "bytes_per_row")]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as they are packed, those that share memory counted once."""
        tensors = [*self.module.buffers(), *(t for program in self._programs for t in program.constants)]
        return sum({t.data_ptr(): t.nbytes for t in tensors}.values())

    def workspace_bytes(self, num_tokens: int, num_rows: int) -> int:
        """Memory that native programs work in, for a step of ``num_tokens`` tokens and ``num_rows`` rows of logits."""
        sizes = (num_tokens, num_rows)
        return max((sum(map(operator.mul, sizes, p.bytes_per_row)) for p in self._programs), default=0)

    @torch.inference_mode()
    def __call__(self, inputs: Mapping[str, Tensor]) -> Tensor:
        module = self.module
        if self.compiled is not None and self.compiled[1].serves(inputs["input_ids"].shape[0]):
            module = self.compiled[0]
        return module(*[inputs[name] for name in self.inputs])


def lower(
    graph: Graph,
    target: Target | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    programs: bool = True,
    consume: bool = False,
    code: CompiledCode | None = None,
) -> Executable:
    """Make ``graph`` executable on ``target``; without a target every op runs its reference.

    For a GPU the graph is rewritten (``gpu_rewrites``), made to compute in ``dtype`` (``precision``) and its weights
    go to ``device``, by default the GPU; a CPU computes in float32.
    ``programs=False`` leaves every kernel call to Python, for comparison; results are the same to the bit.
    ``consume=True`` uses ``graph`` up: each weight goes as soon as it is packed, so that no two copies are held.
    ``code`` are compiled layers of this very graph; without them its compile plan means nothing. On a GPU there are
    CUDA graphs in their place (``optkit.runtime.cuda``).
    """
    working = graph if consume else graph.clone()
    rounding = torch.float32
    if target is not None and target.kind == "cuda":
        rounding = dtype
        gpu_rewrites.rewrite(working, target)
        precision.narrow(working, dtype, device or target.device)
    calls = [node for node in working.fx.nodes if node.op == "call_function"]
    picked = {node: kernel for node in calls if (kernel := kernel_of(working, node, target))}
    chosen = {node.name: kernel.name for node, kernel in picked.items()}
    native = native_programs(working, picked) if programs and target and target.kind == "cpu" else None
    for node, kernel in picked.items():
        bind(working, node, kernel)
    if rounding != torch.float32:
        precision.round_references(working, rounding)
    compiled = compiled_module(working.clone(), code) if code and rounding == torch.float32 else None
    if native is not None:
        chosen |= {node.name: "native" for node in native.ops}
        native.install()
    return Executable(graph_module(working, nn.Module()), working, chosen, compiled)


def compiled_module(graph: Graph, code: CompiledCode) -> tuple[fx.GraphModule, CompiledRegion]:
    """The bound ``graph`` with calls of ``code`` in the place of its planned layers."""
    from optkit.graph.region_lowering import install

    root = nn.Module()
    region = install(graph, root, code.source, code.variants)
    return graph_module(graph, root), region


def graph_module(graph: Graph, root: nn.Module) -> fx.GraphModule:
    """``graph`` as a module, its weights as buffers of ``root`` under short names."""
    graph.prune()
    names: dict[str, str] = {}
    for node in graph.fx.nodes:
        if node.op == "get_attr":
            name = str(node.target)
            if name not in names:
                names[name] = f"w{len(names)}"
                root.register_buffer(names[name], graph.weights[name].value)
            node.target = names[name]
    return fx.GraphModule(root, graph.fx)


def native_programs(graph: Graph, picked: Mapping[fx.Node, kernels.Kernel]) -> Programs | None:
    """The parts of ``graph`` that run as programs, or None where there are no native kernels."""
    from optkit.graph.programs import Programs
    from optkit.kernels.cpu import native

    if not native.available():
        return None
    in_table = {kernel.op for kernel in kernels.table()}  # not picked, they run by their reference
    able = {node for node in graph.fx.nodes if op_name(node.target) not in in_table}
    return Programs(graph, able | {node for node, kernel in picked.items() if kernel.name == "native"})
