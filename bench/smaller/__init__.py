"""Figures of smaller models, one module a way to make a model smaller: ``python -m bench.smaller NAME ...``."""
