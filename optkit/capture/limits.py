"""Limits of the capture. Nothing heavy is imported."""

MAX_LOADED_BYTES = 4 << 30  # of float32 weights, up to which transformers loads the model
