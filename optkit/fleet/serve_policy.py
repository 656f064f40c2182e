"""The autoscaling policy in the form for Ray Serve, which pickles class and module by value.

A class of ``msgspec`` does not survive the pickling, so nothing but a call stands here; the import is made in Serve's
controller.
"""

from __future__ import annotations

from typing import Any


class PredictedTtftPolicy:
    """``optkit.fleet.autoscale.predicted_ttft_policy`` with ``options``, given by Serve to classes alone."""

    def __init__(self, **options: Any) -> None:
        self._options = options

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        from optkit.fleet.autoscale import predicted_ttft_policy

        return predicted_ttft_policy(context, **self._options)
