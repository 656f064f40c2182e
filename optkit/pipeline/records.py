"""What happened to each pass: the record that goes into the manifest, the report and the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import isnan
from typing import Any

from optkit.passes.base import Plan

JSON_NAMES = {"fallback": "restored"}  # as manifests and reports have named it since format 1


@dataclass
class PassRecord:
    """One pass of one run. Times in seconds; pairs are [before, after].

    Attributes:
        decision: ``kept``, ``reduced``, ``rolled back`` or ``skipped``; ``reason`` says why in words.
        fallback: sites of a ``reduced`` pass that are float again, the most sensitive first; ``restored`` in JSON.
        skips: places the pass left alone, with reasons (each reason once, with its count).
        predicted: roofline seconds [before, after] by workload point.
        measured: timings [before, after] by workload point.
        quality: a ``QualityReport`` against the source model, as a dict; of the worst, where layers have several forms.
        forms: reports by form, where layers have several: of the widest that a pass changed, of all for the whole.
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
    weight_bytes: list[int] = field(default_factory=list)
    quality: dict[str, Any] = field(default_factory=dict)
    forms: dict[str, dict[str, Any]] = field(default_factory=dict)
    fallback: list[str] = field(default_factory=list)
    decision: str = ""
    reason: str = ""

    @staticmethod
    def planned(name: str, config: dict[str, Any], plan: Plan) -> PassRecord:
        """A record of what ``check`` found."""
        return PassRecord(name, config, [s.name for s in plan.sites], grouped_skips(plan))

    @property
    def in_effect(self) -> bool:
        """Whether the pass changed the result: kept as it is, or reduced to some of its sites."""
        return self.decision in ("kept", "reduced")

    def decided(self, decision: str, reason: str) -> PassRecord:
        self.decision, self.reason = decision, reason
        return self

    def judged(self, reports: Mapping[str, dict[str, Any]]) -> None:
        """Record quality, of each form or, under no name, of the only one: the worst counts."""
        self.forms = dict(reports) if "" not in reports else {}
        self.quality = reports[worst(reports)]

    def take_evidence(self, other: PassRecord) -> None:
        """Take over the measurements of ``other``."""
        for name in ("predicted", "measured", "weight_bytes", "quality", "forms"):
            setattr(self, name, getattr(other, name))

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON data of report.json."""
        return {JSON_NAMES.get(key, key): value for key, value in asdict(self).items()}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> PassRecord:
        """The inverse of ``to_dict``; unknown keys are left out."""
        known = {JSON_NAMES.get(f.name, f.name): f.name for f in fields(PassRecord)}
        return PassRecord(**{known[key]: value for key, value in data.items() if key in known})

    def speedup(self, label: str) -> float:
        """Measured time before over time after."""
        before, after = self.measured[label]
        return before["median"] / after["median"]

    def predicted_speedup(self, label: str) -> float:
        before, after = self.predicted[label]
        return before / after


def worst(reports: Mapping[str, dict[str, Any]]) -> str:
    """The form whose divergence is the largest; one that is no number is worse than any."""
    losses = {name: report["kl_mean"]["value"] for name, report in reports.items()}
    return max(losses, key=lambda name: (isnan(losses[name]), losses[name]))


@dataclass
class RunRecord:
    """All passes of a run, and the whole against the source model (None when nothing was kept)."""

    passes: list[PassRecord]
    whole: PassRecord | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "passes": [record.to_dict() for record in self.passes],
            "whole": self.whole.to_dict() if self.whole else None,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> RunRecord:
        """The inverse of ``to_dict``."""
        whole = PassRecord.from_dict(data["whole"]) if data["whole"] else None
        return RunRecord([PassRecord.from_dict(record) for record in data["passes"]], whole)


def grouped_skips(plan: Plan) -> list[dict[str, Any]]:
    """Skips by reason: thirty layers that say the same are one line."""
    reasons: dict[str, list[str]] = {}
    for skip in plan.skips:
        reasons.setdefault(skip.reason, []).append(skip.site)
    return [{"reason": reason, "count": len(sites), "first": sites[0]} for reason, sites in reasons.items()]
