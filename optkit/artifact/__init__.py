"""Artifacts: a run's result directory, opened, verified and exported."""
