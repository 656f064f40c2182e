"""Lowering: a graph becomes calls of kernels, with a predicted cost."""
