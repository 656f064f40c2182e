"""The machine with an artifact, and the requests of both comparisons."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from optkit.bench import arrivals, workload
from optkit.bench.records import RequestRecord
from optkit.bench.workload import RequestSchedule, WorkloadConfig
from optkit.errors import UserError
from optkit.simulation.simulator import capacity
from optkit.text.load import load_tokenizer
from optkit.tune.calibration import Calibration
from optkit.tune.lab import Machine, Run, Shape, refuse_failures
from optkit.tune.settings import Setting

SETTING = Setting("artifact")
LIMIT = 300.0  # seconds of a run


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

    def calibrated(self) -> Calibration:
        """A new calibration of the artifact."""
        known = Calibration.from_dict(self.calibrate("artifact"))
        mean, slowest = known.pace.mean, max(known.pace.slowness)
        print(known.costs, known.overheads, sep="\n")
        print(f"pace: {mean:.3f} of the median time of a step, the slowest {slowest:.2f}")
        print(f"in {known.seconds:.0f} s", flush=True)
        return known

    def capacity(self, known: Calibration, seed: int, setting: Setting = SETTING) -> float:
        """The simulated capacity of ``setting``, by default the recipe's own, in requests a second."""
        probe = at_rate(self, 1.0, 48, seed).requests
        return capacity(self.scheduler_config(setting), known.costs, probe, known.overheads, known.pace)

    @contextmanager
    def serving_all(self, *settings: Setting) -> Iterator[Run]:
        """A server for each of ``settings``; a run with failed requests is refused.

        Raises:
            UserError: a server does not start, or a request fails.
        """

        def answered(setting: Setting, schedule: RequestSchedule, limit: float) -> list[RequestRecord]:
            records = run(setting, schedule, limit)
            refuse_failures(records, setting.key)
            return records

        with self.serving(settings) as (run, failed):
            if failed:
                fix = "measure fewer settings (--rank)" if len(settings) > 1 else None
                raise UserError("; ".join(failed.values()), where=str(self._artifact), fix=fix)
            yield answered


def at_rate(
    machine: OneArtifact, rate: float, count: int, seed: int, repeat: int = 0, burstiness: float = 1.0
) -> RequestSchedule:
    """``count`` requests at ``rate``. Repeats of a seed have the same arrivals and other prompts.

    Bursts have exactly the rate: by chance alone, a round of 32 requests in bursts is at half of it or twice.
    """
    shape = machine.shape
    config = WorkloadConfig(count, shape.input_len, shape.output_len, None, rate, seed, burstiness)
    schedule = workload.build(config, machine.ids(), repeat, arrival_round=0)
    if burstiness == 1:
        return schedule
    times = arrivals.at_rate([request.arrival for request in schedule.requests], rate)
    pairs = zip(schedule.requests, times, strict=True)
    return replace(schedule, requests=tuple(replace(request, arrival=at) for request, at in pairs))
