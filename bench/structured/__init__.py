"""Structured output: validity of the answers, and the time of masks, grammars and constrained answers."""
