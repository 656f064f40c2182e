"""Figures of a fleet, each by a module of its own: ``python -m bench.fleet NAME``."""
