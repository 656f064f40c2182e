"""Benchmarks over HTTP: the same client and workload for several servers in turn, with raw records.

``workload`` builds prompts and arrivals, ``client`` sends them and writes ``records``, ``metrics`` turns records into
numbers, ``servers`` starts the measured servers, ``run`` interleaves the sides and pairs the results.
"""
