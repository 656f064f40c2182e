"""Figures of a fleet, a module each: ``python -m bench.fleet NAME``."""
