"""``optkit.tune``: the recipe and the serve options that hold an objective. ``optkit tune`` calls the same function."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optkit.api.bench import SLO_MISSED
from optkit.api.guard import guarded
from optkit.api.progress import ProgressCallback, ProgressEvent, warn
from optkit.errors import UserError
from optkit.extras import need_extra

if TYPE_CHECKING:
    from optkit.bench.slo import Slo
    from optkit.recipe.schema import Recipe
    from optkit.tune.outcome import Outcome

BUDGET = "30m"
LEAST_BUDGET = 60.0  # seconds
BUDGET_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)?", re.ASCII)
UNITS = {"s": 1, None: 60, "m": 60, "min": 60, "h": 3600}
DEFAULT_RECIPES = ("ttft-cpu", "baseline", "edge-cpu", "throughput-cpu")
BY_METRIC = {"tpot": "edge-cpu", "itl": "edge-cpu"}  # metrics whose default is another recipe


@dataclass(frozen=True)
class TuneReport:
    """The result of a tuning.

    Attributes:
        held: the objective is shown on fresh requests.
        recipe: that was found, with its options; None where nothing could be served.
        options: of the engine that differ from the recipe the search began with.
        claim: what the worst order of the confirmation measured, as in ``ttft_p95 512 ms``.
        reasons: why the objective is not shown; empty where it is held.
        advice: what binds, and which single change would help most.
        files: written files, the recipe first.
        seconds: of the budget that were used.
    """

    held: bool
    recipe: str | None
    options: dict[str, Any]
    claim: str
    reasons: tuple[str, ...]
    advice: tuple[str, ...]
    files: tuple[Path, ...]
    seconds: float
    lines: tuple[str, ...] = field(repr=False, default=())

    @property
    def exit_code(self) -> int:
        """0; 3 where the objective is not shown."""
        return 0 if self.held else SLO_MISSED

    @property
    def ok(self) -> bool:
        """True where ``exit_code`` is 0."""
        return self.held

    def __str__(self) -> str:
        return "\n".join(self.lines)


def parse_budget(text: str | float) -> float:
    """Seconds of ``30m``, ``1.5h``, ``90s``; a number without a unit, as text, is minutes.

    Raises:
        UserError: another form, or less than ``LEAST_BUDGET``.
    """
    found = BUDGET_FORM.fullmatch(text.strip()) if isinstance(text, str) else None
    if isinstance(text, str) and not found:
        raise UserError(f"'{text[:40]}' is no time", where="--budget", fix="write 30m, 2h or 900s")
    value = float(found[1]) * UNITS[found[2]] if found else float(text)
    if not LEAST_BUDGET <= value < 1e7:
        raise UserError(
            f"{value:g} s is no budget", where="--budget", fix=f"give at least {LEAST_BUDGET:.0f}s"
        )
    return value


@guarded
def tune(
    model: str | os.PathLike[str],
    slo: str,
    out: str | os.PathLike[str] | None = None,
    *,
    budget: str | float = BUDGET,
    recipes: Sequence[str] = (),
    input_len: int = 512,
    output_len: int = 64,
    seed: int = 0,
    force: bool = False,
    progress: ProgressCallback | None = None,
) -> TuneReport:
    """Find the recipe and the serve options that hold ``slo`` on this machine, with the evidence.

    An interrupted tuning resumes when called again with the same arguments; no finished trial runs twice.

    Args:
        model: a local Hugging Face directory, a ``.gguf`` file, a Hub id, or ``smollm2-135m``.
        slo: as in ``ttft_p95<700ms@4rps`` (``optkit.bench.slo``); without a load, that of one client without pauses.
        out: directory of recipe, artifact, log and journal; by default ``tuned``.
        budget: time for everything, as in ``30m``, or seconds as a number.
        recipes: names or files to choose from, the default first; by default the recipes that come for CPUs.
        input_len, output_len: tokens of each prompt and of each answer.
        seed: of all prompts and arrivals.
        force: start over where ``out`` has a journal, and overwrite a recipe or report of another origin.
        progress: called with a ``ProgressEvent`` for each step.

    Raises:
        UserError: an objective that can't be read, a recipe for another machine, or a directory in use.
    """
    need_extra("serve", "optkit tune")
    from optkit.bench.environment import busy
    from optkit.bench.slo import Load, parse_slo
    from optkit.recipe.load import load_recipe
    from optkit.tune.calibration import METHOD
    from optkit.tune.files import JOURNAL
    from optkit.tune.goal import check_goal
    from optkit.tune.journal import Journal
    from optkit.tune.lab import Machine, Shape
    from optkit.tune.report import write_files
    from optkit.tune.search import Search
    from optkit.version import VERSION

    objective, seconds = parse_slo(slo), parse_budget(budget)
    check_goal(objective)
    shape = Shape(input_len, output_len, objective.load or Load(clients=1))
    shape.config(1, seed).check()
    check_answers(objective, output_len)
    sources = named(recipes or default_recipes(objective))
    for name, source in sources.items():
        if load_recipe(source).target != "cpu":
            fix = "give recipes with target: cpu"
            raise UserError("tuning is for CPUs so far", where=f"recipe {name}", fix=fix)
    directory = Path(out) if out is not None else Path("tuned")
    refuse_to_overwrite(directory, sources, force=force)

    def line(text: str) -> None:
        if progress is not None:
            progress(ProgressEvent(text))

    lab = Machine(os.fspath(model), sources, directory, shape, line)
    lab.check_lengths()
    task = {
        "model": lab.source.digest,
        "objective": str(objective),
        "shape": [input_len, output_len, str(shape.load)],
        "recipes": {name: lab.recipe(name).to_yaml() for name in sources},
        "seed": seed,
        "optkit": VERSION,
        "calibration": METHOD,
    }
    journal = Journal(directory / JOURNAL, task, fresh=force)
    try:
        if journal.resumed:
            line(f"resuming after {journal.resumed} trials, {journal.elapsed:.0f} s of {seconds:.0f} s")
        conditions = lab.conditions()
        warning = busy(conditions)
        if warning is not None:
            warn(progress, warning)
        outcome = Search(lab, journal, objective, shape, list(sources), seconds, seed, line).run()
        outcome.notes += [warning] if warning else []
        files = write_files(directory, outcome, journal, objective, shape, lab.recipes, conditions)
        return _report_of(outcome, files, journal.elapsed, objective, shape)
    finally:
        journal.close()


def check_answers(objective: Slo, output_len: int) -> None:
    """Refuse bounds on the time between tokens for answers of one token.

    Raises:
        UserError: a bound without a sample.
    """
    between = next((term for term in objective.terms if term.metric in BY_METRIC), None)
    if between is not None and output_len < 2:
        what = f"answers of {output_len} token have no {between.metric}"
        raise UserError(what, where=f"--slo {objective}", fix="give an --output-len of 2 or more")


def refuse_to_overwrite(directory: Path, sources: Mapping[str, str], *, force: bool) -> None:
    """Refuse a directory with a recipe or report of another origin.

    Args:
        sources: names or files of recipes by name; a file under the name of a result is refused with ``force``, too.
        force: overwrites other files.

    Raises:
        UserError: a file would be overwritten.
    """
    from optkit.tune.files import JOURNAL, RECIPE, REPORT, TRIALS

    written = [directory / name for name in (RECIPE, REPORT, TRIALS)]
    for source in sources.values():
        if Path(source).absolute() in [file.absolute() for file in written]:
            fix = "give another -o DIR, or copy the recipe"
            raise UserError("the recipe would be overwritten by the result", where=source, fix=fix)
    strange = next((file for file in written if file.exists()), None)
    if strange is not None and not force and not (directory / JOURNAL).exists():
        fix = "give another -o DIR, or --force to overwrite it"
        raise UserError("the file is of no tuning and would be overwritten", where=str(strange), fix=fix)


def default_recipes(slo: Slo) -> list[str]:
    """The recipes that come for CPUs, first the one made for the objective's first metric."""
    first = BY_METRIC.get(slo.terms[0].metric, DEFAULT_RECIPES[0])
    if slo.terms[0].metric.endswith("throughput"):
        first = "throughput-cpu"
    return list(dict.fromkeys([first, *DEFAULT_RECIPES]))


def named(recipes: Sequence[str]) -> dict[str, str]:
    """Recipes by name; the name of a file is the recipe's own.

    Raises:
        UserError: two recipes of one name.
    """
    from optkit.recipe.load import load_recipe

    found: dict[str, str] = {}
    for source in recipes:
        recipe: Recipe = load_recipe(source)
        if recipe.name in found:
            raise UserError(f"two recipes are named {recipe.name}", where=source, fix="rename one of them")
        found[recipe.name] = source if source == recipe.name else str(Path(source).absolute())
    return found


def _report_of(outcome: Outcome, files: Sequence[Path], seconds: float, slo: Slo, shape: Any) -> TuneReport:
    """The report of an outcome."""
    from optkit.tune.report import evidence

    setting = outcome.setting
    lines = [*evidence(outcome, slo, shape), *outcome.advice, *(f"note: {note}" for note in outcome.notes)]
    return TuneReport(
        outcome.held,
        None if setting is None else setting.recipe,
        {} if setting is None else dict(setting.options),
        outcome.claim,
        tuple(outcome.reasons),
        tuple(outcome.advice),
        tuple(files),
        seconds,
        tuple(lines),
    )
