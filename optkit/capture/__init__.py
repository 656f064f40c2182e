"""Capture: a Hugging Face causal LM becomes a Graph. See ``directory``, ``export``, ``flatten``, ``canonicalize``."""

from optkit.capture.directory import capture_directory
from optkit.capture.export import capture

__all__ = ["capture", "capture_directory"]
