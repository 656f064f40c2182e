"""``optkit.optimize``: a model and a recipe become an artifact. ``optkit optimize`` calls the same function."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optkit.api.guard import guarded
from optkit.api.progress import ProgressCallback, lines_to, warn
from optkit.errors import UserError
from optkit.evaluation.limits import LEAST_FINAL_TOKENS
from optkit.machine.torch_threads import wait_shortly

if TYPE_CHECKING:
    from optkit.api.llm import LLM
    from optkit.pipeline.records import PassRecord, RunRecord
    from optkit.recipe.schema import Recipe


@dataclass(frozen=True)
class OptimizeResult:
    """A written artifact with the record of the run.

    Attributes:
        artifact: the directory.
        model: as given to ``optimize``.
        recipe: of the run.
        run: the record of every pass, and of the whole.
        target: facts about the machine of the recipe, as in report.json.
    """

    artifact: Path
    model: str
    recipe: Recipe = field(repr=False)
    run: RunRecord = field(repr=False)
    target: Mapping[str, Any] = field(repr=False)

    @property
    def passes(self) -> list[PassRecord]:
        """A record of each pass: decision, reason, sites, predicted and measured times, quality."""
        return self.run.passes

    @property
    def whole(self) -> PassRecord | None:
        """The record of all passes together, against the source model; None where no pass was kept."""
        return self.run.whole

    @property
    def decisions(self) -> dict[str, str]:
        """``kept``, ``reduced``, ``rolled back`` or ``skipped`` by pass."""
        return {record.name: record.decision for record in self.run.passes}

    @property
    def speedups(self) -> dict[str, float]:
        """Time of the source model over time of the artifact, measured, by step of the workload."""
        whole = self.run.whole
        return {} if whole is None else {label: whole.speedup(label) for label in whole.measured}

    @property
    def kl_divergence(self) -> float | None:
        """Mean KL divergence from the source model in nats; None where no pass was kept."""
        whole = self.run.whole
        return whole.quality["kl_mean"]["value"] if whole and whole.quality else None

    def load(self, **options: Any) -> LLM:
        """The artifact, loaded: ``optkit.load(result.artifact, **options)``."""
        from optkit.api.llm import load

        return load(self.artifact, **options)

    def summary(self) -> list[str]:
        """The result in a few sentences."""
        from optkit.pipeline.report import summary_lines

        return summary_lines(self.run, self.target)

    def __str__(self) -> str:
        return "\n".join([*self.summary(), f"wrote {self.artifact}"])

    def _repr_html_(self) -> str:
        from optkit.api.html import fragment, of_table
        from optkit.pipeline.report import alternatives_table, run_table

        tables = [
            run_table(self.run),
            *(alternatives_table(label, found) for label, found in self.run.alternatives.items()),
        ]
        title = f"{self.model} by {self.recipe.name}: {self.artifact}"
        return fragment(title, map(of_table, tables), self.summary())


@guarded
def optimize(
    model: str | os.PathLike[str],
    recipe: Recipe | str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    adapters: Sequence[str | os.PathLike[str]] = (),
    force: bool = False,
    quality_tokens: int | None = None,
    progress: ProgressCallback | None = None,
) -> OptimizeResult:
    """Compile ``model`` by ``recipe``, measure every step, and write an artifact.

    Each pass is checked, applied, verified, predicted and measured through the runtime, and kept only within the
    recipe's bounds. An interrupted run resumes: the cache keeps finished steps.

    Args:
        model: a local Hugging Face directory, a ``.gguf`` file, a Hub id, or ``smollm2-135m``.
        recipe: the name of a recipe, a YAML file, or a ``Recipe``.
        out: directory of the artifact; by default ``RECIPE-artifact``.
        overrides: of recipe values: ``{"runtime.max_num_seqs": 4}``, or ``["runtime.max_num_seqs=4"]``.
        adapters: directories of LoRA adapters (PEFT) to merge into the model.
        force: replace an existing artifact in ``out``.
        quality_tokens: held-out tokens for the quality of the whole result, all of them; by default up to 20,480, and
            fewer once the quality is certain to meet or to miss the recipe's bounds.
        progress: called with a ``ProgressEvent`` for each step; an exception in the callback ends the run.

    Raises:
        UserError: model, recipe or output can't be used; nothing is written.
        PassFailed: a pass broke the graph (a bug in the pass).
    """
    wait_shortly()
    from optkit.pipeline import driver

    if quality_tokens is not None and quality_tokens < LEAST_FINAL_TOKENS:
        raise UserError(f"at least {LEAST_FINAL_TOKENS}, not {quality_tokens}", where="quality_tokens")
    loaded = with_overrides(recipe, overrides)
    path = Path(out) if out is not None else Path(f"{loaded.name}-artifact")
    warn_without_native_kernels(loaded, progress)
    run = driver.optimize(
        os.fspath(model),
        loaded,
        path,
        adapters=[Path(adapter) for adapter in adapters],
        force=force,
        progress=lines_to(progress),
        final_tokens=quality_tokens,
    )
    return OptimizeResult(path, os.fspath(model), loaded, run, target_facts(loaded))


def with_overrides(
    recipe: Recipe | str | os.PathLike[str], overrides: Sequence[str] | Mapping[str, Any] = ()
) -> Recipe:
    """``recipe`` with ``overrides``, as ``--set`` takes them or as a mapping.

    Raises:
        UserError: no such recipe, or an override that does not fit.
    """
    from optkit.recipe.load import load_recipe, overridden
    from optkit.recipe.schema import Recipe

    if isinstance(recipe, Recipe):
        return overridden(recipe, overrides)
    return load_recipe(os.fspath(recipe), overrides)


def warn_without_native_kernels(recipe: Recipe, progress: ProgressCallback | None) -> None:
    """Warn where the recipe is for CPUs and the native kernels are missing."""
    from optkit.kernels.cpu.native import missing_warning

    warning = missing_warning() if recipe.target == "cpu" else None
    if warning:
        warn(progress, warning)


def target_facts(recipe: Recipe) -> dict[str, Any]:
    """Facts about the target of ``recipe`` on the machine at hand."""
    from dataclasses import asdict

    from optkit.machine.present import present_target

    return asdict(present_target(recipe.target))
