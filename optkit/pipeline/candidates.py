"""``optkit/candidates.json``: the candidates of a recipe's places as short models, for predictions on other machines.

Which candidate is fastest depends on the machine. So an artifact keeps, for each place with ``one_of``, the graph
before the place and the graph of each candidate: a few layers (``optkit.evaluation.short_models``), shapes without
values, some ten kilobytes each. An inexact pass is a place with a single candidate (``optkit.pipeline.pass_places``).
Another machine measures these layers and so predicts the choice of ``optkit optimize`` there, without the source model.
Candidates beyond a bound of quality are left out: quality is the same on every machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from optkit.artifact.manifest import CANDIDATES
from optkit.errors import UserError
from optkit.evaluation.kernel_times import LAYERS
from optkit.evaluation.short_models import Parts
from optkit.evaluation.speed import workload_points
from optkit.graph.ir import Graph, Origin
from optkit.graph.serialize import graph_from_json, graph_to_json
from optkit.graph.shapes import infer_shapes
from optkit.graph.verify import VerifyError, verify
from optkit.recipe.schema import Recipe
from optkit.untrusted_json import Name, Schema, check, parse_bounded, read_bounded

MAX_BYTES = 16 << 20


class ModelEntry(Schema):
    """A model: the graph of some of its layers, and the number of layers between head and tail in the whole."""

    layers: Annotated[int, Field(ge=0, le=1024)]
    graph: dict[str, Any]


class CandidateEntry(ModelEntry):
    """A candidate.

    Attributes:
        passes: their names.
        takes_few: it can be limited to steps of few tokens, in front of another.
        takes_second: another can stand in front of it.
    """

    name: Name
    passes: Annotated[list[Name], Field(max_length=64)]
    takes_few: bool
    takes_second: bool


class PlaceEntry(Schema):
    """A place of the recipe: the kept candidates for prompts and for decode steps (empty: none), and all candidates."""

    prompts: Name
    decode: Name
    before: ModelEntry
    candidates: Annotated[list[CandidateEntry], Field(max_length=64)]


class CandidatesFile(Schema):
    """candidates.json."""

    places: Annotated[dict[Name, PlaceEntry], Field(max_length=64)]


# -- writing -----------------------------------------------------------------------------------------------


def model_entry(graph: Graph, recipe: Recipe) -> dict[str, Any]:
    """A ``ModelEntry`` of ``graph``: its most frequent layers stand for all."""
    parts = Parts(graph, infer_shapes(graph, workload_points(recipe)[0], recipe.runtime.block_size))
    short = graph
    if parts.can_be_cut:
        short = parts.short(max(parts.classes.values(), key=len)[:LAYERS])
    plain = short.clone()
    plain.annotations = {}
    return {"layers": len(parts.layers), "graph": json.loads(graph_to_json(plain))}


def file_text(places: Mapping[str, Mapping[str, Any]]) -> str:
    """The text of candidates.json; ``places`` are of ``PlaceEntry``, by label of the recipe."""
    return json.dumps({"places": places}) + "\n"


# -- reading -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A graph with some layers of a model, and the number of layers in the whole."""

    graph: Graph
    layers: int


def read_places(directory: Path) -> Mapping[str, PlaceEntry]:
    """The places of the artifact in ``directory``; none without the file.

    Raises:
        UserError: the file is damaged.
    """
    file = directory / CANDIDATES
    if not file.exists():
        return {}
    data = parse_bounded(read_bounded(file, MAX_BYTES), str(file))
    return check(CandidatesFile, data, str(file), "the candidates can't be read").places


def read_model(entry: ModelEntry, where: str) -> Model:
    """The model of ``entry``, with shapes for weights.

    Raises:
        UserError: the graph is damaged.
    """

    def load(name: str, origin: Origin | None, dtype: torch.dtype) -> Tensor:
        return torch.empty(entry.graph["weights"][name]["shape"], dtype=dtype, device="meta")

    graph = graph_from_json(json.dumps(entry.graph), load, where)
    try:
        verify(graph)
    except VerifyError as error:
        raise UserError(f"the graph of a candidate is invalid: {error}", where=where) from error
    return Model(graph, entry.layers)
