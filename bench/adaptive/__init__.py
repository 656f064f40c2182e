"""Limits of the scheduler after live latencies, against the best fixed limits, in simulation."""
