"""Benchmarks over HTTP: one client, one workload, several servers in turn, raw records kept.

``workload`` builds the prompts and arrivals, ``client`` sends them and writes ``records``, ``metrics`` turns records
into numbers, ``servers`` starts what is measured, ``run`` interleaves the sides and pairs the results.
"""
