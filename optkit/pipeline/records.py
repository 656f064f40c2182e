"""Records of passes: the data of the manifest, the report and the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import isnan
from typing import Any

from optkit.json_names import JSON_NAMES
from optkit.passes.base import Plan
from optkit.recipe.renamed import present_name

EVIDENCE = ("predicted", "measured", "objective", "weight_bytes", "kv_token_bytes", "quality", "variants")


@dataclass
class PassRecord:
    """A pass of a run. Times in seconds; pairs are [before, after]. Keys in JSON are by ``JSON_NAMES``.

    Attributes:
        decision: ``kept``, ``reduced``, ``rolled back`` or ``skipped``; ``reason`` is a sentence.
        fallback: sites of a ``reduced`` pass in float again, the most sensitive first.
        skips: places without a change, each reason once with the number of places.
        predicted: predicted seconds [before, after] by workload point (``pipeline.measurement.predict``).
        measured: timings [before, after] by workload point.
        objective: cost after over cost before, by the recipe's objective: ``name``, ``ratio``, ``low`` and ``high``
            (95 % interval), and ``worse``.
        quality: a ``QualityReport`` against the source model, as a dict; of the worst of several variants.
        variants: reports by variant, where layers have several: the widest changed by the pass, all for the whole.
    """

    name: str
    config: dict[str, Any]
    sites: list[str]
    skips: list[dict[str, Any]]
    exact: bool = True
    changed: int = 0
    stats: dict[str, Any] = field(default_factory=dict)
    predicted: dict[str, list[float]] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    objective: dict[str, Any] = field(default_factory=dict)
    weight_bytes: list[int] = field(default_factory=list)
    kv_token_bytes: list[int] = field(default_factory=list)
    quality: dict[str, Any] = field(default_factory=dict)
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    fallback: list[str] = field(default_factory=list)
    decision: str = ""
    reason: str = ""

    @staticmethod
    def planned(name: str, config: dict[str, Any], plan: Plan) -> PassRecord:
        """A record of what ``check`` found."""
        return PassRecord(name, config, [s.name for s in plan.sites], grouped_skips(plan))

    @property
    def in_effect(self) -> bool:
        """True where the pass changed the result: kept, or reduced to some of the sites."""
        return self.decision in ("kept", "reduced")

    @property
    def effect(self) -> tuple[bool, list[str]]:
        """The part of the record with an effect on the graph after the pass."""
        return self.in_effect, sorted(self.fallback)

    def decided(self, decision: str, reason: str) -> PassRecord:
        self.decision, self.reason = decision, reason
        return self

    def judged(self, reports: Mapping[str, dict[str, Any]]) -> None:
        """Record quality by variant, under the empty name for a single variant: the worst counts."""
        self.variants = dict(reports) if "" not in reports else {}
        self.quality = reports[worst(reports)]

    def take_evidence(self, other: PassRecord) -> None:
        """Take over the measurements of ``other``."""
        for name in EVIDENCE:
            setattr(self, name, getattr(other, name))

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON data of report.json."""
        return {JSON_NAMES.get(key, key): value for key, value in asdict(self).items()}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> PassRecord:
        """The inverse of ``to_dict``; unknown keys are left out, and passes get their present names."""
        known = {JSON_NAMES.get(f.name, f.name): f.name for f in fields(PassRecord)}
        record = PassRecord(**{known[key]: value for key, value in data.items() if key in known})
        record.name = present_name(record.name)
        return record

    def speedup(self, label: str) -> float:
        """Measured time before over time after."""
        before, after = self.measured[label]
        return before["median"] / after["median"]

    def predicted_speedup(self, label: str) -> float:
        before, after = self.predicted[label]
        return before / after


def worst(reports: Mapping[str, dict[str, Any]]) -> str:
    """The variant with the largest divergence; NaN counts as the largest."""
    losses = {name: report["kl_mean"]["value"] for name, report in reports.items()}
    return max(losses, key=lambda name: (isnan(losses[name]), losses[name]))


@dataclass
class RunRecord:
    """All passes of a run, and the whole against the source model (None when nothing was kept).

    ``alternatives`` has the record of every candidate by the recipe's label, the chosen ones included; ``places`` the
    content of candidates.json (``pipeline.candidates``), which is no part of the report; ``notes`` the sentences on how
    the source was read (``Graph.notes``); ``missed_bounds`` the recipe's bounds missed by the result, in words.
    """

    passes: list[PassRecord]
    whole: PassRecord | None
    alternatives: dict[str, list[PassRecord]] = field(default_factory=dict)
    places: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    missed_bounds: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "passes": [record.to_dict() for record in self.passes],
            "whole": self.whole.to_dict() if self.whole else None,
            "alternatives": {
                label: [record.to_dict() for record in records]
                for label, records in self.alternatives.items()
            },
            "notes": self.notes,
            "missed_bounds": self.missed_bounds,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> RunRecord:
        """The inverse of ``to_dict``; reports of earlier versions lack the later fields."""
        whole = PassRecord.from_dict(data["whole"]) if data["whole"] else None
        alternatives = {
            label: [PassRecord.from_dict(record) for record in records]
            for label, records in data.get("alternatives", {}).items()
        }
        passes = [PassRecord.from_dict(record) for record in data["passes"]]
        notes, missed = list(data.get("notes", ())), data.get("missed_bounds", "")
        return RunRecord(passes, whole, alternatives, notes=notes, missed_bounds=missed)


def grouped_skips(plan: Plan) -> list[dict[str, Any]]:
    """Skips by reason: thirty layers with equal reasons are a line."""
    reasons: dict[str, list[str]] = {}
    for skip in plan.skips:
        reasons.setdefault(skip.reason, []).append(skip.site)
    return [{"reason": reason, "count": len(sites), "first": sites[0]} for reason, sites in reasons.items()]
