"""Profiles: each op of a prefill and a decode step against its roof (docs/profiling.md).

A recording (``recording``) of some steps of an engine becomes timelines (``timeline``), a report against the roofs
(``report``) and files (``files``). Nothing is formatted while a step runs, and without a recording a step runs the same
code as ever.
"""
