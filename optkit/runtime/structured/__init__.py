"""Structured output: constraints on the text of an answer, by llguidance (the extra ``structured``)."""

FEATURE = "structured output"  # in messages about the missing extra
