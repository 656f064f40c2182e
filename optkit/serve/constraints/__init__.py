"""Checks of the constraints of requests, before the engine."""
