"""A machine for tests of tuning: servers are simulations with true costs, and time passes on a virtual clock."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from optkit.bench.records import Chunk, RequestRecord
from optkit.bench.slo import Load
from optkit.bench.workload import BenchRequest, RequestSchedule
from optkit.errors import UserError
from optkit.recipe.engine_options import engine_options
from optkit.recipe.load import load_recipe
from optkit.recipe.schema import Recipe
from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.simulation.simulator import Overheads, simulate
from optkit.simulation.step_costs import StepCosts
from optkit.tune.calibration import Calibration
from optkit.tune.lab import Run, Shape
from optkit.tune.settings import Setting

FAST = StepCosts((0.006, 2e-4, 2e-4, 5e-4, 1e-8, 1e-6))
LIMITS = SchedulerConfig(
    max_num_seqs=16, max_num_batched_tokens=2048, max_model_len=4096, block_size=32, num_blocks=2000
)
SLOW = StepCosts((0.03, 1.6e-3, 1.6e-3, 1e-3, 1e-7, 2e-6))


class FakeLab:
    """A ``Lab`` with recipes by name and their true costs.

    Args:
        noise: standard deviation of the logarithm of a request's times.
        kill_after: the measured run in which ``KeyboardInterrupt`` ends the search, counted from 1.
    """

    def __init__(
        self, truth: dict[str, StepCosts], shape: Shape, noise: float = 0.02, kill_after: int | None = None
    ) -> None:
        self.truth, self.shape, self.noise, self.kill_after = truth, shape, noise, kill_after
        self.now = 0.0
        self.calls: list[str] = []
        self.broken: dict[str, str] = {}
        self.refused: set[str] = set()  # settings whose server does not start
        self.build_seconds = 30.0

    def clock(self) -> float:
        return self.now

    def recipe(self, name: str) -> Recipe:
        return load_recipe(name)

    def build(self, name: str, timeout: float) -> dict[str, object]:
        self.calls.append(f"build {name}")
        self.now += min(self.build_seconds, timeout)
        if name in self.broken or self.build_seconds > timeout:
            raise UserError(self.broken.get(name, "not built in time"), where=name)
        return {"artifact": name, "quality": ["as the source"]}

    def calibrate(self, name: str) -> dict[str, object]:
        self.calls.append(f"calibrate {name}")
        self.now += 25.0
        off = StepCosts(tuple(1.03 * value for value in self.truth[name].coefficients))
        return Calibration(off, Overheads(request=0.01), 25.0).to_dict()

    def scheduler_config(self, setting: Setting) -> SchedulerConfig:
        self.now += 0.2  # so that few settings fit the time of a test
        options = engine_options(self.recipe(setting.recipe), dict(setting.options))
        return SchedulerConfig(
            **options.scheduling(),
            max_model_len=2048,
            num_blocks=(options.kv_cache_bytes or 0) // (1 << 18),
            prefill_target_tokens=256,
        )

    def requests(self, count: int, seed: int) -> RequestSchedule:
        generator = np.random.default_rng(seed)
        rate = self.shape.load.rate
        gaps = generator.exponential(1 / rate, count) if rate else np.zeros(count)
        made = [
            BenchRequest(
                i,
                tuple(range(i * 1000, i * 1000 + self.shape.input_len)),
                self.shape.output_len,
                float(at),
            )
            for i, at in enumerate(gaps.cumsum() - gaps[0])
        ]
        return RequestSchedule(self.shape.config(count, seed), tuple(made))

    @contextmanager
    def serving(self, settings: Sequence[Setting]) -> Iterator[tuple[Run, dict[Setting, str]]]:
        self.now += 5.0 * len(settings)
        yield self.run, {s: "the server did not start" for s in settings if s.key in self.refused}

    def run(self, setting: Setting, schedule: RequestSchedule, limit: float) -> list[RequestRecord]:
        self.calls.append(f"run {setting.key} {schedule.config.seed}")
        if (
            self.kill_after is not None
            and sum(call.startswith("run") for call in self.calls) >= self.kill_after
        ):
            raise KeyboardInterrupt
        before, config, load = self.now, self.scheduler_config(setting), self.shape.load
        self.now = before
        found = simulate(
            config,
            self.truth[setting.recipe],
            schedule.requests,
            clients=load.clients,
            overheads=Overheads(request=0.01),
        )
        self.now += min(found.seconds, limit)
        seed = zlib.crc32(f"{setting.key} {schedule.config.seed}".encode())
        noise = np.random.default_rng(seed)
        records = [stretched(r, float(noise.lognormal(0, self.noise))) for r in found.records]
        return [r if r.done and r.done < limit else replace(r, error="cut off") for r in records]


def stretched(record: RequestRecord, factor: float) -> RequestRecord:
    """``record`` with all times after sending multiplied by ``factor``."""
    chunks = [Chunk(record.send + factor * (c.time - record.send), c.tokens) for c in record.chunks]
    done = None if record.done is None else record.send + factor * (record.done - record.send)
    return replace(record, chunks=chunks, done=done)


def shape(rate: float | None = 2.0, clients: int | None = None, input_len: int = 512) -> Shape:
    return Shape(input_len, 4, Load(rate=rate, clients=clients))
