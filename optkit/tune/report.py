"""The files of a tuning: a recipe for people, the artifact with the recipe, and the log of all trials.

``recipe.yaml`` has the evidence as comments: the objective, the values of the confirmation, and above the section of
each changed option the effect in the race, with the interval. ``trials.json`` has every trial, failed trials with the
reason; ``report.md`` is the same for people.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optkit.artifact.manifest import INTERNAL, MANIFEST, read_manifest, write_manifest
from optkit.artifact.staging import staging
from optkit.bench.slo import Slo
from optkit.errors import UserError
from optkit.machine.paths import replace_text
from optkit.recipe.engine_options import fact, recipe_values
from optkit.recipe.load import overridden, parse_recipe
from optkit.recipe.schema import Recipe
from optkit.tune.files import ARTIFACT, RECIPE, REPORT, TRIALS
from optkit.tune.journal import Journal
from optkit.tune.lab import Shape
from optkit.tune.outcome import Outcome
from optkit.tune.settings import POLICY, Setting, overrides
from optkit.untrusted_json import without_nan

MOST_ROWS = 20  # of simulated settings in the Markdown


def tuned_recipe(recipe: Recipe, setting: Setting, slo: Slo) -> Recipe:
    """``recipe`` with the options of ``setting``, and the bounds of ``slo`` where the recipe's own are unused."""
    changes = overrides(setting)
    if recipe.serving.scheduling_policy == "fcfs" and not any(
        name in dict(setting.options) for name in POLICY
    ):
        changes |= {
            f"slo.{term.metric}_ms": term.value
            for term in slo.terms
            if term.metric in ("ttft", "tpot") and term.is_upper and term.percentile in (None, 95.0)
        }
    return overridden(recipe, changes)


def recipe_text(recipe: Recipe, outcome: Outcome, slo: Slo, shape: Shape) -> str:
    """YAML of the tuned recipe with comments; reads back to the recipe.

    Args:
        recipe: before the tuning.
    """
    setting = outcome.setting
    assert setting is not None
    tuned = tuned_recipe(recipe, setting, slo)
    lines = ["# Made by optkit tune.", *(f"# {line}" for line in evidence(outcome, slo, shape)), ""]
    notes = option_notes(recipe, outcome)
    for line in tuned.to_yaml().splitlines():
        section = line.partition(":")[0]
        lines += [f"# {path}: {note}" for path, note in notes.items() if path.partition(".")[0] == section]
        lines.append(line)
    text = "\n".join(lines) + "\n"
    if parse_recipe(text) != tuned:
        raise AssertionError("the tuned recipe does not read back")
    return text


def evidence(outcome: Outcome, slo: Slo, shape: Shape) -> list[str]:
    """The result in sentences: objective, confirmation, comparison with the default."""
    load = f"{shape.input_len} tokens in, {shape.output_len} out, {shape.load}"
    lines = [f"Objective: {slo} ({load})."]
    if outcome.orders:
        count = sum(order["requests"] for order in outcome.orders)
        verdict = "Held" if outcome.held else "NOT SHOWN"
        orders = sum(order["requests"] > 0 for order in outcome.orders)
        worst = f"the worst: {outcome.claim}" if outcome.claim else "nothing was measured"
        lines.append(
            f"{verdict}: {count} requests in {orders} orders of arrival with fresh prompts; {worst}."
        )
    lines += [f"{reason}." for reason in outcome.reasons]
    lines += [f"Quality against the source model: {line}." for line in outcome.quality]
    lines += [f"Simulated before: {outcome.simulated}."] if outcome.simulated else []
    if outcome.setting is not None and outcome.default is not None:
        if outcome.setting == outcome.default:
            lines.append("No option moved: nothing was shown to be better than the default.")
        elif outcome.against_default is not None:
            lines.append(
                f"Against the default ({outcome.default.key}), in the race: {outcome.against_default} of its cost."
            )
    return lines


def option_notes(recipe: Recipe, outcome: Outcome) -> dict[str, str]:
    """A comment for each changed option, by the recipe's key, for the line above the section."""
    assert outcome.setting is not None
    known, found = recipe_values(recipe), {}
    for group in outcome.setting.knobs:
        effect = outcome.effects.get(group[0])
        for name in group:
            if name in dict(outcome.setting.options):
                was = known[name]
                measured = f"; cost {effect} of that without the change" if effect else ""
                value = dict(outcome.setting.options)[name]
                found[fact(name, "recipe")] = f"{value}, was {'null' if was is None else was}{measured}"
    return found


def write_artifact(source: Path, out: Path, recipe: Recipe, text: str) -> None:
    """A copy of the artifact ``source`` with another recipe for serving; files are linked where possible.

    Raises:
        UserError: ``out`` exists and is no artifact.
    """
    manifest = dict(read_manifest(source))
    with staging(out, force=True) as directory:
        shutil.copytree(source, directory, copy_function=_link, dirs_exist_ok=True)
        (directory / MANIFEST).unlink()
        file = directory / INTERNAL / "recipe.yaml"
        file.unlink()  # a link: the source keeps its own
        file.write_text(text, "utf-8")
        for key in ("format", "schema_version", "files", "digest"):
            manifest.pop(key, None)
        write_manifest(directory, manifest | {"recipe": recipe.to_data()})


