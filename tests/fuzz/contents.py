"""The contents of an artifact in memory, where they are changed, and back on disk with hashes that are right."""

from __future__ import annotations

import copy
import json
import shutil
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optkit.artifact.manifest import MANIFEST, write_manifest

GRAPH, RECIPE, CONFIG = "optkit/graph.json", "optkit/recipe.yaml", "config.json"
MANIFEST_KEYS = ("name", "source", "recipe", "passes", "environment")


@dataclass
class Stored:
    """One tensor of a safetensors file: its entry in the header, without the offsets, and its bytes."""

    dtype: str
    shape: list[int]
    data: bytes


@dataclass
class Contents:
    """An artifact: ``data`` are its JSON files, ``tensors`` its safetensors files, ``other`` the rest.

    ``headers`` are changes of safetensors headers that come last, after the offsets: key, then the new value.
    ``manifest`` are changes of the manifest that come after its hashes: a function that changes the parsed file.
    """

    data: dict[str, Any]
    tensors: dict[str, dict[str, Stored]]
    other: dict[str, bytes]
    manifest: dict[str, Any]
    headers: list[tuple[str, str, str, Any]] = field(default_factory=list)
    manifest_changes: list[Any] = field(default_factory=list)

    @property
    def graph(self) -> dict[str, Any]:
        return self.data[GRAPH]

    def copy(self) -> Contents:
        return copy.deepcopy(self)

    def find(self, name: str) -> Stored | None:
        """The tensor called ``name`` in whichever file has it."""
        return next((tensors[name] for tensors in self.tensors.values() if name in tensors), None)

    def write(self, directory: Path) -> None:
        """Make ``directory`` this artifact."""
        shutil.rmtree(directory, ignore_errors=True)
        (directory / "optkit").mkdir(parents=True)
        for name, value in self.data.items():
            (directory / name).write_text(json.dumps(value))
        for name, tensors in self.tensors.items():
            changes = [change[1:] for change in self.headers if change[0] == name]
            (directory / name).write_bytes(safetensors_bytes(tensors, changes))
        for name, content in self.other.items():
            (directory / name).write_bytes(content)
        write_manifest(directory, self.manifest)
        self._change_manifest(directory / MANIFEST)

    def _change_manifest(self, file: Path) -> None:
        for change in self.manifest_changes:
            manifest = json.loads(file.read_text())
            change(manifest)
            file.write_text(json.dumps(manifest))


def read_contents(directory: Path) -> Contents:
    """The artifact in ``directory``."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    names = {path.relative_to(directory).as_posix(): path for path in files}
    manifest = json.loads(names.pop(MANIFEST).read_text())
    tensors = {n: read_safetensors(p.read_bytes()) for n, p in names.items() if n.endswith(".safetensors")}
    data = {name: json.loads(names[name].read_text()) for name in (GRAPH, CONFIG)}
    other = {n: p.read_bytes() for n, p in names.items() if n not in tensors and n not in data}
    return Contents(data, tensors, other, {key: manifest[key] for key in MANIFEST_KEYS})


def read_safetensors(content: bytes) -> dict[str, Stored]:
    (length,) = struct.unpack_from("<Q", content)
    header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return {n: Stored(e["dtype"], e["shape"], body[slice(*e["data_offsets"])]) for n, e in entries.items()}


def safetensors_bytes(tensors: dict[str, Stored], changes: list[tuple[str, str, Any]]) -> bytes:
    """The file of ``tensors``; ``changes`` are (tensor, key, value) of the finished header."""
    header, at = dict[str, Any](), 0
    for name, tensor in tensors.items():
        offsets = [at, at := at + len(tensor.data)]
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
    for name, key, value in changes:
        if name in header:
            header[name][key] = value
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(tensor.data for tensor in tensors.values())
