"""Steps of a run, and the keys of finished steps.

The first step is the capture of the model; the passes and measurements of the whole follow. A key is a hash of the
parent's key and of all other facts with an effect on the outcome: equal keys mean equal results. The facts of the
capture are the source model, the target, the instruction set of the native kernels, how torch's threads wait, library
versions and optkit's sources. The facts of a pass are name, options, bounds, calibration text, the code of a plug-in,
and the recipe's objective, workload, runtime, bounds and evaluation text. The last five are facts of a measurement of
the whole, too.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from pydantic import BaseModel

from optkit import passes
from optkit.artifact import measured_on
from optkit.calibration.samples import Calibration
from optkit.checkpoint.locate import ModelSource
from optkit.evaluation.text import text_digest
from optkit.machine.target import Target
from optkit.machine.torch_threads import wait_settings
from optkit.passes.resolve import ResolvedPass
from optkit.pipeline.records import PassRecord
from optkit.pipeline.sources import compiler_digest, ops_digests, plugin_digest
from optkit.recipe.schema import Recipe
from optkit.version import VERSION

Effect = tuple[bool, list[str]] | None  # ``PassRecord.effect``; None for the capture


@dataclass(frozen=True)
class Step:
    """A step of a run; ``parent`` is None for the capture."""

    key: str
    parent: Step | None = None

    def then(self, decisive: Mapping[str, Any]) -> Step:
        """The next step; ``decisive`` is JSON data of all facts with an effect on the outcome."""
        return Step(digest_of({"parent": self.key, **decisive}), self)


def capture_step(source: ModelSource, target: Target, served: int | None = None) -> Step:
    """The first step of a run on ``source`` for ``target``.

    Args:
        served: the served length, of a model whose graph depends on the length; else None.
    """
    machine = {"target": asdict(target), "kernels": measured_on.kernels_here(), "waits": wait_settings()}
    facts = {"source": source.digest, **machine, "versions": environment(), "compiler": compiler_digest()}
    return Step(digest_of(facts if served is None else {**facts, "served": served}))


def pass_step(
    parent: Step, resolved: ResolvedPass, recipe: Recipe, before: Effect = None, judged: str = "PassJudge"
) -> Step:
    """The step of a pass of ``recipe``.

    Args:
        before: the effect of the parent's own pass: a decision by measured times can differ when a removed state is
            made again.
        judged: names the judge; empty for a pass that is not measured alone.
    """
    facts = {"pass": pass_facts(resolved), "settings": settings_of(recipe)}
    return parent.then({**facts, "before": before, "judged": judged})


def comparison_step(after: Step, before: Step, effects: Sequence[Effect], purpose: str) -> Step:
    """A measurement of ``after`` against ``before``; ``effects`` are those of their passes, as in ``pass_step``."""
    return after.then({"compared with": before.key, "effects": effects, "purpose": purpose})


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """The sections of ``recipe`` that decide measurements and decisions."""
    data = recipe.to_data()
    settings = {key: data[key] for key in ("objective", "workload", "runtime", "accept")}
    long = recipe.evaluation.long_lengths if recipe.bounds_long_loss else ()
    return settings | {"text": text_digest(recipe), "long": list(long)}


def whole_step(
    parent: Step,
    recipe: Recipe,
    records: Sequence[PassRecord],
    final_tokens: int | None,
    again: Sequence[ResolvedPass] = (),
) -> Step:
    """The measurement of all passes of ``records`` together, in a run of ``recipe``.

    Args:
        again: the passes applied again after ``parent``, whose key does not have their options.
    """
    effect = [[record.name, record.fallback] for record in records if record.in_effect]
    facts = [pass_facts(resolved) for resolved in again]
    settings = settings_of(recipe)  # not in the key of the capture, the parent where the first pass is undone
    return parent.then({"whole": effect, "again": facts, "tokens": final_tokens, "settings": settings})


def pass_facts(resolved: ResolvedPass) -> list[Any]:
    """A pass as JSON: name, options, bounds, calibration text, and the distribution and sources of a plug-in.

    The sources of a plug-in's pass are those of the class and of all registered ops. Sources of optkit are in the
    key of the capture.
    """
    text = calibration_digests(resolved.config)
    plug_in = passes.plug_in(resolved.entry.pass_name)
    distribution = [plug_in.package, plug_in.version] if plug_in else None
    plugin = [distribution, plugin_digest(resolved.pass_class), ops_digests() if plug_in else None]
    bounds = [resolved.entry.accept.model_dump(), resolved.entry.keep]
    return [resolved.entry.name, resolved.config.model_dump(), bounds, text, plugin]


def calibration_digests(value: Any) -> list[str | None]:
    """Hashes of all calibration texts in the options ``value``, nested ones included."""
    if isinstance(value, Calibration):
        return [value.digest()]
    if isinstance(value, BaseModel):
        value = [getattr(value, name) for name in type(value).model_fields]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [digest for part in parts for digest in calibration_digests(part)]


def environment() -> dict[str, str]:
    """Versions with an effect on results."""
    import transformers

    versions = {"optkit": VERSION, "torch": torch.__version__, "transformers": transformers.__version__}
    return versions | {"python": platform.python_version(), "machine": platform.machine()}


def digest_of(facts: Mapping[str, Any]) -> str:
    """sha256 of JSON data in canonical form, 32 hex digits."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
