"""A model on several ranks: each has a share of every layer (tensor parallel), or some layers (pipeline parallel).

``rank_graph`` and ``stages`` rewrite the artifact's graph for a rank, at load; files and report do not change.
"""
