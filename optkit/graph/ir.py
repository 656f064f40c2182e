"""The graph: capture makes a ``Graph``, passes rewrite the graph, the runtime lowers the result.

A ``Graph`` is a ``torch.fx.Graph`` over the dialect of ``optkit.graph.ops`` and a weight store. Weights are
``get_attr`` nodes with the weight's name as target; the batch inputs of docs/architecture.md are placeholders; the only
output is the logits. Passes are ordinary FX rewrites.

A weight has an *origin*: the checkpoint tensors of the weight. A fused q/k/v projection is three checkpoint tensors,
row after row, so a fusion copies nothing on disk, and the artifact keeps the names of transformers and vLLM.
``Origin.split`` is the inverse of ``Origin.build``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from optkit.graph.states import KVSpec, RecurrentSpec, StateSpec, kv_of, recurrent_of, state_inputs
from optkit.graph.stored import StoredTensor
from optkit.kernels.reference import linear

BATCH_INPUTS = (
    "input_ids",
    "positions",
    "slot_mapping",
    "query_start",
    "seq_lens",
    "block_tables",
    "logits_index",
)

TWO_FOUR = "two_four"  # in a graph's annotations: the linear layers, by node, whose weights are 2:4 sparse


@dataclass(frozen=True)
class Part:
    """``rows`` rows of a weight come from the checkpoint tensor ``name``."""

    name: str
    rows: int


@dataclass(frozen=True)
class Origin:
    """The checkpoint tensors of a weight: stacked along dimension 0, then transposed if ``transposed``.

    Conv1D checkpoints (GPT-2) store linear weights as [in, out] and are ``transposed``. A ``stacked`` number E above 0
    says that the only tensor is [E, N, ...], of E experts, and the weight has the rows of all experts: [E * N, ...]. A
    tensor of experts stored as [E, K, N] is also ``transposed``.
    """

    parts: tuple[Part, ...]
    transposed: bool = False
    stacked: int = 0

    def build(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The weight made of ``tensors``, a checkpoint by name."""
        values = [tensors[part.name] for part in self.parts]
        value = values[0] if len(values) == 1 else torch.cat(values)
        value = value.transpose(-2, -1) if self.transposed else value
        return value.flatten(0, 1) if self.stacked else value

    def split(self, value: Tensor) -> dict[str, Tensor]:
        """The checkpoint tensors of ``value`` by name: the inverse of ``build``."""
        if self.stacked:
            value = value.unflatten(0, (self.stacked, -1))
        if self.transposed:
            value = value.transpose(-2, -1)
        pieces = value.split([part.rows for part in self.parts]) if len(self.parts) > 1 else (value,)
        return {part.name: piece.contiguous() for part, piece in zip(self.parts, pieces, strict=True)}

    def renamed(self, old: str, new: str) -> Origin:
        """The origin of a companion tensor: ``.weight`` to ``.weight_scale``, say; stacked ones stay transposed."""
        parts = tuple(Part(p.name.removesuffix(old) + new, p.rows) for p in self.parts)
        return Origin(parts, self.transposed and self.stacked > 0, self.stacked)


@dataclass
class Weight:
    """A tensor of the graph. ``origin`` is None for constants outside of the checkpoint (RoPE frequencies).

    The tensor is in memory, mapped from disk, or a ``StoredTensor``, which is read at each access of ``value``.
    """

    stored: Tensor | StoredTensor
    origin: Origin | None

    @property
    def value(self) -> Tensor:
        """The values; the caller drops a large tensor after use."""
        return self.stored.read() if isinstance(self.stored, StoredTensor) else self.stored

    @value.setter
    def value(self, value: Tensor) -> None:
        self.stored = value

    @property
    def shape(self) -> torch.Size:
        return self.stored.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes

    @property
    def is_meta(self) -> bool:
        """True for a shape without values, as in a dry run."""
        return isinstance(self.stored, Tensor) and self.stored.device.type == "meta"

    @property
    def memory(self) -> Hashable:
        """Equal for weights with the same memory, or the same place on disk."""
        if isinstance(self.stored, StoredTensor):
            return self.stored.key
        return self.stored.untyped_storage().data_ptr()

    def on_meta(self) -> Tensor:
        """A tensor on the meta device with shape and dtype of the weight."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def is_same(self, other: Weight) -> bool:
        """True where both are known to be equal, without a look at the values."""
        if isinstance(self.stored, StoredTensor) and isinstance(other.stored, StoredTensor):
            return self.stored.key == other.stored.key
        return self.stored is other.stored

    def pieces(self) -> dict[str, Tensor | StoredTensor]:
        """The checkpoint tensors by name, see ``Origin.split``; those of a stored tensor stay on disk."""
        if self.origin is None:
            raise ValueError("a constant is no checkpoint tensor")
        stored = self.stored
        if isinstance(stored, StoredTensor) and len(stored.parts) == len(self.origin.parts):
            return {part.name: piece for part, piece in zip(self.origin.parts, stored.split(), strict=True)}
        pieces: dict[str, Tensor | StoredTensor] = {}
        return pieces | self.origin.split(self.value)


@dataclass(frozen=True)
class GraphMeta:
    """Facts about the model for the runtime and the artifact. ``states`` are what its layers keep of a sequence."""

    model_type: str
    vocab_size: int
    max_model_len: int
    states: tuple[StateSpec, ...]
    input_embedding: str  # weight name of the token embedding
    output_embedding: str  # module name of the head, even where its weight is tied

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        """The states that are paged KV."""
        return kv_of(self.states)

    @property
    def recurrent_specs(self) -> tuple[RecurrentSpec, ...]:
        """The states of fixed size."""
        return recurrent_of(self.states)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs that a graph may have: the batch and the pools of states."""
        return BATCH_INPUTS + state_inputs(self.states)

    def with_kv_specs(self, specs: Iterable[KVSpec]) -> GraphMeta:
        """The same facts with ``specs`` in place of all KV; recurrent states stay."""
        return replace(self, states=(*specs, *self.recurrent_specs))


