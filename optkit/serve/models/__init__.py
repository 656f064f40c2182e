"""Several artifacts behind one port: each has an engine process, loaded on demand within a memory budget.

==============  =========================================================================
``dispatcher``  the application at the port: finds the model of a request and passes it on
``pool``        the order of loads and unloads: budget, least recently used, time limits
``served``      one artifact: its engine, its application, its metrics
``memory``      the memory that an artifact needs, and the memory of the machine
``metrics``     loads, unloads and waits; the metrics of all models on one page
``server``      the process: socket, signals, ready line
==============  =========================================================================

Each artifact has the application of ``optkit.serve.app``, so the protocols are the same for one and for several.
A server of one artifact imports nothing from here.
"""
