"""The artifact: a directory that plain transformers and vLLM load, plus ``optkit/``.

``optkit/manifest.json`` lists every file with its sha256 and size; ``graph.json`` is the optimized graph,
``constants.safetensors`` what is in no checkpoint, ``packed.safetensors`` weights in forms that only optkit reads,
``recipe.yaml`` the resolved recipe, ``report.html`` and ``report.json`` what was measured. Writing goes to a
temporary directory beside the target, is flushed, then renamed: there is never half an artifact. Opening checks every
hash before anything is loaded. ``native/`` is the code tier, compiled layers that only run where
``optkit.lowering.compiled.code_cache`` says so; everything else is data and always loads (docs/artifact.md).

Times are in the reports and the code tier alone (``MEASURED``). All else is the same to the byte whenever the same
source, recipe and versions decide the same, and ``digest`` in the manifest is one hash of it.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from optkit.errors import UserError
from optkit.machine.checksums import sha256_file
from optkit.machine.locks import locked
from optkit.recipe.schema import Recipe, parse_recipe
from optkit.untrusted_json import Name, Schema, Size, check, parse_bounded, read_bounded

if TYPE_CHECKING:
    from optkit.graph.ir import Graph
    from optkit.lowering.lower import Executable

FORMAT, SCHEMA_VERSION = "optkit-artifact", 1
INTERNAL = "optkit"
NATIVE = "optkit/native"
MANIFEST = "optkit/manifest.json"
SAFE_PATH = re.compile(r"(?:optkit/(?:native/)?)?[A-Za-z0-9._-]{1,128}", re.ASCII)
MEASURED = re.compile(r"optkit/(?:report\.(?:json|html)|native/.*)", re.ASCII)


MAX_MANIFEST_BYTES, MAX_GRAPH_BYTES, MAX_RECIPE_BYTES = 16 << 20, 256 << 20, 1 << 20


class FileEntry(Schema):
    """A file in the manifest."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    bytes: Size


class SourceEntry(Schema):
    """The model that an artifact was made from."""

    name: Name
    digest: Name


class Manifest(Schema):
    """``optkit/manifest.json``. Files written by hand may leave out what only people read."""

    format: Literal["optkit-artifact"]
    schema_version: Literal[1]
    name: Name
    source: SourceEntry = Field(default_factory=lambda: SourceEntry(name="", digest=""))
    recipe: dict[str, Any] = Field(default_factory=dict)
    passes: list[dict[str, Any]] = Field(default_factory=list)
    environment: dict[Name, Name] = Field(default_factory=dict)
    files: dict[str, FileEntry]
    digest: Name = ""


@dataclass(frozen=True)
class Artifact:
    """An opened artifact. ``manifest`` is the parsed manifest; hashes were checked by ``open``."""

    directory: Path
    manifest: Mapping[str, Any]

    @staticmethod
    def open(directory: Path | str, *, verify: bool = True) -> Artifact:
        """Open and check an artifact.

        Raises:
            UserError: not an artifact, of an unknown schema version, or a file is missing, extra or changed.
        """
        path = Path(directory)
        manifest = read_manifest(path)
        artifact = Artifact(path, manifest)
        if verify:
            for problem in problems(path, manifest):
                fix = "make the artifact again; do not serve this one"
                raise UserError(problem, where=str(path), fix=fix)
        return artifact

    @property
    def name(self) -> str:
        return str(self.manifest["name"])

    @property
    def native(self) -> Path:
        """Where the code tier is, if there is one."""
        return self.directory / NATIVE

    @cached_property
    def recipe(self) -> Recipe:
        file = self.directory / INTERNAL / "recipe.yaml"
        return parse_recipe(read_text(file), label=str(file))

    def graph(self) -> Graph:
        """The optimized graph, with weights mapped from the artifact's files."""
        from optkit.checkpoint.compressed_tensors_writer import PACKED_FILE
        from optkit.checkpoint.source import open_source
        from optkit.checkpoint.tensors import Overlay, build, load_tensors
        from optkit.graph.serialize import graph_from_json
        from optkit.graph.verify import VerifyError, verify

        internal = self.directory / INTERNAL
        packed = load_tensors(internal / PACKED_FILE) if (internal / PACKED_FILE).is_file() else {}
        tensors = Overlay(open_source(self.directory), packed)
        constants = load_tensors(internal / "constants.safetensors")
        file = internal / "graph.json"
        graph = graph_from_json(
            read_bounded(file, MAX_GRAPH_BYTES),
            lambda name, origin, dtype: constants[name] if origin is None else build(origin, tensors, dtype),
            where=str(file),
        )
        try:
            verify(graph)  # kernels take raw pointers: shapes are checked before anything runs
        except VerifyError as error:
            raise UserError(f"the graph is invalid: {error}", where=str(file)) from error
        return graph

    def executable(self, *, trust_code: bool = False) -> Executable:
        """The graph lowered for the machine at hand. What is packed is not kept a second time.

        Compiled layers run if they were made on this machine by this user, or are trusted; nothing is compiled.
        """
        from optkit.lowering.compiled.code_cache import find_code
        from optkit.lowering.lower import lower
        from optkit.lowering.precision import compute_dtype
        from optkit.machine.mapped_files import drop_mapped_pages
        from optkit.machine.target import present_target

        target = present_target(
            self.recipe.target,
            where=str(self.directory),
            fix="use it on a machine with an NVIDIA GPU; or optimize the model by a CPU recipe such as ttft-cpu",
        )
        graph = self.graph()
        drop_mapped_pages(self.directory)
        code = find_code(graph, target, self.native, trust=trust_code)
        executable = lower(
            graph, target, consume=True, code=code, dtype=compute_dtype(self.recipe.runtime.compute_dtype)
        )
        drop_mapped_pages(self.directory)
        return executable


