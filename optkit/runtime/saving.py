"""Saved models of artifacts, from which an engine starts without torch."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from optkit.artifact.open import Artifact
from optkit.errors import UserError
from optkit.lowering import saved_file

if TYPE_CHECKING:
    from optkit.graph.variants import SharedWeights
    from optkit.lowering.lower import Executable
    from optkit.lowering.saved_file import Saved

logger = logging.getLogger(__name__)

NOT_SAVED = "the model was not saved for faster starts"


def is_plain(artifact: Artifact) -> bool:
    """True for an artifact for CPUs that runs by kernels of optkit alone."""
    from optkit.kernels.cpu import native

    own_kernels = not artifact.native.exists() and not artifact.manifest.get("plugins")
    return own_kernels and artifact.recipe.target == "cpu" and native.available()


def has_saved(directory: str) -> bool:
    """True where the artifact in ``directory`` has a saved model; False also for a directory without an artifact."""
    try:
        artifact = Artifact.open(directory, verify=False)
        return is_plain(artifact) and saved_file.exists(artifact.saved_key())
    except (OSError, UserError):
        return False


def read_saved(artifact: Artifact, form: str = "") -> Saved | None:
    """The saved model of ``artifact``, or None; ``form`` as for ``save_model``."""
    try:
        return saved_file.read(artifact.saved_key(form))
    except (OSError, UserError) as error:  # no private cache
        logger.warning("the model is loaded without saved weights: %s", error)
        return None


def save_model(
    artifact: Artifact,
    model: Executable,
    shared: SharedWeights,
    form: str = "",
    *,
    takes_trees: bool = False,
) -> bool:
    """Save ``model`` for starts of ``artifact`` without torch; False where every start needs torch, or on failure.

    Of several processes one saves. The files of the artifact are hashed before: a saved model lasts longer than a
    damaged file.

    Args:
        model: lowered from the artifact's graph, or from the graph of ``form``.
        shared: the packed weights of ``model``.
        form: names the change of the artifact's graph; empty for none.
        takes_trees: steps of ``model`` may have trees of guesses.
    """
    from optkit.lowering.save import is_savable

    if not is_plain(artifact) or not is_savable(model):
        return False
    try:
        key = artifact.saved_key(form)
        with saved_file.one_writer(key) as mine:
            is_new = mine and not saved_file.exists(key)
            return is_new and save_verified(artifact, model, shared, key, takes_trees=takes_trees)
    except (OSError, UserError) as error:  # a full disk, or no private cache
        logger.warning("%s: %s", NOT_SAVED, error)
    except Exception:  # nothing depends on the file
        logger.exception(NOT_SAVED)
    return False


def save_verified(
    artifact: Artifact, model: Executable, shared: SharedWeights, key: str, *, takes_trees: bool
) -> bool:
    """See ``save_model``; the caller is the only writer."""
    from optkit.lowering.save import save
    from optkit.runtime.hidden_graph import hidden_graph

    try:
        hidden = artifact.executable(shared=shared, change=hidden_graph)
    except UserError:
        hidden = None  # no output head
    for problem in artifact.problems():
        logger.warning("%s: %s", NOT_SAVED, problem)
        return False
    save(model, hidden, key, takes_trees=takes_trees)
    return True
