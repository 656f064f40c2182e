"""Names of the files of a tuning, in its directory."""

from __future__ import annotations

RECIPE, TRIALS, REPORT, ARTIFACT = "recipe.yaml", "trials.json", "report.md", "artifact"
JOURNAL = "journal.jsonl"
