"""Predictions of ``optkit plan`` against measurements through the runtime, and sweeps of chunk size and waiting."""