# -- reading ---------------------------------------------------------------------------------------------


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of an artifact directory, its shape checked.

    Raises:
        UserError: the directory is no artifact, or the manifest is damaged or of another version.
    """
    file = directory / MANIFEST
    if not directory.is_dir():
        raise UserError(
            "there is no such directory", where=str(directory), fix="give the path of an artifact"
        )
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


def read_text(file: Path) -> str:
    """The text of a small UTF-8 file.

    Raises:
        UserError: it can't be read, or is no such file.
    """
    try:
        return read_bounded(file, MAX_RECIPE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError("it is not UTF-8 text", where=str(file)) from error


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


# -- writing ---------------------------------------------------------------------------------------------


def check_output(out: Path, *, force: bool) -> None:
    """Refuse an output path that would overwrite something, before any work is done.

    Raises:
        UserError: ``out`` exists and ``force`` is false, or ``out`` exists and is not an artifact.
    """
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir() or out.is_symlink() or (any(out.iterdir()) and not is_artifact(out)):
        raise UserError(
            "it exists and is not an optkit artifact, so it will not be replaced",
            where=str(out),
            fix="choose another output directory",
        )
    if any(out.iterdir()) and not force:
        raise UserError("it exists", where=str(out), fix="pass --force to replace this artifact")


@contextmanager
def staging(out: Path, *, force: bool) -> Iterator[Path]:
    """A temporary directory beside ``out`` that becomes ``out`` when the block ends well, and vanishes otherwise."""
    check_output(out, force=force)
    out.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(out)
    directory = Path(tempfile.mkdtemp(prefix=staging_prefix(out), dir=out.parent))
    with locked(directory):
        try:
            yield directory
            flush(directory)
            publish(directory, out)
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def staging_prefix(out: Path) -> str:
    return f".{out.name}.optkit-tmp-"


def remove_abandoned(out: Path) -> None:
    """Remove staging directories of runs that were killed."""
    for left in out.parent.glob(f"{glob.escape(staging_prefix(out))}*"):
        with suppress(FileNotFoundError), locked(left) as held:  # its run may end right now
            if held:
                shutil.rmtree(left, ignore_errors=True)


def flush(directory: Path) -> None:
    """fsync every file and directory, so that the rename publishes complete data."""
    for root, _, files in os.walk(directory):
        for path in [*(Path(root) / f for f in files), Path(root)]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def publish(directory: Path, out: Path) -> None:
    """Rename into place. An artifact that is replaced moves aside first and comes back if the rename fails."""
    directory.chmod(0o755)
    if not out.exists():
        directory.rename(out)
        return
    aside = Path(tempfile.mkdtemp(prefix=staging_prefix(out), dir=out.parent))
    aside.rmdir()
    out.rename(aside)
    try:
        directory.rename(out)
    except OSError:
        aside.rename(out)
        raise
    shutil.rmtree(aside, ignore_errors=True)


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
    """sha256 of all of an artifact that is not measured: two artifacts of one digest are the same model."""
    files = {name: entry for name, entry in manifest["files"].items() if not MEASURED.fullmatch(name)}
    content = {key: value for key, value in manifest.items() if key != "digest"} | {"files": files}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
