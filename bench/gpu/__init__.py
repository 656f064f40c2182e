"""All measurements on a GPU: ``python -m bench.gpu.run``."""