def _link(source: str, to: str) -> None:
    try:
        os.link(source, to)
    except OSError:
        shutil.copy2(source, to)


def write_files(
    directory: Path,
    outcome: Outcome,
    journal: Journal,
    slo: Slo,
    shape: Shape,
    recipes: Mapping[str, Recipe],
    conditions: Mapping[str, Any],
) -> list[Path]:
    """Write the log, and the recipe and its artifact where a setting was found. Returns the files."""
    trials = [
        {"key": t.key, "result": t.result, "reason": t.reason, "seconds": t.seconds, "at": t.at}
        for t in journal.trials.values()
    ]
    log = {
        "objective": str(slo),
        "shape": {
            "input_len": shape.input_len,
            "output_len": shape.output_len,
            "load": str(shape.load),
        },
        "held": outcome.held,
        "setting": None if outcome.setting is None else outcome.setting.to_dict(),
        "claim": outcome.claim,
        "reasons": outcome.reasons,
        "advice": outcome.advice,
        "notes": outcome.notes,
        "conditions": dict(conditions),
        "trials": trials,
    }
    replace_text(directory / TRIALS, json.dumps(without_nan(log), indent=1) + "\n")
    replace_text(directory / REPORT, markdown(outcome, journal, slo, shape))
    written = [directory / REPORT, directory / TRIALS]
    if outcome.setting is None or not outcome.orders:
        return written
    recipe = recipes[outcome.setting.recipe]
    text = recipe_text(recipe, outcome, slo, shape)
    replace_text(directory / RECIPE, text)
    source = directory / "artifacts" / outcome.setting.recipe
    if source.is_dir():
        try:
            write_artifact(source, directory / ARTIFACT, parse_recipe(text), text)
        except UserError as error:
            outcome.notes.append(str(error))
        else:
            written = [directory / ARTIFACT, *written]
    return [directory / RECIPE, *written]


def markdown(outcome: Outcome, journal: Journal, slo: Slo, shape: Shape) -> str:
    """The log of all trials for people."""
    lines = [f"# optkit tune: {'held' if outcome.held else 'not shown'}", ""]
    lines += [*evidence(outcome, slo, shape), ""]
    lines += _listed("What would help", outcome.advice) + _listed("Notes", outcome.notes)
    if outcome.orders:
        rows = [
            [str(o["order"]), str(o["requests"]), o["values"], "; ".join(o["missing"]) or "held"]
            for o in outcome.orders
        ]
        lines += ["## Confirmation", "", *_table(["order", "requests", "measured", ""], rows), ""]
    if outcome.effects:
        rows = [[name, str(effect)] for name, effect in outcome.effects.items()]
        lines += [
            "## Effects of options (cost with the change over the cost without)",
            "",
            *_table(["option", "ratio"], rows),
            "",
        ]
    lines += ["## Measured runs", "", *_measured(journal), ""]
    lines += ["## Simulated settings, the best first", "", *_simulated(journal), ""]
    failed = [[t.key, t.reason] for t in journal.trials.values() if t.reason]
    if failed:
        lines += ["## Failed trials", "", *_table(["trial", "reason"], failed), ""]
    return "\n".join(lines)


def _listed(title: str, rows: Sequence[str]) -> list[str]:
    return [f"## {title}", "", *(f"- {row}" for row in rows), ""] if rows else []


def _measured(journal: Journal) -> list[str]:
    rows = [
        [t.key, str(t.result["requests"]), t.result["values"], f"{t.seconds:.0f} s"]
        for t in journal.trials.values()
        if isinstance(t.result, dict) and "records" in t.result
    ]
    return _table(["run", "requests", "measured", "took"], rows)


def _simulated(journal: Journal) -> list[str]:
    found = [
        row
        for t in journal.trials.values()
        if t.key.startswith("simulate ") and isinstance(t.result, list)
        for row in t.result
    ]
    found.sort(key=lambda row: (not row["known"], row["cost"]))
    rows = []
    for row in found[:MOST_ROWS]:
        load = "" if row.get("load") is None else f"{row['load']:.0%}"
        word = row.get("values", row["reason"]) + ("" if row["known"] else " (beyond 90 % load: not known)")
        rows.append([Setting.from_dict(row).key, f"{row['cost']:.3f}", word, load])
    lines = _table(["setting", "cost", "simulated", "load"], rows)
    return lines + ([f"\n{len(found) - MOST_ROWS} more are in {TRIALS}."] if len(found) > MOST_ROWS else [])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return [line(head), "|" + "---|" * len(head), *map(line, rows)]
