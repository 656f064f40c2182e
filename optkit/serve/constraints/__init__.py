"""Checks of constraints in requests, before the engine."""
