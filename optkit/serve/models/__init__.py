"""Several artifacts behind one port: an engine process each, loaded on demand within a memory budget.

==============  =========================================================================
``dispatcher``  the application at the port: finds the model of a request, passes the request on
``pool``        the order of loads and unloads: budget, least recent use, time limits
``place``       the state of a model in the pool
``served``      an artifact: engine, application, metrics
``memory``      the memory of an artifact, and the default budget
``metrics``     loads, unloads and waits; the metrics of all models on a page
``server``      the process: socket, signals, ready line
==============  =========================================================================

Each artifact has the application of ``optkit.serve.app``, so the protocols are the same for a single artifact and for
several. A server of a single artifact imports nothing from here.
"""
