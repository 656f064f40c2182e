"""Tuning: from an objective to the recipe and the serve options that hold it, with the evidence.

``step_costs`` and ``calibration`` measure an artifact, ``simulator`` runs the real scheduler on a virtual clock,
``search`` decides what is built, simulated, raced and confirmed, ``journal`` keeps finished trials, and ``report``
writes the recipe and the log.

The package is a function, too: ``optkit.tune(model, slo)`` is ``optkit.api.tune.tune``.
"""

from optkit.callable_package import make_callable

make_callable(__name__)
