"""Figures of long prompts and long answers, a module for each policy: ``python -m bench.long NAME ...``."""
