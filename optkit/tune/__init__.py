"""Tuning: from an objective to a recipe and serve options within the objective, with the evidence.

``calibration`` measures an artifact for ``optkit.simulation``, ``search`` decides on builds, simulations, races and
the ``confirmation``, ``journal`` keeps finished trials, and ``report`` writes the recipe and the log.

The package is a function, too: ``optkit.tune(model, slo)`` is ``optkit.api.tune.tune``.
"""

from optkit.callable_package import make_callable

make_callable(__name__)
