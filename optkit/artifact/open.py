"""Opening of artifacts: the hash of every file is checked, then graph and weights are loaded and lowered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optkit.artifact.manifest import INTERNAL, NATIVE, content_digest, problems, read_manifest
from optkit.errors import UserError
from optkit.plugins import MissingPlugIn
from optkit.recipe.load import parse_recipe
from optkit.recipe.schema import Recipe
from optkit.untrusted_json import read_bounded

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from optkit.graph.ir import Graph, GraphMeta, Origin
    from optkit.graph.stored import StoredTensor
    from optkit.graph.variants import SharedWeights
    from optkit.lowering.lower import Executable

MAX_GRAPH_BYTES, MAX_RECIPE_BYTES = 256 << 20, 1 << 20
COPIED_BYTES = 64 << 10  # of a tensor that is copied from the mapped file: norms and biases
FORMER_ZERO_POINT = (
    ".weight_zero",
    ".weight_zero_point",
)  # in graphs of artifacts until November 2026, and since


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
            for problem in artifact.problems():
                fix = "make the artifact again; do not serve this one"
                raise UserError(problem, where=str(path), fix=fix)
        return artifact

    def problems(self) -> Iterator[str]:
        """The differences between the files and the manifest."""
        return problems(self.directory, self.manifest)

    def check_present(self) -> None:
        """Raise UserError if the directory has no artifact any more, or another one."""
        if content_digest(read_manifest(self.directory)) != content_digest(self.manifest):
            what = "another artifact has taken the place of the loaded one"
            raise UserError(what, where=str(self.directory), fix="start again to use the new one")

    @property
    def name(self) -> str:
        return str(self.manifest["name"])

    @property
    def native(self) -> Path:
        """The directory of the code tier; may be absent."""
        return self.directory / NATIVE

    @cached_property
    def recipe(self) -> Recipe:
        file = self.directory / INTERNAL / "recipe.yaml"
        return parse_recipe(read_text(file), label=str(file))

    def saved_key(self, form: str = "") -> str:
        """The name of the artifact's saved model on this machine (``optkit.lowering.saved_file``).

        ``form`` names another graph than the artifact's own.
        """
        from optkit.lowering.saved_file import key_of

        return key_of(content_digest(self.manifest) + form)

    def meta(self) -> GraphMeta:
        """The facts about the model in graph.json, without nodes and weights."""
        from optkit.graph.serialize import meta_from_json

        file = self.directory / INTERNAL / "graph.json"
        return meta_from_json(read_bounded(file, MAX_GRAPH_BYTES), where=str(file))

    def annotations(self) -> dict[str, Any]:
        """``Graph.annotations`` of graph.json, without nodes and weights."""
        from optkit.graph.serialize import annotations_from_json

        file = self.directory / INTERNAL / "graph.json"
        return annotations_from_json(read_bounded(file, MAX_GRAPH_BYTES), where=str(file))

    def packed_tensors(self) -> Mapping[str, Tensor]:
        """The tensors of ``optkit/packed.safetensors``, mapped; empty without the file."""
        from optkit.checkpoint.compressed_tensors_writer import PACKED_FILE
        from optkit.checkpoint.tensors import load_tensors

        file = self.directory / INTERNAL / PACKED_FILE
        return load_tensors(file) if file.is_file() else {}

    def graph(self) -> Graph:
        """The optimized graph, with weights mapped from the artifact's files."""
        from optkit.checkpoint.source import open_source
        from optkit.checkpoint.tensors import Overlay, build, load_tensors, stored
        from optkit.graph.serialize import graph_from_json
        from optkit.graph.stored import Place
        from optkit.graph.verify import VerifyError, verify
        from optkit.machine.mapped_files import PageRelease

        internal = self.directory / INTERNAL
        packed = self.packed_tensors()
        tensors = Overlay(open_source(self.directory, weights=not packed), packed)
        constants = load_tensors(internal / "constants.safetensors")
        file = internal / "graph.json"
        release = PageRelease(self.directory)

        def load(name: str, origin: Origin | None, dtype: torch.dtype) -> Tensor | StoredTensor:
            if origin is None:
                return constants[name]
            present = with_present_names(origin, tensors)
            if is_copied(present, tensors, dtype):
                return stored(
                    present, partial(Place, None), lambda place: tensors[place.name], dtype, release
                )
            value = build(present, tensors, dtype)
            release(value.nbytes)
            return value.clone() if value.nbytes <= COPIED_BYTES else value

        try:
            graph = graph_from_json(read_bounded(file, MAX_GRAPH_BYTES), load, where=str(file))
        except MissingPlugIn as error:
            raise MissingPlugIn(error.name, error.what, str(file), self.remedy(error)) from error
        try:
            verify(graph)  # kernels take raw pointers: shapes are checked before anything runs
        except VerifyError as error:
            raise UserError(f"the graph is invalid: {error}", where=str(file)) from error
        return graph

    def remedy(self, error: MissingPlugIn) -> str:
        """The remedy for a missing plug-in, with the package that the manifest names."""
        found = self.manifest.get("plugins", {}).get(error.name)
        if found is None:
            return str(error.fix)
        return f"install the package {found['package']}, of which {found['version']} was used"

    def executable(
        self,
        *,
        trust_code: bool = False,
        shared: SharedWeights | None = None,
        change: Callable[[Graph], Graph] | None = None,
    ) -> Executable:
        """The graph lowered for the machine at hand. Weights packed by a kernel are freed: memory holds one copy.

        Compiled layers run if made on this machine by this user, or if trusted; nothing is compiled.

        Args:
            shared: keeps the packed weights for another executable of the artifact, or has those of another.
            change: makes the lowered graph of the artifact's graph.
        """
        from optkit.lowering.compiled.hook import lower_with_code
        from optkit.lowering.precision import compute_dtype
        from optkit.machine.mapped_files import PageRelease, drop_mapped_pages
        from optkit.machine.present import present_target

        target = present_target(
            self.recipe.target,
            where=str(self.directory),
            fix="use it on a machine with an NVIDIA GPU; or optimize the model by a CPU recipe such as ttft-cpu",
        )
        graph = self.graph()
        if shared is not None:
            shared.names |= graph.weights.keys()
        if change is not None:
            graph = change(graph)
        drop_mapped_pages(self.directory)
        dtype = compute_dtype(self.recipe.runtime.compute_dtype)
        options = {"consume": True, "packed": PageRelease(self.directory), "dtype": dtype, "shared": shared}
        executable = lower_with_code(graph, target, native=self.native, trust=trust_code, **options)
        drop_mapped_pages(self.directory)
        return executable


def is_copied(origin: Origin, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> bool:
    """True for a weight that a file does not hold as the graph has it: fused, transposed, or in another dtype.

    Such a weight is read when it is packed, so memory holds one of them at a time.
    """
    first = tensors[origin.parts[0].name]
    other = first.is_floating_point() and first.dtype != dtype
    return not origin.stacked and (len(origin.parts) > 1 or origin.transposed or other)


def with_present_names(origin: Origin, tensors: Mapping[str, Tensor]) -> Origin:
    """``origin`` with the present names of tensors, where ``tensors`` lacks a former name."""
    renamed = origin.renamed(*FORMER_ZERO_POINT)
    former = all(
        part.name.endswith(FORMER_ZERO_POINT[0]) and part.name not in tensors for part in origin.parts
    )
    return renamed if former and origin.parts else origin


def read_text(file: Path) -> str:
    """The text of a small UTF-8 file.

    Raises:
        UserError: the file is absent or can't be read.
    """
    try:
        return read_bounded(file, MAX_RECIPE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError("it is not UTF-8 text", where=str(file)) from error
