"""optkit beside other engines: one client, the same prompts, every server in turn over HTTP.

    python -m bench.peers --artifact artifact/ --model smollm2-135m

``peer`` says what an adapter is; ``*_peer`` are the adapters (their names keep clear of the engines' own modules, since
``openvino_server`` runs from this folder as a script); ``workloads`` is what is sent and which figures follow;
``measure`` starts the servers and takes the rounds; ``result`` is the JSON. The load generator, its records and its
formulas are those of ``optkit.bench``.
"""
