"""optkit beside other engines: the same client and prompts, every server in turn over HTTP.

    python -m bench.peers --artifact artifact/ --model smollm2-135m

``peer`` defines the interface of an adapter; ``*_peer`` are the adapters. The names differ from the engines' own
modules, since ``openvino_server`` runs from the same folder as a script. ``workloads`` lists the requests and the
figures, ``measure`` starts the servers and takes the rounds, ``result`` is the JSON. The load generator, the records
and the formulas come from ``optkit.bench``.
"""
