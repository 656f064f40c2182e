"""What only a GPU can run, run without one: see ``tensors`` and ``machine``."""
