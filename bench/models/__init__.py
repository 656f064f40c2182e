"""Figures of kinds of models, a module each, on random weights: ``python -m bench.models NAME ...``."""
