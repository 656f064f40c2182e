"""Tensor parallel: a model on several ranks, each with a share of every layer.

``rank_graph`` rewrites the artifact's graph for a rank, at load; files and report do not change.
"""
