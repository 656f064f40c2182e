"""Artifacts: opening, verifying and exporting the directory that a run writes."""
