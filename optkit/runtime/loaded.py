"""The model of an artifact: read from the file of an earlier start, or lowered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

from optkit.artifact.open import Artifact
from optkit.errors import UserError
from optkit.lowering.native_model import NativeModel
from optkit.machine.present import present_target
from optkit.recipe.engine_options import EngineOptions
from optkit.runtime.saving import is_plain, read_saved
from optkit.runtime.scheduling.scheduler import SchedulerConfig

if TYPE_CHECKING:
    from optkit.graph.variants import SharedWeights
    from optkit.lowering.lower import Executable
    from optkit.runtime.cuda.device import Device
    from optkit.runtime.embedding import Embedder

Model: TypeAlias = "Executable | NativeModel"

TREES = "trees"  # the form of a graph that takes trees of guesses


@dataclass(frozen=True)
class Loaded:
    """The model of an artifact.

    Attributes:
        shared: gives the packed weights for further graphs of the artifact; None where there are none.
        hidden: the saved model without the output head.
        takes_trees: the model takes trees of guesses.
        is_saved: read from the file of an earlier start.
        to_save: the lowered form of ``model``, for later starts; None where nothing is saved.
    """

    model: Model
    shared: Callable[[], SharedWeights] | None = None
    hidden: NativeModel | None = None
    takes_trees: bool = False
    is_saved: bool = False
    to_save: Executable | None = None


def load_model(artifact: Artifact, options: EngineOptions) -> Loaded:
    """The model of ``artifact``: the saved one of an earlier start, which needs no torch, or lowered now.

    A lowered model of native calls alone runs like a saved model.
    """
    plain = may_be_saved(artifact, options)
    if plain and (saved := read_saved(artifact, form_of(options))):
        return Loaded(saved.model, cache(new_weights), saved.hidden, saved.takes_trees, is_saved=True)
    from optkit.lowering.to_native import to_native
    from optkit.runtime.tree_graph import TreeGraph

    shared = new_weights() if artifact.recipe.target == "cpu" else None
    trees = TreeGraph(present_target(artifact.recipe.target)) if form_of(options) == TREES else None
    lowered = artifact.executable(trust_code=options.trust_artifact_code, shared=shared, change=trees)
    return Loaded(
        to_native(lowered) or lowered,
        (lambda: shared) if shared is not None else None,
        takes_trees=trees is not None and not trees.reason,
        to_save=lowered if plain else None,
    )


def may_be_saved(artifact: Artifact, options: EngineOptions) -> bool:
    """True where the engine runs by kernels of optkit alone, with no further graph than ``form_of`` says."""
    return options.saved_start and not options.specprefill and is_plain(artifact)


def form_of(options: EngineOptions) -> str:
    """The name of the change of the artifact's graph; empty for none."""
    return TREES if options.speculative_model == "suffix" else ""


def new_weights() -> SharedWeights:
    """No packed weights yet."""
    from optkit.graph.variants import SharedWeights

    return SharedWeights()


def embedder(artifact: Artifact, loaded: Loaded, config: SchedulerConfig) -> Embedder:
    """The embedder of an artifact for a CPU.

    Raises:
        UserError: the graph has no output head, or the artifact is not that of the packed weights any more.
    """
    from optkit.runtime.embedding import Embedder

    sizes = config.block_size, config.max_num_batched_tokens
    if loaded.hidden is not None:
        return Embedder(loaded.hidden, *sizes)
    from optkit.runtime.hidden_graph import hidden_graph

    try:
        artifact.check_present()
    except UserError as error:
        raise UserError(error.what, where="embeddings", fix="start the engine again") from error
    shared = loaded.shared() if loaded.shared else None
    return Embedder(artifact.executable(shared=shared, change=hidden_graph), *sizes)


def device_of(model: Model) -> Device | None:
    """The GPU of ``model``, or None."""
    if getattr(model.device, "type", model.device) != "cuda":
        return None
    from optkit.runtime.cuda.device import CudaDevice

    return CudaDevice()
