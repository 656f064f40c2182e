"""Figures of a fleet: routing, transfer of KV, failover, scaling and updates, each by a module of its own."""
