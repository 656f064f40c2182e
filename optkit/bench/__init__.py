"""Benchmarks over HTTP: the same client and workload for several servers in turn, with raw records.

``workload`` builds prompts and arrivals, ``client`` sends them and writes ``records``, ``metrics`` turns records into
numbers, ``servers`` starts the measured servers, ``run`` interleaves the sides and pairs the results.

The package is a function, too: ``optkit.bench(artifact)`` is ``optkit.api.bench.bench``.
"""

from optkit.callable_package import make_callable

make_callable(__name__)
