"""The Python API: the functions of ``import optkit``, which the commands call, too.

``progress`` has the events of long calls, ``results`` the dataclasses of answers, ``html`` their tables in notebooks,
``guard`` makes every error an exception of optkit. ``llm`` runs an engine process, driven by ``engine_thread``.
"""
