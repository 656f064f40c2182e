"""Figures of a fleet: ``python -m bench.fleet NAME``, a module a figure."""
