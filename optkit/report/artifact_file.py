"""The report of an artifact as data, completed for artifacts of earlier versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optkit.pipeline.report_file import read_report
from optkit.pipeline.report_schema import PageFile


def artifact_report(directory: Path) -> dict[str, Any]:
    """report.json of the artifact in ``directory``, after a check of all hashes.

    Without floor and memory plan in the file, both come from the graph.

    Raises:
        UserError: no artifact, a damaged one, or no report.
    """
    from optkit.artifact.open import Artifact

    artifact = Artifact.open(directory)
    report = read_report(directory, PageFile)
    versions = artifact.manifest.get("environment")
    report.setdefault("environment", versions if isinstance(versions, dict) else {})
    if "floor" not in report or "memory" not in report:
        report |= computed_facts(artifact, report["target"])
    return report


def computed_facts(artifact: Any, target: dict[str, Any]) -> dict[str, Any]:
    """``report_facts`` of an artifact's graph on the machine of ``target``; empty where the target is incomplete."""
    from optkit.machine.target import Target
    from optkit.pipeline.report_facts import facts

    try:
        machine = Target(**{**target, "isa": tuple(target["isa"])})
    except (TypeError, KeyError):
        return {}
    return facts(artifact.graph(), artifact.recipe, machine)
