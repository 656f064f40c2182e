"""Several replicas of an artifact behind one server: routing, transfer of KV, failover, scaling.

Few modules import Ray, each with a note in the docstring. The rest decides on plain values, tested without a cluster.
"""
