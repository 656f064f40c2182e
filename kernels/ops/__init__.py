"""Kernels: reference.py is the spec of each dialect op; select() picks the implementation."""
