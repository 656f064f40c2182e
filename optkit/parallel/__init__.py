"""Tensor parallel: a model on several ranks, each with its share of every layer.

``rank_graph`` rewrites the artifact's graph for one rank, at load: files and report stay those of one process.
"""
