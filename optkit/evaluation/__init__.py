"""Measured speed and quality of a graph, through the runtime."""
