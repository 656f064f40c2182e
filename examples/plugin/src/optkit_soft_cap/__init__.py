"""Soft-capped logits in one op: a plug-in for optkit."""
