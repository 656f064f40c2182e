"""Limits of the scheduler that follow live latencies, against the best fixed limits, in simulation."""
