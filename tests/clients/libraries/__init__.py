"""Clients of openai 2 and load generators, in ``.clients``."""
