"""The simulator of ``optkit tune`` against the real engine (``python -m bench.simulator``)."""
