"""Checkpoints in and out: locating, validating, reading and writing Hugging Face directories."""
