"""The files of a finished step: the graph, the tensors missing in the parent state, and the record.

A tensor of a graph lies in the source checkpoint, in the files of an earlier step, or in the files of the step;
``index.json`` has the ``Place``. Tensors have the names of the checkpoint. Constants, which are in no checkpoint, and
the float layers behind quantized ops (``optkit.checkpoint.insertion``) have names with a prefix.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optkit.checkpoint.insertion import FLOAT_ORIGIN, FloatOrigin, float_origins
from optkit.checkpoint.safetensors_writer import save_tensors
from optkit.checkpoint.tensors import build, same, stored, values_of
from optkit.graph.ir import Graph, Origin, Part, Weight
from optkit.graph.serialize import decode_dtype, dtype_name, graph_from_json, graph_to_json
from optkit.graph.stored import Place, StoredTensor
from optkit.machine.checksums import list_finished
from optkit.pipeline.records import PassRecord
from optkit.pipeline.step import Step

GRAPH, TENSORS, INDEX, RECORD = "graph.json", "tensors.safetensors", "index.json", "record.json"
FILES = (GRAPH, TENSORS, INDEX, RECORD)


@dataclass(frozen=True)
class State:
    """A finished step: graph and record after the step, and the places of the graph's tensors by name.

    Tensors without an entry in ``places`` lie in the source under their own name.
    """

    step: Step
    graph: Graph
    record: dict[str, Any]
    places: Mapping[str, Place]

    @property
    def pass_record(self) -> PassRecord:
        """A new copy of the record of the step's pass."""
        return PassRecord.from_dict(self.record)

    @property
    def effect(self) -> tuple[bool, list[str]] | None:
        """The part of the record with an effect on the graph; None for the capture, which has no record."""
        return self.pass_record.effect if self.record else None


ReadTensor = Callable[[Place], Tensor]
Release = Callable[[int], None]  # see ``StoredTensor``


def tensor_names(name: str, origin: Origin | None) -> list[str]:
    """Names of the stored tensors of weight ``name``."""
    return [f"constant:{name}"] if origin is None else [part.name for part in origin.parts]


def tensors_of(name: str, weight: Weight) -> dict[str, Tensor | StoredTensor]:
    """The stored tensors of weight ``name``."""
    if weight.origin is None:
        return {f"constant:{name}": weight.value.contiguous()}
    return weight.pieces()


def float_name(site: str, name: str) -> str:
    """The name of tensor ``name`` of the float layer behind the quantized op of ``site``."""
    return f"float:{site}:{name}"


# -- writing -----------------------------------------------------------------------------------------------


@dataclass
class Difference:
    """Tensors of a graph in neither the parent state nor the source, collected for the step ``key``.

    Attributes:
        new: the tensors to write, by name.
        places: places of all tensors, without tensors of the source under their own name.
    """

    key: str
    parent: State | None
    source: Container[str]
    read: ReadTensor
    release: Release | None = None
    new: dict[str, Tensor | StoredTensor] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    addresses: dict[Any, str] = field(default_factory=dict)

    def add_graph(self, graph: Graph) -> None:
        """Add all weights of ``graph``, and the float layers behind quantized ops."""
        known = {id(origin) for origin in float_origins(self.parent.graph).values()} if self.parent else set()
        for name, weight in graph.weights.items():
            self.add(weight, name, {name: name for name in tensor_names(name, weight.origin)})
        for origin in float_origins(graph).values():
            names = tensor_names(origin.weight_name, origin.origin)
            floats = {name: float_name(origin.site, name) for name in names}
            if id(origin) in known and self.parent is not None:
                self.places |= {name: self.parent.places[name] for name in floats.values()}
            else:
                self.add(Weight(origin.read(), origin.origin), origin.weight_name, floats)

    def add(self, weight: Weight, name: str, names: Mapping[str, str]) -> None:
        """Add a weight, called ``name`` in the graph, whose tensors are kept under ``names``."""
        before = self.parent.graph.weights.get(name) if self.parent else None
        if before is not None and weight.is_same(before) and before.origin == weight.origin:
            for tensor, kept in names.items():
                self.put(kept, self.place_before(tensor))
            return
        for tensor, value in tensors_of(name, weight).items():
            self.put(names[tensor], self.found(tensor, value) or self.own(names[tensor], value))

    def found(self, name: str, value: Tensor | StoredTensor) -> Place | None:
        """The place of ``value``, tensor ``name``, on disk: its own place if stored, or that of an equal tensor."""
        if isinstance(value, StoredTensor) and len(value.parts) == 1:
            return value.places[0]
        values = values_of(value)
        if self.release is not None:
            self.release(values.nbytes)
        return next((place for place in self.candidates(name) if same(values, self.read(place))), None)

    def put(self, name: str, place: Place) -> None:
        if place != Place(None, name):
            self.places[name] = place

    def place_before(self, name: str) -> Place:
        """The place of tensor ``name`` in the parent state."""
        return self.parent.places.get(name, Place(None, name)) if self.parent else Place(None, name)

    def candidates(self, name: str) -> Iterator[Place]:
        """Places of tensors to compare with a new value of tensor ``name``."""
        before = self.parent.places if self.parent else {}
        place = self.place_before(name)
        if place.step is not None or place.name in self.source:
            yield place
        yield from (
            place for key, place in before.items() if key.startswith("float:") and key.endswith(f":{name}")
        )

    def own(self, name: str, value: Tensor | StoredTensor) -> Place:
        """A place in the files of the new step; equal memory is stored once."""
        address: Any
        if isinstance(value, StoredTensor):
            address = value.key
        else:
            address = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if address not in self.addresses:
            self.addresses[address] = name
            self.new[name] = value
        return Place(self.key, self.addresses[address])


