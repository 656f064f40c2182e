"""Servers of the settings of a race or a confirmation, started by the first run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from optkit.bench.records import RequestRecord
from optkit.bench.workload import RequestSchedule
from optkit.tune.journal import TrialFailed
from optkit.tune.lab import Lab, Run
from optkit.tune.settings import Setting


class Servers:
    """A context in which ``settings`` can run. A resumed search starts none for earlier trials.

    Args:
        settings: to run.
    """

    def __init__(self, lab: Lab, settings: Sequence[Setting]) -> None:
        self.lab, self.settings = lab, settings
        self._stack = ExitStack()
        self._run: Run | None = None
        self._failed: dict[Setting, str] = {}

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, setting: Setting, schedule: RequestSchedule, limit: float) -> list[RequestRecord]:
        """The records of a run; requests longer than ``limit`` seconds are cut off.

        Raises:
            TrialFailed: the server did not start.
        """
        if self._run is None:
            self._run, self._failed = self._stack.enter_context(self.lab.serving(self.settings))
        if setting in self._failed:
            raise TrialFailed(self._failed[setting])
        return self._run(setting, schedule, limit)
