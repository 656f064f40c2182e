"""Capture: a Hugging Face causal LM becomes a Graph. See ``export``, ``flatten``, ``canonicalize``."""

from optkit.capture.export import capture, capture_directory

__all__ = ["capture", "capture_directory"]
