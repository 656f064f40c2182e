"""The schema of graph.json: types and bounds of everything but the arguments of nodes, which ``serialize`` decodes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from optkit.graph.states import KV_DTYPES, STATE_DTYPES
from optkit.untrusted_json import Name, Schema, Size

MAX_LAYERS, MAX_HEADS, MAX_HEAD_DIM = 1024, 65536, 65536
MAX_VOCABULARY, MAX_LENGTH, MAX_EXPERTS = 1 << 21, 1 << 24, 1 << 16
MAX_RANKS = 64
MAX_STATES, MAX_STATE_SIZE = 4 * MAX_LAYERS, 1 << 20

Layer = Annotated[int, Field(ge=0, lt=MAX_LAYERS)]
Heads = Annotated[int, Field(ge=1, le=MAX_HEADS)]
HeadDim = Annotated[int, Field(ge=1, le=MAX_HEAD_DIM)]
Rows = Annotated[int, Field(ge=0, le=1 << 48)]
PartEntry = Annotated[tuple[Name, Rows], Field(strict=False)]
Parts = Annotated[list[PartEntry], Field(min_length=1)]


class KVEntry(Schema):
    """A ``KVSpec``."""

    layer: Layer
    num_kv_heads: Heads
    head_dim: HeadDim
    v_head_dim: HeadDim
    dtype: Literal[tuple(KV_DTYPES)] = "float32"  # type: ignore[valid-type]
    window: Annotated[int, Field(ge=0, le=MAX_LENGTH)] = 0
    latent: bool = False


class KVState(KVEntry):
    """A ``KVSpec`` in the list of states."""

    kind: Literal["kv"]


class RecurrentState(Schema):
    """A ``RecurrentSpec``."""

    kind: Literal["recurrent"]
    layer: Layer
    name: Name
    shape: Annotated[list[Annotated[int, Field(ge=1, le=MAX_STATE_SIZE)]], Field(min_length=1, max_length=4)]
    dtype: Literal[tuple(STATE_DTYPES)] = "float32"  # type: ignore[valid-type]


StateEntry = Annotated[KVState | RecurrentState, Field(discriminator="kind")]


class MetaEntry(Schema):
    """A ``GraphMeta``; older files have ``kv_specs`` in place of ``states``."""

    model_type: Name
    vocab_size: Annotated[int, Field(ge=1, le=MAX_VOCABULARY)]
    max_model_len: Annotated[int, Field(ge=1, le=MAX_LENGTH)]
    states: Annotated[list[StateEntry], Field(max_length=MAX_STATES)] | None = None
    kv_specs: Annotated[list[KVEntry], Field(max_length=MAX_LAYERS)] | None = None
    input_embedding: Name
    output_embedding: Name

    @model_validator(mode="after")
    def one_list(self) -> MetaEntry:
        """Refuse two lists or none."""
        if (self.states is None) == (self.kv_specs is None):
            raise ValueError("it must have states, or, in an older file, kv_specs")
        return self


class CompilePlan(Schema):
    """Layers to compile (``optkit.lowering.compiled.plan``)."""

    regions: list[list[Name]]
    buckets: list[Annotated[tuple[int, int], Field(strict=False)]] | None = None
    max_buckets: int | None = None
    dynamic_tail: bool = False


class PlanEntry(Schema):
    """``Graph.annotations``."""

    compile: CompilePlan = Field(default_factory=lambda: CompilePlan(regions=[]))
    config: dict[str, Any] = Field(default_factory=dict)
    tensor_parallel: Annotated[int, Field(ge=1, le=MAX_RANKS)] | None = None
    pipeline_parallel: Annotated[int, Field(ge=1, le=MAX_RANKS)] | None = None
    two_four: list[Name] = Field(default_factory=list)
    sparse_density: Annotated[float, Field(ge=0, le=1)] | None = None
    notes: Annotated[list[Annotated[str, Field(max_length=1000)]], Field(max_length=100)] = Field(
        default_factory=list
    )


class WeightEntry(Schema):
    """A weight: a constant, or rows of checkpoint tensors."""

    dtype: Name
    shape: Annotated[list[Size], Field(max_length=16)]
    parts: Parts | None = Field(default=None, alias="from")
    constant: Literal[True] | None = None
    transposed: bool = False
    stacked: Annotated[int, Field(ge=0, le=MAX_EXPERTS)] = 0


class NodeEntry(Schema):
    """A call."""

    name: Name
    op: Name
    args: list[Any]
    kwargs: dict[str, Any] = Field(default_factory=dict)
    kernel: Name | None = None


class GraphFile(Schema):
    """graph.json."""

    format: str
    version: int
    meta: MetaEntry
    plan: PlanEntry
    inputs: list[Name]
    output: Any
    weights: dict[Name, WeightEntry]
    nodes: list[NodeEntry]