def write_state(directory: Path, graph: Graph, record: Mapping[str, Any], difference: Difference) -> None:
    """Write the files of a state to ``directory``."""
    floats = {node.name: encode_float(origin) for node, origin in float_origins(graph).items()}
    places = {name: [place.step, place.name] for name, place in difference.places.items()}
    (directory / GRAPH).write_text(graph_to_json(graph), "utf-8")
    save_tensors(difference.new, directory / TENSORS, release=difference.release)
    (directory / INDEX).write_text(json.dumps({"places": places, "floats": floats}), "utf-8")
    (directory / RECORD).write_text(json.dumps(record), "utf-8")
    list_finished(directory, *FILES)


def encode_float(origin: FloatOrigin) -> dict[str, Any]:
    """A float layer as JSON, without the weight."""
    parts = [[part.name, part.rows] for part in origin.origin.parts] if origin.origin else None
    layout = origin.origin or Origin(())
    kept = {"site": origin.site, "weight": origin.weight_name, "dtype": dtype_name(origin.dtype)}
    return kept | {"from": parts, "transposed": layout.transposed, "stacked": layout.stacked}


# -- reading -----------------------------------------------------------------------------------------------


def read_state(
    directory: Path, step: Step, read: ReadTensor, parent: State | None, release: Release | None = None
) -> State:
    """The state of ``step``. Weights equal to weights of ``parent`` are the parent's tensors in memory.

    With ``release`` weights stay on disk (``StoredTensor``).
    """
    index = json.loads((directory / INDEX).read_text("utf-8"))
    places = {name: Place(*place) for name, place in index["places"].items()}

    def load(name: str, origin: Origin | None, dtype: torch.dtype) -> Tensor | StoredTensor:
        if parent is not None and is_shared(parent, places, name, origin, dtype):
            return parent.graph.weights[name].stored
        return read_weight(name, origin, dtype, partial(place_of, places), read, release)

    graph = graph_from_json((directory / GRAPH).read_text("utf-8"), load, where=str(directory / GRAPH))
    for node in graph.fx.nodes:
        if node.name in index["floats"]:
            node.meta[FLOAT_ORIGIN] = decode_float(index["floats"][node.name], places, read, release)
    return State(step, graph, json.loads((directory / RECORD).read_text("utf-8")), places)


def place_of(places: Mapping[str, Place], name: str) -> Place:
    """The place of tensor ``name``; the source where none is listed."""
    return places.get(name, Place(None, name))


def is_shared(
    parent: State, places: Mapping[str, Place], name: str, origin: Origin | None, dtype: torch.dtype
) -> bool:
    """True where all tensors of weight ``name`` have the places of the parent's weight."""
    before = parent.graph.weights.get(name)
    if before is None or before.origin != origin or before.dtype != dtype:
        return False
    return all(place_of(places, n) == place_of(parent.places, n) for n in tensor_names(name, origin))


def read_weight(
    name: str,
    origin: Origin | None,
    dtype: torch.dtype,
    place: Callable[[str], Place],
    read: ReadTensor,
    release: Release | None = None,
) -> Tensor | StoredTensor:
    """Weight ``name`` of stored tensors, tensor ``n`` at ``place(n)``; left on disk with ``release``."""
    if origin is None:
        return read(place(tensor_names(name, origin)[0]))
    if release is not None:
        return stored(origin, place, read, dtype, release)
    return build(origin, {tensor: read(place(tensor)) for tensor in tensor_names(name, origin)}, dtype)


def decode_float(
    entry: Mapping[str, Any], places: Mapping[str, Place], read: ReadTensor, release: Release | None = None
) -> FloatOrigin:
    """A float layer with a weight read from disk on demand."""
    parts = entry["from"]
    origin = None
    if parts is not None:
        origin = Origin(tuple(Part(*part) for part in parts), entry["transposed"], entry["stacked"])
    name, site, dtype = entry["weight"], entry["site"], decode_dtype(entry["dtype"])

    def place(tensor: str) -> Place:
        return place_of(places, float_name(site, tensor))

    return FloatOrigin(
        site, name, origin, dtype, lambda: read_weight(name, origin, dtype, place, read, release)
    )


def steps_needed(directory: Path) -> set[str]:
    """Keys of the steps with tensors of a state, the state's own step included."""
    places = json.loads((directory / INDEX).read_text("utf-8"))["places"]
    return {step for step, _ in places.values() if step is not None}
