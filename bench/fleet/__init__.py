"""Measurements of a fleet: each module is a figure, run as ``python -m bench.fleet NAME``."""
