"""Layers compiled by torch.compile, and the signed cache of their code."""
