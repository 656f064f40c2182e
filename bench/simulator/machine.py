"""The machine with an artifact, and the requests of both comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from optkit.bench import workload
from optkit.bench.records import RequestRecord
from optkit.bench.workload import RequestSchedule, WorkloadConfig
from optkit.text.load import load_tokenizer
from optkit.tune.lab import Machine, Shape

LIMIT = 300.0  # seconds of a run
SINGLE = 4  # requests of one client before and after a run, for the drift of the machine


class OneArtifact(Machine):
    """The machine with one finished artifact, under the name ``artifact``."""

    def __init__(self, artifact: Path, shape: Shape) -> None:
        super().__init__(
            str(artifact),
            {"artifact": str(artifact / "optkit" / "recipe.yaml")},
            artifact.parent,
            shape,
            lambda line: print(line, flush=True),
        )
        self._artifact = artifact

    def artifact(self, _name: str) -> Path:
        return self._artifact

    def ids(self) -> list[int]:
        self._ids = self._ids or workload.text_ids(load_tokenizer(str(self._artifact)))
        return self._ids


def at_rate(machine: OneArtifact, rate: float, count: int, seed: int) -> RequestSchedule:
    """``count`` requests at ``rate``."""
    shape = machine.shape
    config = WorkloadConfig(count, shape.input_len, shape.output_len, None, rate, seed)
    return workload.build(config, machine.ids())


def single(machine: OneArtifact) -> RequestSchedule:
    """``SINGLE`` requests in turn."""
    shape = machine.shape
    return workload.build(
        WorkloadConfig(SINGLE, shape.input_len, shape.output_len, 1, None, 77), machine.ids()
    )


def median_seconds(records: Sequence[RequestRecord]) -> float:
    """The median time from sending to the end."""
    return float(np.median([record.done - record.send for record in records if record.done is not None]))
