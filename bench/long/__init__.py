"""Figures of long prompts and long answers, one module a policy: ``python -m bench.long NAME ...``."""
