"""Embeddings: agreement with transformers, and the gain of a batch of texts."""