@dataclass
class Graph:
    """A model as a graph.

    ``annotations`` holds execution choices without effect on the math (``compile``: regions), the fields of the
    source's config.json changed by passes (``config``: sizes of a pruned model), and sentences for users on how the
    source was read (``notes``). The key in ``graph.json`` is ``plan``. ``spill`` moves the large results of passes from
    memory to disk; None leaves them in memory.
    """

    fx: fx.Graph
    weights: dict[str, Weight]
    meta: GraphMeta
    annotations: dict[str, Any] = field(default_factory=dict)
    spill: Callable[[Tensor], Tensor] | None = None

    def clone(self) -> Graph:
        """A copy for rewriting. The copy shares the tensors, which no code changes in place."""
        graph = fx.Graph()
        val_map: dict[fx.Node, fx.Node] = {}
        out = graph.graph_copy(self.fx, val_map)
        graph.output(out)
        for old, new in val_map.items():
            new.meta = dict(old.meta)
        return Graph(
            graph,
            {k: replace(w) for k, w in self.weights.items()},
            self.meta,
            copy.deepcopy(self.annotations),
            self.spill,
        )

    @property
    def notes(self) -> list[str]:
        """Sentences for users on how the source was read."""
        return list(self.annotations.get("notes", ()))

    def add_note(self, sentence: str) -> None:
        """Append a sentence to ``notes``."""
        self.annotations["notes"] = [*self.notes, sentence]

    def weight_of(self, node: Any) -> Weight | None:
        """The weight a node reads, or None when the node is no weight."""
        if isinstance(node, fx.Node) and node.op == "get_attr":
            return self.weights.get(str(node.target))
        return None

    def calls(self, *targets: Any) -> Iterator[fx.Node]:
        """The call nodes of the given targets, in execution order."""
        for node in list(self.fx.nodes):
            if node.op == "call_function" and node.target in targets:
                yield node

    def linears(self) -> Iterator[fx.Node]:
        """The float linear layers, in execution order."""
        return self.calls(linear)

    def linear_weight(self, node: fx.Node) -> Tensor:
        """The weight [N, K] of the linear layer ``node``."""
        return self.weight_value(node.args[1])

    def weight_value(self, node: Any) -> Tensor:
        """The tensor of the ``get_attr`` node ``node``."""
        return self.weights[str(node.target)].value

    def linear_shape(self, node: fx.Node) -> tuple[int, int]:
        """[N, K] of the weight of the linear layer ``node``; no value is read."""
        n, k = self.weights[str(node.args[1].target)].shape  # type: ignore[union-attr]
        return n, k

    def set_weight(self, node: Any, value: Tensor) -> None:
        """Replace the tensor of the ``get_attr`` node ``node``; other graphs that share the tensor keep theirs."""
        name = str(node.target)
        self.weights[name] = self.new_weight(value, self.weights[name].origin)

    def new_weight(self, value: Tensor, origin: Origin | None) -> Weight:
        """A weight with the result ``value`` of a pass, moved to disk if the graph has a ``spill``."""
        return Weight(value if self.spill is None else self.spill(value), origin)

    def site_options(self, node: fx.Node) -> dict[str, Any]:
        """The options of a call for ``kernels.select``: the keywords, and dtype and form of the KV pools."""
        pools = {spec.inputs[0]: spec for spec in self.meta.kv_specs}
        read = [pools[str(a.target)] for a in node.all_input_nodes if str(a.target) in pools]
        kv: dict[str, Any] = {"kv_dtype": read[0].dtype} if read else {}
        return {**node.kwargs, **kv, **({"latent": True} if read and read[0].latent else {})}

    def weight_node(self, name: str, before: fx.Node) -> fx.Node:
        """A new ``get_attr`` node for weight ``name`` in front of ``before``."""
        with self.fx.inserting_before(before):
            return self.fx.create_node("get_attr", name, name=name.replace(".", "_"))

    def input(self, name: str) -> fx.Node:
        """The placeholder of batch input ``name``; a new placeholder where no node has read the input so far."""
        nodes = list(self.fx.nodes)
        found = next((node for node in nodes if node.op == "placeholder" and node.target == name), None)
        if found is None:
            with self.fx.inserting_before(nodes[0]):
                found = self.fx.placeholder(name)
        return found

    def prune(self) -> None:
        """Remove nodes nothing reads, then weights no node reads."""
        for node in reversed(list(self.fx.nodes)):
            if node.op in ("call_function", "get_attr") and not node.users:
                self.fx.erase_node(node)
        used = {str(node.target) for node in self.fx.nodes if node.op == "get_attr"}
        self.weights = {name: weight for name, weight in self.weights.items() if name in used}

    @property
    def is_meta(self) -> bool:
        """True where weights are shapes without values, as in a dry run."""
        return any(weight.is_meta for weight in self.weights.values())

    def num_bytes(self) -> int:
        """Bytes of all weights, tied tensors counted once."""
        if self.is_meta:
            return sum(weight.nbytes for weight in self.weights.values())
        return sum({weight.memory: weight.nbytes for weight in self.weights.values()}.values())


def module_name(weight_name: str) -> str:
    """The module a weight belongs to: ``model.layers.0.mlp.up_proj`` for ``....up_proj.weight``."""
    return weight_name.rpartition(".")[0]
