"""The artifact directory and its manifest, ``optkit/manifest.json``.

Plain transformers and vLLM load the directory where they have formats for its layers. The folder ``optkit/`` is
optkit's own: ``graph.json`` is the optimized graph, ``constants.safetensors`` holds tensors absent from every
checkpoint, ``packed.safetensors`` weights in layouts of optkit alone, or all weights, ``recipe.yaml`` the resolved
recipe, ``report.html`` and ``report.json`` the measurements, ``candidates.json`` the candidates that were measured.
``native/`` is the code tier, compiled layers that run only where ``optkit.lowering.compiled.code_cache`` allows code;
all other files are data (docs/artifact.md). The manifest lists every file with sha256 and size.

Times, and choices by times, are in the reports, the candidates and the code tier alone (``MEASURED``). Every other
byte follows from source, recipe, versions and decisions; ``digest`` in the manifest is a hash of the manifest without
the entries of files with times.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from optkit.errors import UserError
from optkit.machine.checksums import sha256_file
from optkit.untrusted_json import Name, Schema, Size, check, parse_bounded, read_bounded

FORMAT, SCHEMA_VERSION = "optkit-artifact", 1
INTERNAL = "optkit"
NATIVE = "optkit/native"
CANDIDATES = "optkit/candidates.json"  # layers of inexact passes, and of the candidates of one_of
MANIFEST = "optkit/manifest.json"
SAFE_PATH = re.compile(r"(?:optkit/(?:native/)?)?[A-Za-z0-9._-]{1,128}", re.ASCII)
MEASURED = re.compile(r"optkit/(?:report\.(?:json|html)|candidates\.json|native/.*)", re.ASCII)
MAX_MANIFEST_BYTES = 16 << 20


class FileEntry(Schema):
    """A file in the manifest."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    bytes: Size


class AdapterEntry(Schema):
    """An adapter merged into the source model."""

    name: Name
    digest: Name


class SourceEntry(Schema):
    """The source model of an artifact."""

    name: Name
    digest: Name
    adapters: list[AdapterEntry] = Field(default_factory=list)
    notes: list[Annotated[str, Field(max_length=1000)]] = Field(default_factory=list)


class PlugInEntry(Schema):
    """A plug-in with ops in the graph."""

    package: Name
    version: Name


class Manifest(Schema):
    """``optkit/manifest.json``. Files written by hand may leave out what only people read."""

    format: Literal["optkit-artifact"]
    schema_version: Literal[1]
    name: Name
    source: SourceEntry = Field(default_factory=lambda: SourceEntry(name="", digest=""))
    recipe: dict[str, Any] = Field(default_factory=dict)
    passes: list[dict[str, Any]] = Field(default_factory=list)
    environment: dict[Name, Name] = Field(default_factory=dict)
    plugins: dict[Name, PlugInEntry] = Field(default_factory=dict)
    files: dict[str, FileEntry]
    digest: Name = ""


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of an artifact directory, with checked types.

    Raises:
        UserError: the directory is no artifact, or the manifest is damaged or of another version.
    """
    file = directory / MANIFEST
    if not directory.is_dir():
        reason = "it is no directory" if directory.exists() else "there is no such directory"
        raise UserError(reason, where=str(directory), fix="give the path of an artifact")
    if not file.is_file() or file.is_symlink():
        raise UserError(
            f"it is not an optkit artifact (no {MANIFEST})",
            where=str(directory),
            fix="make one with: optkit optimize MODEL --recipe ttft-cpu -o DIR",
        )
    manifest = parse_bounded(
        read_bounded(file, MAX_MANIFEST_BYTES), str(file), "the manifest is damaged: it is"
    )
    version = [manifest.get(key) for key in ("format", "schema_version")]
    if None not in version and version != [FORMAT, SCHEMA_VERSION]:
        raise UserError(f"this optkit reads artifacts of schema version {SCHEMA_VERSION}", where=str(file))
    entries = check(Manifest, manifest, str(file), "the manifest is damaged").files
    for name in entries:
        if not SAFE_PATH.fullmatch(name) or name == MANIFEST:
            raise UserError(f"the manifest names a file outside the artifact: {name!r:.80}", where=str(file))
    return manifest


def is_artifact(directory: Path) -> bool:
    """True when ``directory`` has a readable artifact manifest."""
    try:
        read_manifest(directory)
    except UserError:
        return False
    return True


def problems(directory: Path, manifest: Mapping[str, Any]) -> Iterator[str]:
    """Every difference between the files and the manifest: missing, extra, not a plain file, changed."""
    listed = manifest["files"]
    found = dict(walk(directory))
    found.pop(MANIFEST, None)
    for name in sorted(set(found) - set(listed)):
        yield f"{name} is not in the manifest"
    for name in sorted(listed):
        if name not in found:
            yield f"{name} is missing"
        elif not stat.S_ISREG(found[name].st_mode):
            yield f"{name} is not a regular file"
        elif found[name].st_size != listed[name]["bytes"]:
            yield f"{name} has {found[name].st_size} bytes, the manifest says {listed[name]['bytes']}"
        elif sha256_file(directory / name) != listed[name]["sha256"]:
            yield f"{name} was changed (sha256 differs from the manifest)"
    if manifest.get("digest", "") not in ("", content_digest(manifest)):
        yield "the digest in the manifest is not that of its content"


def walk(directory: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Relative names of all files below ``directory``, links not followed."""
    for root, folders, files in os.walk(directory):
        for name in [*files, *(f for f in folders if (Path(root) / f).is_symlink())]:
            path = Path(root) / name
            yield path.relative_to(directory).as_posix(), path.lstat()


def write_manifest(directory: Path, content: Mapping[str, Any]) -> None:
    """Hash everything in ``directory`` and write the manifest, last."""
    files = {
        name: {"sha256": sha256_file(directory / name), "bytes": info.st_size}
        for name, info in sorted(walk(directory))
    }
    manifest = {"format": FORMAT, "schema_version": SCHEMA_VERSION, **content, "files": files}
    manifest["digest"] = content_digest(manifest)
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=False) + "\n", "utf-8")


def content_digest(manifest: Mapping[str, Any]) -> str:
    """sha256 of an artifact without measurements: equal digests mean the same model."""
    files = {name: entry for name, entry in manifest["files"].items() if not MEASURED.fullmatch(name)}
    content = {key: value for key, value in manifest.items() if key != "digest"} | {"files": files}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
